"""The options beyond the chapter: post-norm, ReLU, one matrix for both embeddings and the output."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import PAD_ID, EncoderLayer, Transformer
from test_model import check_causality, check_source_padding, random_ids, same, small_model, with_padding
from train import loss_sum


def test_the_chapters_model_is_the_default():
    settings = small_model().settings
    assert (settings["norm_first"], settings["activation"], settings["share_embeddings"]) == (
        True,
        "gelu",
        False,
    )


@pytest.mark.parametrize(
    "changes",
    [dict(norm_first=False), dict(activation="relu"), dict(share_embeddings=True), dict(attention="sdpa")],
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
    layer, x, mask = (
        EncoderLayer(32, 4, 64, 0.0, norm_first=False),
        torch.randn(2, 5, 32),
        torch.tensor(False),
    )
    attended, _ = layer.mha(x, x, x, mask)
    y = layer.ln1(x + attended)
    assert same(layer(x, mask)[0], layer.ln2(y + layer.ffn(y)))


def test_relu_is_relu():
    layer, x = small_model(activation="relu").encoder.layers[0].ffn, torch.randn(2, 5, 32)
    assert same(layer(x), layer.linear2(layer.linear1(x).clamp(min=0)))


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
    return [model.encoder.embed.embedding.weight, model.decoder.embed.embedding.weight, model.out.weight]


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


def test_the_shared_tensor_is_counted_and_optimised_once():
    separate, shared = small_model(), small_model(share_embeddings=True)
    count = [sum(p.numel() for p in model.parameters()) for model in (separate, shared)]
    assert count[0] - count[1] == 2 * 13 * 32
    optimizer = torch.optim.Adam(shared.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is shared.out.weight for p in held) == 1


def test_shared_embeddings_start_as_embeddings():
    weight = Transformer(2000, 2000, d_model=64, share_embeddings=True).out.weight
    assert weight.std().item() == pytest.approx(64**-0.5, rel=0.03) and (weight[PAD_ID] == 0).all()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("vocab", [14, 8000])
def test_the_first_loss_is_near_that_of_a_guess(vocab, share, norm_first):
    torch.manual_seed(0)
    options = dict(share_embeddings=share, norm_first=norm_first, max_len=32)
    model = Transformer(vocab, vocab, **options).eval()
    src, tgt, gold = (torch.randint(3, vocab, (16, 30)) for _ in range(3))
    loss = F.cross_entropy(model(src, tgt).flatten(0, 1), gold.flatten()).item()
    assert math.log(vocab) - 0.5 < loss < math.log(vocab) + 1


def test_the_shared_pad_row_is_trained_and_still_invisible():
    """As the docstring says: it learns as an output that is never right; as an input it stays masked."""
    model = small_model(share_embeddings=True).train()
    src = with_padding(random_ids(4, 5), 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        loss_sum(model(src, src), src).backward()
        optimizer.step()
    assert (model.out.weight[PAD_ID] != 0).any()
    model.eval()
    before = model.encode(src)[0][:, :5]
    with torch.no_grad():
        model.encoder.embed.embedding.weight[PAD_ID] = 1e3
    assert same(model.encode(src)[0][:, :5], before)


def test_linear_layers_keep_their_start_beside_a_shared_matrix():
    model = small_model(share_embeddings=True)
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.out):
        assert linear.weight.abs().max() <= math.sqrt(6 / (linear.in_features + linear.out_features))
