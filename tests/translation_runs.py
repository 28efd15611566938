"""What the tests of translation/ share: short runs of its training, and their files."""

import pytest
import torch
from faults import same  # noqa: F401  (for those who import it from here)

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
