"""The same attention by hand, in tiles, and through SDPA: time and peak memory. Chapter section 20.14.

By hand, causal self-attention writes a [B, h, L, L] matrix of scores to memory, reads it for the softmax, and
reads the result again for the product with V. Behind `F.scaled_dot_product_attention` (SDPA) are kernels that
take the scores tile by tile and never store the whole matrix (FlashAttention, Dao et al. 2022): much less to
move, much less to keep, the same numbers. `tiled_attention` below is their idea in plain PyTorch. That all
three agree is checked first, gradients included.

What is timed: one call on x [B, L, d_model], the four projections included, dropout 0. By hand builds the
causal mask inside the call, as a decoder does; the others are told `is_causal=True` and need none. "forward"
runs without gradients; "forward + backward" ends with the gradients of x and of all weights. Tiles are timed
forward only: autograd would keep every tile, and so the whole matrix.

On a GPU the time is that of its kernels: it gets a head start, so that launching them from Python does not
count, and x comes from memory, not from the L2 cache. Tiles pay off on the CPU: on a GPU each is some ten
launches of small kernels, likely slower in all than by hand. There a fused kernel is one launch.

Run `python mha_vs_sdpa.py`; add `--lengths 256,512,1024,2048` for the growth with L and a picture.
"""

import argparse
import contextlib
import json
import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model import PAD_ID, MultiHeadAttention, make_causal_mask, make_padding_mask
from toolbox.command_line import ArgumentParser, integer, run_script, say, shorten, show_progress
from toolbox.device import (
    add_device_option,
    add_precision_option,
    choose_device,
    choose_precision,
    device_name,
)
from toolbox.figures import check_picture, new_figure, save_figure
from toolbox.files import check_output, file_name, reason
from toolbox.measure import (
    NotEqual,
    attempt,
    largest_difference,
    out_of_memory,
    peak_bytes,
    quartiles,
    sdpa_kernels,
    take_turns,
    without_tf32,
)

CHECK_BATCH, CHECK_LENGTH = 2, 200  # shape of the equality check: more than one tile, the last one cut short
LIMIT = 1e-4  # largest difference that still counts as equal, fp32 without TF32
ROUGH_LIMIT = 2e-2  # the same for the outputs that are timed, in bf16 or TF32
PICTURE = "mha_vs_sdpa.png"
LONGEST = 2**17  # tokens


# ------------------------------------------------------------------------------------------- the contenders


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, tile: int = 128
) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V, one tile of scores at a time: the online softmax.

    Of the scores s_j and values v_j that a query has met it keeps the maximum m and two sums,
    z = sum_j e^(s_j - m) and o = sum_j e^(s_j - m) v_j. A tile that raises the maximum to m' shrinks both:

        z' = z e^(m - m') + sum_j e^(s_j - m')        o' = o e^(m - m') + sum_j e^(s_j - m') v_j

    After the last tile o / z is the answer. q [B, h, Lq, d_k], k and v [B, h, Lk, d_k], mask bool, [B, h, Lq,
    Lk] with 1 for any but Lk, True = masked -> [B, h, Lq, d_k]. `is_causal=True` stands for
    `make_causal_mask`; ValueError with a mask beside it, or when Lq != Lk. ValueError, too, without keys, or
    with another number of values, of which some would never be looked at.
    Source: Milakov & Gimelshein 2018; Dao et al. 2022.
    """
    if is_causal and (mask is not None or q.size(2) != k.size(2)):
        raise ValueError("is_causal: needs queries and keys of one length, and no mask beside it")
    if not k.size(2) or k.size(2) != v.size(2):
        raise ValueError(f"{k.size(2)} keys and {v.size(2)} values: must be equally many, at least 1")
    scale, lowest, outputs = q.size(-1) ** -0.5, torch.finfo(torch.float32).min, []
    if mask is not None:
        mask = mask.expand(-1, -1, q.size(2), k.size(2))
    for top in range(0, q.size(2), tile):
        rows = slice(top, top + tile)
        o = torch.zeros_like(q[:, :, rows], dtype=torch.float32)  # (B, h, tile, d_k)
        z, m = torch.zeros_like(o[..., :1]), torch.full_like(o[..., :1], lowest)
        end = top + tile if is_causal else k.size(2)  # tiles above the diagonal are skipped
        for left in range(0, end, tile):
            columns = slice(left, left + tile)
            s = (q[:, :, rows] @ k[:, :, columns].transpose(-2, -1)).float() * scale  # (B, h, tile, tile)
            if is_causal and left == top:
                s = s.masked_fill(make_causal_mask(s.size(-1), s.device), lowest)
            if mask is not None:
                s = s.masked_fill(mask[:, :, rows, columns], lowest)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, shrink = (s - m_new).exp(), (m - m_new).exp()
            z = z * shrink + p.sum(-1, keepdim=True)
            o = o * shrink + (p.to(v.dtype) @ v[:, :, columns]).float()
            m = m_new
        outputs.append((o / z).to(v.dtype))
    return torch.cat(outputs, dim=2)


def make_attention(d_model: int, heads: int, device: torch.device | str) -> MultiHeadAttention:
    """The weights that all contenders share, without dropout."""
    torch.manual_seed(0)
    return MultiHeadAttention(d_model, heads, dropout=0.0).to(device)


def project(mha: MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, L, d_model] -> q, k, v [B, h, L, d_k]."""
    return mha._split(mha.W_q(x)), *mha.keys_values(x, x)


# Each contender: x [B, L, d_model] -> [B, L, d_model]; causal, or with a mask as MultiHeadAttention takes it.
# A row with every key masked comes out as 0 through SDPA (torch >= 2.5) and as the mean of V from the others:
# both are meaningless, and comparisons leave such rows out.


def by_hand(mha: MultiHeadAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = make_causal_mask(x.size(1), x.device) if mask is None else mask
    return mha(x, x, x, attn_mask=mask)[0]


def in_tiles(mha: MultiHeadAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    context = tiled_attention(*project(mha, x), mask, is_causal=mask is None)
    return mha.W_o(mha._merge(context))


def through_sdpa(mha: MultiHeadAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    keep = None if mask is None else ~mask  # SDPA's bool masks have the opposite sense: True = may be seen
    context = F.scaled_dot_product_attention(*project(mha, x), attn_mask=keep, is_causal=mask is None)
    return mha.W_o(mha._merge(context))


FIRST = "by hand"  # what all others are compared with
CONTENDERS = {FIRST: by_hand, "tiles": in_tiles, "SDPA": through_sdpa}
FORWARD_ONLY = ("tiles",)


# ----------------------------------------------------------------------------------------------- same result


@without_tf32()
def check_equal(mha: MultiHeadAttention) -> dict[str, dict[str, float]]:
    """Outputs and gradients of every contender against the first, causal and with padding, as fp32.

    -> contender -> largest differences: "causal output", "causal gradients", "padding output", "padding
    gradients", and last "wrong sense", the output's when the mask goes in without `~`. NotEqual when one of
    the first four exceeds LIMIT, or the last is so small that the check must be blind.
    """
    device, shape = mha.W_q.weight.device, (CHECK_BATCH, CHECK_LENGTH, mha.W_q.in_features)
    x = torch.randn(shape, device=device, requires_grad=True)
    cotangent = torch.randn(shape, device=device)  # uneven, so that every entry's gradient counts
    ids = torch.ones(CHECK_BATCH, CHECK_LENGTH, dtype=torch.long, device=device)
    ids[0, CHECK_LENGTH // 2 :] = ids[1, CHECK_LENGTH // 4 :] = PAD_ID
    padding = make_padding_mask(ids)  # (B, 1, 1, L)

    found: dict[str, dict[str, float]] = {name: {} for name in CONTENDERS if name != FIRST}
    for case, mask in (("causal", None), ("padding", padding)):
        results = {}
        for name, call in CONTENDERS.items():
            y = call(mha, x, mask)
            results[name] = y.detach(), *torch.autograd.grad(y, [x, *mha.parameters()], cotangent)
        for name, differences in found.items():
            differences[f"{case} output"] = largest_difference(results[name][:1], results[FIRST][:1])
            differences[f"{case} gradients"] = largest_difference(results[name][1:], results[FIRST][1:])
    for name, differences in found.items():
        for what, off in differences.items():
            if not off <= LIMIT:  # written so that NaN fails too
                raise NotEqual(
                    f"{name} is not {FIRST}: {what} off by {off:.1e}, limit {LIMIT:.0e}; not timed"
                )
        with torch.no_grad():  # the mask as SDPA alone would want it: True = may be seen
            wrong = CONTENDERS[name](mha, x, ~padding)
        differences["wrong sense"] = largest_difference([wrong], results[FIRST][:1])
        if not differences["wrong sense"] > 100 * LIMIT:
            raise NotEqual(f"{name}: a mask of the wrong sense changes nothing, so the check is blind")
    return found


def check_outputs(mha: MultiHeadAttention, x: Tensor, precision: str) -> None:
    """NotEqual when what is about to be timed on x [B, L, d_model] comes out different."""
    expected = None
    for name in CONTENDERS:
        y = attempt(partial(forward, name, mha, x, precision))
        if y is None:
            continue
        expected = y if expected is None else expected
        off = largest_difference([y.float()], [expected.float()])
        if not off <= ROUGH_LIMIT:
            raise NotEqual(f"{name}: timed output off by {off:.1e}, limit {ROUGH_LIMIT:.0e}; not timed")


# -------------------------------------------------------------------------------------------- time and memory


def forward(name: str, mha: MultiHeadAttention, x: Tensor, precision: str) -> Tensor:
    """x [B, L, d_model] -> [B, L, d_model] by one contender, as in inference; bf16 means autocast."""
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return CONTENDERS[name](mha, x)


def forward_backward(name: str, mha: MultiHeadAttention, x: Tensor, precision: str) -> None:
    """x [B, L, d_model], as in training: leaves a .grad at x and at every weight."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        y = CONTENDERS[name](mha, x)
    y.sum().backward()


PASSES = {"forward": forward, "forward + backward": forward_backward}


def measure(mha: MultiHeadAttention, x: Tensor, repeats: int, warmup: int, precision: str) -> list[dict]:
    """Every contender on x [B, L, d_model] -> one dict per pass and contender, the rows of table and JSON.

    A ratio says how many times smaller a number is than the first contender's. NotEqual when the outputs
    about to be timed disagree.
    """
    check_outputs(mha, x, precision)
    rows = []

    def clear() -> None:
        x.grad = None
        mha.zero_grad(set_to_none=True)

    for what, function in PASSES.items():
        calls = {
            name: partial(function, name, mha, x, precision)
            for name in CONTENDERS
            if what == "forward" or name not in FORWARD_ONLY
        }
        times = take_turns(calls, clear, repeats, warmup, x.device, f"L={x.size(1)}, {what}", True)
        group = []
        for name, call in calls.items():
            row = {"length": x.size(1), "pass": what, "contender": name, "out_of_memory": name not in times}
            row |= {"median_ms": None, "iqr_ms": None, "peak_bytes": None, "kernels": []}
            if name in times:
                low, row["median_ms"], high = quartiles(times[name])
                row["iqr_ms"] = high - low
                clear()
                row["peak_bytes"] = attempt(partial(peak_bytes, call, x.device))
                row["kernels"] = attempt(partial(sdpa_kernels, call)) or []
            group.append(row)
            for ratio, key in (("time_ratio", "median_ms"), ("memory_ratio", "peak_bytes")):
                row[ratio] = group[0][key] / row[key] if group[0][key] and row[key] else None
        clear()
        rows += group
    return rows


def autocast_memory(batch: int, heads: int, length: int) -> str:
    """Why bf16 does not halve what attention by hand needs on a GPU, in a line."""
    scores = batch * heads * length**2
    parts = [f"{size * scores / 1e6:,.0f} MB" for size in (2, 4, 4, 10)]
    return (
        f"autocast computes softmax in fp32: at L={length} by hand holds the scores in bf16 ({parts[0]}), a "
        f"copy in fp32 ({parts[1]}) and the weights in fp32 ({parts[2]}) at once, {parts[3]} in all"
    )


# ------------------------------------------------------------------------------------------ table and picture


def print_table(rows: list[dict]) -> None:
    say("     L  pass                contender   median ms      IQR  faster    peak MB smaller")
    for row in rows:
        line = f"{row['length']:>6}  {row['pass']:20}{row['contender']:10}"
        if row["out_of_memory"]:
            say(line + "  out of memory")
            continue
        peak = row["peak_bytes"] and row["peak_bytes"] / 1e6
        numbers = row["median_ms"], row["iqr_ms"], row["time_ratio"], peak, row["memory_ratio"]
        cells = ["n/a" if number is None else f"{number:,.2f}" for number in numbers]
        say(line + "{:>11}{:>9}{:>8}{:>11}{:>8}".format(*cells))


def curves(rows: list[dict], key: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(contender, pass) -> the points (L, row[key]) that were measured."""
    found: dict = {(row["contender"], row["pass"]): [] for row in rows}
    for row in rows:
        if row[key]:
            found[row["contender"], row["pass"]].append((row["length"], row[key]))
    return found


def print_growth(rows: list[dict]) -> None:
    """The power of L with which time and memory grew from the shortest length to the longest."""
    say("growth   as a power of L (1: twice the length costs twice as much; 2: four times)")
    for key, unit in (("median_ms", "time"), ("peak_bytes", "peak memory")):
        for (name, what), points in curves(rows, key).items():
            if len(points) > 1:
                (L0, y0), (L1, y1) = points[0], points[-1]
                power = math.log(y1 / y0) / math.log(L1 / L0)
                say(f"         {unit:12}{what:20}{name:10} L {L0} to {L1}: {power:.2f}")


def draw(rows: list[dict], title: str, path: Path) -> None:
    """Time and peak memory against L, both axes logarithmic. OSError when path cannot be written."""
    from matplotlib.ticker import LogLocator  # here, so that measuring works without matplotlib

    figure = new_figure(7.5, 3.6)
    figure.suptitle(title, fontsize=10)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    panels = (("time, ms", "median_ms", 1), ("peak memory, MB", "peak_bytes", 1e6))
    for axes, (label, key, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        axes.set(xscale="log", yscale="log", xlabel="length L")
        axes.set_title(label, fontsize=10)
        lines = {line: points for line, points in curves(rows, key).items() if points}
        for (name, what), points in lines.items():
            look = "osD^"[names.index(name) % 4] + (":" if what == "forward" else "-")
            colour = ("#b3400e", "#1f77b4", "#222222", "#6a8f1f")[names.index(name) % 4]
            axes.plot([L for L, _ in points], [y / unit for _, y in points], look, color=colour)
        axes.set_xticks(lengths := sorted({row["length"] for row in rows}), [str(L) for L in lengths])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        (low, high), height = (math.log(y) for y in axes.get_ylim()), -1.0
        for (name, what), points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
            L, y = points[-1]  # its name goes beside the end of the line, but not over the name below
            height = max((math.log(y / unit) - low) / (high - low), height + 0.07)
            text = f"  {name}, {what.replace('forward + backward', 'fwd + bwd')}"
            axes.text(L, height, text, transform=axes.get_xaxis_transform(), va="center", fontsize=8.5)
    save_figure(figure, path)


# -------------------------------------------------------------------------------------------------- the run


def increasing_lengths(text: str) -> list[int]:
    """An argparse type: "256,512" -> [256, 512]."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        values = [integer(1, LONGEST)(part) for part in text.split(",")]
        if len(values) > 1 and all(a < b for a, b in zip(values, values[1:], strict=False)):
            return values
    legal = f"two or more growing whole numbers from 1 to {LONGEST}, such as 256,512"
    raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not {legal}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="mha_vs_sdpa.py", description=__doc__)
    add = parser.add_argument
    add("--batch", type=integer(1, 2**16), default=8, help="sequences at once, B")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--length", type=integer(1, LONGEST), default=1024, help="tokens in a sequence, L")
    which.add_argument("--lengths", type=increasing_lengths, help="several, such as 256,512,1024,2048")
    add("--d-model", type=integer(2, 2**16), default=512, help="width of a token's vector")
    add("--heads", type=integer(1, 2**16), default=8, help="attention heads, h; must divide --d-model")
    add("--repeats", type=integer(2), default=10, help="timed calls of each contender")
    add("--warmup", type=integer(1), default=5, help="calls before them that do not count, more on a GPU")
    add_device_option(parser)
    add_precision_option(parser)
    add("--out", type=file_name, default=PICTURE, help="picture of --lengths")
    add("--json", action="store_true", help="print one JSON document instead of the table")
    args = parser.parse_args(argv)
    try:
        if args.d_model % args.heads:
            raise ValueError(f"--heads {args.heads}: must divide --d-model {args.d_model}")
        if args.lengths:
            check_picture("--out", args.out)
            check_output("--out", args.out, "picture")
        elif args.out != Path(PICTURE):
            raise ValueError(f"--out {args.out}: needs --lengths, one length makes no picture")
        args.device = choose_device(args.device)
        args.precision, args.why = choose_precision(args.precision, args.device)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return args


def run(args: argparse.Namespace) -> dict:
    """Check, then measure -> the JSON document: settings, "equality" and "rows"."""
    tell = (lambda text: None) if args.json else say
    if args.device.type == "cpu" and not torch.cuda.is_available():
        tell("no CUDA device here: running on the CPU")
    device = device_name(args.device)
    tell(f"device   {device}; {args.precision} ({args.why}); torch {torch.__version__}")
    shape = f"B={args.batch}, d_model={args.d_model}, h={args.heads}"
    tell(f"shape    {shape}; causal self-attention with projections")
    show_progress("checking that the contenders agree")
    mha = make_attention(args.d_model, args.heads, args.device)
    equality = check_equal(mha)
    show_progress("")
    for name, found in equality.items():
        *equal, (_, wrong) = found.items()
        tell(f"equal    {name}: " + ", ".join(f"{what} {off:.0e}" for what, off in equal) + " off, fp32")
        tell(f"unequal  {name} with the mask in the wrong sense: output {wrong:.1e} off")
    tell(f"timed    {args.repeats} calls each, taking turns, after {args.warmup} to warm up")
    rows, lengths = [], args.lengths or [args.length]
    if args.device.type == "cuda" and args.precision == "bf16":  # on the CPU autocast leaves softmax in bf16
        tell(f"memory   {autocast_memory(args.batch, args.heads, lengths[-1])}")
    for length in lengths:
        x = torch.randn(args.batch, length, args.d_model, device=args.device, requires_grad=True)
        rows += measure(mha, x, args.repeats, args.warmup, args.precision)
    names = ("batch", "d_model", "heads", "repeats", "warmup", "precision")
    settings = {"device": device, "torch": torch.__version__} | {name: getattr(args, name) for name in names}
    return settings | {"equality": equality, "rows": rows}


def report(rows: list[dict]) -> None:
    for name in dict.fromkeys(row["contender"] for row in rows):
        kernels = {kernel for row in rows if row["contender"] == name for kernel in row["kernels"]}
        if kernels:
            say(f"kernel   {name} ran {', '.join(sorted(kernels))}")
    print_table(rows)
    say("IQR: interquartile range of the times.")
    say("peak MB: tensors alive at once, beyond those alive before the call; 1 MB = 10^6 bytes.")
    say(f"faster, smaller: the time and the memory of {rows[0]['contender']}, divided by these.")
    if rows[0]["length"] != rows[-1]["length"]:
        print_growth(rows)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        document = run(args)
    except RuntimeError as error:
        if not isinstance(error, NotEqual) and not out_of_memory(error):
            raise
        text = error if isinstance(error, NotEqual) else "out of memory: make --batch or --d-model smaller"
        show_progress("")
        print(f"mha_vs_sdpa.py: error: {text}", file=sys.stderr)
        return 1
    if args.json:
        say(json.dumps(document, indent=2))
    else:
        report(document["rows"])
    if args.lengths:
        title = "Causal self-attention, B={batch}, d_model={d_model}, h={heads}; {precision}, {device}"
        try:
            draw(document["rows"], title.format(**document), args.out)
        except OSError as error:
            text = f"--out {args.out}: cannot be written ({reason(error)})"
            print(f"mha_vs_sdpa.py: error: {text}", file=sys.stderr)
            return 2
        if not args.json:
            say(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    run_script(main)
