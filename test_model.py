"""Is the model right? Checked before any training. Chapter section 20.8. Run `python test_model.py`.

Every `check_...` takes a model and raises AssertionError when it breaks the property. Beside it stands a
negative control: the same check on a model that is wrong on purpose must fail. tests/test_pitfalls.py uses
the checks again, on the chapter's eleven pitfalls.
"""

import math
import sys

import pytest
import torch
from torch import Tensor, nn

import model as model_module
from benchmarks.torch_twin import TorchTransformer, attention_pairs, copy_weights, model_pairs
from model import (
    PAD_ID,
    MultiHeadAttention,
    TokenAndPosition,
    Transformer,
    make_causal_mask,
    make_padding_mask,
    sinusoidal_position_encoding,
)

VOCAB, MAX_LEN = 13, 14


def small_model(**changes) -> Transformer:
    """A quick model with random weights, no dropout, in eval mode."""
    torch.manual_seed(0)
    settings = dict(d_model=32, num_heads=4, dff=64, num_layers=2, max_len=MAX_LEN, dropout=0.0) | changes
    return Transformer(VOCAB, VOCAB, **settings).eval()


def random_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    """[rows, length] ids without any PAD."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def with_padding(ids: Tensor, count: int) -> Tensor:
    return torch.cat([ids, ids.new_full((ids.size(0), count), PAD_ID)], dim=1)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def no_mask(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids, dtype=torch.bool)[:, None, None, :]


def no_causal_mask(L: int, device=None, start: int = 0) -> Tensor:
    return torch.zeros(1, 1, L - start, L, dtype=torch.bool, device=device)


# ------------------------------------------------------------------------------------------------ causality


def check_causality(model: Transformer) -> None:
    """Change the decoder's input from position k on: what it says before k stays, from k on it changes."""
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


def test_causality_check_has_teeth(monkeypatch):
    monkeypatch.setattr(model_module, "make_causal_mask", no_causal_mask)
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
    assert future_gradient(small_model(num_layers=num_layers)) == 0.0
    monkeypatch.setattr(model_module, "make_causal_mask", no_causal_mask)
    assert future_gradient(small_model(num_layers=num_layers)) > 1e-4


# -------------------------------------------------------------------------------------------------- padding


def check_source_padding(model: Transformer) -> None:
    """PAD appended to the source changes nothing, however many, whoever else is in the batch."""
    src, tgt = random_ids(2, 5), random_ids(2, 6, seed=2)
    alone = model(src, tgt)
    memory, _ = model.encode(src)
    for count in (1, 4, 9):
        padded = with_padding(src, count)
        assert same(model.encode(padded)[0][:, :5], memory), f"{count} source PADs changed the memory"
        assert same(model(padded, tgt), alone), f"{count} source PADs changed the output"
    batch_src = torch.cat([with_padding(src, 8), random_ids(3, 13, seed=3)])
    batch_tgt = torch.cat([with_padding(tgt, 6), random_ids(3, 12, seed=4)])
    assert same(model(batch_src, batch_tgt)[:2, :6], alone), (
        "longer sentences in the batch changed a short one"
    )


def check_target_padding(model: Transformer) -> None:
    """PAD in the target changes no real position, and no row of the decoder gives a PAD column any weight."""
    src, tgt = random_ids(2, 5), random_ids(2, 6, seed=2)
    padded = with_padding(tgt, 4)
    assert same(model(src, padded)[:, :6], model(src, tgt)), "target PADs changed the output"
    for weights in model.attention_weights(src, padded)["decoder"]:
        assert (weights[..., 6:] == 0).all(), "a decoder row looks at target PAD"


def check_pad_embedding(model: Transformer) -> None:
    """Whatever stands in the PAD row of the embeddings cannot be seen at real positions."""
    src, tgt = with_padding(random_ids(2, 5), 3), with_padding(random_ids(2, 6, seed=2), 3)
    memory, logits = model.encode(src)[0][:, :5], model(src, tgt)[:, :6]
    with torch.no_grad():
        for embed in (model.encoder.embed, model.decoder.embed):
            embed.embedding.weight[PAD_ID] = 1e3
    assert same(model.encode(src)[0][:, :5], memory), "the PAD embedding leaks into the memory"
    assert same(model(src, tgt)[:, :6], logits), "the PAD embedding leaks into the output"


PADDING_CHECKS = [check_source_padding, check_target_padding, check_pad_embedding]


@pytest.mark.parametrize("check", PADDING_CHECKS)
def test_padding(check):
    check(small_model())


@pytest.mark.parametrize("check", PADDING_CHECKS)
def test_padding_checks_have_teeth(check, monkeypatch):
    monkeypatch.setattr(model_module, "make_padding_mask", no_mask)
    with pytest.raises(AssertionError):
        check(small_model())


def test_masks_on_a_hand_made_example():
    ids = torch.tensor([[5, 7, PAD_ID, PAD_ID]])
    assert make_padding_mask(ids).tolist() == [[[[False, False, True, True]]]]
    assert make_causal_mask(3, ids.device)[0, 0].tolist() == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]
    mask = (make_padding_mask(ids) | make_causal_mask(4, ids.device))[0, 0]
    assert mask.tolist() == [
        [False, True, True, True],
        [False, False, True, True],
        [False, False, True, True],
        [False, False, True, True],
    ]


# --------------------------------------------------------------- equality with PyTorch's own implementation


@pytest.mark.parametrize("masked", [False, True])
def test_multi_head_attention_equals_pytorch(masked):
    torch.manual_seed(0)
    ours, theirs = MultiHeadAttention(32, 4, dropout=0.0), nn.MultiheadAttention(32, 4, batch_first=True)
    copy_weights(attention_pairs(ours, theirs))
    query, key, value = torch.randn(2, 7, 32), torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    mask = None
    if masked:
        mask = torch.rand(7, 5) < 0.5  # not symmetric, so a transposed or inverted mask shows
        mask[:, 1] = False  # and no row without any key
    output, weights = ours(query, key, value, mask)
    expected, expected_weights = theirs(query, key, value, attn_mask=mask, average_attn_weights=False)
    assert same(output, expected) and same(weights, expected_weights)
    if masked:
        assert (weights.masked_select(mask) == 0).all()
        assert not same(ours(query, key, value, ~mask)[0], expected)


def test_self_attention_without_positions_commutes_with_permutation():
    torch.manual_seed(0)
    attention, x, order = MultiHeadAttention(32, 4, dropout=0.0), torch.randn(2, 7, 32), torch.randperm(7)
    assert same(attention(x[:, order], x[:, order], x[:, order])[0], attention(x, x, x)[0][:, order])


@pytest.mark.parametrize("changes", [dict(), dict(norm_first=False), dict(activation="relu")])
def test_whole_model_equals_nn_transformer_outputs_and_gradients(changes):
    ours = small_model(**changes)
    theirs = TorchTransformer(ours.settings)
    copy_weights(model_pairs(ours, theirs))
    ours.train(), theirs.train()  # dropout is 0; train mode keeps PyTorch off its inference-only fast path
    src, tgt = random_ids(4, 9), random_ids(4, 8, seed=2)
    src[0, 5:], src[1, 8:], tgt[0, 6:], tgt[2, 3:] = PAD_ID, PAD_ID, PAD_ID, PAD_ID
    real = (tgt != PAD_ID).unsqueeze(-1)
    logits, expected = ours(src, tgt) * real, theirs(src, tgt) * real
    assert same(logits, expected)
    direction = torch.randn_like(logits)
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    compared = 0
    for our_parameter, their_parameter, rows in model_pairs(ours, theirs):
        torch.testing.assert_close(our_parameter.grad, their_parameter.grad[rows], atol=1e-5, rtol=1e-4)
        compared += our_parameter.numel()
    assert (
        compared == sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    )


# ------------------------------------------------------------------------------- start values, sizes, devices


def check_initialisation(model: Transformer) -> None:
    """Embeddings N(0, d_model^-0.5) with a zero PAD row; linear layers Xavier uniform with zero bias."""
    d_model = model.settings["d_model"]
    for embed in (model.encoder.embed, model.decoder.embed):
        weight = embed.embedding.weight
        assert (weight[PAD_ID] == 0).all(), "the PAD row is not zero"
        assert weight[1:].std().item() == pytest.approx(d_model**-0.5, rel=0.06), "embedding start"
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert linear.weight.abs().max() <= bound and (linear.bias == 0).all(), "linear start"
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), "linear start"


def check_parameter_count(model: Transformer) -> None:
    assert sum(p.numel() for p in model.parameters()) == 931_213


def chapter_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(VOCAB, VOCAB, max_len=MAX_LEN)


def test_chapter_sizes_and_start_values():
    check_initialisation(chapter_model())
    check_parameter_count(chapter_model())


def test_embedding_is_token_times_root_d_plus_position():
    embed = TokenAndPosition(VOCAB, 128, MAX_LEN, dropout=0.0)
    ids = random_ids(2, 6)
    expected = embed.embedding.weight[ids] * math.sqrt(128) + sinusoidal_position_encoding(MAX_LEN, 128)[:6]
    assert same(embed(ids), expected)
    token, position = embed.embedding.weight[1:] * math.sqrt(128), embed.position
    assert 0.5 < (token.std() / position.std()).item() < 2  # neither drowns the other


def test_position_encoding_by_hand():
    table = sinusoidal_position_encoding(3, 4)
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(3)]
    assert same(table, torch.tensor(expected))
    assert sinusoidal_position_encoding(5, 7).shape == (5, 7)


def check_devices(model: Transformer) -> None:
    """After .to(device) every tensor lives there, the masks too: tried on `meta`, which needs no hardware."""
    seen = []
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[3].device.type))
    model.to("meta")
    for module in model.modules():
        for name, value in vars(module).items():
            assert not isinstance(value, Tensor), f"{name} is a plain attribute and stays behind"
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device.type == "meta", f"{name} stayed behind"
    src, tgt = random_ids(2, 5).to("meta"), random_ids(2, 6).to("meta")
    logits = model(src, tgt)
    assert logits.device.type == "meta" and logits.shape == (2, 6, VOCAB)
    assert len(seen) == 6 and set(seen) == {"meta"}, f"masks on {set(seen)}"


def test_devices():
    check_devices(small_model())
    assert "position" not in "".join(small_model().state_dict())  # a table anyone can recompute


def test_shapes_are_what_the_docstrings_say():
    model = small_model(num_layers=3)
    src, tgt = random_ids(2, 5), random_ids(2, 6)
    memory, src_mask = model.encode(src)
    logits, cross = model.decode(tgt, memory, src_mask)
    assert memory.shape == (2, 5, 32) and src_mask.shape == (2, 1, 1, 5) and src_mask.dtype == torch.bool
    assert logits.shape == (2, 6, VOCAB) and same(model(src, tgt), logits)
    weights = model.attention_weights(src, tgt)
    shapes = {kind: [tuple(w.shape) for w in per_layer] for kind, per_layer in weights.items()}
    assert shapes == {
        "encoder": [(2, 4, 5, 5)] * 3,
        "decoder": [(2, 4, 6, 6)] * 3,
        "cross": [(2, 4, 6, 5)] * 3,
    }
    for a, b in zip(cross, weights["cross"], strict=True):
        assert same(a, b)
    for per_layer in weights.values():
        for w in per_layer:
            assert same(w.sum(-1), torch.ones(w.shape[:-1]))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
