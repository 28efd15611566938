"""Exercise 1: PyTorch's own start of the weights, with and without the factor sqrt(d_model); each part alone.

The recipe starts embeddings at N(0, 1 / d_model) and Linear layers Xavier uniform with zero bias. PyTorch's
own are N(0, 1), and uniform up to fan_in^-0.5 with a bias.
"""

from torch import nn

from exercises.common import RECIPE, Exercise, Variant, embeddings
from model import Transformer
from train import make_model


def started(run: dict, embedding: bool = False, linear: bool = False, scaled: bool = True) -> Transformer:
    """The recipe's model with PyTorch's own start put back for embeddings, for Linear layers, or for both.

    scaled=False also drops the factor sqrt(d_model) behind the embeddings.
    """
    model = make_model(run)
    for module in model.modules():
        if (linear and isinstance(module, nn.Linear)) or (embedding and isinstance(module, nn.Embedding)):
            module.reset_parameters()
    if not scaled:
        for embed in embeddings(model):
            embed.scale = 1.0
    return model


DEFAULT = Variant(
    "default",
    "default start",
    lambda run: started(run, embedding=True, linear=True),
    published="0.166 after 5, 0.604 after 10",
)

EXERCISE = Exercise(
    "Exercise 1: the default initialisation",
    (
        RECIPE,
        DEFAULT,
        Variant(
            "default-unscaled",
            "default start, no √d_model",
            lambda run: started(run, embedding=True, linear=True, scaled=False),
        ),
        Variant("default-embeddings", "default embeddings", lambda run: started(run, embedding=True)),
        Variant(
            "default-embeddings-unscaled",
            "default embeddings, no √d_model",
            lambda run: started(run, embedding=True, scaled=False),
        ),
        Variant("default-linear", "default Linear", lambda run: started(run, linear=True)),
    ),
)
