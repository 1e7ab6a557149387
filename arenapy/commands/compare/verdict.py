"""Whether one way of running a program is faster than another: the rule of ``arenapy compare``.

What lives here: what follows from measured times. What does not: measuring.

The rule. Round by round, the time of one way is divided by that of the other: both were measured
next to each other, so that a machine that becomes slower slows both. The median of these ratios
says how much faster one is. The interval around it is that of the sign test: as many of the ordered
ratios are left out at either end as chance allows to lie beyond the true median in 5 % of all
comparisons, both ends together (of six to eight rounds none, of nine to eleven one, of twelve to
fourteen two). It assumes nothing about how times scatter, and single rounds that something else
disturbed do not matter. If 1 is in the interval: within noise. If not, a gain is worth it from 3 %.
An interval needs six rounds: with five, all on one side is chance once in 16 times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CONFIDENCE", "LEAST_ROUNDS", "WORTH", "Ratio", "Verdict", "ratio_of", "verdict"]

CONFIDENCE = 0.95
LEAST_ROUNDS = 6
WORTH = 0.03  # a share of the time: a smaller change is not worth a decision


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of one way divided by that of another.

    Attributes
    ----------
    estimate : float
    low, high : float or None
        The bounds of the interval; None if there were too few rounds for one.
    """

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a ratio says.

    Attributes
    ----------
    word : {"worth it", "not worth it", "within noise", "too few rounds"}
    reason : str
    """

    word: str
    reason: str


def _rank(rounds: int) -> int:
    """Which of the ordered ratios, from either end, bounds the interval; 0: there is none."""
    outside, rank = 0, 0
    while 2 * (outside + math.comb(rounds, rank)) <= (1 - CONFIDENCE) * 2**rounds:
        outside += math.comb(rounds, rank)
        rank += 1
    return rank


def ratio_of(times: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of paired times, with its interval.

    Parameters
    ----------
    times, others : sequence of float
        Positive, one of each for every round, in the same order.

    Raises
    ------
    ValueError
        They are not as many, none, or not positive.
    """
    if len(times) != len(others) or not times:
        raise ValueError(f"{len(times)} times and {len(others)} others: need pairs, one or more")
    if min(*times, *others) <= 0:
        raise ValueError(f"a time of {min(*times, *others)} s: all have to be positive")
    ratios = sorted(time / other for time, other in zip(times, others, strict=True))
    estimate, rank = statistics.median(ratios), _rank(len(ratios))
    if not rank:
        return Ratio(estimate, None, None)
    return Ratio(estimate, ratios[rank - 1], ratios[-rank])


def verdict(ratio: Ratio) -> Verdict:
    """What to do about a ratio of a way's time to the time without it."""
    if ratio.low is None or ratio.high is None:
        return Verdict(
            "too few rounds", f"at least {LEAST_ROUNDS} are needed to tell a gain from noise"
        )
    low, high = sorted((_change(ratio.low), _change(ratio.high)))
    sure = f"({CONFIDENCE:.0%} sure: {low:+.1%} to {high:+.1%})"
    change = f"{abs(_change(ratio.estimate)):.1%}"
    if ratio.low <= 1 <= ratio.high:
        return Verdict("within noise", f"the time changes by {_change(ratio.estimate):+.1%} {sure}")
    if ratio.low > 1:
        return Verdict("not worth it", f"it takes {change} longer {sure}")
    if ratio.estimate > 1 - WORTH:
        return Verdict("not worth it", f"it takes only {change} less time {sure}")
    return Verdict("worth it", f"it takes {change} less time {sure}")


def _change(ratio: float) -> float:
    return ratio - 1
