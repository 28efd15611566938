"""Text, subwords, dataset, cache and batches of translation/data.py. Case numbers: public bug reports."""

import copy
import gzip
import hashlib
import os
import pickle
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sentencepiece", reason="the translation part needs sentencepiece")

from model import PAD_ID  # noqa: E402
from train import BOS_ID, EOS_ID  # noqa: E402
from translation import data  # noqa: E402
from translation.data import (  # noqa: E402
    LangPairDataset,
    Tokenizer,
    TransformerBatchSampler,
    clean,
    collate,
    read_lines,
    read_parallel,
)
from translation.prepare import load_split  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MULTI30K = ROOT.parent / "shared" / "multi30k"


@pytest.fixture(scope="module")
def sample():
    return load_split(None, "train")


@pytest.fixture(scope="module")
def tokenizer(sample):
    return Tokenizer.train([*sample[0], *sample[1]], 600)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


# -------------------------------------------------------------------------------------- B33: reading text


ODD_BREAKS = ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\x1d", "\x1e", "\r"]


@pytest.mark.parametrize("odd", ODD_BREAKS, ids=[f"U+{ord(c):04X}" for c in ODD_BREAKS])
def test_only_newline_ends_a_line(odd, tmp_path):
    src = write(tmp_path / "a.de", f"eins\nzw{odd}ei\ndrei\n")
    tgt = write(tmp_path / "a.en", "one\ntwo\nthree\n")
    assert read_parallel(src, tgt) == (["eins", "zw ei", "drei"], ["one", "two", "three"])


def test_nul_is_dropped_and_crlf_bom_and_missing_last_newline_change_nothing(tmp_path, tokenizer):
    lines = ["ein Hund", "eine Straße", "drei"]
    plain = "\n".join(lines)
    same = {
        "no last newline": plain.encode(),
        "last newline": (plain + "\n").encode(),
        "nul": plain.replace("eine", "e\x00ine").encode(),
        "crlf": plain.replace("\n", "\r\n").encode() + b"\r\n",
        "bom": b"\xef\xbb\xbf" + plain.encode(),
        "bom, crlf, gzip": gzip.compress(b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode()),
        "nfd": unicodedata.normalize("NFD", plain).encode(),
    }
    for name, content in same.items():
        got = read_lines(write(tmp_path / "text", content))
        assert got == lines, name
        assert not any("\r" in piece for line in got for piece in tokenizer.pieces(tokenizer.encode(line)))


def test_blank_lines_and_empty_files_keep_their_place(tmp_path):
    assert read_lines(write(tmp_path / "a", "\n\nx\n\n")) == ["", "", "x", ""]
    assert read_lines(write(tmp_path / "b", "")) == []


def test_unequal_files_are_named_with_their_counts(tmp_path):
    src, tgt = write(tmp_path / "long.de", "a\nb\nc\n"), write(tmp_path / "short.en", "a\nb\n")
    with pytest.raises(ValueError, match=r"long\.de has 3 lines and .*short\.en has 2") as caught:
        read_parallel(src, tgt)
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named_in_one_line(tmp_path):
    whole = gzip.compress("\n".join(map(str, range(999))).encode())
    bad = {
        "latin1": "ok\nStra\u00dfe\n".encode("latin-1"),
        "cut.gz": whole[: len(whole) // 2],
        "flipped.gz": whole[:100] + bytes([whole[100] ^ 255]) + whole[101:],
        "head.gz": whole[:5],
    }
    for name, content in bad.items():
        with pytest.raises(ValueError, match=name) as caught:
            read_lines(write(tmp_path / name, content))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="line 2"):
        read_lines(tmp_path / "latin1")
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match=path.name):
            read_lines(path)


# ----------------------------------------------------------------------------------- B36: subwords, Unicode


def test_special_ids_and_pieces(tokenizer):
    assert tokenizer.pieces(range(4)) == ["<pad>", "<bos>", "<eos>", "<unk>"]
    ids = tokenizer.encode("Ein Hund schläft.")
    assert min(ids) > 3 and max(ids) < tokenizer.vocab_size
    assert "".join(tokenizer.pieces(ids)).replace("▁", " ").strip() == "Ein Hund schläft."


def test_text_that_looks_like_a_special_stays_text(tokenizer):
    text = "<eos> <pad> <bos> <unk> <0x41> $$ [PAD]"
    assert min(tokenizer.encode(text)) > 3 and tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["ß „“ … ½ ﬁ a\u00a0b 👩\u200d👩\u200d👧 日本", "Ω≠\u0001\U0010ffff", "Größe", ""]
)
def test_round_trip_of_characters_seen_and_unseen(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(unicodedata.normalize("NFD", text))) == text


def test_documented_form_nfc_one_space_between_and_none_at_the_ends(tokenizer):
    nfc, nfd = "für", unicodedata.normalize("NFD", "für")
    assert nfc != nfd and tokenizer.encode(nfc) == tokenizer.encode(nfd)
    assert tokenizer.decode(tokenizer.encode("  a   b\u2028c\r\n")) == "a b c"
    assert tokenizer.decode(tokenizer.encode("a▁b")) == "a b"  # the one character that does not come back
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"  # half a pair, as bad argv bytes give
    assert clean("½ ﬁ") == "½ ﬁ"  # NFC, not NFKC


def test_decode_stops_at_eos_and_passes_over_specials(tokenizer):
    ids = tokenizer.encode("Ein Hund")
    assert tokenizer.decode([BOS_ID, *ids, EOS_ID, *ids, PAD_ID]) == "Ein Hund"
    assert tokenizer.decode(torch.tensor([PAD_ID, *ids, 3])) == "Ein Hund"
    assert tokenizer.decode([EOS_ID]) == tokenizer.decode([]) == ""
    with pytest.raises(IndexError):
        tokenizer.decode([tokenizer.vocab_size])


def test_whatever_bytes_a_model_puts_out_the_text_is_one_line(tokenizer):
    """One translation on two lines would shift all that follow against their sources."""
    byte = {tokenizer.pieces([i])[0]: i for i in range(tokenizer.vocab_size)}
    ids = [byte[f"<0x{value:02X}>"] for value in b"a\nb\r\x0cc\x00\xe2\x80\xa8d"]
    assert tokenizer.decode(ids) == "a b  c d"


def test_training_is_deterministic_also_in_another_process(sample, tokenizer):
    lines = [*sample[0], *sample[1]]
    assert Tokenizer.train(lines, 600).model == tokenizer.model
    assert Tokenizer.train(lines[:-8], 600).model != tokenizer.model
    code = (
        "import hashlib\nfrom translation.data import Tokenizer\nfrom translation.prepare import load_split\n"
        "src, tgt = load_split(None, 'train')\n"
        "print(hashlib.sha256(Tokenizer.train([*src, *tgt], 600).model).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert out.stdout.strip() == hashlib.sha256(tokenizer.model).hexdigest(), out.stderr


def test_vocabulary_size_exact_smaller_for_little_text_refused_when_impossible(tokenizer):
    assert tokenizer.vocab_size == 600
    assert 260 < Tokenizer.train(["ein Hund", "a dog"], 8000).vocab_size < 300
    for lines, size, words in (
        (["ein Hund"], 100, "vocab_size=100: must be about 267 or more, .* the 7 characters of the text"),
        ([], 8000, "no text"),
        ([" "], 9, "no text"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            Tokenizer.train(lines, size)
        assert "\n" not in str(caught.value)


def test_save_load_copy_and_pickle(tokenizer, tmp_path):
    path = tmp_path / "t.model"
    tokenizer.save(path)
    ids = tokenizer.encode("Größe ½")
    for twin in (Tokenizer.load(path), copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert twin.model == tokenizer.model and twin.encode("Größe ½") == ids
    assert [p.name for p in tmp_path.iterdir()] == ["t.model"]
    for wrong in (
        write(tmp_path / "wrong", "no model" * 9),
        tmp_path / "absent",
        write(tmp_path / "zero", ""),
    ):
        with pytest.raises(ValueError, match=wrong.name) as caught:
            Tokenizer.load(wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be written"):
        tokenizer.save(tmp_path / "absent" / "t.model")


# ------------------------------------------------------------------------------------ B34, B38, B27: dataset


def test_blank_sides_drop_the_pair_and_are_counted(tokenizer):
    src = ["eins", "", "zwei", "drei", "vier", "\u00a0\u3000", "\x00", "five"]
    tgt = ["one", "x", "   ", "three", "\t", "y", "z", "\t\x00"]
    dataset = LangPairDataset(src, tgt, tokenizer)
    assert (dataset.dropped_empty, dataset.dropped_long, dataset.kept) == (6, 0, [0, 3])
    assert [tuple(map(tokenizer.decode, pair)) for pair in dataset] == [("eins", "one"), ("drei", "three")]


def test_long_pairs_are_dropped_on_both_sides_at_the_exact_limit(tokenizer):
    short, long = "a", " ".join("a" * 9)
    limit = len(tokenizer.encode(long))
    src, tgt = [short, long, short, long], [short, short, long, long]
    assert len(LangPairDataset(src, tgt, tokenizer, limit)) == 4
    dataset = LangPairDataset(src, tgt, tokenizer, limit - 1)
    assert (dataset.kept, dataset.dropped_long, dataset.dropped_empty) == ([0], 3, 0)
    with pytest.raises(ValueError, match="max_length=0"):
        LangPairDataset(src, tgt, tokenizer, 0)


def test_unequal_sides_are_refused(tokenizer, tmp_path):
    for build in (LangPairDataset, lambda *sides: LangPairDataset.cached(tmp_path / "c", *sides)):
        with pytest.raises(ValueError, match="2 source lines and 1 target lines"):
            build(["a", "b"], ["a"], tokenizer)


def test_ids_outside_the_vocabulary_are_refused_on_the_cpu():
    class Wrong:
        model, vocab_size = b"", 10

        def encode(self, text):
            return [4, 10]

    with pytest.raises(ValueError, match="id 10: must be below the vocabulary size 10"):
        LangPairDataset(["a"], ["b"], Wrong())


def same(one, other):
    names = ("pairs", "kept", "dropped_empty", "dropped_long", "lengths")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def test_cache_gives_the_same_dataset_and_holds_plain_values(tokenizer, tmp_path):
    src, tgt = ["eins", "", "zwei " * 80], ["one", "x", "two"]
    path = tmp_path / "new folder" / "train.pt"
    built = LangPairDataset.cached(path, src, tgt, tokenizer, 20)
    again = LangPairDataset.cached(path, src, tgt, tokenizer, 20)
    assert (built.from_cache, again.from_cache) == (False, True)
    assert same(built, again) and same(again, LangPairDataset(src, tgt, tokenizer, 20))
    assert (again.dropped_empty, again.dropped_long) == (1, 1)
    assert torch.load(path, weights_only=True).keys() >= {"key", "ids"}  # B27
    assert [p.name for p in path.parent.iterdir()] == ["train.pt"]
    nothing = [LangPairDataset.cached(tmp_path / "e.pt", [], [], tokenizer) for _ in range(2)]
    assert [(len(d), d.from_cache) for d in nothing] == [(0, False), (0, True)]


def test_cache_notices_every_change(sample, tokenizer, tmp_path, monkeypatch):
    src, tgt = [list(side[:20]) for side in sample]
    other_tokenizer = Tokenizer.train([*reversed(sample[0]), *sample[0]], 600)
    same_size = SimpleNamespace(
        model=other_tokenizer.model[: len(tokenizer.model)].ljust(len(tokenizer.model)),
        encode=other_tokenizer.encode,
        vocab_size=600,
    )
    word = [*src[:-1], src[-1].replace(src[-1].split()[0], "Kein")]
    moved = [src[0] + "\n" + src[1], *src[2:], ""]  # the same text, joined in another way
    changes = {
        "length limit": (src, tgt, tokenizer, 9),
        "tokeniser": (src, tgt, other_tokenizer, 128),
        "tokeniser of the same size": (src, tgt, same_size, 128),
        "one source word": (word, tgt, tokenizer, 128),
        "one target word": (src, ["No", *tgt[1:]], tokenizer, 128),
        "direction": (tgt, src, tokenizer, 128),
        "line order": (src[::-1], tgt[::-1], tokenizer, 128),
        "line edges": (moved, tgt, tokenizer, 128),
    }
    for name, inputs in changes.items():
        path = tmp_path / "c.pt"
        LangPairDataset.cached(path, src, tgt, tokenizer, 128)
        changed = LangPairDataset.cached(path, *inputs)
        assert not changed.from_cache, name
        assert same(changed, LangPairDataset(*inputs)), name
        assert LangPairDataset.cached(path, *inputs).from_cache, name
    monkeypatch.setattr(data, "CACHE_FORMAT", -1)
    assert not LangPairDataset.cached(path, *inputs).from_cache


def test_broken_cache_is_rebuilt(sample, tokenizer, tmp_path):
    inputs = (sample[0][:20], sample[1][:20], tokenizer)
    path = tmp_path / "c.pt"
    right = LangPairDataset.cached(path, *inputs)
    whole = path.read_bytes()
    content = torch.load(path, weights_only=True)
    ids = content["ids"].numpy().tobytes()
    at = whole.index(ids)
    broken = {
        "half": whole[: len(whole) // 2],
        "empty": b"",
        "other": b"not a cache",
        "one id changed": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        "one name changed": whole.replace(b"dropped", b"dropper", 1),
    }
    for name, raw in broken.items():
        path.write_bytes(raw)
        dataset = LangPairDataset.cached(path, *inputs)
        assert not dataset.from_cache and same(dataset, right), name
        assert LangPairDataset.cached(path, *inputs).from_cache, name
    for wrong in ([1, 2], {"key": content["key"]}, {**content, "kept": content["kept"][1:]}):
        torch.save(wrong, path)
        assert not LangPairDataset.cached(path, *inputs).from_cache


def test_folder_that_cannot_be_written_works_without_cache(sample, tokenizer, tmp_path, monkeypatch):
    inputs = (sample[0][:5], sample[1][:5], tokenizer)
    below_a_file = write(tmp_path / "file", "x") / "c.pt"
    for path in (below_a_file, tmp_path, Path("/proc/c.pt")):
        assert len(LangPairDataset.cached(path, *inputs)) == 5

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert len(LangPairDataset.cached(tmp_path / "c.pt", *inputs)) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # no temporary file left


# --------------------------------------------------------------------------------------- B39, B40: batches


def varied(n=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(pair) for pair in torch.randint(3, 40, (n, 2), generator=generator).tolist()]


def as_sets(sampler):
    return {frozenset(batch) for batch in sampler}


def within(batch, lengths, budget):
    return all(len(batch) * max(lengths[i][side] for i in batch) <= budget for side in (0, 1))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("long", [(100, 1), (1, 100), (100, 100)])
def test_every_batch_is_within_budget_on_both_sides(long, shuffle):
    lengths = [(1, 1)] * 99 + [long]
    sampler = TransformerBatchSampler(lengths, max_tokens=200, shuffle=shuffle)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        assert all(within(batch, lengths, 200) for batch in sampler)
        assert sorted(i for batch in sampler for i in batch) == list(range(100))


@pytest.mark.parametrize("shuffle", [True, False])
def test_over_long_pair_is_alone_in_its_batch(shuffle):
    lengths = varied(50) + [(500, 2), (2, 500)]
    sampler = TransformerBatchSampler(lengths, max_tokens=200, shuffle=shuffle)
    batches = list(sampler)
    assert sampler.oversized == 2 and [50] in batches and [51] in batches
    assert all(within(b, lengths, 200) for b in batches if b not in ([50], [51]))
    assert sorted(i for b in batches for i in b) == list(range(52))


def test_unusable_arguments_are_refused():
    for words, arguments in {
        "no sentence pairs": dict(lengths=[]),
        "max_tokens=0": dict(max_tokens=0),
        "rank=2, world_size=2": dict(rank=2, world_size=2),
        "rank=-1": dict(rank=-1),
        "world_size=0": dict(world_size=0),
        "world_size=3": dict(lengths=[(2, 2)] * 2, world_size=3),
    }.items():
        with pytest.raises(ValueError, match=words):
            TransformerBatchSampler(**{"lengths": [(2, 2)] * 9, **arguments})


@pytest.mark.parametrize("lengths", [varied(), [(n, n) for n in range(3, 103)]], ids=["ties", "no ties"])
def test_other_sets_of_batches_each_epoch_over_all_indices(lengths):
    sampler = TransformerBatchSampler(lengths, max_tokens=300, seed=3)
    epochs = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(sampler) == len(batches)
        assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
        epochs.append(as_sets(sampler))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_seed_and_epoch_alone_decide_the_order():
    lengths = varied()
    one, other = [TransformerBatchSampler(lengths, 300, seed=5) for _ in range(2)]
    torch.manual_seed(1)
    one.set_epoch(7), other.set_epoch(1), other.set_epoch(7)
    assert list(one) == list(other) == list(one)
    assert list(TransformerBatchSampler(lengths, 300, seed=6)) != list(
        TransformerBatchSampler(lengths, 300, seed=5)
    )
    firsts = [max(lengths[i][0] for i in batch) for batch in one]
    assert firsts != sorted(firsts)  # not shortest first


def test_a_caller_that_changes_a_batch_does_not_change_the_sampler():
    sampler = TransformerBatchSampler(varied(), 300)
    before = copy.deepcopy(list(sampler))
    for batch in sampler:
        batch.clear()
    assert list(sampler) == before


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_every_index_once_in_equally_many_batches(world_size, shuffle):
    lengths = varied(101)
    for epoch in range(4):
        ranks = [TransformerBatchSampler(lengths, 300, shuffle, 1, r, world_size) for r in range(world_size)]
        for sampler in ranks:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in ranks]
        assert {len(b) for b in batches} == {len(ranks[0])} and len(ranks[0]) > 0
        assert sorted(i for own in batches for b in own for i in b) == list(range(101))
        assert all(within(b, lengths, 300) for own in batches for b in own)


def test_targets_go_up_and_down_in_turn():
    """So that neither side's length jumps between one batch and the next."""
    lengths = [(4, 9), (2, 5), (3, 9), (2, 9), (4, 5), (3, 5)]
    batches = list(TransformerBatchSampler(lengths, max_tokens=9, shuffle=False))
    assert [lengths[i] for (i,) in batches] == [(2, 9), (2, 5), (3, 5), (3, 9), (4, 9), (4, 5)]


def test_without_shuffle_the_same_batches_in_order_of_length():
    lengths = varied()
    sampler = TransformerBatchSampler(lengths, 300, shuffle=False)
    before = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == before
    sources = [lengths[i][0] for batch in before for i in batch]
    assert sources == sorted(sources)


def test_outputs_put_back_by_index_are_in_file_order_and_pairs_stay_pairs(tokenizer):
    src, tgt = [f"Nummer {n} " + "x " * (n % 7) for n in range(60)], [f"number {n}" for n in range(60)]
    dataset = LangPairDataset(src, tgt, tokenizer)
    output = [None] * len(dataset)
    for batch in TransformerBatchSampler(dataset.lengths, 120, shuffle=True):
        rows = collate([dataset[i] for i in batch])
        for index, source, labels in zip(batch, rows["src"], rows["labels"], strict=True):
            pair = tokenizer.decode(source).split()[1], tokenizer.decode(labels).split()[1]
            assert pair[0] == pair[1]
            output[index] = pair[0]
    assert output == [str(n) for n in range(60)]


def test_padding_share_by_hand():
    lengths = [(4, 3), (2, 3)]  # one batch: 2 x 4 + 2 x 3 = 14 positions, 12 of them real
    assert TransformerBatchSampler(lengths, 100).padding_share() == pytest.approx(2 / 14)
    assert TransformerBatchSampler(lengths, 4).padding_share() == 0


# ------------------------------------------------------------------------------------- collate, B35: workers


def test_collate_lays_out_the_documented_rows():
    batch = collate([([41, 97], [38, 112]), ([5, 6, 7, 8], [9])])
    assert batch["src"].tolist() == [[1, 41, 97, 2, 0, 0], [1, 5, 6, 7, 8, 2]]
    assert batch["tgt_in"].tolist() == [[1, 38, 112], [1, 9, 0]]
    assert batch["labels"].tolist() == [[38, 112, 2], [9, 2, 0]]
    assert {rows.dtype for rows in batch.values()} == {torch.int64}


def test_lengths_are_the_rows_that_collate_makes(sample, tokenizer):
    dataset = LangPairDataset(*sample, tokenizer)
    for pair, lengths in zip(dataset, dataset.lengths, strict=True):
        batch = collate([pair])
        assert lengths == (batch["src"].size(1), batch["labels"].size(1))
        assert batch["tgt_in"].shape == batch["labels"].shape


def test_everything_pickles_and_one_spawned_worker_loads_a_batch(sample, tokenizer):
    dataset = LangPairDataset(*sample, tokenizer)
    sampler = TransformerBatchSampler(dataset.lengths, 400)
    twin, twin_sampler, twin_collate = pickle.loads(pickle.dumps((dataset, sampler, collate)))
    assert same(twin, dataset) and list(twin_sampler) == list(sampler) and twin_collate is collate
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate, num_workers=1, multiprocessing_context="spawn"
    )
    got, wanted = next(iter(loader)), collate([dataset[i] for i in next(iter(sampler))])
    assert len(loader) == len(sampler) and all(torch.equal(got[name], wanted[name]) for name in wanted)


# ---------------------------------------------------------------------------------------------- real data


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="no ../shared/multi30k beside the project")
def test_multi30k_in_full():
    src, tgt = load_split(MULTI30K, "train")
    tokenizer = Tokenizer.train([*src, *tgt])
    dataset = LangPairDataset(src, tgt, tokenizer)
    assert tokenizer.vocab_size == 8000 and len(dataset) == 29_000
    sampler = TransformerBatchSampler(dataset.lengths, 4096)
    shares, epochs = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        shares.append(sampler.padding_share())
        epochs.append(as_sets(sampler))
        assert all(within(batch, dataset.lengths, 4096) for batch in sampler)
    assert max(shares) <= 0.10
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) / 10
    for i in range(0, 29_000, 997):
        assert tokenizer.decode(dataset[i][0]) == " ".join(src[i].split(" ")).strip()
