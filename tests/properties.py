"""What the property tests share: how many examples are tried, and what models and ids are made of.

`HYPOTHESIS_PROFILE=thorough python -m pytest tests/test_properties*.py` tries many more, others each time.
"""

import os

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from model import PAD_ID, Transformer
from train import EOS_ID

# A model takes milliseconds to build, which hypothesis would call slow.
settings.register_profile(
    "quick", max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "thorough", settings.get_profile("quick"), max_examples=300, derandomize=False, database=None,
    print_blob=True,
)  # fmt: skip
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

VOCAB, MAX_LEN = 7, 9  # PAD, BOS, EOS and four words
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, MAX_LEN)


def times(factor: int) -> settings:
    """For properties that cost little: so many times the profile's number of examples."""
    return settings(max_examples=factor * settings().max_examples)


def random_model(seed: int, **settings) -> Transformer:
    """Every parameter random, biases and PAD's row of an embedding too; float64, eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # hypothesis looks after Python's and NumPy's random numbers only
        model = Transformer(**settings)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.4 * torch.randn(parameter.shape))
    return model.double().eval()


@st.composite
def models(draw, vocab: int = VOCAB, max_len: int = MAX_LEN) -> Transformer:
    """A tiny model of any variant with random weights, in float64 and eval mode."""
    heads = draw(st.integers(1, 3))
    options = dict(
        src_vocab=vocab,
        tgt_vocab=vocab,
        max_len=max_len,
        num_heads=heads,
        d_model=heads * draw(st.integers(1, 4)) + heads,
        dff=draw(st.integers(1, 9)),
        num_layers=draw(st.integers(1, 3)),
        attention=draw(st.sampled_from(["manual", "sdpa"])),
        norm_first=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "relu"])),
        share_embeddings=draw(st.booleans()),
        tie_output=draw(st.booleans()),
    )
    return random_model(draw(seeds), **options)


@st.composite
def ids(draw, batch: int, length: int, vocab: int = VOCAB) -> Tensor:
    """[batch, length] ids: a part of each row with any ids, PAD among them, then padding."""
    rows = []
    for _ in range(batch):
        row = draw(st.lists(st.integers(PAD_ID, vocab - 1), max_size=length))
        rows.append(row + [PAD_ID] * (length - len(row)))
    return torch.tensor(rows, dtype=torch.int64).view(batch, length)


@st.composite
def sources(draw, batch: int, longest: int = MAX_LEN, vocab: int = VOCAB) -> Tensor:
    """[batch, L] source ids, L <= longest: each row words, <eos>, padding."""
    words = st.lists(st.integers(EOS_ID + 1, vocab - 1), max_size=longest - 1)
    rows = [[*draw(words), EOS_ID] for _ in range(batch)]
    length = max(map(len, rows))
    return torch.tensor([row + [PAD_ID] * (length - len(row)) for row in rows])


def seen_something(tokens: Tensor) -> Tensor:
    """ids [B, L] -> bool [B, L]: False where all so far is padding: no key is to be seen there."""
    return (tokens != PAD_ID).cumsum(1) > 0


def close(a: Tensor, b: Tensor, where: Tensor | None = None) -> bool:
    """Equal but for rounding in float64. a, b [B, L, ...], where bool [B, L]: the positions that count."""
    if where is not None:
        a, b = a[where], b[where]
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-8, atol=1e-8)


def one_line(error: Exception) -> str:
    """Its message, which must be one line."""
    text = str(error)
    assert text.strip() and len(text.splitlines()) == 1, text
    return text
