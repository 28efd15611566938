"""Is the model right? Asked before any training. Chapter section 20.8. Run `python test_model.py`.

A decoder that sees the future, or attention that sees padding, trains all the same: the loss falls, and the
output is wrong. So both are tested first, on random weights.

A `check_...` raises AssertionError when its property does not hold. A check that cannot fail proves nothing:
`test_..._can_fail` is its negative control, the same check on a model that is wrong on purpose.
tests/test_pitfalls.py uses the checks again, on the chapter's eleven pitfalls.
"""

import sys

import pytest
import torch
from torch import Tensor

import model as model_module
from model import PAD_ID, Transformer, attention_weights

VOCAB, SEQ_LEN = 13, 14


def small_model(**changes) -> Transformer:
    """A quick model with random weights, no dropout, in eval mode."""
    torch.manual_seed(0)
    settings = dict(d_model=32, num_heads=4, dff=64, num_layers=2, max_len=SEQ_LEN, dropout=0.0) | changes
    return Transformer(VOCAB, VOCAB, **settings).eval()


def random_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    """[rows, length] ids without any PAD."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def with_padding(ids: Tensor, count: int) -> Tensor:
    """ids [B, L] -> [B, L + count]: `count` PADs behind each row."""
    return torch.cat([ids, ids.new_full((ids.size(0), count), PAD_ID)], dim=1)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: sums over more terms may differ in their last digits."""
    return torch.allclose(a, b, atol=1e-5)


# The faults to plant: masks that hide nothing, and one that hides a position from itself.


def no_padding_mask(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids, dtype=torch.bool)[:, None, None, :]


def no_causal_mask(L: int, device: torch.device | str) -> Tensor:
    return torch.zeros(1, 1, L, L, dtype=torch.bool, device=device)


def mask_with_diagonal(L: int, device: torch.device | str) -> Tensor:
    return torch.ones(1, 1, L, L, dtype=torch.bool, device=device).triu(diagonal=0)


# ---------------------------------------------------------------------------------------------------- masks


def check_masks() -> None:
    """Both masks, and the decoder's, which joins them by |, for one row of four tokens; x is masked."""
    o, x, ids = False, True, torch.tensor([[5, 7, PAD_ID, PAD_ID]])
    padding, causal = model_module.make_padding_mask(ids), model_module.make_causal_mask(4, ids.device)
    assert padding.tolist() == [[[[o, o, x, x]]]]
    assert causal.tolist() == [[[[o, x, x, x], [o, o, x, x], [o, o, o, x], [o, o, o, o]]]]
    assert (padding | causal).tolist() == [[[[o, x, x, x], [o, o, x, x], [o, o, x, x], [o, o, x, x]]]]


def test_masks_on_a_hand_made_example():
    check_masks()


@pytest.mark.parametrize("wrong", [no_padding_mask, no_causal_mask, mask_with_diagonal])
def test_masks_can_fail(wrong, monkeypatch):
    name = "make_padding_mask" if wrong is no_padding_mask else "make_causal_mask"
    monkeypatch.setattr(model_module, name, wrong)
    with pytest.raises(AssertionError):
        check_masks()


# ------------------------------------------------------------------------------------------------ causality


def check_causality(model: Transformer) -> None:
    """Change the decoder's input from position k on: the logits before k stay, those from k on change."""
    src, tgt = random_ids(3, 9), random_ids(3, 8, seed=2)
    before = model(src, tgt)
    for k in range(tgt.size(1)):
        changed = tgt.clone()
        changed[:, k:] = 3 + (changed[:, k:] - 3 + 1) % 10  # every digit becomes the next one
        after = model(src, changed)
        assert same(after[:, :k], before[:, :k]), f"a change at position {k} reached an earlier output"
        moved = (after[:, k:] - before[:, k:]).abs().amax(dim=-1)
        assert (moved > 1e-3).all(), f"a change at position {k} did not reach all outputs from {k} on"


def test_causality():
    check_causality(small_model())


@pytest.mark.parametrize("wrong", [no_causal_mask, mask_with_diagonal])
def test_causality_can_fail(wrong, monkeypatch):
    monkeypatch.setattr(model_module, "make_causal_mask", wrong)
    with pytest.raises(AssertionError, match="reached an earlier output"):
        check_causality(small_model())


def future_gradient(model: Transformer) -> float:
    """Largest |d logits[:, t] / d decoder input at t'| over all t' > t."""
    captured = []
    handle = model.decoder.embed.register_forward_hook(lambda *args: captured.append(args[2]))
    logits = model(random_ids(2, 6), random_ids(2, 7, seed=2))
    handle.remove()
    largest = 0.0
    for t in range(logits.size(1) - 1):
        (gradient,) = torch.autograd.grad(logits[:, t].sum(), captured[0], retain_graph=True)
        assert gradient[:, : t + 1].abs().amax(dim=(0, 2)).min() > 0  # the past does matter
        largest = max(largest, gradient[:, t + 1 :].abs().max().item())
    return largest


@pytest.mark.parametrize("num_layers", [1, 3])
def test_gradient_to_the_future_is_exactly_zero(num_layers, monkeypatch):
    """A masked weight is 0 and not merely small; a leak too small for `same` would show here."""
    assert future_gradient(small_model(num_layers=num_layers)) == 0.0
    monkeypatch.setattr(model_module, "make_causal_mask", no_causal_mask)
    assert future_gradient(small_model(num_layers=num_layers)) > 1e-4


# -------------------------------------------------------------------------------------------------- padding


def check_source_padding(model: Transformer) -> None:
    """PAD appended to the source changes nothing, however many, whatever else is in the batch."""
    src, tgt = random_ids(2, 5), random_ids(2, 6, seed=2)
    alone = model(src, tgt)
    memory, _ = model.encode(src)
    for count in (1, 4, 9):
        padded = with_padding(src, count)
        assert same(model.encode(padded)[0][:, :5], memory), f"{count} source PADs changed the memory"
        assert same(model(padded, tgt), alone), f"{count} source PADs changed the output"
    batch_src = torch.cat([with_padding(src, 8), random_ids(3, 13, seed=3)])
    batch_tgt = torch.cat([with_padding(tgt, 6), random_ids(3, 12, seed=4)])
    assert same(model(batch_src, batch_tgt)[:2, :6], alone), "longer rows in the batch changed a short one"


def check_target_padding(model: Transformer) -> None:
    """PAD in the target changes no real position, and no row of the decoder gives a PAD column any weight."""
    src, tgt = random_ids(2, 5), random_ids(2, 6, seed=2)
    padded = with_padding(tgt, 4)
    assert same(model(src, padded)[:, :6], model(src, tgt)), "target PADs changed the output"
    for weights in attention_weights(model, src, padded)["decoder"]:
        assert (weights[..., 6:] == 0).all(), "a decoder row looks at target PAD"


def check_pad_embedding(model: Transformer) -> None:
    """Whatever stands in the PAD row of the embeddings cannot be seen at real positions."""
    src, tgt = with_padding(random_ids(2, 5), 3), with_padding(random_ids(2, 6, seed=2), 3)
    memory, logits = model.encode(src)[0][:, :5], model(src, tgt)[:, :6]
    with torch.no_grad():
        for embed in (model.encoder.embed, model.decoder.embed):
            embed.emb.weight[PAD_ID] = 1e3
    assert same(model.encode(src)[0][:, :5], memory), "the PAD embedding leaks into the memory"
    assert same(model(src, tgt)[:, :6], logits), "the PAD embedding leaks into the output"


PADDING_CHECKS = [check_source_padding, check_target_padding, check_pad_embedding]


@pytest.mark.parametrize("check", PADDING_CHECKS)
def test_padding(check):
    check(small_model())


@pytest.mark.parametrize("check", PADDING_CHECKS)
def test_padding_can_fail(check, monkeypatch):
    monkeypatch.setattr(model_module, "make_padding_mask", no_padding_mask)
    with pytest.raises(AssertionError):
        check(small_model())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
