"""Checkpoints: one dict of plain values and tensors, never half written, loaded with weights_only=True."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from toolbox.files import reason, replacing


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used; the message is one line that begins with the file."""


def save(content: dict, file: BinaryIO) -> None:
    """torch.save that raises what went wrong. After a failed write torch tries to end the archive, fails once
    more, and its RuntimeError would hide the full disk or the Ctrl-C."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise


def write_checkpoint(path: Path | str, checkpoint: dict) -> None:
    """CheckpointError where it cannot be written; the file that was there before is then still there."""
    try:
        with replacing(path) as file:
            save(checkpoint, file)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written ({reason(error)})") from None


def load_plain(path: Path | str):
    """What torch.save wrote, plain values and tensors only, in CPU memory. Any exception for anything else.

    torch.load itself takes damaged data as it is: it does not look at the checksums of its archive, and an
    entry marked as a folder leaves a tensor's memory unwritten.
    """
    with open(path, "rb") as file:
        if file.read(2) == b"PK":
            with zipfile.ZipFile(file) as archive:
                if archive.testzip() or any(entry.external_attr & 0x10 for entry in archive.infolist()):
                    raise ValueError("the archive is damaged")
    return torch.load(path, map_location="cpu", weights_only=True)


def read_checkpoint(path: Path | str, keys: Sequence[str], script: str, bare: dict | None = None) -> dict:
    """What `script` wrote, in CPU memory. CheckpointError where there is none or a key is missing.

    bare: the settings to assume for a file that holds a state dict and nothing else; None: no such file is
    taken. It then counts as the weights of a run without a history.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: no such checkpoint; run {script} first")
    try:
        checkpoint = load_plain(path)
        if bare and checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
            checkpoint = {"settings": bare, "model": checkpoint, "history": []}
        missing = [key for key in keys if key not in checkpoint]
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read ({reason(error)})") from None
    except Exception:  # what torch raises for a file that is not its own varies from version to version
        raise CheckpointError(f"{path}: not a checkpoint of {script}") from None
    if missing:
        raise CheckpointError(f"{path}: not a checkpoint of {script} (no {', '.join(missing)})")
    return checkpoint


def rebuild(kind: type[nn.Module], checkpoint: dict, path: Path | str) -> nn.Module:
    """kind(**settings) with the checkpoint's weights, in eval mode. CheckpointError, naming its file."""
    try:
        model = kind(**checkpoint["settings"])
        model.load_state_dict(checkpoint["model"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: does not fit this model.py ({str(error).splitlines()[0]})") from None
    return model.eval()


def random_state(device: torch.device) -> dict[str, Tensor | None]:
    """Where the random generators stand, the CPU's and, if that is the device, the GPU's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def training_state(model: nn.Module, optimizer, scheduler) -> dict:
    """What a run needs to go on as if nothing had happened."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": random_state(next(model.parameters()).device),
    }


def restore(checkpoint: dict, path: Path | str, model: nn.Module, optimizer, scheduler) -> None:
    """Put everything of `training_state` back. CheckpointError, naming its file, where it does not fit."""
    try:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not of this model ({str(error).splitlines()[0]})") from None
    torch.set_rng_state(checkpoint["rng"]["cpu"])
    device = next(model.parameters()).device
    if device.type == "cuda" and checkpoint["rng"]["cuda"] is not None:
        torch.cuda.set_rng_state(checkpoint["rng"]["cuda"], device)
