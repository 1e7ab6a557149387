"""The ``arenapy`` command: finds the subcommand, and ends as a Unix command should.

A subcommand is a module with ``main(argv) -> int`` and a line in `COMMANDS`. It is imported when it
is the one asked for, so that ``arenapy --version`` costs nothing and a missing extra of one
subcommand does not break another. The program of ``arenapy run`` waits for what is imported here,
which is next to nothing. The output of a subcommand is its own business; how a command ends is
decided here: 0 for success, 1 for a failure told in one line on standard error, 2 for wrong
arguments (argparse), 130 for Ctrl-C, and SIGPIPE when the reader has gone away.
"""

import sys

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence

    from arenapy.commands.command_line import Parser

__all__ = ["main"]

#: Subcommand: (module with ``main(argv)``, what it does, for the help).
COMMANDS = {
    "info": (
        "arenapy.commands.info",
        "show what this machine offers: pages, limits, NUMA nodes, kernel, GPUs",
    ),
    "demo": (
        "arenapy.commands.demo",
        "measure NumPy with and without page faults",
    ),
    "run": (
        "arenapy.commands.run.command",
        "run a program with its NumPy arrays in a pool, and print a report",
    ),
    "compare": (
        "arenapy.commands.compare.command",
        "measure whether a program runs faster with arenapy, and say what to do next",
    ),
    "trace": ("arenapy.commands.trace", "show the memory in a trace, also as a page with charts"),
    "replay": (
        "arenapy.commands.replay.command",
        "replay a trace with other allocators, and measure time and memory",
    ),
    "advise": (
        "arenapy.commands.advise.command",
        "say which allocator a recorded program should use, and how large",
    ),
    "fuzz": (
        "arenapy.commands.fuzz",
        "test an allocator with random programs, and shrink a failing one",
    ),
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2  # SIGINT


def _parser() -> "Parser":
    from argparse import SUPPRESS, RawDescriptionHelpFormatter

    from arenapy._version import __version__
    from arenapy.commands.command_line import Parser

    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    parser = Parser(
        prog="arenapy",
        usage="%(prog)s [--help] [--version] COMMAND ...",
        description="Arenas, slabs and pools of prefaulted memory for NumPy and other libraries.",
        epilog="\n".join(["commands:", *lines, "", "arenapy COMMAND --help lists its options."]),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"arenapy {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", choices=COMMANDS, help=SUPPRESS)
    return parser


def _end_by_signals() -> None:
    """Let what ends a command raise an exception, so that it leaves no file and no process behind.

    Called when all is imported: code that imports may lose the exception, and there is nothing to
    leave behind before.
    """
    import signal

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        # nohup ignores SIGHUP, and a shell SIGINT for a job in the background.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    import signal

    # The end has begun, and they would interrupt that. One that came already has its handler
    # called: Python complains of SIG_IGN.
    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    for later in ending:
        signal.signal(later, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    raise SystemExit(128 + number)


def _see_children_end() -> None:
    """Do not ignore SIGCHLD, as a command may inherit it: nobody could wait for a child."""
    import signal

    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _show_all_characters() -> None:
    """Let standard output replace what its encoding lacks: a measurement is not to be lost."""
    import codecs
    import io

    def replace(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return "u" if error.object[error.start] == "µ" else "?", error.start + 1

    codecs.register_error("arenapy", replace)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is not closed
        sys.stdout.reconfigure(errors="arenapy")


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run the ``arenapy`` command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, without the program's name. None: those of this process.

    Returns
    -------
    int
        The exit status.

    Raises
    ------
    SystemExit
        From argparse: after ``--help`` and ``--version``, and with status 2 for wrong arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:  # a caller in Python keeps its signal handlers
            import _signal  # type: ignore[import-not-found]  # built in; `signal` imports enum

            _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)  # the reader of a pipe went away
        if not words or words[0] not in COMMANDS:
            parser = _parser()
            parser.parse_args(words[:1])  # says what there is, or what is wrong
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        if words[0] == "run":
            from arenapy.commands.run.command import main as run

            if argv is None and "--advise" in words:  # else it becomes the program
                _end_by_signals()
            return run(words[1:])
        import importlib

        import arenapy

        arenapy.Pool  # noqa: B018  # imports what a command does not import at once
        module, _ = COMMANDS[words[0]]
        # All words are the subcommand's: argparse would keep a first "--" for itself.
        command = importlib.import_module(module).main
        if argv is None:
            _end_by_signals()
            _see_children_end()
            _show_all_characters()
        status: int = command(words[1:])
        if sys.stdout is not None:  # so that a full disk is noticed here, and not ignored at exit
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ImportError, MemoryError, OSError) as error:
        from arenapy.base.text import printable_lines

        try:
            text = str(error) or type(error).__name__  # Python's own MemoryErrors have no text
            print(printable_lines(f"arenapy: {text}"), file=sys.stderr)
        except OSError:
            pass
        return EXIT_FAILURE
