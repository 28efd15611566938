"""The scripts as a person runs them: other folders, pipes, bad options, strict warnings."""

import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest
from processes import ENCODING, ROOT, STRICT, own_warnings, run_python

SCRIPTS = ["train.py", "viz.py", "mha_vs_sdpa.py"]
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("[a-z]*/*.py")))
    if path.parent.name != "tests" and "run_script(main)" in path.read_text(encoding="utf-8")
]


def assert_one_line_error(process, *words):
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.count("\n") == 1 and "Traceback" not in process.stderr
    for word in words:
        assert word in process.stderr


def test_warnings_are_judged_by_the_file_that_warns(tmp_path):
    """A newcomer's environment lies inside the checkout: its warnings are the library's all the same."""
    code = "import warnings\nwarnings.warn('old', DeprecationWarning)\n"
    for name in ("train.py", "toolbox/a.py", "env/lib/python3.11/site-packages/torch/b.py", ".venv/lib/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
        process = run_python("-W", "always", tmp_path / name, folder=tmp_path)
        assert "DeprecationWarning: old" in process.stderr
        ours = [str(tmp_path / name)] if name in ("train.py", "toolbox/a.py") else []
        assert own_warnings(process.stderr, tmp_path) == ours


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_every_default(script, tmp_path):
    process = run_python(ROOT / script, "--help", folder=tmp_path)
    assert process.returncode == 0 and process.stderr == ""
    options = [line for line in process.stdout.splitlines() if line.strip().startswith("--")]
    assert len(options) >= 8 and process.stdout.count("(default:") >= 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option(name, capsys):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    with pytest.raises(SystemExit):
        module.main(["--help"])
    options = re.split(r"\n(?=  -)", capsys.readouterr().out.partition("options:\n")[2])
    assert len(options) >= 2  # --help itself and another
    assert [option for option in options if not re.search(r"\S( {2,}|\n +)\S", option.strip())] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_without_docstrings(script, tmp_path):
    """`python -OO` drops them, and the first paragraph of one is what --help describes the script with."""
    process = run_python("-OO", ROOT / script, "--help", folder=tmp_path)
    assert process.returncode == 0 and process.stderr == "" and "--device" in process.stdout


def test_importing_does_nothing(tmp_path):
    modules = (
        "model, train, viz, mha_vs_sdpa, benchmarks.run, benchmarks.peers, page.unmasked, translation.decode"
    )
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import toolbox.measure, {modules}"
    process = run_python(*STRICT, *ENCODING, "-c", code, folder=tmp_path)
    assert (process.returncode, process.stdout, own_warnings(process.stderr)) == (0, "", [])
    assert list(tmp_path.iterdir()) == []


def test_train_then_viz_from_any_folder_under_strict_warnings(tmp_path):
    process = run_python(
        *STRICT, *ENCODING, ROOT / "train.py", "--epochs", "1", "--samples", "128", folder=tmp_path
    )
    assert process.returncode == 0 and not own_warnings(process.stderr)
    lines = process.stdout.splitlines()
    assert lines[0].startswith("device ") and "931,213 parameters" in lines[1]
    assert "\r" not in process.stdout and "\x1b" not in process.stdout  # a pipe gets lines only
    epoch = next(line for line in lines if line.startswith("epoch"))
    for name in ("loss", "token_acc", "val_exact_match", "lr 8.39e-06", " s"):
        assert name in epoch
    assert any("10,000 unseen strings" in line for line in lines)
    assert lines[-2].startswith("demo: 7 3 0 9 5 -> ") and lines[-1] == "wrote reverse_transformer.pt"
    process = run_python(*STRICT, *ENCODING, ROOT / "viz.py", folder=tmp_path)
    assert process.returncode == 0 and not own_warnings(process.stderr)
    assert {p.name for p in tmp_path.iterdir()} == {"reverse_transformer.pt", "cross_attn.png"}


@pytest.mark.parametrize(
    "options, words",
    [
        (["--epochs", "0"], ["--epochs", "'0'", "at least 1"]),
        (["--epochs", "ten"], ["--epochs", "'ten'"]),
        (["--samples", "100000000"], ["--samples", "10000000"]),
        (["--seed", "-1"], ["--seed", "at least 0"]),
        (["--batch-size", "65", "--samples", "64"], ["--batch-size 65", "--samples 64"]),
        (["--precision", "fp16"], ["--precision", "fp16", "bf16"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--out", "no/such/folder.pt"], ["--out no/such/folder.pt", "folder"]),
        (["--out", "."], ["--out ."]),
        (["--resume"], ["reverse_transformer.pt", "no such checkpoint"]),
        (["--epoch", "3"], ["--epoch"]),
    ],
)
def test_train_refuses_in_one_line_and_writes_nothing(options, words, tmp_path, capsys, monkeypatch):
    import train

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        train.main(options)
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("train.py: error: ") and all(word in output.err for word in words)
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_line_in_a_real_process(tmp_path):
    (tmp_path / "reverse_transformer.pt").write_text("not a checkpoint", encoding="utf-8")
    assert_one_line_error(
        run_python(ROOT / "train.py", "--resume", folder=tmp_path), "reverse_transformer.pt"
    )
    assert_one_line_error(
        run_python(ROOT / "viz.py", "--checkpoint", "no.pt", folder=tmp_path), "no.pt", "run train.py"
    )
    assert_one_line_error(run_python(ROOT / "mha_vs_sdpa.py", "--heads", "3", folder=tmp_path), "--heads 3")
    assert (tmp_path / "reverse_transformer.pt").read_text(encoding="utf-8") == "not a checkpoint"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    process = run_python(ROOT / "train.py", "--out", tmp_path / "a.pt", "--samples", "64", folder=ROOT)
    assert (
        process.returncode == 2 and "cannot be written" in process.stderr and process.stderr.count("\n") == 1
    )


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_pipe_ends_quietly(tmp_path):
    command = f"'{sys.executable}' '{ROOT / 'train.py'}' --epochs 2 --samples 64 | head -n 1"
    process = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.stdout.startswith("device ") and process.stdout.count("\n") == 1 and process.stderr == ""
    assert not list(tmp_path.glob("*.tmp"))


def test_the_chapters_own_test_command_reports_and_can_fail(tmp_path):
    """`python test_model.py`, from another folder; then on a decoder blind to its own token."""
    process = run_python(ROOT / "test_model.py", folder=tmp_path)
    assert process.returncode == 0 and " passed" in process.stdout
    for name in ("test_model.py", "model.py", "pyproject.toml"):  # all that it needs
        shutil.copy(ROOT / name, tmp_path / name)
    code = (tmp_path / "model.py").read_text(encoding="utf-8")
    assert code.count("diagonal=1") == 1
    (tmp_path / "model.py").write_text(code.replace("diagonal=1", "diagonal=0"), encoding="utf-8")
    process = run_python("test_model.py", folder=tmp_path)
    assert process.returncode == 1 and "test_causality" in process.stdout and " failed" in process.stdout
