"""The chapter's listings, in our own words: whoever types them in must find that they run on this code.

Checked are names, keywords, what comes back and in which shape. And the weights that the chapter's listing
saves, a bare state dict, must load by name, here and in the scripts.
"""

import pytest
import torch
import torch.nn.functional as F

import train
import viz
from model import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    Transformer,
    make_causal_mask,
    make_padding_mask,
)
from train import (
    BOS_ID,
    EOS_ID,
    MAX_LEN,
    MIN_LEN,
    NUM_OFFSET,
    SEQ_LEN,
    VOCAB,
    encode_digits,
    exact_match,
    greedy_decode,
    load_model,
    make_dataset,
    noam_lambda,
)

# ----------------------------------------------------------------------------------------------- 20.8 tests


@pytest.fixture
def model() -> Transformer:
    """As the chapter makes it: two vocabulary sizes, all else by default."""
    torch.manual_seed(0)
    return Transformer(VOCAB, VOCAB)


@torch.no_grad()
def test_20_8_causality(model):
    """The last target token becomes another one: only the last output may notice."""
    model.eval()
    src, tgt_in = torch.randint(3, VOCAB, (2, 10)), torch.randint(3, VOCAB, (2, 8))
    other = tgt_in.clone()
    other[:, -1] = 3 + (other[:, -1] - 2) % 10
    a, b = model(src, tgt_in), model(src, other)
    assert a.shape == (2, 8, VOCAB)
    assert torch.allclose(a[:, :-1], b[:, :-1], atol=1e-5)
    assert not torch.allclose(a[:, -1], b[:, -1], atol=1e-3)


@torch.no_grad()
def test_20_8_padding(model):
    """Five PADs behind the source: not a logit may change."""
    model.eval()
    src, tgt_in = torch.randint(3, VOCAB, (2, 10)), torch.randint(3, VOCAB, (2, 8))
    padded = torch.cat([src, torch.zeros(2, 5, dtype=torch.long)], dim=1)
    assert torch.allclose(model(src, tgt_in), model(padded, tgt_in), atol=1e-5)


def test_20_7_masks_say_true_where_nothing_may_be_seen():
    ids = torch.tensor([[5, 6, EOS_ID, 0]])
    assert make_padding_mask(ids).shape == (1, 1, 1, 4) and make_padding_mask(ids).sum() == 1
    causal = make_causal_mask(4, ids.device)
    assert causal.shape == (1, 1, 4, 4) and causal.dtype == torch.bool
    assert torch.equal(causal[0, 0], torch.ones(4, 4, dtype=torch.bool).triu(diagonal=1))
    assert (make_padding_mask(ids) | causal).shape == (1, 1, 4, 4)


def test_20_3_multi_head_attention():
    mha = MultiHeadAttention(128, 4).eval()
    q, kv, mask = torch.randn(2, 8, 128), torch.randn(2, 10, 128), torch.zeros(2, 1, 1, 10, dtype=torch.bool)
    mask[..., 7:] = True
    output, weights = mha(q, kv, kv, attn_mask=mask)
    assert output.shape == (2, 8, 128) and weights.shape == (2, 4, 8, 10) and (weights[..., 7:] == 0).all()
    assert mha(q, k=kv, v=kv)[0].shape == output.shape  # a mask is not needed
    assert mha._split(mha.W_q(q)).shape == (2, 4, 8, 32) and mha._merge(mha._split(q)).equal(q)


def test_20_5_and_20_6_layers():
    x, memory = torch.randn(2, 10, 128), torch.randn(2, 10, 128)
    pad_mask = torch.zeros(2, 1, 1, 10, dtype=torch.bool)
    y, weights = EncoderLayer(128, 4, 512, 0.1)(x, pad_mask)
    assert y.shape == x.shape and weights.shape == (2, 4, 10, 10)
    t, self_mask = torch.randn(2, 8, 128), make_causal_mask(8, "cpu")
    y, *_, cross_weights = DecoderLayer(128, 4, 512, 0.1)(t, memory, self_mask, pad_mask)
    assert y.shape == t.shape and cross_weights.shape == (2, 4, 8, 10)


def test_20_7_encode_and_decode_are_forward_in_two_halves(model):
    model.eval()
    src, tgt_in = torch.randint(3, VOCAB, (2, 10)), torch.randint(3, VOCAB, (2, 8))
    memory, src_mask = model.encode(src)
    logits, cross_weights = model.decode(tgt_in, memory, src_mask)
    assert memory.shape == (2, 10, 128) and src_mask.shape == (2, 1, 1, 10)
    assert [w.shape for w in cross_weights] == [(2, 4, 8, 10)] * 2
    assert torch.equal(model(src, tgt_in), logits)


# ----------------------------------------------------------------------------- 20.9-20.13 data, output, map


def test_20_9_data():
    assert (BOS_ID, EOS_ID, NUM_OFFSET, VOCAB, MIN_LEN, MAX_LEN, SEQ_LEN) == (1, 2, 3, 13, 3, 12, 14)
    src, tgt = make_dataset(20, 0)
    assert src.shape == tgt.shape == (20, SEQ_LEN) and (tgt[:, 0] == BOS_ID).all()
    assert torch.equal(make_dataset(n=20, seed=0)[0], src)


def test_20_10_schedule(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam_lambda(128, warmup=1000))
    assert scheduler.get_last_lr()[0] == pytest.approx(128**-0.5 * 1000**-1.5)


def test_20_11_inference(model):
    src, tgt = make_dataset(20, 1)
    pred = greedy_decode(model, src, max_len=SEQ_LEN)
    assert pred.size(0) == 20 and pred.size(1) <= SEQ_LEN and (pred[:, 0] == BOS_ID).all()
    assert 0 <= exact_match(model, src, tgt) <= 1


@torch.no_grad()
def test_20_13_the_cross_attention_map(model):
    """Decode freely, read the output back without its last token, average the last layer's heads."""
    model.eval()
    src = encode_digits("7309518")
    pred = greedy_decode(model, src, max_len=SEQ_LEN)
    memory, src_mask = model.encode(src)
    logits, cross_w = model.decode(pred[:, :-1], memory, src_mask)
    attention = cross_w[-1][0].mean(dim=0)
    assert attention.shape == (pred.size(1) - 1, src.size(1))
    torch.testing.assert_close(attention.sum(-1), torch.ones(pred.size(1) - 1))
    logits[..., : BOS_ID + 1] = -torch.inf  # read back, the output predicts itself
    assert torch.equal(logits.argmax(-1), pred[:, 1:])
    drawn, _, _, _ = viz.attention_maps(model, "7309518")
    torch.testing.assert_close(drawn[-1].mean(dim=0), attention)


# ------------------------------------------------------------------------------- 20.14 by hand against SDPA


@torch.no_grad()
def test_20_14_sdpa_on_the_same_weights():
    torch.manual_seed(0)
    mha, L = MultiHeadAttention(512, 8).eval(), 64
    x = torch.randn(2, L, 512)
    by_hand, _ = mha(x, x, x, attn_mask=make_causal_mask(L, x.device))
    q, k, v = mha._split(mha.W_q(x)), mha._split(mha.W_k(x)), mha._split(mha.W_v(x))
    fused = mha.W_o(mha._merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
    assert torch.allclose(by_hand, fused, atol=1e-4)
    without_mask = mha.W_o(mha._merge(F.scaled_dot_product_attention(q, k, v)))
    assert not torch.allclose(by_hand, without_mask, atol=1e-4)


# ------------------------------------------------------------------ the state dict of the chapter's listing


def chapter_shapes(d: int = 128, dff: int = 512, layers: int = 2) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, written down from the chapter and not asked of our model."""
    shapes = {}

    def add(name: str, outputs: int, inputs: int | None = None) -> None:
        shapes[f"{name}.weight"] = (outputs,) if inputs is None else (outputs, inputs)
        shapes[f"{name}.bias"] = (outputs,)

    for stack, attentions in (("encoder", ["mha"]), ("decoder", ["self_mha", "cross_mha"])):
        shapes[f"{stack}.embed.emb.weight"] = (VOCAB, d)
        for i in range(layers):
            layer = f"{stack}.layers.{i}"
            for number in range(1, len(attentions) + 2):
                add(f"{layer}.ln{number}", d)
            for attention in attentions:
                for projection in ("W_q", "W_k", "W_v", "W_o"):
                    add(f"{layer}.{attention}.{projection}", d, d)
            add(f"{layer}.ffn.net.0", dff, d)
            add(f"{layer}.ffn.net.2", d, dff)
        add(f"{stack}.ln_final", d)
    add("out_proj", VOCAB, d)
    return shapes


def chapter_weights(**sizes) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: 0.1 * torch.randn(shape) for name, shape in chapter_shapes(**sizes).items()}


@pytest.fixture
def chapters_file(tmp_path, monkeypatch):
    """A folder to work in that holds what the chapter saves: a state dict and nothing else."""
    monkeypatch.chdir(tmp_path)
    torch.save(chapter_weights(), "reverse_transformer.pt")
    return tmp_path


def test_the_chapter_s_names_are_ours(model):
    weights = chapter_weights()
    assert "encoder.embed.emb.weight" in weights and "decoder.layers.1.cross_mha.W_k.weight" in weights
    assert "encoder.layers.0.ffn.net.2.bias" in weights and "decoder.layers.0.ln3.weight" in weights
    assert sum(w.numel() for w in weights.values()) == 931_213
    model.load_state_dict(weights, strict=True)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_load_model_takes_the_bare_state_dict(chapters_file):
    model, history = load_model("reverse_transformer.pt")
    assert history == [] and not model.training
    assert torch.equal(model.out_proj.bias, chapter_weights()["out_proj.bias"])


def test_viz_draws_from_it(chapters_file, capsys):
    assert viz.main(["--checkpoint", "reverse_transformer.pt", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("wrote cross_attn.png\n")
    assert (chapters_file / "cross_attn.png").stat().st_size > 10_000


def refusal(main, *options: str, capsys, folder) -> str:
    """One line, status 2, nothing printed and nothing written -> the line."""
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    with pytest.raises(SystemExit) as stop:
        main([*options, "--device", "cpu"])
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == before
    return output.err


def test_it_has_no_history_to_draw_and_no_state_to_resume_from(chapters_file, capsys):
    error = refusal(viz.main, "--curve", capsys=capsys, folder=chapters_file)
    assert error.startswith("viz.py: error: --curve: reverse_transformer.pt")
    error = refusal(train.main, "--resume", capsys=capsys, folder=chapters_file)
    assert error.startswith("train.py: error: ") and "reverse_transformer.pt: not a checkpoint" in error


@pytest.mark.parametrize("sizes", [dict(d=64), dict(layers=1), dict(layers=3)])
def test_weights_of_other_sizes_are_refused(chapters_file, capsys, sizes):
    torch.save(chapter_weights(**sizes), "other.pt")
    error = refusal(viz.main, "--checkpoint", "other.pt", capsys=capsys, folder=chapters_file)
    assert "other.pt" in error and "does not fit" in error
