"""translation/breakdown.py: groups by hand, and that rare and long are told apart where they should be."""

from collections import Counter

import pytest

pytest.importorskip("sacrebleu")

from translation import breakdown
from translation.breakdown import (
    COUNTS,
    group,
    names,
    occurrences,
    rarest,
    table_of_sentences,
    table_of_words,
)
from translation.prepare import load_split

KNOWN = Counter({"a": 500, "dog": 40, "sled": 2})


def test_words_and_occurrences():
    assert breakdown.words("Ein Hund, der NASS-grüne!") == ["ein", "hund", "der", "nass", "grüne"]
    assert occurrences(["A dog.", "a Dog", ""]) == {"a": 2, "dog": 2}


def test_every_number_is_in_the_group_that_its_name_says():
    assert names((0, 1, 3)) == ["0", "1 to 2", "3 and more"]
    assert [group(n, (0, 1, 3)) for n in (0, 1, 2, 3, 4, 10**9)] == [0, 1, 1, 2, 2, 2]
    assert len(names(COUNTS)) == len(COUNTS) == group(10**9, COUNTS) + 1


@pytest.mark.parametrize("line, count", [
    ("A dog", 40), ("a sled, a dog", 2), ("a zebra and a sled", 0), ("...", 500), ("", 500),
])  # fmt: skip
def test_rarest(line, count):
    assert rarest(line, KNOWN) == count
    assert rarest(line, Counter()) == 0


def test_a_reference_word_is_found_where_the_same_sentence_has_it_and_as_often():
    references = ["a dog, a sled", "a dog", "zebra"]
    outputs = ["a Dog by a dog", "sled", "a zebra"]  # sled: in the other sentence; the second dog: not wanted
    table = table_of_words(KNOWN, outputs, references)
    found = {line[2:44].strip(): line[44:].split() for line in table[1:]}
    assert found == {
        "0": ["1", "100.0%"], "1 to 2": ["1", "0.0%"], "30 to 99": ["2", "50.0%"],
        "100 and more": ["3", "66.7%"],
    }  # fmt: skip


def test_sentences_are_scored_in_their_own_group():
    references = ["the cat sat on the mat", "a man rides a red bicycle", "two dogs run in the snow"]
    outputs = [references[0].title(), "zzz qqq", "Two dogs run in the snow today"]
    table = table_of_sentences("words", (0, 8), [1, 9, 20], outputs, references)
    found = {line[2:44].strip(): line[44:].split() for line in table[1:]}
    assert found["0 to 7"] == ["1", "100.00", "1.000"]
    assert found["all"][::2] == ["3", "0.833"] and found["8 and more"][::2] == ["2", "0.750"]
    assert 0 < float(found["8 and more"][1]) < float(found["all"][1]) < 100


def test_the_command_counts_rarity_in_the_training_text(tmp_path, capsys):
    """Sources of the training split are known; those of the test split are not all."""
    for split, unseen in (("train", False), ("test", True)):
        sources, references = load_split(None, split)
        (tmp_path / "outputs.txt").write_text("".join(f"{line}\n" for line in references), "utf-8")
        assert breakdown.main([str(tmp_path / "outputs.txt"), "--sample", "--split", split]) == 0
        by_source, by_word, by_length = capsys.readouterr().out.split("\n\n")
        assert ("\n  0   " in by_source) == unseen
        assert by_word.count("100.0%") == len(by_word.splitlines()) - 1
        assert by_length.split()[-4:] == ["all", str(len(sources)), "100.00", "1.000"]
