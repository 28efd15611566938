"""model.py beyond section 20.8: initial weights, devices, shapes, refusals, half precision, norms, noise."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model as model_module
from model import (
    PAD_ID,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    TokenAndPosition,
    Transformer,
    attention_weights,
    make_causal_mask,
    scaled_dot_product_attention,
    sinusoidal_position_encoding,
)
from test_model import SEQ_LEN, VOCAB, no_causal_mask, random_ids, same, small_model, with_padding
from train import loss_sum, teacher_forcing

# ------------------------------------------------------------------ initial weights, sizes, devices, shapes


def check_initialisation(model: Transformer) -> None:
    """Embeddings N(0, d_model^-0.5) with a zero PAD row; linear layers Xavier uniform with zero bias."""
    d_model = model.settings["d_model"]
    for embed in (model.encoder.embed, model.decoder.embed):
        weight = embed.emb.weight
        assert (weight[PAD_ID] == 0).all(), "the PAD row is not zero"
        assert weight[1:].std().item() == pytest.approx(d_model**-0.5, rel=0.06), "initial embeddings"
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert linear.weight.abs().max() <= bound and (linear.bias == 0).all(), "initial linear weights"
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), (
            "initial linear weights"
        )


def check_parameter_count(model: Transformer) -> None:
    assert sum(p.numel() for p in model.parameters()) == 931_213


def chapter_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(VOCAB, VOCAB, max_len=SEQ_LEN)


def test_chapter_sizes_and_start_values():
    check_initialisation(chapter_model())
    check_parameter_count(chapter_model())


def test_embedding_is_token_times_root_d_plus_position():
    embed = TokenAndPosition(VOCAB, 128, SEQ_LEN, dropout=0.0)
    ids = random_ids(2, 6)
    expected = embed.emb.weight[ids] * math.sqrt(128) + sinusoidal_position_encoding(SEQ_LEN, 128)[:6]
    assert same(embed(ids), expected)
    token, position = embed.emb.weight[1:] * math.sqrt(128), embed.pe
    assert 0.5 < (token.std() / position.std()).item() < 2  # neither drowns the other


def test_position_encoding_by_hand():
    table = sinusoidal_position_encoding(1000, 4)
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(1000)]
    assert torch.allclose(table, torch.tensor(expected), atol=1e-4)  # far out, 10000 must be exact
    assert table.dtype == torch.float32 and same(table[:3], torch.tensor(expected[:3]))
    assert sinusoidal_position_encoding(5, 7).shape == (5, 7)


def check_devices(model: Transformer) -> None:
    """After .to(device) every tensor lives there, the masks too: tried on `meta`, which needs no hardware."""
    seen = []
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_pre_hook(
                lambda _, args, options: seen.append(options["attn_mask"].device.type), with_kwargs=True
            )
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
    assert not any(name.endswith(".pe") for name in small_model().state_dict())  # anyone can compute it again


def test_shapes_are_what_the_docstrings_say():
    model = small_model(num_layers=3)
    src, tgt = random_ids(2, 5), random_ids(2, 6)
    memory, src_mask = model.encode(src)
    logits, cross = model.decode(tgt, memory, src_mask)
    assert memory.shape == (2, 5, 32) and src_mask.shape == (2, 1, 1, 5) and src_mask.dtype == torch.bool
    assert logits.shape == (2, 6, VOCAB) and same(model(src, tgt), logits)
    weights = attention_weights(model, src, tgt)
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


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(d_model=10), ["num_heads=4", "d_model=10", "divide"]),
        (dict(num_heads=0), ["num_heads=0", "at least 1"]),
        (dict(d_model=0), ["d_model=0", "at least 1"]),
        (dict(dff=-3), ["dff=-3", "at least 1"]),
        (dict(num_layers=0), ["num_layers=0", "at least 1"]),
        (dict(max_len=0), ["max_len=0", "at least 1"]),
        (dict(d_model=32.0), ["d_model=32.0", "integer"]),
        (dict(dropout=1.0), ["dropout=1.0", "below 1"]),
        (dict(dropout=-0.1), ["dropout=-0.1", "at least 0"]),
        (dict(dropout=math.nan), ["dropout=nan"]),
    ],
)
def test_bad_settings_are_refused_by_name(changes, words):
    with pytest.raises(ValueError) as error:
        small_model(**changes)
    for word in words:
        assert word in str(error.value)


def test_vocabulary_sizes_are_checked_too():
    with pytest.raises(ValueError, match="tgt_vocab=0"):
        Transformer(13, 0)
    with pytest.raises(ValueError, match="num_heads=3.*d_model=32"):
        MultiHeadAttention(32, 3)


def test_odd_d_model_works():
    model = Transformer(VOCAB, VOCAB, d_model=7, num_heads=1, dff=9, max_len=SEQ_LEN).eval()
    assert model(random_ids(2, 5), random_ids(2, 6)).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_longer_than_max_len_is_refused_with_both_lengths(device):
    model, fits, too_long = (
        small_model().to(device),
        random_ids(1, SEQ_LEN).to(device),
        random_ids(1, 15).to(device),
    )
    assert model(fits, fits).shape == (1, SEQ_LEN, VOCAB)
    for src, tgt in [(too_long, fits), (fits, too_long)]:
        with pytest.raises(ValueError, match="length 15 .*max_len=14"):
            model(src, tgt)


# ------------------------------------------------------------------------- rows of nothing but padding, half


def losses_with_an_all_pad_row(model, precision):
    src, tgt = with_padding(random_ids(2, 5), 2), with_padding(random_ids(2, 6, seed=2), 2)
    src[0], tgt[0] = PAD_ID, PAD_ID
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        logits = model(src, tgt)
    loss = loss_sum(logits[:, :-1], tgt[:, 1:]) / 5
    loss.backward()
    return src, tgt, logits, loss


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_a_row_of_padding_gives_finite_outputs_and_gradients(precision):
    model = small_model().train()
    src, tgt, logits, loss = losses_with_an_all_pad_row(model, precision)
    assert logits.isfinite().all() and loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    if precision is None:  # and the neighbour does not notice
        assert same(logits[1], model(src[1:], tgt[1:])[0])


def test_the_finite_check_notices_minus_infinity(monkeypatch):
    def with_infinity(q, k, v, mask=None, drop=None):
        weights = (q @ k.transpose(-2, -1)).masked_fill(mask, -torch.inf).softmax(-1)
        return weights @ v, weights

    monkeypatch.setitem(model_module.ATTENTION, "manual", with_infinity)
    assert not losses_with_an_all_pad_row(small_model().train(), None)[2].isfinite().all()


def test_a_model_in_half_precision_is_finite_on_an_all_pad_row():
    model = small_model().half()
    src = random_ids(2, 5)
    src[0] = PAD_ID
    assert model(src, src).isfinite().all()


@pytest.mark.parametrize("score", [-20, -12_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_weights_are_exactly_zero_in_every_dtype(dtype, score):
    torch.manual_seed(0)
    q = torch.ones(1, 1, 6, 16)
    k = score / 4 + 0.1 * torch.randn(1, 1, 6, 16)  # every score near `score`, d_k = 16
    mask = make_causal_mask(6, "cpu") | torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.bool)
    output, weights = scaled_dot_product_attention(q.to(dtype), k.to(dtype), k.to(dtype), mask)
    assert output.isfinite().all() and (weights.masked_select(mask) == 0).all()
    assert torch.allclose(weights.float().sum(-1), torch.ones(6), atol=1e-2)


def test_attention_by_hand():
    """Two queries, two keys, d_k = 1: scores [[0, ln 3], [0, 0]]; without and with the second key masked."""
    q, k, v = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [math.log(3)]]), torch.tensor([[4.0], [8.0]])
    output, weights = scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])
    assert same(weights[0, 0], torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    assert same(output[0, 0], torch.tensor([[7.0], [6.0]]))
    mask = torch.tensor([[False, True]])
    assert same(
        scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], mask)[0], torch.tensor(4.0)
    )


def test_scores_are_divided_by_the_root_of_d_k():
    q, k = torch.full((1, 1, 1, 4), 2.0), torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])[None, None]
    _, weights = scaled_dot_product_attention(q, k, k)  # scores 2 / sqrt(4) = 1 and 0
    assert same(weights[0, 0, 0, 0], torch.sigmoid(torch.tensor(1.0)))


# ----------------------------------------------------------------------------------------- layers and norms


def zero_the_outputs(layer):
    for module in layer.modules():
        if isinstance(module, MultiHeadAttention | FeedForward):
            last = module.W_o if isinstance(module, MultiHeadAttention) else module.net[2]
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)


def test_pre_norm_layers_with_silent_sublayers_return_their_input_bit_for_bit():
    x, memory, mask = torch.randn(2, 5, 32), torch.randn(2, 4, 32), torch.zeros(1, dtype=torch.bool)
    encoder_layer, decoder_layer = EncoderLayer(32, 4, 64, 0.0), DecoderLayer(32, 4, 64, 0.0)
    assert not torch.equal(encoder_layer(x, mask)[0], x)
    zero_the_outputs(encoder_layer), zero_the_outputs(decoder_layer)
    assert torch.equal(encoder_layer(x, mask)[0], x)
    assert torch.equal(decoder_layer(x, memory, mask, mask)[0], x)


def test_both_stacks_end_in_a_layer_norm():
    model = small_model()
    memory, src_mask = model.encode(random_ids(2, 5))
    hidden, _, _ = model.decoder(random_ids(2, 5), memory, make_causal_mask(5, "cpu"), src_mask)
    for x in (memory, hidden):
        assert same(x.mean(-1), torch.zeros(2, 5))
        assert torch.allclose(x.var(-1, unbiased=False), torch.ones(2, 5), atol=1e-3)


def test_a_constant_row_is_finite_forward_and_backward():
    layer, x = EncoderLayer(32, 4, 64, 0.0), torch.full((1, 3, 32), 2.5, requires_grad=True)
    output, _ = layer(x, torch.zeros(1, dtype=torch.bool))
    output.sum().backward()
    assert output.isfinite().all() and x.grad.isfinite().all()


def test_the_pad_row_stays_zero_in_training():
    """Also where a PAD can reach the loss: in a row of nothing but PAD that is asked for real tokens."""
    model = small_model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    gold = with_padding(random_ids(4, 5), 2)
    src = gold.clone()
    src[3] = PAD_ID
    before = model.encoder.embed.emb.weight.clone()
    for _ in range(10):
        optimizer.zero_grad()
        loss_sum(model(src, src), gold).backward()
        optimizer.step()
    for embed in (model.encoder.embed, model.decoder.embed):
        assert (embed.emb.weight[PAD_ID] == 0).all()
    assert not torch.equal(model.encoder.embed.emb.weight, before)


# ------------------------------------------------------------------------------- settings, state, pasted code


def test_settings_are_plain_and_rebuild_the_model():
    model = small_model(dropout=0.25)
    assert all(type(value) in (int, float, str, bool) for value in model.settings.values())
    twin = Transformer(**model.settings).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(random_ids(2, 5), random_ids(2, 6)), model(random_ids(2, 5), random_ids(2, 6)))


def test_every_setting_changes_the_model():
    def fingerprint(**changes):
        model = small_model(**changes).train()
        torch.manual_seed(1)
        return (
            [tuple(p.shape) for p in model.parameters()],
            model.encoder.embed.pe.shape,
            model(random_ids(2, 5), random_ids(2, 6)).sum().item(),
        )

    base = fingerprint()
    assert fingerprint() == base
    changes = dict(d_model=64, num_heads=2, dff=32, num_layers=1, max_len=20, dropout=0.5)
    changes |= dict(norm_first=False, activation="relu", share_embeddings=True, tie_output=True)
    for name, value in changes.items():
        assert fingerprint(**{name: value}) != base, f"{name} goes nowhere"


def test_weights_are_returned_before_dropout_and_nothing_is_stashed():
    torch.manual_seed(0)
    attention = MultiHeadAttention(32, 4, dropout=0.9).train()
    x = torch.randn(2, 7, 32)
    _, weights = attention(x, x, x)
    assert same(weights.sum(-1), torch.ones(2, 4, 7)) and (weights > 0).all()
    model = small_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    attention_weights(model, random_ids(2, 5), random_ids(2, 6))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_code_pasted_from_the_chapter_runs():
    model = Transformer(13, 13, max_len=14, dropout=0.0)
    src, tgt_in = random_ids(2, 9), random_ids(2, 8)
    memory, src_mask = model.encode(src)
    logits, cross = model.decode(tgt_in, memory, src_mask)
    assert logits.shape == (2, 8, 13) and len(cross) == 2 and cross[-1].shape == (2, 4, 8, 9)
    assert model.encoder.layers[0].mha.W_q.weight.shape == (128, 128)
    assert model.decoder.layers[1].cross_mha._split(torch.zeros(64, 14, 128)).shape == (64, 4, 14, 32)
    assert copy.deepcopy(model)(src, tgt_in).shape == logits.shape


def test_first_loss_is_near_that_of_a_guess():
    model = chapter_model().eval()
    src, tgt = random_ids(64, 13), random_ids(64, 13, seed=2)
    loss = F.cross_entropy(model(src, tgt).flatten(0, 1), random_ids(64, 13, seed=3).flatten())
    assert math.log(13) - 0.5 < loss.item() < math.log(13) + 1


# ------------------------------------------------------- a decoder that sees the answer would learn noise


def loss_on_random_targets(causal_mask, monkeypatch) -> float:
    """Nats per symbol on fresh targets unrelated to the source, after 300 steps of training."""
    monkeypatch.setattr(model_module, "make_causal_mask", causal_mask)
    model = small_model(num_layers=1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(5)

    def loss(rows):
        src, tgt = (torch.randint(3, VOCAB, (rows, 7), generator=generator) for _ in range(2))
        tgt_in, tgt_out = teacher_forcing(tgt)
        return F.cross_entropy(model(src, tgt_in).flatten(0, 1), tgt_out.flatten())

    for _ in range(300):
        optimizer.zero_grad()
        loss(32).backward()
        optimizer.step()
    with torch.no_grad():
        return loss(2000).item()


def test_noise_cannot_be_learned(monkeypatch):
    assert loss_on_random_targets(model_module.make_causal_mask, monkeypatch) >= math.log(10) - 0.05


def test_noise_can_be_learned_by_a_decoder_that_sees_the_future(monkeypatch):
    assert loss_on_random_targets(no_causal_mask, monkeypatch) < math.log(10) - 0.5
