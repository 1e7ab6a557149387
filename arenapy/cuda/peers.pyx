"""Copies between two devices: who reaches whose memory, and relays where nobody does.

What lives here: peer access, for which the driver is asked once for each pair, and the relay, by
which bytes go through the host. What does not: what is copied, and what it waits for (copies).

A device reaches another one's memory itself where the driver allows it: then a copy is one call.
Else the bytes go through pinned memory, a piece at a time. A stream of the source's device fills a
slot, and a stream of the target's device empties it while the next slot is being filled. So both
links are busy at once, and the copy takes about as long as the slower of them. The host waits for
nothing: events say when a slot is full and when it is empty.

The stream that used a relay last may use it again at once, another stream only when that copy is
over. Otherwise the second stream would wait for the first one, of which its user knows nothing. If
all relays of a pair are in use, the driver copies in its own way.

Thread-safety: everything here may be called from any thread.
"""
cimport cython
from libc.stdint cimport uint64_t

import itertools
import weakref

from arenapy.base.sealed cimport seal
from arenapy.buffer.block cimport Block
from arenapy.cuda.driver cimport (
    SUCCESS, checked, driver, enter, generation, leave, primary,
)
from arenapy.cuda.fence cimport EventFence, Fence, let_wait, new_event, synchronize
from arenapy.cuda.stream_ref cimport StreamRef, made_stream, relax, restore_capture_mode

from arenapy.cuda.errors import CudaError
from arenapy.errors import OutOfMemory

cdef enum:
    NON_BLOCKING = 1         # CU_STREAM_NON_BLOCKING
    PEER_UNSUPPORTED = 217   # CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    PEER_ALREADY_ENABLED = 704
    TOO_MANY_PEERS = 711
    # The cost of one more piece of a copy, as bytes that a link carries meanwhile. A copy of n
    # bytes in pieces of p takes as long as n + p + n / p * BYTES_A_PIECE bytes on one link. So p is
    # best as the root of n * BYTES_A_PIECE. (Two H100: 3 us. Two streams on each side hid none.)
    BYTES_A_PIECE = 200_000
    PIECE_LEAST = 256 << 10  # bytes: smaller ones cost more calls than they overlap
    PIECE_MOST = 4 << 20
    RING_BYTES = 16 << 20    # pinned memory of a Relay, which its slots share
    RELAYED_LEAST = 1 << 20  # bytes of a copy: smaller ones the driver copies
    RELAYS = 4               # of a pair of devices

# {(device, other, generation of the driver): None, or why it cannot access the other one's memory}.
cdef dict answers = {}
cdef set staged = set()      # as these keys: pairs that are not to use the access that they have
# {(source, target, generation): the Relays that no call has, least recently used first}. A call
# takes one out before it looks at it: another call could use it, or drop it, in between.
cdef dict relays = {}
# As these keys: a None for each Relay that may still be made.
cdef dict vacant = {}
cdef list lost = []          # Relays of which nobody can tell whether they are in use


# ---- access ------------------------------------------------------------------------------

cpdef object why_no_access(int device, int other):
    """Internal: let a device access another one's memory; None: it can, else the reason."""
    cdef void* here
    cdef void* there
    cdef int can = 0, result, mode
    key = (device, other, generation)
    try:
        return answers[key]
    except KeyError:
        pass
    here, there = primary(device), primary(other)
    with nogil:
        result = driver.cuDeviceCanAccessPeer(&can, device, other)
        if result == SUCCESS and can:
            result = relax(here, &mode)
            if result == SUCCESS:
                result = driver.cuCtxEnablePeerAccess(there, 0)
                restore_capture_mode(&mode)
    why = None
    if result == PEER_UNSUPPORTED or result == TOO_MANY_PEERS:
        try:
            checked(result, "cuCtxEnablePeerAccess")
        except CudaError as error:
            why = f"device {device} cannot access the memory of device {other}: {error}"
    elif result != PEER_ALREADY_ENABLED:
        checked(result, "cuCtxEnablePeerAccess" if can else "cuDeviceCanAccessPeer")
        if not can:
            why = (
                f"device {device} cannot access the memory of device {other}: the driver says that "
                "no link allows it (see nvidia-smi topo -p2p r)"
            )
    answers[key] = why
    return why


def stage(devices, bint on):
    """Internal: whether copies between these go through the host even where they need not."""
    for device, other in itertools.permutations(devices, 2):
        if on:
            staged.add((device, other, generation))
        else:
            staged.discard((device, other, generation))


# ---- relays ------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear                  # its memory is unpinned to the last
cdef class Relay:
    """The way of a copy through pinned memory. Internal."""

    cdef int copy(self, StreamRef s, uint64_t to, uint64_t source, size_t nbytes) except -1:
        cdef Fence read, over
        cdef StreamRef one
        cdef bint idle = True
        cdef int result
        try:
            let_wait(self.near, s)
            with nogil:
                result = self.queue(to, source, nbytes)
            checked(result, "cuMemcpyAsync")
            # If one of the devices fails, its stream is over at once, and the other one is not.
            read, over = new_event(self.near), new_event(self.far)
            let_wait(s, read)
            let_wait(s, over)
        except BaseException:
            for one in (self.near, self.far):
                try:
                    synchronize(one)
                except Exception:
                    idle = False
            if idle:
                (<list>vacant[self.near.device_id, self.far.device_id, generation]).append(None)
            else:
                lost.append(self)            # it may be in use for ever, and none takes its place
            raise
        self.read, self.over, self.user = read, over, weakref.ref(s)
        return 0

    cdef bint passed(self) noexcept:
        return self.read.passed() and self.over.passed()

    cdef int queue(self, uint64_t to, uint64_t source, size_t nbytes) noexcept nogil:
        cdef size_t piece = piece_of(nbytes)
        cdef size_t at = 0, n
        cdef uint64_t slot_address
        cdef int slots = min(RING_BYTES // piece, <size_t>MAX_SLOTS)
        # Both streams are used in one context: each call of the driver finds the stream's own.
        cdef int slot = 0, result = enter(self.near.context)
        if result != SUCCESS:
            return result
        while at < nbytes and result == SUCCESS:
            n = min(piece, nbytes - at)
            slot_address = self.address + slot * piece
            if at >= slots * piece:          # else it is empty: what had it is over, or before `s`
                result = driver.cuStreamWaitEvent(self.near.handle, self.emptied_events[slot], 0)
            if result == SUCCESS:
                result = driver.cuMemcpyAsync(slot_address, source + at, n, self.near.handle)
            if result == SUCCESS:
                result = driver.cuEventRecord(self.filled_events[slot], self.near.handle)
            if result == SUCCESS:
                result = driver.cuStreamWaitEvent(self.far.handle, self.filled_events[slot], 0)
            if result == SUCCESS:
                result = driver.cuMemcpyAsync(to + at, slot_address, n, self.far.handle)
            if result == SUCCESS and at + slots * piece < nbytes:    # it is filled once more
                result = driver.cuEventRecord(self.emptied_events[slot], self.far.handle)
            at += n
            slot = (slot + 1) % slots
        leave()
        return result


seal(Relay)


cdef size_t piece_of(size_t nbytes) noexcept nogil:
    cdef size_t piece = PIECE_LEAST
    while piece < PIECE_MOST and piece * piece < nbytes * BYTES_A_PIECE:
        piece *= 2
    return piece


cdef Relay new_relay(int source, int to):
    from arenapy.cuda.sources import Pinned  # which imports copies
    cdef Relay relay = Relay.__new__(Relay)
    cdef int slot
    relay.pinned = Pinned(mapped=False).region(RING_BYTES).buffer()
    relay.address = <uint64_t>(<Block>relay.pinned).ptr
    relay.near = made_stream(primary(source), source, NON_BLOCKING)
    relay.far = made_stream(primary(to), to, NON_BLOCKING)
    relay.filled = [new_event(relay.near) for _ in range(MAX_SLOTS)]
    relay.emptied = [new_event(relay.far) for _ in range(MAX_SLOTS)]
    for slot in range(MAX_SLOTS):
        relay.filled_events[slot] = (<EventFence>relay.filled[slot]).event
        relay.emptied_events[slot] = (<EventFence>relay.emptied[slot]).event
    return relay


cdef bint goes_by_host(int source, int to, size_t nbytes) except -1:
    if (source, to, generation) not in staged:
        there = why_no_access(to, source)
        back = why_no_access(source, to)     # both are enabled, whichever device copies
        if there is None or back is None:
            return False
    return nbytes >= RELAYED_LEAST


cdef Relay take_relay(StreamRef s, int source, int to):
    key = (source, to, generation)
    cdef list kept = <list>relays.setdefault(key, [])
    cdef list free = <list>vacant.setdefault(key, [None] * RELAYS)
    cdef Relay relay
    for _ in range(len(kept)):
        try:
            relay = kept.pop(0)
        except IndexError:                   # other threads have them
            break
        if relay.user() is s or relay.passed():
            return relay
        kept.append(relay)
    try:
        free.pop()
    except IndexError:
        return None
    try:
        return new_relay(source, to)
    except BaseException as error:
        free.append(None)
        if isinstance(error, OutOfMemory):
            return None
        raise


cdef int give_relay_back(Relay relay) except -1:
    (<list>relays[relay.near.device_id, relay.far.device_id, generation]).append(relay)
    return 0


def trim_relays():
    """Internal: give back the pinned memory of all relays that are not in use."""
    cdef list kept
    cdef Relay relay
    for key, kept in relays.copy().items():
        for _ in range(len(kept)):
            try:
                relay = kept.pop(0)
            except IndexError:               # other threads have them
                break
            if key[2] == generation and not relay.passed():
                kept.append(relay)
                continue
            relay = None                     # before another one may be made
            (<list>vacant[key]).append(None)
