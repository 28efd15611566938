"""The translator beside JoeyNMT 2.3: same sizes, weights, sentences and batches, in turns, in one process.

Run from the project's folder, in an environment that holds both:

pip install -r translation/requirements.txt joeynmt importlib_metadata
python -m benchmarks.joey                           training
python -m benchmarks.joey --checkpoint runs/small   training and decoding

Training: whole updates, from lists of ids or pieces to changed weights; ours are those of translation.train,
JoeyNMT's those of its own collate_fn and TrainManager. Decoding: each one's own beam search with the same
trained weights, ours from text to text, JoeyNMT's only from pieces to ids. (By itself JoeyNMT would cut the
text into pieces for each batch anew.) Where the two are not alike:

    dropout     JoeyNMT has one more in the feed-forward part, after its activation
    optimiser   PyTorch's Adam as it is there, its fused version here
    output      JoeyNMT's has no bias; for decoding it is given ours, in training ours only starts at 0
    precision   fp32 is what both have; JoeyNMT's own command has no bf16 and is given autocast here
    search      a finished hypothesis keeps its place in JoeyNMT's beam, and the search ends when every place
                has held one; here it gives up its place, and the search ends when no other can still win
    cache       JoeyNMT computes all positions again at each step; here there is a KV cache
    limit       of an output's tokens: one per batch there (its largest), one per sentence here
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import contextlib
import importlib
import json
import logging
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from model import PAD_ID, Transformer
from toolbox.command_line import ArgumentParser, integer, run_script, say
from toolbox.device import add_device_option, choose_device, choose_precision, device_name
from toolbox.files import check_outputs, file_name, reason, write_text
from toolbox.measure import quartiles, take_turns, without_tf32
from train import ADAM, BOS_ID, EOS_ID, evaluating
from translation.bleu import corpus_bleu
from translation.checkpoint import checkpoint_files, load_translator
from translation.data import UNK_ID, LangPairDataset, Tokenizer, TransformerBatchSampler, collate
from translation.decode import ALPHA, BATCH, BEAM, output_limit, translate_lines
from translation.options import PRESETS, build_parser
from translation.prepare import load_split
from translation.run import make_model, make_optimizer
from translation.train import load_batch, loss_sum, train_step

OURS, THEIRS = "model.py", "JoeyNMT"
PARTS = ("train", "decode")
WARMUP = 3  # updates of each that are not timed
SPECIALS = [UNK_ID, PAD_ID, BOS_ID, EOS_ID]  # the order in which JoeyNMT's vocabulary begins
Pairs = Sequence[tuple[list[int], list[int]]]  # as in LangPairDataset: ids without specials


# ------------------------------------------------------------------------------------------ JoeyNMT's side


def load_joey() -> ModuleType:
    """The package joeynmt with what is used of it, its log silenced. ValueError: it cannot be imported."""
    try:
        package = importlib.import_module("joeynmt")
        for part in ("config", "datasets", "model", "search", "training", "vocabulary"):
            importlib.import_module(f"joeynmt.{part}")
    except ImportError as error:
        name = error.name or "joeynmt"
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        raise ValueError(
            f"{name} {what}: pip install joeynmt importlib_metadata, best in a separate environment"
        ) from None
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("joeynmt."):
            logging.getLogger(name).setLevel(logging.ERROR)
    return package


def build_peer(joey: ModuleType, settings: dict, tokenizer: Tokenizer) -> nn.Module:
    """JoeyNMT's model of our model's `settings`, from its own build_model, its loss not yet set."""
    names = dict(zip(("unk", "pad", "bos", "eos"), tokenizer.pieces(SPECIALS), strict=True))
    symbols = {f"{name}_token": piece for name, piece in names.items()}
    symbols |= {f"{name}_id": i for i, name in enumerate(names)}
    pieces = tokenizer.pieces(range(len(SPECIALS), tokenizer.vocab_size))
    symbols |= dict(sep_token=None, sep_id=None, lang_tags=[])
    vocabulary = joey.vocabulary.Vocabulary(pieces, SimpleNamespace(**symbols))
    side = dict(
        type="transformer",
        num_layers=settings["num_layers"],
        num_heads=settings["num_heads"],
        hidden_size=settings["d_model"],
        ff_size=settings["dff"],
        dropout=settings["dropout"],
        layer_norm="pre" if settings["norm_first"] else "post",
        activation=settings["activation"],
        embeddings=dict(embedding_dim=settings["d_model"], scale=True, dropout=settings["dropout"]),
    )
    shared = settings["share_embeddings"]
    tied = shared or settings["tie_output"]
    options = dict(encoder=side, decoder=side, tied_embeddings=shared, tied_softmax=tied)
    return joey.model.build_model(options, vocabulary, vocabulary)


def joey_rows(vocab_size: int) -> Tensor:
    """[V]: our id of each of JoeyNMT's ids. Only the specials have other places there."""
    return torch.tensor([*SPECIALS, *range(len(SPECIALS), vocab_size)])


@torch.no_grad()
def copy_weights(model: Transformer, peer: nn.Module, output_bias: bool) -> None:
    """Make `peer`, of build_peer, compute what `model` computes; without output_bias only where that is 0."""
    rows = joey_rows(model.out_proj.out_features).to(model.out_proj.weight.device)
    norm_first = model.settings["norm_first"]

    def attention(theirs: nn.Module, ours: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        return [
            (theirs.q_layer, ours.W_q),
            (theirs.k_layer, ours.W_k),
            (theirs.v_layer, ours.W_v),
            (theirs.output_layer, ours.W_o),
        ]

    same = []
    for theirs, ours in zip(peer.encoder.layers, model.encoder.layers, strict=True):
        same += attention(theirs.src_src_att, ours.mha)
        same += [(theirs.layer_norm, ours.ln1), (theirs.feed_forward.layer_norm, ours.ln2)]
    for theirs, ours in zip(peer.decoder.layers, model.decoder.layers, strict=True):
        same += attention(theirs.trg_trg_att, ours.self_mha) + attention(theirs.src_trg_att, ours.cross_mha)
        same += [(theirs.x_layer_norm, ours.ln1), (theirs.dec_layer_norm, ours.ln2)]
        same += [(theirs.feed_forward.layer_norm, ours.ln3)]
    for name in ("encoder", "decoder"):
        ours, theirs = getattr(model, name), getattr(peer, name)
        for a, b in zip(theirs.layers, ours.layers, strict=True):
            first, last = (part for part in a.feed_forward.pwff_layer if isinstance(part, nn.Linear))
            same += [(first, b.ffn.net[0]), (last, b.ffn.net[2])]
        same += [(theirs.layer_norm, ours.ln_final)] if norm_first else []
    for theirs, ours in same:
        theirs.load_state_dict(ours.state_dict())
        if isinstance(ours, nn.LayerNorm):
            theirs.eps = ours.eps  # JoeyNMT's is 1e-6
    peer.src_embed.lut.weight.copy_(model.encoder.embed.emb.weight[rows])
    peer.trg_embed.lut.weight.copy_(model.decoder.embed.emb.weight[rows])
    peer.decoder.output_layer.weight.copy_(model.out_proj.weight[rows])
    if output_bias:
        peer.decoder.output_layer.bias = nn.Parameter(model.out_proj.bias[rows].clone())


def batch_maker(
    joey: ModuleType, peer: nn.Module, tokenizer: Tokenizer, pairs: Pairs, device: torch.device
) -> Callable[[list[int]], object]:
    """-> a function: indices into `pairs` -> JoeyNMT's Batch of these rows, by its dataset's collate_fn."""
    encoder = peer.src_vocab.sentences_to_ids

    class Pieces(joey.datasets.BaseDataset):
        """Sentences already cut into pieces. JoeyNMT has no BOS before a source, our model wants one."""

        def __init__(self):
            languages = dict(src_lang="src", trg_lang="trg", has_prompt=dict(src=False, trg=False))
            encoders = dict(src=encoder, trg=encoder)
            super().__init__("", has_trg=True, sequence_encoder=encoders, **languages)
            self.items = {
                "src": [tokenizer.pieces([BOS_ID, *src]) for src, _ in pairs],
                "trg": [tokenizer.pieces(tgt) for _, tgt in pairs],
            }

        def get_item(self, idx: int, lang: str, is_train: bool | None = None) -> list[str]:
            return self.items[lang][idx]

        def __len__(self) -> int:
            return len(self.items["src"])

    dataset, ids = Pieces(), dict(pad_index=peer.pad_index, eos_index=peer.eos_index, device=device)
    return lambda rows: dataset.collate_fn([dataset[i] for i in rows], **ids)


@contextlib.contextmanager
def train_manager(
    joey: ModuleType, peer: nn.Module, args: argparse.Namespace, start_lr: float, precision: str,
    device: torch.device, seed: int,
) -> Iterator:  # fmt: skip
    """JoeyNMT's TrainManager for `peer`, with the options of translation.train; start_lr: of update 1."""
    config = joey.config.parse_train_args(
        dict(
            normalization="tokens", label_smoothing=args.smoothing, clip_grad_norm=args.clip,
            optimizer="adam", adam_betas=list(ADAM["betas"]), learning_rate=start_lr,
            scheduling="noam", learning_rate_factor=args.lr_factor, learning_rate_warmup=args.warmup,
            batch_size=args.max_tokens, batch_type="token",
        )
    )  # fmt: skip
    autocast = dict(device_type=device.type, enabled=precision == "bf16", dtype=torch.bfloat16)
    n_gpu = int(device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:  # for the TensorBoard file that it opens
        make = joey.training.TrainManager
        manager = make(0, peer, Path(folder), device, n_gpu, 0, autocast, seed, config, None)
        manager.tb_writer.close()
        yield manager


def joey_step(manager, make_batch: Callable, rows: list[int]) -> None:
    """One update as JoeyNMT's TrainManager makes it, on the pairs `rows`."""
    manager._train_step(make_batch(rows))
    manager.clip_grad_fun(parameters=manager.model.parameters())
    if manager.scaler is None:
        manager.optimizer.step()
    else:
        manager.scaler.step(manager.optimizer)
        manager.scaler.update()
    manager.scheduler.step(manager.stats.steps)
    manager.model.zero_grad()
    manager.stats.steps += 1


def check_twin(
    model: Transformer, peer: nn.Module, ours: dict[str, Tensor], theirs, smoothing: float
) -> None:
    """RuntimeError unless both give the same log-probabilities and loss to the same batch, teacher-forced.

    ours: of `collate`; theirs: JoeyNMT's Batch of the same rows. Neither drops anything here.
    """
    rows, real = joey_rows(model.out_proj.out_features).to(ours["src"].device), ours["labels"] != PAD_ID
    peer.loss_function = "crossentropy", smoothing
    with without_tf32(), evaluating(model), evaluating(peer):
        logits = model(ours["src"], ours["tgt_in"])
        loss, log_p, _, _ = peer(return_type="loss", **vars(theirs))
    apart = (log_p - logits.log_softmax(-1)[..., rows])[real].abs().max().item()
    # Theirs is a KL divergence: ours less the entropy of the smoothed target, the same for each token.
    others = logits.size(-1) - 2
    share = torch.tensor([1 - smoothing] + [smoothing / others] * others, dtype=torch.float64)
    mean = (loss_sum(logits, ours["labels"], smoothing) / real.sum()).item()
    mean_there = loss.item() / theirs.ntokens + torch.special.entr(share).sum().item()
    if not (apart < 1e-4 and abs(mean - mean_there) < 1e-3 * mean):
        raise RuntimeError(f"the two models differ: log-probabilities by {apart:.1e}, {mean=}, {mean_there=}")
    say(f"  same weights: log-probabilities equal to {apart:.0e}, loss {mean:.4f} and {mean_there:.4f}")


# ------------------------------------------------------------------------------------------------ measuring


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; of a single value, that value three times."""
    low, median, high = quartiles(values if len(values) > 1 else [*values, *values])
    return dict(median=median, low=low, high=high)


def report(rates: dict[str, list[float]], unit: str) -> dict:
    """Per contender one rate per turn -> name -> median and quartiles, and "ratio", those of ours / theirs.

    A ratio is taken turn by turn, between two measurements next to each other in time.
    """
    pairs = zip(rates[OURS], rates[THEIRS], strict=True)
    results = {name: spread(values) for name, values in rates.items()}
    for name, row in results.items():
        say(f"  {name:12}{row['median']:>12,.1f} {unit}  ({row['low']:,.1f} - {row['high']:,.1f})")
    results["ratio"] = spread([ours / theirs for ours, theirs in pairs])
    say("  ratio       {median:>12,.2f} x  ({low:,.2f} - {high:,.2f})".format(**results["ratio"]))
    return results


def recipe(preset: str) -> argparse.Namespace:
    """All options of translation.train as that preset sets them."""
    parser = build_parser()
    parser.set_defaults(**PRESETS[preset])
    return parser.parse_args([])


def measure_training(
    joey: ModuleType, lines: tuple[list[str], list[str]], args: argparse.Namespace, updates: int,
    precision: str, device: torch.device, seed: int = 0,
) -> dict:  # fmt: skip
    """Updates of both on the same batches, in turns -> rates in real target tokens per second, and ratio.

    args: of `recipe`. JoeyNMT starts from our weights; bf16 is autocast on both sides.
    """
    tokenizer = Tokenizer.train([*lines[0], *lines[1]], args.vocab_size)
    dataset = LangPairDataset(*lines, tokenizer, args.max_length)
    batches = list(TransformerBatchSampler(dataset.lengths, args.max_tokens, seed=seed))
    torch.manual_seed(seed)
    model = make_model(args, tokenizer.vocab_size, device)
    optimizer, scheduler = make_optimizer(model, args.warmup, args.lr_factor)
    peer = build_peer(joey, model.settings, tokenizer).to(device)
    copy_weights(model, peer, output_bias=False)
    make_batch = batch_maker(joey, peer, tokenizer, dataset.pairs, device)
    say(
        f"training, {sum(p.numel() for p in model.parameters()):,} parameters here, "
        f"{sum(p.numel() for p in peer.parameters()):,} there; {len(dataset):,} pairs, batches of at most "
        f"{args.max_tokens:,} tokens a side; {precision}; {updates} updates each in turns:"
    )
    check_twin(model, peer, load_batch(dataset, batches[0], device), make_batch(batches[0]), args.smoothing)
    order = [batches[i % len(batches)] for i in range(WARMUP + updates)]
    tokens = []
    for rows in order:
        here = int((collate([dataset[i] for i in rows])["labels"] != PAD_ID).sum())
        if here != (there := make_batch(rows).ntokens):
            raise RuntimeError(f"target tokens of the same batch: {here} here, {there} in JoeyNMT")
        tokens.append(here)
    model.train()
    turns = {OURS: iter(order), THEIRS: iter(order)}

    def our_step() -> None:
        batch = load_batch(dataset, next(turns[OURS]), device)
        train_step(model, optimizer, scheduler, batch, precision, args.smoothing, args.clip)

    start_lr = scheduler.get_last_lr()[0]
    with train_manager(joey, peer, args, start_lr, precision, device, seed) as manager:
        calls = {OURS: our_step, THEIRS: lambda: joey_step(manager, make_batch, next(turns[THEIRS]))}
        times = take_turns(calls, lambda: None, updates, WARMUP, device, "training")
    rates = {
        name: [1000 * n / ms for n, ms in zip(tokens[WARMUP:], values, strict=True)]
        for name, values in times.items()
    }
    totals = dict(updates=updates, target_tokens=sum(tokens[WARMUP:]), precision=precision)
    return report(rates, "target tokens/s") | totals


def measure_decoding(
    joey: ModuleType, model: Transformer, tokenizer: Tokenizer, lines: tuple[list[str], list[str]],
    rounds: int, device: torch.device,
) -> dict:  # fmt: skip
    """Beam search of both over the same batches, in turns -> rates in sentences per second, ratio, agreement.

    lines: sources and references. A rate is one round's, over all sentences; fp32.
    """
    longest = model.settings["max_len"]
    ids = ([tokenizer.encode(line)[: longest - 2] for line in side] for side in lines)
    pairs = list(zip(*ids, strict=True))
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]))
    chunks = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    room = [output_limit(len(src), longest) for src, _ in pairs]
    peer = build_peer(joey, model.settings, tokenizer).to(device).eval()
    copy_weights(model, peer, output_bias=True)
    make_batch = batch_maker(joey, peer, tokenizer, pairs, device)
    to_ours = joey_rows(tokenizer.vocab_size)
    say(
        f"decoding, {len(pairs):,} sentences in batches of {BATCH}, sorted by length, beam {BEAM}, "
        f"alpha {ALPHA}; fp32; {rounds} round{'s' * (rounds > 1)} each in turns:"
    )
    ours = {name: ids.to(device) for name, ids in collate([pairs[i] for i in chunks[0]]).items()}
    check_twin(model, peer, ours, make_batch(chunks[0]), smoothing=0.1)
    outputs = {}
    counts = {OURS: -1, THEIRS: -1}  # the first call, not timed, takes the last chunk

    def next_chunk(name: str) -> list[int]:
        counts[name] += 1
        return chunks[(counts[name] - 1) % len(chunks)]

    def our_search() -> None:
        chunk = next_chunk(OURS)
        found = translate_lines(model, tokenizer, [lines[0][i] for i in chunk])
        outputs.update(((OURS, i), text) for i, text in zip(chunk, found, strict=True))

    def their_search() -> None:
        chunk = next_chunk(THEIRS)
        batch, limit = make_batch(chunk), max(room[i] for i in chunk)
        best, _, _ = joey.search.search(peer, batch, limit, BEAM, ALPHA, min_output_length=0)
        found = to_ours[torch.as_tensor(best).long()].tolist()
        outputs.update(((THEIRS, i), ids) for i, ids in zip(chunk, found, strict=True))

    calls, count = {OURS: our_search, THEIRS: their_search}, rounds * len(chunks)
    times = take_turns(calls, lambda: None, count, 1, device, "decoding")
    rates = {}
    for name, values in times.items():
        parts = [values[i : i + len(chunks)] for i in range(0, count, len(chunks))]
        rates[name] = [1000 * len(pairs) / sum(part) for part in parts]
    results = report(rates, "sentences/s") | dict(sentences=len(pairs), rounds=rounds)
    texts = {
        OURS: [outputs[OURS, i] for i in range(len(pairs))],
        THEIRS: [tokenizer.decode(outputs[THEIRS, i]) for i in range(len(pairs))],
    }
    results["same_outputs"] = sum(map(str.__eq__, texts[OURS], texts[THEIRS]))
    say(f"  same text from both: {results['same_outputs']:,} of {len(pairs):,} sentences")
    results["bleu"] = {name: corpus_bleu(text, lines[1])[0] for name, text in texts.items()}
    say("  BLEU " + ", ".join(f"{score:.2f} by {name}" for name, score in results["bleu"].items()))
    return results


# --------------------------------------------------------------------------------------------- command line


def cpu_name() -> str:
    """What the processor calls itself, where Linux tells; otherwise what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def parse_args(parser: ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """-> options, with `device` and the package as `joey`. ValueError for what argparse cannot see."""
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, help="None: train, and with --checkpoint also decode")
    add("--data", type=file_name, default="multi30k", help="folder of train.de, train.en, the split's files")
    add("--checkpoint", type=file_name, help="a run of translation.train, or a .pt file of it, to decode by")
    add("--split", default="test_2016_flickr", help="what is decoded")
    add("--sentences", type=integer(1), help="decode only so many, the first ones; None: all")
    add("--rounds", type=integer(1), default=3, help="decodings of all sentences by each")
    add("--updates", type=integer(2), default=60, help="timed updates of each")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of both in training")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="for weights, dropout and batches")
    add("--json", type=file_name, help="file for all numbers; None: not written")
    add_device_option(parser)
    args = parser.parse_args(argv)
    args.parts = args.parts or (PARTS if args.checkpoint else PARTS[:1])
    if "decode" in args.parts and not args.checkpoint:
        raise ValueError("--parts decode: needs --checkpoint, a run of translation.train")
    if args.json:
        inputs = checkpoint_files(args.checkpoint) if args.checkpoint else []
        check_outputs([("--json", args.json, "JSON file")], inputs)
    args.device = choose_device(args.device)
    choose_precision(args.precision, args.device)
    args.joey = load_joey()
    return args


def measure(args: argparse.Namespace) -> dict:
    """All parts -> what --json gets. ValueError, before anything is timed, where the files will not do."""
    device, languages = args.device, ("de", "en")
    if "decode" in args.parts:
        model, tokenizer, checkpoint = load_translator(args.checkpoint, device)
        languages = checkpoint["run"]["src"], checkpoint["run"]["tgt"]
        test = tuple(side[: args.sentences] for side in load_split(args.data, args.split, *languages))
        if not test[0]:
            raise ValueError(f"--split {args.split}: has no sentences")
    lines = load_split(args.data, "train", *languages) if "train" in args.parts else None
    results = dict(device=device_name(device), machine=cpu_name(), threads=torch.get_num_threads(),
                   torch=torch.__version__, joeynmt=args.joey.__version__, seed=args.seed)  # fmt: skip
    say(
        f"device {results['device']}; {results['machine']}; torch {results['torch']}; "
        f"joeynmt {results['joeynmt']}; seed {args.seed}"
    )
    if "train" in args.parts:
        results["train"] = measure_training(
            args.joey, lines, recipe("small"), args.updates, args.precision, device, args.seed
        )
    if "decode" in args.parts:
        results["decode"] = measure_decoding(args.joey, model, tokenizer, test, args.rounds, device)
    elif not args.checkpoint:
        say("decoding is left out: it needs --checkpoint, a run of translation.train")
    return results


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.joey", description=__doc__)
    try:
        args = parse_args(parser, argv)
        results = measure(args)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    if args.json:
        try:
            write_text(args.json, json.dumps(results, indent=1))
        except OSError as error:
            parser.error(f"--json {args.json}: cannot be written ({reason(error)})")
        say(f"wrote {args.json}")
    return 0


if __name__ == "__main__":
    run_script(main)
