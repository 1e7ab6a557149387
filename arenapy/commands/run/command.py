"""``arenapy run``: a program with the data of its NumPy arrays in a pool.

What lives here: the command line, and its options that ``arenapy compare`` has, too; becoming
``python SCRIPT``. What does not: what happens in that process (startup/sitecustomize.py).

The program waits for everything that is imported here. So NumPy and compiled modules are left to
the process of the program, and argparse, which takes as long as Python itself, is imported only for
a command line that has options.
"""

import os
import sys

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

__all__ = ["Options", "add_pool_options", "add_program", "main"]

STARTUP = os.path.join(os.path.dirname(os.path.realpath(__file__)), "startup")
OPTIONS = "ARENAPY_RUN"  # the environment variable; startup/sitecustomize.py takes it
HUGE_PAGES = {"auto": "auto", "2M": "2M", "1G": "1G", "none": None}
LIBC = {"keep": "keep", "none": None}
TUNABLES = "GLIBC_TUNABLES"
HUGE_HEAP = "glibc.malloc.hugetlb"  # 1: transparent huge pages
TRACE_KIND = "Pool, NumPy"  # by which a trace says that it is of a program in a pool
SITES = 16  # callers that --sites notes: through libraries, into the program


class Options:
    """The options of a program in a pool, before any is given."""

    max_bytes: int | None = None
    initial_bytes = 0
    huge_pages = "auto"
    lock = False
    on_full = "system"
    libc = "keep"
    json: str | None = None
    trace: str | None = None
    sites = quiet = module = advise = False
    words: "Sequence[str]" = ()
    program: str
    arguments: "Sequence[str]"


def add_pool_options(parser: "argparse.ArgumentParser") -> None:
    """Add what the pool shall be like."""
    from arenapy.commands.command_line import size

    parser.add_argument(
        "--max-bytes", type=size, metavar="SIZE", help="limit of the pool, for example 4G"
    )
    parser.add_argument(
        "--initial-bytes", type=size, metavar="SIZE",
        help="memory to fault in when NumPy is imported",
    )  # fmt: skip
    parser.add_argument(
        "--huge-pages", choices=HUGE_PAGES,
        help="2M, 1G: use pages reserved in hugetlbfs (default: auto, transparent huge pages)",
    )  # fmt: skip
    parser.add_argument("--lock", action="store_true", help="never swap the pool out")
    parser.add_argument(
        "--on-full", choices=("system", "error"),
        help="when the pool is full: use malloc, or raise MemoryError (default: system)",
    )  # fmt: skip
    parser.add_argument(
        "--libc", choices=LIBC,
        help="keep: glibc keeps the memory that C code frees, in huge pages; none: glibc works as "
        "usual (default: keep)",
    )  # fmt: skip


def pool_words(options: Options) -> list[str]:
    """The options of the pool that were given, as words of a command line."""
    words: list[str] = []
    for name in "max_bytes", "initial_bytes", "huge_pages", "on_full", "libc":
        value = getattr(options, name)
        if value != getattr(Options, name):
            in_mib = name.endswith("_bytes") and value % (1 << 20) == 0
            words += ["--" + name.replace("_", "-"), f"{value >> 20}M" if in_mib else str(value)]
    return words + ["--lock"] * options.lock


def add_program(parser: "argparse.ArgumentParser") -> None:
    """Add the program; all that follows it is its own."""
    import argparse

    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module")
    parser.add_argument(
        "words", metavar="SCRIPT", nargs=argparse.REMAINDER,
        help="a Python program (with -m, a module), followed by its arguments",
    )  # fmt: skip


def parse_program(
    parser: "argparse.ArgumentParser", argv: "Sequence[str] | None", options: Options
) -> None:
    """Read the options, with a program; what cannot be is refused before anything is run."""
    parser.parse_args(argv, options)
    # One list of words: argparse would take a "--" that follows the program for its own.
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        parser.error("SCRIPT is missing: name a program")
    options.program, *options.arguments = words
    if options.max_bytes is not None and options.initial_bytes > options.max_bytes:
        parser.error(
            f"--initial-bytes {options.initial_bytes} is more than --max-bytes {options.max_bytes}"
        )
    if sys.flags.no_site:
        parser.error("python -S skips the site module, which installs the pool; omit -S")


def interpreter() -> list[str]:
    """The Python of this process, with its options: ``python -O`` of ``python -O -m arenapy``."""
    flags: list[str] = []
    rest = sys.orig_argv[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        letters = _letters(word)
        if word[len(letters) : len(letters) + 1] in ("c", "m"):
            return [sys.executable, *flags, *[letters] * (letters != "-")]
        flags.append(word)
        if word.startswith("--") or word[len(letters) :] in ("W", "X"):  # its value is a word
            flags += rest[:1]
            del rest[:1]
    return [sys.executable, *flags]


def _letters(word: str) -> str:
    """The options in a word that take no value: of ``-Im`` and ``-IWerror``, ``-I``."""
    end = next((at for at, letter in enumerate(word) if at and letter in "-cmWX"), len(word))
    return word[:end] if word.startswith("-") else ""


def _seeing_environment(python: "Sequence[str]") -> list[str]:
    """An interpreter's line without -E and -I, which hide the environment from Python."""
    line = [python[0]]
    for word in python[1:]:
        letters = _letters(word)
        left = letters.replace("E", "").replace("I", "") + word[len(letters) :]
        line += [left] * (left != "-")
    return line + ["-s", "-P"] * sys.flags.isolated


def _at_start(name: str) -> str | None:
    """The value of an environment variable when this process started; None if there was none."""
    with open("/proc/self/environ", "rb") as file:
        words = os.fsdecode(file.read()).split("\0")
    return next((word[len(name) + 1 :] for word in words if word.startswith(f"{name}=")), None)


def huge_heap(tunables: str | None) -> str:
    """Settings of glibc with huge pages for its heap, unless they say what that shall have."""
    if tunables and HUGE_HEAP in tunables:
        return tunables
    return ":".join(filter(None, [tunables, f"{HUGE_HEAP}=1"]))


def program_words(options: Options) -> list[str]:
    """The program and its arguments, for a command line of Python's or of ours."""
    is_like_option = options.program.startswith("-") and options.program != "-"
    ends = ["-m"] if options.module else ["--"] * is_like_option
    return [*ends, options.program, *options.arguments]


def command(
    options: Options,
    *,
    report: bool,
    json_file: str | None,
    trace: str | None = None,
    sites: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a program in the pool that `options` want."""
    line, environment, settings = start_of(options, os.environ)
    settings |= {"report": report, "sites": SITES if sites else 0}
    if json_file is not None or trace is not None:  # the program may go to another folder
        from arenapy.linux.outputs import absolute

        settings["json"] = json_file and absolute(json_file)
        settings["trace"] = trace and absolute(trace)
        settings["trace_stays"] = options.trace is not None  # else it is only for --advise
    environment[OPTIONS] = ascii(settings)
    return line, environment


def start_of(
    options: Options, variables: "Mapping[str, str]", *, pool: bool = True
) -> tuple[list[str], dict[str, str], "dict[str, Any]"]:
    """How a program starts: command line, environment without `OPTIONS`, and what that will say."""
    if os.pathsep in STARTUP:
        raise OSError(
            f"{STARTUP!r} cannot be in PYTHONPATH: install arenapy in a path without {os.pathsep!r}"
        )
    python = interpreter()
    program = program_words(options)
    environment = dict(variables)
    libc = LIBC[options.libc] if pool else None
    flags, hidden, line = {}, {"PYTHONPATH", *[TUNABLES] * bool(libc)}, python
    if sys.flags.ignore_environment:
        flags = {"ignore_environment": 1, "isolated": sys.flags.isolated}
        hidden |= {name for name in environment if name.startswith("PYTHON")}
        line = _seeing_environment(python)
    kept = {name: environment.pop(name, None) for name in hidden}
    locale = _at_start("LC_CTYPE")  # Python changed it if it was C, and will again
    if locale is None:
        environment.pop("LC_CTYPE", None)
    else:
        environment["LC_CTYPE"] = locale
    settings: dict[str, Any] = {
        "pid": os.getpid(),  # execve keeps it
        "pool": pool,
        "measured": None,
        "environment": kept,
        "flags": flags,
        "python": python,
        "line_words": len(line),
        "max_bytes": options.max_bytes,
        "initial_bytes": options.initial_bytes,
        "huge_pages": HUGE_PAGES[options.huge_pages],
        "lock": options.lock,
        "on_full": options.on_full,
        "libc": libc,
        "report": False,
        "json": None,
        "trace": None,
        "trace_stays": False,
        "sites": 0,
    }
    others = None if flags else kept["PYTHONPATH"]
    environment["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{others}" if others else STARTUP
    if libc:  # numpy_memory does the rest; glibc reads this once, as the process starts
        environment[TUNABLES] = huge_heap(kept[TUNABLES])
    return [*line, *program], environment, settings


def _parser() -> "argparse.ArgumentParser":
    from arenapy.commands.command_line import Parser

    parser = Parser(
        prog="arenapy run",
        usage="%(prog)s [options] SCRIPT|-m MODULE [arguments]",
        description="Run a Python program with the data of its NumPy arrays in a pool, whose "
        "memory is faulted in beforehand. At the end, print a report on standard error.",
    )
    add_pool_options(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the figures to this file; sizes are in bytes"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="record the pool's operations, for arenapy trace and replay"
    )
    parser.add_argument(
        "--sites", action="store_true", help="with --trace: also record which code requests memory"
    )
    parser.add_argument(
        "--advise", action="store_true",
        help="record the program, and say at its end which allocator it should use",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print no report")
    add_program(parser)
    return parser


def _read(argv: "Sequence[str]") -> Options:
    """The options of a command line; what cannot be is refused before anything is run."""
    quiet = argv[:1] == ["--quiet"]
    module = argv[quiet : quiet + 1] == ["-m"]
    words, options = argv[quiet + module :], Options()
    if words and (words[0] == "-" or not words[0].startswith("-")) and not sys.flags.no_site:
        options.quiet, options.module = quiet, module
        options.program, *options.arguments = words
        return options  # argparse is not needed
    from arenapy.commands.command_line import check_outputs
    from arenapy.linux import outputs

    parser = _parser()
    parse_program(parser, argv, options)
    report = outputs.report("arenapy run")
    written = {"--json": (options.json, report), "--trace": (options.trace, outputs.TRACE)}
    check_outputs(parser, written, {"SCRIPT": None if options.module else options.program})
    if options.sites and options.trace is None:
        parser.error("--sites are written into a trace; give --trace FILE")
    return options


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run ``arenapy run``; the program takes the place of this process, so this does not return.

    With ``--advise`` it does: the program is a child, and its exit status is returned.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``run``. None: those of this process.

    Raises
    ------
    SystemExit
        With status 2 for wrong arguments.
    """
    options = _read(sys.argv[1:] if argv is None else argv)
    # Python says so if it cannot read the program; then there is nothing to report.
    there = options.module or options.program == "-" or os.access(options.program, os.R_OK)
    report, json_file = there and not options.quiet, options.json if there else None
    if sys.stdout is not None:  # it was closed
        sys.stdout.flush()
    if options.advise:
        from arenapy.commands.advise.after_run import run_and_advise

        return run_and_advise(options, report=report, json_file=json_file)
    line, environment = command(
        options, report=report, json_file=json_file, trace=options.trace, sites=options.sites
    )
    os.execve(line[0], line, environment)


if __name__ == "__main__":
    sys.exit(main())
