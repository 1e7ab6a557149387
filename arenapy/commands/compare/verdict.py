"""The rule of ``arenapy compare``: is one way of running a program faster than another?

What lives here: what follows from measured times, and when there were enough. What does not:
measuring.

The rule. Round by round, the time of one way is divided by that of the other: both were measured
next to each other, so that a machine that becomes slower slows both. The median of these ratios
says how much faster one is. The interval around it is that of the sign test: as many of the ordered
ratios are left out at either end as chance allows to lie beyond the true median in 5 % of all
comparisons, both ends together (of six to eight rounds none, of nine to eleven one, of twelve to
fourteen two). It assumes nothing about how times scatter, and single rounds that something else
disturbed do not matter. An interval needs six rounds: with five, all on one side is chance once in
16 times.

A measurement that looks after every few rounds and stops at the first sure verdict is wrong more
often than one that looks once. So the 5 % are shared out over all looks that there may be: the
first look, after six rounds, takes 1/32, the least that six rounds need, and the later ones share
the rest. The last one, when the time is spent, takes what is left.

If no look was sure of a direction, the last one asks once more, and less: is a gain of `WORTH` out
of the question? The lower bound for that is the one of a single look, since it is looked at once.
This costs no more than the 5 %. Where there is such a gain, the looks say by mistake in 2.5 % that
there is none, and this bound in another 2.5 %. Where there is none, this answer is right.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CONFIDENCE", "LEAST_ROUNDS", "WORTH", "Ratio", "Verdict", "chance_of", "next_look", "ratio_of",
    "verdict",
]  # fmt: skip

CONFIDENCE = 0.95
LEAST_ROUNDS = 6
WORTH = 0.03  # a share of the time: a smaller change is not worth a decision
FIRST = 2.0 ** (1 - LEAST_ROUNDS)  # of the chance to be wrong, for the first look


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of one way divided by that of another.

    Attributes
    ----------
    estimate : float
    low, high : float or None
        The bounds of the interval; None if there were too few rounds for one.
    least : float or None
        The lower bound of the interval if this is the only look, at `CONFIDENCE`.
    lowest, highest : float
        Of all rounds.
    rounds : int
    """

    estimate: float
    low: float | None
    high: float | None
    least: float | None
    lowest: float
    highest: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a ratio.

    Attributes
    ----------
    word : str
        "worth it", "not worth it", "a little faster", "a little slower", "no difference", "no gain"
        or "undecided"; "probably " before another one if there were too few rounds to be sure.
    reason : str
    final : bool
        More rounds would not change it, as far as chance allows.
    """

    word: str
    reason: str
    final: bool


def next_look(rounds: int) -> int:
    """After how many rounds to look again."""
    return LEAST_ROUNDS if rounds < LEAST_ROUNDS else rounds + max(3, rounds // 4)


def chance_of(look: int, *, last: bool = False) -> float:
    """The chance to be wrong that the look of this number, from 1, may take; all make 5 %."""
    later = 1 - CONFIDENCE - FIRST
    if look == 1:
        return 1 - CONFIDENCE if last else FIRST
    return later / (look - 1) if last else later / (look * (look - 1))


def _rank(rounds: int, chance: float = 1 - CONFIDENCE) -> int:
    """Which of the ordered ratios, from either end, bounds the interval; 0: there is none."""
    outside, rank = 0, 0
    while 2 * (outside + math.comb(rounds, rank)) <= chance * 2**rounds:
        outside += math.comb(rounds, rank)
        rank += 1
    return rank


def ratio_of(
    times: Sequence[float], others: Sequence[float], chance: float = 1 - CONFIDENCE
) -> Ratio:
    """The ratio of paired times, with its interval.

    Parameters
    ----------
    times, others : sequence of float
        Positive, one of each for every round, in the same order.
    chance : float
        With which the true ratio may be outside of the interval.

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
    estimate, rank = statistics.median(ratios), _rank(len(ratios), chance)
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (None, None)
    single = _rank(len(ratios))
    least = ratios[single - 1] if single else None
    return Ratio(estimate, low, high, least, ratios[0], ratios[-1], len(ratios))


def verdict(ratio: Ratio, *, last: bool = False) -> Verdict:
    """The verdict on a ratio of a way's time to the time without it.

    Parameters
    ----------
    ratio : Ratio
    last : bool
        If True, no more rounds follow, and "no gain" may be said.
    """
    change = ratio.estimate - 1
    takes = f"the program takes {abs(change):.1%} {'less time' if change < 0 else 'longer'}"
    is_large = abs(change) >= WORTH
    if ratio.low is None or ratio.high is None:
        rounds = f"{ratio.rounds} round{'s' * (ratio.rounds != 1)}"
        bounds = f"{ratio.lowest - 1:+.1%} to {ratio.highest - 1:+.1%} in {rounds}"
        few = f"({bounds}; {LEAST_ROUNDS} are needed to be sure)"
        if is_large and not ratio.lowest <= 1 <= ratio.highest:
            return Verdict(f"probably {'not ' * (change > 0)}worth it", f"{takes} {few}", False)
        if ratio.lowest > 1 - WORTH and ratio.highest < 1 + WORTH:
            return Verdict("probably no difference", f"{takes} {few}", False)
        if last and ratio.lowest > 1 - WORTH:
            return Verdict("probably no gain", f"{takes} {few}", False)
        return Verdict("undecided", f"{takes} {few}", False)
    sure = f"({CONFIDENCE:.0%} sure: {ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})"
    is_narrow = ratio.low > 1 - WORTH and ratio.high < 1 + WORTH
    if not ratio.low <= 1 <= ratio.high:
        if is_large:
            return Verdict("not worth it" if change > 0 else "worth it", f"{takes} {sure}", True)
        return Verdict(f"a little {'slower' if change > 0 else 'faster'}", f"{takes} {sure}",
                       is_narrow)  # fmt: skip
    if is_narrow:
        return Verdict("no difference", f"{takes}, less than {WORTH:.0%} either way {sure}", True)
    if last and ratio.least is not None and ratio.least > 1 - WORTH:
        sure = f"({CONFIDENCE:.0%} sure: {ratio.least - 1:+.1%} or more)"
        return Verdict("no gain", f"{takes}, and surely no {WORTH:.0%} less {sure}", True)
    return Verdict("undecided", f"{takes} {sure}", False)
