"""Question 5: strings longer than in training, with sinusoidal positions and with randomised ones.

With randomised positions a string of L tokens stands at L rows of a larger table, drawn at random and put in
order: training then sees every row that a longer string will need. Source: Ruoss et al. 2023.
"""

import torch
from torch import Tensor

from exercises.common import RECIPE, ROOM, Exercise, Variant, model_with
from exercises.pictures import draw_by_length
from model import TokenAndPosition, Transformer

RANGE = 64  # rows to draw from: more than twice the longest string's


class RandomisedPositions(TokenAndPosition):
    """ids [B, L], the first at position `start` -> [B, L, d_model].

    In training each string has a draw of its own. In eval mode one draw of ROOM rows serves all strings, so
    that decoding finds the same positions at every step.
    """

    def __init__(self, vocab_size: int, d_model: int, dropout: float = 0.1):
        super().__init__(vocab_size, d_model, RANGE, dropout)
        order = torch.randperm(RANGE, generator=torch.Generator().manual_seed(0))[:ROOM].sort().values
        self.register_buffer("order", order, persistent=False)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        B, L = ids.shape
        if self.training:
            order = torch.rand(B, RANGE).argsort(dim=1)[:, :L].sort(dim=1).values  # (B, L)
        else:
            order = self.order[start : start + L]  # (L,)
        return self.drop(self.embedding(ids) * self.scale + self.position[order])


def randomised_positions(run: dict) -> Transformer:
    model = model_with(run, max_len=ROOM)
    for stack in (model.encoder, model.decoder):
        old = stack.embed
        stack.embed = RandomisedPositions(*old.embedding.weight.shape, run["dropout"])
        stack.embed.load_state_dict(old.state_dict())
    return model


EXERCISE = Exercise(
    "Question 5: longer strings than in training",
    (
        RECIPE._replace(label="sinusoidal"),
        Variant("randomised-positions", "randomised", randomised_positions),
    ),
    draw=lambda results, measured, path: draw_by_length(results, path),
)
