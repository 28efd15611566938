"""What every script shares: options that are refused in one line, lines that reach a pipe, a clean end."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line and whose --help shows every default.

    description: a script's docstring, of which --help shows the first paragraph; None under `python -OO`.
    """

    def __init__(self, prog: str, description: str | None):
        look = dict(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
        super().__init__(prog=prog, description=(description or "").partition("\n\n")[0], **look)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from minimum to maximum, both included."""
    legal = f"a whole number of at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return value

    return parse


def number(minimum: float, maximum: float = math.inf, open_ends: bool = False) -> Callable[[str], float]:
    """An argparse type: a number from minimum to maximum; with open_ends, neither of them itself."""
    low, high = ("above", "below") if open_ends else ("at least", "at most")
    legal = f"a number {low} {minimum:g}" + ("" if maximum == math.inf else f" and {high} {maximum:g}")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = minimum < value < maximum if open_ends else minimum <= value <= maximum
        if not inside or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return value

    return parse


def option_name(name: str) -> str:
    """ "batch_size" -> "--batch-size"."""
    return "--" + name.replace("_", "-")


def check_unchanged(args: argparse.Namespace, kept: dict, names, source: Path) -> None:
    """ValueError when an option of `names` was given another value than the run at `source` was made with."""
    for name in names:
        given, made = getattr(args, name), kept[name]
        if str(given) != str(made):
            raise ValueError(f"{option_name(name)} {given}: {source} was made with {made}; leave it out")


def check_file(option: str, path: Path) -> None:
    """ValueError when `path` cannot become a file: it is a folder, or its folder is missing."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: must be a file in a folder that exists")


def say(text: str) -> None:
    """print that reaches a pipe at once."""
    print(text, flush=True)


def show_progress(text: str) -> None:
    """Overwrite one line on a terminal; write nothing where stderr is a file or a pipe. "" clears it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def run_script(main: Callable[[], int | None]) -> None:
    """Run main as a program: Ctrl-C and a closed pipe (`| head`) end it without a traceback."""
    torch.set_float32_matmul_precision("high")  # TF32 matrix products where the GPU has them
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing left for Python's last flush
        sys.exit(1)
