"""With the same weights the model equals PyTorch's own nn.MultiheadAttention and nn.Transformer."""

import pytest
import torch
from torch import nn

from benchmarks.torch_twin import TorchTransformer, attention_pairs, copy_weights, model_pairs
from model import PAD_ID, MultiHeadAttention
from test_model import random_ids, same, small_model


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
