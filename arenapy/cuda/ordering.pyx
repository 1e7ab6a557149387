"""Ordering: when memory that streams use may be used again.

What lives here: released blocks that wait for streams, what is to live until a copy is done, and
which streams wait when a block is lent to another library. What does not: streams and events
(stream), copies (copies), which blocks are free (allocators).

A block of a device that only the allocator's own stream uses does not come here at all: the next
one that gets it uses it on that stream, too, and so after it. What another stream was told of
(`use`) comes here when it is released, and goes back when all of those have done what they were
given until then. Where the host sees the memory there is no own stream: this processor does not
wait for streams, so each of them counts.

A stream that is sure to exist needs no event at release: its blocks gather in an open batch, for
which an event is recorded when the allocator runs out of memory, or when they are many bytes. For
others (integers; default streams of threads) an event is recorded at release. What a stream uses
while it is captured into a graph waits for the end of the graph.

Locks. `ended` is called by destructors, so it only pushes onto a list; then whoever finds `busy`
unset does the rest, which calls the driver, without the GIL and under no lock. Others leave what
they have to that thread, which looks again before it goes.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from posix.unistd cimport usleep

from arenapy.atomic cimport (
    ARENAPY_GIL, arenapy_cas, arenapy_cas_ptr, arenapy_load_ptr, arenapy_store, arenapy_take_ptr,
)
from arenapy.block cimport Block, Hold, Keeper, note_use, uses_of
from arenapy.medium cimport Medium
from arenapy.regions cimport RegionSet

from arenapy.cuda.driver cimport callable_, generation, need, primary
from arenapy.cuda.stream cimport (
    FREE_TO_USE, Stream, fence_of, free_to_use, handle_of, number_of, stream_of,
)
from arenapy.cuda.ticket cimport (
    Graph, Ticket, follow, join_streams, last_resort, new_event, new_graph, synchronize, ticket_of,
)

from arenapy.cuda.errors import CudaError

cdef extern from "Python.h":
    uint64_t PyThread_get_thread_ident() noexcept nogil
    void count_up "Py_INCREF" (PyObject* o) noexcept
    void count_down "Py_DECREF" (PyObject* o) noexcept
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept

cdef enum:
    FEW = 16                 # batches
    # An open batch of more bytes, or of more than such a part of all, gets its event at once: one
    # that is recorded only when memory is needed comes after all that the stream was given by then.
    OPEN_BYTES = 4 << 20
    OPEN_SHARE = 16
    MOMENT = 50              # microseconds
    MOST_NAMED = 4           # streams that are found without a question
    LEGACY = 1               # the legacy default stream
    INVALID_HANDLE = 400     # CUDA_ERROR_INVALID_HANDLE
    CONTEXT_GONE = 709       # CUDA_ERROR_CONTEXT_IS_DESTROYED


@cython.auto_pickle(False)
@cython.final
cdef class Batch:
    """Released blocks that wait for the same. Internal."""

    def __cinit__(self):
        self.objects = []
        self.tickets = []


@cython.auto_pickle(False)
@cython.no_gc_clear                  # blocks may wait to the last
cdef class Ordering(Medium):
    """When memory that streams use may be used again. Internal."""

    def __cinit__(self, *args, **kwargs):
        self.open = []
        self.batches = []
        self.done = []
        self.recent = []
        self.room = <size_t>-1
        self.most = FEW
        self.generation = generation

    cdef Medium of_allocator(self, object stream):
        cdef Stream own
        if stream is not None and self.host_accessible:
            raise ValueError(
                f"stream={stream!r}: {self.kind} memory, which the host sees, belongs to no "
                "stream; name it at alloc(stream=...), or by record_stream"
            )
        if stream is not None:
            own = <Stream>self.named(stream)
            free_to_use(own, "make the allocator before the capture, or after it", None)
            own.of_allocator = True
            if own.thread:
                raise ValueError(
                    f"stream={stream!r}: the default stream of a thread cannot be an allocator's; "
                    "name it at alloc(stream=...), or make a stream"
                )
            if own.context != primary(self.device_id):
                raise ValueError(
                    f"stream={stream!r} is one of device {own.device_id}, or of another context, "
                    f"and the memory is on device {self.device_id}: give a stream of that device"
                )
        return self.bound(stream)

    cdef Medium bound(self, object stream):
        cdef Ordering o = type(self).__new__(type(self))
        o.kind, o.device_id, o.align = self.kind, self.device_id, self.align
        o.host_accessible, o.device_accessible = self.host_accessible, self.device_accessible
        if stream is not None:
            o.own = o.named(stream)
        elif not o.host_accessible:
            o.own = stream_of(LEGACY, o.device_id)
        return o

    cdef object named(self, object stream):
        cdef tuple known
        cdef Stream found
        if isinstance(stream, Stream):
            return stream
        if ARENAPY_GIL and self.recent:
            for known in self.recent:
                if known[0] is stream and not (<Stream>known[1]).gone():
                    return known[1]
            handle = handle_of(stream)[0]
            for known in self.recent:        # whose owner sees to it that it still is
                found = <Stream>known[1]
                if handle == <uintptr_t>found.handle and not found.gone():
                    return found
        need()
        found = stream_of(stream, self.device_id)
        # An integer may be another stream's later, and a default stream is each thread's own.
        if found.id and found.lasting and not isinstance(stream, int):
            self.recent = [(stream, found), *self.recent[:MOST_NAMED - 1]]
        return found

    cdef Stream own_stream(self):
        return <Stream>self.own if self.own is not None else stream_of(LEGACY, self.device_id)

    # -- uses

    cdef object lane(self, object stream):
        cdef Stream s = <Stream>self.named(stream)
        self.may_begin(s)
        # One that may be gone before its memory comes back gets none.
        return s if s.lasting and not self.host_accessible else None

    cdef object lane_source(self, object pool, object stream):
        from arenapy.cuda.lanes import LaneSource
        return LaneSource(pool, self, stream)

    cdef int may_begin(self, object stream) except -1:
        return free_to_use(
            <Stream>stream, "whenever that is launched it would use the block; allocate before the "
            "capture, and keep the Buffer as long as the graph", None)

    cdef int begin(self, object block, object stream) except -1:
        cdef Stream s = <Stream>stream
        if s is not self.own and not self.host_accessible:
            join_streams(s, <Stream>self.own)    # on which its bytes were used before
        return self.use(block, s)

    cdef int use(self, object block, object stream) except -1:
        cdef Stream s = <Stream>stream
        if not s.fence and s.captures():
            return note_use(<Block>block, new_graph(s))
        if s is self.own and not self.host_accessible and not self.borrowed:
            return 0
        return note_use(<Block>block, s)

    cdef int fence(self, object stream) except -1:
        free_to_use(
            <Stream>stream, "nobody can wait for it; reset before the capture, or after it", None)
        if self.host_accessible:
            return synchronize(<Stream>stream)
        return join_streams(<Stream>self.own, <Stream>stream)

    cdef Batch keep(self, object thing):
        cdef Batch batch = Batch.__new__(Batch)
        batch.objects.append(thing)
        batch.kept = True
        self.batches.append(batch)
        return batch

    cdef int keep_until(self, Batch batch, Stream stream) except -1:
        batch.tickets.append(ticket_of(stream))
        batch.kept = False
        return 0

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
        return self.named(LEGACY if stream is None else stream)

    cdef int lend(self, object block, object stream) except -1:
        cdef Stream s = <Stream>stream
        if s is None:
            return self.fenced(block)
        for one in self.users(block):
            follow(s, <Stream>one)
        return self.use(block, s)

    cdef int ready(self, object block, object stream) except -1:
        cdef list streams = self.users(block)
        if stream is not None:
            streams.append(stream)
        for one in streams:
            # By an event, which comes after all blocking streams on a fence.
            if not (<Stream>one).captures() and not new_event(<Stream>one).wait(None):
                raise CudaError(f"waiting for {one!r} failed")
        return 0

    cdef object offer(self, object block):
        cdef Stream front = self.own_stream()
        cdef list streams = self.users(block)
        for one in streams:
            follow(front, <Stream>one)
        self.fenced(block)                   # a reader does not tell what it does after `front`
        return number_of(front) if streams else None

    cdef int fenced(self, object block) except -1:
        """Somebody uses it who does not say on which stream: on a blocking one, then."""
        if (self.own is stream_of(LEGACY, self.device_id)
                and not self.host_accessible and not self.borrowed):
            return 0                         # what is done there next comes after those
        return self.use(block, fence_of(self.device_id))

    cdef list users(self, object block):
        """The streams that what the block holds may be the work of."""
        cdef list streams = [one for one in uses_of(<Block>block) if isinstance(one, Stream)]
        if self.own is not None and self.own not in streams:
            streams.append(self.own)
        return streams

    # -- released blocks

    cdef void ended(self, PyObject* keeper, void* hold) noexcept:
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef void* head
        cdef Hold* h = <Hold*>hold
        if not callable_(self.generation):
            return                           # it is never free again
        PyErr_Fetch(&kind, &value, &trace)   # an exception may be on its way
        if isinstance(<object>keeper, RegionSet):
            self.room = (<RegionSet>keeper).capacity
        if fix_uses(<list>h.uses):
            count_up(keeper)                 # nobody knows until when; see pass_on
        head = arenapy_load_ptr(&self.arrived)
        h.ended_next = <Hold*>head
        while not arenapy_cas_ptr(&self.arrived, &head, h):
            h.ended_next = <Hold*>head
        self.sort_arrived()
        self.look(keeper)
        PyErr_Restore(kind, value, trace)

    cdef void look(self, PyObject* keeper) noexcept:
        """Now and then, let go of what is over."""
        if len(self.batches) > self.most:
            self.settle(keeper, False)
            self.most = max(<Py_ssize_t>FEW, 2 * len(self.batches))

    cdef void sort_arrived(self) noexcept:
        cdef uint64_t nobody = 0
        cdef Batch batch
        while arenapy_load_ptr(&self.arrived) != NULL and arenapy_cas(
                &self.busy, &nobody, PyThread_get_thread_ident()):
            self.take_arrived()
            for batch in list(self.open):
                if batch.nbytes > OPEN_BYTES or batch.nbytes > self.room // OPEN_SHARE:
                    self.close(batch)
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
        """Into the batch of what uses it: all tickets, or else the first stream."""
        cdef Batch batch
        cdef list uses = <list>hold.uses
        if isinstance(uses[0], Stream):
            batch = self.open_batch(<Stream>uses[0])
        else:
            batch = Batch.__new__(Batch)
            batch.tickets = [one for one in uses if isinstance(one, Ticket)]
            self.batches.append(batch)
        hold.ended_next = NULL
        if batch.last == NULL:
            batch.first = hold
        else:
            batch.last.ended_next = hold
        batch.last = hold
        batch.nbytes += hold.end - hold.start

    cdef Batch open_batch(self, Stream stream):
        cdef Batch batch
        for batch in self.open:
            if batch.stream is stream:
                return batch
        batch = Batch.__new__(Batch)
        batch.stream = stream
        self.open.append(batch)
        return batch

    cdef bint close(self, Batch batch) noexcept:
        """Make the ticket of an open batch. False: not now, and it stays open."""
        cdef Stream s = <Stream>batch.stream
        if s.state() != FREE_TO_USE:         # it had its blocks before it began to capture
            return False
        try:
            batch.tickets.append(new_event(s))
        except CudaError as error:
            # Somebody has destroyed it: nobody can tell what it has done but its context.
            ticket = last_resort(s) if error.result in (INVALID_HANDLE, CONTEXT_GONE) else None
            if ticket is None:
                return False
            batch.tickets.append(ticket)
        except Exception:
            return False
        batch.stream = None
        self.open.remove(batch)
        self.batches.append(batch)
        return True

    cdef Py_ssize_t settle(self, PyObject* keeper, bint wait) noexcept:
        # A device's own stream waits for the others; this thread has to where the host looks.
        cdef Stream waiter = None
        if wait and not self.host_accessible and not (<Stream>self.own).gone() and (
                <Stream>self.own).state() == FREE_TO_USE:
            waiter = <Stream>self.own
        return self.advance(keeper, wait, waiter)

    cdef void finish(self, PyObject* keeper) noexcept:
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef int _
        PyErr_Fetch(&kind, &value, &trace)
        for _ in range(2):                   # a call may fail once: what is left would be in use
            while self.advance(keeper, True, None):
                pass
        PyErr_Restore(kind, value, trace)

    cdef Py_ssize_t advance(self, PyObject* keeper, bint wait, Stream waiter) noexcept:
        """Free what is over, or (`wait`) will be for `waiter`, None: this thread. How many."""
        cdef uint64_t nobody = 0
        cdef uint64_t me = PyThread_get_thread_ident()
        cdef Py_ssize_t n = 0
        cdef Batch batch
        cdef bint moved = True, waited = False
        if not callable_(self.generation):
            return 0
        while not arenapy_cas(&self.busy, &nobody, me):
            if not wait or nobody == me:     # called by a destructor from in here
                return 0
            nobody = 0
            waited = True
            with nogil:
                usleep(MOMENT)
        while moved:
            moved = False
            self.take_arrived()
            for batch in list(self.open):
                if (<Stream>batch.stream).idle():
                    self.open.remove(batch)
                    n += self.pass_on(keeper, batch)
                    moved = True
                else:
                    self.close(batch)
            for batch in list(self.batches):
                if is_over(batch, wait and n == 0, waiter):
                    self.batches.remove(batch)
                    n += self.pass_on(keeper, batch)
                    moved = True
        arenapy_store(&self.busy, 0)
        self.sort_arrived()
        self.done.clear()                    # which may run other code
        return max(n, waited)                # whom we waited for may have freed something

    cdef Py_ssize_t pass_on(self, PyObject* keeper, Batch batch) noexcept:
        """Blocks that nothing else uses are free, others wait for the next; how many are free."""
        cdef Py_ssize_t n = 0
        cdef Hold* hold = batch.first
        cdef Hold* next
        cdef list uses, left
        self.done.extend(batch.objects)
        batch.first = batch.last = NULL
        while hold != NULL:
            next = hold.ended_next
            uses = <list>hold.uses
            if isinstance(uses[0], Stream):
                left = uses[1:]
            else:
                left = [one for one in uses if not isinstance(one, Ticket)]
                if any([isinstance(one, Graph) for one in uses]):
                    count_down(keeper)       # whoever called keeps it
            if left:
                uses[:] = left
                self.wait_for(hold)
            else:
                drop_uses(hold)
                (<Keeper>keeper).over(hold)
                n += 1
            hold = next
        return n


cdef bint is_over(Batch batch, bint wait, Stream waiter) noexcept:
    if batch.kept:
        return False
    for ticket in batch.tickets:
        if not ((<Ticket>ticket).over() or wait and (<Ticket>ticket).wait(waiter)):
            return False
    return True


cdef bint fix_uses(list uses) noexcept:
    """Make tickets for what may be otherwise later. Is there a graph among them?

    A stream that may not exist by then; and one that is capturing, for its graph. Those for which
    that fails stay what they are.
    """
    cdef Py_ssize_t i
    cdef bint graph = False
    for i in range(len(uses)):
        one = uses[i]
        if not isinstance(one, Stream):
            continue
        try:
            if not (<Stream>one).lasting:
                uses[i] = ticket_of(<Stream>one)
            elif (<Stream>one).captures():   # it stays, too, for what it was given before
                uses.append(new_graph(<Stream>one))
        except Exception:
            pass
    uses.sort(key=is_stream)                 # tickets first: they are looked at together
    for one in uses:
        graph = graph or isinstance(one, Graph)
    return graph


def is_stream(one):
    return isinstance(one, Stream)


cdef void drop_uses(Hold* hold) noexcept:
    count_down(hold.uses)
    hold.uses = NULL
