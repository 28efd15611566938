"""What the pictures and tables of several exercises share.

Line styles and markers tell the lines apart in grey as well.
"""

from toolbox.figures import new_figure
from train import MAX_LEN

STYLES = [
    dict(color=colour, linestyle=line, marker=marker, markersize=5, markerfacecolor=face)
    for colour, line, marker, face in (
        ("#1f4e79", "-", "o", None),
        ("#d1701f", "--", "s", None),
        ("#3a8f5c", "-.", "^", None),
        ("#8c4f9f", ":", "D", None),
        ("#1f4e79", "--", "v", "white"),
        ("#d1701f", "-.", "P", "white"),
        ("#3a8f5c", ":", "X", "white"),
        ("#8c4f9f", "-", "o", "white"),
    )
]
WHAT = {"chapter": "chapter's recipe", "fast": "fast recipe"}


def prefer(measured: dict[str, list[dict]]) -> tuple[dict, str]:
    """recipe -> measurements, one per seed -> those of the first seed, of the chapter's recipe if it was run.

    Beside them the recipe's name, for the picture.
    """
    recipe = next(recipe for recipe in WHAT if measured.get(recipe))
    return measured[recipe][0], WHAT[recipe]


def spread(values: list[float], digits: int = 4) -> str:
    """-> "mean (lowest to highest)", or the mean alone where all are the same to that many digits."""
    low, mean, high = (f"{x:.{digits}f}" for x in (min(values), sum(values) / len(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def apart(values: list[float], gap: float) -> list[float]:
    """The same heights moved up as little as puts them `gap` apart, and back down below 1 if need be."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = list(values)
    for low, high in zip(order, order[1:], strict=False):
        places[high] = max(places[high], places[low] + gap)
    top = 1.02
    for i in reversed(order):
        places[i] = min(places[i], top)
        top = places[i] - gap
    return places


def draw_summary(results: dict[str, dict[str, list[dict]]], title: str):
    """results: label -> recipe -> one per seed. Left, chapter's recipe: validation exact match by epoch.

    Right, fast recipe: exact match on unseen strings, a mark for every seed.
    """
    recipes = [recipe for recipe in WHAT if any(recipe in found for found in results.values())]
    figure = new_figure(11.0 if len(recipes) == 2 else 6.5, 4.4)
    panels = figure.subplots(1, len(recipes), squeeze=False)[0]
    for axes, recipe in zip(panels, recipes, strict=True):
        lines = {label: found[recipe] for label, found in results.items() if recipe in found}
        axes.set_title(WHAT[recipe], size=10, loc="left")
        (draw_epochs if recipe == "chapter" else draw_seeds)(axes, lines)
    figure.suptitle(title, size=11)
    return figure


def draw_epochs(axes, lines: dict[str, list[dict]]) -> None:
    """label -> results: exact match by epoch, seed 0 in full strength, its label at the end of the line."""
    last = 1
    for (_, seeds), style in zip(lines.items(), STYLES, strict=False):
        for number, result in enumerate(seeds):
            epochs = [row["epoch"] for row in result["history"]]
            exact = [row["val_exact_match"] for row in result["history"]]
            axes.plot(epochs, exact, alpha=1.0 if number == 0 else 0.35, clip_on=False, **style)
            last = max(last, *epochs)
    rows = [seeds[0]["history"][-1] for seeds in lines.values()]
    places = apart([row["val_exact_match"] for row in rows], 0.05)
    for label, row, place, style in zip(lines, rows, places, STYLES, strict=False):
        arrow = dict(arrowstyle="-", color="0.6", lw=0.6, relpos=(0, 0.5))
        axes.annotate(
            label,
            (row["epoch"], row["val_exact_match"]),
            (last * 1.06, place),
            va="center",
            size=8.5,
            color=style["color"],
            arrowprops=arrow,
            annotation_clip=False,
        )
    axes.set(xlabel="epoch", ylabel="exact match, validation", ylim=(-0.02, 1.04), xlim=(0.7, last))
    axes.set_xticks(range(1, last + 1))
    axes.grid(alpha=0.3)


def draw_seeds(axes, lines: dict[str, list[dict]]) -> None:
    """label -> results: a row for each, a mark for each seed, in figures the mean and the range.

    Where all are near 1 the axis begins near the lowest, so that the spread can be seen.
    """
    lowest = min(result["exact_match"] for seeds in lines.values() for result in seeds)
    left, right = (-0.02, 1.02) if lowest < 0.9 else (1 - 1.5 * (1 - lowest) - 1e-3, 1 + 0.1 * (1 - lowest))
    for row, (seeds, style) in enumerate(zip(lines.values(), STYLES, strict=False)):
        exact = [result["exact_match"] for result in seeds]
        marks = dict(style, linestyle="none", clip_on=False)
        axes.plot(exact, [row] * len(exact), **marks)
        mean = sum(exact) / len(exact)
        side = "right" if mean > (left + right) / 2 else "left"
        axes.annotate(spread(exact), (mean, row), (0, 7), textcoords="offset points", ha=side, size=8)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set(xlabel="exact match, unseen strings", xlim=(left, right), ylim=(len(lines) - 0.5, -0.6))
    axes.grid(axis="x", alpha=0.3)


def exact_by_length(results: dict[str, dict[str, list[dict]]]) -> dict[str, dict[str, list[dict]]]:
    """results as in draw_summary -> recipe -> label -> one curve per seed: length -> exact match."""
    return {
        recipe: {
            label: [result["by_length"] | result["longer"] for result in found[recipe]]
            for label, found in results.items()
            if recipe in found
        }
        for recipe in WHAT
        if any(recipe in found for found in results.values())
    }


def draw_by_length(rows: dict[str, dict[str, dict[str, list[dict]]]]):
    """rows: what is drawn -> recipe -> label -> one curve per seed, length -> share.

    A row of panels for each, a panel for each recipe: the mean of the seeds in a band lowest to highest.
    """
    recipes = list(dict.fromkeys(recipe for curves in rows.values() for recipe in curves))
    figure = new_figure(5.5 * len(recipes), 0.6 + 3.4 * len(rows))
    panels = figure.subplots(len(rows), len(recipes), squeeze=False)
    for (what, found), line in zip(rows.items(), panels, strict=True):
        for axes, recipe in zip(line, recipes, strict=True):
            for (label, curves), style in zip(found.get(recipe, {}).items(), STYLES, strict=False):
                lengths = sorted(set.intersection(*map(set, curves)), key=int)
                columns = [[curve[n] for curve in curves] for n in lengths]
                digits = [int(n) for n in lengths]
                axes.plot(digits, [sum(column) / len(column) for column in columns], label=label, **style)
                low, high = [min(column) for column in columns], [max(column) for column in columns]
                axes.fill_between(digits, low, high, color=style["color"], alpha=0.15, lw=0)
            axes.axvline(MAX_LEN + 0.5, color="0.5", lw=0.8)
            axes.text(MAX_LEN + 0.7, 1.03, "never seen", size=8, color="0.4")
            axes.set(xlabel="digits", ylabel=what, ylim=(-0.02, 1.08))
            axes.set_title(WHAT[recipe], size=10, loc="left")
            axes.legend(fontsize=8)
    return figure
