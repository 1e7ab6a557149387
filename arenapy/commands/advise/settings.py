"""The settings that ``arenapy advise`` tries: allocators with arguments, and the line to paste.

What lives here: which settings suit a program, and the line to paste. What does not: running them
(measuring.py), choosing one (advice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arenapy.base.text import format_bytes
from arenapy.commands.replay.program import ALIGN, DEVICE_ALIGN, Program
from arenapy.commands.replay.worker import PEERS

__all__ = [
    "BASELINE", "DEVICE_BASELINE", "DEVICE_NAMES", "NAMES", "OF_NUMPY", "PLAIN_POOL", "Setting",
    "ready_pool", "settings_for", "unsuited",
]  # fmt: skip

BASELINE = "malloc"
#: Of a GPU's memory. torch is the baseline of its own traces.
DEVICE_BASELINE = "driver"
DEVICE_NAMES = ("driver", "pool", "bump", "slab", "torch", "cupy", "rmm")
DEVICE_LINES = {
    "cupy": "cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)",
    "rmm": "rmm.mr.set_current_device_resource("
    "rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 20))",
    "torch": "torch.cuda.caching_allocator_alloc(nbytes)",
    "driver": "nothing to change",
}
#: The names that ``--with`` takes, in the order of preference if several are as good.
NAMES = ("malloc", "pool", "bump", "slab", "jemalloc", "mimalloc", "tcmalloc")
OF_NUMPY = tuple(name for name in NAMES if name not in ("bump", "slab"))
#: A Bump or a Slab that needs more than this many times what is ever live is not tried.
ROOM = 2
HUGE_PAGE = 2 << 20
CLASSES = {"bump": "Bump", "slab": "Slab", "pool": "Pool"}
VARIABLES = {"bump": "arena", "slab": "slab", "pool": "pool"}


@dataclass(frozen=True, slots=True)
class Setting:
    """An allocator with its arguments.

    Attributes
    ----------
    peer : str
        A key of `PEERS`.
    arguments : mapping
        By keyword, of an allocator of arenapy's. Sizes are bytes.
    prefault : int or None
        Bytes that are prefaulted when it is made. None: as it grows.
    device : bool
        It is of a GPU's memory, where bytes are reserved in place of prefaulted.
    """

    peer: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prefault: int | None = 0
    device: bool = False

    @property
    def is_ours(self) -> bool:
        """True if it is an allocator of arenapy's."""
        return self.peer in CLASSES

    def __str__(self) -> str:
        if not self.is_ours:
            return self.peer
        return f"{CLASSES[self.peer]}({', '.join(self._words())})"

    def _words(self) -> list[str]:
        return [f"{name}={_written(value)}" for name, value in self.arguments.items()]

    def prefaulted(self) -> str:
        """How much is prefaulted, and when."""
        word = "reserve" if self.device else "prefault"
        if not self.is_ours:
            return f"nothing is {word}d" if self.device else f"nothing is {word}ed"
        if not self.prefault:
            return f"it {word}s as it grows"
        return f"{format_bytes(self.prefault)} {word.removesuffix('e')}ed at the start"

    def line(self, numpy: bool = False, program: str = "SCRIPT") -> str:
        """The line that a user types to get this setting.

        Parameters
        ----------
        numpy : bool
            For the arrays of a NumPy program that is not changed.
        program : str
            The words of the program on a command line.
        """
        if self.device:
            if not self.is_ours:
                return DEVICE_LINES[self.peer]
            words = ", ".join([*self._words(), "source=cuda.Device()"])
            return f"{VARIABLES[self.peer]} = arenapy.{CLASSES[self.peer]}({words})"
        if self.peer == BASELINE:
            return "nothing to change"
        if not self.is_ours:
            return f"LD_PRELOAD={PEERS[self.peer].library} python {program}"
        if not numpy:
            return f"{VARIABLES[self.peer]} = arenapy.{self}"
        initial = self.arguments.get("initial_bytes")
        if len(self.arguments) > (initial is not None):  # the command has no option for the others
            return f'arenapy.numpy_memory(arenapy.{self}, threads=True, libc="keep").install()'
        option = f"--initial-bytes {initial >> 20}M " if initial is not None else ""
        return f"arenapy run {option}{program}"


#: From which is learned how much `ready_pool` needs.
PLAIN_POOL = Setting("pool", {}, None)


def settings_for(program: Program, names: Sequence[str], device: bool = False) -> list[Setting]:
    """The settings to try, in the order of preference. `ready_pool` makes another one later."""
    align = DEVICE_ALIGN if device else ALIGN
    made: Mapping[str, Callable[[], list[Setting]]] = {
        "pool": lambda: [PLAIN_POOL, Setting("pool", {"rounding": "class"}, None)],
        "bump": lambda: [_bump(program, align)],
        "slab": lambda: [_slab(program, align)],
    }
    found: list[Setting] = []
    for name in names:
        found += made[name]() if name in made else [Setting(name)]
    return [replace(one, device=device) for one in found]


def _bump(program: Program, align: int) -> Setting:
    nbytes = _up(program.bump_bytes(align), 4096)
    return Setting("bump", {"nbytes": nbytes}, nbytes)


def _slab(program: Program, align: int) -> Setting:
    item_size, count = program.slab_items()
    return Setting("slab", {"item_size": item_size, "count": count}, program.slab_bytes(align))


def ready_pool(held: int, device: bool = False) -> Setting:
    """A Pool that has from the start what one that grew has held."""
    nbytes = _up(max(1, held), HUGE_PAGE)
    return Setting("pool", {"initial_bytes": nbytes}, nbytes, device)


def unsuited(setting: Setting, program: Program, threads: int) -> str | None:
    """Why a setting is not tried, if it is not."""
    if setting.peer == "bump" and threads > 1:
        return f"the program has {threads} threads, and a Bump is for one"
    live = int(program.live().max())
    if setting.peer in ("bump", "slab") and (setting.prefault or 0) > max(ROOM * live, HUGE_PAGE):
        return f"needs {format_bytes(setting.prefault or 0)}, and {format_bytes(live)} are live"
    return None


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _written(value: object) -> str:
    """An argument as a person writes it: ``"class"``, ``268 << 20``, ``1000``."""
    if isinstance(value, str):
        return f'"{value}"'
    assert isinstance(value, int)
    for shift in 30, 20, 10:
        if value and value % (1 << shift) == 0:
            return f"{value >> shift} << {shift}"
    return str(value)
