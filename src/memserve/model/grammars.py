"""Grammars of answers: which tokens may come next in each slot, computed beside the device's work.

    a token is drawn -> the matching thread takes it in and computes the next mask, while the next step runs its forward
                     -> the mask is there when that step's logits are

A mask takes microseconds where a step takes milliseconds, so a step hardly ever waits; a slot with a mask that is late
by :data:`WAIT_S`, or by :data:`BUILD_S` with a new grammar, fails alone. New grammars are built in a thread of their
own: masks of others do not wait for them.
Masks change logits only; KV and prefix cache know nothing of them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAIT_S = 1.0
BUILD_S = 15.0
"""A large vocabulary takes seconds on a busy machine, once; large grammars take hundreds of milliseconds."""

Mask = NDArray[np.bool_]
"""``[vocab]``: the tokens that may come next."""


class Grammars:
    """The matchers of all slots of one device. Called from its thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """``tokenizer``: a transformers fast tokenizer."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None  # building, matching
        self._vocabulary: Any = None  # of llguidance: a second of work, for the first grammar
        self._masks: dict[int, Future[tuple[Any, Mask]]] = {}
        self._new: set[int] = set()  # slots whose grammar is being built, or has given one mask

    def open(self, slot: int, grammar: str, drawn: list[int]) -> None:
        """Begin with the tokens that the sequence has ``drawn`` before. Raises ``ImportError`` without llguidance."""
        import llguidance  # noqa: F401  # an extra part: said here, not in another thread

        if self._threads is None:
            self._threads = (
                ThreadPoolExecutor(1, thread_name_prefix="memserve-grammars"),
                ThreadPoolExecutor(1, thread_name_prefix="memserve-masks"),
            )
        self._masks[slot] = self._threads[0].submit(self._built, grammar, drawn)
        self._new.add(slot)

    def __contains__(self, slot: int) -> bool:
        return slot in self._masks

    def __bool__(self) -> bool:
        return bool(self._masks)

    def mask(self, slot: int) -> Mask:
        """What may come next. Raises ``ValueError`` where that is nothing, ``TimeoutError`` where it is not known."""
        return self._masks[slot].result(BUILD_S if slot in self._new else WAIT_S)[1]

    def drawn(self, slot: int, token: int) -> None:
        """A token was drawn, and its sequence may go on."""
        before = self._masks[slot]
        if self._threads is not None and before.done() and before.exception() is None:  # else the slot has failed
            self._masks[slot] = self._threads[1].submit(self._next, before.result()[0], token)
            self._new.discard(slot)

    def close(self, slot: int) -> None:
        """The slot is free."""
        self._new.discard(slot)
        if future := self._masks.pop(slot, None):
            future.cancel()

    def close_all(self) -> None:
        """All slots are free."""
        for slot in list(self._masks):
            self.close(slot)

    def _built(self, grammar: str, drawn: list[int]) -> tuple[Any, Mask]:
        from llguidance import LLMatcher, LLTokenizer

        if self._vocabulary is None:
            text = self._tokenizer.backend_tokenizer.to_str()
            self._vocabulary = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        for token in drawn:
            matcher.consume_token(token)
        return matcher, self._mask(matcher)

    def _next(self, matcher: Any, token: int) -> tuple[Any, Mask]:
        matcher.consume_token(token)
        return matcher, self._mask(matcher)

    def _mask(self, matcher: Any) -> Mask:
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        mask: Mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return mask


def _reason(matcher: Any) -> str:
    """The first line of an error; the state of the parser follows it."""
    return str(next(iter(matcher.get_error().splitlines()), ""))[:200]
