"""Kinds of faults: their names, which is worse, and the report that lists them.

A search goes on after a fault, so what it found is a dict of `Finding` by kind. The report begins
with the worst, because an accepted request of -1 bytes says less than a block that reads wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "ENDS_THE_PROCESS",
    "KINDS",
    "Fault",
    "Finding",
    "check_kinds",
    "kind_of",
    "varies",
    "worst_first",
]

#: Each kind and its meaning, the worst first. "error" stands for every other exception.
KINDS = {
    "crash": "a signal ended the process",
    "hang": "a step did not end",
    "contents": "a block does not read as it was written",
    "overlap": "two live blocks share bytes",
    "outside": "a block is outside of the allocator's memory",
    "misaligned": "a block is not aligned as requested",
    "error": "another exception, which goes by the name of its class",
    "changed": "a refused request changed something",
    "books": "the allocator counts other bytes than are live",
    "leak": "an emptied allocator serves less than a new one",
    "room": "a request was refused or served against `remaining`",
    "stale-mark": "a reset to a mark that has ended was accepted",
    "early-release": "a release of a block that is in use was accepted",
    "double-free": "a second free was accepted",
    "oversize": "a request for more than fits in memory was accepted",
    "negative": "a request of a negative size was accepted",
    "empty-shared": "an empty block has the address of another block",
}

ENDS_THE_PROCESS = ("crash", "hang")  # so another process has to look at these programs

FEW = 20  # examples for each round that ended early, which are worth no word
VARIES = (
    "{0} rounds ended early: the same requests were answered differently in another run. If the "
    "memory begins at another alignment each time, request smaller alignments: "
    "alignments = alignments(16), or st.none() if the allocator takes none (arenapy fuzz: "
    "--max-align 16, or 1)"
)


class Fault(AssertionError):
    """An allocator broke a rule.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    message : str
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Finding:
    """One kind of fault, and a program that shows it.

    Attributes
    ----------
    kind, message : str
    program : list of str
        The steps, as lines of a file of steps.
    """

    kind: str
    message: str
    program: list[str]

    def __str__(self) -> str:
        """Its kind and message."""
        return f"{self.kind}: {self.message}"


def kind_of(error: BaseException) -> str:
    """The kind of a fault; of another exception, the name of its class."""
    return error.kind if isinstance(error, Fault) else type(error).__name__


def text_of(error: BaseException) -> str:
    """The text of an exception, which code of the attacked allocator may make."""
    try:
        return str(error)
    except Exception:
        return f"a {type(error).__name__} that has no text: its __str__ raises an exception"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of `KINDS`."""
    ranks = {kind: rank for rank, kind in enumerate(KINDS)}
    return sorted(findings, key=lambda one: ranks.get(one.kind, ranks["error"]))


def check_kinds(kinds: Iterable[str]) -> None:
    """Refuse a kind that no fault has.

    Raises
    ------
    ValueError
        It is none of `KINDS`, nor the name of a class of exceptions.
    """
    for kind in kinds:
        if kind == "error" or (kind not in KINDS and not kind[:1].isupper()):
            names = ", ".join(name for name in KINDS if name != "error")
            raise ValueError(
                f"there is no kind of fault {kind!r}: the kinds are {names}, and names of "
                "exception classes such as TypeError"
            )


def varies(restarts: int, examples: int) -> str:
    """A sentence on rounds that could not be continued; empty if they were few."""
    return VARIES.format(restarts) if restarts * FEW > examples else ""
