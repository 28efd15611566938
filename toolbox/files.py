"""Every path that a command writes goes through here: nothing is replaced, deleted or shared by mistake.

`check_outputs` refuses a path before work starts, `replacing` writes a file whole or not at all, `held` keeps
a second process away. Errors are one line that begins with the option or the file.
"""

import argparse
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

PROJECT = Path(__file__).resolve().parent.parent
SOURCES = {".py", ".md", ".toml", ".yml", ".js", ".html"}  # of the project; and its requirements.txt

# kind of output -> do the first bytes of a file look like one? Only such a file is replaced.
KINDS: dict[str, Callable[[bytes], bool]] = {
    "checkpoint": lambda head: head.startswith(b"PK"),  # torch.save writes a zip archive
    "JSON file": lambda head: head.lstrip()[:1] in (b"{", b"["),
    "text file": lambda head: b"\0" not in head,
    "page": lambda head: b'content="page/build.py"' in head and b"{{" not in head,  # not its template either
    "picture": lambda head: True,  # its name must end as a picture's does
}


class FileError(ValueError):
    """A path cannot be used; the message is one line that names the option and the path."""


# ------------------------------------------------------------------------------------------------- checking


def file_name(text: str) -> Path:
    """An argparse type: a path. An empty one would mean the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file or folder")
    return Path(text)


def reason(error: Exception) -> str:
    """Why it failed, in a few words: what the system said, without the error's number and the path."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def same_file(a: Path, b: Path) -> bool:
    """Do both names lead to one file? Links, `..` and other spellings do not deceive it."""
    if os.path.normcase(os.path.realpath(a)) == os.path.normcase(os.path.realpath(b)):
        return True
    return a.exists() and b.exists() and os.path.samefile(a, b)  # hard links


def written_through(path: Path) -> bool:
    """Is it a device, a pipe or the like? There is nothing to put in its place."""
    special = path.exists() and not path.is_file() and not path.is_dir()
    return special or path.absolute().parts[1:2] in (("dev",), ("proc",))


def is_source(path: Path) -> bool:
    """Is it a file of this project's own code or text?"""
    real = Path(os.path.realpath(path))
    return real.is_relative_to(PROJECT) and (real.suffix in SOURCES or real.name == "requirements.txt")


def check_output(option: str, path: Path, kind: str) -> None:
    """FileError when `path` cannot become a file, or is one that is worth keeping.

    kind: of KINDS; a file that is no such thing is not replaced, nor is a read-only one, nor our own source.
    """
    try:
        real = Path(os.path.realpath(path))  # itself a link only where links lead round in a circle
        if real.is_dir() or real.is_symlink() or not real.parent.is_dir():
            raise FileError(f"{option} {path}: must be a file in a folder that exists")
        with contextlib.suppress(FileNotFoundError):  # `replacing` writes under a longer name first
            unfinished(real).lstat()
        try:
            mode = path.stat().st_mode  # exists() says False to any error from Python 3.14 on
        except FileNotFoundError:
            return
        if written_through(path):
            return
        if not mode & 0o222:  # its owner asked for it to be kept, root or not
            raise FileError(f"{option} {path}: is read-only; name another file")
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise FileError(f"{option} {path}: cannot be written ({reason(error)})") from None
    if is_source(path) and not (kind == "page" and KINDS[kind](head)):  # a page built before is no source
        raise FileError(f"{option} {path}: is a file of this project; name another file")
    if head and not KINDS[kind](head):
        raise FileError(f"{option} {path}: is there already and is no {kind}; name another file")


def check_outputs(outputs: Iterable[tuple[str, Path, str]], inputs: Iterable[tuple[str, Path]] = ()) -> None:
    """Check every (option, path, kind) that a command will write against all that it reads and writes.

    inputs: every (option, path) that it reads. FileError as `check_output`, and for one file named twice.
    """
    taken = list(inputs)
    for option, path, kind in outputs:
        check_output(option, path, kind)
        for other, known in taken:
            if not written_through(path) and same_file(path, known):
                raise FileError(f"{option} {path}: is also the file of {other}; name another file")
        taken.append((option, path))


# -------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` at the end, and only if all went well. OSError if not.

    A link stays a link: the file it leads to is replaced. A device or pipe is written to. What a process left
    that was killed in here is removed by the next one that writes the same file.
    """
    path = Path(path)
    if written_through(path):
        with open(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    if target.exists() and not target.stat().st_mode & 0o222:
        raise PermissionError(13, "it is read-only", str(path))
    remove_unfinished(target)
    temporary = unfinished(target)
    try:
        with open(temporary, "wb") as file:
            lock(file)
            yield file
            if target.exists():
                os.chmod(temporary, target.stat().st_mode & 0o777)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def unfinished(target: Path) -> Path:
    """A name for what is to take the place of `target`."""
    return target.with_name(f"{target.name}.{secrets.token_hex(8)}.unfinished")


def write_text(path: Path | str, text: str) -> None:
    """`replacing`, with the text in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def remove_unfinished(target: Path) -> None:
    """Remove what `replacing` began beside `target` in a process that no longer lives."""
    name = re.compile(re.escape(target.name) + r"\.[0-9a-f]{16}\.unfinished")
    for leftover in target.parent.glob("*.unfinished"):
        with contextlib.suppress(OSError):  # someone is writing it, or it is not ours to remove
            if name.fullmatch(leftover.name) and leftover.is_file():
                with open(leftover, "r+b") as file:
                    lock(file)
                leftover.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------- locking


def lock(file) -> None:
    """Take the lock on an open file. OSError when another process has it. The system frees it at our end."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def held(option: str, path: Path) -> Iterator[None]:
    """Within, `path` is ours: a second process that asks for it is refused by a FileError.

    The mark is a locked file beside `path`, or in it where it is a folder; a dead process holds no lock.
    """
    if written_through(path):
        yield
        return
    mark = path / "lock" if path.is_dir() else path.with_name(f"{path.name}.lock")
    try:
        file = open(mark, "ab")
    except OSError as error:
        raise FileError(f"{option} {path}: cannot be written ({reason(error)})") from None
    with file:
        try:
            lock(file)
            if not mark.exists() or not os.path.samestat(os.fstat(file.fileno()), mark.stat()):
                raise BlockingIOError  # its owner ended between our two steps and took the mark away
        except OSError:
            raise FileError(f"{option} {path}: another process is writing there") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()
