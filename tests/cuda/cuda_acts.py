"""More for the stream machines to do: what other threads, libraries, captures and failures do.

`Acting` is `cuda_machine.StreamMachine` with these rules:

- another thread lets blocks go, trims and allocates at any call of the driver, and whenever an
  object of the user is asked for its stream or its memory (`meanwhile`, `copy_under_attack`);
- the iterable of a batch releases what it has yielded (`copy_batch`);
- a captured copy, of memory that its earlier owner's kernels have yet to write, is replayed at any
  time (`capture`, `replay`, `destroy_graph`);
- blocks are allocated in a capture, and some of them dropped in it (`capture_of_its_own`);
- arrays of other libraries get other storage while arenapy copies or lends it (`copy_from_array`,
  `borrow`, `swap`);
- the driver fails after a copy was queued, or while a block is released (`copy_that_fails`,
  `drop_that_fails`).
"""

import contextlib
import ctypes
import threading

import hypothesis.strategies as st
from cuda_machine import NON_BLOCKING, Block, StreamMachine, Wrapped, one_of, when_there
from helpers import peek, poke
from hypothesis import event
from hypothesis.stateful import rule
from simulated_gpu import GLOBAL, RELAXED
from test_cuda_storage import FREED, Both, Dlpack, N, Refusing, Torch

from arenapy import OutOfMemory, cuda
from arenapy.cuda.stream_ref import OWNERS

LEGACY = 1
UNKNOWN = 999
MOMENT = 0.01  # seconds, in which a thread that can go on makes a call of the driver
PATIENCE = 4  # such moments; then it waits for the machine's own thread, it seems
POLLS = 200  # calls of the driver, which no act needs
SMALL = 100_000  # bytes: so many of another memory fit beside the allocator's
STORAGES = 200  # of an example
LIBRARIES = (Dlpack, Both, Torch, Refusing)
QUEUEING = ("cuMemcpyAsync", "cuMemcpyPeerAsync", "cuMemsetD8Async")
#: What may fail when there is something to do for the device, or when it was released.
LATER = (
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuStreamIsCapturing",
    "cuPointerGetAttribute",
)


class Asked(Wrapped):
    """A stream object, whose code runs when it is asked for its handle."""

    def __init__(self, handle, point):
        super().__init__(handle)
        self.point = point

    def __cuda_stream__(self):
        self.point("a stream is asked")
        return super().__cuda_stream__()


OWNERS[Asked.__module__, Asked.__qualname__] = lambda stream: True


class Graph:
    """A graph with a copy in it. `target`: the block that it writes, if its user still has it.

    Or a list of the blocks of its own that its user has.
    """

    def __init__(self, handle, target, source):
        self.handle, self.target, self.source = handle, target, source
        self.replayed = False


class Acting(StreamMachine):
    def __init__(self):
        self.act, self.left = None, 0
        self.failing = None
        self.me = threading.get_ident()
        self.thread, self.errors = None, []
        self.graphs, self.arrays, self.borrowed, self.far = [], [], [], []
        super().__init__()
        self.capturing = {
            blocking: Wrapped(self.new_handle(0 if blocking else NON_BLOCKING))
            for blocking in (False, True)
        }
        self.storages = self.driver.got("cuMemAlloc", ctypes.c_uint64, STORAGES * N)
        self.n_storages = 0
        self.driver.before_call = self.point
        self.arrays.append(Owner(self, Torch))

    # ---- what happens in between ----

    def point(self, name):
        """At each call of the driver, and whenever an object of the user is asked."""
        if threading.get_ident() != self.me:
            return
        if self.failing and name in QUEUEING:
            self.driver.fails[self.failing] = UNKNOWN
        if (thread := self.thread) is not None:  # it waited for this one
            self.let_it_run(thread)
        elif self.act is not None:
            self.left -= 1
            if self.left <= 0:
                self.fire()

    def fire(self):
        act, self.act = self.act, None
        self.thread = thread = threading.Thread(target=self.elsewhere, args=(act,))
        thread.start()
        self.let_it_run(thread)

    def let_it_run(self, thread):
        """To its end, or until it waits for this thread: it calls nothing, or over and over.

        What ends meanwhile may come here, too, and forget the thread.
        """
        calls = self.driver.calls
        now, idle, most = calls.total(), 0, calls.total() + POLLS
        while thread.is_alive() and idle < PATIENCE and now < most:
            thread.join(MOMENT)
            now, before = calls.total(), now
            idle = idle + 1 if now == before else 0
        if not thread.is_alive():
            self.thread = None

    def elsewhere(self, act):
        try:
            with self.driver.on(0):
                act()
        except BaseException as error:
            self.errors.append(error)

    def join(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def interrupt(self, n, act):
        self.act, self.left = act, n

    def bookkeeping_holds(self):
        """An invariant."""
        self.join()
        if self.errors:
            raise self.errors.pop()
        super().bookkeeping_holds()

    # ---- within rules ----

    def wrapped(self, handle):
        return Asked(handle, self.point)

    def object_of(self, stream):
        """The handle, and what arenapy is given."""
        handle = None if stream is None else self.handles[stream]
        return handle, None if handle is None else self.objects[handle]

    def fresh(self, nbytes, stream=None):
        with contextlib.suppress(OutOfMemory):
            return self.allocator.alloc(nbytes, stream=stream)
        event("out of memory")
        return None

    def new_pattern(self):
        self.patterns = self.patterns % 255 + 1
        return self.patterns

    def written(self, buffer, stream):
        """A new block, whose user writes it on a stream, or (None) at once."""
        block = Block(buffer, self.new_pattern(), None)
        if stream is None:
            poke(block.address, block.nbytes, self.patterns)
        else:
            self.write(block, stream)
        return block

    def victim(self, nbytes):
        """Somebody gets memory without a stream, and writes it as soon as can be."""
        self.allocator.stats()  # what is over is free
        with contextlib.suppress(OutOfMemory):
            buffer = self.allocator.alloc(nbytes)
            self.blocks.append(self.written(buffer, None if self.HOST else LEGACY))

    def let_go(self, block, then):
        """`block` is released, unless a call uses it, and its memory is another one's."""
        with contextlib.suppress(BufferError):
            block.buffer.release()
        if block.buffer.closed:
            self.blocks.remove(block)
            self.victim(block.nbytes)
        for name in then:
            if hasattr(self.allocator, name):
                getattr(self.allocator, name)()

    def ready_for(self, block, handle):
        """Its user lets a stream, or (None) what names none, come after who wrote it."""
        if handle is None and block.writer not in (None, LEGACY):
            assert self.driver.call("cuStreamSynchronize", block.writer) == 0
        elif handle is not None:
            self.order(block.writer, handle)

    def copied(self, buffer, block, handle):
        """A block with the same bytes, written by a copy that was given to a stream."""
        copy = Block(buffer, 0, handle)
        copy.pattern = block.pattern
        return copy

    @rule(n=st.integers(1, 30))
    def newest_first(self, n):
        """What was given last runs first, as far as it may."""
        self.note("newest first", n)
        for _ in range(n):
            self.driver.step(-1)

    # ---- rules: threads, iterables, callbacks ----

    a_stream = st.none() | StreamMachine.streams
    housekeepers = st.lists(st.sampled_from(["trim", "stats"]), max_size=2)

    @when_there(block=StreamMachine.a_block, stream=StreamMachine.streams, n=st.integers(1, 30),
          then=housekeepers, more=st.booleans())  # fmt: skip
    def meanwhile(self, block, stream, n, then, more):
        """What comes next is interrupted: another thread drops this, and may take some."""
        if self.act is not None:
            return  # something else is to be done in between
        handle, named = self.object_of(stream)
        self.note("meanwhile", block.address, handle, n, then, more)
        self.check(block, handle)
        block.buffer.record_stream(named)
        self.blocks.remove(block)
        other = self.handles[2]

        def act():
            block.buffer = None
            for name in then:
                if hasattr(self.allocator, name):
                    getattr(self.allocator, name)()
            if more:
                with contextlib.suppress(OutOfMemory, cuda.CudaError):  # a capture may bar it
                    taken = self.allocator.alloc(block.nbytes, stream=self.objects[other])
                    self.blocks.append(self.written(taken, other))

        self.interrupt(n, act)

    @when_there(
        block=StreamMachine.a_block, stream=a_stream, n=st.integers(1, 20), then=housekeepers
    )
    def copy_under_attack(self, block, stream, n, then):
        """Another thread releases what is copied."""
        if self.act is not None:
            return  # something else is to be done in between
        handle, named = self.object_of(stream)
        self.note("copy under attack", block.address, handle, n, then)
        if self.HOST and stream is None:
            return  # the processor copies, and asks nobody
        other = self.fresh(block.nbytes, named)
        if other is None:
            return
        self.ready_for(block, handle)
        self.interrupt(n, lambda: self.let_go(block, then))
        try:
            other.copy_from(block.buffer, stream=named)
        except (ValueError, BufferError):
            assert block.buffer.closed
        else:
            self.check(self.copied(other, block, handle or LEGACY), handle or LEGACY)
        self.act = None
        self.join()

    @when_there(first=StreamMachine.a_block, second=StreamMachine.a_block,
                stream=a_stream, then=housekeepers)  # fmt: skip
    def copy_batch(self, first, second, stream, then):
        """The iterable releases each as soon as it was yielded."""
        blocks = [first] if first is second else [first, second]
        handle, named = self.object_of(stream)
        self.note("copy batch", [block.address for block in blocks], handle, then)
        targets = [self.fresh(block.nbytes, named) for block in blocks]
        if None in targets or (self.HOST and stream is None):
            return
        for block in blocks:
            self.ready_for(block, handle)

        def pairs():
            for block, target in zip(blocks, targets, strict=True):
                yield target, block.buffer
                self.let_go(block, then)

        try:
            cuda.copy_batch(pairs(), stream=named)
        except ValueError:
            assert any(block.buffer.closed for block in blocks)
            return
        for block, target in zip(blocks, targets, strict=True):
            self.check(self.copied(target, block, handle or LEGACY), handle or LEGACY)
            if handle is None and not self.HOST:
                assert self.driver.call("cuStreamSynchronize", LEGACY) == 0

    # ---- rules: captures ----

    a_graph = one_of(lambda self: self.graphs)
    inside = st.lists(st.sampled_from(["drop", "look", "step", "let go"]), max_size=3)

    @when_there(source=one_of(lambda self: self.blocks + self.arrays),
          blocking=st.booleans(), named=st.booleans(), keep=st.booleans(), inside=inside,
          mode=st.sampled_from([GLOBAL, RELAXED]), former=st.booleans(),
        then=st.none() | StreamMachine.streams)  # fmt: skip
    def capture(self, source, blocking, named, keep, inside, mode, former, then):
        """A copy to memory that was somebody's until now, whose kernels may be under way."""
        of_array = source in self.arrays
        stream = self.capturing[blocking]
        pattern = bytes([source.pattern]) * N if of_array else source.pattern
        self.note("capture", len(pattern), blocking, named, keep, inside, mode)
        if former and not self.HOST and (before := self.fresh(len(pattern))) is not None:
            self.written(before, LEGACY)
            del before
        buffer = self.fresh(len(pattern))
        if buffer is None:
            return
        if "let go" in inside:
            if not self.borrowed:
                self.borrow(self.arrays[0], 2)
            self.use_loan(self.borrowed[-1], 0, False)  # on the legacy stream
        self.join()  # a thread that is about to use the legacy stream would make it invalid
        self.driver.begin_capture(stream.handle_, mode)
        copied = True
        try:
            buffer.copy_from(
                source.array if of_array else source.buffer,
                stream=stream if named else stream.handle_,
            )
        except cuda.CudaError as error:
            assert blocking and not self.HOST and "legacy default stream" in str(error)
            copied = False
        target = Block(buffer, 0, None)
        target.pattern = pattern
        if copied:
            self.check(target, stream.handle_)
        for act in inside:
            self.within_capture(act, source)
        if not keep:
            target.buffer = None
        del buffer
        graph = self.driver.end_capture(stream.handle_)
        assert graph, "the capture was invalidated"
        if copied:
            writer = None if of_array else source.writer
            self.graphs.append(Graph(graph, target, writer))
            if then is not None:
                self.replay(self.graphs[-1], then, True)
        else:
            self.driver.destroy_graph(graph)

    steps = st.lists(
        st.tuples(
            st.sampled_from(["alloc", "alloc", "joined", "drop", "look", "step"]),
            st.sampled_from([4096, 40_000, 300_000]),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )

    @rule(steps=steps, blocking=st.booleans(), mode=st.sampled_from([GLOBAL, RELAXED]))
    def capture_of_its_own(self, steps, blocking, mode):
        """Blocks of the graph: each is written and checked in it, whenever it is launched."""
        origin, joined = self.capturing[blocking], self.capturing[not blocking]
        self.note("capture of its own", steps, blocking, mode)
        self.join()  # a thread that is about to use the legacy stream would make it invalid
        self.driver.begin_capture(origin.handle_, mode)
        kept = []
        for act, nbytes, named in steps:
            if act in ("alloc", "joined"):
                stream = origin if act == "alloc" else joined
                if stream is joined:
                    self.order(origin.handle_, joined.handle_)
                buffer = self.fresh(nbytes, stream if named else stream.handle_)
                if buffer is not None:
                    block = Block(buffer, self.new_pattern(), None)
                    self.write(block, stream.handle_)
                    self.check(block, stream.handle_)
                    kept.append(block)
                buffer = None
                if stream is joined:
                    self.order(joined.handle_, origin.handle_)
            elif act == "drop" and kept:
                kept.pop(nbytes % len(kept)).buffer = None
            else:
                self.within_capture(act, None)
        for block in kept:
            self.check(block, origin.handle_)
        block = None
        graph = self.driver.end_capture(origin.handle_)
        assert graph, "the capture was invalidated"
        self.graphs.append(Graph(graph, kept, None))

    def within_capture(self, act, source):
        if act == "drop" and source in self.blocks:
            self.forget(source)
        elif act == "look":
            self.housekeeping("stats")
            self.housekeeping("trim")
        elif act == "step":
            self.driver.step(-1)
        elif act == "let go" and self.borrowed:
            self.borrowed.pop().buffer = None

    @when_there(graph=a_graph, stream=StreamMachine.streams, at_once=st.booleans())
    def replay(self, graph, stream, at_once):
        """`at_once`: the graph runs as soon as it may, before what was given earlier."""
        handle = self.handles[stream]
        self.note("replay", graph.handle, handle)
        self.order(graph.source, handle)
        self.driver.replay(graph.handle, handle)
        target = graph.target
        if isinstance(target, list):  # blocks of its own, which nobody but the graph writes
            if at_once:
                self.newest_first(30)
            return
        target.writer = handle
        if target.buffer is not None and not graph.replayed and not target.buffer.closed:
            self.blocks.append(target)
        graph.replayed = True
        if at_once:
            self.newest_first(30)
            if target in self.blocks:
                self.check(target, handle)

    @when_there(graph=a_graph)
    def destroy_graph(self, graph):
        self.note("destroy graph", graph.handle)
        self.graphs.remove(graph)
        self.driver.destroy_graph(graph.handle)

    # ---- rules: other libraries' arrays ----

    an_array = one_of(lambda self: self.arrays)
    a_loan = one_of(lambda self: self.borrowed)

    @rule(library=st.sampled_from(LIBRARIES))
    def meet(self, library):
        self.note("meet", library.__name__)
        self.arrays.append(Owner(self, library))

    @when_there(owner=an_array)
    def swap(self, owner):
        """`t.data = other`: nobody but who keeps the storage has the old one."""
        self.note("swap")
        owner.swap()

    @when_there(owner=an_array, stream=a_stream, n=st.integers(0, 20),
          call=st.none() | st.sampled_from(LATER))  # fmt: skip
    def copy_from_array(self, owner, stream, n, call):
        """Its owner may exchange the storage meanwhile; or it is queued, and then a call fails."""
        if self.act is not None:
            return  # something else is to be done in between
        handle, named = self.object_of(stream)
        self.note("copy from an array", handle, n, call)
        buffer = self.fresh(N, named)
        if buffer is None:
            return
        patterns = [owner.pattern]
        if call:
            with self.failure(call, later=True), contextlib.suppress(cuda.CudaError):
                buffer.copy_from(owner.array, stream=named)
            owner.swap()
        else:
            if n:
                self.interrupt(n, lambda: patterns.append(owner.swap()))
            buffer.copy_from(owner.array, stream=named)
            self.act = None
            self.join()
        address, wrong = buffer.address, self.wrong

        def run():
            if set(peek(address, N)) not in [{one} for one in patterns]:
                wrong.append((address, N, "an array's"))

        if self.HOST and handle is None and not call:
            run()
        else:
            self.driver.launch(handle or LEGACY, run, [(address, N)])
            if self.HOST or handle is None:
                buffer.record_stream(named or LEGACY)

    @when_there(owner=an_array, stream=a_stream)
    def borrow(self, owner, stream):
        handle, named = self.object_of(stream)
        self.note("borrow", handle)
        buffer = cuda.asbuffer(owner.array, stream=named)
        self.borrowed.append(Block(buffer, owner.pattern, None))

    @when_there(loan=a_loan, stream=StreamMachine.streams, go=st.booleans())
    def use_loan(self, loan, stream, go):
        handle, named = self.object_of(stream)
        self.note("use a loan", loan.address, handle)
        self.check(loan, handle)
        loan.buffer.record_stream(named)
        if go:
            self.borrowed.remove(loan)
            loan.buffer = None

    # ---- rules: failures ----

    @contextlib.contextmanager
    def failure(self, call, later):
        """`later`: once something was queued."""
        if later:
            self.failing = call
        else:
            self.driver.fails[call] = UNKNOWN
        try:
            yield
        finally:
            self.failing = None
            self.driver.fails.clear()

    @when_there(block=StreamMachine.a_block, stream=a_stream, call=st.sampled_from(LATER),
          out=st.booleans(), keep=st.booleans())  # fmt: skip
    def copy_that_fails(self, block, stream, call, out, keep):
        """To or from memory elsewhere; it is done all the same."""
        handle, named = self.object_of(stream)
        self.note("copy that fails", block.address, handle, call, out, keep)
        if block.nbytes > SMALL:
            return
        far = cuda.Device().region(block.nbytes).buffer()
        self.far.append(far)  # to the end
        far_block = self.copied(far, block, handle or LEGACY)
        if out:
            self.ready_for(block, handle)
            with self.failure(call, later=True), contextlib.suppress(cuda.CudaError):
                block.buffer.copy_to(far, stream=named)
            self.check(far_block, handle or LEGACY)
            if not keep:
                self.forget(block)
                self.victim(block.nbytes)
            return
        poke(far.address, far.nbytes, block.pattern[0])
        buffer = self.fresh(block.nbytes, named)
        if buffer is None:
            return
        with self.failure(call, later=True), contextlib.suppress(cuda.CudaError):
            buffer.copy_from(far, stream=named)
        if stream is not None:
            self.check(self.copied(buffer, block, handle), handle)
        del buffer
        self.victim(block.nbytes)

    @when_there(
        block=StreamMachine.a_block, stream=StreamMachine.streams, call=st.sampled_from(LATER)
    )
    def drop_that_fails(self, block, stream, call):
        handle, named = self.object_of(stream)
        self.note("drop that fails", block.address, handle, call)
        self.check(block, handle)
        block.buffer.record_stream(named)
        with self.failure(call, later=False):
            self.forget(block)
        self.victim(block.nbytes)

    # ---- the end ----

    def end(self):
        if self.act is not None:
            self.join()
            self.fire()
        self.bookkeeping_holds()
        while self.graphs:
            self.destroy_graph(self.graphs[0])
        while self.borrowed:
            self.use_loan(self.borrowed[0], 0, True)
        self.arrays.clear()
        super().end()

    def teardown(self):
        self.act = None
        self.driver.before_call = None
        self.join()
        try:
            super().teardown()
        finally:
            for things in (self.graphs, self.arrays, self.borrowed, self.far):
                things.clear()


class Storage:
    """Of one byte; its memory is somebody else's at once when it ends."""

    def __init__(self, machine, pattern):
        self.driver = machine.driver
        assert machine.n_storages < STORAGES
        self.address = machine.storages + N * machine.n_storages
        machine.n_storages += 1
        poke(self.address, N, pattern)

    def __del__(self):
        if not self.driver.closed:
            poke(self.address, N, FREED)


class Owner:
    """Of an array of another library, whose storage it can exchange."""

    def __init__(self, machine, library):
        self.machine, self.pattern = machine, machine.new_pattern()
        storage = Storage(machine, self.pattern)
        self.array = library(machine.driver, storage, lambda *_: machine.point("an array is asked"))

    def swap(self):
        pattern = self.machine.new_pattern()
        self.array.storage = Storage(self.machine, pattern)
        self.pattern = pattern
        return pattern
