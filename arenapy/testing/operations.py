"""Operations: rules of a machine that can also be steps of a program.

Hypothesis draws a rule's arguments while the machine runs, from what is live then. A program is
drawn beforehand, without a machine. `operation` makes one method serve both: its arguments are
numbers and the like, and what picks a live block is a number too, counted round.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from arenapy.testing.steps import Step

__all__ = ["OneOf", "operation", "operations"]

MANY = 15  # of a collection that is not there yet, an index is drawn up to this


@dataclass(frozen=True, slots=True)
class OneOf:
    """An argument that picks one of the machine's collection `name`, by index.

    Attributes
    ----------
    name : str
        ``"live"``, ``"marks"``, or a collection of your own.

    Examples
    --------
    >>> from arenapy.testing import OneOf, PoolMachine, operation
    >>> from arenapy.testing.attack import attack
    >>> class Wiping(PoolMachine):
    ...     @operation("live", which=OneOf("live"))
    ...     def wipe(self, which):
    ...         serial, known = self.pick_live(which)
    ...         known.fill = 0
    ...         self.fill(known)
    >>> attack(Wiping, examples=5).failing is None
    True
    """

    name: str

    def strategy(self) -> st.SearchStrategy[int]:
        """One that draws while a machine runs: an index of what there is then."""

        def indices(machine: Any) -> st.SearchStrategy[int]:
            return st.integers(0, len(getattr(machine, self.name)) - 1)

        return st.runner().flatmap(indices)


Argument = st.SearchStrategy[Any] | OneOf | str | Callable[[Any], st.SearchStrategy[Any]]


@dataclass(frozen=True, slots=True)
class Operation:
    """The arguments of `operation`: the needs of a method, and the sources of its arguments."""

    needs: tuple[str, ...]
    arguments: Mapping[str, Argument]

    def possible(self, machine: Any) -> bool:
        """True if the machine (or its class, before a machine is made) has all that this needs."""
        return all(getattr(machine, name, True) for name in self.needs)

    def steps(self, machine: type[Any], name: str) -> st.SearchStrategy[Step]:
        """Draw steps of this operation without a machine."""
        drawn = {key: self._beforehand(machine, value) for key, value in self.arguments.items()}
        return st.builds(Step, st.just(name), st.fixed_dictionaries(drawn))

    @staticmethod
    def _beforehand(machine: type[Any], argument: Argument) -> st.SearchStrategy[Any]:
        if isinstance(argument, OneOf):
            return st.integers(0, MANY)
        return argument if isinstance(argument, st.SearchStrategy) else _asked(argument)(machine)


def _asked(argument: str | Callable[[Any], st.SearchStrategy[Any]]) -> Any:
    """The function that gets a strategy from a machine, or from its class."""
    return operator.attrgetter(argument) if isinstance(argument, str) else argument


def _while_running(argument: Argument) -> st.SearchStrategy[Any]:
    if isinstance(argument, OneOf):
        return argument.strategy()
    if isinstance(argument, st.SearchStrategy):
        return argument
    return st.runner().flatmap(_asked(argument))


def operation(
    *needs: str, first: bool = False, **arguments: Argument
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a method of an `AllocatorMachine` a rule. Each call is recorded before it runs.

    Parameters
    ----------
    *needs : str
        Attributes of the machine. The rule runs only if all of them are true: a hook is not None,
        and a collection is not empty.
    first : bool
        Run it once, before all others.
    **arguments : strategy, str, OneOf or callable
        A strategy of values that JSON can represent; the name of a strategy of the machine, which a
        subclass may replace; `OneOf`, an index of a collection; or a function that makes a strategy
        from the machine or (for programs) its class.

    Returns
    -------
    callable
        A decorator.

    Notes
    -----
    Thread-safety: a machine's rules run one after the other.

    Examples
    --------
    >>> from hypothesis import strategies as st
    >>> from arenapy.testing import PoolMachine, operation
    >>> from arenapy.testing.attack import attack
    >>> class Many(PoolMachine):
    ...     @operation(sizes=st.lists(st.integers(0, 100), max_size=3))
    ...     def allocate_many(self, sizes):
    ...         try:
    ...             blocks = self.call(self.state.alloc_many, sizes)
    ...         except self.refusals:
    ...             return
    ...         for block, nbytes in zip(blocks, sizes):
    ...             self.admit(block, nbytes)
    >>> attack(Many, examples=5).failing is None
    True
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__

        @functools.wraps(function)
        def written(self: Any, **values: Any) -> None:
            self.about_to(Step(name, values))
            with self.failures_kept():
                function(self, **values)

        told = Operation(needs, arguments)
        written.operation = told  # type: ignore[attr-defined]
        strategies = {key: _while_running(value) for key, value in arguments.items()}
        # cast: to mypy, a dict of strategies could be the rule's target as well
        made: Callable[..., None] = cast(Any, initialize if first else rule)(**strategies)(written)
        return made if first else precondition(told.possible)(made)

    return decorate


def operations(machine: type[Any]) -> dict[str, Operation]:
    """The operations of a class of machines, without those that are turned off.

    Parameters
    ----------
    machine : class
        A subclass of `AllocatorMachine`.

    Returns
    -------
    dict of str to Operation

    Examples
    --------
    >>> from arenapy.testing import SlabMachine, operations
    >>> "trim" in operations(SlabMachine), "push_mark" in operations(SlabMachine)
    (True, False)
    """
    found = {}
    for name in dir(machine):
        told = getattr(getattr(machine, name), "operation", None)
        if isinstance(told, Operation) and told.possible(machine):
            found[name] = told
    return found
