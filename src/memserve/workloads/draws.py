"""Random numbers: a generator per purpose, all fixed by one seed; and English-looking text."""

from __future__ import annotations

import zlib

import numpy as np

Draws = np.random.Generator

_COMMON = """
the and that with for from this have which their about would there when were been people other more into time some
could these than first water long little after very word called just where most know through back much before good
right think small great help between never last school father keep tree start city earth light thought head under
story left night real life few north open seem together next white children begin walk example paper group always
music both mark often letter until mile river feet care second book carry science room friend idea fish mountain stop
once base hear horse sure watch color face wood main enough plain girl usual young ready above ever list though feel
talk bird soon body family direct leave song measure door product black short number class wind question happen
complete ship area half rock order fire south problem piece told knew pass since whole king space heard best hour
better during hundred five remember step early hold west ground
"""
_WORDS = np.array(_COMMON.split())
_WEIGHTS = 1 / np.arange(1, len(_WORDS) + 1)
_SHARES = _WEIGHTS / _WEIGHTS.sum()
SENTENCE_WORDS_MAX = 22


def draws(seed: int, *purpose: str | int) -> Draws:
    """The generator of ``(seed, purpose)``: drawing more for one purpose leaves the draws of all others unchanged."""
    return np.random.default_rng([seed, *(zlib.crc32(str(part).encode()) for part in purpose)])


def lognormal_count(rng: Draws, *, median: float, spread: float, at_most: int) -> int:
    """A whole number of at least 1: lengths and turns of real traffic are roughly log-normal."""
    return int(min(max(1.0, np.round(rng.lognormal(np.log(median), spread))), at_most))


def prose(rng: Draws, words: int) -> str:
    """``words`` words in sentences, common words more often (Zipf).

    Every word has three letters or more: at least ``words`` tokens with any tokenizer, and at four bytes per token.
    """
    drawn = rng.choice(_WORDS, size=words, p=_SHARES).tolist()
    sentences = []
    while drawn:
        length = int(rng.integers(5, SENTENCE_WORDS_MAX + 1))
        sentences.append(" ".join(drawn[:length]).capitalize() + ".")
        drawn = drawn[length:]
    return " ".join(sentences)
