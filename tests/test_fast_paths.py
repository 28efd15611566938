"""Every fast path gives what the plain one gives: the fused attention kernel, kept keys and values."""

import pytest
import torch
import torch.nn.functional as F

import model as model_module
from model import PAD_ID, MultiHeadAttention, Transformer
from test_model import MAX_LEN, random_ids, same, small_model, with_padding
from train import EOS_ID, SEQ_LEN, greedy_decode, loss_sum, make_dataset


def both_attentions(**changes):
    """The same random weights, by hand and through SDPA."""
    manual, sdpa = small_model(**changes), small_model(attention="sdpa", **changes)
    sdpa.load_state_dict(manual.state_dict())
    return manual, sdpa


def padded_batch():
    src, tgt = random_ids(4, 9), random_ids(4, 8, seed=2)
    src[0, 5:], src[1, 8:], tgt[0, 6:], tgt[2, 3:] = PAD_ID, PAD_ID, PAD_ID, PAD_ID
    return src, tgt


# ------------------------------------------------------------------------------------------------- attention


def test_sdpa_gives_the_outputs_and_gradients_of_attention_by_hand():
    src, tgt = padded_batch()
    models = both_attentions()
    logits = [model.train()(src, tgt) for model in models]  # dropout is 0
    assert same(*logits)
    for output in logits:
        loss_sum(output, tgt).backward()
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_sdpa_comparison_has_teeth(monkeypatch):
    models, (src, tgt) = both_attentions(), padded_batch()
    assert same(*(model(src, tgt) for model in models))
    plain = F.scaled_dot_product_attention
    uninverted = lambda q, k, v, attn_mask, **rest: plain(q, k, v, attn_mask=~attn_mask, **rest)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", uninverted)
    assert not same(*(model(src, tgt) for model in models))


def test_sdpa_really_runs_and_never_through_is_causal(monkeypatch):
    calls, plain = [], F.scaled_dot_product_attention

    def spy(*args, **options):
        calls.append(options)
        return plain(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    manual, sdpa = both_attentions()
    src, tgt = padded_batch()
    manual(src, tgt)
    assert calls == []
    sdpa(src, tgt)
    greedy_decode(sdpa, src, max_len=3)
    assert len(calls) == 2 + 4 + 2 + 3 * 4
    assert not any(options.get("is_causal") for options in calls)


def test_sdpa_drops_out_in_training_and_not_in_eval():
    manual, sdpa = both_attentions(dropout=0.5)
    src, tgt = padded_batch()
    assert same(manual(src, tgt), sdpa(src, tgt))
    attention, x = MultiHeadAttention(32, 4, dropout=0.5, attention="sdpa").train(), torch.randn(2, 7, 32)
    assert not same(attention(x, x, x)[0], attention(x, x, x)[0])
    attention.eval()
    assert same(attention(x, x, x)[0], attention(x, x, x)[0])


def test_weights_can_be_had_from_an_sdpa_model_and_it_stays_one():
    manual, sdpa = both_attentions()
    src, tgt = padded_batch()
    expected, got = manual.attention_weights(src, tgt), sdpa.attention_weights(src, tgt)
    for kind in expected:
        assert all(same(a, b) for a, b in zip(expected[kind], got[kind], strict=True))
    with pytest.raises(ValueError, match="length 20"):
        sdpa.attention_weights(random_ids(1, 20), tgt[:1])
    assert {m.attention for m in sdpa.modules() if isinstance(m, MultiHeadAttention)} == {"sdpa"}
    assert sdpa.decode(tgt, *sdpa.encode(src))[1] == [None, None]


def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="attention='flash'.*manual, sdpa"):
        small_model(attention="flash")


def test_a_row_of_padding_is_finite_through_sdpa_too():
    _, sdpa = both_attentions()
    src, tgt = padded_batch()
    src[3], tgt[3] = PAD_ID, PAD_ID
    logits = sdpa.train()(src, tgt)
    loss_sum(logits, tgt).backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in sdpa.parameters())


# ------------------------------------------------------------------------------------------ keys and values


@pytest.mark.parametrize("attention", ["manual", "sdpa"])
@pytest.mark.parametrize("pieces", [[1] * 8, [3, 1, 4], [8]])
def test_step_by_step_logits_equal_those_of_the_whole_prefix(attention, pieces):
    model, (src, tgt) = small_model(attention=attention, num_layers=3), padded_batch()
    memory, src_mask = model.encode(src)
    expected, weights = model.decode(tgt, memory, src_mask)
    cache, got = {}, []
    for piece in tgt.split(pieces, dim=1):
        logits, cross = model.decode(piece, memory, src_mask, cache)
        got.append(logits)
    assert same(torch.cat(got, dim=1), expected)
    if attention == "manual":
        assert all(same(a, b[:, :, -a.size(2) :]) for a, b in zip(cross, weights, strict=True))


def test_a_cache_that_forgets_is_noticed(monkeypatch):
    model, (src, tgt) = small_model(), padded_batch()
    memory, src_mask = model.encode(src)
    expected, cache = model.decode(tgt, memory, src_mask)[0], {}
    model.decode(tgt[:, :7], memory, src_mask, cache)
    cache[0]["self"]["k"] = cache[0]["self"]["k"].roll(1, dims=2)
    assert not same(model.decode(tgt[:, 7:], memory, src_mask, cache)[0][:, 0], expected[:, 7])


def test_the_encoder_output_is_projected_once(monkeypatch):
    model, calls = small_model(), []
    for layer in model.decoder.layers:
        layer.cross_mha.W_k.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model.out.bias[EOS_ID] = -1e9
    greedy_decode(model, random_ids(2, 5), max_len=6)
    assert len(calls) == 2
    greedy_decode(model, random_ids(2, 5), max_len=6, use_cache=False)
    assert len(calls) == 2 + 2 * 6


def test_a_cached_decoder_refuses_positions_beyond_its_table():
    model = small_model()
    memory, src_mask = model.encode(random_ids(1, 5))
    cache = {}
    model.decode(random_ids(1, MAX_LEN), memory, src_mask, cache)
    with pytest.raises(ValueError, match="length 15 .*max_len=14"):
        model.decode(random_ids(1, 1), memory, src_mask, cache)


@pytest.mark.parametrize("attention", ["manual", "sdpa"])
def test_greedy_decoding_with_and_without_cache_token_for_token(attention):
    torch.manual_seed(3)
    model = Transformer(13, 13, d_model=32, num_heads=4, dff=64, max_len=SEQ_LEN, attention=attention)
    src, _ = make_dataset(200, 5)
    outputs = [greedy_decode(model, src, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*outputs) and len({tuple(row) for row in outputs[0].tolist()}) > 10


def test_long_outputs_with_and_without_cache_token_for_token():
    model = Transformer(13, 13, d_model=32, num_heads=2, dff=64, num_layers=1, max_len=300)
    with torch.no_grad():
        model.out.bias[EOS_ID] = -1e9
    src = with_padding(random_ids(2, 30), 3)
    a, b = (greedy_decode(model, src, max_len=256, use_cache=use_cache) for use_cache in (True, False))
    assert a.shape == (2, 256) and torch.equal(a, b)


def test_the_mask_of_the_last_rows_is_the_end_of_the_whole_mask():
    whole = model_module.make_causal_mask(7)
    for start in range(7):
        assert torch.equal(model_module.make_causal_mask(7, start=start), whole[:, :, start:])


def test_a_mask_without_the_future_does_not_move_the_positions():
    """A padding mask alone, [B, 1, 1, Lt], broadcasts over the queries; positions still start at 0."""
    model, (src, tgt) = small_model(), padded_batch()
    memory, src_mask = model.encode(src)
    padding = model_module.make_padding_mask(tgt)
    narrow, _, _ = model.decoder(tgt, memory, padding, src_mask)
    wide, _, _ = model.decoder(tgt, memory, padding.expand(-1, -1, tgt.size(1), -1), src_mask)
    assert torch.equal(narrow, wide)
