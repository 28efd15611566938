"""The chapter's eleven pitfalls (20.16), each planted on purpose: a check of this project must notice it.

Every test first runs its check on the healthy code, then on the sick one.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from test_model_details import chapter_model, check_devices, check_initialisation, check_parameter_count
from test_train import check_shift
from torch import nn

import model as model_module
from model import MultiHeadAttention, fused_attention, make_causal_mask
from test_model import (
    check_causality,
    check_target_padding,
    no_causal_mask,
    no_padding_mask,
    random_ids,
    same,
    small_model,
)
from train import greedy_decode, make_dataset


def test_1_default_embedding_start_drowns_the_positions():
    check_initialisation(chapter_model())
    sick = chapter_model()
    sick.encoder.embed.emb.reset_parameters()  # PyTorch's N(0, 1)
    with pytest.raises(AssertionError, match="initial embeddings"):
        check_initialisation(sick)
    sick = chapter_model()
    sick.out_proj.reset_parameters()  # and the linear layers' own default
    with pytest.raises(AssertionError, match="initial linear weights"):
        check_initialisation(sick)


def test_2_view_after_transpose(monkeypatch):
    attention, x = MultiHeadAttention(32, 4), torch.randn(2, 7, 32)
    assert attention(x, x, x)[0].shape == x.shape
    monkeypatch.setattr(MultiHeadAttention, "_merge", lambda self, x: x.transpose(1, 2).view(2, 7, 32))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        attention(x, x, x)


def test_2_merge_without_transpose_keeps_the_shape_and_mixes_the_positions(monkeypatch):
    torch.manual_seed(0)
    attention, x = MultiHeadAttention(32, 4, dropout=0.0), torch.randn(2, 7, 32)
    order = torch.randperm(7)

    def commutes_with_permutation():
        return same(attention(x[:, order], x[:, order], x[:, order])[0], attention(x, x, x)[0][:, order])

    assert commutes_with_permutation()
    monkeypatch.setattr(MultiHeadAttention, "_merge", lambda self, x: x.reshape(2, 7, 32))
    assert not commutes_with_permutation()


def test_3_mask_made_on_the_cpu(monkeypatch):
    check_devices(small_model())
    monkeypatch.setattr(model_module, "make_causal_mask", lambda L, device: make_causal_mask(L, "cpu"))
    with pytest.raises((AssertionError, RuntimeError), match="masks on|device"):
        check_devices(small_model())


def test_4_position_table_as_a_plain_attribute():
    sick = small_model()
    table = sick.encoder.embed.pe
    del sick.encoder.embed.pe
    sick.encoder.embed.pe = table
    with pytest.raises(AssertionError, match="pe is a plain attribute"):
        check_devices(sick)


def test_5_layers_in_a_plain_list():
    check_parameter_count(chapter_model())
    sick = chapter_model()
    layers = list(sick.encoder.layers)
    del sick.encoder.layers
    sick.encoder.layers = layers
    assert sick(random_ids(2, 5), random_ids(2, 5)).shape == (2, 5, 13)  # runs all the same
    with pytest.raises(AssertionError):
        check_parameter_count(sick)


def test_6_sdpa_with_the_mask_the_wrong_way_round(monkeypatch):
    torch.manual_seed(0)
    by_hand, sdpa = MultiHeadAttention(32, 4, dropout=0.0), MultiHeadAttention(32, 4, dropout=0.0)
    sdpa.load_state_dict(by_hand.state_dict())
    sdpa.attend, x = fused_attention, torch.randn(2, 7, 32)
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    mask.fill_diagonal_(False)

    def equal():
        return same(sdpa(x, x, x, mask)[0], by_hand(x, x, x, mask)[0])

    assert equal()
    real = F.scaled_dot_product_attention
    wrong = lambda q, k, v, attn_mask=None, **options: real(q, k, v, attn_mask=~attn_mask, **options)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    assert not equal()


@pytest.mark.parametrize("planted", [no_causal_mask, lambda L, device: ~make_causal_mask(L, device)])
def test_7_causal_mask_missing_or_reversed(planted, monkeypatch):
    check_causality(small_model())
    monkeypatch.setattr(model_module, "make_causal_mask", planted)
    with pytest.raises(AssertionError, match="reached an earlier output"):
        check_causality(small_model())


def test_8_target_padding_not_masked(monkeypatch):
    check_target_padding(small_model())
    monkeypatch.setattr(model_module, "make_padding_mask", no_padding_mask)  # the check has no source PAD
    with pytest.raises(AssertionError, match="looks at target PAD"):
        check_target_padding(small_model())


def test_9_targets_sliced_wrongly(monkeypatch):
    _, tgt = make_dataset(20, 0)
    check_shift(tgt)
    for planted in (
        lambda t: (t[:, :-1], t[:, :-1]),
        lambda t: (t[:, 1:], t[:, 1:]),
        lambda t: (t[:, :-2], t[:, 2:]),
    ):
        monkeypatch.setattr("test_train.teacher_forcing", planted)
        with pytest.raises(AssertionError):
            check_shift(tgt)


def test_10_minus_1e9_does_not_fit_half_precision(monkeypatch):
    src = random_ids(2, 5)
    assert small_model().half()(src, src).isfinite().all()

    def with_1e9(q, k, v, mask=None, drop=None):
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(mask, -1e9).softmax(-1)
        return weights @ v, weights

    monkeypatch.setitem(model_module.ATTENTION, "manual", with_1e9)
    with pytest.raises(RuntimeError, match="overflow"):
        small_model().half()(src, src)


def test_11_eval_forgotten(monkeypatch):
    model, (src, _) = small_model(dropout=0.5).train(), make_dataset(20, 0)
    assert torch.equal(greedy_decode(model, src), greedy_decode(model, src))
    monkeypatch.setattr(nn.Module, "eval", lambda self: self)
    a, b = greedy_decode(model, src), greedy_decode(model, src)
    assert a.shape != b.shape or not torch.equal(a, b)


def test_no_pitfall_is_left_out():
    names = [name.split("_")[1] for name in globals() if name.startswith("test_")]
    assert {name for name in names if name.isdigit()} == {str(number) for number in range(1, 12)}
