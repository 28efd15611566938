"""The README's commands run, what it links to exists, and CI installs what it says."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    {
        command.strip()
        for block in re.findall(r"```bash\n(.*?)```", README, re.S)
        + re.findall(r"`(python [^`\n]+)`", README)
        for line in block.splitlines()
        for command in line.split("&&")
    }
)
SHORTER = {  # options put behind the README's own, so that a run takes a moment
    "train": ["--epochs", "1", "--samples", "64", "--batch-size", "32", "--warmup", "1"],
    "viz": [],
    "mha_vs_sdpa": ["--batch", "1", "--d-model", "16", "--heads", "2", "--repeats", "2", "--warmup", "1"],
}
LENGTHS = {"mha_vs_sdpa": ["--lengths", "8,16"]}


def test_the_readme_was_read():
    assert "python train.py" in COMMANDS and "python -m pytest" in COMMANDS and len(COMMANDS) >= 8


def script_and_options(command):
    """ "python -m a.b --c 1" or "python a.py --c 1" -> "a.b" or "a", ["--c", "1"]; None for the others."""
    words = shlex.split(command)
    if words[0] != "python" or words[1:] == ["-m", "pytest"]:
        return None
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
    helps = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("train.py", "viz.py", "mha_vs_sdpa.py")
    )
    helps += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    named = set(re.findall(r"`(--[a-z-]+)", README))
    assert len(named) >= 6
    for option in named:
        assert f'"{option}"' in helps, option


def test_links_pictures_and_tests_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    local = [target for target in targets if not target.startswith("http")]
    assert len(local) >= 10
    for target in local:
        assert (ROOT / target).exists(), target
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
    for line in table.splitlines()[6:]:
        named = re.findall(r"`(test_\w+)`", line)
        assert named and all(f"def {name}(" in code for name in named), line


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
