"""Text for people: sizes and times in their units, and what is safe for a terminal."""

from collections.abc import Iterable

__all__ = [
    "format_bytes",
    "format_ns",
    "html_row",
    "html_table",
    "printable",
    "printable_lines",
    "reason_of",
]

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def printable(text: str) -> str:
    """The text on one line, with an escape in place of each character that cannot be seen.

    Escape sequences move the cursor, rewrite what was printed and speak to the terminal; newlines
    fake lines; marks of direction reorder words; lone surrogates cannot be written at all.
    ``str.isprintable`` is false for all of these.

    Parameters
    ----------
    text : str

    Examples
    --------
    >>> print(printable("report\\x1b[2J.py"))
    report\\x1b[2J.py
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """The same of a text of several lines, which stay lines; tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def reason_of(error: BaseException) -> str:
    """The text of an exception; its type if it has no text, as Python's own MemoryError."""
    return str(error) or type(error).__name__


def html_row(tag: str, texts: Iterable[str]) -> str:
    """A row of a table of HTML, of cells ``td`` or ``th``."""
    import html  # here: only notebooks need it

    cells = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
    return f"<tr>{cells}</tr>"


def html_table(title: str, rows: Iterable[Iterable[str]]) -> str:
    """A table of two columns, under its title."""
    body = "".join(html_row("td", row) for row in rows)
    return f"<table>{html_row('th', [title, ''])}{body}</table>"


def format_bytes(nbytes: int) -> str:
    """A count of bytes with a binary unit: ``1.5 GiB``."""
    unit = min(max(abs(nbytes).bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{nbytes / (1 << 10 * unit):.4g} {UNITS[unit]}"


def format_ns(ns: float) -> str:
    """The time of an operation: ``250.0 ns``, ``1.5 µs``."""
    return f"{ns:.1f} ns" if ns < 1000 else f"{ns / 1000:.1f} µs"
