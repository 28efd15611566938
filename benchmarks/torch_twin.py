"""The same model made of PyTorch's own `nn.Transformer`: the yardstick for equality tests and for step times.

Embeddings, positions and the output projection are model.py's; everything between is PyTorch's.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model import PAD_ID, MultiHeadAttention, TokenAndPosition, Transformer, make_causal_mask


class TorchTransformer(nn.Module):
    """src [B, Ls], tgt_in [B, Lt] -> logits [B, Lt, tgt_vocab]; `settings` are a model.Transformer's."""

    def __init__(self, settings: dict):
        super().__init__()
        d_model, num_heads, dff, num_layers, max_len, dropout = (
            settings[name] for name in ("d_model", "num_heads", "dff", "num_layers", "max_len", "dropout")
        )
        norm_first, activation = settings["norm_first"], settings["activation"]
        self.src_embed = TokenAndPosition(settings["src_vocab"], d_model, max_len, dropout)
        self.tgt_embed = TokenAndPosition(settings["tgt_vocab"], d_model, max_len, dropout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "nested tensors are not used": true, and no matter
            self.core = nn.Transformer(
                d_model, num_heads, num_layers, num_layers, dff, dropout, activation, batch_first=True,
                norm_first=norm_first,
            )  # fmt: skip
        if not norm_first:
            self.core.encoder.norm = self.core.decoder.norm = (
                None  # post-norm layers end in a norm of their own
            )
        self.out = nn.Linear(d_model, settings["tgt_vocab"])

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        src_padding = src == PAD_ID
        x = self.core(
            self.src_embed(src),
            self.tgt_embed(tgt_in),
            tgt_mask=make_causal_mask(tgt_in.size(1), tgt_in.device)[0, 0],
            src_key_padding_mask=src_padding,
            tgt_key_padding_mask=tgt_in == PAD_ID,
            memory_key_padding_mask=src_padding,
        )
        return self.out(x)


def attention_pairs(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> Iterator[tuple]:
    """(our parameter, their parameter, rows of theirs) of one attention; theirs stacks W_q, W_k and W_v."""
    d_model = ours.W_o.in_features
    for number, layer in enumerate((ours.W_q, ours.W_k, ours.W_v)):
        rows = slice(number * d_model, (number + 1) * d_model)
        yield layer.weight, theirs.in_proj_weight, rows
        yield layer.bias, theirs.in_proj_bias, rows
    yield ours.W_o.weight, theirs.out_proj.weight, slice(None)
    yield ours.W_o.bias, theirs.out_proj.bias, slice(None)


def model_pairs(ours: Transformer, theirs: TorchTransformer) -> Iterator[tuple]:
    """(our parameter, their parameter, rows of theirs) for the whole model, every parameter once."""
    whole = [
        (ours.encoder.embed, theirs.src_embed),
        (ours.decoder.embed, theirs.tgt_embed),
        (ours.out, theirs.out),
    ]
    if ours.settings["norm_first"]:
        whole.append((ours.encoder.ln_final, theirs.core.encoder.norm))
        whole.append((ours.decoder.ln_final, theirs.core.decoder.norm))
    for a, b in zip(ours.encoder.layers, theirs.core.encoder.layers, strict=True):
        yield from attention_pairs(a.mha, b.self_attn)
        whole += [(a.ln1, b.norm1), (a.ln2, b.norm2), (a.ffn.linear1, b.linear1), (a.ffn.linear2, b.linear2)]
    for a, b in zip(ours.decoder.layers, theirs.core.decoder.layers, strict=True):
        yield from attention_pairs(a.self_mha, b.self_attn)
        yield from attention_pairs(a.cross_mha, b.multihead_attn)
        whole += [(a.ln1, b.norm1), (a.ln2, b.norm2), (a.ln3, b.norm3)]
        whole += [(a.ffn.linear1, b.linear1), (a.ffn.linear2, b.linear2)]
    for a, b in whole:
        for our_parameter, their_parameter in zip(a.parameters(), b.parameters(), strict=True):
            yield our_parameter, their_parameter, slice(None)


@torch.no_grad()
def copy_weights(pairs: Iterator[tuple]) -> None:
    """Give the PyTorch side of every pair our weights."""
    for ours, theirs, rows in pairs:
        theirs[rows].copy_(ours)
