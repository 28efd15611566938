"""toolbox/command_line.py: numbers and their limits, --help, what reaches a pipe, how a program ends."""

import argparse
import os
import signal
import sys

import pytest
from processes import ROOT, run_python

from toolbox.command_line import (
    MOST,
    ArgumentParser,
    check_unchanged,
    integer,
    note,
    number,
    open_streams,
    run_script,
    say,
    shorten,
    show_progress,
)


def refused(parse, text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse(text)
    return str(error.value)


def test_whole_numbers_and_their_limits():
    parse = integer(2, 5)
    assert [parse(text) for text in ("2", " 3", "5")] == [2, 3, 5]
    for text in ("1", "6", "2.0", "x", "", "nan", "inf", "9" * 400):
        assert refused(parse, text).endswith(" is not a whole number of at least 2 and at most 5")
    assert MOST == 1_000_000_000 and integer(0)("1000000000") == MOST
    assert (
        refused(integer(0), "1000000001")
        == "'1000000001' is not a whole number of at least 0 and at most 1000000000"
    )


def test_numbers_and_their_limits():
    parse = number(0, 1.5)
    assert [parse(text) for text in ("0", "1e-3", "1.5")] == [0.0, 0.001, 1.5]
    for text in ("-1e-9", "1.5000001", "nan", "inf", "-inf", "1" * 400, "1e999", "x", "0x1", ""):
        assert refused(parse, text).endswith(" is not a number at least 0 and at most 1.5")
    above = number(0, 1.5, open_start=True)
    assert above("5e-324") > 0 and above("1.5") == 1.5
    for text in ("0", "-0.0", "2"):
        assert refused(above, text) == f"'{text}' is not a number above 0 and at most 1.5"


def test_long_values_are_shortened():
    assert shorten("a" * 24) == "a" * 24 and shorten("a" * 25) == "a" * 23 + "…"
    assert shorten("abcdef", 4) == "abc…" and shorten("abcd", 4) == "abcd"


def test_help_shows_the_first_paragraph_and_every_default(capsys):
    parser = ArgumentParser("x.py", "First line,\nsecond line.\n\nA second paragraph.\n\nA third.")
    parser.add_argument("--steps", type=int, default=17, help="how many")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith("usage: x.py ") and "how many (default: 17)" in text
    assert "First line, second line." in text and "paragraph" not in text and "third" not in text
    assert ArgumentParser("x.py", None).description == ""  # docstrings are gone under -OO


def test_errors_are_one_line_and_abbreviations_are_no_options(capsys):
    parser = ArgumentParser("x.py", "")
    parser.add_argument("--steps")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--ste", "3"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "x.py: error: unrecognized arguments: --ste 3\n"


def test_an_option_that_a_run_was_made_with_may_be_repeated_but_not_changed(tmp_path):
    kept = {"batch_size": 64, "warmup": 10}
    check_unchanged(argparse.Namespace(batch_size=64, warmup=99), kept, ["batch_size"], tmp_path)
    with pytest.raises(ValueError) as error:
        check_unchanged(argparse.Namespace(batch_size=32), kept, ["batch_size"], tmp_path / "a.pt")
    assert str(error.value) == f"--batch-size 32: {tmp_path / 'a.pt'} was made with 64; leave it out"


class Stream:
    """A text stream that counts how often it was flushed."""

    def __init__(self, terminal=False, error=None):
        self.text, self.flushed, self.terminal, self.error = "", 0, terminal, error

    def write(self, text):
        if self.error:
            raise self.error
        self.text += text

    def flush(self):
        self.flushed += 1

    def isatty(self):
        return self.terminal


def test_every_line_is_flushed(monkeypatch):
    out, err = Stream(), Stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    say("a")
    assert (out.text, out.flushed) == ("a\n", 1)
    note("b")
    note("c", end="")
    assert (err.text, err.flushed, out.text) == ("b\nc", 2, "a\n")


def test_progress_is_for_terminals_alone(monkeypatch):
    for terminal, expected in ((True, "\r\x1b[Kstep 1\r\x1b[K"), (False, "")):
        monkeypatch.setattr(sys, "stderr", Stream(terminal))
        show_progress("step 1")
        show_progress("")
        assert sys.stderr.text == expected


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("closed")])
def test_a_note_that_cannot_be_written_ends_nothing(monkeypatch, error):
    monkeypatch.setattr(sys, "stderr", Stream(error=error))
    note("a")


def test_streams_that_are_closed_are_opened(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_streams()
    assert sys.stdin.read() == "" and sys.stdout.write("lost") and sys.stderr.write("lost")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def run(main, capsys):
    """run_script(main) -> the status it exits with, and what stood on stderr."""
    with pytest.raises(SystemExit) as end:
        run_script(main)
    return end.value.code, capsys.readouterr().err


def test_how_a_program_ends(process_as_before, capsys):
    def terminated():
        os.kill(os.getpid(), signal.SIGTERM)
        return 5

    def interrupted():
        raise KeyboardInterrupt

    assert run(lambda: None, capsys) == (None, "")
    assert run(lambda: 2, capsys) == (2, "")
    assert run(interrupted, capsys) == (130, "\ninterrupted\n")
    assert run(terminated, capsys) == (130, "\ninterrupted\n")


@pytest.mark.parametrize(
    "number, before, main",
    [
        (signal.SIGINT, "default_int_handler", "lambda: print('done')"),
        (signal.SIGINT, "SIG_IGN", "lambda: print('done')"),  # as under nohup
        (signal.SIGTERM, "default_int_handler", "lambda: open('/no/such/file')"),
    ],
)
def test_a_signal_while_python_ends(number, before, main):
    program = f"""
import atexit, os, signal
from toolbox.command_line import run_script
signal.signal(signal.SIGINT, signal.{before})
atexit.register(lambda: os.kill(os.getpid(), {number:d}))
run_script({main})
"""
    ran = run_python("-c", program, folder=ROOT)
    assert "KeyboardInterrupt" not in ran.stderr
    assert ran.returncode == (0 if before == "SIG_IGN" else -number)


def test_a_file_that_cannot_be_opened_is_a_fault_of_the_program(process_as_before):
    with pytest.raises(FileNotFoundError):
        run_script(lambda: open("/no/such/file", encoding="utf-8"))
