"""Exercise 2: no positions at all; beyond the chapter, learned and rotary ones in place of the sinusoids.

Every variant is scored on the lengths of training, 3 to 12, and on 13 to 24, which none has seen.
"""

import torch
from torch import Tensor, nn

from exercises.common import RECIPE, ROOM, Exercise, Variant, embeddings, model_with
from exercises.pictures import draw_by_length, exact_by_length
from model import MultiHeadAttention, Transformer, scaled_dot_product_attention


def no_positions(run: dict) -> Transformer:
    model = model_with(run, max_len=ROOM)
    for embed in embeddings(model):
        embed.position.zero_()
    return model


def learned_positions(run: dict) -> Transformer:
    """A trained table, random at first, its entries as large as a sinusoid's: 2^-0.5 root mean square."""
    model = model_with(run, max_len=ROOM)
    for embed in embeddings(model):
        start = torch.randn(embed.position.shape) * 2**-0.5
        del embed.position
        embed.position = nn.Parameter(start)
    return model


def turn(x: Tensor, start: int) -> Tensor:
    """x [B, h, L, d_k] at positions start, start + 1, ... -> [B, h, L, d_k], turned by them.

    The pair (i, i + d_k / 2) turns by position / 10000^(2i / d_k), so that q·k depends on the distance alone.
    Source: Su et al. 2021 (RoFormer), section 3.2.
    """
    half = x.size(-1) // 2
    angle = torch.arange(start, start + x.size(2))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class RotaryAttention(MultiHeadAttention):
    """Self-attention on turned queries and keys; arguments and results as in MultiHeadAttention.

    The queries are the last Lq of the Lk tokens, all of them unless earlier keys are in the cache.
    """

    def forward(self, query, key, value, mask=None, cache=None):
        q = self._split(self.W_q(query))
        k, v = self._keys_values(key, value, {} if cache is None else cache)
        q, k = turn(q, k.size(2) - q.size(2)), turn(k, 0)
        context, weights = scaled_dot_product_attention(q, k, v, mask, self.drop)
        return self.W_o(self._merge(context)), weights


def rotary_positions(run: dict) -> Transformer:
    """Both self-attentions turn; cross-attention does not, as its two sides count different things."""
    model = no_positions(run)
    places = [(layer, "mha") for layer in model.encoder.layers]
    places += [(layer, "self_mha") for layer in model.decoder.layers]
    for layer, name in places:
        old = getattr(layer, name)
        new = RotaryAttention(model.settings["d_model"], old.num_heads, run["dropout"])
        new.load_state_dict(old.state_dict())
        setattr(layer, name, new)
    return model


EXERCISE = Exercise(
    "Exercise 2: without positions; learned and rotary ones",
    (
        RECIPE._replace(label="sinusoidal"),
        Variant("no-positions", "none", no_positions),
        Variant("learned-positions", "learned", learned_positions),
        Variant("rotary-positions", "rotary", rotary_positions),
    ),
    draw=lambda results, measured, path: draw_by_length({"exact match": exact_by_length(results)}, path),
)
