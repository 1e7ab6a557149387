"""What is documented to come of a driver call that fails: `TABLE`; and which calls arenapy does not
make: `NEVER_CALLED`.

A row says for which operations (a pattern of their names), calls and results it holds, and which
exception follows, "" if none does, and a part of its text. It also says what is left behind, on
purpose: in all failures of the row, or, with "?", in some. What is not named there may not be. The
first row that fits counts.
"""

import re

from injection import ANY, FINE, Row
from simulated_driver import ERRORS, INVALID_VALUE, OUT_OF_MEMORY

#: With which results every call is made to fail, and how these are told.
RESULTS = {
    "INVALID_VALUE": (INVALID_VALUE, "CudaError"),
    "OUT_OF_MEMORY": (OUT_OF_MEMORY, "OutOfMemory"),
}

NEVER_CALLED = {
    "cuCtxSynchronize": "it would make captures invalid, also those that nobody here knows of",
    "cuDriverGetVersion": "what a driver has is seen by its entry points",
}

TOLD = "{kind}: failed: {text}"
NO_WAIT = (
    "CudaError: cuStreamWaitEvent failed: ",
    "CudaError: cannot wait for the event",
    "CudaError: the event cannot be waited for",
    "CudaError: waiting for",
)
# Work that may be part of a capture is refused. (What it copies or names is not touched then.)
UNKNOWN = "CudaError: the stream"
FULL = "OutOfMemory: fit into the "
NO_ROOM = "OutOfMemory: are free; ask for less"
NO_ADDRESS = "OutOfMemory: drop blocks that were received"
EXCHANGE = "cuThreadExchangeStreamCaptureMode"
BY_THE_HOST = "copy between devices by way of the host"
GONE = "was unregistered while|which is not the driver's"


def row(operations, calls, *outcomes, results=ANY, leaves="", misuse=""):
    return Row(operations, calls, results, outcomes, frozenset(leaves.split()), misuse)


PUSH = "cuCtxPushCurrent"
GRANULARITY = "cuMemGetAllocationGranularity"
MAPS = "cuMem(Create|Map|SetAccess)"
WAITS = "cuStreamWaitEvent|cuEventSynchronize"
EVENTS = "cuEventCreate|cuEventRecord|cuStreamGetId"
ALLOCATES = "cuMemAlloc|cuMemAllocManaged|cuMemAllocFromPoolAsync"
FOR_A_REGION = (
    f"{ALLOCATES}|cuMemHostRegister|cuDeviceGetAttribute|cuMemPool(Create|SetAttribute|SetAccess)|"
    "cuDeviceCanAccessPeer|cuMemGetInfo|cuDeviceGetName|cuDeviceGet|cuDevicePrimaryCtxRetain|"
    "cuStreamCreate|cuStreamGetId|cuStreamSynchronize"
)

TABLE = [
    # Around other calls.
    row(ANY, "cuCtxPopCurrent", FINE, leaves="contexts"),  # what was to be done is done
    row(
        "alloc in a capture.*",
        EXCHANGE,
        FINE,
        "CudaError: cuMemFree failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        misuse="it is not allowed in a capture, which invalidates a capture",
    ),
    row(ANY, EXCHANGE, FINE),  # what follows may disturb a capture then
    row(ANY, f"{EXCHANGE} back", FINE, leaves="modes"),
    # At an end nobody is told. What could not be given back is lost to the process.
    row("end of a region of (device|managed)", f"cuMemFree|{PUSH}", FINE, leaves="memory"),
    row("end of a region of pinned", f"cuMemHostUnregister|{PUSH}", FINE, leaves="registered"),
    row("end of a Pool over .*", "cuMemFree", FINE, leaves="memory"),
    row("end of a Pool over pinned", "cuMemHostUnregister", FINE, leaves="registered"),
    row("end of a DriverPool", "cuMemPoolDestroy", FINE, leaves="pools"),
    row("end of a (DriverPool|Stream)", "cuStreamDestroy", FINE, leaves="streams"),
    row("end of a Stream", PUSH, FINE, leaves="streams"),
    row("elapsed|end of many Events", "cuEventDestroy", FINE, leaves="events"),
    row("end of many Events", PUSH, FINE, leaves="events"),
    row("elapsed", PUSH, FINE, TOLD, leaves="events?"),
    row("end of a DriverPool", PUSH, FINE, leaves="pools? streams?"),
    row("end of a Pool over (device|managed)", PUSH, FINE, leaves="memory?"),
    row("a stream that .*", PUSH, FINE, TOLD, UNKNOWN),
    row("end of a Pool over pinned", PUSH, FINE, leaves="registered?"),
    row("a graph that keeps nothing", "cuUserObjectRelease", FINE, leaves="objects"),
    row("end of a .*", "cuMemFreeAsync", FINE),  # it is tried again when the source is used next
    row("end of .*", ANY, FINE),
    # Questions: who does not know takes the worse answer, if there is one.
    row("the text of an error|a .*", "cuGetError(Name|String)", FINE),
    row("the text of an error", ANY, FINE, TOLD),  # a CudaError is expected there
    row(
        "(a graph|use in a capture).*",
        "cuStreamIsCapturing",
        FINE,
        *("CudaError: captured into a graph", UNKNOWN),
        "CudaError: cuStreamGetId failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        misuse="cuStreamGetId: .* invalidates a capture",
    ),
    row(
        "(use|alloc) in a capture.*", "cuStreamGetCaptureInfo.*", FINE, TOLD
    ),  # at the release: FINE
    row("alloc in a capture.*", "cuMemFree", TOLD, leaves="memory"),
    row(ANY, "cuStreamIsCapturing", FINE, UNKNOWN),
    row(ANY, "cuCtxGetCurrent", FINE),  # then a context is made current
    row(ANY, "cuStreamQuery|cuEventQuery", FINE),
    row(ANY, "cuDevicePrimaryCtxGetState", FINE),  # it counts as in use
    row("release of pinned memory that .*", "cuDeviceGet", FINE),  # likewise
    row("a stream that .*", "cuMemFree", FINE, leaves="memory"),  # the block is free later
    row("a stream that .*", "cuMemAlloc", FINE),  # likewise
    row(".*pinned|a bit .*", "cuCtxGetDevice", FINE, TOLD),  # of no context: device 0
    row("copy.*", "cuPointerGetAttribute", results="INVALID_VALUE"),  # an answer: it is pageable
    row("copy.*", "cuPointerGetAttribute", FINE),
    # If there is no memory for the way through the host, the driver copies.
    row(BY_THE_HOST, f"{FOR_A_REGION}|{EVENTS}|cuCtxGetDevice", FINE, TOLD),
    row(BY_THE_HOST, WAITS, TOLD, *NO_WAIT),
    # A block that another process gets. At the end of what it received, nobody is told.
    row("sent .*", "cuMemRelease|cuMemUnmap|cuMemFree|cuMemAddressFree", FINE, leaves="memory?"),
    row("sent .*", PUSH, FINE, TOLD, NO_ROOM, UNKNOWN, NO_ADDRESS, *NO_WAIT, leaves="memory?"),
    row("sent .*", f"cuMemAddressReserve|{GRANULARITY}", TOLD, NO_ADDRESS),
    row("sent .*", ANY, FINE, TOLD, NO_ROOM, *NO_WAIT),
    # Memory that grows in place. What cannot be unmapped stays, and is used again; what could not
    # be given back at an end is given back when the next one is made.
    row("growing .*", "cuMemRelease", FINE, leaves="memory?"),
    row("growing .*", "cuMemUnmap", FINE),
    row("growing bump.*", MAPS, NO_ROOM, results="OUT_OF_MEMORY"),
    row("growing .*", f"cuMemAlloc|{MAPS}", FINE, results="OUT_OF_MEMORY"),
    row("growing bump.*", PUSH, NO_ROOM, UNKNOWN, FINE, TOLD),
    row("growing .*", f"{PUSH}|cuMemAddressReserve|{GRANULARITY}", FULL, FINE, TOLD),
    row("growing .*", f"{EVENTS}|{WAITS}|cuMemFree", FINE),
    # A pool that gets no memory asks for less.
    row("pool alloc, first.*", FOR_A_REGION, FINE, results="OUT_OF_MEMORY"),
    row("pool alloc on another stream", EVENTS, FINE, TOLD, results="OUT_OF_MEMORY"),
    row(
        "(release|a bit of everything|use in a capture).*",
        FOR_A_REGION,
        *(FINE, TOLD),
        results="OUT_OF_MEMORY",
    ),
    row(r"region of .*|bump\(\)|slab\(\)", ALLOCATES, NO_ROOM, results="OUT_OF_MEMORY"),
    row("region of driver pool", "cuStreamSynchronize", NO_ROOM, results="OUT_OF_MEMORY"),
    row(r"region of .*|bump\(\)|slab\(\)", PUSH, NO_ROOM, TOLD),
    # A block that cannot be waited for is not handed out, and is looked at again later.
    row(".* of memory in use.*", WAITS, FULL),
    row(".* of memory in use.*", PUSH, FULL, FINE),
    row("(release|a bit of everything|a stream that).*", EVENTS, FINE, TOLD),
    row(ANY, WAITS, *NO_WAIT),
    # Of a copy that was begun, the event that tells when it is done is made later, then.
    row("copy from another.* on a stream", "cuEventRecord", FINE, TOLD),
    # The copy may still run then, and what it copies is the caller's to keep.
    row("copy from another.*", "cuStreamSynchronize", TOLD, misuse=GONE),
    row("copy from another library's pinned memory", PUSH, FINE, TOLD, UNKNOWN, misuse=GONE),
    # Before the default streams are asked whether they are captured, too.
    row(ANY, PUSH, FINE, TOLD, UNKNOWN, *NO_WAIT),
    row("a graph that keeps nothing", ANY, FINE, TOLD),  # a CudaError is expected there
    row(ANY, ANY, TOLD),
]


def name_of(call, nth):
    """As the table has it: of two exchanges, the second one undoes what the first one did."""
    return f"{call} back" if call == EXCHANGE and nth % 2 == 0 else call


def outcomes_of(row, result):
    """Its outcomes, with the words of that result."""
    number, kind = RESULTS[result]
    text = "{} ({})".format(*(part.decode() for part in ERRORS[number]))
    return [outcome.format(kind=kind, text=text) for outcome in row.outcomes]


def problems_of(outcome, usual, row):
    """What should not have happened; `usual`: what is left when nothing fails."""
    problems = list(outcome.problems)
    if not outcome.failed:
        problems.append("it was not called this time")
    for what, count in outcome.left.items():
        if count != usual[what] and not {what, f"{what}?"} & row.leaves:
            problems.append(f"left {what}: {usual[what]} -> {count}")
        if count <= usual[what] and what in row.leaves:
            problems.append(f"it should have left {what}")
    if row.misuse:
        return [*problems, *(one for one in outcome.misused if not re.search(row.misuse, one))]
    return problems + outcome.misused
