"""Token ids of text and of blocks (level 1): what a workload weighs, and the very tokens a length-only trace sends.

A :class:`Meter` turns text into tokens. :class:`TokenizerMeter` holds the served model's tokenizer; :class:`ByteMeter`
needs none and estimates: four bytes a token, close to English text under today's vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve.errors import check
from memserve.types import TokenArray
from memserve.workloads.words import Blocks, Span

BYTES_PER_TOKEN = 4
CUT_CHARACTERS = 8
"""Characters of a text that are looked at first for each token wanted of it."""
POSITIVE = np.int32(0x7FFFFFFF)
SPECIAL_SHARE = 100
"""One id in so many, the lowest, is never synthesised: tokenizers keep their special tokens there."""


class Meter(Protocol):
    """Weighs and cuts text."""

    def encode(self, text: str) -> TokenArray:
        """Token ids, int32 ``[n]``; equal text gives equal ids."""
        ...

    def cut(self, text: str, tokens: int) -> str:
        """The head of ``text``, at most ``tokens`` tokens of it."""
        ...


class ByteMeter:
    """Four UTF-8 bytes a token; the id is the bytes themselves (less the sign), so equal prefixes have equal ids."""

    def encode(self, text: str) -> TokenArray:
        """Token ids, int32 ``[ceil(bytes / 4)]``."""
        raw = text.encode("utf-8", "surrogatepass")
        words = np.frombuffer(raw + b"\0" * (-len(raw) % BYTES_PER_TOKEN), dtype="<i4")
        return words & POSITIVE

    def cut(self, text: str, tokens: int) -> str:
        """The head of ``text``, never through a character."""
        raw = text.encode("utf-8", "surrogatepass")[: tokens * BYTES_PER_TOKEN]
        return raw.decode("utf-8", "ignore")


class TokenizerMeter:
    """The served model's own tokenizer, given as its two functions (no special tokens added)."""

    def __init__(self, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._decode = encode, decode

    def encode(self, text: str) -> TokenArray:
        """Token ids, int32 ``[n]``."""
        return np.asarray(self._encode(text), dtype=np.int32)

    def cut(self, text: str, tokens: int) -> str:
        """The text of the first ``tokens`` tokens; a character cut in two is dropped."""
        if tokens < 1:
            return ""
        ids, seen = self._encode(text[: CUT_CHARACTERS * tokens]), CUT_CHARACTERS * tokens
        while len(ids) <= tokens and seen < len(text):  # long tokens: look further; documents need not be read whole
            seen *= 2
            ids = self._encode(text[:seen])
        return text if len(ids) <= tokens else self._decode(list(ids)[:tokens]).rstrip("�")


def tokens_of(blocks: Blocks, *, vocab_size: int, seed: int = 0) -> TokenArray:
    """Token ids of a length-only prompt, int32 ``[blocks.tokens]``, in ``[vocab_size / 100, vocab_size)``.

    Token ``j`` of block ``b`` depends on ``(seed, b, j)`` alone: equal blocks have equal tokens, and blocks that differ
    share a first token by chance only (once in about ``vocab_size``), so the prefixes are those of the trace.
    """
    lowest = vocab_size // SPECIAL_SHARE
    check(vocab_size - lowest >= 2, "a vocabulary of two tokens at least")
    parts = [_span_tokens(span, blocks.block_tokens, seed) for span in blocks.spans]
    drawn = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
    return (drawn % np.uint64(vocab_size - lowest) + np.uint64(lowest)).astype(np.int32)


def _span_tokens(span: Span, block_tokens: int, seed: int) -> NDArray[np.uint64]:
    place = np.arange(span.tokens, dtype=np.uint64)
    block = np.uint64(span.first) + place // np.uint64(block_tokens)
    return _mix(_mix(block + _mix(np.full(1, seed, np.uint64))) + place % np.uint64(block_tokens))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014): a bijection that scatters neighbours."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
