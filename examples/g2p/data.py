"""The dictionary as training data: spelling in, phonemes out, one row of tokens per word.

A row is ``letters SEP phonemes EOS`` padded with PAD to ``WIDTH``::

    C A T SEP K AE T EOS PAD PAD ...

Needs numpy only, so a driver can make batches without importing torch.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "EOS",
    "MAX_PHONEMES",
    "PAD",
    "SEP",
    "VOCABULARY",
    "WIDTH",
    "Batch",
    "Words",
    "decode",
    "encode",
    "is_heldout",
    "load",
    "parse",
    "prompt",
    "supervised",
]

Batch = dict[str, npt.NDArray[np.generic]]
"""``tokens`` uint8 ``[words, longest]`` and ``lengths`` int64 ``[words]``, the tokens of each row without padding."""

MIN_LETTERS: Final = 3
MAX_LETTERS: Final = 9
MAX_PHONEMES: Final = 9
WIDTH: Final = MAX_LETTERS + 1 + MAX_PHONEMES + 1

# fmt: off
PHONEMES: Final = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)
"""ARPAbet without stress."""
# fmt: on
PAD: Final = 0
BOS: Final = 1
"""Reserved: never in a row today, kept so that a model that needs a start token keeps this numbering."""
SEP: Final = 2
EOS: Final = 3
_LETTERS: Final = {letter: number for number, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ", start=EOS + 1)}
_SOUNDS: Final = {sound: number for number, sound in enumerate(PHONEMES, start=EOS + 1 + len(_LETTERS))}
_SOUND_OF: Final = {number: sound for sound, number in _SOUNDS.items()}
VOCABULARY: Final = EOS + 1 + len(_LETTERS) + len(_SOUNDS)

HELDOUT_PER_MILLE: Final = 20
_LINE: Final = re.compile(r"([A-Z]{3,9})  ([A-Z0-2 ]+)")
_ANOTHER: Final = re.compile(r"([A-Z]+)\(\d+\)  ")


@dataclass(frozen=True, slots=True)
class Words:
    """Words as rows of tokens.

    Attributes:
        spellings: The words, ``[words]``.
        tokens: ``[words, WIDTH]`` uint8.
        lengths: ``[words]`` int64, tokens of each row without padding.
    """

    spellings: Sequence[str]
    tokens: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.spellings)

    def phonemes(self, row: int) -> list[str]:
        """Return how a word is said."""
        return decode(self.tokens[row].tolist())

    def questions(self, step: int, size: int, seed: int) -> list[dict[str, Any]]:
        """Return the words of training batch ``step`` with their phonemes, by the same rule as ``batch``."""
        return [{"word": self.spellings[row], "phonemes": self.phonemes(row)} for row in self._rows(step, size, seed)]

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Batch:
        """Return the given rows as a batch, cut to its longest word."""
        lengths = self.lengths[rows]
        longest = int(lengths.max(initial=1))
        return {"tokens": np.ascontiguousarray(self.tokens[rows, :longest]), "lengths": lengths}

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Return training batch ``step`` (from 0): a function of its arguments alone, so a resumed run repeats it.

        Each epoch visits the words in an order of its own, without repetition; the last partial batch is left out.
        """
        return self.take(self._rows(step, size, seed))

    def _rows(self, step: int, size: int, seed: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(step, len(self) // size)
        order = np.random.default_rng((seed, epoch)).permutation(len(self))
        return order[place * size : (place + 1) * size]


def supervised(batch: Batch) -> dict[str, Any]:
    """Return a batch as a training engine takes it: ``input_ids``, ``lengths``, and ``loss_mask`` over the answers."""
    tokens = batch["tokens"]
    places = np.arange(tokens.shape[1])
    answer = (places > (tokens == SEP).argmax(1)[:, None]) & (places < batch["lengths"][:, None])
    return {"input_ids": tokens, "lengths": batch["lengths"], "loss_mask": answer}


def is_heldout(word: str) -> bool:
    """Say whether a word is held out: a property of its spelling, so no run and no seed ever trains on it."""
    return zlib.crc32(word.encode()) % 1000 < HELDOUT_PER_MILLE


def encode(word: str, phonemes: Sequence[str]) -> list[int]:
    """Return the tokens of one word, without padding."""
    return [*prompt(word), *(_SOUNDS[sound] for sound in phonemes), EOS]


def prompt(word: str) -> list[int]:
    """Return what a word is asked with: its letters and SEP, the row up to the answer."""
    return [*(_LETTERS[letter] for letter in word), SEP]


def decode(tokens: Sequence[int]) -> list[str]:
    """Return the phonemes among ``tokens`` up to the first EOS."""
    sounds = []
    for token in tokens:
        if token == EOS:
            break
        if token in _SOUND_OF:
            sounds.append(_SOUND_OF[token])
    return sounds


def parse(text: str) -> Mapping[str, list[str]]:
    """Return spelling → phonemes without stress, for words of 3 to 9 letters with one pronunciation of at most 9."""
    several = {match[1] for match in map(_ANOTHER.match, text.splitlines()) if match}
    found = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[1] in several:
            continue
        sounds = match[2].translate(_NO_STRESS).split()
        if len(sounds) <= MAX_PHONEMES:
            found[match[1]] = sounds
    return found


_NO_STRESS: Final = str.maketrans("", "", "012")


def load(path: Path | None = None) -> tuple[Words, Words]:
    """Read the dictionary and return (training words, held-out words), each in the order of a hash of the spelling.

    Args:
        path: The gzipped dictionary; None for the one beside this file.

    Raises:
        OSError: The file cannot be read.
    """
    text = gzip.decompress((path or Path(__file__).with_name("cmudict.txt.gz")).read_bytes()).decode("latin-1")
    entries = parse(text)
    # Alphabetical order would make the first held-out words one family; a hash mixes them the same way everywhere.
    spellings = sorted(entries, key=lambda word: (zlib.crc32(b"order:" + word.encode()), word))
    return (
        _rows([word for word in spellings if not is_heldout(word)], entries),
        _rows([word for word in spellings if is_heldout(word)], entries),
    )


def _rows(spellings: Sequence[str], entries: Mapping[str, list[str]]) -> Words:
    rows = [encode(word, entries[word]) for word in spellings]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    tokens = np.frombuffer(b"".join(bytes(row).ljust(WIDTH, bytes([PAD])) for row in rows), np.uint8)
    return Words(spellings, tokens.reshape(len(rows), WIDTH), lengths)
