"""Parallel text -> subword ids -> batches, for the German-English translator.

One pair, "ein Hund" - "a dog", with made-up ids (PAD=0, BOS=1, EOS=2, UNK=3), in a batch with a longer one:

    src      1  41  97   2   0      <bos> src <eos> <pad> ...    what the encoder reads
    tgt_in   1  38 112   0          <bos> tgt <pad> ...          what the decoder reads
    labels  38 112   2   0          tgt [EOS] [PAD] ...          what it must predict at each position

`collate` builds these rows. Shape letters as in model.py: B pairs in a batch, Ls and Lt their longest rows.
"""

import contextlib
import gzip
import hashlib
import io
import operator
import random
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model import PAD_ID
from toolbox.checkpoint import load_plain, save
from toolbox.files import reason, replacing
from train import BOS_ID, EOS_ID

UNK_ID = 3  # SentencePiece wants one; it never occurs, as what has no piece is spelled in bytes
VOCAB_SIZE = 8000  # pieces, both languages together
MAX_LENGTH = 128  # pieces of a sentence, BOS and EOS not counted
MAX_TOKENS = 4096  # of one side of a batch, padding and specials counted
CACHE_FORMAT = 1  # to be raised when the same inputs give other ids

# All that str.splitlines() takes for the end of a line, and NUL, which other tools drop or stop at.
_ODD = {ord(c): " " for c in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"} | {0: None}
_ODD |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # half a UTF-16 pair has no UTF-8 form


# ----------------------------------------------------------------------------------------------------- text


def clean(text: str) -> str:
    """Text as this project holds it: NFC, on one line (breaks become a space), without NUL.

    NFC and not NFKC: "ü" has one spelling, and ½, ﬁ and the no-break space stay what they are.
    """
    return unicodedata.normalize("NFC", text.translate(_ODD))


def check_lines(lines: Iterable[str]) -> None:
    """TypeError for a single string: as a list of lines it would be one line per character."""
    if isinstance(lines, str):
        raise TypeError(f"{lines!r} is a single string: give a list of lines, [{lines!r}]")


def read_lines(path: Path | str) -> list[str]:
    """The lines of a UTF-8 file, plain or gzip (told by its first bytes), each through `clean`.

    Only "\\n" ends a line, a "\\r" before it goes; a last line without "\\n" counts; a BOM is dropped.
    ValueError, naming the file, where it cannot be read or is no such text.
    """
    try:
        raw = Path(path).read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        lines = raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}: line {line} is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or f"broken gzip file: {error}"
        raise ValueError(f"{path}: cannot be read ({why})") from None
    if lines[-1] == "":
        lines.pop()
    return [clean(line.removesuffix("\r")) for line in lines]


def read_parallel(src: Path | str, tgt: Path | str) -> tuple[list[str], list[str]]:
    """Both files' lines; line i of one translates line i of the other. ValueError where the counts differ."""
    src_lines, tgt_lines = read_lines(src), read_lines(tgt)
    if len(src_lines) != len(tgt_lines):
        raise ValueError(
            f"{src} has {len(src_lines):,} lines and {tgt} has {len(tgt_lines):,}: must be equally many"
        )
    return src_lines, tgt_lines


# ------------------------------------------------------------------------------------------------- subwords


def _sentencepiece():
    try:
        import sentencepiece
    except ImportError:
        raise ValueError(
            "sentencepiece is not installed: pip install -r translation/requirements.txt"
        ) from None
    return sentencepiece


class Tokenizer:
    """Subwords of both languages from one SentencePiece BPE model; PAD=0, BOS=1, EOS=2, UNK=3.

    decode(encode(text)) is `clean(text)` with single spaces and none at the ends, except that a blank text,
    of white space of any kind, comes back empty, and U+2581, SentencePiece's own mark for a space, as a
    space. A character that training never saw is spelled in its UTF-8 bytes. Pickles and copies carry the
    bytes of `model`.

    ValueError where `model` is no such tokeniser. Source: Sennrich et al. 2016; Kudo and Richardson 2018.
    """

    def __init__(self, model: bytes, name: Path | str = "model"):
        self.model = model
        self._processor = _sentencepiece().SentencePieceProcessor()
        try:  # not by the constructor: in sentencepiece 0.2.0, one given b"" crashes at the first call
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise ValueError(f"{name}: not a SentencePiece model") from None
        p = self._processor
        ids = (p.pad_id(), p.bos_id(), p.eos_id(), p.unk_id())
        if ids != (PAD_ID, BOS_ID, EOS_ID, UNK_ID):
            raise ValueError(
                f"{name}: ids of PAD, BOS, EOS, UNK are {ids}; must be {(PAD_ID, BOS_ID, EOS_ID, UNK_ID)}"
            )

    def __reduce__(self):
        return Tokenizer, (self.model,)

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int = VOCAB_SIZE) -> "Tokenizer":
        """Learn pieces from `lines`: the training split, both languages.

        The same lines in the same order give the same bytes. A small text has fewer pieces to learn than
        vocab_size, and then the vocabulary is smaller. ValueError where vocab_size cannot hold the specials,
        256 bytes and every character once, or where there is no text; TypeError as `check_lines`.
        """
        check_lines(lines)
        lines = [line for line in map(clean, lines) if line.strip()]
        if not lines:
            raise ValueError("no text to train the tokeniser on")
        buffer = io.BytesIO()
        try:
            _sentencepiece().SentencePieceTrainer.train(
                sentence_iterator=(
                    line.replace("\u2585", " ") for line in lines
                ),  # ▅ is the trainer's own mark
                model_writer=buffer,
                model_type="bpe",
                vocab_size=vocab_size,
                hard_vocab_limit=False,  # a text too small for vocab_size is no error
                character_coverage=1.0,
                byte_fallback=True,
                normalization_rule_name="identity",  # `clean` has done it, and by a rule that loses nothing
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                pad_piece="<pad>",
                bos_piece="<bos>",
                eos_piece="<eos>",
                unk_piece="<unk>",
                num_threads=1,  # with shuffling off: the same result each time
                shuffle_input_sentence=False,
                max_sentence_length=2**30,  # bytes; a longer line would be left out without a word
                minloglevel=3,
            )
        except RuntimeError as error:
            if "required_chars" not in str(error):
                raise ValueError(f"vocab_size={vocab_size}: {' '.join(str(error).split())}") from None
            need = len(set("".join(lines))) + 4 + 256
            raise ValueError(
                f"vocab_size={vocab_size}: must be about {need} or more, for 4 specials, 256 bytes and "
                f"the {need - 260} characters of the text"
            ) from None
        return cls(buffer.getvalue())

    def save(self, path: Path | str) -> None:
        """Write the model; the file is never half written. ValueError where it cannot be."""
        try:
            with replacing(path) as file:
                file.write(self.model)
        except OSError as error:
            raise ValueError(f"{path}: cannot be written ({reason(error)})") from None

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Read a file of `save`. ValueError where there is none."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({reason(error)})") from None
        return cls(model, path)

    def encode(self, text: str) -> list[int]:
        """Ids of the text's pieces, without BOS and EOS; none for a blank text."""
        line = clean(text)
        return self._processor.encode(line) if line.strip() else []

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first EOS, without PAD, BOS and UNK, through `clean`: a model may
        put out the byte of a line break. Bytes that are not UTF-8 become U+FFFD. IndexError for an id outside
        the vocabulary, TypeError for one that is no integer."""
        kept = []
        for i in map(operator.index, ids):
            if i == EOS_ID:
                break
            if i not in (PAD_ID, BOS_ID, UNK_ID):
                kept.append(i)
        return clean(self._processor.decode(kept))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """One label per id: "▁Hund" (▁ is a space), "<eos>", "<0xE6>" for a single byte."""
        return [self._processor.id_to_piece(operator.index(i)) for i in ids]


# -------------------------------------------------------------------------------------------------- dataset


class LangPairDataset(torch.utils.data.Dataset):
    """Pairs of id lists without specials: dataset[i] -> (source ids, target ids).

    A pair with a blank side or with more than `max_length` pieces on a side is left out, on both sides, and
    counted in `dropped_empty` or `dropped_long`; `kept` holds the line number, from 0, of each pair that
    stays. `lengths` counts the specials that `collate` adds: (pieces + 2, pieces + 1). `from_cache` tells
    whether `cached` found the ids on disk.

    ValueError for unequal numbers of lines, max_length < 1, or an id the vocabulary does not have; TypeError
    for a single string.
    """

    def __init__(
        self,
        src_lines: Sequence[str],
        tgt_lines: Sequence[str],
        tokenizer: Tokenizer,
        max_length: int = MAX_LENGTH,
    ):
        _check_sides(src_lines, tgt_lines, max_length)
        self.from_cache = False
        self.pairs, self.kept = [], []
        self.dropped_empty = self.dropped_long = 0
        for number, (src_line, tgt_line) in enumerate(zip(src_lines, tgt_lines, strict=True)):
            src, tgt = tokenizer.encode(src_line), tokenizer.encode(tgt_line)
            if not (src and tgt):
                self.dropped_empty += 1
            elif max(len(src), len(tgt)) > max_length:
                self.dropped_long += 1
            else:
                self.pairs.append((src, tgt))
                self.kept.append(number)
        top = max((max(side) for pair in self.pairs for side in pair), default=0)
        if top >= tokenizer.vocab_size:
            raise ValueError(f"id {top}: must be below the vocabulary size {tokenizer.vocab_size}")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        return self.pairs[index]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [(len(src) + 2, len(tgt) + 1) for src, tgt in self.pairs]

    @classmethod
    def cached(
        cls,
        path: Path | str,
        src_lines: Sequence[str],
        tgt_lines: Sequence[str],
        tokenizer: Tokenizer,
        max_length: int = MAX_LENGTH,
    ) -> "LangPairDataset":
        """The same dataset, read from the file `path` if that was made from exactly these inputs.

        Otherwise it is built and written there, in place of a file that is broken or made from other inputs;
        where nothing can be written, nothing is cached. Raises as the constructor does.
        """
        _check_sides(src_lines, tgt_lines, max_length)
        key = fingerprint(CACHE_FORMAT, list(src_lines), list(tgt_lines), tokenizer.model, max_length)
        dataset = cls._read(path, key)
        if dataset is None:
            dataset = cls(src_lines, tgt_lines, tokenizer, max_length)
            dataset._write(path, key)
        return dataset

    def _write(self, path: Path | str, key: str) -> None:
        """Plain values and tensors only: what loads with weights_only=True."""
        sides = [side for pair in self.pairs for side in pair]
        content = {
            "ids": torch.tensor([i for side in sides for i in side], dtype=torch.int32),  # all, end to end
            "sizes": torch.tensor([len(side) for side in sides], dtype=torch.int32),  # source, target, ...
            "kept": torch.tensor(self.kept, dtype=torch.int64),
            "dropped": [self.dropped_empty, self.dropped_long],
        }
        with contextlib.suppress(OSError, RuntimeError):  # a read-only folder, a full disk: no cache
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                save({"key": key, "checksum": _checksum(content), **content}, file)

    @classmethod
    def _read(cls, path: Path | str, key: str) -> "LangPairDataset | None":
        try:
            content = load_plain(path)
            if content.pop("key") != key or content.pop("checksum") != _checksum(content):
                return None
            ids, sizes = content["ids"].tolist(), content["sizes"].tolist()
        except Exception:  # what torch raises for a missing or broken file varies from version to version
            return None
        dataset = cls.__new__(cls)
        dataset.from_cache = True
        dataset.kept = content["kept"].tolist()
        dataset.dropped_empty, dataset.dropped_long = content["dropped"]
        sides, start = [], 0
        for size in sizes:
            sides.append(ids[start : start + size])
            start += size
        dataset.pairs = list(zip(sides[::2], sides[1::2], strict=True))
        return dataset


def is_cache(path: Path | str) -> bool:
    """Is the file one that `LangPairDataset.cached` wrote?"""
    try:
        return {"key", "checksum", "ids"} <= torch.load(path, map_location="cpu", weights_only=True).keys()
    except Exception:  # what torch raises for a file that is not its own varies from version to version
        return False


def _check_sides(src_lines: Sequence[str], tgt_lines: Sequence[str], max_length: int) -> None:
    check_lines(src_lines)
    check_lines(tgt_lines)
    if len(src_lines) != len(tgt_lines):
        raise ValueError(
            f"{len(src_lines):,} source lines and {len(tgt_lines):,} target lines: must be equally many"
        )
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: must be at least 1")


def fingerprint(*values) -> str:
    return hashlib.sha256(repr(values).encode("ascii", "backslashreplace")).hexdigest()


def _checksum(content: dict) -> str:
    return fingerprint(*(content[name].numpy().tobytes() for name in ("ids", "sizes", "kept")))


# -------------------------------------------------------------------------------------------------- batches


class TransformerBatchSampler:
    """Lists of indices into a dataset, one per batch, for `DataLoader(batch_sampler=...)`.

    lengths: one (source, target) pair of row lengths per sentence pair, specials counted, as
    `LangPairDataset.lengths`. Pairs of similar length go together, and on each side of a batch
    longest x count <= max_tokens. A pair longer than that has a batch to itself; `oversized` counts those.

    shuffle=True: other batches in another order each epoch (`set_epoch`), decided by seed and epoch alone.
    shuffle=False: always the same ones, short sentences first.

    With several ranks every index comes once an epoch, over all ranks together, and all have equally many
    batches: the largest are split in two until their number divides by world_size. Rank r takes batches r,
    r + world_size, ... of one list that all ranks share.

    ValueError: no pairs, max_tokens or world_size below 1, rank outside 0..world_size-1, or more ranks than
    can be served. Source: Vaswani et al. 2017, section 5.1 (batches by tokens).
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        max_tokens: int = MAX_TOKENS,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        if not len(lengths):
            raise ValueError("no sentence pairs to make batches of: none were given, or all were dropped")
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: must be 0 <= rank < world_size")
        self.lengths = [(int(src), int(tgt)) for src, tgt in lengths]
        self.max_tokens, self.shuffle, self.seed = max_tokens, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.oversized = sum(max(pair) > max_tokens for pair in self.lengths)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Make the batches of this epoch. `len`, `padding_share` and iteration speak of these."""
        chance = random.Random(f"{self.seed} {epoch}")
        order = list(range(len(self.lengths)))
        stretch = [0] * len(order)
        if self.shuffle:
            chance.shuffle(order)
            stretch = chance.choices((0, 1), k=len(order))  # neighbouring lengths mix, differently each time

        def by_length(index: int) -> tuple[int, int]:
            """By source, then by target, up and down in turn, so that it does not jump in between."""
            src, tgt = self.lengths[index]
            src += stretch[index]
            return src, tgt if src % 2 else -tgt

        order.sort(key=by_length)  # pairs of one length stay shuffled
        batches = self._pack(order)
        if self.shuffle and len(batches) > 1:
            cut = chance.randrange(len(batches[0]))  # a first batch cut short shifts all the others
            batches = self._pack(order[:cut]) + self._pack(order[cut:])
        for _ in range(-len(batches) % self.world_size):
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batch = batches[largest]
            if len(batch) == 1:
                raise ValueError(
                    f"world_size={self.world_size}: {len(order)} pairs in {len(batches)} batches "
                    f"cannot be dealt evenly; use fewer processes"
                )
            batches[largest : largest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        if self.shuffle:
            chance.shuffle(batches)
        self._batches = batches

    def _pack(self, order: list[int]) -> list[list[int]]:
        """Cut the order into runs, each as long as the budget allows."""
        batches, longest = [], 0
        for index in order:
            grown = max(longest, *self.lengths[index])
            if batches and grown * (len(batches[-1]) + 1) <= self.max_tokens:
                batches[-1].append(index)
                longest = grown
            else:
                batches.append([index])
                longest = max(self.lengths[index])
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self._batches[self.rank :: self.world_size]])

    def __len__(self) -> int:
        return len(self._batches) // self.world_size

    def padding_share(self) -> float:
        """Part of all positions of this epoch, both sides and all ranks, that holds padding: 0 to 1."""
        real = sum(map(sum, self.lengths))
        cells = 0
        for batch in self._batches:
            rows = [self.lengths[index] for index in batch]
            cells += len(rows) * (max(src for src, _ in rows) + max(tgt for _, tgt in rows))
        return 1 - real / cells


def collate(pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Pairs of id lists -> {"src" [B, Ls], "tgt_in" [B, Lt], "labels" [B, Lt]}, int64, laid out as above.

    ValueError for no pairs; TypeError for an id that is no integer.
    """
    if not pairs:
        raise ValueError("no sentence pairs to make a batch of")
    return {
        "src": _rows([[BOS_ID, *src, EOS_ID] for src, _ in pairs]),
        "tgt_in": _rows([[BOS_ID, *tgt] for _, tgt in pairs]),
        "labels": _rows([[*tgt, EOS_ID] for _, tgt in pairs]),
    }


def _rows(rows: list[list[int]]) -> Tensor:
    """Lists of ids -> [B, longest] int64, PAD at the ends."""
    longest = max(map(len, rows))
    batch = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in rows])
    if batch.dtype != torch.int64:  # asked for int64, torch.tensor would cut a fraction off without a word
        raise TypeError(f"ids of dtype {batch.dtype}: must be integers")
    return batch
