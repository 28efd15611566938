"""Faults found by trying public bug reports on this project, each with its kind: see docs/cases.md."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
import threading

import pytest
import torch
from processes import ROOT, run_python

import train
from exercises import common
from model import PAD_ID, Transformer
from test_model import small_model
from toolbox.checkpoint import CheckpointError, read_checkpoint
from toolbox.command_line import note
from toolbox.files import held

SHORT = ["--epochs", "1", "--samples", "64", "--batch-size", "16", "--device", "cpu"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(train, "VAL_SCORED", 20)
    monkeypatch.setattr(train, "TEST_SIZE", 20)


# ----------------------------------------------------------------------------------- files and checkpoints


def test_a_second_train_py_on_one_file_is_refused(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with held("--out", tmp_path / "a.pt"):
        assert train.main([*SHORT, "--out", "a.pt"]) == 2
        assert "--out a.pt: another process is writing there" in capsys.readouterr().err
        assert not (tmp_path / "a.pt").exists()
        assert train.main([*SHORT, "--out", "b.pt"]) == 0
    assert train.main([*SHORT, "--out", "a.pt"]) == 0
    assert sorted(os.listdir()) == ["a.pt", "b.pt"]


def test_a_file_that_cannot_be_read_is_not_called_foreign(tmp_path, monkeypatch):
    torch.save({}, tmp_path / "a.pt")

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied", "a.pt")

    monkeypatch.setattr(torch, "load", forbidden)
    with pytest.raises(CheckpointError, match=r"a\.pt: cannot be read \(Permission denied\)"):
        read_checkpoint(tmp_path / "a.pt", (), "train.py")


@pytest.mark.parametrize("name", ["heads-8", "sort", "recipe"])
def test_a_checkpoint_of_the_exercises_says_which_model_it_holds(quick, tmp_path, monkeypatch, name):
    monkeypatch.setattr(common, "PER_LENGTH", 2)
    from exercises.run import EXERCISES

    variants = {v.name: v for exercise in EXERCISES.values() for v in exercise.variants}
    run = common.run_of(variants[name], "fast", 0) | dict(samples=64, warmup=1)
    common.train_variant(variants[name], run, tmp_path)
    path = tmp_path / f"{name}.fast.0.pt"
    if name == "recipe":
        assert train.load_model(path)[1]
        return
    with pytest.raises(CheckpointError, match=f"holds the variant '{name}'"):
        train.load_model(path)
    with pytest.raises(CheckpointError, match=name):
        train.load_checkpoint(path)
    common.train_variant(variants[name], run, tmp_path)  # its own exercise takes it


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_built_without_memory_has_its_positions_once_loaded(assign):
    ours = small_model().eval()
    with torch.device("meta"):
        twin = Transformer(**ours.settings)
    if not assign:
        twin.to_empty(device="cpu")
        for module in twin.modules():
            if hasattr(module, "pe"):
                module.pe.fill_(float("nan"))  # what memory happens to hold
    twin.load_state_dict(ours.state_dict(), assign=assign)
    src, tgt = train.make_dataset(4, 0)
    with torch.no_grad():
        assert torch.equal(twin.eval()(src, tgt), ours(src, tgt))


# ------------------------------------------------------------------------------------------------- numbers


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_whole_epoch(
    quick, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "a.pt"
    train.main([*SHORT, "--out", str(out)])
    before, honest, steps = out.read_bytes(), train.train_step, []

    def overflowing(model, *args):
        steps.append(1)
        result = honest(model, *args)
        if len(steps) == 2:
            torch.nn.init.constant_(model.out_proj.bias, torch.nan)
        return result

    monkeypatch.setattr(train, "train_step", overflowing)
    capsys.readouterr()
    assert train.main(["--resume", "--epochs", "5", "--device", "cpu", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "epoch 2/5, step 4: the loss became infinite or NaN" in error
    assert "--warmup 1000" in error and out.read_bytes() == before and len(steps) == 4


def test_training_may_use_what_greedy_decode_returned():
    model, (src, tgt) = small_model(), train.make_dataset(8, 0)
    optimizer, scheduler = train.make_optimizer(model, train.RECIPES["chapter"])
    output = train.greedy_decode(model, src)
    assert not output.is_inference()
    target = torch.nn.functional.pad(output, (0, tgt.size(1) - output.size(1)), value=PAD_ID)
    assert train.train_step(model, optimizer, scheduler, src, target)[0].isfinite()


# --------------------------------------------------------------------------------- streams and environment

# train.py as a program, with few strings to score
PROGRAM = "import train; from toolbox.command_line import run_script; "
PROGRAM += "train.VAL_SCORED = train.TEST_SIZE = 20; run_script(train.main)"
TRAIN = shlex.join([sys.executable, "-c", PROGRAM, *SHORT])


def shell(command, folder, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, timeout=120
    )


@pytest.mark.parametrize(
    "how, status",
    [("2>&-", 0), ("<&-", 0), (">&-", 0), (">&- 2>&- <&-", 0), ("2>/dev/full", 0), ("> /dev/full", 2)],
)
def test_streams_that_are_closed_or_full(tmp_path, how, status):
    done = shell(f"{TRAIN} {how}", tmp_path)
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr
    if status == 0:
        assert train.load_checkpoint(tmp_path / "reverse_transformer.pt")["epoch"] == 1
    else:  # before minutes of training that nobody could read of
        assert os.listdir(tmp_path) == []
        assert done.stderr.count(b"\n") == 1 and b"standard output: No space left" in done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        dict(PYTHONIOENCODING="ascii"),
        dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
        dict(HOME="/absent"),
    ],
    ids=["ascii", "C locale", "no home"],
)
def test_names_that_the_terminal_cannot_show(tmp_path, variables):
    done = shell(f"{TRAIN} --out mü.pt", tmp_path, **variables)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_a_note_never_ends_a_run(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    note("lost")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    note("lost")


def test_sigterm_is_heard_as_ctrl_c(tmp_path):
    process = subprocess.Popen(
        ["bash", "-c", f"exec {TRAIN} --epochs 1000"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("epoch"):
            process.terminate()
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "" and "--resume goes on" in output
    assert os.listdir(tmp_path) == ["reverse_transformer.pt"]


BY_PATH = """
if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")
"""


def test_every_script_in_a_folder_can_be_run_by_its_path(tmp_path):
    scripts = [
        path
        for folder in ("translation", "exercises", "benchmarks")
        for path in sorted((ROOT / folder).glob("*.py"))
        if "run_script(main)" in path.read_text(encoding="utf-8")
    ]
    assert len(scripts) >= 12
    for path in scripts:
        assert BY_PATH in path.read_text(encoding="utf-8"), path
    for path in (ROOT / "translation" / "translate.py", ROOT / "exercises" / "run.py"):
        done = run_python(path, "--help", folder=tmp_path)
        assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------ the translation


@pytest.fixture
def tt(monkeypatch):
    pytest.importorskip("sentencepiece", reason="pip install -r translation/requirements.txt")
    pytest.importorskip("tqdm", reason="pip install -r translation/requirements.txt")
    import translation.train as module

    monkeypatch.setattr(module, "open_tensorboard", lambda *_: None)
    return module


TINY = ["--sample", "--d-model", "32", "--num-heads", "2", "--dff", "32", "--max-tokens", "1000"]
TINY += ["--vocab-size", "500", "--warmup", "40", "--bleu-every", "0", "--device", "cpu"]


@pytest.mark.parametrize("updates", [1, 3, 5])
def test_a_folder_stands_for_its_run_as_it_is_now(tt, tmp_path, monkeypatch, updates):
    """A finished run goes on and is cut off: its old mean must not be taken for it."""
    from translation.checkpoint import load_translator

    out = tmp_path / "run"
    assert tt.main([*TINY, "--epochs", "2", "--out", str(out)]) == 0
    assert load_translator(out)[2]["epoch"] == 2 and (out / "averaged.pt").exists()
    assert tt.main(["--resume", "--out", str(out)]) == 0  # nothing to do: the mean stays
    assert (out / "averaged.pt").exists()
    honest, count = tt.train_step, []

    def dying(*args):
        count.append(1)
        if len(count) > updates:
            raise SystemError("as a kill")
        return honest(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tt, "train_step", dying)
        with pytest.raises(SystemError):
            tt.main(["--resume", "--epochs", "9", "--out", str(out)])
    assert not (out / "averaged.pt").exists()
    best = torch.load(out / "best.pt", weights_only=True)
    model, _, found = load_translator(out)
    assert found["epoch"] == best["epoch"]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in best["model"].items())
    assert tt.main(["--resume", "--epochs", "3", "--out", str(out)]) == 0
    assert load_translator(out)[2]["epoch"] == 3 and (out / "averaged.pt").exists()


def test_a_new_run_leaves_foreign_files_alone(tt, tmp_path, capsys):
    for name in ("notes.tmp", "a.txt.0123456789abcdef.unfinished", "mean.model"):
        (tmp_path / name).write_text("mine")
    assert tt.main([*TINY, "--epochs", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "notes.tmp").read_text() == (tmp_path / "mean.model").read_text() == "mine"
    for name in ("train.ids", "val.ids", "log.txt", "tokenizer.model", "tensorboard"):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        capsys.readouterr()
        with pytest.raises(SystemExit):
            tt.main([*TINY, "--epochs", "1", "--out", str(folder)])
        assert name in capsys.readouterr().err and os.listdir(folder) == [name]
        assert (folder / name).read_text() == "mine"


def test_what_a_run_left_that_was_killed_early_does_not_block_the_next(tt, tmp_path, monkeypatch):
    def dying(*_):
        raise SystemError("as a kill")

    with monkeypatch.context() as patch:
        patch.setattr("translation.run.write_checkpoint", dying)
        with pytest.raises(SystemError):
            tt.main([*TINY, "--epochs", "1", "--out", str(tmp_path / "run")])
    assert {"train.ids", "val.ids"} <= set(os.listdir(tmp_path / "run"))
    assert tt.main([*TINY, "--epochs", "1", "--out", str(tmp_path / "run")]) == 0


def test_a_second_run_in_one_folder_is_refused(tt, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    with held("--out", out), pytest.raises(SystemExit):
        tt.main([*TINY, "--epochs", "1", "--out", str(out)])
    assert "another process is writing there" in capsys.readouterr().err and os.listdir(out) == []
    assert tt.main([*TINY, "--epochs", "1", "--out", str(out)]) == 0 and not (out / "lock").exists()


def test_training_in_a_thread(tt, tmp_path):
    status = []
    thread = threading.Thread(
        target=lambda: status.append(tt.main([*TINY, "--epochs", "1", "--out", str(tmp_path / "run")]))
    )
    thread.start()
    thread.join(120)
    assert status == [0]


@pytest.mark.parametrize("left", [dict(RANK="1"), dict(WORLD_SIZE="4"), dict(RANK="x", LOCAL_RANK="3")])
def test_what_another_launcher_left_in_the_environment(tt, tmp_path, monkeypatch, capsys, left):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        tt.main(["--data", str(tmp_path / "absent"), "--out", str(tmp_path / "run")])
    assert ended.value.code == 2 and "train.de" in capsys.readouterr().err
    assert tt.main([*TINY, "--epochs", "1", "--out", str(tmp_path / "run")]) == 0


def test_a_string_is_no_list_of_lines(tt):
    from translation.translate import translate

    with pytest.raises(TypeError, match=r"give a list of lines, \['Ein Hund'\]"):
        translate("Ein Hund")


def test_output_that_goes_to_something_else_than_a_file(tt, tmp_path):
    from translation import translate

    assert tt.main([*TINY, "--epochs", "1", "--out", str(tmp_path / "run")]) == 0

    class Anything:
        """Only what print needs."""

        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    with contextlib.redirect_stdout(Anything()) as stream:
        assert translate.main(["--checkpoint", str(tmp_path / "run"), "Ein Hund."]) == 0
    assert stream.text.endswith("\n")


def test_the_trainers_own_mark_in_the_text(tt):
    from translation.data import Tokenizer

    lines = [f"▅ number {i} ▅▅" for i in range(50)]
    tokenizer = Tokenizer.train(lines, 400)
    assert any("num" in piece for piece in tokenizer.pieces(range(tokenizer.vocab_size)))
    assert tokenizer.decode(tokenizer.encode("a ▅ b")) == "a ▅ b"
    assert Tokenizer.train([*lines, "a ▅ b"], 400).vocab_size > 260
