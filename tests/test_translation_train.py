"""translation/train.py: the updates, validation, curves, BLEU of free-running output."""

import math
import re
import sys

import pytest
import torch

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

from test_train import smoothed_loss_by_the_formula
from translation_runs import no_tensorboard, read, resume, train  # noqa: F401  (one acts on its own)

import translation.train as tt
from model import PAD_ID, Transformer
from train import evaluating
from translation.bleu import corpus_bleu
from translation.curves import open_tensorboard
from translation.data import LangPairDataset, Tokenizer, collate
from translation.prepare import load_split
from translation.run import Run, choose_attention, make_optimizer

# ----------------------------------------------------------------------------------------------- the updates


def toy_model(vocab=12, **options):
    torch.manual_seed(0)
    return Transformer(vocab, vocab, d_model=16, num_heads=2, dff=16, num_layers=1, max_len=40, **options)


@pytest.mark.parametrize("chunk", [1, 12, 1000])
def test_loss_taken_in_pieces_is_the_loss(monkeypatch, chunk):
    """Against the formula in one line; 3 rows of 5 logits are one, two or fewer than one piece."""
    logits, target, expected, gradient = smoothed_loss_by_the_formula()
    monkeypatch.setattr(tt, "LOSS_CHUNK", chunk)
    loss = tt.loss_sum(logits, target, 0.1)
    loss.backward()
    assert torch.allclose(loss, expected) and torch.allclose(logits.grad, gradient, atol=1e-6)


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
    optimizer, scheduler = make_optimizer(model, 4, 1.0)
    counted, norm = tt.train_step(model, optimizer, scheduler, batch, "fp32", 0.1, clip=1e-3)
    assert counted.tolist() == pytest.approx([expected, 6], rel=1e-5)
    clipped = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
    assert norm > 0.1 and clipped.item() == pytest.approx(1e-3, rel=1e-3)


def test_step_on_nothing_but_padding_leaves_finite_weights():
    batch = collate([([5], [7])])
    batch["labels"] = torch.zeros_like(batch["labels"])
    model = toy_model()
    counted, _ = tt.train_step(model, *make_optimizer(model, 4, 1.0), batch, "fp32", 0.1, 1.0)
    assert counted.tolist() == [0, 0] and all(p.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("error::UserWarning")
def test_schedule_is_noam_times_the_factor(monkeypatch):
    model = torch.nn.Linear(1, 1)
    model.settings = {"d_model": 512}
    optimizer, scheduler = make_optimizer(model, 4, 0.5)
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
    """A cooldown of 5 updates after 15 others: 5/5, 4/5, ... 1/5 of Noam's rate, and 0 behind the end."""
    run = Run.__new__(Run)
    run.cooldown = None
    assert [run.rate_left(step) for step in (0, 14, 15, 99)] == [1, 1, 1, 1]
    run.cooldown = 15, 5, 0
    shares = [run.rate_left(step) for step in range(13, 22)]
    assert shares == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0])
    run.cooldown = 15, 2, 5
    shares = [run.rate_left(step) for step in range(16, 24)]
    assert shares == pytest.approx([0.5, 0.6, 0.48, 0.36, 0.24, 0.12, 0, 0])


@pytest.mark.parametrize("seed, tokens, cooldown", [(0, 90, 3), (1, 120, 2), (2, 200, 1), (3, 90, 9)])
def test_cooldown_ends_at_zero_whatever_the_epochs_hold(tmp_path, monkeypatch, seed, tokens, cooldown):
    """Epochs have unequal numbers of batches; the rate is 0 after the very last update, not before (B51)."""
    used, honest, epochs = [], tt.train_step, 3

    def spy(model, optimizer, *args):
        used.append(optimizer.param_groups[0]["lr"])
        return honest(model, optimizer, *args)

    monkeypatch.setattr(tt, "train_step", spy)
    options = ["--epochs", epochs, "--seed", seed, "--max-tokens", tokens, "--save-every", 7]
    last = train(tmp_path / "a", *options, "--cooldown", cooldown)
    counts = [row["updates"] for row in last["history"]]
    assert len(used) == counts[-1]
    begin = counts[epochs - cooldown - 1] if cooldown < epochs else 0
    model = torch.nn.Linear(1, 1)
    model.settings = {"d_model": 32}
    noam = make_optimizer(model, 40, 0.5)[1].lr_lambdas[0]
    shares = [lr / noam(step) for step, lr in enumerate(used)]
    total = len(used) - begin
    assert shares == pytest.approx([1.0] * begin + [1 - n / total for n in range(total)])
    assert last["scheduler"]["_last_lr"] == [0.0] and last["history"][-1]["lr"] == 0.0

    # stopped in the middle of the last epoch and resumed: the same rates
    straight, used[:] = list(used), []
    stop_at = counts[-1] - 2

    def stopping(*args):
        if len(used) == stop_at:
            raise SystemError("as a kill")
        return spy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tt, "train_step", stopping)
        with pytest.raises(SystemError):
            train(tmp_path / "b", *options, "--cooldown", cooldown)
    done = read(tmp_path / "b/last.pt")["scheduler"]["last_epoch"]
    del used[done:]
    resume(tmp_path / "b")
    assert used == straight


def test_attention_by_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_attention("auto", cpu) == choose_attention("manual", cuda) == "manual"
    assert choose_attention("auto", cuda) == choose_attention("sdpa", cpu) == "sdpa"


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


def test_the_next_batch_is_prepared_before_anything_waits_for_this_one(tmp_path, monkeypatch):
    """Each batch once and in order; a GPU that has been asked for a result has nothing left to do."""
    done, sizes = [], []
    honest = {name: getattr(tt, name) for name in ("load_batch", "train_step")}
    tick, length = tt.Run.tick, tt.TransformerBatchSampler.__iter__

    def load_batch(dataset, rows, device):
        done.append(("load", len(rows)))
        return honest["load_batch"](dataset, rows, device)

    def train_step(model, optimizer, scheduler, batch, *args):
        done.append(("step", len(batch["src"])))
        return honest["train_step"](model, optimizer, scheduler, batch, *args)

    def batches(sampler):
        order = list(length(sampler))
        sizes[:] = [len(rows) for rows in order]
        return iter(order)

    monkeypatch.setattr(tt, "load_batch", load_batch)
    monkeypatch.setattr(tt, "train_step", train_step)
    monkeypatch.setattr(tt, "validation_loss", lambda *_: 1.0)
    monkeypatch.setattr(tt.TransformerBatchSampler, "__iter__", batches)
    monkeypatch.setattr(tt.Run, "tick", lambda run, mark: done.append(("wait", 0)) or tick(run, mark))
    train(tmp_path / "run", "--epochs", 1)
    expected = [("load", sizes[0])]
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        expected += [("step", size)] + [("load", following)] * (following is not None) + [("wait", 0)]
    assert done == [*expected, ("wait", 0)] and len(sizes) >= 3


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


# ----------------------------------------------------------------------------------------------------- curves


def test_curves_go_on_without_overlap(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(tt, "open_tensorboard", open_tensorboard)
    monkeypatch.setattr("translation.curves.LOG_EVERY", 2)
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
    monkeypatch.setattr(tt, "open_tensorboard", open_tensorboard)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(tmp_path, "--epochs", 1)
    assert "pip install tensorboard" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ BLEU


def test_bleu_by_itself():
    text = ["The cat sits on the mat.", "Two dogs run in the park.", "A man reads a long book."]
    score, signature = corpus_bleu(text, text)
    assert score == pytest.approx(100) and type(score) is float and "tok:13a" in signature
    assert 1 < corpus_bleu([*text[:2], "Nothing."], text)[0] < 99


def test_hypotheses_never_depend_on_the_references(tmp_path, monkeypatch):
    heard, runs = [], []

    def hearing(hypotheses, references):
        heard.append((list(hypotheses), list(references)))
        return corpus_bleu(hypotheses, references)

    monkeypatch.setattr(tt, "corpus_bleu", hearing)
    monkeypatch.setattr(tt, "finish", runs.append)
    train(tmp_path, "--epochs", 6, "--bleu-every", 6)
    heard.clear()
    (run,) = runs
    tt.validation_bleu(run)
    sources, references = run.lines["val"]
    run.lines["val"] = sources, ["garbage " * 9] * len(references)
    tt.validation_bleu(run)
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
