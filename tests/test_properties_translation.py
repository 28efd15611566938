"""Properties of the translation part that hold for any input, as in test_properties.py."""

import gzip
import io
import itertools
import re
import tempfile
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("hypothesis", reason="the property tests need hypothesis, a development tool")
pytest.importorskip("sentencepiece", reason="the translation part needs sentencepiece")

import torch  # noqa: E402
from hypothesis import assume, example, given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from properties import models, one_line, seeds, sources, times  # noqa: E402
from test_translation_decode import Toy  # noqa: E402

from model import PAD_ID  # noqa: E402
from train import BOS_ID, EOS_ID  # noqa: E402
from translation.data import (  # noqa: E402
    UNK_ID,
    LangPairDataset,
    Tokenizer,
    TransformerBatchSampler,
    clean,
    collate,
    read_lines,
)
from translation.decode import beam_search, length_penalty, translate_lines  # noqa: E402
from translation.prepare import load_split  # noqa: E402
from translation.translate import stdin_lines, write_lines  # noqa: E402

# --------------------------------------------------------------------------------------------- beam search


def log_p(model, row, output):
    """Log-probability of an output for one source row [Ls], all computed at once."""
    if isinstance(model, Toy):
        return model.log_p(int(row[0]), output)
    scores = model(row[None], torch.tensor([[BOS_ID, *output[:-1]]]))[0].log_softmax(-1)
    return scores[range(len(output)), output].sum().item()


def score(model, row, output, alpha):
    return log_p(model, row, output) / length_penalty(len(output), alpha)


def best_of_all(model, row, alpha, room, vocab):
    """The best score of any output that ends in time; where none can, of those that fill the room."""
    words = range(EOS_ID + 1, vocab)
    texts = [list(text) for n in range(room + 1) for text in itertools.product(words, repeat=n)]
    finished = max(score(model, row, [*text, EOS_ID], alpha) for text in texts if len(text) < room)
    full = max(score(model, row, text, alpha) for text in texts if len(text) == room)
    return finished if finished > -torch.inf else full


def greedy(model, row, room, vocab):
    output = []
    while len(output) < room and output[-1:] != [EOS_ID]:
        output.append(max(range(EOS_ID, vocab), key=lambda token: log_p(model, row, [*output, token])))
    return output


@st.composite
def searches(draw):
    """-> model, src [B, Ls], rooms [B], vocab: a table of random scores, or a Transformer of any variant."""
    vocab, room, batch = draw(st.integers(4, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        model = Toy(draw(st.booleans()), vocab, room, draw(st.sampled_from([0.5, 2.0, 8.0])))
        src = torch.tensor(draw(st.lists(st.integers(1, 2**31), min_size=batch, max_size=batch)))[:, None]
    else:
        model = draw(models(vocab=vocab, max_len=room))
        src = draw(sources(batch, room, vocab))
    rooms = torch.tensor(draw(st.lists(st.integers(1, room), min_size=batch, max_size=batch)))
    return model, src, rooms, vocab


@times(5)
@given(search=searches(), beam=st.sampled_from([1, 2, 3, 5]), alpha=st.sampled_from([0, 0.3, 0.6, 1, 2, 10]))
def test_beam_search_against_all_possible_outputs(search, beam, alpha):
    model, src, rooms, vocab = search
    everything = (vocab - 2) ** int(rooms.max())  # so wide that no hypothesis is ever dropped
    narrow, wide = (beam_search(model, src, width, alpha, rooms) for width in (beam, everything))
    for row, room, found, exhaustive in zip(src, rooms.tolist(), narrow, wide, strict=True):
        row = row[: int((row != PAD_ID).sum())]
        best = best_of_all(model, row, alpha, room, vocab)
        assert exhaustive.score == pytest.approx(best, rel=1e-4, abs=1e-4)
        assert found.score <= best + 1e-4 * (1 + abs(best)) or found.ids[-1] != EOS_ID
        for hypothesis in (found, exhaustive):
            expected = score(model, row, hypothesis.ids, alpha)
            assert hypothesis.score == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert 1 <= len(hypothesis.ids) <= room and min(hypothesis.ids) >= EOS_ID
            assert EOS_ID not in hypothesis.ids[:-1]
            assert hypothesis.ids[-1] == EOS_ID or len(hypothesis.ids) == room
        assert beam > 1 or found.ids == greedy(model, row, room, vocab)
        (alone,) = beam_search(model, row[None], beam, alpha, room)
        assert alone.ids == found.ids and alone.score == pytest.approx(found.score, rel=1e-4, abs=1e-4)


# ------------------------------------------------------------------------------------------------- batches


pieces = st.lists(st.integers(UNK_ID + 1, 99), max_size=6)


@given(pairs=st.lists(st.tuples(pieces, pieces), min_size=1, max_size=6))
def test_collate_puts_specials_and_padding_where_they_belong(pairs):
    batch = collate(pairs)
    ends = {"src": (BOS_ID, EOS_ID), "tgt_in": (BOS_ID, None), "labels": (None, EOS_ID)}
    assert list(batch) == list(ends)
    for name, (first, last) in ends.items():
        rows = batch[name]
        whole = [[first, *pair[name != "src"], last] for pair in pairs]
        whole = [[i for i in row if i is not None] for row in whole]
        assert rows.dtype == torch.int64 and rows.shape == (len(pairs), max(map(len, whole)))
        for row, expected in zip(rows.tolist(), whole, strict=True):
            assert row == expected + [PAD_ID] * (len(row) - len(expected))
    assert batch["tgt_in"].shape == batch["labels"].shape
    going_on = (batch["labels"] != EOS_ID) & (batch["labels"] != PAD_ID)
    assert torch.equal(batch["labels"][:, :-1][going_on[:, :-1]], batch["tgt_in"][:, 1:][going_on[:, :-1]])


row_lengths = st.lists(st.tuples(st.integers(2, 9), st.integers(1, 9)), min_size=1, max_size=40)
samplings = st.fixed_dictionaries(
    dict(max_tokens=st.integers(1, 60), shuffle=st.booleans(), seed=seeds)
)  # fmt: skip


def epoch_of(lengths, epoch, **options):
    sampler = TransformerBatchSampler(lengths, **options)
    sampler.set_epoch(epoch)
    assert len(sampler) == len(list(sampler))
    return sampler, list(sampler)


@times(15)
@given(lengths=row_lengths, options=samplings, epoch=st.integers(0, 99), ranks=st.integers(1, 5))
def test_every_pair_comes_once_an_epoch_within_the_budget_and_evenly_dealt(lengths, options, epoch, ranks):
    sampler, whole = epoch_of(lengths, epoch, **options)
    assert sampler.oversized == sum(max(pair) > options["max_tokens"] for pair in lengths)
    try:
        parts = [epoch_of(lengths, epoch, rank=r, world_size=ranks, **options)[1] for r in range(ranks)]
    except ValueError as error:  # in this epoch or in the first one
        assert f"world_size={ranks}" in one_line(error)
        counts = [len(epoch_of(lengths, e, **options)[1]) for e in (0, epoch)]
        assert any(len(lengths) < -(-count // ranks) * ranks for count in counts)
        parts = []
    assert len({len(part) for part in parts}) <= 1
    for batches in (whole, sum(parts, [])):
        for batch in batches:
            for side in zip(*(lengths[i] for i in batch), strict=True):
                assert batch and (len(batch) * max(side) <= options["max_tokens"] or len(batch) == 1)
        assert not batches or sorted(sum(batches, [])) == list(range(len(lengths)))
    assert epoch_of(lengths, epoch, **options)[1] == whole  # by seed and epoch alone
    cells = sum(len(b) * sum(map(max, zip(*(lengths[i] for i in b), strict=True))) for b in whole)
    assert sampler.padding_share() == pytest.approx(1 - sum(map(sum, lengths)) / cells)


@given(seed=seeds, epoch=st.integers(0, 99), lengths=row_lengths.map(lambda some: (some * 40)[:40]))
def test_epochs_and_seeds_make_other_batches_but_only_if_asked_to(seed, epoch, lengths):
    def batches(seed, epoch, shuffle=True):
        found = epoch_of(lengths, epoch, max_tokens=40, shuffle=shuffle, seed=seed)[1]
        return {frozenset(batch) for batch in found}

    assert batches(seed, epoch) != batches(seed, epoch + 1)
    assert batches(seed, epoch) != batches(seed + 1, epoch)
    assert batches(seed, epoch, False) == batches(seed + 1, epoch + 1, False)


# -------------------------------------------------------------------------------------------- text and lines


ODD = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\0\ufeff\u2581\u2585\u00a0 \t"
texts = st.text(st.characters() | st.sampled_from(ODD + "aü½ﬁ日\u0308<>"), max_size=12)
blanks = st.text("\u00a0\u3000\u2028\0\t ", max_size=3)
written = st.builds(str.__add__, st.sampled_from(["", "\ufeff"]), texts).map(
    lambda text: text.replace("\n", "").encode("utf-8", "ignore").decode()
)


@pytest.fixture(scope="module")
def tokenizer():
    src, tgt = load_split(None, "train")
    return Tokenizer.train([*src, *tgt], 600)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@times(15)
@given(text=texts | blanks | st.text(), any_ids=st.lists(st.integers(0, 300), max_size=6))
@example("<eos> <0x41>\ud800 \u2581▅  ü", [])
def test_text_becomes_one_line_and_comes_back_from_its_pieces(tokenizer, text, any_ids):
    def kept(c):
        breaks, half_a_pair = len(f"a{c}a".splitlines()) > 1, "\ud800" <= c <= "\udfff"
        return " " if breaks else "\ufffd" if half_a_pair else c.replace("\0", "")

    line = clean(text)
    assert line == unicodedata.normalize("NFC", "".join(map(kept, text))) == clean(line)
    ids = tokenizer.encode(text)
    assert all(UNK_ID < i < tokenizer.vocab_size for i in ids) and tokenizer.encode(line) == ids
    expected = re.sub(" +", " ", line).strip(" ").replace("\u2581", " ") if line.strip() else ""
    assert tokenizer.decode(ids) == expected
    assert tokenizer.decode([BOS_ID, UNK_ID, *ids, EOS_ID, *ids, PAD_ID]) == expected
    out = tokenizer.decode(any_ids)
    assert out == clean(out)


@times(10)
@given(lines=st.lists(written, max_size=6), end=st.sampled_from(["", "\r"]), bom=st.booleans(),
       last=st.booleans(), zipped=st.booleans())  # fmt: skip
def test_lines_keep_their_number_and_place_whatever_stands_in_them(folder, lines, end, bom, last, zipped):
    path = folder / "text"
    lines = [line + end for line in lines]
    raw = ("\ufeff" * bom + "\n".join(lines) + "\n" * (last and bool(lines))).encode()
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    if lines and not bom:
        lines = [lines[0].removeprefix("\ufeff"), *lines[1:]]
    if lines and not last and not lines[-1]:
        lines = lines[:-1]  # an empty last line without an end is no line
    expected = [clean(line.removesuffix("\r")) for line in lines]
    assert read_lines(path) == expected
    with mock.patch("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw))):
        assert list(stdin_lines()) == expected
    assume(not expected or not expected[0].startswith("\ufeff"))
    write_lines("--out", path, expected)
    assert read_lines(path) == expected


short = st.binary(max_size=40)
cut_gzip = st.builds(lambda raw, end: gzip.compress(raw)[:end], short, st.integers(0, 60))


@times(10)
@given(raw=short | short.map(lambda raw: b"\x1f\x8b" + raw) | cut_gzip)
def test_any_bytes_are_lines_or_refused_in_one_line(folder, raw):
    path = folder / "bytes"
    path.write_bytes(raw)
    try:
        lines = read_lines(path)
    except ValueError as error:
        assert one_line(error).startswith(f"{path}: ")
        lines = None
    if not raw.startswith(b"\x1f\x8b"):
        with mock.patch("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw))):
            try:
                assert list(stdin_lines()) == lines
            except ValueError as error:
                assert lines is None and "standard input: line " in one_line(error)


# ------------------------------------------------------------------------------------ dataset and its cache


def contents(dataset):
    return dataset.pairs, dataset.kept, dataset.dropped_empty, dataset.dropped_long


@times(10)
@given(data=st.data(), pairs=st.lists(st.tuples(texts, texts), max_size=6), max_length=st.integers(1, 20))
def test_the_cache_gives_the_same_dataset_even_when_damaged(folder, tokenizer, data, pairs, max_length):
    path = folder / "train.ids"
    inputs = [pair[0] for pair in pairs], [pair[1] for pair in pairs], tokenizer, max_length
    fresh = LangPairDataset(*inputs)
    ids = [tuple(map(tokenizer.encode, pair)) for pair in pairs]
    blank = [not (clean(a).strip() and clean(b).strip()) for a, b in pairs]
    long = [not empty and max(map(len, pair)) > max_length for pair, empty in zip(ids, blank, strict=True)]
    kept = [i for i in range(len(pairs)) if not blank[i] and not long[i]]
    assert contents(fresh) == ([ids[i] for i in kept], kept, sum(blank), sum(long))
    path.unlink(missing_ok=True)
    built, again = (LangPairDataset.cached(path, *inputs) for _ in range(2))
    assert (built.from_cache, again.from_cache) == (False, True)
    assert contents(built) == contents(again) == contents(fresh) and again.lengths == fresh.lengths
    whole = path.read_bytes()
    place, change = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    path.write_bytes(whole[:place] + (bytes([whole[place] ^ change]) + whole[place + 1 :] if change else b""))
    assert contents(LangPairDataset.cached(path, *inputs)) == contents(fresh)
    changed = data.draw(st.sampled_from(["max_length", "src", "tgt"]))
    other = list(inputs)
    if changed == "max_length":
        other[3] += 1
    else:
        side = ["src", "tgt"].index(changed)
        other[side] = [*other[side][:-1], other[side][-1] + "x"] if pairs else other[side]
    if pairs or changed == "max_length":
        LangPairDataset.cached(path, *inputs)
        assert not LangPairDataset.cached(path, *other).from_cache


# --------------------------------------------------------------------------------------------- translation


@given(model=models(vocab=600, max_len=12), lines=st.lists(texts | blanks, max_size=5),
       beam=st.integers(1, 3), batch_size=st.integers(1, 6))  # fmt: skip
def test_as_many_translations_as_lines_in_their_order_and_blank_ones_stay_blank(
    tokenizer, model, lines, beam, batch_size
):
    output = translate_lines(model, tokenizer, lines, beam=beam, batch_size=batch_size)
    assert len(output) == len(lines)
    for line, found in zip(lines, output, strict=True):
        assert translate_lines(model, tokenizer, [line], beam=beam) == [found]
        assert found == "" or clean(line).strip()
