"""Exercise 5: sort the digits, smallest first, instead of reversing them. Where does cross-attention look?"""

import torch
from torch import Tensor

from exercises.common import RECIPE, Exercise, Variant, device_of, make_data
from exercises.pictures import WHAT, prefer
from model import attention_weights
from toolbox.figures import new_figure
from toolbox.heatmap import DECODER_ROW
from train import EOS_ID, MAX_LEN, NUM_OFFSET, evaluating, teacher_forcing
from viz import attention_maps

DEMOS = ("7309518", "5250259")  # all digits different; digits that occur twice and three times
LOOKS = ("the digit it writes", "the digit it has just read", "a smaller digit", "a larger digit", "<eos>")


def sorted_answer(src: Tensor, tgt: Tensor) -> Tensor:
    """src [n, Ls], tgt [n, Ls] or [n, Ls + 1]: <bos> digits <eos> -> tgt with its digits in order."""
    ordered = src.where(src >= NUM_OFFSET, 99).sort(1).values
    answer, room = tgt.clone(), min(src.size(1), tgt.size(1) - 1)
    body = tgt[:, 1 : room + 1]
    answer[:, 1 : room + 1] = body.where(body < NUM_OFFSET, ordered[:, :room])
    return answer


SORT = Variant("sort", "sorting", answer=sorted_answer)


def where_it_looks(model: torch.nn.Module, src: Tensor, tgt: Tensor) -> list[dict]:
    """src, tgt [n, L] -> for each layer the mean cross weight on each of LOOKS; they add up to 1.

    Mean of the heads, over rows that write a digit. `one_copy`: where the digit occurs several times,
    the largest weight as a share of that on all copies; `antidiagonal`: the weight on the opposite place.
    """
    src, tgt = (ids.to(device_of(model)) for ids in (src, tgt))
    tgt_in, tgt_out = teacher_forcing(tgt)
    with evaluating(model):
        layers = attention_weights(model, src, tgt_in)["cross"]
    written, read, seen = tgt_out[:, :, None], tgt_in[:, :, None], src[:, None, :]
    digit = seen >= NUM_OFFSET
    kinds = {LOOKS[0]: seen == written, LOOKS[1]: digit & (seen == read) & (seen != written)}
    rest = digit & ~kinds[LOOKS[0]] & ~kinds[LOOKS[1]]
    kinds |= {LOOKS[2]: rest & (seen < written), LOOKS[3]: rest & (seen > written), LOOKS[4]: seen == EOS_ID}
    rows = tgt_out >= NUM_OFFSET
    copies = kinds[LOOKS[0]].sum(-1)
    length = (src >= NUM_OFFSET).sum(1)[:, None]
    opposite = (length - 1 - torch.arange(tgt_out.size(1), device=src.device)).clamp(min=0)[:, :, None]
    results = []
    for weights in layers:
        mean = weights.mean(1)  # (B, Lt, Ls)
        found = {name: (mean * kind).sum(-1)[rows].mean().item() for name, kind in kinds.items()}
        right = mean * kinds[LOOKS[0]]
        several = rows & (copies > 1)
        found["one_copy"] = (right.max(-1).values / right.sum(-1))[several].mean().item()
        found["antidiagonal"] = mean.gather(2, opposite)[..., 0][rows].mean().item()
        results.append(found)
    return results


def measure(load, run: dict) -> dict:
    """Both models: where they look, and, for sorting, the map of the last layer on two strings."""
    models = {variant.name: load(variant) for variant in EXERCISE.variants}
    looks = {}
    for variant in EXERCISE.variants:
        looks[variant.label] = where_it_looks(models[variant.name], *make_data(variant, run).val)
    maps = []
    for digits in DEMOS:
        weights, rows, columns, output = attention_maps(models["sort"], digits)
        mean = weights[-1].mean(0).tolist()
        maps.append(dict(digits=digits, output=output, rows=rows, columns=columns, weights=mean))
    return dict(looks=looks, maps=maps)


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """Where the last layer of the first seed's models looks."""
    rows = [["", *LOOKS[:-1], "`<eos>`", "largest of several copies, as a share of all", "anti-diagonal"]]
    for variant in EXERCISE.variants:
        for recipe, seeds in measured.items():
            found = seeds[0]["looks"][variant.label][-1]
            values = [found[name] for name in (*LOOKS, "one_copy", "antidiagonal")]
            rows.append([f"{variant.label}, {WHAT[recipe]}", *(f"{value:.3f}" for value in values)])
    return [rows]


def draw(results: dict, measured: dict):
    found, recipe = prefer(measured)
    maps = found["maps"]
    figure = new_figure(10.0, 4.8)
    for axes, one in zip(figure.subplots(1, len(maps)), maps, strict=True):
        image = axes.imshow(one["weights"], cmap="Blues", vmin=0.0, vmax=1.0)
        axes.set_xticks(range(len(one["columns"])), one["columns"])
        axes.set_yticks(range(len(one["rows"])), one["rows"])
        axes.set(
            xlabel="source token", ylabel=DECODER_ROW, title=f"{one['digits']} → {one['output'][:MAX_LEN]}"
        )
        for row, values in enumerate(one["weights"]):
            for column, value in enumerate(values):
                colour = "white" if value > 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, size=8)
    figure.colorbar(image, ax=figure.axes, label="attention weight", aspect=25)
    figure.suptitle(f"Sorting: cross-attention of the last layer, mean of heads; {recipe}", size=11)
    return figure


EXERCISE = Exercise(
    "Exercise 5: sorting",
    (RECIPE._replace(label="reversing"), SORT),
    measure=measure,
    tables=tables,
    draw=draw,
)
