"""The options beyond the chapter: post-norm, ReLU, one matrix for both embeddings and the output."""

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import (
    PAD_ID,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    TokenAndPosition,
    Transformer,
)
from test_model import check_causality, check_source_padding, random_ids, same, small_model, with_padding
from train import loss_sum

# Both ways for the output to take an embedding's matrix.
SHARING = [dict(share_embeddings=True), dict(tie_output=True)]


def test_the_chapters_model_is_the_default():
    chapter = dict(norm_first=True, activation="gelu", share_embeddings=False, tie_output=False)
    assert small_model().settings.items() >= chapter.items()


def test_the_chapters_defaults():
    chapter = dict(d_model=128, num_heads=4, dff=512, num_layers=2, max_len=64, dropout=0.1)
    for part in (
        TokenAndPosition, MultiHeadAttention, FeedForward, EncoderLayer, Encoder, DecoderLayer, Decoder,
        Transformer,
    ):  # fmt: skip
        parameters = inspect.signature(part).parameters.values()
        given = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert given == (chapter if part is Transformer else {"dropout": 0.1}), part


@pytest.mark.parametrize(
    "changes",
    [dict(norm_first=False), dict(activation="relu"), dict(attention="sdpa"), *SHARING],
)
def test_no_option_lets_the_future_or_padding_through(changes):
    check_causality(small_model(**changes))
    check_source_padding(small_model(**changes))


def test_post_norm_layers_end_normalised_and_there_is_no_last_norm():
    model = small_model(norm_first=False)
    memory, _ = model.encode(random_ids(2, 5))
    assert same(memory.mean(-1), torch.zeros(2, 5))
    assert torch.allclose(memory.var(-1, unbiased=False), torch.ones(2, 5), atol=1e-3)
    assert not any("ln_final" in name for name in model.state_dict())


def test_post_norm_by_the_formula():
    """x = LN(x + Sublayer(x)), with norms that differ from one another and from doing nothing."""
    model = small_model(norm_first=False)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    encoder_layer, decoder_layer = model.encoder.layers[0], model.decoder.layers[0]
    x, memory, no_mask = torch.randn(2, 5, 32), torch.randn(2, 4, 32), torch.tensor(False)
    y = encoder_layer.ln1(x + encoder_layer.mha(x, x, x)[0])
    assert same(encoder_layer(x, no_mask)[0], encoder_layer.ln2(y + encoder_layer.ffn(y)))
    y = decoder_layer.ln1(x + decoder_layer.self_mha(x, x, x)[0])
    y = decoder_layer.ln2(y + decoder_layer.cross_mha(y, memory, memory)[0])
    assert same(decoder_layer(x, memory, no_mask, no_mask)[0], decoder_layer.ln3(y + decoder_layer.ffn(y)))


def test_relu_is_relu():
    layer, x = small_model(activation="relu").encoder.layers[0].ffn, torch.randn(2, 5, 32)
    first, _, second, _ = layer.net
    assert same(layer(x), second(first(x).clamp(min=0)))


@pytest.mark.parametrize(
    "option, value",
    [
        ("attention", "sdpa"),
        ("norm_first", False),
        ("activation", "relu"),
        ("share_embeddings", True),
        ("tie_output", True),
    ],  # fmt: skip
)
def test_settings_remember_every_option(option, value):
    """A checkpoint rebuilds the model from `settings`: an option lost there comes back as its default."""
    model = small_model(**{option: value})
    assert model.settings[option] == value and small_model().settings[option] != value
    twin = Transformer(**model.settings)
    assert twin.settings == model.settings and is_one_tensor(twin) == is_one_tensor(model)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(activation="tanh"), ["activation='tanh'", "gelu, relu"]),
        (dict(share_embeddings=True, tgt_vocab=20), ["share_embeddings", "13", "20"]),
    ],
)
def test_bad_options_are_refused_by_name(changes, words):
    settings = dict(src_vocab=13, tgt_vocab=13, d_model=32, num_heads=4) | changes
    with pytest.raises(ValueError) as error:
        Transformer(**settings)
    assert all(word in str(error.value) for word in words)


# ------------------------------------------------------------------------------------------ shared embeddings


def matrices(model):
    return [model.encoder.embed.emb.weight, model.decoder.embed.emb.weight, model.out_proj.weight]


def is_one_tensor(model):
    return len({weight.data_ptr() for weight in matrices(model)}) == 1


def test_shared_embeddings_are_one_tensor_and_stay_one(tmp_path):
    model = small_model(share_embeddings=True)
    assert is_one_tensor(model) and not is_one_tensor(small_model())
    assert is_one_tensor(copy.deepcopy(model)) and is_one_tensor(model.to(torch.float64).to(torch.float32))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    twin = small_model(share_embeddings=True)
    twin.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    assert is_one_tensor(twin) and same(
        twin(random_ids(2, 5), random_ids(2, 5)), model(random_ids(2, 5), random_ids(2, 5))
    )


def test_a_tied_output_is_the_targets_matrix_and_leaves_the_source_its_own():
    tied = Transformer(13, 20, d_model=32, tie_output=True)  # vocabularies may differ
    assert tied.out_proj.weight is tied.decoder.embed.emb.weight
    assert tied.encoder.embed.emb.weight.shape == (13, 32) and tied.out_proj.weight.shape == (20, 32)
    equal = small_model(tie_output=True)
    assert equal.encoder.embed.emb.weight is not equal.out_proj.weight
    both = small_model(tie_output=True, share_embeddings=True)
    assert is_one_tensor(both)


def test_the_shared_tensor_is_counted_and_optimised_once():
    separate, shared = small_model(), small_model(share_embeddings=True)
    count = [sum(p.numel() for p in model.parameters()) for model in (separate, shared)]
    assert count[0] - count[1] == 2 * 13 * 32
    optimizer = torch.optim.Adam(shared.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is shared.out_proj.weight for p in held) == 1


def test_shared_embeddings_start_as_embeddings():
    weight = Transformer(2000, 2000, d_model=64, share_embeddings=True).out_proj.weight
    assert weight.std().item() == pytest.approx(64**-0.5, rel=0.03) and (weight[PAD_ID] == 0).all()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("share", [{}, *SHARING])
@pytest.mark.parametrize("vocab", [14, 8000])
def test_the_first_loss_is_near_that_of_a_guess(vocab, share, norm_first):
    torch.manual_seed(0)
    options = dict(share, norm_first=norm_first, max_len=32)
    model = Transformer(vocab, vocab, **options).eval()
    src, tgt, gold = (torch.randint(3, vocab, (16, 30)) for _ in range(3))
    loss = F.cross_entropy(model(src, tgt).flatten(0, 1), gold.flatten()).item()
    assert math.log(vocab) - 0.5 < loss < math.log(vocab) + 1


@pytest.mark.parametrize("share", SHARING)
@pytest.mark.parametrize("norm_first, name", [(True, "decoder.ln_final"), (False, "decoder.layers.1.ln3")])
def test_shared_embeddings_halve_the_gain_of_the_last_norm_only(norm_first, name, share):
    model = small_model(**share, norm_first=norm_first)
    norms = {n: module.weight for n, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert (norms.pop(name) == 0.5).all() and all((gain == 1).all() for gain in norms.values())


def test_the_shared_pad_row_is_trained_and_still_invisible():
    """As the docstring says: it learns as an output that is never right; as an input it stays masked."""
    model = small_model(share_embeddings=True).train()
    src = with_padding(random_ids(4, 5), 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        loss_sum(model(src, src), src).backward()
        optimizer.step()
    assert (model.out_proj.weight[PAD_ID] != 0).any()
    model.eval()
    before = model.encode(src)[0][:, :5]
    with torch.no_grad():
        model.encoder.embed.emb.weight[PAD_ID] = 1e3
    assert same(model.encode(src)[0][:, :5], before)


def test_linear_layers_keep_their_initial_weights_beside_a_shared_matrix():
    model = small_model(share_embeddings=True)
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.out_proj):
        assert linear.weight.abs().max() <= math.sqrt(6 / (linear.in_features + linear.out_features))
