"""Streams and events of our own, for who has none of another library's.

What lives here: `Stream`, which does not wait for the legacy default stream and makes nobody else
wait, `Event`, and the time that work on a stream takes. What does not: streams that users bring
(stream), which this module's are, too, as soon as they are used.

A stream of the driver lives as long as its object here or memory that waits for it. `close` only
says that nobody is to give it more work. So a handle is never destroyed under a block that was
released on it, nor given to another stream meanwhile.

Thread-safety: everything here may be called from any thread.
"""
cimport cython
from libc.stdint cimport uint64_t, uintptr_t

from arenapy.cuda.driver cimport (
    SUCCESS, checked, driver, enter, forget, leave, need, primary,
)
from arenapy.cuda.fence cimport (
    Fence, create_event, join_streams, look, new_event, synchronize, wait_here,
)
from arenapy.cuda.stream_ref cimport (
    OwnStream, StreamRef, capture_of, free_to_use, made_stream, relax, restore_capture_mode,
    stream_of,
)
from arenapy.base.sealed cimport seal

from arenapy.cuda.errors import CudaError
from arenapy.memory.host_request import checked_index

cdef enum:
    NON_BLOCKING = 1         # CU_STREAM_NON_BLOCKING
    TIMED = 0                # CU_EVENT_DEFAULT

cdef double MILLI = 1e-3


@cython.final
cdef class Event:
    """Marks all work that a stream received before :meth:`Stream.record`.

    Notes
    -----
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> from arenapy import cuda
    >>> stream = cuda.Stream()
    >>> event = stream.record()
    >>> event.synchronize()
    >>> event.done
    True
    """

    cdef Fence fence
    cdef uint64_t capture        # in which it was recorded, or 0

    @property
    def done(self):
        """True if the stream has done this work. Asks the driver."""
        cdef bint over
        need()
        over = not self.capture and self.fence.passed()    # the question makes a capture invalid
        if over:
            look(True, False)
        return over

    def synchronize(self):
        """Wait until the stream has done this work.

        Raises
        ------
        CudaError
            If it is not possible to wait for the event.

        Examples
        --------
        >>> cuda.Stream().record().synchronize()
        """
        need()
        if self.capture or not self.fence.wait(None):
            raise CudaError("the event cannot be waited for: was it recorded during a capture?")
        look(True, False)

    def __reduce__(self):
        raise TypeError("an Event cannot be pickled")


seal(Event, "an Event is made by Stream.record()")


@cython.final
@cython.no_gc_clear
cdef class Stream(OwnStream):
    """Stream(device_id=0)\n--\n
    A stream of a device: its work runs in order, and concurrently with other streams.

    Every argument ``stream=`` of arenapy accepts it, and so does every library with
    ``__cuda_stream__``. It is non-blocking: it and the legacy default stream do not wait for each
    other. If they share memory, call :meth:`wait`.

    Parameters
    ----------
    device_id : int
        Ordinal of the device.

    Raises
    ------
    Unavailable
        If there is no driver, no device or no cuda-python.
    ValueError, TypeError
        If `device_id` is not a device.
    CudaError
        If the driver refused.

    Notes
    -----
    It is a context manager that closes the stream. Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import arenapy, numpy as np
    >>> from arenapy import cuda
    >>> block = arenapy.Pool(source=cuda.Device()).alloc(4096)
    >>> with cuda.Stream() as stream:
    ...     _ = block.copy_from(np.ones(1024, "f4"), stream=stream)
    ...     stream.synchronize()
    """

    def __cinit__(self, device_id=0):
        cdef object index = checked_index("device_id", device_id)
        self.stream = made_stream(primary(index), index, NON_BLOCKING)

    def __cuda_stream__(self):
        """The protocol of streams: its version, and the handle."""
        return 0, self.handle

    @property
    def device_id(self):
        """Ordinal of the device."""
        return self.stream.device_id

    @property
    def handle(self):
        """The driver's handle, an int; ValueError once the stream is closed."""
        return <uintptr_t>self.open_stream().handle

    @property
    def closed(self):
        """True after :meth:`close`."""
        return self.stream.shut

    def synchronize(self):
        """Wait until the stream has done all its work.

        Raises
        ------
        ValueError
            If it is closed.
        CudaError
            If the driver refused, or work of the stream has failed.

        Examples
        --------
        >>> stream = cuda.Stream()
        >>> stream.synchronize()
        """
        synchronize(self.open_stream())
        look(True, False)

    def record(self):
        """Return an :class:`Event` for all work that the stream received so far.

        Errors are those of `synchronize`.

        Returns
        -------
        Event

        Examples
        --------
        >>> event = cuda.Stream().record()
        >>> event.synchronize()
        """
        return event_on(self, -1)

    def wait(self, other):
        """Let all later work of this stream come after `other`. The call itself does not wait.

        Parameters
        ----------
        other : Event or stream
            An event, or a stream of any library with all its work so far.

        Raises
        ------
        TypeError
            If `other` is neither.
        ValueError, CudaError
            As `synchronize`.

        Examples
        --------
        >>> copies, kernels = cuda.Stream(), cuda.Stream()
        >>> kernels.wait(copies)         # later work of `kernels` comes after the copies
        """
        if isinstance(other, Event):
            wait_on(self, other, -1)
        else:
            join_streams(self.open_stream(), stream_of(other, self.stream.device_id))

    def close(self):
        """Accept no more work. Work that it received is still done. A second call does nothing.

        Examples
        --------
        >>> stream = cuda.Stream()
        >>> stream.close()
        >>> stream.closed
        True
        """
        self.stream.shut = True

    def __enter__(self):
        self.open_stream()
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    def __repr__(self):
        state = ", closed" if self.stream.shut else ""
        return f"<Stream {<uintptr_t>self.stream.handle:#x} of device {self.device_id}{state}>"

    def __reduce__(self):
        raise TypeError("a Stream cannot be pickled; make one where it is needed")


cdef Event event_on(object stream, int device_id):
    """An Event for all that `stream`, anybody's, was given so far."""
    cdef Event event = Event.__new__(Event)
    cdef StreamRef named = stream_of(stream, device_id)
    cdef void* graph = NULL
    event.fence = new_event(named)
    event.capture = capture_of(named, &graph) if named.captures() else 0
    return event


def wait_for(stream, int device_id):
    """Internal: wait until `stream`, anybody's, has done what it was given so far."""
    wait_here(stream_of(stream, device_id), True)


def wait_on(stream, Event event not None, int device_id):
    """Internal: let what `stream`, anybody's, is given from now on come after `event`."""
    cdef StreamRef named = stream_of(stream, device_id)
    cdef void* graph = NULL
    if not (event.capture and named.captures() and capture_of(named, &graph) == event.capture):
        free_to_use(named, "it cannot wait for the event; do this before the capture", None)
    if not event.fence.wait(named):
        raise CudaError(f"{named!r} cannot wait for the event: was it recorded during a capture?")


# ---- time --------------------------------------------------------------------------------

def elapsed(stream, work, int device_id):
    """Internal: the seconds from when `stream` reaches what `work()` gives it until it is done.

    The call waits for it.
    """
    cdef StreamRef named = stream_of(stream, device_id)
    cdef void* start = NULL
    cdef void* end = NULL
    cdef float milliseconds = 0
    cdef int result
    try:
        start = create_event(named.context, TIMED)
        end = create_event(named.context, TIMED)
        record(named, start)
        work()
        record(named, end)
        synchronize(named)
        with nogil:
            result = enter(named.context)
            if result == SUCCESS:
                result = driver.cuEventElapsedTime(&milliseconds, start, end)
                leave()
        checked(result, "cuEventElapsedTime")
    finally:
        destroy(named.context, start)
        destroy(named.context, end)
    return milliseconds * MILLI


cdef int record(StreamRef stream, void* event) except -1:
    cdef int result
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            result = driver.cuEventRecord(event, stream.handle)
            leave()
    return checked(result, "cuEventRecord")


cdef void destroy(void* context, void* event) noexcept:
    cdef int mode
    if event != NULL:
        with nogil:
            if relax(context, &mode) == SUCCESS:
                forget(driver.cuEventDestroy(event))
                restore_capture_mode(&mode)
