"""What the tests of translation/ share: short runs of its training, and their files."""

import pytest
import torch

import translation.train as tt

# 128 pairs in 3 to 4 batches, a model of 33,000 weights: a tenth of a second an epoch
TINY = ["--sample", "--d-model", "32", "--num-heads", "2", "--dff", "32", "--max-tokens", "1000"]
TINY += ["--vocab-size", "500", "--warmup", "40", "--bleu-every", "0", "--device", "cpu"]


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    """For the tests of a file that imports it: tensorboard takes seconds to import."""
    monkeypatch.setattr(tt, "open_tensorboard", lambda *_: None)


def read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def train(out, *options, status=0):
    """A run in the folder `out` -> its last.pt."""
    assert tt.main([*TINY, "--out", str(out), *map(str, options)]) == status
    return read(out / "last.pt")


def resume(out, *options):
    assert tt.main(["--resume", "--device", "cpu", "--out", str(out), *map(str, options)]) == 0
    return read(out / "last.pt")


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
