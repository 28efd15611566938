"""What the tests of faults share: a disk that counts what is written, and children that may be killed.

A child is forked from one process that has imported everything, so that it starts in milliseconds.
"""

import builtins
import contextlib
import errno
import importlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import ROOT

from toolbox.command_line import run_script

# Makes torch import, here and not in every child, what its first optimiser needs: it takes seconds.
torch.optim.Adam([torch.zeros(1)])

# Models and data so small that a whole run takes a moment
TRAIN = ["--samples", "64", "--batch-size", "16", "--warmup", "10", "--device", "cpu"]
SIZES = dict(D_MODEL=8, VAL_DRAWN=20, VAL_SCORED=5, TEST_SIZE=5)
TRANSLATION = ["--sample", "--d-model", "16", "--num-heads", "2", "--dff", "16", "--max-tokens", "1000"]
TRANSLATION += ["--vocab-size", "400", "--warmup", "40", "--bleu-every", "0", "--device", "cpu"]
TRANSLATION += ["--save-every", "2"]


def shrink(patch: pytest.MonkeyPatch, name: str) -> None:
    """Make the script a quick one."""
    script = importlib.import_module(name)
    if name == "train":
        for constant, value in SIZES.items():
            patch.setattr(script, constant, value)
    else:
        patch.setattr(script, "open_tensorboard", lambda *_: None)


# ------------------------------------------------------------------------------------------------- the disk


class Disk(contextlib.ExitStack):
    """Within: `strike(number, what)` is called at every change of a file below `folder`, numbered from 1.

    what: "open", "write" (with half of it done), "replace", "chmod", "fsync", "mkdir" or "unlink". strike may
    sleep, kill the process, or raise, which is then what the operation raises. removing=False: "unlink" does
    not count, as it needs no room. A file is written in pieces of `size` bytes.
    """

    def __init__(self, folder, strike, size: int = 2**17, removing: bool = True):
        super().__init__()
        self.folder, self.strike, self.count = os.path.realpath(folder), strike, 0
        self.size, self.removing = size, removing

    def happens(self, what: str) -> None:
        self.count += 1
        self.strike(self.count, what)

    def __enter__(self):
        real = io.open
        for module, name in ((builtins, "open"), (io, "open")):
            self.enter_context(mock.patch.object(module, name, partial(self.opened, real)))
        for name in ("replace", "chmod", "mkdir", "fsync", *(["unlink"] if self.removing else [])):
            self.enter_context(mock.patch.object(os, name, partial(self.called, name, getattr(os, name))))
        return super().__enter__()

    def inside(self, path) -> bool:
        return isinstance(path, (str, bytes, os.PathLike)) and os.path.realpath(
            os.fsdecode(os.path.dirname(os.path.abspath(path)))
        ).startswith(self.folder)

    def called(self, name, function, path, *args, **more):
        if name == "fsync" or self.inside(path):
            self.happens(name)
        return function(path, *args, **more)

    def opened(self, real, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *more):
        if not set(mode) & set("wax+") or not self.inside(file):
            return real(file, mode, buffering, encoding, errors, newline, *more)
        self.happens("open")
        raw = Raw(file, mode.replace("b", ""))
        raw.disk = self
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
        stream = kind(raw, self.size)
        return stream if "b" in mode else io.TextIOWrapper(stream, encoding, errors, newline)


class Raw(io.FileIO):
    def write(self, data):
        data = memoryview(data).cast("B")
        done = super().write(data[: len(data) // 2])
        self.disk.happens("write")
        return done + super().write(data[done:])


def full(start: int, lasting: bool):
    """A strike: the disk is full from operation `start` on, or there only."""

    def strike(number, what):
        if what != "unlink" and (number == start or lasting and number > start):
            raise OSError(errno.ENOSPC, "No space left on device")

    return strike


def pause(seconds: float):
    """A strike: every operation takes so long, but for "unlink", within which no signal can come."""
    return lambda number, what: what != "unlink" and time.sleep(seconds)


def limit(size: int):
    """No strike at all, but the system itself lets no file of this process grow beyond so many bytes."""
    import resource  # absent on Windows

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return lambda number, what: None


def kill(start: int):
    """A strike: the process dies at operation `start`."""
    return lambda number, what: number == start and os.kill(os.getpid(), signal.SIGKILL)


def fill(folder, main, after, capsys, step=1) -> int:
    """Run main() on a disk that is full from its n-th change on, or at that one only, for all n.

    after(status): what must be true then. -> how many of these runs went well all the same.
    """
    survived = 0
    for lasting in (True, False):
        number = 1
        while True:
            capsys.readouterr()
            with Disk(folder, full(number, lasting), removing=False) as disk:
                try:
                    status = main()
                except SystemExit as ended:
                    status = ended.code
            said = capsys.readouterr().err
            if disk.count < number:
                assert status == 0
                after(status)
                break
            if status == 0:
                survived += 1
            else:
                assert status == 2 and said.count("\n") == 1 and "No space left" in said, (number, said)
                assert "error: " in said
            after(status)
            number += step
        assert number > 2
    return survived


# ------------------------------------------------------------------------------------------------- children


def child(name: str, argv: list[str], output: Path, disk, variables: dict[str, str]) -> None:
    """Run a script as a program; disk: (folder, a strike's maker, its arguments), or None."""
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    shrink(pytest.MonkeyPatch(), name)
    sys.argv = [f"{name}.py"]
    with Disk(disk[0], disk[1](*disk[2:])) if disk else contextlib.nullcontext():
        run_script(partial(importlib.import_module(name).main, argv))


def start(name: str, argv, output: Path, disk=None, **variables):
    """Begin a child -> its process. `terminate` and `kill` send SIGTERM and SIGKILL; `exitcode` as usual."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults", "train", "translation.train", "sentencepiece", "tqdm"])
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}", OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    process = context.Process(target=child, args=(name, list(map(str, argv)), output, disk, variables))
    process.start()
    return process


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[Callable[[str], None]]:
    """Within: `folder` is a file system of its own; resize("64k") says how large. Skips where none can be."""

    def resize(size: str, *more: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *more]), "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if sys.platform != "linux" or os.geteuid() or not resize("4k"):
        pytest.skip("needs the right to mount a file system")
    try:
        yield lambda size: resize(size, "remount")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def run(name: str, argv, output: Path, disk=None) -> int:
    """A child to its end -> its exit code."""
    process = start(name, argv, output, disk)
    process.join(120)
    assert process.exitcode is not None, f"{name} {argv} hangs"
    return process.exitcode


# ----------------------------------------------------------------------------------------------- comparing


def same(a, b, path=""):
    """Equal to the bit, but for times."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key not in ("seconds", "tokens_per_second", "run"):
                same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{path}/{number}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path
