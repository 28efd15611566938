"""Exercise 2: no positions at all; beyond the chapter, learned and rotary ones in place of the sinusoids.

Every variant is scored on the lengths of training, 3 to 12, and on 13 to 24, which none has seen.
"""

import torch
from torch import Tensor, nn

from exercises.common import RECIPE, ROOM, Exercise, Variant, embeddings, model_with
from exercises.pictures import WHAT, draw_by_length, exact_by_length, spread
from model import Transformer, scaled_dot_product_attention


def no_positions(run: dict) -> Transformer:
    model = model_with(run, max_len=ROOM)
    for embed in embeddings(model):
        embed.pe.zero_()
    return model


def learned_positions(run: dict) -> Transformer:
    """A trained table, random at first, its entries as large as a sinusoid's: 2^-0.5 root mean square."""
    model = model_with(run, max_len=ROOM)
    for embed in embeddings(model):
        start = torch.randn(embed.pe.shape) * 2**-0.5
        del embed.pe  # the buffer
        embed.pe = nn.Parameter(start)
    return model


def rotate(x: Tensor, start: int) -> Tensor:
    """x [B, h, L, d_k] at positions start, start + 1, ... -> [B, h, L, d_k], each rotated by its position.

    The pair (i, i + d_k / 2) turns by position / 10000^(2i / d_k), so that q·k depends on the distance alone.
    Source: Su et al. 2021 (RoFormer), section 3.2.
    """
    half = x.size(-1) // 2
    position, pair = (torch.arange(n, device=x.device) for n in (x.size(2), half))
    angle = (start + position)[:, None] * 10000.0 ** (-pair / half)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def rotary_attention(q, k, v, mask=None, drop=None) -> tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` of rotated queries and keys.

    The queries are the last Lq of the Lk tokens: all of them, unless earlier keys come from the KV cache.
    """
    return scaled_dot_product_attention(rotate(q, k.size(2) - q.size(2)), rotate(k, 0), v, mask, drop)


def rotary_positions(run: dict) -> Transformer:
    """Rotary self-attention; not cross-attention, whose queries and keys are positions of two sequences."""
    model = no_positions(run)
    for layer in model.encoder.layers:
        layer.mha.attend = rotary_attention
    for layer in model.decoder.layers:
        layer.self_mha.attend = rotary_attention
    return model


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """Exact match one and two digits beyond the lengths of training."""
    recipes = [recipe for recipe in WHAT if all(recipe in found for found in results.values())]
    rows = [["", *(f"{WHAT[recipe]}: {n} digits" for recipe in recipes for n in (13, 14))]]
    for label, found in results.items():
        longer = [[run["longer"][n] for run in found[recipe]] for recipe in recipes for n in ("13", "14")]
        rows.append([label, *(spread(values, 3) for values in longer)])
    return [rows]


EXERCISE = Exercise(
    "Exercise 2: without positions; learned and rotary ones",
    (
        RECIPE._replace(label="sinusoidal"),
        Variant("no-positions", "none", no_positions),
        Variant("learned-positions", "learned", learned_positions),
        Variant("rotary-positions", "rotary", rotary_positions),
    ),
    tables=tables,
    draw=lambda results, measured: draw_by_length({"exact match": exact_by_length(results)}),
)
