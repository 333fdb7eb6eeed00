"""What the device knows of each slot: tokens, block table, sampling, and why it draws no token.

Everything is a preallocated array with one row per slot, so that a step reads the rows it needs with one indexing
operation each, however many sequences run. Untouched rows cost no memory: the kernel maps their pages at first use.

Rows fail alone: what one request asks for must not fail the step of others. Work for a single slot runs under
:func:`stage` or :func:`each`: opening it, changing its logits, drawing, reporting. Errors of the device itself, and
invariants that a plan breaks, are not caught: they fail the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import InvariantError, check
from memserve.base.types import NO_REGIMES, VOCAB_MAX, PositionRegimes, SamplingParams, StopParams
from memserve.base.units import ceil_div
from memserve.instance.events import NO_TOKEN_LEFT, Before, LateDraw, OpenSequence, RowFailed, StepPlan
from memserve.model.attention.layered import PlacedRange
from memserve.model.grammar.masks import Grammars
from memserve.model.rotary import LENGTH_SHIFT


class TokenLists:
    """The tokens that a request names in its parameters, as tensors: made once for a request, not in each of its rows.
    It may name every token of the vocabulary, and have many sequences.

    Equal tensors for all devices; those of other devices than the CPU are copied when first used."""

    def __init__(self, sampling: SamplingParams, stop: StopParams) -> None:
        self.sampling, self.stop = sampling, stop
        biased, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        cpu = torch.device("cpu")
        self._biased = {cpu: (torch.tensor(biased, dtype=torch.int64), torch.tensor(biases, dtype=torch.float32))}
        self._stops = {cpu: torch.tensor(stop.stop_token_ids, dtype=torch.int64)}
        self._allowed = {cpu: torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)}
        self._logprob_ids = sampling.logprob_token_ids
        changed_parts = [self._biased[cpu][0], *([self._stops[cpu]] if stop.min_tokens else [])]
        self.changed: NDArray[np.int64] = torch.cat(changed_parts).numpy()
        """Tokens whose logits a bias or ``min_tokens`` may change, ``[n]``."""
        self._excluded: NDArray[np.bool_] | None = None
        self._largest: int | None = None  # of all tokens; a negative one counts as none

    def all_below(self, vocab_size: int) -> bool:
        """Whether all tokens are in a vocabulary."""
        if self._largest is None:
            cpu = torch.device("cpu")
            logprob_ids = np.array(self._logprob_ids, np.int64)
            ids = [self._biased[cpu][0].numpy(), self._stops[cpu].numpy(), self._allowed[cpu].numpy(), logprob_ids]
            every = np.concatenate(ids)
            self._largest = int(np.where(every < 0, VOCAB_MAX, every).max(initial=0))
        return self._largest < vocab_size

    def bias_tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and what is added to their logits, both ``[n]``: int64 and float32."""
        if device not in self._biased:
            ids, biases = self._biased[torch.device("cpu")]
            self._biased[device] = ids.to(device), biases.to(device)
        return self._biased[device]

    def stop_tensor(self, device: torch.device) -> Tensor:
        """Stop tokens, ``[n]`` int64."""
        return _copy_on(self._stops, device)

    def allowed_tensor(self, device: torch.device) -> Tensor:
        """The only tokens that may be drawn, ``[n]`` int64; empty: all may."""
        return _copy_on(self._allowed, device)

    def excluded_mask(self, vocab_size: int) -> NDArray[np.bool_]:
        """All others, ``[vocab]``."""
        if self._excluded is None:
            self._excluded = np.ones(vocab_size, np.bool_)
            self._excluded[self._allowed[torch.device("cpu")].numpy()] = False
        return self._excluded


def _copy_on(copies: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    if device not in copies:
        copies[device] = copies[torch.device("cpu")].to(device)
    return copies[device]


_NONE = TokenLists(SamplingParams(), StopParams())
_lists_by_request: WeakValueDictionary[tuple[int, int], TokenLists] = WeakValueDictionary()


def token_lists(sampling: SamplingParams, stop: StopParams) -> TokenLists:
    """The lists of a request, made when they are asked for the first time, and kept as long as anything has them."""
    if not (sampling.logit_bias or sampling.allowed_token_ids or sampling.logprob_token_ids or stop.stop_token_ids):
        return _NONE
    key = id(sampling), id(stop)  # both live as long as the lists that name them
    lists = _lists_by_request.get(key)
    if lists is None:
        lists = _lists_by_request[key] = TokenLists(sampling, stop)
    return lists


log = logging.getLogger(__name__)

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_SEED_MASK = (1 << 64) - 1
_HARMLESS = SamplingParams(temperature=0.0)


Failures = dict[int, RowFailed]
"""Slot -> why it draws no token."""

_OF_THE_STEP = (InvariantError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

NOT_NUMBERS = RowFailed("the model gave no finite number for any next token", kv_is_suspect=True)
"""Not a number or infinity among the logits, or every token impossible, before the request's changes."""

NO_ADAPTER = RowFailed("this instance does not have its adapter: start all with the same --lora", kv_is_suspect=True)

NOTHING_LEFT = RowFailed(NO_TOKEN_LEFT)
"""Every token impossible, but only after the request's changes."""


@dataclass(frozen=True, slots=True)
class SlotModel:
    """What slots must know of their model."""

    vocab_size: int = VOCAB_MAX
    adapters: Container[str] = ()
    """Digests of those that there are."""
    regimes: PositionRegimes = NO_REGIMES
    """Of its positions."""


class SlotTable:
    """Slots ``0 .. slots - 1``. Tokens ``[0, lengths[s])`` of row ``s`` of ``tokens`` are known; blocks likewise."""

    def __init__(
        self,
        slots: int,
        max_tokens: int,
        block_tokens: int,
        model: SlotModel | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        model = model or SlotModel()
        self.block_tokens, self.vocab_size = block_tokens, model.vocab_size
        self.tokens: Int32s = np.zeros((slots, max_tokens), np.int32)
        self.lengths: Int64s = np.zeros(slots, np.int64)
        self.prompt_tokens: Int64s = np.zeros(slots, np.int64)
        self.tables: Int32s = np.zeros((slots, ceil_div(max_tokens, block_tokens) + 1), np.int32)
        self.table_lengths: Int64s = np.zeros(slots, np.int64)
        #: tokens before the first of the table: of earlier parts of the sequence
        self.firsts: Int64s = np.zeros(slots, np.int64)
        # sampling
        self.temperature: NDArray[np.float32] = np.zeros(slots, np.float32)
        self.top_k: Int64s = np.zeros(slots, np.int64)
        self.top_p: NDArray[np.float32] = np.ones(slots, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(slots, np.float32)
        self.seed: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.index: Int64s = np.zeros(slots, np.int64)
        self.beam_candidates: Int64s = np.zeros(slots, np.int64)
        #: slots with logits that are changed before drawing: penalties, bias, ``min_tokens``
        self.adjusts: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        #: slots that report logprobs
        self.reports: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.opened: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        #: what may come next, where a grammar says so; None: no slot has one
        self.grammars = grammars
        #: entries of tables that lie by layer, by slot
        self.placed_ranges: dict[int, PlacedRange] = {}
        #: what comes before the table of sequences that are a part, by slot
        self.before: dict[int, Before] = {}
        #: logits ``[vocab]`` of slots whose mask was late, by slot: a later plan draws from them
        self.late: dict[int, torch.Tensor] = {}
        #: open slots that failed: they compute like any other, and draw nothing
        self.failed: Failures = {}
        #: digests of the adapters that rows of the slots are computed with, by slot
        self.adapters: dict[int, str] = {}
        self._known_adapters, self._regimes = model.adapters, model.regimes
        self._sampling: list[SamplingParams] = [SamplingParams()] * slots
        self._lists: list[TokenLists] = [token_lists(SamplingParams(), StopParams())] * slots
        self._stop: list[StopParams] = [StopParams()] * slots

    def open_slot(self, sequence: OpenSequence) -> None:
        """Bind a closed slot to ``sequence``. If its parameters fail, the slot is open, but ``failed``.

        Its tokens are computed in any case, because other sequences may already rely on their KV. An id outside the
        vocabulary counts as token 0: no valid request can have a prefix with it.
        """
        slot = sequence.slot
        check(not self.opened[slot], f"slot {slot} is opened twice")
        self.opened[slot] = True
        before, tokens = sequence.before, sequence.tokens
        self.firsts[slot] = first = 0 if before is None else len(before.tokens)
        if before is not None:
            self.before[slot], tokens = before, np.concatenate((before.tokens, tokens))
        length, prompt_tokens = len(tokens), first + sequence.prompt_tokens
        self.tokens[slot, :length] = tokens
        self.lengths[slot], self.prompt_tokens[slot] = length, prompt_tokens
        self.table_lengths[slot] = 0
        self.append_blocks(slot, sequence.blocks)
        self.index[slot], self.beam_candidates[slot] = sequence.index, sequence.beam_candidates
        if not self._in_vocabulary(tokens):
            row_tokens = self.tokens[slot, :length]
            row_tokens[(row_tokens < 0) | (row_tokens >= self.vocab_size)] = 0
            self.failed[slot] = RowFailed("its tokens are not all in the model's vocabulary")
        if sequence.adapter:
            if sequence.adapter in self._known_adapters:
                self.adapters[slot] = sequence.adapter
            else:
                self.failed[slot] = NO_ADAPTER
        with isolate_row(self.failed, slot, "opening its slot"):
            self._set_sampling(slot, sequence.sampling, sequence.stop)
            if self.grammars is not None and sequence.sampling.grammar:
                self.grammars.open_slot(slot, sequence.grammar_job, tokens[prompt_tokens:].tolist())
        if slot in self.failed:
            self.beam_candidates[slot] = 0
            self._set_sampling(slot, _HARMLESS, StopParams())

    def given_positions(self, owners: Int64s, positions: Int64s) -> Int64s:
        """What the forward is given for ``positions [T]`` of the slots ``owners [T]``: where positions depend on
        lengths, with the length that decides for each token above them (:mod:`memserve.model.rotary`)."""
        if not self._regimes.original_tokens:
            return positions
        lengths: Int64s = self._regimes.deciding_lengths(self.prompt_tokens[owners], positions)
        return positions + (lengths << LENGTH_SHIFT)

    def _set_sampling(self, slot: int, sampling: SamplingParams, stop: StopParams) -> None:
        lists = token_lists(sampling, stop)
        if not lists.all_below(self.vocab_size):
            raise ValueError("a token id outside of the vocabulary")
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.seed[slot] = sampling.seed & _SEED_MASK
        self.reports[slot] = sampling.logprobs is not None
        self.adjusts[slot] = sampling.changes_logits or bool(stop.min_tokens and stop.stop_token_ids)
        self._sampling[slot], self._stop[slot], self._lists[slot] = sampling, stop, lists

    def failures_in(self, plan: StepPlan) -> Failures:
        """Why slots of ``plan`` draw nothing: what has failed of them, or of the row that they draw from."""
        if not self.failed:
            return {}
        draws = [
            (slot, row) for row, slots in zip(plan.slots, plan.sample_slots, strict=True) for slot in (row, *slots)
        ]
        draws += [(draw.slot, draw.slot) for draw in plan.late_draws]
        return {slot: why for slot, row in draws if (why := self.failed.get(slot) or self.failed.get(row))}

    def close_slot(self, slot: int) -> None:
        """Unbind an open slot."""
        check(self.opened[slot], f"slot {slot} is closed although it is not open")
        self.opened[slot] = False
        self.failed.pop(slot, None)
        self.placed_ranges.pop(slot, None)
        self.before.pop(slot, None)
        self.late.pop(slot, None)
        self.adapters.pop(slot, None)
        if self.grammars is not None:
            self.grammars.close_slot(slot)

    def close_all(self) -> None:
        """Forget every slot: after a failed step it is unknown which of its orders were carried out."""
        self.opened[:] = False
        self.failed.clear()
        self.placed_ranges.clear()
        self.before.clear()
        self.late.clear()
        self.adapters.clear()
        if self.grammars is not None:
            self.grammars.close_all()

    def _in_vocabulary(self, ids: NDArray[np.integer]) -> bool:
        return not len(ids) or bool(ids.min() >= 0 and ids.max() < self.vocab_size)

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        """Append ``blocks`` to the slot's table."""
        first = self.table_lengths[slot]
        self.tables[slot, first : first + len(blocks)] = blocks
        self.table_lengths[slot] += len(blocks)

    def replace_block(self, slot: int, position: int, block: int) -> None:
        """Point entry ``position`` of the slot's table to ``block``, a private copy to write to from now on."""
        check(position < self.table_lengths[slot], f"slot {slot} has no table entry {position}")
        self.tables[slot, position] = block

    def place_by_layer(self, slot: int, placed_range: PlacedRange) -> None:
        """Entries of the slot's table lie by layer from now on."""
        end = placed_range.first + placed_range.count
        check(bool(self.opened[slot]), f"slot {slot} is placed by layer although it is not open")
        check(end <= self.table_lengths[slot], f"slot {slot} has no table entry {end - 1}")
        self.placed_ranges[slot] = placed_range

    def append_tokens(self, slots: Int64s, tokens: Int64s) -> None:
        """Append one token to each of ``slots``, shape ``[n]``."""
        lengths = self.lengths[slots]
        self.tokens[slots, lengths] = tokens
        self.lengths[slots] = lengths + 1
        if self.grammars:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                if slot in self.grammars and slot not in self.late:
                    self.grammars.take_token(slot, token)
            self.grammars.flush_tokens()

    def drop_late_tokens(self, draws: list[LateDraw]) -> None:
        """Forget tokens behind those that are known: they stand where a draw was late."""
        for draw in draws:
            check(bool(self.opened[draw.slot]), f"slot {draw.slot} draws late although it is not open")
            self.lengths[draw.slot] = int(self.firsts[draw.slot]) + draw.known_tokens

    def sampling_of(self, slot: int) -> SamplingParams:
        """How tokens of ``slot`` are drawn."""
        return self._sampling[slot]

    def lists_of(self, slot: int) -> TokenLists:
        """The tokens that the parameters of ``slot`` name."""
        return self._lists[slot]

    def stop_of(self, slot: int) -> StopParams:
        """When the sequence in ``slot`` ends."""
        return self._stop[slot]

    def append_accepted(self, slots: Int64s, accepted: list[list[int]]) -> list[tuple[Int64s, Int64s]]:
        """Append the tokens ``kept[i]`` to ``slots[i]``, and return them as calls of :meth:`append_tokens`, in
        order."""
        calls = []
        for offset in range(max(map(len, accepted), default=0)):
            indexes = [place for place, tokens in enumerate(accepted) if len(tokens) > offset]
            calls.append((slots[indexes], np.array([accepted[place][offset] for place in indexes], np.int64)))
            self.append_tokens(*calls[-1])
        return calls

    def put_drafts(self, slot: int, tokens: list[int]) -> None:
        """Put ``tokens`` behind those that are known, for one step's row."""
        length = int(self.lengths[slot])
        check(self._in_vocabulary(np.array(tokens)), f"slot {slot} has drafts outside the vocabulary")
        self.tokens[slot, length : length + len(tokens)] = tokens

    def check_rows(self, slots: Int64s, starts: Int64s, counts: Int64s, drafted: Int64s | int = 0) -> None:
        """Raise :class:`InvariantError` unless every row's tokens are known, but for those ``drafted [rows]``, and have
        blocks to lie in."""
        ends = starts + counts
        good = self.opened[slots] & (counts > 0) & (ends - drafted <= self.lengths[slots])
        good &= ends - self.firsts[slots] <= self.table_lengths[slots] * self.block_tokens
        if not good.all():
            row = int(np.argmin(good))
            slot = int(slots[row])
            check(
                False,
                f"row {row} computes [{starts[row]}, {ends[row]}) of slot {slot} (open: {bool(self.opened[slot])}), "
                f"which knows {self.lengths[slot]} tokens and has {self.table_lengths[slot]} blocks",
            )


# -- rows that fail alone


@contextmanager
def isolate_row(failures: Failures, slot: int, action: str) -> Iterator[None]:
    """An error inside fails ``slot`` alone."""
    try:
        yield
    except _OF_THE_STEP:
        raise
    except Exception as error:
        log.warning("%s of one row failed: %s: %s", action, type(error).__name__, str(error)[:200])
        failures.setdefault(slot, RowFailed(f"{action} failed ({type(error).__name__})"))


def isolate_rows(
    failures: Failures, action: str, slots: NDArray[np.int64], work: Callable[[NDArray[np.int64]], None],
    places: NDArray[np.int64],
) -> None:  # fmt: skip
    """``work(places)`` for all at once; when that fails, for each alone, so that only the rows at fault fail.

    ``slots[place]`` is the slot at fault. ``work`` must be repeatable.
    """
    try:
        work(places)
    except _OF_THE_STEP:
        raise
    except Exception:
        for index in range(len(places)):
            with isolate_row(failures, int(slots[places[index]]), action):
                work(places[index : index + 1])
