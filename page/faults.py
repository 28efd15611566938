"""What the page's switches break in a finished model, here in PyTorch.

The page's figures are measured with it, and the tests compare the page with it.

A fault is one of FAULTS. A head is named by its kind, layer and number, counted from 1: "cross.2.1".
"""

import copy
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model import (
    PAD_ID,
    KVCache,
    MultiHeadAttention,
    Transformer,
    make_causal_mask,
    make_padding_mask,
    scaled_dot_product_attention,
)
from train import BOS_ID, EOS_ID, evaluating, greedy_decode, teacher_forcing

FAULTS = ("causal", "padding", "positions", "scale")
KIND_OF = {
    "encoder": ("encoder", "mha"),
    "decoder": ("decoder", "self_mha"),
    "cross": ("decoder", "cross_mha"),
}


class FaultyTransformer(Transformer):
    """A Transformer without the masks that `faults` names; all else as in `Transformer`."""

    faults: frozenset = frozenset()

    def padding_mask(self, ids: Tensor) -> Tensor:
        """ids [B, L] -> bool [B, 1, 1, L], as `make_padding_mask`; False everywhere under "padding"."""
        return make_padding_mask(ids) & ("padding" not in self.faults)

    def self_mask(self, tgt_in: Tensor) -> Tensor:
        """tgt_in [B, Lt] -> bool [B, 1, Lt, Lt], what the decoder's self-attention must not see."""
        causal = make_causal_mask(tgt_in.size(1), tgt_in.device) & ("causal" not in self.faults)
        return self.padding_mask(tgt_in) | causal

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        src_mask = self.padding_mask(src)
        return self.encoder(src, src_mask)[0], src_mask

    def decode(
        self, tgt_in: Tensor, memory: Tensor, src_mask: Tensor, cache: KVCache | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """With a cache no position sees a later one, so "causal" has no effect there."""
        if cache is not None:
            return super().decode(tgt_in, memory, src_mask, cache)
        x, _, cross_weights = self.decoder(tgt_in, memory, self.self_mask(tgt_in), src_mask)
        return self.out_proj(x), cross_weights


def attention_of(model: Transformer, kind: str, layer: int) -> MultiHeadAttention:
    """The attention of "encoder", "decoder" or "cross" in a layer, counted from 1."""
    stack, part = KIND_OF[kind]
    return getattr(getattr(model, stack).layers[layer - 1], part)


def heads_of(model: Transformer) -> list[str]:
    """The names of all heads."""
    layers, heads = (range(1, model.settings[name] + 1) for name in ("num_layers", "num_heads"))
    return [f"{kind}.{layer}.{head}" for kind in KIND_OF for layer in layers for head in heads]


def faulty_attention(unscaled: bool, off: list[int], q, k, v, mask=None, drop=None) -> tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` without its division, and with the output of the heads `off` at 0."""
    output, weights = scaled_dot_product_attention(q * q.size(-1) ** 0.5 if unscaled else q, k, v, mask, drop)
    output[:, off] = 0
    return output, weights


def with_faults(model: Transformer, faults: Iterable[str] = (), off: Iterable[str] = ()) -> FaultyTransformer:
    """A copy of the model with these faults, and without these heads."""
    faulty = copy.deepcopy(model)
    faulty.__class__ = FaultyTransformer  # the same parts and weights
    faulty.faults = frozenset(faults)
    if "positions" in faulty.faults:
        for stack in (faulty.encoder, faulty.decoder):
            stack.embed.pe.zero_()
    for name in heads_of(model):
        kind, layer, _ = name.split(".")
        heads = [int(head.rpartition(".")[2]) - 1 for head in off if head.startswith(f"{kind}.{layer}.")]
        attend = partial(faulty_attention, "scale" in faulty.faults, heads)
        attention_of(faulty, kind, int(layer)).attend = attend
    return faulty


def exact_share(model: FaultyTransformer, src: Tensor, tgt: Tensor, batch_size: int = 500) -> float:
    """src and tgt [n, SEQ_LEN] -> the share of strings answered without one wrong token, free-running.

    Without the causal mask nothing is cached: all positions are computed again at each step, as in the page.
    """
    right, use_cache = 0, "causal" not in model.faults
    for src_part, tgt_part in zip(src.split(batch_size), tgt.split(batch_size), strict=True):
        ids = greedy_decode(model, src_part, tgt.size(1), use_cache)
        ids = F.pad(ids, (0, tgt.size(1) - ids.size(1)), value=PAD_ID)
        right += (ids == tgt_part).all(1).sum().item()
    return right / len(src)


def next_token_weights(model: FaultyTransformer, src: Tensor, tgt: Tensor) -> Tensor:
    """src and tgt [n, SEQ_LEN] -> [layers, h]: how much the decoder's heads look at the token to be written.

    Teacher forcing; at position i that token stands at i + 1, where only a model without its causal mask sees
    it. The mean over all positions that write a digit.
    """
    tgt_in, _ = teacher_forcing(tgt)
    digits = tgt_in[:, 1:] > EOS_ID  # (n, Lt - 1): position i writes one
    with evaluating(model):
        memory, src_mask = model.encode(src)
        _, weights, _ = model.decoder(tgt_in, memory, model.self_mask(tgt_in), src_mask)
    ahead = [each.diagonal(offset=1, dim1=2, dim2=3) for each in weights]  # (n, h, Lt - 1) per layer
    return torch.stack([each.transpose(0, 1)[:, digits].mean(1) for each in ahead])


def forced_share(model: Transformer, src: Tensor, tgt: Tensor) -> float:
    """src and tgt [n, SEQ_LEN] -> the share of right tokens under teacher forcing, PAD not counted."""
    tgt_in, tgt_out = teacher_forcing(tgt)
    with evaluating(model):
        said = model(src, tgt_in)[..., BOS_ID + 1 :].argmax(-1) + BOS_ID + 1  # PAD and BOS are never a target
    return (said == tgt_out)[tgt_out != PAD_ID].float().mean().item()
