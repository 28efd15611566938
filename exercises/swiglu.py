"""Exercise 6: SwiGLU in place of GELU: three matrices, two thirds as wide, so equally many parameters."""

import torch.nn.functional as F
from torch import Tensor, nn

from exercises.common import RECIPE, Exercise, Variant
from model import FeedForward, Transformer
from train import make_model


class SwiGLU(FeedForward):
    """(SiLU(gate) * linear1) -> linear2 -> Dropout at every position: [B, L, d_model] -> [B, L, d_model].

    Source: Shazeer 2020 (GLU Variants Improve Transformer).
    """

    def __init__(self, d_model: int, dff: int, dropout: float = 0.1):
        super().__init__(d_model, dff * 2 // 3, dropout)
        self.gate = nn.Linear(d_model, dff * 2 // 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear2(F.silu(self.gate(x)) * self.linear1(x)))


def swiglu(run: dict) -> Transformer:
    model = make_model(run)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        layer.ffn = SwiGLU(model.settings["d_model"], model.settings["dff"], run["dropout"])
        for linear in (layer.ffn.linear1, layer.ffn.gate, layer.ffn.linear2):  # started as the others are
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
    return model


EXERCISE = Exercise(
    "Exercise 6: SwiGLU at equal parameters",
    (RECIPE._replace(label="GELU, the recipe"), Variant("swiglu", "SwiGLU", swiglu)),
)
