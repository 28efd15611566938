"""The chapter's exercises and questions: train what is missing, measure, draw.

Run from the project's folder: `python -m exercises.run heads`, or `--list`, `--all`, `--table`.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from exercises import (
    causal_cross,
    dot_products,
    exposure_bias,
    heads,
    initialisation,
    length_generalisation,
    norm,
    positions,
    sorting,
    swiglu,
    timing,
    torch_stacks,
)
from exercises.common import (
    RECIPE,
    Exercise,
    Variant,
    read_json,
    read_seconds,
    result_path,
    run_of,
    train_variant,
    write_json,
)
from exercises.pictures import WHAT, draw_summary, spread
from toolbox.command_line import ArgumentParser, integer, run_script, say
from toolbox.device import add_device_option, choose_device
from toolbox.figures import save_figure
from toolbox.files import file_name, same_file
from train import RECIPES, updates_of

MODULES = (
    initialisation, positions, heads, norm, sorting, swiglu, torch_stacks,
    timing, causal_cross, exposure_bias, dot_products, length_generalisation,
)  # fmt: skip
EXERCISES: dict[str, Exercise] = {module.__name__.rpartition(".")[2]: module.EXERCISE for module in MODULES}
SEEDS = {"chapter": [0], "fast": [0, 1, 2]}
SCORING = 120  # scoring a finished run takes as long as about this many updates
HERE = Path(__file__).resolve().parent
RESULTS, PICTURES = HERE / "results", HERE.parent / "assets"


# -------------------------------------------------------------------------------------------- what to run


class Job(NamedTuple):
    """One training run; `cost` in updates of the recipe's model."""

    variant: Variant
    run: dict

    @property
    def updates(self) -> int:
        return updates_of(self.run)

    @property
    def cost(self) -> float:
        return (self.updates + SCORING) * self.variant.slower

    def path(self, folder: Path) -> Path:
        return result_path(folder, self.variant.name, self.run)


def seeds_of(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Recipes and seeds asked for, the fast recipe first."""
    recipes = ["fast", "chapter"] if args.recipe == "both" else [args.recipe]
    return [(recipe, seed) for recipe in recipes for seed in args.seeds or SEEDS[recipe]]


def jobs_of(args: argparse.Namespace, name: str) -> list[Job]:
    """The training runs of one exercise: every variant with every recipe and seed asked for."""
    return [
        Job(variant, run_of(variant, recipe, seed, args.epochs))
        for recipe, seed in seeds_of(args)
        for variant in EXERCISES[name].variants
    ]


def all_jobs(args: argparse.Namespace) -> list[Job]:
    """Those of all exercises asked for, each once, the cheapest first."""
    jobs = {job.path(args.results): job for name in args.names for job in jobs_of(args, name)}
    return sorted(jobs.values(), key=lambda job: job.cost)


def check_results(args: argparse.Namespace, jobs: list[Job]) -> None:
    """ValueError when a result that is there was made with other options than those asked for."""
    for job in [] if args.again else jobs:
        path = job.path(args.results)
        made = read_json(path)["run"] if path.exists() else job.run
        for name in sorted(job.run.keys() | made.keys()):
            if made.get(name) != job.run.get(name):
                option = "--epochs" if name == "epochs" else f"{name} of the recipe,"
                raise ValueError(
                    f"{option} {job.run.get(name)}: {path.name} was made with {made.get(name)}; "
                    "use --again, or another folder as --results"
                )


def check_own_folders(args: argparse.Namespace) -> None:
    """ValueError when a GPU's results would come to stand among the CPU's, which the README shows."""
    for option, own in (("results", RESULTS), ("pictures", PICTURES)):
        if same_file(getattr(args, option), own):
            raise ValueError(
                f"--device {args.device.type}: --{option} {own.name} holds the CPU's; name another folder"
            )


# ------------------------------------------------------------------------------------------------ running


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def run_all(args: argparse.Namespace, jobs: list[Job]) -> None:
    """Train what is missing, cheapest first; measure and draw an exercise as soon as its last run is there.

    The time left is estimated from the pace so far.
    """
    todo = [job for job in jobs if args.again or not job.path(args.results).exists()]
    say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there already; {torch.get_num_threads()} threads")
    waiting = {name: {job.path(args.results) for job in jobs_of(args, name)} for name in args.names}
    missing = {job.path(args.results) for job in todo}
    measured_on = {v.name for exercise in EXERCISES.values() if exercise.measure for v in exercise.variants}
    start, done, total = time.perf_counter(), 0.0, sum(job.cost for job in todo)
    finish_those_complete(args, waiting, missing)
    for number, job in enumerate(todo, start=1):
        path, spent = job.path(args.results), time.perf_counter() - start
        left = f"; about {minutes(spent / done * (total - done))} left in all" if done else ""
        say(f"[{number}/{len(todo)}] {path.stem}: {job.updates:,} updates{left}")
        train_variant(job.variant, job.run, args.results, args.again, say, args.device)
        say(f"  exact match on unseen strings {read_json(path)['exact_match']:.4f}")
        if job.variant.name not in measured_on:  # nothing needs its weights
            path.with_suffix(".pt").unlink(missing_ok=True)
        done += job.cost
        missing.remove(path)
        finish_those_complete(args, waiting, missing)


def finish_those_complete(args: argparse.Namespace, waiting: dict[str, set], missing: set) -> None:
    """Measure and draw the exercises none of whose runs is missing, and take them off the waiting list."""
    for name in [name for name, paths in waiting.items() if not paths & missing]:
        del waiting[name]
        measure(args, name)
        draw(args, name)


def measure(args: argparse.Namespace, name: str) -> None:
    """What the exercise measures on its trained models, one JSON per recipe and seed."""
    exercise = EXERCISES[name]
    if exercise.measure is None:
        return
    if not exercise.variants:  # no training: once, for no recipe
        path = args.results / f"{name}-measured.json"
        if args.again or not path.exists():
            say(f"{name}: measuring")
            write_json(path, exercise.measure(args.device))
        return
    for recipe, seed in seeds_of(args):
        run = run_of(RECIPE, recipe, seed, args.epochs)
        path = result_path(args.results, f"{name}-measured", run)
        if args.again or not path.exists():
            say(f"{name}: measuring, {recipe} recipe, seed {seed}")
            write_json(path, exercise.measure(partial(load, args, recipe, seed), run))


def load(args: argparse.Namespace, recipe: str, seed: int, variant: Variant) -> torch.nn.Module:
    """The trained model of a variant; trained now if its checkpoint is not there."""
    run = run_of(variant, recipe, seed, args.epochs)
    return train_variant(variant, run, args.results, device=args.device)


# --------------------------------------------------------------------------------------- results and pictures


def results_of(folder: Path, name: str) -> dict[str, dict[str, list[dict]]]:
    """-> label of a variant -> recipe -> its results that are there, by seed."""
    results = {}
    for variant in EXERCISES[name].variants:
        found = {recipe: read_seeds(folder, variant.name, recipe) for recipe in RECIPES}
        results[variant.label] = {recipe: seeds for recipe, seeds in found.items() if seeds}
    return results


def measured_of(folder: Path, name: str) -> dict[str, list[dict]]:
    """-> recipe -> measurements that are there, by seed; recipe "" where nothing is trained."""
    once = folder / f"{name}-measured.json"
    found = {recipe: read_seeds(folder, f"{name}-measured", recipe) for recipe in RECIPES}
    found[""] = [read_json(once)] if once.exists() else []
    return {recipe: seeds for recipe, seeds in found.items() if seeds}


def read_seeds(folder: Path, name: str, recipe: str) -> list[dict]:
    paths = folder.glob(f"{name}.{recipe}.*.json")
    return [read_json(path) for path in sorted(paths, key=lambda path: int(path.stem.rpartition(".")[2]))]


def draw(args: argparse.Namespace, name: str) -> None:
    """The pictures of an exercise from whatever results are there."""
    exercise, results = EXERCISES[name], results_of(args.results, name)
    trained, measured, figures = any(results.values()), measured_of(args.results, name), {}
    if exercise.summary and trained:
        figures[f"exercise_{name}.png"] = draw_summary(results, exercise.title)
    if exercise.draw and (measured or (exercise.measure is None and trained)):
        figures[f"exercise_{name}_detail.png"] = exercise.draw(results, measured)
    for file, figure in figures.items():
        save_figure(figure, args.pictures / file, dpi=150)
        say(f"{name}: drew {file}")


def variants_table(exercise: Exercise, results: dict[str, dict[str, list[dict]]]) -> list[list[str]]:
    """results as from `results_of` -> exact match: the chapter's recipe, seed 0; the fast one, all seeds."""
    published = any(variant.published for variant in exercise.variants)
    rows = [["", "published: after 5 epochs, 10", "after 5 epochs", "at the end", "unseen", "fast recipe"]]
    for variant in exercise.variants:
        found, cells = results[variant.label], ["not run yet"] * 3
        if "chapter" in found:
            first = found["chapter"][0]
            epochs = [f"{row['val_exact_match']:.3f}" for row in first["history"]]
            cells = ["".join(epochs[4:5]), epochs[-1], f"{first['exact_match']:.4f}"]
        fast = [result["exact_match"] for result in found.get("fast", [])]
        cells.append(spread(fast) if fast else "not run yet")
        rows.append([variant.label, variant.published, *cells])
    return rows if published else [[label, *cells] for label, _, *cells in rows]


def tables_of(folder: Path, name: str) -> list[list[list[str]]]:
    """The tables of an exercise for its README, from whatever results are there."""
    exercise, results, measured = EXERCISES[name], results_of(folder, name), measured_of(folder, name)
    tables = [variants_table(exercise, results)] if exercise.variants and exercise.summary else []
    if exercise.tables and (measured or (exercise.measure is None and any(results.values()))):
        tables += exercise.tables(results, measured)
    return tables


def markdown(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]).replace("|  |", "| |")


def say_tables(args: argparse.Namespace) -> None:
    """Print the tables of the README as Markdown; all other figures are in the result files."""
    for name in args.names:
        say(f"## {EXERCISES[name].title} (`{name}`)\n")
        for table in tables_of(args.results, name):
            say(markdown(table) + "\n")
    seconds = read_seconds(args.results)
    for recipe in RECIPES:
        times = [value for stem, value in seconds.items() if f".{recipe}." in stem]
        say(f"training and scoring, {WHAT[recipe]}: {len(times)} runs, {minutes(sum(times))} in all")


def say_list(args: argparse.Namespace) -> None:
    """Print every exercise with its variants and how many of its runs are there."""
    for name in args.names:
        exercise, jobs = EXERCISES[name], jobs_of(args, name)
        there = sum(job.path(args.results).exists() for job in jobs)
        if not jobs:
            there, jobs = len(measured_of(args.results, name)), [None]
        say(f"{name:22} {there:2}/{len(jobs):2} runs  {exercise.title}")
        for variant in exercise.variants:
            say(f"{'':22}   {variant.name}: {variant.label}")


# ------------------------------------------------------------------------------------------- command line


def seed_list(text: str) -> list[int]:
    """An argparse type: "0,1,2" -> [0, 1, 2]."""
    return sorted({integer(0, 2**32 - 1)(part) for part in text.split(",")})


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="exercises.run", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(EXERCISES)}")
    add("--all", action="store_true", help="every exercise and question")
    add("--list", action="store_true", help="show them, and how many of their runs are there")
    add("--table", action="store_true", help="print the results as Markdown")
    add("--recipe", choices=(*RECIPES, "both"), default="both", help="how to train")
    add("--seeds", type=seed_list, help="such as 0,1,2; if not given, 0 for chapter and 0,1,2 for fast")
    add("--epochs", type=integer(1, 1_000_000), help="instead of the recipe's, for a quick look")
    add("--again", action="store_true", help="run finished ones once more")
    add_device_option(parser, default="cpu")
    add("--results", type=file_name, default=RESULTS, help="folder of the JSON files")
    add("--pictures", type=file_name, default=PICTURES, help="folder of the pictures")
    return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[Job]]:
    """-> options and runs, cheapest first. Ends the program on anything unusable."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        for name in args.names:
            if name not in EXERCISES:
                raise ValueError(f"NAME {name}: must be one of {', '.join(EXERCISES)}")
        if args.names and args.all:
            raise ValueError(f"--all: leave out NAME {args.names[0]}, or --all")
        if not (args.names or args.all or args.list or args.table):
            raise ValueError("NAME: give one or more, or --all; --list shows them")
        args.names = list(dict.fromkeys(args.names)) or list(EXERCISES)
        if args.results == RESULTS:
            RESULTS.mkdir(exist_ok=True)
        for option in ("results", "pictures"):
            if not getattr(args, option).is_dir():
                raise ValueError(f"--{option} {getattr(args, option)}: must be a folder that exists")
        args.device = choose_device(args.device)
        if args.device.type != "cpu" and not (args.list or args.table):
            check_own_folders(args)
        jobs = all_jobs(args)
        if not (args.list or args.table):
            check_results(args, jobs)
    except ValueError as error:
        parser.error(str(error))
    return args, jobs


def main(argv: list[str] | None = None) -> int:
    args, jobs = parse_args(argv)
    try:
        if args.list:
            say_list(args)
        elif args.table:
            say_tables(args)
        else:
            run_all(args, jobs)
    except BrokenPipeError:
        raise  # `| head` is no error
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"exercises.run: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("\ninterrupted: what is finished is kept; the same command, without --again, goes on")
        return 130
    return 0


if __name__ == "__main__":
    run_script(main)
