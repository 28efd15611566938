"""The same model made of PyTorch's own `nn.Transformer`: what model.py is compared with, and timed against.

Embeddings, positions and the output projection are model.py's; everything between is PyTorch's.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model import (
    PAD_ID,
    KVCache,
    MultiHeadAttention,
    TokenAndPosition,
    Transformer,
    make_causal_mask,
    make_padding_mask,
)


class TorchTransformer(nn.Module):
    """Called as a model.Transformer is, whose `settings` it takes; but it has no cross weights to return."""

    def __init__(self, settings: dict):
        super().__init__()
        self.settings = dict(settings)
        d_model, max_len, dropout = (settings[name] for name in ("d_model", "max_len", "dropout"))
        layers, norm_first = settings["num_layers"], settings["norm_first"]
        self.src_embed = TokenAndPosition(settings["src_vocab"], d_model, max_len, dropout)
        self.tgt_embed = TokenAndPosition(settings["tgt_vocab"], d_model, max_len, dropout)
        with warnings.catch_warnings():
            # It says that nested tensors are not used: no matter.
            warnings.simplefilter("ignore", UserWarning)
            self.core = nn.Transformer(
                d_model, settings["num_heads"], layers, layers, settings["dff"], dropout,
                settings["activation"], batch_first=True, norm_first=norm_first,
            )  # fmt: skip
        if not norm_first:  # each layer ends in a norm of its own
            self.core.encoder.norm = self.core.decoder.norm = None
        self.out_proj = nn.Linear(d_model, settings["tgt_vocab"])

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, Ls] -> memory [B, Ls, d_model], src_mask [B, 1, 1, Ls]."""
        src_mask = make_padding_mask(src)
        return self.core.encoder(self.src_embed(src), src_key_padding_mask=src_mask[:, 0, 0]), src_mask

    def decode(
        self, tgt_in: Tensor, memory: Tensor, src_mask: Tensor, cache: KVCache | None = None
    ) -> tuple[Tensor, list]:
        """tgt_in [B, Lt] and what `encode` returned -> logits [B, Lt, tgt_vocab], [].

        nn.Transformer has no KV cache: of `cache` only the ids are used, and every token is computed again.
        """
        ids = tgt_in
        if cache is not None:
            cache.append(tgt_in)
            ids = cache.ids
        x = self.core.decoder(
            self.tgt_embed(ids),
            memory,
            tgt_mask=make_causal_mask(ids.size(1), ids.device)[0, 0],
            tgt_key_padding_mask=ids == PAD_ID,
            memory_key_padding_mask=src_mask[:, 0, 0],
            tgt_is_causal=True,  # or it would look at the mask to find out, and wait for the GPU
        )
        return self.out_proj(x[:, -tgt_in.size(1) :]), []

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """src [B, Ls], tgt_in [B, Lt] -> logits [B, Lt, tgt_vocab]."""
        return self.decode(tgt_in, *self.encode(src))[0]


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
    alike = [
        (ours.encoder.embed, theirs.src_embed),
        (ours.decoder.embed, theirs.tgt_embed),
        (ours.out_proj, theirs.out_proj),
    ]
    if ours.settings["norm_first"]:
        alike.append((ours.encoder.ln_final, theirs.core.encoder.norm))
        alike.append((ours.decoder.ln_final, theirs.core.decoder.norm))
    for a, b in zip(ours.encoder.layers, theirs.core.encoder.layers, strict=True):
        yield from attention_pairs(a.mha, b.self_attn)
        alike += [(a.ln1, b.norm1), (a.ln2, b.norm2), (a.ffn.net[0], b.linear1), (a.ffn.net[2], b.linear2)]
    for a, b in zip(ours.decoder.layers, theirs.core.decoder.layers, strict=True):
        yield from attention_pairs(a.self_mha, b.self_attn)
        yield from attention_pairs(a.cross_mha, b.multihead_attn)
        alike += [(a.ln1, b.norm1), (a.ln2, b.norm2), (a.ln3, b.norm3)]
        alike += [(a.ffn.net[0], b.linear1), (a.ffn.net[2], b.linear2)]
    for a, b in alike:
        for our_parameter, their_parameter in zip(a.parameters(), b.parameters(), strict=True):
            yield our_parameter, their_parameter, slice(None)


@torch.no_grad()
def copy_weights(pairs: Iterator[tuple]) -> None:
    """Give the PyTorch side of every pair our weights."""
    for ours, theirs, rows in pairs:
        theirs[rows].copy_(ours)
