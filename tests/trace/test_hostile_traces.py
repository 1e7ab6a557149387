"""Damaged traces and hostile streams of events: told as such, or taken as far as they make sense.

Whatever a file holds, reading it, summing it up, showing it and replaying it end in a ValueError
that names the damage (OutOfMemory, if a replay wants what the machine does not have), or in figures
that agree with each other. Nothing else: no other exception, no warning, no end of memory.
"""

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_programs import Torch

import arenapy
from arenapy import trace
from arenapy.commands import cli
from arenapy.commands.replay.command import replay
from arenapy.commands.replay.loop import BumpHeap, NoHeap, PoolHeap, run
from arenapy.commands.replay.program import program
from arenapy.diagnostics.recorder import Recorder
from arenapy.trace.format import HEADER, RECORD
from arenapy.trace.holders import WAYS
from arenapy.trace.view import View

MIB = 1 << 20
MAX_MEMORY = 64 * MIB  # for a file of some KiB
MAX_LIVE = 64 * MIB  # that is really allocated here
WORDS = st.integers(0, 2**64 - 1) | st.sampled_from(
    [0, 1, 2, 2**31, 2**32 - 1, 2**47, 2**48 - 1, 2**56 - 1, 2**63 - 1, 2**63, 2**64 - 1]
)


# ---- valid files


def recorded(path):
    """By the recorder, with sites, streams, marks, and times by the processor's counter."""
    arena, pool = arenapy.Bump(MIB), arenapy.Pool()
    with trace.record(arena, path, sites=4):
        kept = [arena.alloc(100 + n) for n in range(5)]
        with arena.scope():
            kept.append(arena.alloc(1000))
        del kept
        arena.reset()
        arena.alloc(0).release()
    first = path.read_bytes()
    with trace.record(pool, path, sites=2):
        kept = [pool.alloc(n) for n in (5, 4096, 70_000, 0)]
        del kept[1:]
        pool.trim()
    return [first, path.read_bytes()]


def added(path):
    """Every kind of record, in few bytes."""
    recorder = Recorder(path, "Probe", 2)
    recorder.start()
    for number, call in enumerate(
        [
            ("grow", 0x1000, 0x10000), ("mark", 7), ("alloc", 0x1000, 64, 5), ("alloc", 0x2000, 0),
            ("keep", 0x2000), ("free", 0x1000, 64, 5), ("reset", 7), ("alloc", 0x1000, 1 << 20),
            ("trim", 0x8000, 0x1000), ("free", 0x9000), ("reset", 0), ("free", 0x1000),
        ]
    ):  # fmt: skip
        recorder.add(*call)
        if number % 5 == 4:
            recorder.flush()
    recorder.stop()
    return [path.read_bytes()]


def saved(path):
    """By Python, with the kernel's clock."""
    trace.from_torch(Torch().snapshot()).save(path)
    return [path.read_bytes()]


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "a.trace"
    return [*recorded(path), *added(path), *saved(path)]


# ---- what a trace is asked


def use(path):
    """All that the package does with a file. ValueError is the only way out."""
    found = trace.load(path)
    summary = found.summary()
    assert sum(summary.operations.values()) == len(found) == len(found.events)
    assert 0 <= summary.smallest <= max(summary.largest, summary.smallest)
    assert str(summary).isprintable() and found.kind.isprintable()
    again = path.with_name("again.trace")
    found.save(again)
    same = trace.load(again)
    assert np.array_equal(same.events, found.events) and same.sites == found.sites
    try:
        steps = program(found)
    except ValueError as error:
        assert "no allocation" in str(error)
        with pytest.raises(ValueError, match="no allocation"):
            View(found)
        return
    live = steps.live()
    assert live.min() >= 0 and int(live.max()) <= summary.allocated_bytes
    replayed(found, steps, int(live.max()))
    way = list(WAYS)[len(found) % len(WAYS)]
    shown(View(found, way))
    shown(View(found, by_events=True, most_blocks=3))


def replayed(found, steps, peak):
    assert run(NoHeap(), steps.slots, steps.sizes, steps.count)[1] == len(steps)
    if peak <= MAX_LIVE and int(steps.sizes.max()) <= MAX_LIVE:
        for heap in PoolHeap(arenapy.Pool()), BumpHeap(arenapy.Bump(steps.bump_bytes())):
            assert run(heap, steps.slots, steps.sizes, steps.count, "first")[1] == len(steps)
    elif peak > 1 << 46:
        with pytest.raises(arenapy.OutOfMemory, match="a smaller trace"):
            replay(found, ["pool"])


def shown(view):
    blocks = view.blocks
    assert (blocks.live >= 0).all() and blocks.live[blocks.peak] == blocks.live.max()
    assert (blocks.start < blocks.end).all()
    for moment in blocks.peak, blocks.moments - 1:
        assert sum(row.nbytes for row in view.holders(moment)) == blocks.live[moment]
    assert (np.diff(view.x) >= 0).all()
    assert (view.curves.live.sum(axis=0)[:-1] == blocks.live[view.moments]).all()
    assert view.lifetimes.freed.sum() + view.lifetimes.kept.sum() == len(blocks)
    assert (view.bottom >= 0).all() and np.isfinite(view.top).all()
    if view.merged is not None:
        assert np.isfinite(view.merged.share).all()
    for line in [*view.sentences(), *view.notes(), *view.place_names, *view.groups.names]:
        assert line.isprintable()


def survives(path, data):
    """The error if it is damaged; None if it could be used."""
    path.write_bytes(data)
    try:
        use(path)
    except ValueError as error:
        name = repr(str(path))
        assert str(error).startswith(
            (f"{name} is damaged: ", f"{name} contains no trace", f"{name} is a")
        )
        return str(error)
    return None


# ---- damage


@st.composite
def damaged(draw, files):
    """One of the files, with up to four things done to it."""
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        data = draw(st.sampled_from([bit_flip, cut, field, word, move, repeat]))(draw, data)
    return bytes(data)


def place(draw, data, within=None):
    return draw(st.integers(0, max(0, (len(data) if within is None else within) - 1)))


def bit_flip(draw, data):
    if data:
        at = place(draw, data, draw(st.sampled_from([HEADER.itemsize, None])))
        data[at % len(data)] ^= 1 << draw(st.integers(0, 7))
    return data


def cut(draw, data):
    return data[: place(draw, data)]


def field(draw, data):
    """A field of the header at some extreme."""
    if len(data) >= HEADER.itemsize:
        name = draw(st.sampled_from(HEADER.names))
        size = HEADER[name].itemsize
        value = draw(st.binary(min_size=size, max_size=size)) if size > 8 else draw(
            WORDS
        ).to_bytes(8, "little")[:size]  # fmt: skip
        at = HEADER.fields[name][1]
        data[at : at + size] = value
    return data


def word(draw, data):
    """A word of a record."""
    count = (len(data) - HEADER.itemsize) // 8
    if count > 0:
        at = HEADER.itemsize + 8 * draw(st.integers(0, count - 1))
        data[at : at + 8] = draw(WORDS).to_bytes(8, "little")
    return data


def records_of(draw, data):
    """Where some records begin and end."""
    count = max(0, (len(data) - HEADER.itemsize) // RECORD.itemsize)
    first = draw(st.integers(0, count))
    last = draw(st.integers(first, min(count, first + 40)))
    return [HEADER.itemsize + at * RECORD.itemsize for at in (first, last)]


def move(draw, data):
    first, last = records_of(draw, data)
    taken, rest = data[first:last], data[:first] + data[last:]
    at = records_of(draw, rest)[0]
    return rest[:at] + taken + rest[at:]


def repeat(draw, data):
    first, last = records_of(draw, data)
    return data[:last] + data[first:]


@given(st.data())
def test_a_damaged_file_is_told_or_makes_sense(tmp_path_factory, valid, data):
    path = tmp_path_factory.getbasetemp() / "hostile.trace"
    hostile = data.draw(damaged(valid))
    tracemalloc.start()
    try:
        survives(path, hostile)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.no_sanitizer  # slow there; other tests here run the same C code
@pytest.mark.full
def test_every_length_of_a_file(tmp_path, valid):
    """A file that was cut is read as far as it goes."""
    whole = valid[2]
    for length in [*range(HEADER.itemsize + 2), *range(HEADER.itemsize, len(whole) + 1, 7)]:
        error = survives(tmp_path / "cut.trace", whole[:length])
        assert (error is None) == (length >= HEADER.itemsize), (length, error)


HEADERS = {
    "clock": [3, 2**32 - 1],
    "version": [0, 3, 2**32 - 1],
    "header_nbytes": [0, 127, 129, 2**32 - 1],
    "event_nbytes": [0, 23, 25, 2**32 - 1],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f in HEADERS for v in HEADERS[f]])
def test_headers_that_no_recorder_writes_are_told(tmp_path, valid, field, value, capsys):
    """By the function, and by the commands."""
    path = tmp_path / "a.trace"
    for whole in valid:
        at = HEADER.fields[field][1]
        path.write_bytes(whole[:at] + value.to_bytes(4, "little") + whole[at + 4 :])
        with pytest.raises(ValueError, match="is damaged" if field != "version" else "version"):
            trace.load(path)
    for command in "trace", "replay":
        with pytest.raises(SystemExit) as ended:
            cli.main([command, str(path)])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert repr(str(path)) in error and "Traceback" not in error


def test_records_in_another_order_are_told(tmp_path, valid):
    """Times never go back."""
    whole = valid[2]
    records = [whole[at : at + 24] for at in range(HEADER.itemsize, len(whole), 24)]
    path = tmp_path / "a.trace"
    path.write_bytes(whole[: HEADER.itemsize] + b"".join(reversed(records)))
    with pytest.raises(ValueError, match="is damaged"):
        trace.load(path)


# ---- events that nobody recorded

ADDRESSES = st.sampled_from([0, 1, 4096, 4160, 8192, 2**63, 2**64 - 64, 2**64 - 1])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*trace.OPERATIONS.values()] * 9 + [0, 6, 8, 9, 11, 255]),
        ADDRESSES,
        st.integers(0, 5000) | st.sampled_from([0, 2**47, 2**48 - 1, 2**48, 2**63, 2**64 - 1]),
        st.sampled_from([0, 0, 7, 2**64 - 1]),
        st.sampled_from([0, 0, 1, 2, 2**32 - 1]),
        st.integers(0, 3) | st.sampled_from([0, 2**56 - 1, 2**56, 2**64 - 1]),
        st.sampled_from([0, 1, 2**16 - 1]),
    ),
    max_size=40,
)


@given(EVENTS, st.booleans())
def test_hostile_events_are_refused_or_make_sense(tmp_path_factory, rows, in_order):
    """Frees of nothing, second frees, addresses used again, sizes beyond all memory."""
    if in_order:
        rows.sort(key=lambda row: row[5])
    events = np.zeros(len(rows), trace.EVENT)
    for event, row in zip(events, rows, strict=True):
        for name, value in zip(
            ("operation", "address", "nbytes", "stream", "site", "time", "thread"), row, strict=True
        ):
            event[name] = value
    sites = ((), (trace.Frame("a.py", 3, "f"),))
    sound = (
        set(events["operation"].tolist()) <= set(trace.OPERATIONS.values())
        and (events["nbytes"] < 2**48).all()
        and (events["site"] < len(sites)).all()
        and events["time"].tolist() == sorted(events["time"].tolist())
        and (events["time"] < 2**56).all()
    )
    try:
        made = trace.Trace(events, "made", sites=sites)
    except ValueError:
        assert not sound
        return
    assert sound
    path = tmp_path_factory.getbasetemp() / "made.trace"
    made.save(path)
    use(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time", 0), ("time", 2**56), ("time", 2**64 - 1), ("operation", 0), ("operation", 6),
        ("operation", 11), ("nbytes", 2**48), ("nbytes", 2**63), ("site", 1), ("site", 2**32 - 1),
    ],
)  # fmt: skip
def test_one_event_that_cannot_be_is_refused(field, value):
    events = np.zeros(3, trace.EVENT)
    events["operation"], events["nbytes"], events["time"] = 1, 5, [3, 4, 5]
    trace.Trace(events)
    events[field][2] = value
    with pytest.raises(ValueError, match=r"known|goes back|more than|site"):
        trace.Trace(events)


@pytest.mark.parametrize("before", [("mark", 7), ("free", 64), ("grow", 0, 4096), ("reset", 0)])
def test_blocks_of_no_bytes_have_a_peak(tmp_path, before):
    """Nothing is live at the first event, and no event has more live bytes."""
    recorder = Recorder(tmp_path / "a.trace", "Probe")
    recorder.start()
    recorder.add(*before)
    recorder.add("alloc", 64, 0)
    recorder.stop()
    use(tmp_path / "a.trace")


@pytest.mark.parametrize("room", [0, 1, 1 << 20, 1 << 47])
def test_a_block_beyond_all_addresses_is_refused(room):
    """`room`: bytes from its start to the last address."""
    event = np.zeros(1, trace.EVENT)
    event["operation"] = 1
    event["address"] = 2**64 - 1 - room
    event["nbytes"] = room
    trace.Trace(event)
    event["nbytes"] = room + 1
    with pytest.raises(ValueError, match="beyond"):
        trace.Trace(event)


def test_sizes_that_cannot_be_added_up_are_refused():
    events = np.zeros(20_000, trace.EVENT)
    events["operation"], events["nbytes"] = 1, 2**48 - 1
    with pytest.raises(ValueError, match="add up"):
        trace.Trace(events)
    trace.Trace(events[:10_000]).summary()


@given(
    st.lists(st.tuples(st.integers(-5, 4), st.integers(0, 300) | WORDS), max_size=30),
    st.integers(-1, 6),
)
def test_hostile_programs_are_refused_before_they_run(pairs, count):
    """A slot that is filled twice, freed twice, freed before it is filled, or beyond all."""
    slots = np.array([slot for slot, _ in pairs], "i4")
    sizes = np.array([size for _, size in pairs], "u8")
    filled, sound = set(), count >= 0
    for slot in slots.tolist():
        place = max(slot, ~slot)
        sound = sound and place < count and (place in filled) == (slot < 0)
        filled ^= {place}
    for heap in PoolHeap(arenapy.Pool(MIB)), BumpHeap(arenapy.Bump(MIB)), NoHeap():
        try:
            done = run(heap, slots, sizes, count)[1]
        except ValueError:
            assert not sound
            continue
        assert sound and 0 <= done <= len(slots)
        fits = sizes.max(initial=0) <= 300
        assert done == len(slots) or not fits


# ---- torch's snapshots


DEEP, NESTED = b"lists in lists", 100_000


@st.composite
def snapshots(draw):
    """One of torch's, with a few values that are none of torch's, as a pickle with flipped bits."""
    found = Torch().snapshot()
    odd = st.sampled_from(
        [None, -1, 2**64, 2**70000, 1.5, float("inf"), float("nan"), "x", "\x1b[2J", b"x", [], {},
         (), True, DEEP, "9" * 5000]
    )  # fmt: skip
    entries = found["device_traces"][0]
    for _ in range(draw(st.integers(0, 3))):
        entry = entries[draw(st.integers(0, len(entries) - 1))]
        key = draw(st.sampled_from([*entry, "filename", "line", "name", "frame"]))
        if key == "frame":
            entry["frames"][0] = draw(odd)
        elif key in ("filename", "line", "name"):
            for frame in entry["frames"]:
                if isinstance(frame, dict):
                    frame[key] = draw(odd)
        else:
            entry[key] = draw(odd)
    # pickle cannot write lists that lie so deep in each other, and reads them.
    mark = pickle.SHORT_BINBYTES + bytes([len(DEEP)]) + DEEP
    deep = pickle.EMPTY_LIST * NESTED + pickle.APPEND * (NESTED - 1)
    data = bytearray(pickle.dumps(found, 3).replace(mark, deep))
    for _ in range(draw(st.integers(0, 3))):
        data[place(draw, data)] ^= 1 << draw(st.integers(0, 7))
    return bytes(data[: place(draw, data)] if draw(st.booleans()) else data)


SHORT_SNAPSHOTS = {
    "number": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "number as text": b"\x80\x02}p4294967290\n.",
    "bytes": b"\x80\x04\x8e" + (1 << 33).to_bytes(8, "little") + b".",
    "short bytes": b"\x80\x04C\xffabc.",
    "after a short text": b"\x80\x04\x8c\x03abc\x8d" + (1 << 33).to_bytes(8, "little") + b".",
    "bytearray": b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b".",
    "text": b"\x80\x02X\xff\xff\xff\x7f.",
    "int": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "no end of a line": b"\x80\x02I1",
}


@pytest.mark.parametrize("name", SHORT_SNAPSHOTS)
def test_a_short_snapshot_with_a_great_number(tmp_path, name):
    """Python's own unpickler would allocate as much as these say, up to 64 GiB."""
    path = tmp_path / "short.pickle"
    path.write_bytes(SHORT_SNAPSHOTS[name])
    with pytest.raises(ValueError, match=r"is not a snapshot of torch's: its \d+ bytes say that"):
        trace.from_torch(path)


@given(snapshots())
def test_a_damaged_snapshot_is_told_or_makes_sense(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "hostile.pickle"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        found = trace.from_torch(path)
        found.save(path.with_name("from.trace"))
        use(path.with_name("from.trace"))
    except ValueError as error:
        assert len(str(error)) < 2000
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < MAX_MEMORY
