"""What is behind the simulated driver: operations that run when they are told to.

An operation is queued with what it needs: the one before it on its stream, what its stream waits
for, and what the legacy stream's rules add. `step` runs one of those whose needs have run, and a
call that waits runs what it must and nothing else. So all that a GPU may leave undone is left
undone, until a test says otherwise.
"""

import ctypes
import itertools
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from simulated_memory import INVALID_HANDLE, INVALID_VALUE, SUCCESS, Handles, Memory, Refused, put

INVALID_CONTEXT, ILLEGAL_STATE, NOT_READY, NOT_PERMITTED = 201, 401, 600, 800
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE = 900, 901, 902
CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = 905, 906, 907
ACTIVE, INVALIDATED = 1, 2  # of a capture
GLOBAL, RELAXED = 0, 2  # capture modes; 1: of this thread only
NON_BLOCKING, DISABLE_TIMING = 1, 2  # flags


@dataclass(eq=False)
class Operation:
    what: str
    device: int
    run: Any = None
    touches: tuple = ()  # (address, nbytes) ...
    needs: tuple = ()  # operations
    kernel: bool = False  # it runs on the device, and sees what the device sees
    number: int = 0  # in the order of calls
    done: bool = False
    time: int = 0
    capture: Any = None


@dataclass(eq=False)
class Stream:
    name: str
    context: int
    device: int
    blocking: bool
    id: int
    tail: Operation | None = None
    capture: Any = None
    captured_tail: Operation | None = None
    destroyed: bool = False

    def busy(self):
        return self.tail is not None and not self.tail.done


@dataclass(eq=False)
class Event:
    context: int
    timing: bool
    record: Operation | None = None  # the latest


@dataclass(eq=False)
class Graph:
    nodes: list = field(default_factory=list)
    objects: Counter = field(default_factory=Counter)  # references to user objects
    running: int = 0
    destroyed: bool = False


@dataclass(eq=False)
class Capture:
    graph: Graph
    handle: int  # the graph's
    origin: Stream
    mode: int
    thread: int
    id: int
    streams: list
    status: int = ACTIVE


def behind(operations):
    """These and all that they need, of what has not run."""
    found, left = set(), [one for one in operations if one is not None]
    while left:
        one = left.pop()
        if not one.done and one not in found:
            found.add(one)
            left.extend(one.needs)
    return found


class Gpu:
    """Streams, their operations, and captures, of all devices together."""

    def __init__(self, sizes):
        self.errors = []  # what was misused
        self.memory = Memory(sizes)
        self.attributes = {}  # of devices
        self.peers = set(itertools.permutations(range(len(sizes)), 2))  # who could
        self.enabled = set()  # who may: (device, the other one)
        self.lock = threading.RLock()
        self.depth = 0
        self.numbers, self.ids = itertools.count(1), itertools.count(1)
        self.ticks = 0
        self.queue = []
        self.streams = []  # also destroyed ones that are busy
        self.defaults = {}  # {(context, None or a thread): stream}
        self.stream_handles = Handles("stream", 0x50000000)
        self.event_handles = Handles("event", 0x60000000)
        self.graph_handles = Handles("graph", 0x80000000, INVALID_VALUE)
        self.pool_handles = Handles("memory pool", 0x70000000, INVALID_VALUE)
        self.object_handles = Handles("user object", 0x90000000, INVALID_VALUE)
        self.captures = []
        self.capture_modes = {}  # {thread: mode}
        self.stacks = {}  # {thread: contexts, the last one current}
        self.doomed = []  # user objects
        self.destroying = set()  # threads that are in a destructor

    @contextmanager
    def exclusive(self):
        """One thread at a time. Destructors run after it: the driver has a thread for them."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self):
        self.lock.acquire()
        self.depth += 1

    def leave(self):
        self.depth -= 1
        doomed = ()
        if self.doomed and not self.depth:
            doomed, self.doomed = self.doomed, []
        self.lock.release()
        for one in doomed:
            me = threading.get_native_id()
            self.destroying.add(me)
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(one.destroy)(one.pointer)
            self.destroying.discard(me)

    # ---- what runs when ----

    def step(self, k=0):
        """Run one operation that may run, the k-th of them in the order of calls; False: none."""
        with self.exclusive():
            queue = reversed(self.queue) if k == -1 else self.queue
            ready = (one for one in queue if all(need.done for need in one.needs))
            if k not in (0, -1):  # the first and the last are found without a look at all others
                ready = list(ready)
                ready = iter(ready[k % len(ready) :] if ready else ())
            one = next(ready, None)
            if one is not None:
                self._execute(one)
            return one is not None

    def drain(self):
        with self.exclusive():
            self.finish(list(self.queue))

    def finish(self, operations):
        """Run these and what they need."""
        wanted = behind(operations)
        for one in [one for one in self.queue if one in wanted]:
            self._execute(one)

    def wait(self, operations):
        """As `finish`, for a call that says to wait: then pools give back."""
        self.finish(operations)
        for pool in self.pool_handles.things.values():
            pool.trim(pool.threshold)

    def _execute(self, one):
        if one.done:
            return
        self.queue.remove(one)
        self.ticks += 1
        one.done, one.needs, one.time = True, (), self.ticks
        fault = self._fault(one)
        if fault:
            self.errors.append(f"{one.what} touches {fault}")
        elif one.run:
            one.run()

    def _fault(self, operation):
        """What is wrong with an address that it touches."""
        for address, nbytes in operation.touches:
            one = self.memory.find(address)
            if one is None:
                return f"{address:#x}, which is not the driver's"
            elif one.dead or (one.freed_at or operation.number) < operation.number:
                return f"{address:#x}, which was freed"
            elif not one.ready:
                return f"{address:#x}, whose allocation has not run"
            elif address + nbytes > one.end:
                return f"{nbytes} bytes from {address:#x}, beyond the end of an allocation"
            elif operation.kernel and one.access is not None:
                if operation.device not in one.access:
                    return f"{address:#x}, to which device {operation.device} has no access"
            elif operation.kernel and one.kind in ("device", "pool"):
                pair = (operation.device, one.device)
                if one.device != operation.device and pair not in self.enabled:
                    return f"{address:#x} of device {one.device}, which is no peer"
        return ""

    def uses(self, start, nbytes):
        """Whether an operation that has not run touches any of these bytes."""
        return any(
            address < start + nbytes and start < address + length
            for one in self.queue
            for address, length in one.touches
        )

    # ---- streams ----

    def context(self):
        stack = self.stacks.get(threading.get_native_id())
        if not stack or not stack[-1]:
            raise Refused(INVALID_CONTEXT)
        return stack[-1]

    def device(self):
        return self.context() // 0x1000 - 1

    def add_stream(self, name, context, blocking=True):
        one = Stream(name, context, context // 0x1000 - 1, blocking, next(self.ids))
        self.streams = [old for old in self.streams if old.busy() or not old.destroyed] + [one]
        return one

    def default_stream(self, context, thread=None):
        """The legacy one, or a thread's."""
        if (context, thread) not in self.defaults:
            name = f"thread {thread}'s stream" if thread else "the legacy stream"
            self.defaults[context, thread] = self.add_stream(name, context)
        return self.defaults[context, thread]

    def stream(self, handle):
        if handle in (None, 0, 1):
            return self.default_stream(self.context())
        if handle == 2:
            return self.default_stream(self.context(), threading.get_native_id())
        return self.stream_handles.get(handle)

    def submit(self, stream, what, run=None, touches=(), needs=(), kernel=False):
        """Queue it, or append it to the graph that the stream is captured to."""
        name, touches = f"{what} on {stream.name}", tuple(touches)
        one = Operation(name, stream.device, run, touches, kernel=kernel)
        self.usable(stream)
        if stream.capture:
            before = (stream.captured_tail, *needs)
            one.needs = tuple(need for need in before if need is not None)
            one.capture = stream.capture
            stream.capture.graph.nodes.append(one)
            stream.captured_tail = one
            return one
        return self._enqueue(stream, one, (*self._before(stream), *needs))

    def _before(self, stream):
        """What the next operation on a stream comes after."""
        legacy = self.default_stream(stream.context)
        if stream is legacy:
            return [
                one.tail for one in self.streams if one.blocking and one.context == stream.context
            ]
        return [stream.tail, legacy.tail] if stream.blocking else [stream.tail]

    def _enqueue(self, stream, one, needs):
        one.number = next(self.numbers)
        one.needs = tuple(need for need in needs if need is not None and not need.done)
        self.queue.append(one)
        stream.tail = one
        return one

    def launch(self, stream, call=None, touches=()):
        """A kernel: `call()` when it runs. It touches (address, nbytes) ..."""
        with self.exclusive():
            self.submit(self.stream(stream), "a kernel", call, touches, kernel=True)

    # ---- captures ----

    def begin_capture(self, stream, mode=GLOBAL):
        with self.exclusive():
            one = self.stream(stream)
            if one.capture or one is self.default_stream(one.context):
                raise Refused(ILLEGAL_STATE if one.capture else CAPTURE_UNSUPPORTED)
            graph = Graph()
            handle = self.graph_handles.add(graph)
            me = threading.get_native_id()
            one.capture = Capture(graph, handle, one, mode, me, next(self.ids), [one])
            one.captured_tail = None
            self.captures.append(one.capture)

    def end_capture(self, stream):
        """The graph; 0: the capture was invalidated."""
        with self.exclusive():
            one = self.stream(stream)
            capture = one.capture
            if capture is None or capture.origin is not one:
                raise Refused(ILLEGAL_STATE)
            if not set(capture.graph.nodes) <= behind([one.captured_tail]):
                capture.status = INVALIDATED
                self.errors.append("a capture ended with work that its stream does not wait for")
            self.captures.remove(capture)
            for joined in capture.streams:
                joined.capture = joined.captured_tail = None
            if capture.status == ACTIVE:
                return capture.handle
            self.destroy_graph(capture.handle)
            return 0

    def replay(self, graph, stream):
        """Launch it: its operations are ordered among themselves as they were captured."""
        with self.exclusive():
            source = self.graph_handles.get(graph)
            on = self.stream(stream)
            if on.capture:
                raise Refused(CAPTURE_UNSUPPORTED, "a graph launched into a capture: not modelled")
            self.not_implicit(on)
            before, copies = self._before(on), {}
            for node in source.nodes:
                one = Operation(node.what, node.device, node.run, node.touches, kernel=node.kernel)
                needs = [copies[need] for need in node.needs]
                copies[node] = self._enqueue(on, one, [*before, *needs])
            source.running += 1
            end = Operation(f"a graph's end on {on.name}", on.device, lambda: self._ran(source))
            self._enqueue(on, end, [*before, *copies.values()])

    def copy_of(self, graph):
        """Another graph, or what is launched: it has references of its own to user objects."""
        with self.exclusive():
            return self.graph_handles.add(self._copied(self.graph_handles.get(graph)))

    def _copied(self, source):
        for one, count in source.objects.items():
            one.references += count
        return Graph(list(source.nodes), Counter(source.objects))

    def update(self, executable, graph):
        """From now on its launches are of the other graph. Earlier ones keep what they use."""
        with self.exclusive():
            before = self.graph_handles.get(executable)
            self.graph_handles.things[executable] = self._copied(self.graph_handles.get(graph))
            self._destroy(before)

    def destroy_graph(self, graph):
        """Its user objects stay until what was launched has run."""
        with self.exclusive():
            self._destroy(self.graph_handles.remove(graph))

    def _destroy(self, graph):
        graph.destroyed = True
        graph.running += 1
        self._ran(graph)

    def _ran(self, graph):
        graph.running -= 1
        if graph.destroyed and not graph.running:
            for one, count in graph.objects.items():
                self.drop(one, count)

    def drop(self, user_object, count):
        user_object.references -= count
        if not user_object.references:
            self.object_handles.remove(user_object.handle)
            self.doomed.append(user_object)

    def usable(self, stream):
        """Before an operation is queued."""
        if stream.capture and stream.capture.status == INVALIDATED:
            raise Refused(CAPTURE_INVALIDATED)
        self.not_implicit(stream)

    def spoil(self, capture, result, why):
        capture.status = INVALIDATED
        raise Refused(result, f"{why}, which invalidates a capture")

    def not_captured(self, stream):
        """Before what cannot be done with a stream that is captured."""
        if stream.capture:
            self.spoil(stream.capture, CAPTURE_UNSUPPORTED, f"{stream.name} is captured")
        self.not_implicit(stream)

    def implicit(self, stream):
        """The capture that the legacy stream would have to wait for."""
        if stream is self.default_stream(stream.context):
            for capture in self.captures:
                if any(one.blocking and one.context == stream.context for one in capture.streams):
                    return capture
        return None

    def not_implicit(self, stream):
        capture = self.implicit(stream)
        if capture:
            self.spoil(capture, CAPTURE_IMPLICIT, "the legacy stream is used")

    def unsafe(self):
        """Before what a thread may not do while there is a capture; see the capture modes."""
        me = threading.get_native_id()
        mode = self.capture_modes.get(me, GLOBAL)
        for capture in self.captures:
            mine = capture.thread == me
            if RELAXED not in (mode, capture.mode) and (mine or mode == capture.mode == GLOBAL):
                self.spoil(capture, CAPTURE_UNSUPPORTED, "it is not allowed in a capture")

    # ---- entry points of streams ----

    def cuStreamCreate(self, out, flags):
        one = self.add_stream("", self.context(), blocking=flags != NON_BLOCKING)
        one.name = f"stream {one.id}"
        put(out, ctypes.c_void_p, self.stream_handles.add(one))

    def cuStreamDestroy(self, stream):
        one = self.stream_handles.get(stream)
        if one.capture:
            self.not_captured(one)
        self.stream_handles.remove(stream).destroyed = True

    def cuStreamGetId(self, stream, out):
        one = self.stream(stream)
        if one.capture:
            self.spoil(one.capture, CAPTURE_UNSUPPORTED, f"the id of {one.name} is asked for")
        put(out, ctypes.c_uint64, one.id)

    def cuStreamGetCtx(self, stream, out):
        put(out, ctypes.c_void_p, self.stream(stream).context)

    def cuStreamQuery(self, stream):
        one = self.stream(stream)
        self.not_captured(one)
        return NOT_READY if one.busy() else SUCCESS

    def cuStreamSynchronize(self, stream):
        one = self.stream(stream)
        self.not_captured(one)
        self.wait([one.tail])

    def cuStreamWaitEvent(self, stream, event, flags):
        """For what the event stands for now, which may make the stream part of a capture."""
        one, record = self.stream(stream), self.event_handles.get(event).record
        theirs = record and record.capture
        if one.capture and record and not theirs:
            self.spoil(one.capture, CAPTURE_ISOLATION, "it waits for what is not captured")
        if theirs and theirs not in self.captures:
            raise Refused(CAPTURED_EVENT, "the event's capture is over")
        if theirs and one.capture not in (None, theirs):
            self.spoil(one.capture, CAPTURE_MERGE, "it waits for another capture")
        if theirs and not one.capture:
            self.not_implicit(one)
            one.capture = theirs
            theirs.streams.append(one)
        self.submit(one, "a wait", needs=[record])

    def cuStreamIsCapturing(self, stream, out):
        self._capture(stream, out)

    def cuStreamGetCaptureInfo(self, stream, status, number, graph, *rest):
        capture = self._capture(stream, status)
        if capture and number:
            put(number, ctypes.c_uint64, capture.id)
        for out in (graph, *rest):
            if out:
                put(out, ctypes.c_uint64, capture.handle if capture and out == graph else 0)

    cuStreamGetCaptureInfo_12 = cuStreamGetCaptureInfo

    def _capture(self, stream, out):
        one = self.stream(stream)
        if self.implicit(one):
            raise Refused(CAPTURE_IMPLICIT)  # it only asks: no capture is invalidated
        if out:
            put(out, ctypes.c_int, one.capture.status if one.capture else 0)
        return one.capture

    def cuThreadExchangeStreamCaptureMode(self, mode):
        me, new = threading.get_native_id(), ctypes.c_int.from_address(mode).value
        put(mode, ctypes.c_int, self.capture_modes.get(me, GLOBAL))
        self.capture_modes[me] = new

    # ---- entry points of events ----

    def cuEventCreate(self, out, flags):
        one = Event(self.context(), timing=not flags & DISABLE_TIMING)
        put(out, ctypes.c_void_p, self.event_handles.add(one))

    def cuEventDestroy(self, event):
        self.event_handles.remove(event)

    def cuEventRecord(self, event, stream):
        one, on = self.event_handles.get(event), self.stream(stream)
        if one.context != on.context:
            raise Refused(INVALID_HANDLE, f"an event of another context, on {on.name}")
        one.record = self.submit(on, "a record")

    def _record(self, event):
        """What an event waits for; None: nothing."""
        record = self.event_handles.get(event).record
        if record and record.capture in self.captures:
            self.spoil(record.capture, CAPTURED_EVENT, "the event was recorded in it")
        if record and record.capture:
            raise Refused(CAPTURED_EVENT, "the event was recorded in a capture")
        self.unsafe()
        return record

    def cuEventQuery(self, event):
        record = self._record(event)
        return SUCCESS if record is None or record.done else NOT_READY

    def cuEventSynchronize(self, event):
        self.wait([self._record(event)])

    def cuEventElapsedTime(self, out, start, end):
        both = [self.event_handles.get(one) for one in (start, end)]
        records = [self._record(one) for one in (start, end)]
        if not all(records) or not all(one.timing for one in both):
            return INVALID_HANDLE
        if not all(one.done for one in records):
            return NOT_READY
        put(out, ctypes.c_float, (records[1].time - records[0].time) / 1000)
