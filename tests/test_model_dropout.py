"""Dropout: its random numbers, and that it acts in every place the chapter names and nowhere else."""

import pytest
import torch
from torch import nn

from model import Dropout, MultiHeadAttention, TokenAndPosition, scaled_dot_product_attention
from test_model import SEQ_LEN, VOCAB, random_ids, same, small_model

# ----------------------------------------------------------------------------------------------- the module


def test_dropout_keeps_its_share_and_scales_the_rest():
    torch.manual_seed(0)
    for p in (0.1, 0.5):
        drop, x = Dropout(p), torch.full((40, 50, 51), 3.0, requires_grad=True)
        y = drop(x)
        kept = y != 0
        assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.005)
        assert torch.allclose(y[kept], torch.tensor(3 / (1 - p)))
        y.sum().backward()
        assert torch.allclose(x.grad, kept / (1 - p))  # the gradient passes where the value did
        flat = kept.flatten().float()
        for distance in (1, 2, 3, 4, 51):  # neighbours are decided apart, also those that share a draw
            both = (flat[:-distance] * flat[distance:]).mean().item()
            assert both == pytest.approx((1 - p) ** 2, abs=0.01)


def test_dropout_follows_the_seed_and_is_off_when_it_should_be():
    drop, x = Dropout(0.5), torch.randn(7, 3)
    torch.manual_seed(1)
    first, second = drop(x), drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), first) and not torch.equal(first, second)
    assert drop(x.bfloat16()).dtype == torch.bfloat16 and drop(x[:0]).shape == (0, 3)
    assert drop(x.to("meta")).device.type == "meta"
    assert torch.equal(Dropout(0.0)(x), x) and torch.equal(drop.eval()(x), x)


def test_token_and_position_drops_out_in_training_only():
    embed = TokenAndPosition(VOCAB, 32, SEQ_LEN, dropout=0.5)
    assert (embed(random_ids(2, 6)) == 0).float().mean() > 0.3
    assert (embed.eval()(random_ids(2, 6)) == 0).float().mean() < 0.1


# ---------------------------------------------------------------------------------------------- every place


def test_dropout_reaches_every_place_the_chapter_names():
    model = small_model(dropout=0.25)
    places = {name.rpartition(".")[0] for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert len(places) == 2 + 2 * 3 + 2 * 4  # embeddings; mha, ffn, residual; the same with cross_mha
    assert all(m.p == 0.25 for m in model.modules() if isinstance(m, nn.Dropout))


def test_attention_drops_weights():
    """With V the unit matrix the output is what is left of the weights: each one gone, or twice as large."""
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 4, 6, 8), torch.randn(8, 4, 5, 8), torch.eye(5).expand(8, 4, 5, 5)
    output, weights = scaled_dot_product_attention(q, k, v, drop=Dropout(0.5))
    dropped = output == 0
    assert 0.4 < dropped.float().mean() < 0.6 and same(output[~dropped], 2 * weights[~dropped])
    attention, x = MultiHeadAttention(32, 4, dropout=0.5), torch.randn(2, 7, 32)
    assert not same(attention(x, x, x)[0], attention(x, x, x)[0])
    attention.eval()
    assert same(attention(x, x, x)[0], attention(x, x, x)[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "stack, active",
    [
        ("encoder", "mha"),
        ("encoder", "ffn"),
        ("decoder", "self_mha"),
        ("decoder", "cross_mha"),
        ("decoder", "ffn"),
    ],
)
def test_each_sublayer_s_output_is_dropped_and_the_residual_is_not(stack, active, norm_first):
    """No norms, all sublayers but one silent: half of what that one adds is gone, the other half doubled."""
    layer = getattr(small_model(norm_first=norm_first), stack).layers[0]
    for name, part in list(layer.named_children()):
        if isinstance(part, nn.LayerNorm):
            setattr(layer, name, nn.Identity())
        elif name in ("mha", "self_mha", "cross_mha", "ffn") and name != active:
            last = part.net[2] if name == "ffn" else part.W_o
            nn.init.zeros_(last.weight)
    x, memory, no_mask = torch.randn(2, 50, 32), torch.randn(2, 4, 32), torch.tensor(False)
    arguments = (x, no_mask) if stack == "encoder" else (x, memory, no_mask, no_mask)
    added = layer(*arguments)[0] - x
    (layer.ffn.net[3] if active == "ffn" else layer.drop).p = 0.5
    left = layer.train()(*arguments)[0] - x
    dropped = left == 0
    assert 0.4 < dropped.float().mean() < 0.6 and same(left[~dropped], 2 * added[~dropped])
