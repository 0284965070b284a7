from __future__ import annotations

import numpy as np


def test_a_row_is_letters_separator_phonemes_end_and_padding(data):
    """Encoding puts the spelling, SEP, the phonemes and EOS in one row, and decoding gives the phonemes back."""
    row = data.encode("CAT", ["K", "AE", "T"])

    assert len(row) == 3 + 1 + 3 + 1
    assert row[3] == data.SEP
    assert row[-1] == data.EOS
    assert data.decode(row[4:]) == ["K", "AE", "T"]
    assert data.decode([*row[4:], *row[4:]]) == ["K", "AE", "T"]
    assert max(row) < data.VOCABULARY


def test_words_with_several_pronunciations_or_odd_letters_are_left_out(data):
    """Only words of 3 to 9 letters with a single pronunciation of at most 9 phonemes are used, stress removed."""
    text = """\
CAT  K AE1 T
TOMATO  T AH0 M EY1 T OW2
TOMATO(1)  T AH0 M AA1 T OW2
IT'S  IH1 T S
OX  AA1 K S
ABCDEFGHIJ  AH0
LONGISH  L L L L L L L L L L
"""

    assert data.parse(text) == {"CAT": ["K", "AE", "T"]}


def test_the_split_is_by_word_and_covers_the_dictionary(data, words):
    """No word is both trained on and held out; the split is a property of the spelling alone."""
    training, heldout = words

    assert len(training) + len(heldout) == 90_938
    assert len(heldout) == 1_813
    assert not set(training.spellings) & set(heldout.spellings)
    assert all(map(data.is_heldout, heldout.spellings))
    assert not any(map(data.is_heldout, training.spellings))


def test_tokens_and_lengths_agree(data, words):
    """Each row holds as many tokens as its length says, ends in EOS, and is padding from there."""
    for part in words:
        places = np.arange(part.tokens.shape[1])
        assert part.tokens.shape == (len(part), data.WIDTH)
        assert ((part.tokens != data.PAD) == (places < part.lengths[:, None])).all()
        assert (part.tokens[np.arange(len(part)), part.lengths - 1] == data.EOS).all()


def test_a_batch_depends_only_on_step_size_and_seed(words):
    """A resumed run draws the same batches as the run it continues."""
    training, _ = words
    one, again, other = training.batch(7, 128, 0), training.batch(7, 128, 0), training.batch(7, 128, 1)

    assert (one["tokens"] == again["tokens"]).all()
    assert one["tokens"].shape[1] == one["lengths"].max()
    assert one["tokens"].shape != other["tokens"].shape or (one["tokens"] != other["tokens"]).any()


def test_an_epoch_visits_each_word_at_most_once_and_epochs_differ(data):
    """Batches of one epoch share no word; the next epoch has another order."""
    spellings = [f"W{chr(65 + i // 26)}{chr(65 + i % 26)}" for i in range(100)]
    small = data._rows(spellings, {word: ["W"] for word in spellings})

    def spelled(step: int) -> list[bytes]:
        return [row[:3].tobytes() for row in small.batch(step, 30, 0)["tokens"]]

    first = [word for step in range(3) for word in spelled(step)]
    second = [word for step in range(3, 6) for word in spelled(step)]
    assert len(first) == len(set(first)) == 90
    assert first != second


def test_an_empty_selection_is_an_empty_batch(words):
    """A rank without items gets arrays of no rows."""
    batch = words[0].take(slice(0, 0))

    assert batch["tokens"].shape[0] == 0
    assert batch["lengths"].shape == (0,)
