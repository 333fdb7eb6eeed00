"""Grammars of answers: which tokens may come next in each slot, computed beside the device's work.

    a request comes  -> a building thread makes its matcher and the first mask; no step has the request until then
    a token is drawn -> the matching thread takes it in and computes the next mask, while the next step runs its forward
                     -> the mask is there when that step's logits are

A mask takes microseconds where a step takes milliseconds, so a step hardly ever waits; a slot with a mask that is late
by :data:`WAIT_S` fails alone. Building holds the interpreter's lock for moments only, except once: reading the
vocabulary takes a quarter of a second, which instances spend as soon as they have joined
(:meth:`Grammars.read_vocabulary`).
Masks change logits only; KV and prefix cache know nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAIT_S = 1.0
BUILDERS = 2
"""Threads: a grammar that takes long delays the next ones little."""

Mask = NDArray[np.bool_]
"""``[vocab]``: the tokens that may come next."""

OnBuilt = Callable[[str], None]
"""Called from a building thread, with the reason why a grammar cannot be built, or "": it is there."""


class Grammars:
    """The grammars of one device, and the matchers of its slots. The engine's thread has grammars built and forgotten,
    the device's thread does all else."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """``tokenizer``: a transformers fast tokenizer."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._vocabulary: Future[Any] | None = None  # of llguidance
        self._building = ThreadPoolExecutor(BUILDERS, thread_name_prefix="memserve-grammars")
        self._matching = ThreadPoolExecutor(1, thread_name_prefix="memserve-masks")
        self._built: dict[str, Future[tuple[Any, Mask]]] = {}
        self._masks: dict[int, Future[tuple[Any, Mask]]] = {}

    # -- building

    def read_vocabulary(self) -> Future[Any]:
        """What all grammars need, once. The tokenizer is not kept."""
        if self._vocabulary is None:
            self._vocabulary = self._building.submit(self._read, self._tokenizer)
            self._tokenizer = None
        return self._vocabulary

    def build(self, grammar: str, on_built: OnBuilt) -> None:
        """Slots may be opened with ``grammar`` once ``on_built`` has been called."""
        vocabulary = self.read_vocabulary()
        built = self._built[grammar] = self._building.submit(self._build, vocabulary, grammar)
        built.add_done_callback(lambda built: None if built.cancelled() else on_built(_fault(built)))

    def forget(self, grammar: str) -> None:
        """No slot is opened with it any more."""
        if built := self._built.pop(grammar, None):
            built.cancel()

    def _read(self, tokenizer: Any) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos)

    def _build(self, vocabulary: Future[Any], grammar: str) -> tuple[Any, Mask]:
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary.result(), grammar, log_level=0)
        return matcher, self._mask(matcher)

    # -- slots

    def open(self, slot: int, grammar: str, drawn: list[int]) -> None:
        """Begin with the tokens that the sequence has ``drawn`` before. A grammar that is not there fails the slot when
        it draws: its request has ended meanwhile."""
        built = self._built.get(grammar)
        if built is None or not built.done():
            self._masks[slot] = Future()
            self._masks[slot].set_exception(ValueError("it is not built"))
        else:
            self._masks[slot] = self._matching.submit(self._begun, built, drawn)

    def __contains__(self, slot: int) -> bool:
        return slot in self._masks

    def __bool__(self) -> bool:
        return bool(self._masks)

    def mask(self, slot: int) -> Mask:
        """What may come next. Raises ``ValueError`` where that is nothing, ``TimeoutError`` where it is not known."""
        return self._masks[slot].result(WAIT_S)[1]

    def drawn(self, slot: int, token: int) -> None:
        """A token was drawn, and its sequence may go on."""
        before = self._masks[slot]
        if before.done() and before.exception() is None:  # else the slot has failed
            self._masks[slot] = self._matching.submit(self._next, before.result()[0], [token])

    def close(self, slot: int) -> None:
        """The slot is free."""
        if future := self._masks.pop(slot, None):
            future.cancel()

    def close_all(self) -> None:
        """All slots are free."""
        for slot in list(self._masks):
            self.close(slot)

    def _begun(self, built: Future[tuple[Any, Mask]], drawn: list[int]) -> tuple[Any, Mask]:
        matcher, mask = built.result()
        own = matcher.deep_copy()
        return self._next(own, drawn) if drawn else (own, mask)

    def _next(self, matcher: Any, tokens: list[int]) -> tuple[Any, Mask]:
        for token in tokens:
            matcher.consume_token(token)  # at its end it takes no more: a row that is one too many
        return matcher, self._mask(matcher)

    def _mask(self, matcher: Any) -> Mask:
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        mask: Mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return mask


def _fault(built: Future[tuple[Any, Mask]]) -> str:
    error = built.exception()
    return "" if error is None else str(error) or type(error).__name__


def _reason(matcher: Any) -> str:
    """The first line of an error; the state of the parser follows it."""
    return str(next(iter(matcher.get_error().splitlines()), ""))[:200]
