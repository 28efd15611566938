"""translation/decode.py: beam search against greedy decoding, brute force and itself in other batches."""

import itertools

import pytest
import torch
from test_train import optimizer_for
from torch import nn

from model import PAD_ID, KVCache, Transformer
from test_model import small_model
from train import BOS_ID, EOS_ID, SEQ_LEN, exact_match, greedy_decode, make_dataset, train_step
from translation.decode import Hypothesis, beam_search, length_penalty

V, ROOM = 5, 4  # PAD, BOS, EOS and two words; four tokens


class Toy(nn.Module):
    """Random but fixed next-token scores for every prefix, another set for each source row."""

    def __init__(self, ends: bool = True, vocab: int = V, room: int = ROOM, spread: float = 2.0):
        super().__init__()
        self.settings, self.ends = {"max_len": room, "num_layers": 0}, ends
        self.vocab, self.spread = vocab, spread

    def encode(self, src):
        return src, src == PAD_ID

    def decode(self, tgt_in, memory, src_mask, cache):
        cache.append(tgt_in)
        rows = zip(memory[:, 0].tolist(), cache.ids.tolist(), strict=True)
        return torch.stack([self.logits(source, prefix) for source, prefix in rows])[:, None], []

    def logits(self, source: int, prefix: list[int]) -> torch.Tensor:
        seed = source
        for token in prefix:
            seed = seed * 7 + token
        scores = self.spread * torch.randn(self.vocab, generator=torch.Generator().manual_seed(seed % 2**64))
        return scores if self.ends else scores.index_fill(0, torch.tensor(EOS_ID), -torch.inf)

    def log_p(self, source: int, ids: list[int]) -> float:
        """Teacher-forced log-probability of ids."""
        steps = [self.logits(source, [BOS_ID, *ids[:n]]).log_softmax(0)[ids[n]] for n in range(len(ids))]
        return float(sum(steps))


def brute_force(model: Toy, source: int, alpha: float) -> Hypothesis:
    """The best of all outputs that end in <eos> within the room."""
    outputs = [[*words, EOS_ID] for n in range(ROOM) for words in itertools.product(range(3, V), repeat=n)]
    scored = [Hypothesis(ids, model.log_p(source, ids) / length_penalty(len(ids), alpha)) for ids in outputs]
    return max(scored, key=lambda hypothesis: hypothesis.score)


def sources(count):
    return torch.arange(1, count + 1)[:, None]


def test_length_penalty_by_hand():
    assert length_penalty(1, 0.6) == 1.0 and length_penalty(7, 1.0) == 2.0 and length_penalty(9, 0.0) == 1.0
    assert length_penalty(19, 0.5) == 2.0


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_full_width_equals_brute_force(alpha):
    model, src = Toy(), sources(40)
    found = beam_search(model, src, beam=625, alpha=alpha)
    lengths = set()
    for source, hypothesis in zip(src[:, 0].tolist(), found, strict=True):
        expected = brute_force(model, source, alpha)
        assert hypothesis.ids == expected.ids and hypothesis.score == pytest.approx(expected.score, abs=1e-5)
        lengths.add(len(hypothesis.ids))
    assert len(lengths) >= 3  # short and long ones win


def test_a_longer_hypothesis_may_still_win_after_the_first_has_ended():
    """<eos> at once is likelier than any word, yet the two words that follow are certain."""

    class Late(Toy):
        def logits(self, source, prefix):
            p = [0, 0, 0.55, 0.45, 0] if len(prefix) == 1 else [0, 0, 0.01, 0.99, 0]
            return torch.tensor([0, 0, 1.0, 0, 0] if len(prefix) == 4 else p).log()

    ids = {alpha: beam_search(Late(), sources(1), beam=2, alpha=alpha)[0].ids for alpha in (0.0, 1.0)}
    assert ids == {0.0: [EOS_ID], 1.0: [3, 3, 3, EOS_ID]}


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_scores_are_teacher_forced_scores(alpha):
    model, src = Toy(), sources(30)
    for source, found in zip(src[:, 0].tolist(), beam_search(model, src, beam=3, alpha=alpha), strict=True):
        expected = model.log_p(source, found.ids) / length_penalty(len(found.ids), alpha)
        assert found.score == pytest.approx(expected, abs=1e-5)


def test_without_eos_the_best_unfinished_output_comes_back():
    model, src = Toy(ends=False), sources(10)
    for source, found in zip(src[:, 0].tolist(), beam_search(model, src, beam=625), strict=True):
        outputs = [list(words) for words in itertools.product(range(3, V), repeat=ROOM)]
        assert found.ids == max(outputs, key=lambda ids: model.log_p(source, ids))


@pytest.mark.parametrize("max_len", [1, 2, 3])
def test_max_len_counts_new_tokens_with_eos(max_len):
    for found in beam_search(Toy(), sources(20), beam=3, max_len=max_len):
        assert 1 <= len(found.ids) <= max_len
        assert not {PAD_ID, BOS_ID} & set(found.ids) and EOS_ID not in found.ids[:-1]


def test_each_sentence_has_its_own_room():
    rooms = torch.tensor([1, 2, 3, 4] * 5)
    found = beam_search(Toy(ends=False), sources(20), beam=2, max_len=rooms)
    assert [len(hypothesis.ids) for hypothesis in found] == rooms.tolist()


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(beam=0), "beam=0"),
        (dict(alpha=-1.0), "alpha=-1.0"),
        (dict(max_len=0), "max_len=0"),
        (dict(max_len=5), "max_len=4"),
    ],
)
def test_bad_options_are_refused_by_name(options, word):
    with pytest.raises(ValueError, match=word):
        beam_search(Toy(), sources(2), **options)


def test_no_sentences_no_hypotheses():
    assert beam_search(Toy(), sources(0)) == []


def test_python_waits_for_the_gpu_a_few_times_a_step_however_many_rows_improve(monkeypatch):
    """Every `tolist`, `item` and `int` of a tensor on a GPU waits until all that was queued is done."""
    waits = []
    for name in ("tolist", "item", "__int__"):
        honest = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, honest=honest: waits.append(1) or honest(self))

    class Quiet(Toy):
        def decode(self, tgt_in, memory, src_mask, cache):
            before = len(waits)
            result = super().decode(tgt_in, memory, src_mask, cache)
            del waits[before:]  # the toy's own
            return result

    counts = []
    for rows in (1, 40):
        waits.clear()
        beam_search(Quiet(), sources(rows), beam=3)
        counts.append(len(waits))
    assert 0 < counts[0] <= counts[1] <= 3 * ROOM + 2  # 2: the limits, once


# --------------------------------------------------------------------------------------- with the real model


@pytest.fixture(scope="module")
def trained() -> Transformer:
    """A model half way: it says <eos> and makes mistakes, so that beams differ."""
    torch.manual_seed(0)
    model = Transformer(13, 13, d_model=32, num_heads=4, dff=64, max_len=SEQ_LEN, dropout=0.0)
    src, tgt = make_dataset(64, 0)
    optimizer, scheduler = optimizer_for(model, lr=3e-3)
    for _ in range(50):
        train_step(model, optimizer, scheduler, src, tgt)
    assert exact_match(model, src, tgt) < 0.9
    return model


def test_beam_one_is_greedy(trained):
    src, _ = make_dataset(100, 5)
    greedy = [[i for i in row[1:] if i != PAD_ID] for row in greedy_decode(trained, src).tolist()]
    found = beam_search(trained, src, beam=1, max_len=SEQ_LEN - 1)  # greedy_decode counts <bos>
    assert [hypothesis.ids for hypothesis in found] == greedy
    assert len({tuple(ids) for ids in greedy}) > 50


def test_no_tensor_is_made_on_a_device_of_its_own(trained, every_device_given):
    (src, _), limits = make_dataset(10, 5), torch.arange(1, 11)
    with every_device_given():
        beam_search(trained, src, beam=3)
        beam_search(trained, src, beam=3, max_len=limits)


def test_wider_beams_find_better_scores(trained):
    src, _ = make_dataset(50, 5)
    scores = [[found.score for found in beam_search(trained, src, beam, alpha=0.0)] for beam in (1, 8)]
    assert sum(scores[1]) > sum(scores[0]) + 0.1


def test_result_does_not_depend_on_batch_or_order(trained):
    src, _ = make_dataset(24, 5)
    expected = beam_search(trained, src, beam=4)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    shuffled = beam_search(trained, src[order], beam=4)
    for size in (1, 2, 8):
        pieces = []
        for piece in src.split(size):
            pieces += beam_search(trained, piece[:, : (piece != PAD_ID).sum(1).max()], beam=4)
        for a, b in zip(pieces, expected, strict=True):
            assert a.ids == b.ids and a.score == pytest.approx(b.score, abs=1e-5)
    for place, number in enumerate(order.tolist()):
        assert shuffled[place].ids == expected[number].ids


def test_scores_of_the_real_model_are_teacher_forced_scores(trained):
    src, _ = make_dataset(20, 5)
    for row, found in zip(src, beam_search(trained, src, beam=4), strict=True):
        tgt_in = torch.tensor([[BOS_ID, *found.ids[:-1]]])
        with torch.no_grad():
            log_p = trained.eval()(row[None], tgt_in).log_softmax(-1)[0]
        total = log_p[range(len(found.ids)), found.ids].sum().item()
        assert found.score == pytest.approx(total / length_penalty(len(found.ids), 0.6), abs=1e-4)


def test_the_mode_is_given_back(trained):
    trained.train()
    beam_search(trained, make_dataset(2, 5)[0], beam=2)
    assert trained.training


def test_rows_of_a_cache_are_selected_at_every_depth():
    model, (src, tgt) = small_model(), make_dataset(4, 0)
    memory, src_mask = model.encode(src)
    cache, rows = KVCache(model.settings["num_layers"]), torch.tensor([2, 0, 2])
    model.decode(tgt[:, :3], memory, src_mask, cache)
    cache.select(rows)
    expected, _ = model.decode(tgt[rows, :4], memory[rows], src_mask[rows])
    step, _ = model.decode(tgt[rows, 3:4], memory[rows], src_mask[rows], cache)
    assert torch.allclose(step[:, 0], expected[:, 3], atol=1e-5)
