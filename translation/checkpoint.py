"""The .pt files of a run: the weights, the tokeniser, and the options they were made with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model import Transformer
from toolbox.checkpoint import CheckpointError, read_checkpoint, rebuild
from translation.data import Tokenizer

# What is used unless --checkpoint says otherwise: the run of the default preset.
CHECKPOINT = Path("runs/small")


def read_run(path: Path | str, more: Sequence[str] = ()) -> dict:
    """A .pt file, in CPU memory. CheckpointError for none, or a missing key (`more`: further keys)."""
    return read_checkpoint(path, ("settings", "model", "tokenizer", *more), "translation.train")


def pack_tokenizer(tokenizer: Tokenizer) -> Tensor:
    """The tokeniser as a checkpoint holds it: uint8 [bytes]."""
    return torch.frombuffer(bytearray(tokenizer.model), dtype=torch.uint8)


def unpack_tokenizer(checkpoint: dict, path: Path | str) -> Tokenizer:
    """The tokeniser in the checkpoint read from `path`."""
    return Tokenizer(checkpoint["tokenizer"].numpy().tobytes(), path)


def load_translator(
    path: Path | str, device: torch.device | str = "cpu"
) -> tuple[Transformer, Tokenizer, dict]:
    """Any .pt file of a run -> model on `device` in eval mode, tokeniser, the checkpoint's dict.

    A run's folder stands for its averaged.pt, or best.pt while it is still training. checkpoint["run"] holds
    the run's options, the languages "src" and "tgt" among them. CheckpointError, one line that names the
    file, where it cannot be used.
    """
    if Path(path).is_dir():
        averaged = Path(path) / "averaged.pt"
        path = averaged if averaged.is_file() else Path(path) / "best.pt"
    checkpoint = read_run(path)
    return rebuild(Transformer, checkpoint, path).to(device), unpack_tokenizer(checkpoint, path), checkpoint


def checkpoint_files(path: Path) -> list[tuple[str, Path]]:
    """("--checkpoint", file) for every file that no output may replace while `path` is in use."""
    return [("--checkpoint", file) for file in (path.glob("*.pt") if path.is_dir() else [path])]


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """State dict of the mean weights of checkpoints, in float64. CheckpointError for a file that is none, or
    of another model than the first; ValueError for no files."""
    if not paths:
        raise ValueError("no checkpoints to average")
    total = {}
    for path in paths:
        weights = read_run(path)["model"]
        shapes = {name: value.shape for name, value in weights.items()}
        if total and shapes != {name: value.shape for name, value in total.items()}:
            raise CheckpointError(f"{path}: not of the same model as {paths[0]}")
        for name, value in weights.items():
            total[name] = total.get(name, 0) + value.double()
    return {name: (total[name] / len(paths)).to(value.dtype) for name, value in weights.items()}
