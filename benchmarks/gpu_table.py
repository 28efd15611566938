"""What `benchmarks.gpu_check` prints at the end: the README's two tables with this GPU's figures in them."""

import re


def cell(values: list, form: str) -> str:
    """Numbers in one cell; what was not measured is said."""
    return ", ".join("not measured" if value is None else form.format(value) for value in values)


def attention_table(results: dict) -> list[list[str]]:
    """The README's "By hand against SDPA"."""
    rows = results.get("attention", {}).get("rows", [])
    forward = {row["contender"]: row for row in rows if row["length"] == 1024 and row["pass"] == "forward"}
    table = [["causal self-attention, B=8, L=1024, d_model=512, h=8", "by hand", "in tiles", "SDPA",
              "published: by hand", "published: SDPA"]]  # fmt: skip
    for title, key, unit, form, published in (
        ("forward", "median_ms", 1, "{:.2f} ms", ["2.97 ms", "0.25 ms"]),
        ("peak memory", "peak_bytes", 1e6, "{:.0f} MB", ["712 MB", "79 MB"]),
    ):
        values = [forward.get(name, {}).get(key) for name in ("by hand", "tiles", "SDPA")]
        cells = [cell([value and value / unit], form) for value in values]
        table.append([title, *cells, *published])
    return table


def results_table(results: dict) -> list[list[str]]:
    """The README's "Results beside the chapter's"."""
    runs = [run for run in results.get("recipes", {}).get("runs", []) if run["recipe"] == "chapter"]
    made = results.get("versions", {})
    where = f"{made.get('device')}, {made.get('precision')}, PyTorch {made.get('torch')}"
    seeds = ", ".join(str(run["seed"]) for run in runs)
    table = [["", "published (RTX 4090, bf16, PyTorch 2.7)", f"here, seeds {seeds} ({where})"]]

    def of_epoch(number: int, name: str) -> list:
        found = [run["history"][number - 1 : number] for run in runs] or [[]]
        return [epochs[0][name] if epochs else None for epochs in found]

    scored = [re.search(r"^on the first .*: (\S+)$", run["output"], re.M) for run in runs]
    chapters = [found and found[1] for found in scored] or [None]
    seconds = [sum(epoch["seconds"] for epoch in run["history"]) for run in runs] or [None]
    for title, published, values, form in (
        ("token accuracy, epoch 1", "0.795", of_epoch(1, "token_acc"), "{:.3f}"),
        ("exact match, epoch 5", "0.964", of_epoch(5, "val_exact_match"), "{:.3f}"),
        ("exact match, epoch 10", "0.996", of_epoch(10, "val_exact_match"), "{:.3f}"),
        ("the same, scored as the chapter does", "0.996", chapters, "{}"),
        ("exact match on 10,000 unseen strings", "", [r["unseen"] for r in runs] or [None], "{:.4f}"),
        ("time for 10 epochs", "17 s", seconds, "{:.0f} s"),
    ):
        table.append([title, published, cell(values, form)])
    return table


def markdown(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]).replace("|  |", "| |")


def report(results: dict) -> str:
    """Both tables, then how many claims hold, and every one that does not, every part that broke."""
    lines = [markdown(attention_table(results)), "", markdown(results_table(results)), ""]
    claims = [(part, *claim) for part, found in results.items() for claim in found.get("claims", {}).items()]
    lines.append(f"{sum(holds for *_, holds in claims)} of {len(claims)} claims hold")
    lines += [f"REFUTED   {part}: {text}" for part, text, holds in claims if not holds]
    for word, key in (("BROKE    ", "error"), ("LEFT OUT ", "left_out")):
        lines += [f"{word} {part}: {found[key]}" for part, found in results.items() if key in found]
    return "\n".join(lines)
