"""Beam search with a length penalty and a KV cache, many sentences at once.

The score of a hypothesis is its log-probability divided by lp(n) = ((5 + n) / 6)^alpha, where n counts its
tokens and <eos> (Wu et al. 2016, equation 14). Without it every further token costs, and short sentences win.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model import KVCache, Transformer
from train import BOS_ID, EOS_ID, evaluating
from translation.data import Tokenizer, check_lines, collate

BEAM, ALPHA = 5, 0.6  # hypotheses kept per sentence; strength of the length penalty
BATCH = 64  # sentences decoded together


@dataclass(frozen=True)
class Hypothesis:
    """An output: its ids without <bos>, ending in <eos> unless it ran out of room, and its score."""

    ids: list[int]
    score: float


def length_penalty(length: Tensor | int, alpha: float) -> Tensor | float:
    """lp(n) of the module's docstring. alpha 0: none; 1: the mean per token, nearly."""
    return ((5 + length) / 6) ** alpha


def beam_search(
    model: Transformer, src: Tensor, beam: int = BEAM, alpha: float = ALPHA,
    max_len: int | Tensor | None = None,
) -> list[Hypothesis]:  # fmt: skip
    """src [B, Ls] -> the best hypothesis found for each row, free-running.

    `max_len`: most new tokens, <eos> counted, one number or [B], one per sentence; None: the model's max_len.
    Each step keeps the `beam` best continuations; one that ends in <eos> is finished and gives up its place.
    A sentence is done when no unfinished hypothesis can still beat its best finished one, even if all further
    tokens were certain; it then leaves the batch, so that no result depends on the others. An unfinished
    hypothesis is returned only where none finished in time. beam=1 is greedy decoding.
    ValueError for a beam below 1, an alpha that is negative or no number, a max_len below 1 or beyond the
    model's, or a source without tokens.
    """
    longest = model.settings["max_len"]
    limit = torch.as_tensor(longest if max_len is None else max_len, device=src.device).expand(src.size(0))
    if limit.is_floating_point():
        raise TypeError(f"max_len={max_len}: must be whole numbers")
    if beam < 1:
        raise ValueError(f"beam={beam}: must be at least 1")
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha={alpha}: must be at least 0, and finite")
    if not src.size(1):
        raise ValueError("src: has no tokens, not even <eos>")
    if len(limit) and not 1 <= int(limit.min()) <= int(limit.max()) <= longest:
        raise ValueError(f"max_len={max_len}: must be at least 1 and at most the model's max_len={longest}")
    best: list[Hypothesis | None] = [None] * src.size(0)
    sentence = torch.arange(src.size(0), device=src.device)  # the sentences still searched, n of them
    best_score = torch.full((src.size(0),), -torch.inf, device=src.device)
    alive = best_score[:, None].repeat(1, beam)  # (n, beam) log-probabilities of unfinished hypotheses
    alive[:, 0] = 0.0  # at first there is only one: the empty one
    ids = src.new_full((src.size(0), beam, 1), BOS_ID)  # (n, beam, step + 1)
    with evaluating(model):
        memory, src_mask = (x.repeat_interleave(beam, dim=0) for x in model.encode(src))
        cache, step = KVCache(model.settings["num_layers"]), 0
        while len(sentence):
            step += 1
            logits, _ = model.decode(ids[:, :, -1].reshape(-1, 1), memory, src_mask, cache)
            log_p = logits[:, -1].float().log_softmax(-1)  # (n * beam, V)
            log_p[:, : BOS_ID + 1] = -torch.inf  # PAD and BOS are never part of an output

            # Extend: of all continuations of a sentence's hypotheses the best `beam` stay.
            V = log_p.size(-1)
            alive, place = (alive[:, :, None] + log_p.view(-1, beam, V)).flatten(1).topk(beam)
            origin, token = place // V, place % V
            ids = torch.cat([ids.take_along_dim(origin[:, :, None], 1), token[:, :, None]], dim=2)

            # Finish: what ends in <eos> gets its score. Out of room and nothing finished: the best there is.
            ended = (token == EOS_ID) & alive.isfinite()
            finished = (alive / length_penalty(step, alpha)).masked_fill(~ended, -torch.inf)
            alive = alive.masked_fill(ended, -torch.inf)
            no_room = step == limit
            last_resort = (alive / length_penalty(step, alpha)).masked_fill(
                ~(no_room & best_score.isinf() & ~ended.any(1))[:, None], -torch.inf
            )
            score, which = torch.maximum(finished, last_resort).max(1)
            rows = (score > best_score).nonzero().flatten()
            if len(rows):  # fetched together: each of these waits for the GPU
                better = sentence[rows], ids[rows, which[rows], 1:], score[rows]
                for number, *found in zip(*(values.tolist() for values in better), strict=True):
                    best[number] = Hypothesis(*found)
            best_score = torch.maximum(best_score, score)

            # Go on with the sentences whose best finished hypothesis can still be beaten.
            attainable = alive.max(1).values / length_penalty(limit, alpha)  # alive <= 0, so later is better
            going_on = (~no_room & (attainable > best_score)).nonzero().flatten()
            rows = (going_on[:, None] * beam + origin[going_on]).flatten()
            cache.select(rows)
            memory, src_mask = memory[rows], src_mask[rows]
            sentence, alive, ids = sentence[going_on], alive[going_on], ids[going_on]
            limit, best_score = limit[going_on], best_score[going_on]
    return best


def output_limit(pieces: int, longest: int) -> int:
    """Most tokens of an output for a source of so many pieces; the model's max_len is `longest`."""
    return min(2 * pieces + 10, longest)


def translate_lines(
    model: Transformer, tokenizer: Tokenizer, lines: Sequence[str], beam: int = BEAM, alpha: float = ALPHA,
    batch_size: int = BATCH, report: Callable[[int], None] = lambda done: None,
) -> list[str]:  # fmt: skip
    """Lines -> as many translations, in the same order, free-running; a blank line stays blank, unread.

    Lines of similar length are decoded together, `batch_size` at a time; before each batch `report` is told
    how many lines are done. For the length of an output see `output_limit`. Of a source that is too long
    for the model only the start is read. ValueError as in `beam_search`, and for a batch_size below 1;
    TypeError for a single string, which is no list of lines.
    """
    check_lines(lines)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    longest, output = model.settings["max_len"], [""] * len(lines)
    device = next(model.parameters()).device
    pieces = [tokenizer.encode(line)[: longest - 2] for line in lines]
    order = sorted((i for i in range(len(lines)) if pieces[i]), key=lambda i: len(pieces[i]))
    for start in range(0, len(order), batch_size):
        report(start)
        chosen = order[start : start + batch_size]
        src = collate([(pieces[i], []) for i in chosen])["src"].to(device)
        limit = torch.tensor([output_limit(len(pieces[i]), longest) for i in chosen], device=device)
        for i, found in zip(chosen, beam_search(model, src, beam, alpha, limit), strict=True):
            output[i] = tokenizer.decode(found.ids)
    return output
