"""The end of training: the model translates by itself, and learns from the BLEU it gets.

Until then it was asked for the reference's next token, given the reference's own start. In use it goes on
from its own words, and is judged by BLEU. So, for each source, it draws SAMPLES translations. Those with a
BLEU above the mean of the others become likelier, those below it less likely: REINFORCE, where the mean of
the others is the baseline, which makes the gradient less noisy without changing its mean.

Source: Ranzato et al. 2016, Shen et al. 2016 (the idea); Edunov et al. 2018 (together with the token loss);
Kool et al. 2019 (the baseline).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model import PAD_ID, KVCache, Transformer
from train import BOS_ID, EOS_ID, evaluating
from translation.data import Tokenizer

SAMPLES = 4  # translations drawn for each source
TEMPERATURE = 0.5  # label smoothing gives every token a share: drawn at 1, a tenth of them would be nonsense
WEIGHT = 30.0  # of `advantage_loss` beside the token loss: its numbers are small
ROOM = 10  # tokens that a drawn translation may have beyond the batch's longest reference


def sample(model: Transformer, src: Tensor, count: int, max_len: int, temperature: float = 1.0) -> Tensor:
    """src [B, Ls] -> ids [B * count, T], T <= max_len: `count` translations of each source, free-running.

    Without <bos>, PAD after <eos>. Each token is drawn from the softmax of logits / temperature; PAD and
    <bos> never are. ValueError for a count or max_len below 1 or a temperature that is not above 0.
    """
    if not (count >= 1 and max_len >= 1 and temperature > 0):
        raise ValueError(
            f"count={count}, max_len={max_len}, temperature={temperature}: must be at least 1, 1 and above 0"
        )
    with evaluating(model):
        memory, src_mask = (x.repeat_interleave(count, dim=0) for x in model.encode(src))
        cache = KVCache(model.settings["num_layers"])
        going_on = torch.arange(len(memory), device=src.device)  # the rows without <eos> so far
        new = src.new_full((len(memory), 1), BOS_ID)
        ids = src.new_full((len(memory), max_len), PAD_ID)
        for step in range(max_len):
            logits, _ = model.decode(new, memory, src_mask, cache)
            logits = logits[:, -1].float() / temperature
            logits[:, : BOS_ID + 1] = -torch.inf
            new = logits.softmax(-1).multinomial(1)
            ids[going_on, step] = new[:, 0]
            rows = (new[:, 0] != EOS_ID).nonzero().flatten()
            if not len(rows):
                break
            cache.select(rows)
            memory, src_mask, going_on, new = memory[rows], src_mask[rows], going_on[rows], new[rows]
    return ids[:, : step + 1].clone()  # an ordinary tensor: what inference mode made cannot be trained on


def advantages(rewards: Tensor) -> Tensor:
    """rewards [B, n], n >= 2 -> [B, n]: each less the mean of the others in its row."""
    n = rewards.size(1)
    return (rewards - rewards.mean(1, keepdim=True)) * n / (n - 1)


def sentence_bleu(tokenizer: Tokenizer) -> Callable[[list[int], list[int]], float]:
    """-> function of an output's ids and its reference's: BLEU of the two texts, from 0 to 1.

    sacreBLEU's for single sentences: orders of n-gram longer than the sentence do not count.
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)
    return lambda ids, gold: (
        metric.sentence_score(tokenizer.decode(ids), [tokenizer.decode(gold)]).score / 100
    )


def add_samples(
    batch: dict[str, Tensor], model: Transformer, reward: Callable[[list[int], list[int]], float]
) -> dict[str, Tensor]:
    """A batch of `collate` -> the same with drawn translations as further rows below the references.

    advantage [n], of the n added rows: the `reward` of each, a function of its ids and the reference's, less
    the mean reward of the others of its source. Where that is 0 there is nothing to learn: no row is added.
    """
    src, gold = batch["src"], batch["labels"]
    ids = sample(model, src, SAMPLES, min(gold.size(1) + ROOM, model.settings["max_len"]), TEMPERATURE)
    drawn = [(row // SAMPLES, tuple(output)) for row, output in enumerate(ids.tolist())]
    references = gold.tolist()
    known = {pair: reward(list(pair[1]), references[pair[0]]) for pair in set(drawn)}  # many come twice
    rewards = torch.tensor([known[pair] for pair in drawn], device=src.device).view(-1, SAMPLES)
    advantage = advantages(rewards).flatten()
    rows = advantage.nonzero().flatten()
    ids, advantage = ids[rows], advantage[rows]

    before = torch.cat([ids.new_full((len(ids), 1), BOS_ID), ids[:, :-1]], dim=1)
    before = before.masked_fill(before == EOS_ID, PAD_ID)  # <eos> is predicted, never read
    length = max(ids.size(1), gold.size(1))

    def below(above: Tensor, rows: Tensor) -> Tensor:
        return torch.cat([F.pad(x, (0, length - x.size(1)), value=PAD_ID) for x in (above, rows)])

    return dict(
        src=torch.cat([src, src[rows // SAMPLES]]),
        tgt_in=below(batch["tgt_in"], before),
        labels=below(gold, ids),
        advantage=advantage,
    )


def advantage_loss(logits: Tensor, labels: Tensor, advantage: Tensor) -> Tensor:
    """logits [n, Lt, V], labels [n, Lt], advantage [n] -> sum over rows of advantage times -log p(row), fp32,
    divided by SAMPLES: on average as many tokens as the references have."""
    total = logits.new_zeros((), dtype=torch.float32)
    for piece, gold, gain in zip(logits.split(32), labels.split(32), advantage.split(32), strict=True):
        nll = F.cross_entropy(piece.mT.float(), gold, ignore_index=PAD_ID, reduction="none")
        total = total + (nll.sum(1) * gain).sum()
    return total / SAMPLES
