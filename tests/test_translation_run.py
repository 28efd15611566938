"""translation/run.py and options.py: exact resuming, which weights are kept, what a user can get wrong."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from processes import ROOT

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

from translation_runs import TINY, no_tensorboard, read, resume, same, train  # noqa: F401

import translation.train as tt
from toolbox.checkpoint import CheckpointError
from translation.checkpoint import load_translator
from translation.options import build_parser
from translation.prepare import load_split
from translation.run import best_row, stale


def record(monkeypatch):
    """Make every update leave its learning rate and source ids in the list returned."""
    updates, step = [], tt.train_step

    def recording(model, optimizer, scheduler, batch, *rest):
        updates.append((optimizer.param_groups[0]["lr"], batch["src"].tolist()))
        return step(model, optimizer, scheduler, batch, *rest)

    monkeypatch.setattr(tt, "train_step", recording)
    return updates


# ---------------------------------------------------------------------------------------------------- resume


def test_resume_at_an_epoch_end_is_exact(tmp_path, monkeypatch):
    updates = record(monkeypatch)
    straight = train(tmp_path / "a", "--epochs", 4, "--bleu-every", 2)
    expected = updates.copy()
    ends = [0, *(row["updates"] for row in straight["history"])]
    epochs = [{repr(ids) for _, ids in expected[a:b]} for a, b in itertools.pairwise(ends)]
    assert not set.intersection(*epochs)  # other batches each time
    updates.clear()
    train(tmp_path / "b", "--epochs", 2, "--bleu-every", 2)
    resumed = resume(tmp_path / "b", "--epochs", 4)
    assert updates == expected
    same(resumed, straight)
    assert resumed["optimizer"]["state"][0]["step"] == len(expected) == resumed["scheduler"]["last_epoch"]
    for name in ("best.pt", "averaged.pt", "epoch-02.pt"):
        same(read(tmp_path / "a" / name)["model"], read(tmp_path / "b" / name)["model"])
    assert best_row(straight["history"])["epoch"] == best_row(resumed["history"])["epoch"]


@pytest.mark.parametrize("where", ["update", "validation"])
def test_ctrl_c_saves_and_resume_is_exact_in_mid_epoch(tmp_path, monkeypatch, capsys, where):
    updates, before = record(monkeypatch), signal.getsignal(signal.SIGINT)
    straight = train(tmp_path / "a", "--epochs", 3)
    expected = updates.copy()
    updates.clear()
    step, loss = tt.train_step, tt.validation_loss
    per_epoch = [row["updates"] for row in straight["history"]]
    stop_at = per_epoch[0] + 2 if where == "update" else per_epoch[1]

    def stepping(*args):
        if where == "update" and len(updates) == stop_at - 1:
            os.kill(os.getpid(), signal.SIGINT)  # before the update: it must still be made, whole
        return step(*args)

    def validating(*args):
        if where == "validation" and len(updates) == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tt, "train_step", stepping)
        patch.setattr(tt, "validation_loss", validating)
        half = train(tmp_path / "b", "--epochs", 3, status=130)
    assert half["scheduler"]["last_epoch"] == stop_at == len(updates) and half["epoch"] == 1
    assert "--resume" in capsys.readouterr().out
    same(resume(tmp_path / "b"), straight)
    assert updates == expected
    assert signal.getsignal(signal.SIGINT) is before  # a background job ignores it


def test_a_killed_run_goes_on_from_its_last_save_to_the_same_end(tmp_path, monkeypatch):
    straight = train(tmp_path / "a", "--epochs", 2, "--save-every", 2)
    step, count = tt.train_step, []

    def dying(*args):
        count.append(1)
        if len(count) == 4:
            raise SystemError("as a kill: nothing more is saved")
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tt, "train_step", dying)
        with pytest.raises(SystemError):
            train(tmp_path / "b", "--epochs", 2, "--save-every", 2)
    assert read(tmp_path / "b/last.pt")["scheduler"]["last_epoch"] == 2
    (tmp_path / "b/last.pt.0123456789abcdef.unfinished").write_bytes(b"half")
    (tmp_path / "b/notes.tmp").write_bytes(b"mine")
    same(resume(tmp_path / "b"), straight)
    assert not list((tmp_path / "b").glob("*.unfinished")) and (tmp_path / "b/notes.tmp").exists()


def test_ctrl_c_after_training_leaves_last_alone(tmp_path, monkeypatch):
    def interrupted(run):
        run.model.load_state_dict({k: v * 0 for k, v in run.model.state_dict().items()})
        raise tt.Interrupted

    monkeypatch.setattr(tt, "stale", lambda history: len(history))
    monkeypatch.setattr(tt, "finish", interrupted)
    last = train(tmp_path, "--epochs", 3, "--patience", 1, status=130)
    assert last["epoch"] == 1 and last["model"]["out_proj.weight"].abs().sum() > 0


# --------------------------------------------------------------------------------- best, patience, averaging


def row(epoch, loss, bleu=None):
    return dict(epoch=epoch, val_loss=loss, bleu=bleu)


def test_best_and_patience():
    assert best_row([]) is None and stale([]) == 0
    losses = [row(1, 3.0), row(2, 2.0), row(3, 2.0), row(4, 2.5)]
    assert best_row(losses)["epoch"] == 2 and stale(losses) == 2
    both = [row(1, 1.0), row(2, 5.0, 3.0), row(3, 0.5), row(4, 5.0, 2.0), row(5, 0.1), row(6, 9.0, 1.0)]
    assert best_row(both)["epoch"] == 2 and stale(both) == 2


def test_best_file_is_the_best_epoch_and_patience_ends_the_run(tmp_path, monkeypatch):
    scores = iter([5.0, 9.0, 7.0, 8.0, 6.0, 1.0])
    monkeypatch.setattr(tt, "validation_bleu", lambda run: (next(scores), "signature"))
    last = train(tmp_path, "--epochs", 20, "--bleu-every", 1, "--patience", 2, "--average", 3)
    assert [r["bleu"] for r in last["history"]] == [5.0, 9.0, 7.0, 8.0]
    best = read(tmp_path / "best.pt")
    assert best["epoch"] == 2
    same(best["model"], read(tmp_path / "epoch-02.pt")["model"])
    assert sorted(p.name for p in tmp_path.glob("epoch*")) == ["epoch-02.pt", "epoch-03.pt", "epoch-04.pt"]
    assert not torch.equal(best["model"]["out_proj.weight"], last["model"]["out_proj.weight"])


@pytest.mark.parametrize("share", ["--share-embeddings", "--no-share-embeddings"])
def test_averaged_is_the_mean_of_the_last_epochs(tmp_path, share):
    train(tmp_path, "--epochs", 4, "--average", 3, share)
    parts = [read(tmp_path / f"epoch-0{n}.pt")["model"] for n in (2, 3, 4)]
    mean = read(tmp_path / "averaged.pt")["model"]
    for name in mean:
        torch.testing.assert_close(mean[name], sum(p[name] for p in parts) / 3)
        assert not torch.equal(mean[name], parts[2][name])
    tied = mean["out_proj.weight"].data_ptr() == mean["encoder.embed.emb.weight"].data_ptr()
    assert tied == (share == "--share-embeddings")


# ----------------------------------------------------------------------------------------------- checkpoints


def test_every_checkpoint_rebuilds_the_translator(tmp_path):
    train(
        tmp_path,
        "--epochs",
        1,
        "--norm",
        "pre",
        "--activation",
        "gelu",
        "--num-layers",
        2,
        "--max-length",
        50,
    )
    for name in ("last.pt", "best.pt", "epoch-01.pt", "averaged.pt"):
        model, tokenizer, checkpoint = load_translator(tmp_path / name)
        assert not model.training and len(model.encoder.layers) == 2 and model.settings["max_len"] == 52
        assert model.settings["norm_first"] and model.settings["activation"] == "gelu"
        assert tokenizer.model == (tmp_path / "tokenizer.model").read_bytes()
        assert checkpoint["run"]["src"] == "de" and checkpoint["epoch"] == 1
        same(model.state_dict(), checkpoint["model"])
    json.dumps([checkpoint["run"], checkpoint["history"]])  # plain values only


def test_a_broken_checkpoint_is_named(tmp_path):
    path = tmp_path / "x.pt"
    for write in (lambda: None, lambda: path.write_bytes(b"no"), lambda: torch.save({"model": 1}, path)):
        write()
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load_translator(path)


def test_every_load_says_where_to():
    files = [*(ROOT / "translation").glob("*.py"), *(ROOT / "toolbox").glob("*.py")]
    calls = [c for file in files for c in re.findall(r"torch\.load\([^)]*\)", file.read_text("utf-8"))]
    assert calls and all("map_location" in call for call in calls)


# ---------------------------------------------------------------------------------------------------- errors


def one_line_error(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        tt.main(list(map(str, argv)))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error, error
    return error


def test_a_run_is_not_overwritten_unasked(tmp_path, capsys):
    train(tmp_path, "--epochs", 1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "--resume" in one_line_error(capsys, *TINY, "--out", tmp_path)
    for option, value in (("--d-model", "64"), ("--preset", "base"), ("--seed", "3"), ("--data", "x")):
        error = one_line_error(capsys, "--resume", "--out", tmp_path, option, value)
        assert f"{option} {value}" in error and str(tmp_path) in error
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "options, named",
    [
        (["--num-heads", "3"], "--num-heads 3"),
        (["--dropout", "1"], "--dropout"),
        (["--clip", "0"], "--clip"),
        (["--lr-factor", "nan"], "--lr-factor"),
        (["--warmup", "0"], "--warmup"),
        (["--vocab-size", "50"], "--vocab-size 50"),
        (["--max-length", "1"], "--max-length 1"),
        (["--src", "fr"], "fr"),
        (["--tgt", "de"], "--tgt"),
        (["--data", "x"], "--data"),
        (["--resume"], "last.pt"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, options, named):
    assert named in one_line_error(capsys, *TINY, "--out", tmp_path / "r", *options)


def test_without_tqdm_it_says_what_to_install_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # importing it now fails
    error = one_line_error(capsys, *TINY, "--out", tmp_path / "r")
    assert "tqdm is not installed: pip install -r translation/requirements.txt" in error
    assert list(tmp_path.iterdir()) == []


def test_weights_that_became_infinite_are_never_written(tmp_path, capsys, monkeypatch):
    honest = tt.train_step

    def overflowing(model, *args):
        torch.nn.init.constant_(model.out_proj.bias, math.inf)
        return honest(model, *args)

    monkeypatch.setattr(tt, "train_step", overflowing)
    assert "--lr-factor" in one_line_error(capsys, *TINY, "--out", tmp_path)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["last.pt"]
    assert all(value.isfinite().all() for value in read(tmp_path / "last.pt")["model"].values())


def test_missing_data_and_unusable_folder(tmp_path, capsys):
    assert "train.de" in one_line_error(capsys, "--data", tmp_path, "--out", tmp_path / "r")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file/r"):
        assert str(out) in one_line_error(capsys, *TINY, "--out", out)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/last.pt").write_bytes(b"no checkpoint")
    assert "last.pt" in one_line_error(capsys, "--resume", "--out", tmp_path / "r")


def test_other_text_is_not_resumed(tmp_path, capsys):
    data, out = tmp_path / "d", tmp_path / "r"
    data.mkdir()
    for split in ("train", "val"):
        for language, lines in zip(("de", "en"), load_split(None, split), strict=True):
            (data / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    own = ["--data", data, "--out", out, "--epochs", 1, *TINY[1:]]
    assert tt.main(list(map(str, own))) == 0
    with open(data / "val.de", "a") as file:
        file.write("Noch einer.\n")
    with open(data / "val.en", "a") as file:
        file.write("Another one.\n")
    assert str(data) in one_line_error(capsys, "--resume", "--out", out, "--epochs", 2)


def test_import_does_nothing_and_help_shows_defaults():
    code = "import sys, translation.train as t; assert not {'sacrebleu', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    text = " ".join(build_parser().format_help().split())
    assert "peaks (default: 400)" in text and "end of its files' names (default: de)" in text
