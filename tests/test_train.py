"""train.py: data, schedule, loss, one step, decoding, checkpoints, resuming."""

import math
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT
from torch import nn

import train
from model import PAD_ID, Transformer
from test_model import small_model
from toolbox.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from train import (
    BOS_ID,
    EOS_ID,
    MAX_LEN,
    MIN_LEN,
    NUM_OFFSET,
    SEQ_LEN,
    decode_digits,
    drop_seen,
    encode_digits,
    exact_match,
    exact_rows,
    greedy_decode,
    load_checkpoint,
    load_model,
    loss_sum,
    make_dataset,
    noam_lambda,
    teacher_forcing,
    train_epoch,
    train_step,
)

# ----------------------------------------------------------------------------------------------------- data


def test_dataset_rows_are_laid_out_as_the_sample_shows():
    src, tgt = make_dataset(3000, seed=0)
    assert src.shape == tgt.shape == (3000, SEQ_LEN) and src.dtype == tgt.dtype == torch.int64
    for source, target in zip(src.tolist(), tgt.tolist(), strict=True):
        n = source.index(EOS_ID)
        digits = source[:n]
        assert MIN_LEN <= n <= MAX_LEN and all(NUM_OFFSET <= d < NUM_OFFSET + 10 for d in digits)
        assert source == digits + [EOS_ID] + [PAD_ID] * (SEQ_LEN - n - 1)
        assert target == [BOS_ID] + digits[::-1] + [EOS_ID] + [PAD_ID] * (SEQ_LEN - n - 2)


@pytest.mark.parametrize("seed, first", [(0, "65230001869"), (1, "5790189"), (2, "21248403687")])
def test_the_strings_are_the_chapters_own(seed, first):
    rng, expected = np.random.default_rng(seed), []
    for _ in range(1000):
        length = rng.integers(3, 13)
        expected.append("".join(str(digit) for digit in rng.integers(0, 10, length)))
    src, tgt = make_dataset(1000, seed)
    assert expected[0] == first and [decode_digits(row) for row in src] == expected
    assert [decode_digits(row) for row in tgt] == [digits[::-1] for digits in expected]
    assert torch.equal(make_dataset(300, seed)[0], src[:300])  # a larger set begins as a smaller one


def test_lengths_and_digits_are_uniform():
    src, _ = make_dataset(20_000, seed=0)
    lengths = (src >= NUM_OFFSET).sum(1).bincount(minlength=MAX_LEN + 1)[MIN_LEN:]
    digits = src[src >= NUM_OFFSET].bincount()[NUM_OFFSET:]
    assert len(lengths) == 10 and len(digits) == 10
    assert (lengths / 2000 - 1).abs().max() < 0.1 and (digits / digits.float().mean() - 1).abs().max() < 0.05


def test_more_long_strings_on_request():
    src, _ = make_dataset(12_000, seed=0, extra_long=2)
    lengths = (src >= NUM_OFFSET).sum(1).bincount(minlength=MAX_LEN + 1)[MIN_LEN:]
    assert (lengths / 1000 - torch.tensor([1.0] * 9 + [3.0])).abs().max() < 0.15


def test_seeds_decide_the_data():
    assert torch.equal(make_dataset(50, 3)[0], make_dataset(50, 3)[0])
    assert not torch.equal(make_dataset(50, 3)[0], make_dataset(50, 4)[0])


def test_the_sample_of_the_chapter_and_back():
    assert encode_digits("73095").tolist() == [[10, 6, 3, 12, 8, 2]]
    assert decode_digits(torch.tensor([8, 12, 3, 6, 10, 2, 0, 0])) == "59037"
    assert decode_digits(torch.tensor([1, 8, 12, 3])) == "590"  # <bos> does not count; no <eos> is no error
    assert [train.token_name(i) for i in (0, 1, 2, 3, 12)] == ["<pad>", "<bos>", "<eos>", "0", "9"]


def test_validation_holds_no_training_string_and_the_overlap_was_real():
    train_src, _ = make_dataset(20_000, train.TRAIN_SEED)
    val_src, val_tgt = make_dataset(train.VAL_DRAWN, train.VAL_SEED)
    kept_src, kept_tgt = drop_seen(val_src, val_tgt, train_src)
    seen = {tuple(row) for row in train_src.tolist()}
    expected = [row for row in val_src.tolist() if tuple(row) not in seen]
    assert kept_src.tolist() == expected and len(expected) < len(val_src)
    assert all(decode_digits(t) == decode_digits(s)[::-1] for s, t in zip(kept_src, kept_tgt, strict=True))


# ------------------------------------------------------------------------------------------------- schedule


def learning_rates_used(d_model, warmup, updates):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam_lambda(d_model, warmup))
    used = []
    for _ in range(updates):
        parameter.grad = torch.ones(1)
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used, scheduler.get_last_lr()[0]


@pytest.mark.filterwarnings("error::UserWarning")
def test_noam_by_hand():
    used, _ = learning_rates_used(d_model=512, warmup=4, updates=16)
    assert [used[0], used[3], used[15]] == pytest.approx([0.005524, 0.022097, 0.011049], rel=1e-4)
    assert max(used) == used[3]


def test_learning_rates_of_the_chapters_table():
    after = {epoch: learning_rates_used(128, 1000, 312 * epoch)[1] for epoch in (1, 2, 3, 4, 10)}
    printed = {epoch: f"{rate:.2e}" for epoch, rate in after.items()}
    assert printed == {1: "8.75e-04", 2: "1.75e-03", 3: "2.62e-03", 4: "2.50e-03", 10: "1.58e-03"}


@pytest.mark.parametrize("warmup", [0, -5])
def test_warmup_below_one_is_refused(warmup):
    with pytest.raises(ValueError, match=f"warmup={warmup}"):
        noam_lambda(128, warmup)


def test_linear_decay_peaks_at_warmup_and_ends_at_zero():
    factor = train.linear_decay_lambda(peak=2.0, warmup=4, total=10)
    assert [factor(step) for step in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0 * 6 / 7])
    assert factor(9) == pytest.approx(2.0 / 7) and factor(10) == factor(11) == 0
    for warmup in (0, 11):
        with pytest.raises(ValueError, match=f"warmup={warmup}: .*10 updates"):
            train.linear_decay_lambda(2.0, warmup, 10)


# ------------------------------------------------------------------------------------------- loss and steps


def optimizer_for(model, lr=1e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def check_shift(tgt):
    """Each gold row has one <eos>, and is the decoder's input one place to the left."""
    tgt_in, tgt_out = teacher_forcing(tgt)
    assert (tgt_in[:, 0] == BOS_ID).all() and not (tgt_out == BOS_ID).any()
    assert ((tgt_out == EOS_ID).sum(1) == 1).all()
    assert torch.equal(tgt_in[:, 1:], tgt_out[:, :-1])


def test_teacher_forcing_shifts_by_one():
    tgt = torch.tensor([[1, 5, 6, 7, 2, 0, 0, 0], [1, 3, 4, 5, 6, 7, 8, 2]])  # lengths 3 and 6
    check_shift(tgt)
    tgt_in, tgt_out = teacher_forcing(tgt)
    after_eos = tgt_out[0][tgt_in[0] == EOS_ID]
    assert after_eos.tolist() == [PAD_ID]  # what follows <eos> is not graded


def test_loss_counts_real_tokens_only():
    """V = 4, uniform logits: ln 4 per real token; a PAD place costs nothing and pulls at nothing."""
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    loss = loss_sum(logits, torch.tensor([[3, 2, PAD_ID]]))
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(4))
    assert (logits.grad[0, 2] == 0).all() and logits.grad[0, 0].tolist() == [0.25, 0.25, 0.25, -0.75]
    assert loss_sum(logits.bfloat16(), torch.tensor([[3, 2, PAD_ID]])).dtype == torch.float32


def smoothed_loss(logits, target, smoothing):
    return loss_sum(torch.tensor([[logits]]), torch.tensor([[target]]), smoothing).item()


def test_label_smoothing_by_hand():
    """V = 5, PAD = 0, smoothing 0.4, target 2: the wanted distribution is [0, .1333, .6, .1333, .1333]."""
    logits = [3.0, 0.5, 1.0, -1.0, 0.0]
    log_p = torch.tensor(logits).log_softmax(0)
    wanted = torch.tensor([0, 0.4 / 3, 0.6, 0.4 / 3, 0.4 / 3])
    assert smoothed_loss(logits, 2, 0.4) == pytest.approx(-(wanted * log_p).sum().item(), rel=1e-5)
    assert smoothed_loss(logits, PAD_ID, 0.4) == 0
    assert smoothed_loss(logits, 2, 0.0) == pytest.approx(-log_p[2].item(), rel=1e-5)


@pytest.mark.parametrize("pads", [0, 1, 3, 4])
def test_label_smoothing_leaves_nothing_on_padding(pads):
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([[2, 3, 4, 1]])
    target[0, 4 - pads :] = PAD_ID
    loss_sum(logits, target, 0.4).backward()
    p = logits.detach().softmax(-1)
    real = target != PAD_ID
    # The gradient is p minus the wanted share: plain p, so that PAD is wanted nowhere.
    assert torch.allclose(logits.grad[..., PAD_ID][real], p[..., PAD_ID][real], atol=1e-6)
    assert (logits.grad[~real] == 0).all() and logits.grad.isfinite().all()


def smoothed_loss_by_the_formula():
    """-> logits [3, 1, 5], targets [3, 1] with a PAD, the loss with smoothing 0.1, its gradient."""
    logits = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([[2], [PAD_ID], [4]])
    wanted = torch.full((2, 5), 0.1 / 3).scatter(1, target[[0, 2]], 0.9)
    wanted[:, PAD_ID] = 0
    expected = -(wanted * logits[[0, 2], 0].log_softmax(-1)).sum()
    return logits, target, expected, torch.autograd.grad(expected, logits)[0]


def test_smoothed_loss_and_gradient_by_the_formula():
    logits, target, expected, gradient = smoothed_loss_by_the_formula()
    loss = loss_sum(logits, target, 0.1)
    loss.backward()
    assert torch.allclose(loss, expected) and torch.allclose(logits.grad, gradient, atol=1e-6)


def test_a_batch_of_nothing_but_padding_costs_nothing_and_breaks_nothing():
    model = small_model()
    src, tgt = make_dataset(4, 0)
    totals = train_step(model, *optimizer_for(model), src, torch.full_like(tgt, PAD_ID))
    assert totals.tolist() == [0, 0, 0]
    assert all(p.isfinite().all() for p in model.parameters())


def test_train_step_returns_the_batch_sums_and_updates():
    model = small_model()
    src, tgt = make_dataset(8, 0)
    tgt_in, tgt_out = teacher_forcing(tgt)
    logits = model(src, tgt_in)
    real = tgt_out != PAD_ID
    mean = F.cross_entropy(logits.flatten(0, 1), tgt_out.flatten(), ignore_index=PAD_ID)
    right = (logits.argmax(-1) == tgt_out)[real].sum()
    before = [p.clone() for p in model.parameters()]
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    totals = train_step(model, *optimizer_for(model), src, tgt)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):  # of the mean, not of the sum
        torch.testing.assert_close(parameter.grad, gradient)
    assert totals[0].item() == pytest.approx(mean.item() * real.sum().item(), rel=1e-5)
    assert totals[1:].tolist() == [right.item(), real.sum().item()]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_epoch_numbers_are_means_over_tokens_and_the_last_batch_is_dropped(monkeypatch):
    batches = []

    def step(model, optimizer, scheduler, src, tgt, precision, smoothing):
        assert model.training  # though it came in eval mode
        batches.append(src)
        return torch.tensor([[30.0, 2.0, 10.0], [1.0, 4.0, 90.0]][len(batches) - 1])

    monkeypatch.setattr(train, "train_step", step)
    src, tgt = make_dataset(21, 0)
    loss, accuracy = train_epoch(small_model(), None, None, src, tgt, 10, "fp32")
    assert (loss, accuracy) == pytest.approx((0.31, 0.06))
    rows = torch.cat(batches)
    assert rows.shape == (20, SEQ_LEN) and not torch.equal(rows, src[:20])
    assert {tuple(r) for r in rows.tolist()} <= {tuple(r) for r in src.tolist()}


def test_a_short_training_learns(capsys):
    """20 memorised pairs: every greedy output is right and ends by <eos>, not by running out of room."""
    torch.manual_seed(0)
    model = Transformer(13, 13, d_model=64, num_heads=4, dff=128, max_len=SEQ_LEN, dropout=0.0)
    src, tgt = make_dataset(20, 0)
    optimizer, scheduler = optimizer_for(model, lr=3e-3)
    assert exact_match(model, src, tgt) == 0
    for _ in range(120):
        train_step(model, optimizer, scheduler, src, tgt)
    output = greedy_decode(model, src, max_len=SEQ_LEN)
    assert ((output == EOS_ID).sum(1) == 1).all()
    assert exact_match(model, src, tgt) == 1


def test_bf16_autocast_trains_with_fp32_weights():
    model = small_model()
    src, tgt = make_dataset(8, 0)
    dtypes = []
    model.out_proj.register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    totals = train_step(model, *optimizer_for(model), src, tgt, "bf16")
    train_step(model, *optimizer_for(model), src, tgt, "fp32")
    assert dtypes == [torch.bfloat16, torch.float32] and totals.isfinite().all()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("attention", ["manual", "sdpa"])
def test_no_tensor_is_made_on_a_device_of_its_own(attention, every_device_given):
    """But for the random numbers of `Dropout` on the CPU: here it is off."""
    model, (src, tgt) = small_model(attention=attention, max_len=SEQ_LEN), make_dataset(8, 0)
    state = optimizer_for(model)
    train_epoch(model, *state, src, tgt, 4, "fp32")  # Adam makes its own state now
    with every_device_given():
        train_epoch(model, *state, src, tgt, 4, "bf16", 0.1)
        for use_cache in (True, False):
            greedy_decode(model, src, use_cache=use_cache)


# ------------------------------------------------------------------------------------------------- decoding


class Scripted(nn.Module):
    """A model that says a given row of ids whatever it reads, and counts its calls."""

    def __init__(self, rows, max_len=SEQ_LEN):
        super().__init__()
        self.rows, self.settings = torch.tensor(rows), {"max_len": max_len, "num_layers": 1}
        self.encoded = self.decoded = 0

    def encode(self, src):
        self.encoded += 1
        return src, src == PAD_ID

    def decode(self, tgt_in, memory, src_mask, cache):
        assert tgt_in.size(1) == 1 and (self.decoded > 0 or (tgt_in == BOS_ID).all())
        self.decoded += 1
        return F.one_hot(self.rows[:, self.decoded - 1 : self.decoded], 13).float(), []


def test_greedy_stops_when_all_rows_have_ended_and_pads_behind_eos():
    model = Scripted([[5, 2, 7, 7, 7], [5, 6, 7, 2, 7]])
    output = greedy_decode(model, torch.ones(2, 3, dtype=torch.long))
    assert output.tolist() == [[1, 5, 2, 0, 0], [1, 5, 6, 7, 2]]
    assert (model.encoded, model.decoded) == (1, 4)


@pytest.mark.parametrize("max_len", [1, 2, 6])
def test_greedy_makes_at_most_max_len_tokens_and_counts_bos(max_len):
    output = greedy_decode(Scripted([[5] * SEQ_LEN]), torch.ones(1, 3, dtype=torch.long), max_len=max_len)
    assert output.tolist() == [[BOS_ID] + [5] * (max_len - 1)]


def test_greedy_reaches_the_end_of_the_position_table_and_not_beyond():
    model = small_model()
    with torch.no_grad():
        model.out_proj.bias[EOS_ID] = -1e9
    output = greedy_decode(model, encode_digits("123"), max_len=14)
    assert output.shape == (1, 14) and (output[:, 0] == BOS_ID).all()
    assert not torch.isin(output[:, 1:], torch.tensor([PAD_ID, BOS_ID, EOS_ID])).any()
    for max_len in (0, 15):
        with pytest.raises(ValueError, match=f"max_len={max_len}: .*14"):
            greedy_decode(model, encode_digits("123"), max_len=max_len)


def test_greedy_does_not_depend_on_the_rest_of_the_batch():
    model = small_model()
    src, _ = make_dataset(30, 0)
    together = greedy_decode(model, src)
    for row, output in zip(src, together, strict=True):
        alone = greedy_decode(model, row[None, : row.tolist().index(EOS_ID) + 1])[0]
        assert torch.equal(output[: len(alone)], alone) and (output[len(alone) :] == PAD_ID).all()


def test_exact_match_counts_whole_rows_up_to_eos():
    src = torch.ones(4, SEQ_LEN, dtype=torch.long)
    tgt = torch.tensor([[1, 5, 6, 2] + [0] * 10] * 4)
    rows = [[5, 6, 2, 9], [5, 6, 6, 2], [5, 2, 9, 9], [5, 6, 2, 2]]  # right; too long; too short; right
    model = Scripted([row + [2] * 10 for row in rows])
    assert exact_rows(model, src, tgt).tolist() == [True, False, False, True]
    assert exact_match(Scripted([row + [2] * 10 for row in rows]), src, tgt) == 0.5


def test_a_row_that_never_ends_is_not_a_match():
    tgt = torch.tensor([[1, 5, 6, 2]] * 2)
    assert exact_rows(Scripted([[5, 6, 9], [5, 6, 2]]), tgt, tgt).tolist() == [False, True]


def test_exact_rows_in_batches_equal_exact_rows_at_once():
    model = small_model()
    src, _ = make_dataset(30, 0)
    tgt = greedy_decode(model, src, max_len=SEQ_LEN)
    tgt = F.pad(tgt, (0, SEQ_LEN - tgt.size(1)))
    tgt[7, 1] = 3 + (tgt[7, 1] - 2) % 10
    expected = [number != 7 for number in range(30)]
    assert (
        exact_rows(model, src, tgt).tolist() == exact_rows(model, src, tgt, batch_size=7).tolist() == expected
    )


@pytest.mark.parametrize("mode", [True, False])
def test_decoding_runs_in_eval_mode_and_gives_the_mode_back(mode):
    model = small_model(dropout=0.5).train(mode)
    model.encoder.layers[0].eval()  # a part frozen on purpose stays frozen
    modes = []
    model.decoder.register_forward_hook(lambda module, *_: modes.append(module.training))
    outputs = [greedy_decode(model, make_dataset(5, 0)[0]) for _ in range(2)]
    assert torch.equal(*outputs) and set(modes) == {False}
    assert model.training is model.decoder.layers[1].training is mode
    assert model.encoder.layers[0].training is False
    assert not torch.is_inference_mode_enabled()


# -------------------------------------------------------------- whole runs: checkpoints, resuming, Ctrl-C


SHORT = ["--samples", "192", "--batch-size", "32"]


@pytest.fixture
def quick(monkeypatch):
    """A short report at the end, so that a whole run takes a second or two."""
    monkeypatch.setattr(train, "TEST_SIZE", 20)
    monkeypatch.setattr(train, "VAL_SCORED", 20)


def run(out, *options):
    return train.main([*SHORT, "--out", str(out), *options])


def without_seconds(checkpoint):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in checkpoint["history"]]


def equal_states(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_resume_continues_to_the_bit(quick, tmp_path, capsys):
    straight, halves = tmp_path / "straight.pt", tmp_path / "halves.pt"
    assert run(straight, "--epochs", "4") == 0
    assert run(halves, "--epochs", "2") == 0
    assert run(halves, "--epochs", "4", "--resume") == 0
    a, b = load_checkpoint(straight), load_checkpoint(halves)
    assert equal_states(a["model"], b["model"]) and torch.equal(a["rng"]["cpu"], b["rng"]["cpu"])
    assert without_seconds(a) == without_seconds(b) and [row["epoch"] for row in b["history"]] == [1, 2, 3, 4]
    steps = {float(state["step"]) for state in b["optimizer"]["state"].values()}
    assert steps == {4 * (192 // 32)} and b["scheduler"]["last_epoch"] == 24 and b["epoch"] == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.split(" s")[0].rsplit("  ", 1)[0] for line in lines[:4]] == [
        line.split(" s")[0].rsplit("  ", 1)[0] for line in lines[4:]
    ]


def test_same_seed_same_weights_other_seed_other_weights(quick, tmp_path):
    for name, seed in [("a", "5"), ("b", "5"), ("c", "6")]:
        run(tmp_path / name, "--epochs", "1", "--seed", seed)
    a, b, c = (load_checkpoint(tmp_path / name)["model"] for name in "abc")
    assert equal_states(a, b) and not equal_states(a, c)


def test_resume_after_the_last_epoch_reports_and_changes_nothing(quick, tmp_path, capsys):
    run(tmp_path / "a.pt", "--epochs", "1")
    before = load_checkpoint(tmp_path / "a.pt")
    assert run(tmp_path / "a.pt", "--epochs", "1", "--resume") == 0
    assert equal_states(before["model"], load_checkpoint(tmp_path / "a.pt")["model"])
    assert "demo: 7 3 0 9 5 -> " in capsys.readouterr().out


def test_the_fast_recipe_is_really_another_run(quick, tmp_path, capsys):
    """Its own settings reach model, data, loss and schedule; the file is of the same kind."""
    out = tmp_path / "fast.pt"
    assert train.main(["--recipe", "fast", "--samples", "640", "--warmup", "5", "--out", str(out)]) == 0
    (model, _), checkpoint = load_model(out), load_checkpoint(out)
    assert sum(p.numel() for p in model.parameters()) == 931_213 and model.settings["dropout"] == 0
    assert checkpoint["run"]["recipe"] == "fast" and checkpoint["history"][0]["lr"] == 0
    assert checkpoint["scheduler"]["last_epoch"] == 10
    assert train.main(["--resume", "--out", str(out)]) == 0
    for options in (["--epochs", "2"], ["--recipe", "chapter"]):
        with pytest.raises(SystemExit):
            train.main(["--resume", "--out", str(out), *options])
    with pytest.raises(SystemExit):
        train.main(["--recipe", "fast", "--samples", "640", "--out", str(out)])
    assert "--warmup 40" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed, value", [("smoothing", 0.0), ("extra_long", 0), ("peak", 1e-3), ("dropout", 0.1)]
)
def test_every_part_of_the_fast_recipe_changes_the_run(quick, tmp_path, monkeypatch, changed, value):
    options = ["--recipe", "fast", "--samples", "128", "--warmup", "1", "--out"]
    train.main([*options, str(tmp_path / "a.pt")])
    monkeypatch.setitem(train.RECIPES, "fast", train.RECIPES["fast"] | {changed: value})
    train.main([*options, str(tmp_path / "b.pt")])
    a, b = (load_checkpoint(tmp_path / name)["model"] for name in ("a.pt", "b.pt"))
    assert not equal_states(a, b)


def test_resume_takes_the_settings_of_the_first_run_and_refuses_others(quick, tmp_path, capsys):
    out = tmp_path / "a.pt"
    run(out, "--epochs", "1", "--warmup", "50", "--seed", "3")
    assert train.main(["--epochs", "2", "--resume", "--out", str(out)]) == 0
    stored = load_checkpoint(out)["run"]
    assert {name: stored[name] for name in ("recipe", "batch_size", "samples", "warmup", "seed")} == dict(
        recipe="chapter", batch_size=32, samples=192, warmup=50, seed=3
    )
    with pytest.raises(SystemExit) as stop:
        run(out, "--resume", "--seed", "0")
    assert stop.value.code == 2 and "--seed 0" in capsys.readouterr().err


def test_ctrl_c_leaves_the_last_whole_epoch_and_resume_is_exact(quick, tmp_path, monkeypatch, capsys):
    straight, broken = tmp_path / "straight.pt", tmp_path / "broken.pt"
    run(straight, "--epochs", "3")
    step, calls = train.train_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 9:  # in the middle of epoch 2
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(train, "train_step", interrupted)
    assert run(broken, "--epochs", "3") == 130
    assert load_checkpoint(broken)["epoch"] == 1 and "--resume" in capsys.readouterr().out
    assert run(broken, "--epochs", "3", "--resume") == 0
    assert equal_states(load_checkpoint(straight)["model"], load_checkpoint(broken)["model"])
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_ctrl_c_before_anything_was_saved_promises_no_file(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "make_dataset", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(tmp_path / "a.pt", "--epochs", "3") == 130
    assert capsys.readouterr().out == "interrupted before anything was saved\n"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_first_epoch_leaves_a_usable_file(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train_step", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(tmp_path / "a.pt", "--epochs", "3") == 130
    assert "a.pt holds the untrained model" in capsys.readouterr().out
    model, history = load_model(tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt")["epoch"] == 0 and history == []
    assert greedy_decode(model, encode_digits("123")).shape[0] == 1


def test_ctrl_c_in_the_first_epoch_of_a_new_run_keeps_the_old_file(quick, tmp_path, monkeypatch, capsys):
    run(tmp_path / "a.pt", "--epochs", "1")
    before = (tmp_path / "a.pt").read_bytes()
    monkeypatch.setattr(train, "train_step", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(tmp_path / "a.pt", "--epochs", "3") == 130
    assert "still what it was" in capsys.readouterr().out and (tmp_path / "a.pt").read_bytes() == before


def test_going_on_from_another_model_is_one_line(quick, tmp_path, capsys):
    run(tmp_path / "a.pt", "--epochs", "1")
    checkpoint = load_checkpoint(tmp_path / "a.pt")
    checkpoint["model"].pop("out_proj.bias")
    torch.save(checkpoint, tmp_path / "a.pt")
    capsys.readouterr()
    assert run(tmp_path / "a.pt", "--epochs", "2", "--resume") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a.pt: not of this model" in error


def test_a_length_without_unseen_strings_has_no_share(monkeypatch, capsys):
    src, _ = make_dataset(200_000, 0)
    monkeypatch.setattr(train, "TEST_SIZE", 50)
    monkeypatch.setattr(train, "exact_rows", lambda model, src, tgt: torch.ones(len(src), dtype=torch.bool))
    train.report(small_model(), src, torch.device("cpu"))
    right = next(line for line in capsys.readouterr().out.splitlines() if "right" in line).split()
    assert right[1] == "-" and right[-1] == "1.0000" and "nan" not in right


def test_the_chapters_validation_score_includes_the_strings_of_training(monkeypatch, capsys):
    scored = []
    monkeypatch.setattr(train, "TEST_SIZE", 50)
    monkeypatch.setattr(train, "exact_match", lambda model, *pair: scored.append(pair) or 0.25)
    train_src, _ = make_dataset(20_000, 0)
    train.report(small_model(), train_src, torch.device("cpu"))
    (src, tgt), seen = scored[0], {tuple(row) for row in train_src.tolist()}
    drawn = make_dataset(500, 1)
    assert torch.equal(src, drawn[0]) and torch.equal(tgt, drawn[1])
    both = sum(tuple(row) in seen for row in src.tolist())
    assert both > 0
    line = f"on the first 500 validation strings, {both} of them also in training: 0.250"
    assert line in capsys.readouterr().out.splitlines()


def test_a_real_ctrl_c(tmp_path):
    command = [sys.executable, ROOT / "train.py", *SHORT, "--epochs", "1000", "--out", "a.pt"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("epoch"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "" and "interrupted" in output
    assert load_checkpoint(tmp_path / "a.pt")["epoch"] >= 1


def test_training_mode_in_every_step_eval_mode_in_every_validation(quick, tmp_path, monkeypatch):
    log, encode = [], Transformer.encode

    def logged(model, src):
        log.append((torch.is_grad_enabled(), model.training, model.decoder.layers[0].drop.training))
        return encode(model, src)

    monkeypatch.setattr(Transformer, "encode", logged)
    run(tmp_path / "a.pt", "--epochs", "2")
    step, validation = (True, True, True), (False, False, False)
    assert log[:14] == ([step] * 6 + [validation]) * 2 and set(log[14:]) == {validation}


def test_validation_strings_that_training_has_seen_are_not_scored(tmp_path, monkeypatch, capsys):
    scored = []
    monkeypatch.setattr(train, "train_step", lambda *args: torch.ones(3))
    monkeypatch.setattr(train, "exact_match", lambda model, src, tgt: scored.append(src) or 0.5)
    monkeypatch.setattr(train, "report", lambda *args: None)
    assert train.main(["--epochs", "1", "--device", "cpu", "--out", str(tmp_path / "a.pt")]) == 0
    seen = {tuple(row) for row in make_dataset(20_000, 0)[0].tolist()}
    rows = [tuple(row) for row in scored[0].tolist()]
    assert len(rows) == 500 and not seen & set(rows)
    drawn = [tuple(row) for row in make_dataset(1000, 1)[0].tolist()]
    removed = sum(row in seen for row in drawn)
    assert removed > 0 and rows == [row for row in drawn if row not in seen][:500]
    assert f"1,000 drawn, {removed} of them also in training: removed; 500 scored" in capsys.readouterr().out


def test_validation_twice_gives_the_same(quick, tmp_path):
    run(tmp_path / "a.pt", "--epochs", "1")
    model, _ = load_model(tmp_path / "a.pt")
    src, tgt = make_dataset(20, 1)
    model.train()
    assert torch.equal(exact_rows(model, src, tgt), exact_rows(model, src, tgt))
    assert torch.equal(greedy_decode(model, src), greedy_decode(model, src))


def test_the_file_holds_plain_values_and_rebuilds_the_model(quick, tmp_path):
    run(tmp_path / "a.pt", "--epochs", "1")
    checkpoint = torch.load(tmp_path / "a.pt", weights_only=True)  # nothing else is in it
    assert list(checkpoint["history"][0]) == [
        "epoch",
        "loss",
        "token_acc",
        "val_exact_match",
        "lr",
        "seconds",
    ]
    model, history = load_model(tmp_path / "a.pt")
    assert history == checkpoint["history"]
    assert model.settings == checkpoint["settings"] and not model.training
    assert model.settings["max_len"] == SEQ_LEN and sum(p.numel() for p in model.parameters()) == 931_213


def test_every_load_says_where_to_and_weights_only():
    """A file made on a GPU must load without one; a file from a stranger must not run code."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        if path.parent.name == "tests":
            continue
        for call in path.read_text(encoding="utf-8").split("torch.load(")[1:]:
            assert "map_location" in call.split(")")[0] and "weights_only=True" in call.split(")")[0], path


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip"])
def test_a_broken_file_is_named_in_one_line(content, tmp_path):
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="bad.pt: not a checkpoint"):
        load_model(tmp_path / "bad.pt")


def test_a_checkpoint_with_one_bit_changed_is_refused(tmp_path):
    """torch.load alone takes the first two as they are, and for the third returns memory never written."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"run": "recipe", "weights": torch.arange(1000.0)})
    whole = path.read_bytes()
    weights = whole.index(torch.arange(1000.0).numpy().tobytes())
    attributes = whole.rindex(b"PK\x01\x02", 0, whole.rindex(b"/data/0")) + 38  # in the archive's directory
    for place, bit in ((whole.index(b"recipe"), 1), (weights + 400, 1), (attributes, 16)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="a.pt: not a checkpoint of train.py"):
            read_checkpoint(path, (), "train.py")
    path.write_bytes(whole)
    assert read_checkpoint(path, (), "train.py")["run"] == "recipe"


def test_other_torch_files_and_other_models_are_refused(quick, tmp_path):
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="other.pt: not a checkpoint of train.py .no .*history"):
        load_model(tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="list.pt: not a checkpoint"):
        load_model(tmp_path / "list.pt")
    run(tmp_path / "a.pt", "--epochs", "1")
    checkpoint = load_checkpoint(tmp_path / "a.pt")
    checkpoint["settings"]["d_model"] = 64
    torch.save(checkpoint, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="a.pt: does not fit"):
        load_model(tmp_path / "a.pt")


def test_a_failed_save_keeps_the_old_file(quick, tmp_path, monkeypatch, capsys):
    run(tmp_path / "a.pt", "--epochs", "1")
    before = (tmp_path / "a.pt").read_bytes()

    def disk_full(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    capsys.readouterr()
    assert run(tmp_path / "a.pt", "--epochs", "2", "--resume") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a.pt" in error and "No space left" in error
    assert (tmp_path / "a.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_progress_on_a_terminal_only(monkeypatch, capsys):
    train.show_progress("epoch 1/2, step 20/312")
    assert capsys.readouterr().err == ""
    src, tgt = make_dataset(40, 0)
    model = small_model()
    monkeypatch.setattr(train.sys.stderr, "isatty", lambda: True, raising=False)
    train_epoch(model, *optimizer_for(model), src, tgt, 2, "fp32", label="epoch 1/2, ")
    output = capsys.readouterr()
    assert output.out == "" and output.err == "\r\x1b[Kepoch 1/2, step 20/20\r\x1b[K"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cpu_checkpoint_goes_on_on_the_gpu(quick, tmp_path):
    run(tmp_path / "a.pt", "--epochs", "1", "--device", "cpu")
    assert run(tmp_path / "a.pt", "--epochs", "2", "--resume", "--device", "cuda") == 0
    assert run(tmp_path / "a.pt", "--epochs", "3", "--resume", "--device", "cpu") == 0
    assert load_checkpoint(tmp_path / "a.pt")["epoch"] == 3
