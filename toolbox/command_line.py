"""What every script shares: options that are refused in one line, lines that reach a pipe, a clean end."""

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

MOST = 10**9  # what a count may be where nothing smaller is the limit


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line and whose --help shows every default.

    description: a script's docstring, of which --help shows the first paragraph; None under `python -OO`.
    """

    def __init__(self, prog: str, description: str | None):
        look = dict(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
        super().__init__(prog=prog, description=(description or "").partition("\n\n")[0], **look)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def integer(minimum: int, maximum: int = MOST) -> Callable[[str], int]:
    """An argparse type: a whole number from minimum to maximum, both included."""
    legal = f"a whole number of at least {minimum} and at most {maximum}"
    return partial(parse_number, int, minimum, maximum, legal)


def number(minimum: float, maximum: float, open_start: bool = False) -> Callable[[str], float]:
    """An argparse type: a number from minimum to maximum, both included; if open_start, above minimum."""
    legal = f"a number {'above' if open_start else 'at least'} {minimum:g} and at most {maximum:g}"
    lowest = math.nextafter(minimum, maximum) if open_start else minimum
    return partial(parse_number, float, lowest, maximum, legal)


def parse_number(kind: type, minimum: float, maximum: float, legal: str, text: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not minimum <= value <= maximum:  # NaN is never inside
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not {legal}")
    return value


def shorten(text: str, longest: int = 24) -> str:
    """At most so many characters of it: two of 24 fit in a line of a title."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def option_name(name: str) -> str:
    """ "batch_size" -> "--batch-size"."""
    return "--" + name.replace("_", "-")


def check_unchanged(args: argparse.Namespace, kept: dict, names, source: Path) -> None:
    """ValueError when an option of `names` was given another value than the run at `source` was made with."""
    for name in names:
        given, made = getattr(args, name), kept[name]
        if str(given) != str(made):
            raise ValueError(f"{option_name(name)} {given}: {source} was made with {made}; leave it out")


def say(text: str) -> None:
    """print that reaches a pipe at once."""
    print(text, flush=True)


def show_progress(text: str) -> None:
    """Overwrite one line on a terminal; write nothing where stderr is a file or a pipe. "" clears it."""
    if sys.stderr.isatty():
        note(f"\r\x1b[K{text}", end="")


def note(text: str, end: str = "\n") -> None:
    """Print on stderr what a run does not depend on: where that is full or gone, the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


def open_streams() -> None:
    """Make stdin, stdout and stderr usable whatever the program was started with."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; a file opened later would take its number, and its output
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # replaced by something that is no text file
            stream.reconfigure(errors="backslashreplace")  # an odd character must not end a run


def run_script(main: Callable[[], int | None]) -> None:
    """Run main as a program: Ctrl-C, SIGTERM, a closed pipe (`| head`) or a full disk end it in one line."""
    open_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever asks us to end gets what Ctrl-C gets
    torch.set_float32_matmul_precision("high")  # TF32 matrix products where the GPU has them
    try:
        try:
            status = main()
            sys.stdout.flush()
        finally:  # Python itself takes a moment to end: a signal then ends it at once, without a traceback
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is signal.default_int_handler:  # nohup ignores SIGINT: so do we
                    signal.signal(number, signal.SIG_DFL)
    except KeyboardInterrupt:
        note("\ninterrupted")
        status = 130
    except BrokenPipeError:
        status = 1
        silence()
    except OSError as error:
        if error.filename is not None:
            raise
        note(f"{Path(sys.argv[0]).name}: error: standard output: {error.strerror or error}")
        status = 2
        silence()
    sys.exit(status)


def silence() -> None:
    """Nothing is left for Python's last flush of stdout, which would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
