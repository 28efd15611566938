"""toolbox/files.py: what may be written, how it is written, and who holds it."""

import argparse
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import types

import pytest
from processes import ROOT

from toolbox import files
from toolbox.files import (
    FileError,
    check_output,
    check_outputs,
    file_name,
    held,
    is_source,
    lock,
    reason,
    replacing,
    same_file,
    write_text,
    written_through,
)

CHECKPOINT = b"PK\x03\x04 and so on"


def write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


# ------------------------------------------------------------------------------------------------- checking


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: a file in.txt, and five other names for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_bytes(b"precious")
    (tmp_path / "sub").mkdir()
    os.symlink("in.txt", "link.txt")
    os.symlink("link.txt", "link-to-link.txt")
    os.link("in.txt", "hard.txt")
    os.symlink("sub", "sub-link")
    return tmp_path


SPELLINGS = [
    "in.txt",
    "./in.txt",
    "sub/../in.txt",
    "sub-link/../in.txt",
    "link.txt",
    "link-to-link.txt",
    "hard.txt",
]


@pytest.mark.parametrize("name", [*SPELLINGS, "ABSOLUTE"])
def test_an_output_is_never_an_input(folder, name):
    path = folder / "in.txt" if name == "ABSOLUTE" else file_name(name)
    with pytest.raises(FileError, match="--out .* is also the file of --input"):
        check_outputs(
            [("--out", path, "text file")], [("--data", folder / "other"), ("--input", file_name("in.txt"))]
        )
    check_outputs([("--out", file_name("in2.txt"), "text file")], [("--input", file_name("in.txt"))])


@pytest.mark.parametrize("name", SPELLINGS)
def test_no_two_outputs_are_one_file(folder, name):
    with pytest.raises(FileError, match="--b .*: is also the file of --a"):
        check_outputs([("--a", file_name("in.txt"), "text file"), ("--b", file_name(name), "text file")])


@pytest.mark.parametrize("names", [("new.txt", "sub/../new.txt"), ("sub/new.txt", "sub-link/new.txt")])
def test_outputs_that_do_not_exist_yet_are_told_apart(folder, names):
    a, b = map(file_name, names)
    assert same_file(a, b) and not same_file(a, file_name("sub/new2.txt"))
    with pytest.raises(FileError, match="--b"):
        check_outputs([("--a", a, "text file"), ("--b", b, "text file")])


def test_two_outputs_may_go_to_one_device():
    check_outputs([("--a", file_name("/dev/null"), "text file"), ("--b", file_name("/dev/null"), "picture")])


@pytest.mark.parametrize(
    "name", ["README.md", "train.py", "toolbox/files.py", "requirements.txt", "translation/requirements.txt"]
)
def test_no_source_is_written(name, tmp_path):
    with pytest.raises(FileError, match="is a file of this project"):
        check_output("--out", ROOT / name, "text file")
    os.symlink(ROOT / name, tmp_path / "a.txt")
    with pytest.raises(FileError, match="is a file of this project"):
        check_output("--out", tmp_path / "a.txt", "text file")
    # Only our own code and text is source: no picture among it, and nothing of the same name elsewhere.
    assert is_source(ROOT / name) and not is_source(ROOT / "cross_attn.png")
    assert not is_source(tmp_path / ROOT.joinpath(name).name)


@pytest.mark.parametrize(
    "kind, good, bad",
    [
        ("checkpoint", CHECKPOINT, b"Dear diary"),
        ("checkpoint", b"", b"\x89PNG\r\n"),
        ("JSON file", b'{"a": 1}', b"Dear diary"),
        ("JSON file", b" \n[1]", CHECKPOINT + b"\0"),
        ("text file", "Ein Hund läuft.\n".encode(), CHECKPOINT + b"\0"),
        ("page", b'<!doctype html>\n<meta content="page/build.py">', b"<!doctype html>\n<p>My own"),
    ],
)
def test_only_a_file_of_the_same_kind_is_replaced(tmp_path, kind, good, bad):
    (tmp_path / "good").write_bytes(good), (tmp_path / "bad").write_bytes(bad)
    check_output("--out", tmp_path / "good", kind)
    with pytest.raises(FileError, match=f"--out .*bad: is there already and is no {kind}"):
        check_output("--out", tmp_path / "bad", kind)


@pytest.mark.parametrize(
    "name", ["missing/a.txt", "sub", "in.txt/a", "dangling", "n" * 300, "n" * 228, "loop"]
)
def test_what_cannot_become_a_file(folder, name):
    os.symlink("missing/target", "dangling")
    os.symlink("loop", "loop")
    with pytest.raises(FileError, match="^--out ") as caught:
        check_output("--out", file_name(name), "text file")
    why = (
        "cannot be written (File name too long)"
        if "nnn" in name
        else "must be a file in a folder that exists"
    )
    assert str(caught.value) == f"--out {name}: {why}"


def test_of_several_outputs_the_one_that_cannot_be_is_named(folder):
    good, bad = ("--out", folder / "a", "text file"), ("--log", folder / "missing" / "a", "text file")
    with pytest.raises(FileError, match="^--log "):
        check_outputs([good, bad])


def test_a_page_and_a_picture_may_be_made_again(tmp_path):
    check_output("--html", ROOT / "docs" / "index.html", "page")
    with pytest.raises(FileError, match="is a file of this project"):
        check_output("--html", ROOT / "page" / "template.html", "page")
    (tmp_path / "a.png").write_bytes(b"any content")
    check_output("--out", tmp_path / "a.png", "picture")


def test_a_device_need_not_exist_to_be_one(tmp_path):
    assert written_through(file_name("/dev/no-such-device")) and written_through(file_name("/proc/1/none"))
    assert not written_through(tmp_path / "dev") and not written_through(tmp_path)


def test_reasons_are_short_and_one_line():
    assert reason(OSError(28, "No space left on device", "a.txt")) == "No space left on device"
    assert reason(ValueError("of two\n  lines")) == "of two lines" and reason(OSError("plain")) == "plain"


@pytest.mark.parametrize("mode", [0o444, 0o555])
def test_a_read_only_file_is_kept(folder, mode):
    os.chmod("in.txt", mode)
    with pytest.raises(FileError, match="is read-only"):
        check_output("--out", file_name("link.txt"), "text file")
    with pytest.raises(PermissionError, match="read-only") as error:
        write("link.txt")
    assert (error.value.errno, error.value.filename) == (errno.EACCES, "link.txt")
    assert (folder / "in.txt").read_bytes() == b"precious"


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_an_empty_name_is_no_file(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not the name of a file"):
        file_name(text)


# -------------------------------------------------------------------------------------------------- writing


def test_a_link_stays_a_link_and_its_file_gets_the_content(folder):
    os.symlink("new.txt", "to-new.txt")
    for name, target in (("link-to-link.txt", "in.txt"), ("to-new.txt", "new.txt")):
        write(name, b"content")
        assert os.path.islink(name) and not os.path.islink(target)
        assert (folder / target).read_bytes() == b"content"


def test_text_is_written_in_utf8(folder):
    write_text("in.txt", "Ein Hund läuft.\n")
    assert (folder / "in.txt").read_bytes() == "Ein Hund läuft.\n".encode()


def test_permissions_stay_what_they_were(folder):
    os.chmod("in.txt", 0o640)
    write("in.txt")
    assert stat.S_IMODE(os.stat("in.txt").st_mode) == 0o640


def test_devices_and_pipes_are_written_through(folder):
    write("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo("pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((folder / "pipe").read_bytes()))
    reader.start()
    write("pipe", b"through")
    reader.join(10)
    assert received == [b"through"] and stat.S_ISFIFO(os.stat("pipe").st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_device_is_an_error():
    with pytest.raises(OSError):
        write("/dev/full")


def test_what_fails_leaves_everything_as_it_was(folder):
    before = sorted(os.listdir())
    with pytest.raises(RuntimeError), replacing("in.txt") as file:
        file.write(b"half")
        raise RuntimeError
    assert (folder / "in.txt").read_bytes() == b"precious" and sorted(os.listdir()) == before


PAUSED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from toolbox.files import held, replacing
with {context} as file:
    print("in", flush=True)
    time.sleep(60)
"""


def paused(folder, context):
    """A process that has entered `context` and stays there."""
    command = [sys.executable, "-c", PAUSED.format(context=context), str(ROOT)]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()


def test_what_a_killed_process_left_is_removed_and_nothing_else(folder):
    foreign = ["in.txt.tmp", "in.txt.unfinished", "in.txt.0123456789ABCDEF.unfinished", "notes.unfinished"]
    foreign += ["in.txt.0123456789abcdef.unfinished.bak", "in2.txt.0123456789abcdef.unfinished"]
    for name in foreign:
        (folder / name).write_bytes(b"mine")
    process = paused(folder, 'replacing("in.txt")')
    left = set(os.listdir()) - {*foreign, *SPELLINGS, "sub", "sub-link"}
    assert len(left) == 1
    write("in.txt", b"second")
    assert left <= set(os.listdir())  # its process is still writing
    kill(process)
    assert left <= set(os.listdir()) and (folder / "in.txt").read_bytes() == b"second"
    write("in.txt", b"third")
    assert not left & set(os.listdir()) and {*foreign} <= set(os.listdir())


# -------------------------------------------------------------------------------------------------- locking


@pytest.mark.parametrize("name", ["model.pt", "sub"])
def test_a_second_process_is_refused_and_a_dead_one_holds_nothing(folder, name):
    before = sorted(os.listdir())
    process = paused(folder, f'held("--out", Path("{name}"))')
    with (
        pytest.raises(FileError, match=f"--out {name}: another process is writing there"),
        held("--out", file_name(name)),
    ):
        pass
    with held("--out", file_name("other.pt")):
        pass
    kill(process)
    for _ in range(2):
        with held("--out", file_name(name)):
            pass
    assert sorted(os.listdir()) == before and not os.listdir("sub")


def test_within_one_process_too(folder):
    with held("--out", file_name("a")), pytest.raises(FileError), held("--out", file_name("a")):
        pass
    with held("--out", file_name("/dev/null")), held("--out", file_name("/dev/null")):
        pass  # nobody owns a device


def test_the_mark_lies_in_a_folder_and_beside_a_file(folder):
    for name, mark in (("sub", "sub/lock"), ("in.txt", "in.txt.lock"), ("new.pt", "new.pt.lock")):
        with held("--out", file_name(name)):
            assert os.path.exists(mark)
            os.unlink(mark)  # by someone who tidies up: no harm is done at the end


def test_a_mark_that_cannot_be_made_is_one_line(folder):
    with pytest.raises(FileError) as error, held("--out", file_name("missing/a.pt")):
        pass
    assert str(error.value) == "--out missing/a.pt: cannot be written (No such file or directory)"


def test_a_mark_replaced_between_opening_and_locking_holds_nothing(folder, monkeypatch):
    def replaced(file):
        lock(file)
        os.rename("a.lock", "old")
        open("a.lock", "wb").close()

    monkeypatch.setattr(files, "lock", replaced)
    with pytest.raises(FileError, match="another process"), held("--out", file_name("a")):
        pass


def test_the_lock_of_windows(folder, monkeypatch):
    calls = []
    windows = types.SimpleNamespace(LK_NBLCK="no waiting", locking=lambda *given: calls.append(given))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    with open("in.txt", "r+b") as file:
        file.read(3)
        lock(file)
        assert calls == [(file.fileno(), "no waiting", 1)] and file.tell() == 0
