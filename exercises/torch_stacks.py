"""Exercise 7: `nn.Transformer` in place of the hand-written stacks, with the same weights at the start."""

import torch
from torch import Tensor

from benchmarks.torch_twin import TorchTransformer, copy_weights, model_pairs
from exercises.common import RECIPE, Exercise, Variant, free_tokens, make_data
from model import PAD_ID, Transformer, make_causal_mask
from train import evaluating, loss_sum, make_model, teacher_forcing


class TorchStacks(TorchTransformer):
    """The twin of benchmarks/torch_twin.py with `encode` and `decode`, as train.greedy_decode wants them.

    nn.Transformer keeps no keys and values: `cache` holds the tokens so far, and all go through again.
    """

    def __init__(self, settings: dict):
        super().__init__(settings)
        self.settings = dict(settings)

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, Ls] -> memory [B, Ls, d_model], padding [B, Ls], True at PAD."""
        padding = src == PAD_ID
        return self.core.encoder(self.src_embed(src), src_key_padding_mask=padding), padding

    def decode(self, tgt_in: Tensor, memory: Tensor, padding: Tensor, cache=None) -> tuple[Tensor, list]:
        """tgt_in [B, Lt], the new tokens, and what `encode` returned -> logits [B, Lt, tgt_vocab], []."""
        cache = {} if cache is None else cache
        cache["tgt"] = tgt = torch.cat([cache.get("tgt", tgt_in[:, :0]), tgt_in], dim=1)
        x = self.core.decoder(
            self.tgt_embed(tgt),
            memory,
            tgt_mask=make_causal_mask(tgt.size(1), tgt.device)[0, 0],
            tgt_key_padding_mask=tgt == PAD_ID,
            memory_key_padding_mask=padding,
        )
        return self.out(x[:, -tgt_in.size(1) :]), []


def twin(ours: Transformer) -> TorchStacks:
    """The same model, weight by weight."""
    theirs = TorchStacks(ours.settings)
    copy_weights(model_pairs(ours, theirs))
    return theirs


def gradients(model: torch.nn.Module, src: Tensor, tgt: Tensor) -> None:
    """Leave the gradients of the mean loss in the parameters, dropout off."""
    tgt_in, tgt_out = teacher_forcing(tgt)
    model.eval().zero_grad()
    (loss_sum(model(src, tgt_in), tgt_out) / (tgt_out != PAD_ID).sum()).backward()


def measure(load, run: dict) -> dict:
    """How far the twin of the trained model is from it: outputs, gradients, answers."""
    ours = load(RECIPE)
    theirs = twin(ours)
    src, tgt = make_data(RECIPE, run).val
    tgt_in = teacher_forcing(tgt)[0]
    with evaluating(ours), evaluating(theirs):
        output = (ours(src, tgt_in) - theirs(src, tgt_in))[tgt_in != PAD_ID].abs().max().item()
    gradients(ours, src, tgt)
    gradients(theirs, src, tgt)
    pairs = model_pairs(ours, theirs)
    gradient = max((a.grad - b.grad[rows]).abs().max().item() for a, b, rows in pairs)
    same = (free_tokens(ours, src, tgt) == free_tokens(theirs, src, tgt)).all(1).float().mean().item()
    return dict(output_difference=output, gradient_difference=gradient, same_answers=same)


def table(measured: dict) -> list[list]:
    names = ["largest difference of outputs", "of gradients", "share of equal answers"]
    return [names, [f"{value:.1e}" if value < 1e-3 else value for value in measured.values()]]


EXERCISE = Exercise(
    "Exercise 7: nn.Transformer in place of the stacks",
    (
        RECIPE._replace(label="model.py, the recipe"),
        Variant("torch-stacks", "nn.Transformer", lambda run: twin(make_model(run)), slower=1.4),
    ),
    measure=measure,
    table=table,
)
