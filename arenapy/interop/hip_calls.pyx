"""Calls of the HIP runtime that leave nothing behind: owned memory, and the current device.

What lives here: each call after which something has to be undone. What does not: the sources, and
what a copy is (hip).

Never run on hardware: the tests replace the HIP runtime by a model of it.

The exception of a signal's handler can come between any two bytecodes of Python code, as between an
allocation and the line that notes its address. Compiled code has no such place.
"""
cimport cython
from posix.unistd cimport getpid

import warnings
from collections import deque

from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.base.sealed cimport seal

from arenapy.base.text import format_bytes
from arenapy.errors import OutOfMemory

cdef enum:
    INVALID_VALUE = 1        # of hipError_t
    OUT_OF_MEMORY = 2
    NO_DEVICE = 100

INSTALL = "pip install 'arenapy-memory[hip]'; it needs AMD's ROCm on the machine"
unfreed = deque()            # Memory that the runtime refused to free, to be freed later


cdef object answer_of(object hip, str function, tuple arguments):
    """The runtime's result of a call, and what it returns beside that."""
    from arenapy.interop.hip import Unavailable

    try:
        return getattr(hip, function)(*arguments)
    except (RuntimeError, AttributeError) as error:    # hip-python loads the library at a call
        raise Unavailable(f"{function} cannot be called: {error} ({INSTALL})") from error


cdef object refusal(object hip, str function, object result):
    """The exception that a result means."""
    from arenapy.interop.hip import HipError, Unavailable

    # The runtime remembers it until it is asked, and other libraries take it for their own.
    hip.hipGetLastError()
    name = getattr(result, "name", str(result))
    if int(result) == NO_DEVICE:
        return Unavailable(
            f"{function} failed: {name}: the HIP runtime sees no device; see rocminfo, and "
            "HIP_VISIBLE_DEVICES"
        )
    return HipError(
        f"{function} failed: {name}; a kernel that ran before may have caused it: "
        "AMD_LOG_LEVEL=3 in the environment logs each call",
        int(result),
        name,
    )


def call(hip, function, *arguments):
    """The value that a function of the runtime returns beside its result; None if it has none."""
    result, *values = answer_of(hip, function, arguments)
    if int(result):
        raise refusal(hip, function, result)
    return None if not values else values[0] if len(values) == 1 else values


def calls_on(hip, ordinal, calls):
    """Do calls with a device as this thread's current one: each a function, then its arguments."""
    before = call(hip, "hipGetDevice")
    if before != ordinal:
        call(hip, "hipSetDevice", ordinal)
    try:
        for function, *arguments in calls:
            call(hip, function, *arguments)
    finally:
        if before != ordinal:
            call(hip, "hipSetDevice", before)


@cython.final
cdef class Memory:
    """Memory of the runtime, which is freed at the end of this object. Internal."""

    cdef object hip
    cdef str free
    cdef int process
    cdef readonly object nbytes
    cdef readonly object ordinal
    cdef readonly object address         # 0: none yet, or no more

    def __del__(self):
        if self.address and not arenapy_finalizing() and self.process == getpid():
            self.give_back()

    cdef int give_back(self) except -1:
        """Free it. If the runtime cannot do so now, it stays in `unfreed`."""
        from arenapy.interop.hip import HipError, Unavailable

        cdef int known = -1              # what the runtime said
        try:
            before = call(self.hip, "hipGetDevice")
            if before != self.ordinal:
                call(self.hip, "hipSetDevice", self.ordinal)
            try:
                result = answer_of(self.hip, self.free, (self.address,))[0]
                known = int(result)
                if known:
                    raise refusal(self.hip, self.free, result)
            finally:
                if before != self.ordinal:
                    call(self.hip, "hipSetDevice", before)
        except BaseException as error:
            told = isinstance(error, (HipError, Unavailable))
            if known not in (0, INVALID_VALUE):
                unfreed.append(self)
            elif told and known == INVALID_VALUE:
                # To free it later could free the memory of whoever has the address by then.
                warnings.warn(
                    f"{error} (the runtime does not know the {format_bytes(self.nbytes)} at "
                    f"{self.address:#x}: other code has freed this memory, which is not allowed)",
                    RuntimeWarning,
                )
            elif told:                   # it is freed; only the device could not be restored
                warnings.warn(f"{error}: another device is current now", RuntimeWarning)
            if not told:
                raise
        finally:
            if known == 0:
                self.address = 0
        return 0


seal(Memory)


def allocate(hip, ordinal, nbytes, functions, *flags):
    """Memory of a device, or of the host for it: of the first function, freed by the second one."""
    cdef Memory memory = Memory.__new__(Memory)
    alloc, free = functions
    free_the_unfreed()
    memory.hip, memory.free, memory.process = hip, free, getpid()
    memory.nbytes, memory.ordinal, memory.address = nbytes, ordinal, 0
    before = call(hip, "hipGetDevice")
    if before != ordinal:
        call(hip, "hipSetDevice", ordinal)
    try:
        result, *values = answer_of(hip, alloc, (nbytes, *flags))
        if int(result):
            raise_refused(hip, alloc, result, nbytes, ordinal)
        memory.address = int(values[0])
    finally:
        if before != ordinal:
            call(hip, "hipSetDevice", before)
    return memory


cdef int raise_refused(
    object hip, str alloc, object result, object nbytes, object ordinal
) except -1:
    error = refusal(hip, alloc, result)
    if int(result) != OUT_OF_MEMORY:
        raise error
    free_bytes, total_bytes = call(hip, "hipMemGetInfo")
    kept = sum([(<Memory>one).nbytes for one in list(unfreed)])
    raise OutOfMemory(
        f"{alloc} of {format_bytes(nbytes)} on device {ordinal} failed: {error.name}: "
        f"{format_bytes(free_bytes)} of the device's {format_bytes(total_bytes)} are free"
        + (f", and the runtime refused to free {format_bytes(kept)}" if kept else "")
        + "; ask for less, or end what else uses the memory"
    ) from error


cdef int free_the_unfreed() except -1:
    cdef Memory memory
    for _ in range(len(unfreed)):
        try:
            memory = <Memory>unfreed.popleft()
        except IndexError:               # another thread frees them, too
            break
        memory.give_back()
    return 0
