"""Every fast path gives what the plain one gives: the fused attention kernel, the KV cache."""

import pytest
import torch
import torch.nn.functional as F

import model as model_module
from model import (
    PAD_ID,
    KVCache,
    MultiHeadAttention,
    SelfAttentionCache,
    Transformer,
    attention_weights,
    layer_attention,
    make_causal_mask,
    make_padding_mask,
)
from test_model import random_ids, same, small_model, with_padding
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
    honest = model_module.additive_mask
    monkeypatch.setattr(model_module, "additive_mask", lambda mask, dtype: honest(~mask, dtype))
    assert not same(*(model(src, tgt) for model in models))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [True, False])
def test_masks_are_converted_once_a_forward_pass_and_change_no_bit(norm_first, precision, monkeypatch):
    """Against bool masks in every layer, as SDPA takes them: outputs and gradients are the same numbers."""
    _, sdpa = both_attentions(num_layers=3, norm_first=norm_first)
    src, tgt = padded_batch()
    src[3], tgt[3] = PAD_ID, PAD_ID
    converted, seen, honest = [], set(), model_module.additive_mask
    plain = F.scaled_dot_product_attention

    def counting(mask, dtype):
        converted.append(honest(mask, dtype))
        return converted[-1]

    def spy(q, *args, attn_mask, **options):
        seen.add((attn_mask.dtype, q.dtype))
        return plain(q, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    results = []
    for convert in (counting, lambda mask, dtype: mask):
        monkeypatch.setattr(model_module, "additive_mask", convert)
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            logits = sdpa(src, tgt)
        sdpa.zero_grad(set_to_none=True)
        loss_sum(logits, tgt).backward()
        results.append([logits, *(p.grad for p in sdpa.parameters())])
        assert seen == {(precision if convert is counting else torch.bool, precision)}  # nothing to cast
    assert len(converted) == 3 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("attention, left_on", [("sdpa", False), ("manual", True)])
def test_cudnn_attention_is_off_wherever_sdpa_is_chosen(attention, left_on):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        model = small_model(attention=attention)
        assert torch.backends.cuda.cudnn_sdp_enabled() == left_on
        torch.backends.cuda.enable_cudnn_sdp(True)
        Transformer(**model.settings)  # as load_model and translation.translate build it
        assert torch.backends.cuda.cudnn_sdp_enabled() == left_on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_layer_of_an_sdpa_model_takes_bool_masks_too():
    models, mask = both_attentions(), torch.rand(4, 1, 1, 6) < 0.3
    x = torch.randn(4, 6, models[0].settings["d_model"])
    by_hand, fused = (model.encoder.layers[0](x, mask)[0] for model in models)
    assert same(fused, by_hand) and not same(fused, models[1].encoder.layers[0](x, ~mask)[0])


def test_an_sdpa_model_makes_nothing_on_the_cpu():
    model = small_model(attention="sdpa").to("meta")
    src, tgt = (ids.to("meta") for ids in padded_batch())
    assert model(src, tgt).is_meta
    assert model.half()(src, tgt).dtype == torch.float16


@pytest.mark.parametrize("attention", ["manual", "sdpa"])
def test_weights_for_drawing_are_0_where_nothing_may_be_seen(attention):
    model, (src, tgt) = small_model(attention=attention), padded_batch()
    masks = {
        "encoder": make_padding_mask(src),
        "decoder": make_padding_mask(tgt) | make_causal_mask(tgt.size(1), tgt.device),
        "cross": make_padding_mask(src),
    }
    for kind, layers in attention_weights(model, src, tgt).items():
        for weights in layers:
            hidden = masks[kind].expand_as(weights)
            assert (weights[hidden] == 0).all() and (weights[~hidden] > 0).all(), kind


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
    greedy_decode(sdpa, src, max_len=4)  # <bos> and three new tokens
    assert len(calls) == 2 + 4 + 2 + 3 * 4
    assert not any(options.get("is_causal") for options in calls)


def test_sdpa_drops_out_in_training_and_not_in_eval():
    manual, sdpa = both_attentions(dropout=0.5)
    src, tgt = padded_batch()
    assert same(manual(src, tgt), sdpa(src, tgt))
    attention, x = sdpa.encoder.layers[0].mha.train(), torch.randn(2, 7, 32)
    assert not same(attention(x, x, x)[0], attention(x, x, x)[0])
    attention.eval()
    assert same(attention(x, x, x)[0], attention(x, x, x)[0])


def test_weights_can_be_had_from_an_sdpa_model_and_it_stays_one():
    manual, sdpa = both_attentions()
    src, tgt = padded_batch()
    expected, got = (attention_weights(model, src, tgt) for model in (manual, sdpa))
    for kind in expected:
        assert all(same(a, b) for a, b in zip(expected[kind], got[kind], strict=True))
    with pytest.raises(ValueError, match="length 20"):
        attention_weights(sdpa, random_ids(1, 20), tgt[:1])
    assert {m.attend for m in sdpa.modules() if isinstance(m, MultiHeadAttention)} == {layer_attention}
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


# ------------------------------------------------------------------------------------------------- KV cache


@pytest.mark.parametrize("changes", [dict(), dict(attention="sdpa"), dict(norm_first=False)])
@pytest.mark.parametrize("pieces", [[1] * 8, [3, 1, 4], [8]])
def test_step_by_step_logits_equal_those_of_the_whole_prefix(changes, pieces):
    model, (src, tgt) = small_model(num_layers=3, **changes), padded_batch()
    memory, src_mask = model.encode(src)
    expected, weights = model.decode(tgt, memory, src_mask)
    cache, got = KVCache(3), []
    for piece in tgt.split(pieces, dim=1):
        logits, cross = model.decode(piece, memory, src_mask, cache)
        got.append(logits)
        assert torch.equal(cache.ids, tgt[:, : cache.start + piece.size(1)])
    assert same(torch.cat(got, dim=1), expected)
    if "attention" not in changes:
        assert all(same(a, b[:, :, -a.size(2) :]) for a, b in zip(cross, weights, strict=True))


def test_a_cache_that_forgets_is_noticed():
    model, (src, tgt) = small_model(), padded_batch()
    memory, src_mask = model.encode(src)
    expected, cache = model.decode(tgt, memory, src_mask)[0], KVCache(2)
    model.decode(tgt[:, :7], memory, src_mask, cache)
    keys, values = cache.layers[0][0].kept
    cache.layers[0][0].kept = [keys.roll(1, dims=2), values]
    assert not same(model.decode(tgt[:, 7:], memory, src_mask, cache)[0][:, 0], expected[:, 7])


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_memory_is_projected_once(norm_first):
    model, calls = small_model(norm_first=norm_first), []
    for layer in model.decoder.layers:
        layer.cross_mha.W_k.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model.out_proj.bias[EOS_ID] = -1e9
    greedy_decode(model, random_ids(2, 5), max_len=7)  # <bos> and six new tokens
    assert len(calls) == 2
    greedy_decode(model, random_ids(2, 5), max_len=7, use_cache=False)
    assert len(calls) == 2 + 2 * 6


def test_a_cached_decoder_refuses_positions_beyond_its_table():
    model = small_model()
    memory, src_mask = model.encode(random_ids(1, 5))
    cache = KVCache(2)
    model.decode(random_ids(1, SEQ_LEN), memory, src_mask, cache)
    with pytest.raises(ValueError, match="length 15 .*max_len=14"):
        model.decode(random_ids(1, 1), memory, src_mask, cache)


def test_the_masks_of_a_cache_are_made_where_its_tokens_are():
    cache = KVCache(2)
    for length in (3, 2):
        mask = cache.append(torch.zeros(2, length, dtype=torch.long, device="meta"))
    assert mask.device.type == "meta" and mask.shape == (2, 1, 2, 5)


def test_a_cache_of_another_number_of_layers_is_refused():
    model = small_model()
    memory, mask = model.encode(random_ids(2, 5))
    for count in (1, 3):
        with pytest.raises(ValueError):
            model.decode(random_ids(2, 1), memory, mask, KVCache(count))


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
        model.out_proj.bias[EOS_ID] = -1e9
    src = with_padding(random_ids(2, 30), 3)
    a, b = (greedy_decode(model, src, max_len=257, use_cache=use_cache) for use_cache in (True, False))
    assert a.shape == (2, 257) and torch.equal(a, b)


def test_the_mask_of_the_last_rows_is_the_end_of_the_whole_mask():
    """Whatever the piece; one new token alone gets one row that broadcasts."""
    ids = with_padding(random_ids(2, 5), 2)
    whole = make_padding_mask(ids) | make_causal_mask(7, "cpu")
    for start in range(7):
        cache = KVCache(1)
        if start:
            cache.append(ids[:, :start])
        assert torch.equal(cache.append(ids[:, start:]), whole[:, :, start:])


def test_the_cache_doubles_its_room():
    """Room for one more token at each step would copy all keys and values at each step."""
    attention, cache, rooms = MultiHeadAttention(8, 2), SelfAttentionCache(), set()
    for length in range(1, 65):
        keys, values = cache.keys_values(attention, *torch.randn(2, 1, 1, 8))
        assert keys.shape == values.shape == (1, 2, length, 4)
        rooms.add(cache.kept[0].size(2))
    assert len(rooms) <= 8 and max(rooms) < 2 * 64


def test_select_chooses_and_reorders_the_sequences():
    """Decode two steps, keep rows 2, 0, 0, decode on: as if the batch had been those rows all along."""
    model, (src, tgt) = small_model(), padded_batch()
    memory, src_mask = model.encode(src)
    cache, rows = KVCache(2), torch.tensor([2, 0, 0])
    for piece in (tgt[:, :2], tgt[:, 2:3]):
        model.decode(piece, memory, src_mask, cache)
    cache.select(rows)
    assert torch.equal(cache.ids, tgt[rows, :3])
    for t in (3, 4, 5):
        got, _ = model.decode(tgt[rows, t : t + 1], memory[rows], src_mask[rows], cache)
        expected, _ = model.decode(tgt[rows, : t + 1], memory[rows], src_mask[rows])
        assert same(got[:, 0], expected[:, t])


def test_a_mask_without_the_future_does_not_move_the_positions():
    """A padding mask alone, [B, 1, 1, Lt], broadcasts over the queries; positions still start at 0."""
    model, (src, tgt) = small_model(), padded_batch()
    memory, src_mask = model.encode(src)
    padding = make_padding_mask(tgt)
    narrow, _, _ = model.decoder(tgt, memory, padding, src_mask)
    wide, _, _ = model.decoder(tgt, memory, padding.expand(-1, -1, tgt.size(1), -1), src_mask)
    assert torch.equal(narrow, wide)
