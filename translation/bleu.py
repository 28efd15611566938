"""BLEU and chrF of plain text, counted by sacreBLEU. Each score comes with a signature that says how.

Source: Papineni et al. 2002 (BLEU); Post 2018 (sacreBLEU); Popović 2015 (chrF).
"""

from collections.abc import Sequence

from translation.data import check_lines


def need_sacrebleu() -> None:
    """ValueError, before any work is done, where it is missing."""
    try:
        import sacrebleu.metrics  # noqa: F401
    except ImportError:
        raise ValueError(
            "sacrebleu is not installed: pip install -r translation/requirements.txt "
            "(training also does without: --bleu-every 0)"
        ) from None


def _score(metric, hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    for lines in (hypotheses, references):
        check_lines(lines)
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses, {len(references)} references: must be equally many")
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return float(score), str(metric.get_signature())


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False
) -> tuple[float, str]:
    """One reference per hypothesis -> BLEU from 0 to 100, signature. Cased unless `lowercase`.

    ValueError without sacrebleu, or where there is not one hypothesis per reference; TypeError for a string.
    """
    need_sacrebleu()
    from sacrebleu.metrics import BLEU

    return _score(BLEU(lowercase=lowercase), hypotheses, references)


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, tuple[float, str]]:
    """One reference per hypothesis -> {metric: (score from 0 to 100, signature)}: BLEU twice, and chrF.

    ValueError as `corpus_bleu`.
    """
    found = {
        "BLEU": corpus_bleu(hypotheses, references),
        "BLEU -lc": corpus_bleu(hypotheses, references, lowercase=True),
    }
    from sacrebleu.metrics import CHRF

    return found | {"chrF": _score(CHRF(), hypotheses, references)}
