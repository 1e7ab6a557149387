"""Ordering: when memory that streams use may be used again.

What lives here: released blocks that wait for streams, and which streams wait when a block is lent
to another library. What does not: streams and events (stream, fence), copies (copies), other
objects that wait for streams (fence), which blocks are free (allocators).

A block of a device that only the allocator's own stream uses does not come here at all: the next
one that gets it uses it on that stream, too, and so after it. What another stream was told of
(`use`) comes here when it is released, and goes back when all of those have done what they were
given until then. Where the host sees the memory there is no own stream: this processor does not
wait for streams, so each of them counts.

A stream that is sure to exist needs no event at release: its blocks gather in an open batch, for
which an event is recorded when the allocator runs out of memory, or when they are many bytes or
many batches. For others (integers; default streams of threads) an event is recorded at release.
What a stream uses while it is captured into a graph waits for the end of the graph.

A block that is allocated for a captured stream belongs to the graph (`graph`). Its uses are the
graph and that stream. If it is released in the capture, and nothing else has used it, it is free at
once for that stream in that capture: the graph runs what uses it next after what used it before. To
all others it is free when the graph is gone, and with it all that was made from the graph.

Locks. `ended` is called by destructors, so it only pushes onto a list; then whoever finds `busy`
unset does the rest, which calls the driver, without the GIL and under no lock. Others leave what
they have to that thread, which looks again before it goes. A request for memory waits for it,
so it calls no code of the user: it asks only streams that are `lasting` whether they are closed.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from posix.unistd cimport usleep

from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_add, arenapy_cas, arenapy_cas_ptr, arenapy_load_ptr, arenapy_store,
    arenapy_sub, arenapy_take_ptr,
)
from arenapy.base.dicts cimport found_in
from arenapy.base.unseen cimport unseen_list
from arenapy.allocator.allocator cimport Allocator
from arenapy.allocator.allocator_core cimport AllocatorCore
from arenapy.buffer.block cimport (
    HOLD_IDLE, Block, Hold, MemoryOwner, StreamHooks, drop_use, note_use, pin, root_of,
    unpin, uses_of,
)
from arenapy.buffer.buffer cimport Buffer
from arenapy.memory.region cimport Region

from arenapy.cuda.driver cimport (
    SUCCESS, callable_, driver, forget, forked, generation, need, primary,
)
from arenapy.cuda.fence cimport (
    PATIENCE, EventFence, Fence, GraphFence, event_outside, follow, graph_fence_or_never,
    join_streams, late_work_of, let_wait as let_stream_wait, look, new_graph_fence, park,
    somebody_drops, synchronize, wait_for_those, wait_here, wait_outside, work_of,
)
from arenapy.cuda.stream_ref cimport (
    CAPTURING, FREE_TO_USE, UNKNOWN, OwnStream, StreamRef, barrier_stream, core_handle, device_of,
    free_to_use, elsewhere, handle_of, named_now, not_closed, number_of, owns, refuse_unless_free,
    spread, stream_of, thread_stream,
)
from arenapy.base.sealed cimport seal

import sys
import weakref
from heapq import heappop, heappush

from arenapy.allocator.allocator import call_at_end
from arenapy.cuda.errors import CudaError

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
    uint64_t PyThread_get_thread_ident() noexcept nogil
    Py_ssize_t Py_REFCNT(PyObject* o) noexcept
    void count_down "Py_DECREF" (PyObject* o) noexcept
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept

cdef enum:
    FEW = 16                 # batches
    DROP = -2                # for `wait`: a block was dropped, so do not even wait for a context
    # An open batch of more bytes, or of more than such a part of all, gets its event at once: one
    # that is recorded only when memory is needed comes after all that the stream was given by then.
    OPEN_BYTES = 4 << 20
    OPEN_SHARE = 16
    MOMENT = 50              # microseconds
    MAX_NAMED = 4            # streams that are found without a question
    LEGACY = 1               # the legacy default stream
    PER_THREAD = 2           # the calling thread's
    MANY_USES = 16           # of a block: with so many more, it drops those that are over


# The collector takes garbage apart in any order, and the end of an allocator needs its batches. So
# the collector sees neither batches nor who lists them. It does not see the uses of blocks
# either, which name the same streams: no other cycle is lost by this.
@cython.final
@cython.no_gc
cdef class Batch:
    """Released blocks that wait for the same. Internal."""


seal(Batch)


@cython.final
@cython.no_gc
cdef class Queues:
    """Batches by what they wait for. Internal.

    So one question for each stream and each graph finds all that is over.
    """

    def __cinit__(self):
        self.waiting = {}

    cdef void add(self, Batch batch) noexcept:
        cdef Fence fence = <Fence>batch.fences[0]
        cdef object key = fence, entry = (batch.number, batch)
        cdef list queue
        if type(fence) is EventFence and (<EventFence>fence).of is not None:
            key = (<EventFence>fence).of
        queue = found_in(self.waiting, key)
        if queue is None:
            self.waiting[key] = [entry]      # if there is no memory, none is left that is empty
        else:
            heappush(queue, entry)

    cdef list oldest_first(self):
        return sorted(self.waiting.items(), key=number_of_first)


seal(Queues)


def number_of_first(item):
    return item[1][0]


@cython.final
@cython.no_gc_clear                  # its end needs them
cdef class Parked:
    """What owns memory that streams use. Nobody closes the regions in it meanwhile. Internal.

    That are those of an allocator that is gone, or any object, which owned a region.
    """

    def __dealloc__(self):
        for region in self.regions or ():
            (<Region>region).delist(NULL)


seal(Parked)


cdef Parked parked(object memory):
    cdef Parked made = Parked.__new__(Parked)
    made.memory = memory
    if type(memory) is tuple:
        regions = tuple([one for one in memory if isinstance(one, Region)])
        for region in regions:
            (<Region>region).enlist(NULL)
        made.regions = regions
    return made


@cython.no_gc_clear                  # blocks may wait to the last
cdef class Ordering(StreamHooks):
    """When memory that streams use may be used again. Internal."""

    def __cinit__(self, *args, **kwargs):
        self.open, self.closed = unseen_list(), Queues.__new__(Queues)
        self.recent = []
        self.capacity = <size_t>-1
        self.most = FEW
        self.generation = generation

    def __dealloc__(self):
        self.let_own_go()

    cdef StreamHooks of_allocator(self, object stream):
        cdef StreamRef own
        cdef Ordering made
        if stream is not None and self.host_accessible:
            raise ValueError(
                f"stream={stream!r}: the host can access {self.kind} memory, so its allocator "
                "belongs to no stream; pass the stream to alloc(stream=...) or to record_stream()"
            )
        if stream is not None:
            own = <StreamRef>self.named(stream)
            free_to_use(own, "make the allocator before the capture, or after it", None)
            if own.thread:
                raise ValueError(
                    f"stream={stream!r}: an allocator cannot belong to the default stream of a "
                    "thread; pass this stream to alloc(stream=...), or make a stream"
                )
            if own.context != primary(self.device_id):
                raise ValueError(
                    f"stream={stream!r} belongs to device {own.device_id}, or to another context, "
                    f"but the memory is on device {self.device_id}: give a stream of that device"
                )
        made = <Ordering>self.bound(stream)
        if stream is not None:
            made.keeps_own = True
            arenapy_add(&(<StreamRef>made.own).of_allocator, 1)
        return made

    cdef void let_own_go(self) noexcept:
        if self.keeps_own:
            self.keeps_own = False
            arenapy_sub(&(<StreamRef>self.own).of_allocator, 1)

    cdef StreamHooks of_cache(self, object stream):
        """The pool's hooks know the names: an object that these kept would keep its stream, whose
        cache would stay, and keep these."""
        cdef Ordering made = <Ordering>self.bound(stream)
        made.names = self
        return made

    cdef Ordering another(self):
        raise NotImplementedError

    cdef StreamHooks bound(self, object stream):
        cdef Ordering o = self.another()
        o.kind, o.device_id, o.align = self.kind, self.device_id, self.align
        o.host_accessible, o.device_accessible = self.host_accessible, self.device_accessible
        if isinstance(stream, GraphFence):
            o.graph = stream
        elif stream is not None:
            o.own = o.named(stream)
        elif not o.host_accessible:
            o.own = stream_of(LEGACY, o.device_id)
        return o

    cdef object named(self, object stream):
        cdef Ordering names = self if self.names is None else self.names
        cdef tuple known
        cdef StreamRef found
        cdef uintptr_t number
        if isinstance(stream, (StreamRef, OwnStream)):
            return stream_of(stream, self.device_id)
        if type(stream) is int and stream == PER_THREAD and self.device_id >= 0:
            return thread_stream(self.device_id, primary(self.device_id))
        if ARENAPY_GIL:
            number = core_handle(stream)
            if number == LEGACY and self.own is not None:
                found = <StreamRef>self.own
                if <uintptr_t>found.handle == LEGACY:
                    need()
                    return found
            for known in names.recent:
                found = <StreamRef>known[1]
                if ((known[0] is stream or number > PER_THREAD and
                        number == <uintptr_t>found.handle) and not found.gone()):
                    found.named_by(stream)
                    return found
        handle = handle_of(stream)
        if 0 <= handle <= LEGACY and self.own is not None:    # the usual stream of both, perhaps
            found = <StreamRef>self.own
            if <uintptr_t>found.handle == LEGACY and (
                    isinstance(stream, int) or device_of(stream) in (None, self.device_id)):
                need()
                return found
        if ARENAPY_GIL:
            for known in names.recent:       # whose owner sees to it that it still is
                found = <StreamRef>known[1]
                if handle == <uintptr_t>found.handle and not found.gone():
                    found.named_by(stream)
                    return found
        need()
        found = stream_of(stream, self.device_id)
        # Not a default stream, which is each thread's own. An object that does not keep its stream
        # may name another one later, as an integer may; it is found by its handle.
        if ARENAPY_GIL and found.id and found.lasting:
            itself = stream if found.owner is stream else found
            names.recent = [(itself, found), *names.recent[:MAX_NAMED - 1]]
        return found

    cdef bint always(self, object stream, object named):
        return isinstance(stream, OwnStream) or (<StreamRef>named).owner is stream

    cdef bint free_now(self, object named) noexcept:
        # What `named` and `may_begin` find of most streams, without their calls; see `state_of`.
        cdef StreamRef s = <StreamRef>named
        cdef int result, status = 0
        if (forked or s.shut or s.tells is not None or <uintptr_t>s.handle <= PER_THREAD
                or s.ends_by is not None and s.gone()):
            return False
        result = driver.cuStreamIsCapturing(s.handle, &status)
        forget(result)
        return result == SUCCESS and not status

    cdef StreamRef own_stream(self):
        return <StreamRef>self.own if self.own is not None else stream_of(LEGACY, self.device_id)

    # -- uses

    cdef object stream_cache(self, object stream):
        cdef StreamRef s = <StreamRef>self.named(stream)
        # A stream that may be gone before its memory comes back gets none. Nor does one of another
        # context, which no allocator can have as its own.
        if (self.host_accessible or not s.lasting and (s.thread == 0 or elsewhere(s))
                or s.context != (<StreamRef>self.own).context):
            return None
        return s

    cdef object graph_of(self, object stream):
        cdef StreamRef s = <StreamRef>stream
        cdef object graph
        try:
            graph = new_graph_fence(s)
        except CudaError as error:
            raise CudaError(
                f"{s!r} is being captured into a graph, and the driver will not report the end of "
                f"the graph ({error}): allocate before the capture", error.result, error.name
            ) from error
        if not isinstance(graph, GraphFence):
            raise CudaError(
                f"the capture of {s!r} has ended or was made invalid: end it, and allocate again")
        return graph

    cdef bint ended(self, object stream) noexcept:
        # Others may name a stream of cuda.core's, too: it gets another cache then.
        return nobody_else_has(<StreamRef>stream) or (<StreamRef>stream).namer_is_gone()

    cdef bint done(self, object stream) noexcept:
        if isinstance(stream, GraphFence):
            return (<Fence>stream).passed()
        return (<StreamRef>stream).idle()

    cdef int join(self, object stream, object other) except -1:
        if isinstance(stream, GraphFence):   # which may be launched when this thread is back
            return wait_outside(<StreamRef>other)
        return join_streams(<StreamRef>stream, <StreamRef>other)

    cdef bint may_begin(self, object stream) except -1:
        cdef StreamRef s = <StreamRef>stream
        cdef int state
        need()
        not_closed(s)
        state = s.state()
        if state == CAPTURING:
            return True
        refuse_unless_free(s, state, "allocate before the capture, or after it", None)
        return False

    cdef int not_captured(self, object stream) except -1:
        return free_to_use(
            <StreamRef>stream, "it is only whenever the graph is launched that the block would be "
            "filled; allocate before the capture, or use alloc(stream=...) and fill", None)

    cdef int begin(self, object block, object stream) except -1:
        cdef StreamRef s = <StreamRef>stream
        if self.may_begin(s):
            if self.own is not None and not self.host_accessible:
                wait_outside(<StreamRef>self.own)
            if self.graph is not None and self.graph_of(s) is not self.graph:
                raise CudaError(f"{s!r} is not captured into the same graph any more; try again")
            return self.use(block, s)
        if self.graph is not None:
            raise CudaError(f"the capture of {s!r} ended during the call; allocate again")
        if s is not self.own and not self.host_accessible:    # on which its bytes were used before
            free_to_use(
                <StreamRef>self.own, "{!r} cannot wait for it; do this before the capture", s)
            let_stream_wait(s, self.own)
        return self.use_free(block, s)

    cdef int use(self, object block, object stream) except -1:
        cdef StreamRef s = <StreamRef>stream
        if not s.fence and s.captures():
            self.note(block, new_graph_fence(s))   # as_now() looks at the order
        return self.use_free(block, s)

    cdef int use_free(self, object block, StreamRef s) except -1:
        if s is self.own and not self.host_accessible and not self.borrowed:
            return 0
        return self.note(block, s)

    cdef int note(self, object block, object use) except -1:
        cdef Py_ssize_t n
        if self.borrowed:
            hide_owner(root_of(<Block>block).owner)
        n = note_use(<Block>block, use)
        if n and n % MANY_USES == 0:
            self.forget_finished(block, n if not n & (n - 1) else 2 * MANY_USES)
        return 0

    cdef int forget_finished(self, object block, Py_ssize_t most) except -1:
        """A block that many streams and graphs used one after the other need not keep them all."""
        cdef list over = [], instead = []
        finished_uses(uses_of(<Block>block), most, over, instead)
        for one in instead:
            note_use(<Block>block, one)
        for one in over:
            drop_use(<Block>block, one)
        return 0

    cdef int fence(self, object stream) except -1:
        free_to_use(
            <StreamRef>stream, "nobody can wait for it; reset before the capture, or after it",
            None)
        if self.host_accessible:
            return synchronize(<StreamRef>stream)
        return join_streams(<StreamRef>self.own, <StreamRef>stream)

    # -- other libraries

    cdef object consumer(self, object stream):
        if isinstance(stream, int) and stream == 0:
            raise ValueError(
                "stream=0 is ambiguous, and not allowed: pass 1 for the legacy default stream, 2 "
                "for the per-thread one, or -1 for no synchronization"
            )
        if isinstance(stream, int) and stream == -1:
            return None
        if stream is None and self.device_id < 0:
            return None                      # of the host's memory: who asks may know no stream
        return self.named(LEGACY if stream is None else owner_of(stream))

    cdef int lend(self, object block, object stream) except -1:
        cdef StreamRef s = <StreamRef>stream
        if s is None:
            return self.fenced(block)
        self.after_told(block, s)
        if self.own is not None:
            follow(s, self.own, True)
        return self.use(block, s)

    cdef int ready(self, object block, object stream) except -1:
        self.after_told(block, None)
        if self.own is not None:
            wait_here(self.own, True)
        return 0 if stream is None else wait_here(stream, True)

    cdef object offer(self, object block):
        """Readers on blocking streams come after the legacy stream in any case.

        Not all others wait for the number that this returns (torch does not), so this thread does.
        """
        cdef StreamRef front, legacy
        cdef list told
        if self.device_id < 0:               # a number would name a stream of the reader's device
            self.ready(block, None)
            self.fenced(block)
            return None
        front = self.own_stream()
        legacy = stream_of(LEGACY, front.device_id)
        told = told_to(<Block>block)
        for one in told:
            if one is legacy or (isinstance(one, StreamRef) and (<StreamRef>one).fence):
                follow(front, one, False)
            else:
                self.after(block, one, None, False)
        if front is not legacy and self.own is not None and not front.idle():
            wait_here(front, False)
        self.fenced(block)                   # a reader does not tell what it does after `front`
        return number_of(front) if told or self.own is not None else None

    cdef int fenced(self, object block) except -1:
        """Somebody uses it who does not say on which stream: on a blocking one, then.

        Of the host's memory nobody says either on which device.
        """
        if (not self.host_accessible and not self.borrowed
                and self.own is stream_of(LEGACY, self.device_id)):
            return 0                         # what is done there next comes after those
        return self.use(block, barrier_stream(self.device_id))

    cdef int after_told(self, object block, StreamRef stream) except -1:
        for one in told_to(<Block>block):
            if one is not self.own:
                self.after(block, one, stream, True)
        return 0

    cdef int after(self, object block, object use, StreamRef stream, bint strict) except -1:
        """Wait for one of the uses of a block; see after_told."""
        cdef Fence fence
        cdef StreamRef s
        if isinstance(use, EventFence) and (<EventFence>use).passed():
            drop_use(<Block>block, use)
            return 0
        if isinstance(use, StreamRef):
            s = <StreamRef>use
            if s.idle():
                return 0
            if not s.lasting and s.state() == FREE_TO_USE:
                fence = work_of(s)
                if type(fence) is Fence:   # it was destroyed, and all that it did is over
                    note_use(<Block>block, fence)
                    drop_use(<Block>block, s)
                use = fence
        return wait_here(use, strict) if stream is None else follow(stream, use, strict)

    # -- released blocks

    cdef void defer_hold(self, PyObject* owner, void* hold) noexcept:
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef void* head
        cdef Hold* h = <Hold*>hold
        if not callable_(self.generation):
            return                           # it is never free again
        PyErr_Fetch(&kind, &value, &trace)   # an exception may be on its way
        if isinstance(<object>owner, AllocatorCore):
            self.capacity = (<AllocatorCore>owner).capacity
        if not h.flags & HOLD_IDLE:          # else a stream that captures is asked after that
            fix_uses(<list>h.uses)
        # Streams that the graph comes after are not among its uses any more.
        if self.graph is not None and <list>h.uses == [self.graph]:
            drop_uses(h)
            (<MemoryOwner>owner).finish_free(h)
            PyErr_Restore(kind, value, trace)
            return
        head = arenapy_load_ptr(&self.arrived)
        h.ended_next = <Hold*>head
        while not arenapy_cas_ptr(&self.arrived, &head, h):
            h.ended_next = <Hold*>head
        self.sort_arrived()
        if self.n_batches > self.most:       # now and then, let go of what is over
            self.collect(owner, DROP)
        PyErr_Restore(kind, value, trace)

    cdef void sort_arrived(self) noexcept:
        cdef uint64_t nobody = 0
        cdef Batch batch
        while arenapy_load_ptr(&self.arrived) != NULL and arenapy_cas(
                &self.busy, &nobody, PyThread_get_thread_ident()):
            self.take_arrived()
            for batch in list(self.open):
                if batch.nbytes > OPEN_BYTES or batch.nbytes > self.capacity // OPEN_SHARE:
                    self.close(batch, DROP)
            arenapy_store(&self.busy, 0)
            nobody = 0

    cdef void take_arrived(self) noexcept:
        """Put what has ended into batches; `busy` is ours."""
        cdef Hold* hold = <Hold*>arenapy_take_ptr(&self.arrived)
        cdef Hold* queue = NULL
        cdef Hold* other
        while hold != NULL:                  # newest first: reverse
            other = hold.ended_next
            hold.ended_next = queue
            queue = hold
            hold = other
        while queue != NULL:
            hold = queue
            queue = hold.ended_next
            self.wait_for(hold)

    cdef void wait_for(self, Hold* hold) noexcept:
        """Into the batch of what uses it: all fences, or else the first stream."""
        cdef Batch batch
        cdef list uses = <list>hold.uses
        if isinstance(uses[0], StreamRef):
            batch = self.open_batch(<StreamRef>uses[0])
        else:
            batch = self.new_batch(None)
            # Graphs first: nobody waits for a stream in vain, for a block that a graph keeps.
            fences = [one for one in uses if isinstance(one, Fence)]
            self.queue_up(batch, sorted(fences, key=is_no_graph))
        hold.ended_next = NULL
        if batch.last == NULL:
            batch.first = hold
        else:
            batch.last.ended_next = hold
        batch.last = hold
        batch.nbytes += hold.end - hold.start

    cdef Batch new_batch(self, StreamRef stream):
        cdef Batch batch = Batch.__new__(Batch)
        self.n_batches += 1
        batch.stream = stream
        return batch

    cdef void queue_up(self, Batch batch, list fences) noexcept:
        self.n_closed += 1
        batch.stream, batch.fences, batch.number = None, fences, self.n_closed
        self.closed.add(batch)

    cdef Batch open_batch(self, StreamRef stream):
        cdef Batch batch
        for batch in self.open:
            if batch.stream is stream:
                return batch
        batch = self.new_batch(stream)
        self.open.append(batch)
        return batch

    cdef list take_batches(self):
        """All, of which there are none then."""
        cdef list found = list(self.open)
        for queue in self.closed.waiting.values():
            found.extend([batch for _, batch in queue])
        self.open, self.closed, self.n_batches = unseen_list(), Queues.__new__(Queues), 0
        return found

    cdef bint close(self, Batch batch, Py_ssize_t wait) noexcept:
        """Make the fence of an open batch. False: not now, and it stays open."""
        cdef Fence fence = None
        cdef StreamRef s = <StreamRef>batch.stream
        try:
            # Of another one the fence is that all streams of its context have been waited for.
            if wait != DROP or s.lasting or s.thread or s.of_allocator:
                fence = late_work_of(s, wait > 0)
        except Exception:
            pass
        if fence is None:                    # a stream that captures had them before
            return False
        self.open.remove(batch)
        self.queue_up(batch, [fence])
        return True

    cdef Py_ssize_t collect(self, PyObject* owner, Py_ssize_t wait) noexcept:
        # A device's own stream waits for the others; this thread has to where the host looks.
        cdef StreamRef waiter = None
        look(True, wait != 0 and wait != DROP)
        # If the own stream is another thread's default one, the legacy stream would wait.
        if wait > 0 and self.own is not None and not self.host_accessible and not (
                <StreamRef>self.own).gone() and not elsewhere(
                <StreamRef>self.own) and (<StreamRef>self.own).state() == FREE_TO_USE:
            waiter = <StreamRef>self.own
        return self.advance(owner, wait, waiter)

    cdef void finish(self, PyObject* owner, object memory) noexcept:
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef int _
        PyErr_Fetch(&kind, &value, &trace)
        wait_for_those(<void*>self)
        for _ in range(2):                   # a call may fail once
            while self.advance(owner, PY_SSIZE_T_MAX, None):
                pass
        if callable_(self.generation) and self.n_batches:
            # As during a capture, where a stream cannot be waited for, or for a graph.
            park(parked(memory), self.abandon(owner))
        PyErr_Restore(kind, value, trace)

    cdef void* hand_over(self) noexcept:
        cdef Hold* chain = NULL
        cdef Hold* hold
        cdef Hold* next
        cdef Batch batch
        self.take_arrived()
        for batch in self.take_batches():
            hold, batch.first = batch.first, NULL
            while hold != NULL:
                next = hold.ended_next
                hold.ended_next = chain
                chain = hold
                hold = next
        return chain

    cdef void leave(self, tuple regions) noexcept:
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef StreamRef own = <StreamRef>self.own
        cdef object use = None
        cdef object order
        cdef Region region
        if own is None or not callable_(self.generation):
            return
        PyErr_Fetch(&kind, &value, &trace)
        for region in regions:
            order = region.hooks
            if not isinstance(order, Ordering) or (<Ordering>order).earlier is None:
                continue
            if use is None:
                use = own
                try:
                    use = late_work_of(own, False) or own
                except Exception:
                    pass                     # when the region is freed, perhaps
            (<Ordering>order).earlier.append(use)
        PyErr_Restore(kind, value, trace)

    cdef list abandon(self, PyObject* owner):
        """Free the holds that are left; what their blocks wait for."""
        cdef dict waits = {}                 # as a set, in order
        cdef Batch batch
        cdef Hold* hold
        cdef Hold* next
        for batch in self.take_batches():
            hold, batch.first = batch.first, NULL
            while hold != NULL:
                next = hold.ended_next
                waits.update(dict.fromkeys(<list>hold.uses))
                drop_uses(hold)
                (<MemoryOwner>owner).finish_free(hold)
                hold = next
        return list(waits)

    cdef Py_ssize_t advance(self, PyObject* owner, Py_ssize_t wait, StreamRef waiter) noexcept:
        """Free what is over, and at least `wait` blocks that will be for `waiter` (None: this
        thread). How many."""
        cdef uint64_t nobody = 0
        cdef uint64_t me = PyThread_get_thread_ident()
        cdef Py_ssize_t n = 0, past
        cdef Batch batch
        cdef list over = []
        cdef bint moved = True, waited = False
        if not callable_(self.generation):
            return 0
        while not arenapy_cas(&self.busy, &nobody, me):
            if wait <= 0 or nobody == me:    # called by a destructor from in here
                return 0
            nobody = 0
            waited = True
            with nogil:
                usleep(MOMENT)
        self.n_advances += 1
        while moved:
            moved = False
            self.take_arrived()
            for batch in list(self.open):
                if (<StreamRef>batch.stream).idle():
                    self.open.remove(batch)
                    n += self.pass_on(owner, batch, over)
                    moved = True
                    self.vain = 0
                elif self.close(batch, DROP if wait == DROP else 0):
                    self.vain = 0
                elif wait == 0 or wait == DROP:
                    continue
                elif self.vain >= PATIENCE:
                    self.close(batch, True)
                else:
                    self.vain += 1
            for key, queue in self.closed.oldest_first():
                while queue:
                    batch = <Batch>queue[0][1]
                    if batch.asked == self.n_advances:
                        break
                    past = 0
                    for fence in batch.fences:
                        if not ((<Fence>fence).passed()
                                or n < wait and (<Fence>fence).wait(waiter)):
                            batch.asked = self.n_advances
                            break
                        past += 1
                    if past == 0:
                        break
                    heappop(queue)
                    del batch.fences[:past]
                    if batch.fences:
                        self.closed.add(batch)
                    else:
                        n += self.pass_on(owner, batch, over)
                        moved = True
                if not queue:
                    del self.closed.waiting[key]
            # There is no other memory: this thread waits for streams that are captured. (A pool
            # that ends parks their blocks instead.)
            if not moved and n < wait < PY_SSIZE_T_MAX:
                moved = any(self.close(batch, True) for batch in list(self.open))
        self.most = max(<Py_ssize_t>FEW, 2 * self.n_batches)
        arenapy_store(&self.busy, 0)
        self.sort_arrived()
        over.clear()                         # last: a stream's object may run code of the user
        return max(n, waited)                # whom we waited for may have freed something

    cdef Py_ssize_t pass_on(self, PyObject* owner, Batch batch, list over) noexcept:
        """Blocks that nothing else uses are free, others wait for the next; how many are free.

        The uses that they no longer wait for are added to `over`.
        """
        cdef Py_ssize_t n = 0
        cdef Hold* hold = batch.first
        cdef Hold* next
        cdef list uses, left
        batch.first = batch.last = NULL
        self.n_batches -= 1
        over.append(batch)
        while hold != NULL:
            next = hold.ended_next
            uses = <list>hold.uses
            over.append(uses.copy())
            if isinstance(uses[0], StreamRef):
                left = uses[1:]
            else:
                left = [one for one in uses if not isinstance(one, Fence)]
            if left:
                uses[:] = left
                self.wait_for(hold)
            else:
                drop_uses(hold)
                (<MemoryOwner>owner).finish_free(hold)
                n += 1
            hold = next
        return n


seal(Ordering)


cdef void fix_uses(list uses) noexcept:
    """Make fences for what may be otherwise later.

    A stream that may not exist by then; and one that is capturing, for its graph. Of a block that a
    graph uses, any stream: it may be captured again whenever somebody asks. Those for which that
    fails stay what they are.
    """
    cdef bint of_graph
    cdef Py_ssize_t i
    cdef StreamRef s
    try:
        uses[:] = spread(uses)               # only now: a reader may have made its context since
        uses[:] = as_now(uses)
    except Exception:
        pass                                 # then nobody can wait for it, and it is never free
    of_graph = any([isinstance(one, GraphFence) for one in uses])
    for i in range(len(uses)):
        one = uses[i]
        if not isinstance(one, StreamRef):
            continue
        s = <StreamRef>one
        try:
            fence = None if s.lasting and not of_graph else event_outside(s)
            if fence is not None:
                uses[i] = fence
                continue
        except Exception:
            pass
        if s.state() in (CAPTURING, UNKNOWN):    # it stays, too, for what it was given before
            uses.append(graph_fence_or_never(s))
    uses.sort(key=is_stream)                 # fences first: they are looked at together


cdef int finished_uses(list uses, Py_ssize_t most, list over, list instead) except -1:
    """Of the last `most` uses of a block, those that it need not keep, and what to keep instead.

    Only work counts that a stream is given until the block is released. It is known already if
    nobody else has the stream's object.
    """
    cdef StreamRef s
    cdef dict first_of = {}
    cdef object first = next((one for one in uses if isinstance(one, GraphFence)), None)
    for one in uses[-most:]:
        if isinstance(one, StreamRef):
            s = <StreamRef>one
            better = better_name(s)
            if better is not s:
                over.append(s)
                if better not in uses and better not in instead:
                    instead.append(better)
                continue
            if s.id == 0 and not s.ended:    # a default stream
                continue
            if (s.unnamed or not nobody_else_has(s) or may_be_found(s)
                    or s.state() != FREE_TO_USE):
                # The first name of a stream stands for the later ones, too. Its place is before
                # later graphs, after which as_now() takes a stream to be used in them alone.
                if not s.lasting and first_of.setdefault(name_given(s), s) is not s:
                    over.append(s)
                continue
            if not s.idle():
                instead.append(work_of(s))
            if s.id:                         # it may be gone now, and with it its other names
                over.extend([
                    other for other in uses if isinstance(other, StreamRef) and other is not s
                    and (<StreamRef>other).handle == s.handle
                    and (<StreamRef>other).context == s.context])
        # as_now() takes what comes after the first graph for named in a capture.
        elif one is first or not (<Fence>one).passed():
            continue
        over.append(one)
    return 0


cdef StreamRef better_name(StreamRef s):
    """Of a stream that ends, perhaps, one that lasts or ends with its object."""
    if s.id == 0 and s.ended and s.state() != FREE_TO_USE:
        return stream_of(LEGACY, s.device_id)    # it waits for a thread that is gone
    if s.unnamed and owns(s.owner) and s.state() == FREE_TO_USE:
        return named_now(s)
    return s


cdef tuple name_given(StreamRef s):
    """The same for two objects that name one stream, and of which one can stand for the other.

    Where one is an object that may keep the stream, so is the other. An object that can be closed
    stands for itself alone: it says whether the stream is still there.
    """
    cdef object owner = s.owner
    return (
        s.unnamed, <uintptr_t>s.handle if s.unnamed else s.id,
        (type(owner), owns(owner)) if s.tells is None else <uintptr_t><void*>owner)


cdef void hide_owner(MemoryOwner region) noexcept:
    """The object that borrowed memory belongs to lives until the streams are done.

    Were it garbage together with the Buffer, the collector would take it apart, or run its
    finalizer, before. So it does not see that object from here on.
    """
    cdef object owner
    cdef list hidden = unseen_list()
    with cython.critical_section(region):
        owner = (<Region>region).owner
        if owner is not None and type(owner) not in (list, tuple):
            hidden.append(owner)
            (<Region>region).owner = hidden


def is_stream(one):
    return isinstance(one, StreamRef)


def is_no_graph(one):
    return type(one) is not GraphFence


cdef list as_now(list uses):
    """A block's uses, without streams of which a capture that is on has all that they were given.

    Those were named in that capture, and so come after its graph. A stream that was named before
    stays. When the capture is over, a stream stands for what it is given then.
    """
    cdef list found = []
    cdef bint captured = False
    for one in uses:
        captured = captured or isinstance(one, GraphFence)
        if captured and isinstance(one, StreamRef) and not (<StreamRef>one).fence:
            if not (<StreamRef>one).captures():
                one = named_now(<StreamRef>one)
            elif new_graph_fence(<StreamRef>one) in found:
                continue
            if one in found:
                continue
        found.append(one)
    return found


def note_end(Allocator one not None):
    """Internal: an allocator ends, and so may its user's stream, though Buffers keep its core."""
    cdef AllocatorCore core = one.base
    if Py_REFCNT(<PyObject*>core) > 2 and isinstance(core.hooks, Ordering):
        (<Ordering>core.hooks).let_own_go()


call_at_end(note_end)


cdef list told_to(Block block):
    return spread([
        one for one in as_now(uses_of(block)) if isinstance(one, (StreamRef, EventFence))
    ])


cdef bint nobody_else_has(StreamRef stream) noexcept:
    """Is the object that it ends with only here? Then nobody gives it any more work."""
    cdef object owner = stream.owner         # counts, too
    return stream.ended or (stream.ends and Py_REFCNT(<PyObject*>owner) == 2)


cdef bint may_be_found(StreamRef stream):
    """May somebody have the stream's object again, by a weak reference?"""
    return any([
        type(ref) is not weakref.ref or ref.__callback__ is None  # a proxy would look in the object
        or ref.__callback__ is not stream.ends_by
        for ref in weakref.getweakrefs(stream.owner)])


cdef object owner_of(object stream):
    """Of a consumer's number the object, where that decides how long the stream lives.

    CuPy gives DLPack the number of its current stream, which ends with its object.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(stream, int) or stream <= PER_THREAD:
        return stream
    try:
        current = cupy.cuda.get_current_stream()
        return current if current.ptr == stream else stream
    except Exception:
        return stream


cdef void drop_uses(Hold* hold) noexcept:
    count_down(hold.uses)
    hold.uses = NULL


# ---- what Python code of this package needs of allocators and blocks

def memory_of(Allocator allocator not None):
    """Its core, whose attributes say it; and whether streams order it."""
    cdef AllocatorCore core = allocator.base
    return core, core.hooks is not None


cdef int give_back(Buffer block, object stream) except -1:
    """``block.release(stream)``, which notes no other use if the block was allocated for `stream`.

    Another object may name the stream now, and would stand for a stream of its own. Of the same
    handle is the same event at release.
    """
    cdef StreamRef s
    cdef Ordering order
    told = told_to(block) if uses_of(block) else ()
    if len(told) == 1 and isinstance(told[0], StreamRef):
        s = <StreamRef>told[0]
        if not s.fence and not s.gone() and handle_of(stream) == <uintptr_t>s.handle:
            stream = None
    elif not told:                           # the usual one, whose order is enough
        order = <Ordering>(<Block>block).owner.hooks
        if not order.host_accessible and not order.borrowed and stream is not None:
            s = <StreamRef>order.named(stream)
            if s is order.own and not s.captures():
                stream = None
    block.release(stream)
    return 0


def drop_finished():
    """Let go of what finished work has kept. False: another thread does so just now."""
    return look(True, True) and not somebody_drops()


def used_untold(Block block not None):
    """Streams use a block of a device and nobody says which: it waits for all blocking ones."""
    cdef Ordering order = <Ordering?>root_of(block).owner.hooks
    pin(block)
    try:
        order.use(block, barrier_stream(order.device_id))
    finally:
        unpin(block)


def let_wait(Block block not None, stream):
    """Let a stream wait for all streams that were told of a block, whose memory is CUDA's."""
    cdef Ordering order = <Ordering?>root_of(block).owner.hooks
    pin(block)
    try:
        order.after_told(block, order.named(stream))
    finally:
        unpin(block)
