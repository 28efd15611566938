"""The README's commands run, its figures are those of the result files, and what it links to exists."""

import importlib
import json
import re
import shlex
import statistics

import pytest
from processes import ROOT

import train

README = (ROOT / "README.md").read_text(encoding="utf-8")
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    {
        command.strip()
        for block in re.findall(r"```bash\n(.*?)```", README + SPEED, re.S)
        + re.findall(r"`(python [^`\n]+)`", README + SPEED)
        for line in block.splitlines()
        for command in line.split("&&")
    }
)
SHORTER = {  # options put behind the README's own, so that a run takes a moment
    "train": ["--epochs", "1", "--samples", "64", "--batch-size", "32", "--warmup", "1"],
    "viz": [],
    "page.unmasked": [],
    "mha_vs_sdpa": ["--batch", "1", "--d-model", "16", "--heads", "2", "--repeats", "2", "--warmup", "1"],
}
LENGTHS = {"mha_vs_sdpa": ["--lengths", "8,16"]}


def test_the_readme_was_read():
    assert "python train.py" in COMMANDS and "python -m pytest" in COMMANDS and len(COMMANDS) >= 8


def script_and_options(command):
    """ "python -m a.b --c 1" or "python a.py --c 1" -> "a.b" or "a", ["--c", "1"]; None for the others."""
    words = shlex.split(command)
    if words[0] != "python" or words[1:] in (["-m", "pytest"], ["test_model.py"]):
        return None  # tests/test_cli.py runs test_model.py
    name, options = (words[2], words[3:]) if words[1] == "-m" else (words[1].removesuffix(".py"), words[2:])
    return name, options


@pytest.mark.parametrize("command", [c for c in COMMANDS if script_and_options(c)])
def test_command_runs(command, tmp_path, monkeypatch, capsys):
    name, options = script_and_options(command)
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "TEST_SIZE", 20)
    monkeypatch.setattr(train, "VAL_SCORED", 20)
    if name.startswith("benchmarks."):  # minutes long; tests/test_benchmarks.py runs their parts
        measured = []
        for part in ("measure", "ablation"):
            if hasattr(module, part):
                monkeypatch.setattr(module, part, lambda *args, part=part: measured.append(part))
        for section in getattr(module, "MEASURE", {}):
            monkeypatch.setitem(module.MEASURE, section, lambda *args: measured.append("section"))
        monkeypatch.setattr(module, "draw", lambda *args: None, raising=False)
        assert module.main(options) == 0 and measured
        return
    if name == "page.unmasked":
        monkeypatch.setattr(module, "SCORED", 20)
        monkeypatch.setitem(train.RECIPES["fast"], "samples", 64)
        monkeypatch.setitem(train.RECIPES["fast"], "warmup", 1)
    if name == "viz":
        assert train.main(SHORTER["train"]) == 0
    options = [*options, *SHORTER[name]]
    if "--lengths" in options:
        options += LENGTHS[name]
    elif name == "mha_vs_sdpa":
        options += ["--length", "8"]
    assert module.main(options) == 0
    assert capsys.readouterr().err == ""


def test_options_named_in_the_text_exist():
    paths = [*ROOT.glob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "toolbox").glob("*.py")]
    helps = "".join(path.read_text(encoding="utf-8") for path in paths)
    named = set(re.findall(r"`(--[a-z-]+)", README))
    assert len(named) >= 6
    for option in named:
        assert f'"{option}"' in helps, option


def test_code_shown_is_the_models_own():
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.S)
    model = [line for line in (ROOT / "model.py").read_text(encoding="utf-8").splitlines()]
    code = [line for line in model if not line.strip().startswith("#")]
    lines = shown.rstrip().splitlines()
    assert len(lines) >= 4 and lines in [code[i : i + len(lines)] for i in range(len(code))]


def figures(line):
    """A row of a Markdown table -> its numbers."""
    return [float(text.replace(",", "")) for text in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*", line)]


def test_figures_of_the_speed_page_are_those_of_the_result_file():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    step, decoding, recipes = results["step"], results["decoding"], results["recipes"]
    attention = {row["contender"]: row for row in results["attention"] if row["pass"] == "forward"}
    memory = next(row for row in results["memory"] if row["length"] == 512)
    rows = [line for line in SPEED.partition("| What |")[2].splitlines()[2:] if line.startswith("|")]
    expected = []

    def row(digits, ours, theirs, start=()):
        expected.append([*start, round(ours, digits), round(theirs, digits), theirs / ours])

    row(1, statistics.median(run["seconds"] for run in recipes["fast"]), recipes["chapter"]["seconds"])
    for name in ("nn.Transformer", "x-transformers"):
        row(1, step["model.py"]["median_ms"], step[name]["median_ms"])
    for strings, ours, theirs in (
        ("8 strings, 64 tokens", "cache", "no cache"),
        ("8 strings, 64 tokens", "cache, SDPA", "transformers Bart, cache, SDPA"),
        ("8 strings, 256 tokens", "cache", "no cache"),
        ("1,000 strings, 13 tokens", "cache", "no cache"),
    ):
        row(1, decoding[strings][ours]["median_ms"], decoding[strings][theirs]["median_ms"])
    for name in ("SDPA", "tiles"):
        row(1, attention[name]["median_ms"], attention["by hand"]["median_ms"])
    row(0, memory["sdpa"] / 1e6, memory["manual"] / 1e6)
    assert len(rows) == len(expected) == 10
    for line, (ours, theirs, ratio) in zip(rows, expected, strict=True):
        found = figures(line)
        assert any(value == pytest.approx(theirs, abs=0.5) for value in found), line
        assert found[-1] == pytest.approx(ratio, rel=0.005), line
        if len(line.split("|")[2].strip()) > len("model.py"):
            assert any(value == pytest.approx(ours, abs=0.5) for value in found), line
    worst, best = (pick(run["exact_match"] for run in recipes["fast"]) for pick in (min, max))
    updates = recipes["chapter"]["updates"]
    assert f"{worst:.4f} to {best:.4f}" in rows[0] and f"{updates:,} updates" in rows[0]
    assert f"length^{decoding['growth_power']:.2f}" in SPEED and f"{results['seconds']:.0f} s" in SPEED


RUNS = dict(
    re.findall(
        r"```text\n\$ ([^\n]*)\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(encoding="utf-8"), re.S
    )
)  # command -> all it printed


def row(page, start):
    """The cells of the one row of a page's tables that begins so."""
    (found,) = [line for line in page.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.split("|")[1:-1]]


def epochs(output):
    """What train.py printed -> for each epoch the numbers of its line, by name."""
    lines = [line.split() for line in output.splitlines() if line.startswith("epoch ")]
    return [dict(zip(line[2::2], line[3::2], strict=False)) for line in lines]


def unseen(output):
    """What train.py printed -> exact match on all unseen strings, as text."""
    return re.search(r"^  right .* (\S+)$", output, re.M)[1]


def test_output_shown_is_that_of_the_runs():
    shown = re.findall(r"```text\n(.*?)```", README, re.S)
    assert shown == [RUNS["python train.py --recipe fast --out fast.pt"], RUNS["python viz.py"]]


def test_results_beside_the_chapters_are_those_of_the_runs():
    runs = [
        RUNS[f"python train.py{more}"]
        for more in ("", " --seed 1 --out seed1.pt", " --seed 2 --out seed2.pt")
    ]
    histories = [epochs(output) for output in runs]
    assert [len(history) for history in histories] == [10, 10, 10]

    def of_seeds(epoch, name):
        return ", ".join(history[epoch - 1][name] for history in histories)

    assert row(README, "token accuracy, epoch 1")[2].startswith(of_seeds(1, "token_acc"))
    assert row(README, "exact match, epoch 5")[2] == of_seeds(5, "val_exact_match")
    assert row(README, "exact match, epoch 10")[2] == of_seeds(10, "val_exact_match")
    chapters = [re.search(r"^on the first .*: (\S+)$", output, re.M)[1] for output in runs]
    assert row(README, "the same, scored as the chapter does")[1:] == ["0.996", ", ".join(chapters)]
    assert row(README, "exact match on 10,000 unseen strings")[2] == ", ".join(map(unseen, runs))
    seconds = float(re.search(r"trained in (\S+) s", runs[0])[1])
    assert row(README, "time for 10 epochs")[2].startswith(f"{seconds:.0f} s")
    assert f"it reverses {round(10_000 * float(unseen(runs[0]))):,} without a mistake" in " ".join(
        README.split()
    )


def test_attention_table_is_that_of_the_run():
    printed = [line.split() for line in RUNS["python mha_vs_sdpa.py"].splitlines()]
    forward = [line for line in printed if line[:2] == ["1024", "forward"] and line[2] != "+"]
    values = [[float(cell.replace(",", "")) for cell in line[-5:]] for line in forward]
    assert [line[2] for line in forward] == ["by", "tiles", "SDPA"]
    assert row(README, "forward")[1:4] == [f"{median:.0f} ms" for median, *_ in values]
    assert row(README, "peak memory")[1:4] == [f"{peak:.0f} MB" for *_, peak, _ in values]
    printed = RUNS["python mha_vs_sdpa.py --lengths 256,512,1024,2048"]
    grows = re.findall(r"peak memory forward  +(by hand|tiles|SDPA) .*: (\S+)$", printed, re.M)
    by_hand, tiles, sdpa = (power for _, power in grows)
    text = f"memory as L^{by_hand} by hand, L^{tiles} in tiles, L^{sdpa} through SDPA"
    assert text in " ".join(README.split())


def test_ablation_is_that_of_the_run():
    printed = RUNS["python -m benchmarks.recipes --ablation"]
    rows = re.findall(r"^  (\S.*?)  +(0\.\d+)  (0\.\d+)$", printed, re.M)
    assert len(rows) == 8
    for name, *exact in rows:
        assert row(SPEED, name) == [name, *exact]


PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("[a-z]*/README.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        assert target.startswith("http") or (page.parent / target).exists(), target
    assert len(targets) >= 10 or page.parent.name == "docs"


def test_tests_named_in_the_readme_exist():
    pitfalls = (ROOT / "tests" / "test_pitfalls.py").read_text(encoding="utf-8")
    guards = re.findall(r"`(test_\d+_\w+)`", README)
    assert len(guards) == 11
    for guard in guards:
        assert f"def {guard}(" in pitfalls


def test_tests_named_in_the_table_of_cases_exist():
    table = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    code = "".join(
        path.read_text(encoding="utf-8") for path in [ROOT / "test_model.py", *ROOT.glob("tests/*.py")]
    )
    rows = [line for line in table.splitlines() if line.startswith("| B")]
    assert len(rows) >= 56
    for line in rows:
        named = re.findall(r"`(test_\w+)`", line)
        assert named and all(f"def {name}(" in code for name in named), line
    collected = ROOT.parent / "shared" / "docs" / "cases.md"
    if collected.is_file():  # the reports themselves
        heads = re.findall(r"\*\*(B\d+[B\d, ]*)", collected.read_text(encoding="utf-8"))
        cases = set(re.findall(r"\bB\d+\b", " ".join(heads)))
        assert cases == set(re.findall(r"\bB\d+\b", "".join(rows)))


def test_figures_of_the_page_are_those_in_the_page():
    """tests/test_page.py measures them again."""
    page = (ROOT / "docs" / "index.html").read_text(encoding="utf-8")
    model, second = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["models"]
    left, whole = (f"{round(100 * model['shares'][name], 2):g} %" for name in ("causal", ""))
    assert f"{left} of {model['scored']:,} strings instead of {whole}" in " ".join(README.split())
    assert second["forced"] == 1 and second["shares"][""] == 0
    assert f"none of {second['scored']:,} strings on its own" in " ".join(README.split())
    assert f"it reverses {round(model['exact_match'] * model['strings']):,} without" in " ".join(
        README.split()
    )


def test_top_level_holds_the_promised_files_only():
    scripts = {path.name for path in ROOT.glob("*.py")}
    assert scripts == {"model.py", "train.py", "test_model.py", "viz.py", "mha_vs_sdpa.py"}
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert [re.split("[<>=]", line)[0] for line in requirements] == ["torch", "numpy", "matplotlib", "pytest"]


def test_model_code_uses_no_ready_made_attention():
    for name in ("model.py", "train.py", "viz.py", "mha_vs_sdpa.py"):
        code = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"nn\.(Transformer\w*|MultiheadAttention)\(", code), name


def test_tf32_has_one_switch():
    """Mixing it with the older `allow_tf32` flags is an error in new versions of PyTorch."""
    for path in [*ROOT.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        code = path.read_text(encoding="utf-8")
        assert "allow_tf32" not in code and "fp32_precision" not in code, path


# ------------------------------------------------------------------------------------------ the Chinese page

CHINESE = (ROOT / "docs" / "README.zh-CN.md").read_text(encoding="utf-8")


def numbers(text):
    """All numbers in a text's prose, tables and pictures, sorted; code, links and names in `` left out."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<img[^>]*>", " ", text, flags=re.S)
    return sorted(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?", text.replace("、", ", ")))


def targets(text, folder):
    """Where its links and pictures lead to, sorted, but for those to the page in the other language."""
    found = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    local = [t if t.startswith("http") else str((folder / t).resolve()) for t in found]
    return sorted(t for t in local if not t.endswith(("README.zh-CN.md", str(ROOT / "README.md"))))


def test_the_chinese_page_has_the_same_figures_commands_and_links():
    code = re.compile(r"```\w*\n.*?```", re.S)
    assert code.findall(CHINESE) == code.findall(README)
    assert sorted(set(re.findall(r"`([^`\n]+)`", code.sub("", CHINESE)))) == sorted(
        set(re.findall(r"`([^`\n]+)`", code.sub("", README)))
    )
    assert numbers(CHINESE) == numbers(README)
    assert targets(CHINESE, ROOT / "docs") == targets(README, ROOT)
    assert CHINESE.count("\n## ") == README.count("\n## ") and CHINESE.count("\n|") == README.count("\n|")
    assert "](docs/README.zh-CN.md)" in README[:200] and "](../README.md)" in CHINESE[:200]
