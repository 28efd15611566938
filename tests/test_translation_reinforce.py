"""translation/reinforce.py: drawn translations, their advantages, the loss and the epoch of them."""

import math

import pytest
import torch

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

from test_translation_decode import Toy
from translation_runs import no_tensorboard, read, resume, same, train  # noqa: F401

import translation.train as tt
from model import PAD_ID, Transformer
from test_model import small_model
from train import BOS_ID, EOS_ID
from translation import reinforce
from translation.data import Tokenizer, collate
from translation.decode import beam_search
from translation.reinforce import add_samples, advantage_loss, advantages, sample, sentence_bleu

SRC = torch.tensor([[5, 6, 2, 0], [7, 2, 0, 0]])


# ------------------------------------------------------------------------------------------------- drawing


def test_what_is_drawn_ends_in_eos_and_then_pad():
    torch.manual_seed(0)
    ids = sample(small_model(), SRC, 50, 6)
    assert ids.shape[0] == 100 and ids.size(1) <= 6 and not (ids == BOS_ID).any()
    ended = (ids == EOS_ID).cumsum(1) - (ids == EOS_ID).int() > 0  # True behind the first <eos>
    assert ended.any() and torch.equal(ids == PAD_ID, ended)


def test_tokens_are_drawn_as_often_as_the_softmax_says():
    """Of 4,000 drawn: each sequence of up to two tokens within 5 standard deviations of its probability."""
    torch.manual_seed(0)
    toy, count, temperature = Toy(room=2), 4000, 0.7
    src = torch.tensor([[3], [9]])
    drawn = sample(toy, src, count, 2, temperature).tolist()

    def chances(source, prefix):
        scores = toy.logits(source, [BOS_ID, *prefix]) / temperature
        scores[: BOS_ID + 1] = -torch.inf
        return scores.softmax(0).tolist()

    for row, source in enumerate((3, 9)):
        outputs = drawn[row * count : (row + 1) * count]
        for first, p in enumerate(chances(source, [])):
            pairs = [([EOS_ID, PAD_ID], p)] if first == EOS_ID else []
            if first > EOS_ID:
                pairs = [([first, second], p * q) for second, q in enumerate(chances(source, [first]))]
            for ids, expected in pairs:
                spread = math.sqrt(count * expected * (1 - expected))
                assert abs(outputs.count(ids) - count * expected) <= 5 * spread


def test_drawing_at_almost_no_temperature_is_greedy_decoding_in_padded_batches_too():
    torch.manual_seed(0)
    model, src = small_model(), torch.randint(3, 13, (8, 6))
    src[::2, 4:] = PAD_ID
    drawn = sample(model, src, 2, 9, 1e-6)
    for row, best in enumerate(beam_search(model, src, beam=1, max_len=9)):
        for ids in drawn[2 * row : 2 * row + 2].tolist():
            assert [i for i in ids if i != PAD_ID] == best.ids


def test_drawing_leaves_the_models_mode_and_can_be_trained_on():
    model = small_model().train()
    ids = sample(model, SRC, 2, 4)
    assert model.training and model.encoder.layers[0].training and not ids.is_inference()


@pytest.mark.parametrize("wrong", [dict(count=0), dict(max_len=0), dict(temperature=0.0)])
def test_wrong_numbers_are_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
        sample(small_model(), SRC, **(dict(count=2, max_len=4) | wrong))


# ------------------------------------------------------------------------------------------- advantage, loss


def test_an_advantage_is_what_a_reward_has_above_the_mean_of_the_others():
    found = advantages(torch.tensor([[0.9, 0.3, 0.0], [0.4, 0.4, 0.4]]))
    torch.testing.assert_close(found, torch.tensor([[0.75, -0.15, -0.6], [0.0, 0.0, 0.0]]))


def test_the_loss_by_hand():
    torch.manual_seed(0)
    logits = torch.randn(40, 3, 7).bfloat16().requires_grad_()  # more rows than one piece
    labels = torch.randint(3, 7, (40, 3))
    labels[::3, 1:] = PAD_ID
    advantage = torch.randn(40)
    expected = torch.zeros(())
    for row in range(40):
        log_p = logits[row].float().log_softmax(-1)
        for t in range(3):
            if labels[row, t] != PAD_ID:
                expected = expected - advantage[row] * log_p[t, labels[row, t]] / reinforce.SAMPLES
    loss = advantage_loss(logits, labels, advantage)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    assert advantage_loss(logits[:0], labels[:0], advantage[:0]).item() == 0


def test_sentence_bleu_is_sacrebleus():
    import sacrebleu

    lines = ["a dog runs on the grass", "a dog", "a cat sits on the grass"]
    tokenizer = Tokenizer.train(lines * 3, 400)
    reward = sentence_bleu(tokenizer)
    ids = [[*tokenizer.encode(line), EOS_ID, PAD_ID] for line in lines]
    for a, b in ((0, 0), (1, 0), (2, 0)):
        expected = sacrebleu.sentence_bleu(lines[a], [lines[b]]).score / 100
        assert reward(ids[a], ids[b]) == pytest.approx(expected)
    assert reward(ids[0], ids[0]) == pytest.approx(1.0) and 0 < reward(ids[2], ids[0]) < 1


# ------------------------------------------------------------------------------------------------- the batch


BATCH = collate([([5, 6], [8, 9, 10]), ([7], [11])])


def test_drawn_rows_stand_below_the_references(monkeypatch):
    drawn = torch.tensor(
        [[8, 2, 0, 0, 0], [8, 9, 3, 4, 2], [8, 2, 0, 0, 0], [5, 5, 5, 5, 5]] + 4 * [[6, 2, 0, 0, 0]]
    )
    asked = []
    monkeypatch.setattr(reinforce, "sample", lambda *args: asked.append(args[2:4]) or drawn)
    heard = []

    def reward(ids, gold):
        heard.append((ids, gold))
        return len(set(ids) & {9, 3, 5}) / 10

    batch = add_samples(BATCH, small_model(), reward)
    assert batch["src"].tolist() == [*BATCH["src"].tolist(), *4 * [BATCH["src"][0].tolist()]]
    assert batch["labels"].tolist() == [[8, 9, 10, 2, 0], [11, 2, 0, 0, 0], *drawn[:4].tolist()]
    assert batch["tgt_in"].tolist() == [
        [1, 8, 9, 10, 0], [1, 11, 0, 0, 0],
        [1, 8, 0, 0, 0], [1, 8, 9, 3, 4], [1, 8, 0, 0, 0], [1, 5, 5, 5, 5],
    ]  # fmt: skip
    torch.testing.assert_close(batch["advantage"], torch.tensor([-0.1, 1 / 6, -0.1, 1 / 30]))
    assert asked == [(4, 14)]  # four of each, with room for 10 tokens more than the longer reference has
    assert len(heard) == 4  # each translation of a source once
    assert ([8, 9, 3, 4, 2], [8, 9, 10, 2]) in heard  # the second source's four were all the same: left out


def test_where_all_are_alike_only_the_references_are_left(monkeypatch):
    batch = add_samples(BATCH, small_model(), lambda ids, gold: 0.5)
    assert len(batch["advantage"]) == 0 and len(batch["labels"]) == 2


def step(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    counted, _ = tt.train_step(model, optimizer, scheduler, batch, "fp32", 0.1, 1e9)
    return counted, [p.grad.clone() for p in model.parameters()]


def test_an_update_adds_the_drawn_rows_loss_and_does_not_count_them():
    torch.manual_seed(0)
    model = small_model(dropout=0.0).train()
    batch = add_samples(BATCH, model, lambda ids, gold: ids[0] / 10)
    assert len(batch["advantage"])
    counted, gradient = step(model, batch)
    alone, without = step(model, BATCH)
    torch.testing.assert_close(counted, alone)
    loss = advantage_loss(
        model(batch["src"][2:], batch["tgt_in"][2:]), batch["labels"][2:], batch["advantage"]
    )
    expected = torch.autograd.grad(loss * reinforce.WEIGHT / alone[1], list(model.parameters()))
    for both, token, drawn in zip(gradient, without, expected, strict=True):
        torch.testing.assert_close(both, token + drawn, rtol=1e-4, atol=1e-6)


def test_training_on_a_reward_raises_it():
    """Only outputs with token 5 are rewarded; a model that draws it now and then soon draws it often."""
    torch.manual_seed(0)
    model = Transformer(13, 13, d_model=16, num_heads=2, dff=16, num_layers=1, dropout=0.0)
    optimizer, means = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(40):
        batch = add_samples(BATCH, model, lambda ids, gold: ids.count(5) / len(ids))
        pairs = len(BATCH["labels"])
        logits = model(batch["src"], batch["tgt_in"])[pairs:]
        optimizer.zero_grad()
        advantage_loss(logits, batch["labels"][pairs:], batch["advantage"]).backward()
        optimizer.step()
        means.append((sample(model, BATCH["src"], 64, 8) == 5).float().mean().item())
    assert means[0] < 0.3 and means[-1] > 0.7


# ------------------------------------------------------------------------------------------------- the epoch


def record(monkeypatch):
    rates, rows, honest = [], [], tt.train_step

    def recording(model, optimizer, scheduler, batch, *rest):
        rates.append(optimizer.param_groups[0]["lr"])
        rows.append("advantage" in batch)
        return honest(model, optimizer, scheduler, batch, *rest)

    monkeypatch.setattr(tt, "train_step", recording)
    return rates, rows


def test_the_last_epoch_has_as_many_updates_as_asked_for_and_a_rate_of_its_own(tmp_path, monkeypatch):
    rates, rows = record(monkeypatch)
    last = train(tmp_path, "--epochs", 3, "--cooldown", 1, "--bleu-updates", 2, "--warmup", 2, "--average", 1)
    begin, end = (row["updates"] for row in last["history"][:2])
    assert rows == [False] * end + [True] * 2 and last["history"][2]["updates"] == end + 2
    noam = [0.5 * 32**-0.5 * min((s + 1) ** -0.5, (s + 1) * 2**-1.5) for s in range(end + 2)]
    left = [1.0] * begin + [(end - s) / (end - begin) for s in range(begin, end)] + [0.6, 0.3]
    assert rates == pytest.approx([a * b for a, b in zip(noam, left, strict=True)])
    assert last["optimizer"]["param_groups"][0]["lr"] == 0
    assert last["optimizer"]["state"][0]["step"] == 2  # Adam began anew
    same(read(tmp_path / "averaged.pt")["model"], last["model"])


@pytest.mark.parametrize("updates", [0, 1000])
def test_none_or_one_whole_epoch_at_most(tmp_path, monkeypatch, updates):
    _, rows = record(monkeypatch)
    last = train(tmp_path, "--epochs", 2, "--bleu-updates", updates)
    first, second = (row["updates"] for row in last["history"])
    assert sum(rows) == (second - first if updates else 0)
    if updates:
        assert last["optimizer"]["param_groups"][0]["lr"] == 0


def test_a_run_killed_among_these_updates_resumes_exactly(tmp_path, monkeypatch):
    options = ["--epochs", 2, "--bleu-updates", 3, "--save-every", 1]
    straight = train(tmp_path / "a", *options)
    honest = tt.train_step

    def dying(model, optimizer, scheduler, batch, *rest):
        if "advantage" in batch and scheduler.last_epoch > straight["history"][0]["updates"]:
            raise SystemError("as a kill")
        return honest(model, optimizer, scheduler, batch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(tt, "train_step", dying)
        with pytest.raises(SystemError):
            train(tmp_path / "b", *options)
    assert read(tmp_path / "b/last.pt")["position"] == 1
    same(resume(tmp_path / "b"), straight)


def test_a_finished_run_may_be_given_this_epoch_later(tmp_path):
    whole = train(tmp_path / "a", "--epochs", 3, "--cooldown", 1, "--bleu-updates", 2)
    train(tmp_path / "b", "--epochs", 2, "--cooldown", 1)
    later = resume(tmp_path / "b", "--epochs", 3, "--bleu-updates", 2)
    same(later["model"], whole["model"])
