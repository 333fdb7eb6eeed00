"""Grammars of answers: which tokens may come next in each slot, computed beside the device's work.

    a request comes  -> a process of its own builds its grammar and the first mask; no step has the request until then
    a token is drawn -> that process takes it in and computes the next mask, while the next step runs its forward
                     -> the mask is there when that step's logits are; else the row's logits are kept, and a later step
                        draws from them

A mask takes microseconds where a step takes milliseconds, so it is hardly ever late. But a grammar may be made to take
any time and memory, so no thread of this process builds one or computes a mask
(:mod:`memserve.model.grammar.processes`), and no step waits for masks longer than :data:`WAIT_S`.
Masks change logits only; KV and prefix cache know nothing of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from memserve.model.grammar.matcher import GrammarProcess, Mask
from memserve.model.grammar.processes import GrammarProcesses, compressed

WAIT_S = 0.005
"""What one step waits for masks, all of its rows together: not for a grammar that was slow before."""

LATE_OF = 16
"""A grammar is slow if more than one mask of so many was late."""

OnBuilt = Callable[[str], None]
"""Called from another thread, with the reason why a grammar cannot be built, or "": it is there."""


class Grammars:
    """The grammars of one device, and the matchers of its slots. The engine's thread has grammars built and forgotten,
    and waits for masks that are late; the device's thread does all else."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...], slots: int = 64) -> None:
        """``tokenizer``: a transformers fast tokenizer."""
        self._tokenizer, self._vocab_size, self._eos, self._count = tokenizer, vocab_size, eos_token_ids, slots
        self._lock = threading.Lock()  # guards the vocabulary
        self._vocabulary: bytes | None = None
        self._processes: GrammarProcesses | None = None
        self._built: dict[int, GrammarProcess] = {}
        self._slots: dict[int, GrammarProcess | None] = {}
        self._unflushed: dict[int, GrammarProcess] = {}  # those with something to be sent, by number
        self._left_s = WAIT_S

    # -- building

    def keep_vocabulary(self) -> bytes:
        """Keep of the tokenizer only what grammars need: its text, compressed. Returns that."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = compressed(self._tokenizer.backend_tokenizer.to_str())
                self._tokenizer = None
            return self._vocabulary

    def build_grammar(self, job_id: int, grammar: str, on_built: OnBuilt) -> None:
        """Slots may be opened with ``job_id`` once ``on_built`` has been called."""
        if self._processes is None:
            words = self.keep_vocabulary, self._vocab_size, self._eos
            self._processes = GrammarProcesses(*words, cells=self._count)
        self._built[job_id] = self._processes.start(grammar, on_built)

    def forget_grammar(self, job_id: int) -> None:
        """No request has it any more: what is built is ended, and what is being built, too."""
        if process := self._built.pop(job_id, None):
            process.end_process()

    def end_processes(self) -> None:
        if self._processes is not None:
            self._processes.close()

    # -- slots

    def open_slot(self, slot: int, job_id: int, tokens: Sequence[int]) -> None:
        """Begin with the ``tokens`` that the sequence has drawn before. A grammar that is not there fails the slot when
        it draws: its request has ended meanwhile."""
        process = self._slots[slot] = self._built.get(job_id)
        if process is not None:
            process.open_cell(slot, tokens)
            process.send_pending()

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __bool__(self) -> bool:
        return bool(self._slots)

    def next_mask(self, slot: int) -> Mask | None:
        """What may come next. None: it is not known yet. Raises ``ValueError`` where nothing may come, or the grammar's
        process has ended."""
        process = self._slots[slot]
        if process is None:
            raise ValueError("it is not built")
        begun_s = time.monotonic()
        is_slow = process.yields or process.masks_late * LATE_OF > process.masks
        mask = process.wait_mask(slot, begun_s if is_slow else begun_s + self._left_s)
        process.masks += 1
        process.masks_late += mask is None
        self._left_s -= time.monotonic() - begun_s
        return mask

    def take_token(self, slot: int, token: int) -> None:
        """A token was drawn, and its sequence may go on. It is sent by :meth:`flush_tokens`."""
        if (process := self._slots[slot]) is not None:
            process.take_tokens(slot, (token,))
            self._unflushed[process.number] = process

    def flush_tokens(self) -> None:
        """All tokens of a step were named: masks for the next one can be computed."""
        processes, self._unflushed, self._left_s = self._unflushed, {}, WAIT_S
        for process in processes.values():
            process.send_pending()

    def await_mask(self, slot: int, on_mask: Callable[[], None]) -> None:
        """``on_mask`` is called, from any thread, once :meth:`next_mask` has something to say about ``slot``."""
        process = self._slots.get(slot)
        if process is None:
            on_mask()
        else:
            process.await_mask(slot, on_mask)

    def close_slot(self, slot: int) -> None:
        if process := self._slots.pop(slot, None):
            process.close_cell(slot)
            process.send_pending()

    def close_all(self) -> None:
        for slot in list(self._slots):
            self.close_slot(slot)
