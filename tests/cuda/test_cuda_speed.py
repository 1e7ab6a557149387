"""The table of copies: what is measured, and that what is said of it follows from the figures."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_memory import put

from arenapy import cuda
from arenapy.cuda import backing, driver

MIB = 1 << 20
KIB = 1 << 10


def test_what_is_measured(gpu):
    """Every kind of copy, both ways, from and to where it should be."""
    pinned = backing.pinned_bytes()  # of what other tests have left to the collector
    copies = []
    submit = gpu.submit

    def noted(stream, what, run=None, touches=(), *rest, **options):
        if what == "a copy":
            copies.append((stream.blocking, stream.device, tuple(touches)))
        return submit(stream, what, run, touches, *rest, **options)

    gpu.submit = noted
    made = cuda.bandwidth(1, MIB, repeat=2)
    assert made.name == "Simulated 1"
    assert {(blocking, device) for blocking, device, _ in copies} == {(False, 1)}
    assert len(copies) == 3 * 2 * (1 + 1 + 2 + MIB // (4 * KIB))
    touched = [touches for _, _, touches in copies]
    assert all(len(one) == 1 and one[0][1] == MIB for one in touched[:6]), "pageable: one end"
    host = [start for start, _ in (touches[0] for touches in touched[6:24:6])]
    assert [start - host[0] for start in host] == [0, 123, 4096]
    assert host[0] % 4096 == 0
    assert {nbytes for touches in touched[24:] for _, nbytes in touches} == {4 * KIB}
    ends = [tuple(start for start, _ in touches) for touches in touched[24:]]
    assert len({start for start, _ in ends}) == 2 * MIB // (4 * KIB), "each once, both ways"
    assert gpu.memory.used[1] == 0
    assert backing.pinned_bytes() <= pinned
    assert [row.copies for row in made.rows] == [1, 1, 1, 1, 256]


def figures(rates):
    """As measured with these bytes a second: (to, from) of each row."""
    rows = []
    for (to, back), (memory, nbytes, copies) in zip(
        rates,
        [("pageable", MIB, 1), ("pinned", MIB, 1), ("pinned, 123 bytes in", MIB, 1),
         ("pinned, 4096 bytes in", MIB, 1), ("pinned, small copies", 4096, 256)],
        strict=True,
    ):  # fmt: skip
        rows.append(cuda.CopySpeed(memory, nbytes, copies, MIB / to, MIB / back))
    return cuda.Bandwidth(0, "H<200>", rows[0], rows[1], tuple(rows[2:4]), rows[4])


rates = st.floats(1e8, 1e11)


@given(st.lists(st.tuples(rates, rates), min_size=5, max_size=5))
def test_what_is_said_follows_from_the_figures(pairs):
    made = figures(pairs)
    best = pairs[1]
    slow = [to < 0.8 * best[0] or back < 0.8 * best[1] for to, back in pairs]
    words = ["Pageable memory", None, "123 bytes in", "4096 bytes in", "Copies of 4 KiB"]
    for word, is_slow, pair in zip(words, slow, pairs, strict=True):
        if word and abs(pair[0] / best[0] - 0.8) > 1e-9 < abs(pair[1] / best[1] - 0.8):
            assert (word in made.verdict) == is_slow
            if is_slow:
                assert f"{pair[0] / 1e9:.3g} GB/s to the device" in made.verdict
                assert f"{pair[1] / 1e9:.3g} GB/s from it" in made.verdict
    assert ("Nothing is slow" in made.verdict) == (not any(slow[:1] + slow[2:]))


def test_what_an_h200_would_show():
    made = figures(
        [(11.0e9, 20.3e9), (55.5e9, 55.5e9), (55.4e9, 55.5e9), (55.5e9, 55.5e9), (1.4e9, 1.3e9)]
    )
    assert made.pageable.to_device == pytest.approx(11.0e9)
    assert "11 GB/s to the device and 20.3 GB/s from it (20% and 37% of" in made.verdict
    assert "each takes 3.2 us, in which a large copy moves 17" in made.verdict
    assert "bytes in" not in made.verdict
    text = str(made)
    for row in made.rows:
        assert row.memory in text
    assert "55.5 GB/s" in text and made.verdict in text
    page = made._repr_html_()
    assert "<td>11 GB/s</td>" in page and "H&lt;200&gt;" in page and "<table>" in page


def test_the_fastest_run_counts(gpu):
    """And the first one does not."""
    times = iter(range(1, 1000))
    kept = []

    def elapsed(out, start, end):
        kept.append(next(times))
        put(out, ctypes.c_float, 1000.0 / kept[-1])

    fake = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(
        lambda *arguments: elapsed(*arguments) or 0
    )
    gpu.entries["cuEventElapsedTime"] = (
        ctypes.cast(fake, ctypes.c_void_p).value,
        gpu.entries["cuEventElapsedTime"][1],
    )
    driver.use(gpu.entries)
    made = cuda.bandwidth(0, MIB, repeat=3)
    assert made.pageable.to_device_seconds == pytest.approx(1 / 4), "of runs 2, 3 and 4"
    assert made.pageable.from_device_seconds == pytest.approx(1 / 8)
    assert made.small.from_device_seconds == pytest.approx(1 / 40)


def test_a_clock_that_stands_still(gpu):
    made = figures([(float("inf"),) * 2] * 5)
    assert made.pinned.to_device == float("inf")
    assert "Nothing is slow" in str(made)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 4095), ValueError, "nbytes=4095"),
        ((0, MIB, 0), ValueError, "repeat=0"),
        ((5,), ValueError, "ordinal=5"),
        (("0",), TypeError, "device_id='0'"),
    ],
)
def test_what_cannot_be(gpu, arguments, error, text):
    with pytest.raises(error, match=text):
        cuda.bandwidth(*arguments)
