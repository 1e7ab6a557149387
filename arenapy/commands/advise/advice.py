"""The advice of ``arenapy advise``: which setting to use by its replays, and how sure that is.

What lives here: the rule, and the five lines. What does not: measuring.

The rule: the fastest setting. If several are as fast within 3 %, the baseline (malloc, on the host)
before all others, then the one that holds least. A setting is advised only if it is faster than the
baseline, and the sign test is sure of it, or all of a few rounds agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arenapy.base.text import format_bytes, format_ns
from arenapy.commands.advise.settings import Setting
from arenapy.commands.compare.verdict import (
    CONFIDENCE,
    WORTH,
    Ratio,
    ratio_of,
    verdict,
)

__all__ = ["ROUNDS", "Advice", "choose", "lines"]

LIGHTER = 0.05  # a share of the memory: less is not worth a choice
TRIFLE = 1 << 20  # bytes
ROUNDS = 20  # at most


@dataclass(frozen=True, slots=True)
class Advice:
    """The setting to use, and the reasons.

    Attributes
    ----------
    name : str
        Of the setting; the baseline if nothing is surely better.
    baseline : str
    other : str or None
        The setting to compare with: the baseline or, if that is advised, the fastest other one.
        None: nothing else was measured.
    ratio : Ratio or None
        The time of the one of the two that is not the baseline, divided by the baseline's.
    word : str
        "sure", "probable" or "undecided".
    as_good : tuple of str
        Other settings that are as fast within `WORTH`.
    """

    name: str
    baseline: str
    other: str | None
    ratio: Ratio | None
    word: str
    as_good: tuple[str, ...]


def choose(times: Mapping[str, Sequence[float]], held: Mapping[str, int]) -> Advice:
    """The advice of some rounds.

    Parameters
    ----------
    times : mapping
        By name, the seconds of each round, in the order of preference. The first one is the
        baseline. A setting that has not been in all its rounds is out.
    held : mapping
        By name, the most bytes that were held.
    """
    baseline = next(iter(times))
    rounds = len(times[baseline])
    others = [name for name in times if len(times[name]) == rounds and name != baseline]
    if not others or not rounds:
        return Advice(baseline, baseline, None, None, "sure", ())
    chance = (1 - CONFIDENCE) / len(others)  # to be wrong about any of them
    ratios = {name: ratio_of(times[name], times[baseline], chance) for name in others}
    fastest = min(others, key=lambda name: ratios[name].estimate)
    words = {name: verdict(ratio).word for name, ratio in ratios.items()}
    better = [name for name in others if words[name].removeprefix("probably ") == "worth it"]
    alike = [
        name
        for name in others
        if name == fastest or ratio_of(times[name], times[fastest]).estimate <= 1 + WORTH
    ]
    candidates = [name for name in better if name in alike]
    if candidates:
        least = min(held[name] for name in candidates)
        limit = (1 + LIGHTER) * least + TRIFLE
        name = next(name for name in candidates if held[name] <= limit)
        word = "probable" if words[name].startswith("probably") else "sure"
        return Advice(name, baseline, baseline, ratios[name], word, _without(alike, name))
    ratio = ratios[fastest]
    undecided = words[fastest].removeprefix("probably ") == "undecided" and ratio.estimate < 1
    word = "undecided" if undecided else "sure" if ratio.low is not None else "probable"
    near = [name for name in others if ratios[name].estimate <= 1 + WORTH]
    return Advice(baseline, baseline, fastest, ratio, word, _without(near, fastest))


def _without(names: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(one for one in names if one != name)


def lines(
    advice: Advice,
    settings: Mapping[str, Setting],
    times: Mapping[str, Sequence[float]],
    held: Mapping[str, int],
    *,
    steps: int,
    live: int,
    recorded: float,
    numpy: bool,
    program: str,
    seconds: float,
) -> list[tuple[str, str]]:
    """The five lines: a word and what it says.

    Parameters
    ----------
    advice, settings, times, held
        As for `choose`; `settings` by name.
    steps : int
        Allocations and frees of a run.
    live : int
        The most bytes that were live.
    recorded : float
        Seconds of the recording; 0: not known.
    numpy : bool
        The trace is of NumPy's arrays.
    program : str
        The words of the program, for the line to paste.
    seconds : float
        The time that the replays had, or took.
    """
    setting = settings[advice.name]
    if advice.name == advice.baseline:
        use = f"keep {advice.name}"
    else:
        use = f"{advice.name}: {setting.prefaulted()}"
    return [
        ("use", use),
        ("paste", setting.line(numpy, program)),
        ("gain", _gain(advice, times, steps, recorded)),
        ("holds", _holds(advice, held, live)),
        ("sure", _sure(advice, len(times[advice.baseline]), seconds)),
    ]


def _gain(advice: Advice, times: Mapping[str, Sequence[float]], steps: int, recorded: float) -> str:
    middle = {name: statistics.median(found) for name, found in times.items() if found}
    if advice.other is None or advice.ratio is None:
        return "not known: no other allocator was measured"
    own, other = (format_ns(1e9 * middle[name] / steps) for name in (advice.name, advice.other))
    if advice.name == advice.baseline:
        return (
            f"none: {advice.name} takes {own} for an operation, and {advice.other}, the fastest "
            f"alternative, takes {other}"
        )
    text = (
        f"{advice.name} takes {advice.ratio.estimate:.2f} of the time of {advice.other}: {own} "
        f"instead of {other} for an operation, "
        f"{_time(middle[advice.other] - middle[advice.name])} less in total"
    )
    return f"{text}; the recording took {_time(recorded)}" if recorded else text


def _holds(advice: Advice, held: Mapping[str, int], live: int) -> str:
    text = f"{format_bytes(held[advice.name])} at its peak, for blocks of {format_bytes(live)}"
    other = advice.other
    return f"{text}; {other} held {format_bytes(held[other])}" if other is not None else text


def _sure(advice: Advice, rounds: int, seconds: float) -> str:
    if advice.ratio is None:
        return "there is nothing to compare"
    one = advice.other if advice.name == advice.baseline else advice.name
    share = f"of the time of {advice.baseline}"
    low, high = advice.ratio.low, advice.ratio.high
    if low is None or high is None:
        low, high = advice.ratio.lowest, advice.ratio.highest
        how = (
            f"probably: {one} took {low:.2f} to {high:.2f} {share} in {rounds} rounds, which are "
            f"too few to be sure; give --seconds {max(2 * seconds, 1):.0f}"
        )
    else:
        how = f"{CONFIDENCE:.0%} sure, in {rounds} rounds: "
        how += f"{one} takes {low:.2f} to {high:.2f} {share}"
        if advice.word == "undecided":
            how = f"undecided: {how}"
            if rounds < ROUNDS:
                how += f"; give --seconds {max(4 * seconds, 1):.0f}"
    if advice.as_good:
        how += f"; as fast, within {WORTH:.0%}: {', '.join(advice.as_good)}"
    return how


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
