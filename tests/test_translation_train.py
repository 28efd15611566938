"""translation/train.py: the updates, exact resuming, which weights are kept, what a user can get wrong."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

import translation.train as tt
from model import PAD_ID, Transformer
from train import CheckpointError, evaluating
from translation.data import LangPairDataset, Tokenizer, collate
from translation.prepare import load_split

# 128 pairs in 3 to 4 batches, a model of 33,000 weights: a tenth of a second an epoch
TINY = ["--sample", "--d-model", "32", "--num-heads", "2", "--dff", "32", "--max-tokens", "1000"]
REAL_TENSORBOARD = tt.open_tensorboard
TINY += ["--vocab-size", "500", "--warmup", "40", "--bleu-every", "0", "--device", "cpu"]


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    """It takes seconds to import; the tests of it ask for REAL_TENSORBOARD."""
    monkeypatch.setattr(tt, "open_tensorboard", lambda run: None)


def train(out, *options, status=0):
    assert tt.main([*TINY, "--out", str(out), *map(str, options)]) == status
    return read(out / "last.pt")


def read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def resume(out, *options):
    assert tt.main(["--resume", "--device", "cpu", "--out", str(out), *map(str, options)]) == 0
    return read(out / "last.pt")


def record(monkeypatch):
    """Make every update leave its learning rate and source ids in the list returned."""
    updates, step = [], tt.train_step

    def recording(model, optimizer, scheduler, batch, *rest):
        updates.append((optimizer.param_groups[0]["lr"], batch["src"].tolist()))
        return step(model, optimizer, scheduler, batch, *rest)

    monkeypatch.setattr(tt, "train_step", recording)
    return updates


def same(a, b, path=""):
    """Equal to the bit, but for times."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key not in ("seconds", "tokens_per_second", "run"):
                same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{path}/{number}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


# ----------------------------------------------------------------------------------------------- the updates


def toy_model(vocab=12, **options):
    torch.manual_seed(0)
    return Transformer(vocab, vocab, d_model=16, num_heads=2, dff=16, num_layers=1, max_len=40, **options)


def test_step_loss_is_per_real_token_and_the_gradient_is_clipped():
    batch = collate([([5, 6], [7, 8, 9]), ([5], [7])])
    model = toy_model(dropout=0.0)
    with evaluating(model):
        log_p = model(batch["src"], batch["tgt_in"]).log_softmax(-1)
    expected = 0.0
    for row, gold in enumerate([[7, 8, 9, 2], [7, 2]]):
        for position, right in enumerate(gold):
            for token in range(12):
                target = 0.9 if token == right else 0.0 if token == PAD_ID else 0.1 / 10
                expected -= target * log_p[row, position, token].item()
    optimizer, scheduler = tt.make_optimizer(model, 4, 1.0)
    counted, norm = tt.train_step(model, optimizer, scheduler, batch, "fp32", 0.1, clip=1e-3)
    assert counted.tolist() == pytest.approx([expected, 6], rel=1e-5)
    clipped = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
    assert norm > 0.1 and clipped.item() == pytest.approx(1e-3, rel=1e-3)


def test_step_on_nothing_but_padding_leaves_finite_weights():
    batch = collate([([5], [7])])
    batch["labels"] = torch.zeros_like(batch["labels"])
    model = toy_model()
    counted, _ = tt.train_step(model, *tt.make_optimizer(model, 4, 1.0), batch, "fp32", 0.1, 1.0)
    assert counted.tolist() == [0, 0] and all(p.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("error::UserWarning")
def test_schedule_is_noam_times_the_factor(monkeypatch):
    model = torch.nn.Linear(1, 1)
    model.settings = {"d_model": 512}
    optimizer, scheduler = tt.make_optimizer(model, 4, 0.5)
    used = []
    for _ in range(16):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [2 * used[n - 1] for n in (1, 4, 16)] == pytest.approx([0.005524, 0.022097, 0.011049], abs=1e-6)
    assert max(used) == used[3]
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["fused"]) == ((0.9, 0.98), 1e-9, True)


def test_cooldown_takes_the_rate_to_zero_in_a_straight_line():
    """20 updates, cooldown 5: Noam's rate for 15, then 5/5, 4/5, ... 1/5 of it, and 0 behind the end."""
    model = torch.nn.Linear(1, 1)
    model.settings = {"d_model": 512}
    rates = [
        tt.make_optimizer(model, 4, 0.5, updates=20, cooldown=cooldown)[1].lr_lambdas[0]
        for cooldown in (0, 5)
    ]
    plain, cooled = ([rate(step) for step in range(22)] for rate in rates)
    assert plain[:16] == cooled[:16]
    shares = [c / p for c, p in zip(cooled[15:], plain[15:], strict=True)]
    assert shares == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0, 0])


def test_attention_by_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert tt.choose_attention("auto", cpu) == tt.choose_attention("manual", cuda) == "manual"
    assert tt.choose_attention("auto", cuda) == tt.choose_attention("sdpa", cpu) == "sdpa"


def test_cooldown_is_heard_and_may_come_on_resuming(tmp_path):
    straight = train(tmp_path / "plain", "--epochs", 4)
    cooled = train(tmp_path / "cooled", "--epochs", 4, "--cooldown", 2)
    lr = [[row["lr"] for row in run["history"]] for run in (straight, cooled)]
    assert lr[0][:2] == lr[1][:2] and lr[1][2] < lr[0][2] and lr[1][3] < 0.2 * lr[0][3]
    train(tmp_path / "late", "--epochs", 2)
    late = resume(tmp_path / "late", "--epochs", 4, "--cooldown", 2)
    for name, value in cooled["model"].items():
        assert torch.equal(value, late["model"][name]), name


def test_validation_loss_is_plain_cross_entropy_whatever_the_batches():
    text = load_split(None, "val")
    tokenizer = Tokenizer.train([*text[0], *text[1]], 400)
    dataset, model = LangPairDataset(*text, tokenizer), toy_model(tokenizer.vocab_size)
    model.settings["max_len"] = 130
    model = Transformer(**model.settings).train()
    total = tokens = 0
    with evaluating(model):
        for pair in dataset:
            batch = collate([pair])
            logits = model(batch["src"], batch["tgt_in"])
            total += torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="sum").item()
            tokens += batch["labels"].numel()
    device = torch.device("cpu")
    for budget in (50, 400, 5000):
        assert tt.validation_loss(model, dataset, budget, device) == pytest.approx(total / tokens, rel=1e-5)
    assert model.training and all(module.training for module in model.modules())


def test_training_mode_in_every_step_and_eval_elsewhere(tmp_path, monkeypatch):
    seen, current = {"train": [], "other": []}, ["other"]
    step, forward, encode = tt.train_step, Transformer.forward, Transformer.encode

    def stepping(*args):
        current[0] = "train"
        try:
            return step(*args)
        finally:
            current[0] = "other"

    def noting(method):
        def noted(self, *args):
            seen[current[0]] += [module.training for module in self.modules()]
            return method(self, *args)

        return noted

    monkeypatch.setattr(tt, "train_step", stepping)
    monkeypatch.setattr(Transformer, "forward", noting(forward))
    monkeypatch.setattr(Transformer, "encode", noting(encode))
    train(tmp_path, "--epochs", 2, "--bleu-every", 1)
    assert seen["train"] and all(seen["train"])
    assert seen["other"] and not any(seen["other"])


def test_loss_falls_on_the_sample(tmp_path, capsys):
    last = train(tmp_path / "a", "--epochs", 12, "--bleu-every", 6, "--max-tokens", 400)
    losses = [row["train_loss"] for row in last["history"]]
    assert losses[-1] < losses[0] - 1 and last["history"][-1]["val_loss"] < last["history"][0]["val_loss"]
    assert losses[0] < math.log(500) + 1.5  # starts near ln V
    output = capsys.readouterr().out
    assert len(re.findall(r"^epoch .* lr .* tokens/s .* s", output, re.M)) == 12
    assert output.count("BLEU") == 2 + 2 and "nrefs:1|case:mixed" in output
    assert output.count("  output  ") == 2 * tt.SHOWN
    assert [row["bleu"] is None for row in last["history"]] == [n % 6 > 0 for n in range(1, 13)]
    assert "epoch 12" in (tmp_path / "a/log.txt").read_text()


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
    assert tt.best_row(straight["history"])["epoch"] == tt.best_row(resumed["history"])["epoch"]


@pytest.mark.parametrize("where", ["update", "validation"])
def test_ctrl_c_saves_and_resume_is_exact_in_mid_epoch(tmp_path, monkeypatch, capsys, where):
    updates = record(monkeypatch)
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
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
    (tmp_path / "b/last.pt.123.tmp").write_bytes(b"half")
    same(resume(tmp_path / "b"), straight)
    assert not list((tmp_path / "b").glob("*.tmp"))


def test_curves_go_on_without_overlap(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(tt, "open_tensorboard", REAL_TENSORBOARD)
    monkeypatch.setattr(tt, "LOG_EVERY", 2)
    train(tmp_path, "--epochs", 1, "--bleu-every", 1)
    saved = (tmp_path / "last.pt").read_bytes()
    last = resume(tmp_path, "--epochs", 3)
    (tmp_path / "last.pt").write_bytes(saved)  # as if all after the first epoch had been lost
    last = resume(tmp_path, "--epochs", 2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    updates = [row["updates"] for row in last["history"]]
    for name in ("loss", "lr", "gradient_norm", "tokens_per_second"):
        points = events.Scalars(f"train/{name}")
        assert [point.step for point in points] == list(range(2, updates[-1] + 1, 2))
        assert all(point.value > 0 for point in points)
    for name, key in (("loss", "val_loss"), ("bleu", "bleu")):
        points = events.Scalars(f"validation/{name}")
        assert [point.step for point in points] == updates
        assert [point.value for point in points] == pytest.approx([row[key] for row in last["history"]])


def test_without_tensorboard_the_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tt, "open_tensorboard", REAL_TENSORBOARD)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(tmp_path, "--epochs", 1)
    assert "pip install tensorboard" in capsys.readouterr().out


def test_ctrl_c_after_training_leaves_last_alone(tmp_path, monkeypatch):
    def interrupted(self, stop):
        self.model.load_state_dict({k: v * 0 for k, v in self.model.state_dict().items()})
        raise tt.Interrupted

    monkeypatch.setattr(tt, "stale", lambda history: len(history))
    monkeypatch.setattr(tt.Run, "finish", interrupted)
    last = train(tmp_path, "--epochs", 3, "--patience", 1, status=130)
    assert last["epoch"] == 1 and last["model"]["out.weight"].abs().sum() > 0


# --------------------------------------------------------------------------------- best, patience, averaging


def row(epoch, loss, bleu=None):
    return dict(epoch=epoch, val_loss=loss, bleu=bleu)


def test_best_and_patience():
    assert tt.best_row([]) is None and tt.stale([]) == 0
    losses = [row(1, 3.0), row(2, 2.0), row(3, 2.0), row(4, 2.5)]
    assert tt.best_row(losses)["epoch"] == 2 and tt.stale(losses) == 2
    both = [row(1, 1.0), row(2, 5.0, 3.0), row(3, 0.5), row(4, 5.0, 2.0), row(5, 0.1), row(6, 9.0, 1.0)]
    assert tt.best_row(both)["epoch"] == 2 and tt.stale(both) == 2


def test_best_file_is_the_best_epoch_and_patience_ends_the_run(tmp_path, monkeypatch):
    scores = iter([5.0, 9.0, 7.0, 8.0, 6.0, 1.0])
    monkeypatch.setattr(tt.Run, "bleu", lambda self, stop=None: (next(scores), "signature"))
    last = train(tmp_path, "--epochs", 20, "--bleu-every", 1, "--patience", 2, "--average", 3)
    assert [r["bleu"] for r in last["history"]] == [5.0, 9.0, 7.0, 8.0]
    best = read(tmp_path / "best.pt")
    assert best["epoch"] == 2
    same(best["model"], read(tmp_path / "epoch-02.pt")["model"])
    assert sorted(p.name for p in tmp_path.glob("epoch*")) == ["epoch-02.pt", "epoch-03.pt", "epoch-04.pt"]
    assert not torch.equal(best["model"]["out.weight"], last["model"]["out.weight"])


@pytest.mark.parametrize("share", ["--share-embeddings", "--no-share-embeddings"])
def test_averaged_is_the_mean_of_the_last_epochs(tmp_path, share):
    train(tmp_path, "--epochs", 4, "--average", 3, share)
    parts = [read(tmp_path / f"epoch-0{n}.pt")["model"] for n in (2, 3, 4)]
    mean = read(tmp_path / "averaged.pt")["model"]
    for name in mean:
        torch.testing.assert_close(mean[name], sum(p[name] for p in parts) / 3)
        assert not torch.equal(mean[name], parts[2][name])
    tied = mean["out.weight"].data_ptr() == mean["encoder.embed.embedding.weight"].data_ptr()
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
        model, tokenizer, checkpoint = tt.load_translator(tmp_path / name)
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
            tt.load_translator(path)


def test_every_load_says_where_to():
    text = Path(tt.__file__).read_text()
    assert all("map_location" in call for call in re.findall(r"torch\.load\([^)]*\)", text))


# ------------------------------------------------------------------------------------------------------ BLEU


def test_bleu_by_itself():
    text = ["The cat sits on the mat.", "Two dogs run in the park.", "A man reads a long book."]
    score, signature = tt.corpus_bleu(text, text)
    assert score == pytest.approx(100) and type(score) is float and "tok:13a" in signature
    assert 1 < tt.corpus_bleu([*text[:2], "Nothing."], text)[0] < 99


def test_hypotheses_never_depend_on_the_references(tmp_path, monkeypatch):
    heard = []
    score = tt.corpus_bleu

    def hearing(hypotheses, references):
        if len(hypotheses) > 1:
            heard.append((list(hypotheses), list(references)))
        return score(hypotheses, references)

    monkeypatch.setattr(tt, "corpus_bleu", hearing)
    run = None

    class Kept(tt.Run):
        def __init__(self, *args):
            nonlocal run
            super().__init__(*args)
            run = self

    monkeypatch.setattr(tt, "Run", Kept)
    train(tmp_path, "--epochs", 6, "--bleu-every", 6)
    heard.clear()
    run.bleu()
    run.val_tgt = ["garbage " * 9] * len(run.val_tgt)
    run.bleu()
    (first, references), (second, garbage) = heard
    assert first == second and any(first) and references == load_split(None, "val")[1] != garbage
    assert not any("▁" in text for text in first)


def test_translation_keeps_order_blank_lines_and_limits():
    text = load_split(None, "val")[0]
    tokenizer = Tokenizer.train(text, 400)
    model = Transformer(tokenizer.vocab_size, tokenizer.vocab_size, d_model=16, num_heads=2, max_len=40)
    model.train()
    lines = ["", text[0], "  ", text[5], "Hund " * 200, text[0]]
    output = tt.greedy_translate(model, tokenizer, lines)
    assert output[0] == output[2] == "" and output[1] == output[5]
    assert [tt.greedy_translate(model, tokenizer, [line])[0] for line in lines] == output
    assert tt.greedy_translate(model, tokenizer, []) == [] and model.training


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


def test_weights_that_ran_into_infinity_are_never_written(tmp_path, capsys):
    assert "--lr-factor" in one_line_error(capsys, *TINY, "--out", tmp_path, "--lr-factor", "1e30")
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
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tt.__file__).parents[1])
    text = " ".join(tt.build_parser().format_help().split())
    assert "peaks (default: 400)" in text and "end of its files' names (default: de)" in text
