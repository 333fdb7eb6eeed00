"""From a step's logits to tokens, logprobs and beam candidates, after the changes that requests make to the logits.

Drawing tokens from logits: temperature, top-k, top-p, min-p, by one uniform number per row.

Inverse transform sampling over the tokens in order of their id: the number decides, and the result moves only if
rounding moves a boundary across it. The number comes from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) and needs no state: it depends on the sequence's seed, its index and the token's position,
never on other rows of the batch, and never on whether the sequence was preempted or moved. So from equal logits a
sequence draws equal tokens, alone and in any batch.

The rule is implemented twice: :func:`draw` in torch, for any device, and :func:`draw_native` in C++, much faster on a
CPU. Both sum in float64 over float32 weights; they give the same token unless the uniform number, or the
mass at which top-p ends, lies within float32 rounding (1e-6 of the mass) of a boundary between two tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from memserve import _kernels
from memserve.base.types import SamplingParams, StopParams, TokenLogprobs
from memserve.instance.events import GRAMMAR_FAILED, RowFailed
from memserve.model.grammar.matcher import Mask
from memserve.model.slots import (
    NOT_NUMBERS,
    NOTHING_LEFT,
    Failures,
    Int64s,
    SlotTable,
    TokenLists,
    isolate_row,
    isolate_rows,
)

_HEAD_TOKENS = 256
"""Top-k and top-p usually keep fewer; rows that keep more are sorted whole."""
_CHUNK_TOKENS = 256
_DRAWN_ROWS = 4
"""Rows drawn at a time on a CPU, so that their weights stay in its cache."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How each row is drawn. All tensors ``[n]`` on the logits' device."""

    temperature: Tensor  # float32, > 0
    top_k: Tensor  # int64, 0 = off
    top_p: Tensor  # float32, 1 = off
    min_p: Tensor  # float32, 0 = off
    uniform: Tensor  # float64 in [0, 1)

    def select_rows(self, rows: Tensor | slice) -> Truncation:
        """The part of these ``rows``."""
        return Truncation(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits: Tensor, how: Truncation) -> Tensor:
    """One token per row: ``logits [n, vocab]`` float32 -> ``[n]`` int64.

    Order of the filters: temperature, top-k, top-p over what top-k kept, min-p relative to the best token.
    """
    if logits.device.type == "cpu" and len(logits) > _DRAWN_ROWS:
        pieces = [slice(first, first + _DRAWN_ROWS) for first in range(0, len(logits), _DRAWN_ROWS)]
        return torch.cat([draw(logits[piece], how.select_rows(piece)) for piece in pieces])
    weights = logits - logits.amax(-1, keepdim=True)  # before the temperature: no overflow however small that is
    weights = weights.div_(how.temperature[:, None]).exp_()
    ranked = (how.top_k > 0) | (how.top_p < 1)
    if bool(ranked.all()):
        return _draw_ranked(weights, how)
    tokens = _draw_plain(weights, how)
    if bool(ranked.any()):
        rows = ranked.nonzero()[:, 0]
        tokens[rows] = _draw_ranked(weights[rows], how.select_rows(rows))
    return tokens


def draw_without_sync(logits: Tensor, how: Truncation, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """As :func:`draw`, decided by the host's own ``top_k [n]`` and ``top_p [n]`` (those of ``how``): it never waits for
    the device, which may compute more for it."""
    weights = logits - logits.amax(-1, keepdim=True)
    weights = weights.div_(how.temperature[:, None]).exp_()
    ranked = (top_k > 0) | (top_p < 1)
    plain_weights = weights.masked_fill(weights < how.min_p[:, None], 0.0)
    plain = _invert(plain_weights, how.uniform)
    if not ranked.any():
        return plain
    few = (top_k > 0) & (top_k <= _HEAD_TOKENS)
    width = min(_HEAD_TOKENS if few[ranked].all() else weights.shape[-1], weights.shape[-1])
    head_tokens, _ = _draw_head(weights, how, width)
    return torch.where((how.top_k > 0) | (how.top_p < 1), head_tokens, plain)


def draw_native(logits: Tensor, rows: Tensor, how: Truncation) -> NDArray[np.int64]:
    """One token for each of ``rows [n]`` int64 of ``logits [r, vocab]`` (float32, CPU), drawn as ``how`` says.

    A row without a possible token gives token 0. Among equal weights the filters keep the lower id.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    columns = (rows, how.temperature, how.top_k, how.top_p, how.min_p, how.uniform)
    row, temperature, top_k, top_p, min_p, uniform = (column.contiguous() for column in columns)
    tokens = np.empty(len(rows), np.int64)
    _kernels.draw(
        logits.data_ptr(), logits.stride(0), logits.shape[1], row.data_ptr(), temperature.data_ptr(), top_k.data_ptr(),
        top_p.data_ptr(), min_p.data_ptr(), uniform.data_ptr(), tokens.ctypes.data, len(tokens),
    )  # fmt: skip
    return tokens


def _draw_plain(weights: Tensor, how: Truncation) -> Tensor:
    if bool((how.min_p > 0).any()):
        weights = weights.masked_fill(weights < how.min_p[:, None], 0.0)
    return _invert(weights, how.uniform)


def _draw_ranked(weights: Tensor, how: Truncation) -> Tensor:
    tokens, is_complete = _draw_head(weights, how, min(_HEAD_TOKENS, weights.shape[-1]))
    if not bool(is_complete.all()):
        rows = (~is_complete).nonzero()[:, 0]
        tokens[rows], _ = _draw_head(weights[rows], how.select_rows(rows), weights.shape[-1])
    return tokens


def _draw_head(weights: Tensor, how: Truncation, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` best tokens; also says, for each row, whether those are all that the filters keep."""
    vocab = weights.shape[-1]
    values, ids = weights.topk(width, dim=-1)
    limit = torch.where(how.top_k > 0, how.top_k.clamp(max=vocab), vocab)
    before = values.double().cumsum(-1)
    limit_mass = before.gather(1, (limit.clamp(max=width) - 1)[:, None])[:, 0]
    mass = torch.where(limit <= width, limit_mass, weights.sum(-1, dtype=torch.float64))
    before -= values
    keep = (torch.arange(width, device=weights.device) < limit[:, None]) & (values >= how.min_p[:, None])
    keep &= (before < (how.top_p * mass)[:, None]) | (how.top_p >= 1)[:, None]
    keep[:, 0] = True
    is_complete = (limit <= width) | ((limit == vocab) & ~keep[:, -1])
    ordered, order = torch.where(keep, ids, vocab).sort(dim=-1)  # back to the order of ids
    kept_weights = torch.where(keep, values, 0.0).gather(1, order)
    return ordered.gather(1, _invert(kept_weights, how.uniform)[:, None])[:, 0], is_complete


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index where the cumulated weight exceeds ``uniform`` of the total, by chunk first, then inside it."""
    count, width = weights.shape
    if width <= _CHUNK_TOKENS:
        cumulated = weights.cumsum(-1, dtype=torch.float64)
        return _first_beyond(cumulated, uniform * cumulated[:, -1])
    chunks = F.pad(weights, (0, -width % _CHUNK_TOKENS)).view(count, -1, _CHUNK_TOKENS)
    sums = chunks.sum(-1).double()
    ends = sums.cumsum(-1)
    target = uniform * ends[:, -1]
    chunk = _first_beyond(ends, target)
    rest = target - (ends - sums).gather(1, chunk[:, None])[:, 0]
    inside = chunks[torch.arange(count, device=weights.device), chunk]
    return chunk * _CHUNK_TOKENS + _first_beyond(inside.cumsum(-1, dtype=torch.float64), rest)


def _first_beyond(cumulated: Tensor, target: Tensor) -> Tensor:
    """The first index with ``cumulated [n, w] > target [n]``. ``target`` is kept below the total, so that no index
    without weight is found."""
    below = torch.nextafter(cumulated[:, -1], torch.zeros_like(target))
    return torch.searchsorted(cumulated, torch.minimum(target, below)[:, None], right=True)[:, 0]


# -- uniform numbers

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

UInt64s = NDArray[np.uint64]


def philox4x32(counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[UInt64s, UInt64s]) -> tuple[UInt64s, ...]:
    """Four 32-bit words for each row. All arrays ``[n]`` uint64 holding 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniforms(seed: UInt64s, index: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in ``[0, 1)`` (53 random bits) per row, for the key ``(seed, index)`` and the counter ``position``."""
    position_bits, index_bits = position.astype(np.uint64), index.astype(np.uint64)
    counter = (position_bits & _LOW, position_bits >> _HALF, index_bits & _LOW, index_bits >> _HALF)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _HALF))
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


_SLICE_ROWS = 64
"""Rows with a log-softmax at a time: a long prompt times a vocabulary is hundreds of megabytes."""


@dataclass(slots=True)
class Sampled:
    """One token per draw, and the requested logprobs and candidates by position in ``tokens``."""

    tokens: Int64s
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    failed: Failures = field(default_factory=dict)
    """Slots that draw nothing; their place in ``tokens`` still holds a token."""
    late: frozenset[int] = frozenset()
    """Likewise, because their masks are not there: their logits are kept (``SlotTable.late``)."""


def sample(logits: Tensor, rows: Int64s, slots: Int64s, table: SlotTable, ahead: Int64s | int = 0) -> Sampled:
    """Draw a token for each of ``slots [n]`` from row ``rows[i]`` of ``logits [r, vocab]`` float32: its next one, or
    the one ``ahead [n]`` tokens behind that.

    ``logits`` may be changed. Greedy rows take the best token, the lowest id among equals. A beam row reports its best
    candidates, and its best token stands in ``tokens``. What fails for one slot fails for that slot alone.
    """
    plain = not (table.adjusts[slots] | table.reports[slots] | (table.beam_candidates[slots] > 0)).any()
    greedy: NDArray[np.bool_] = table.temperature[slots] == 0
    if plain and greedy.all():
        best, sound = _best(logits)
        sampled = Sampled(best[rows])
        return sampled if sound.all() else _with_failed(sampled, slots, ~sound[rows], NOT_NUMBERS)
    if len(rows) != len(logits) or (rows != np.arange(len(rows))).any():
        logits = logits[torch.from_numpy(rows).to(logits.device)]
    failed: Failures = {}
    adjusted = np.flatnonzero(table.adjusts[slots]).tolist()
    masks = _masks(logits, adjusted, slots, table, failed)
    late = frozenset([int(slots[position]) for position, mask in masks.items() if mask is None])
    changed = {
        position: _adjust(logits[position], int(slots[position]), table, masks.get(position), failed)
        for position in adjusted
        if int(slots[position]) not in late
    }
    best, sound = _best(logits)
    sampled = Sampled(best, failed=failed, late=late)
    if failed or late or not sound.all():
        for position in np.flatnonzero(~sound).tolist():
            if int(slots[position]) not in late:
                _blame(logits, position, int(slots[position]), changed.get(position), failed)
        sound = np.array([slot not in failed and slot not in late for slot in slots.tolist()], np.bool_)
    random = ~greedy & (table.beam_candidates[slots] == 0) & sound
    if random.any():

        def draw_some(positions: Int64s) -> None:
            further = ahead if isinstance(ahead, int) else ahead[positions]
            sampled.tokens[positions] = _draw(logits, positions, slots[positions], table, further)

        isolate_rows(sampled.failed, "drawing its next token", slots, draw_some, np.flatnonzero(random))
    if not plain:
        reporting_rows = np.flatnonzero((table.reports[slots] | (table.beam_candidates[slots] > 0)) & sound)
        isolate_rows(
            sampled.failed,
            "reporting its logprobs",
            slots,
            lambda positions: _report(logits, positions, slots, table, sampled),
            reporting_rows,
        )
    return sampled


def sample_drafts(
    logits: Tensor, slots: Int64s, drafts: list[list[int]], table: SlotTable
) -> tuple[list[list[int]], Failures]:
    """Draw behind each token of rows with drafts, as if one by one: ``logits [n, vocab]`` float32 are those of all
    positions of all rows; ``slots[i]`` has the row with ``drafts[i]`` behind its first token. Returns for each row what
    it draws, up to the first draw that is not the next draft."""
    widths = np.array([1 + len(tokens) for tokens in drafts])
    begins = np.cumsum(widths) - widths
    ahead = np.arange(len(logits)) - np.repeat(begins, widths)
    sampled = sample(logits, np.arange(len(logits)), np.repeat(slots, widths), table, ahead)
    accepted = []
    for begin, predicted in zip(begins.tolist(), drafts, strict=True):
        tokens = sampled.tokens[begin : begin + len(predicted) + 1].tolist()
        right = next((index for index, token in enumerate(predicted) if tokens[index] != token), len(predicted))
        accepted.append(tokens[: right + 1])
    return accepted, sampled.failed


def _with_failed(sampled: Sampled, slots: Int64s, bad: NDArray[np.bool_], why: RowFailed) -> Sampled:
    for position in np.flatnonzero(bad).tolist():
        sampled.failed.setdefault(int(slots[position]), why)
    return sampled


def _masks(
    logits: Tensor, positions: list[int], slots: Int64s, table: SlotTable, failed: Failures
) -> dict[int, Mask | None]:
    """What may come next in those of ``positions`` whose slots have a grammar. None: it is not known; their logits are
    kept as they are, those of the first time: later ones are behind a token that has no meaning."""
    masks: dict[int, Mask | None] = {}
    if not table.grammars:
        return masks
    for position in positions:
        slot = int(slots[position])
        if slot in table.grammars and slot not in table.failed:
            try:
                masks[position] = None if slot in table.late else table.grammars.next_mask(slot)
            except ValueError as error:
                failed[slot] = RowFailed(f"{GRAMMAR_FAILED}: {error}")
                continue
            if masks[position] is None and table.beam_candidates[slot]:
                failed[slot] = RowFailed(f"{GRAMMAR_FAILED}: a beam does not wait for what may come next")
                del masks[position]
            elif masks[position] is None and slot not in table.late:
                table.late[slot] = logits[position].clone()
    return masks


def _adjust(
    row: Tensor, slot: int, table: SlotTable, mask: Mask | None, failed: Failures
) -> tuple[Int64s | None, Tensor] | None:
    """Change ``row [vocab]`` as the request asks. Returns the tokens with changed logits (None: all), and their old
    logits.

    A logit that is no number stays so, except for stop tokens that ``min_tokens`` excludes.
    """
    with isolate_row(failed, slot, "changing its logits"):
        tokens, prompt_tokens = table.tokens[slot, : table.lengths[slot]], int(table.prompt_tokens[slot])
        sampling, stop, lists = table.sampling_of(slot), table.stop_of(slot), table.lists_of(slot)
        touched = touched_tokens(tokens, prompt_tokens, sampling, lists)
        if touched is None:
            before = row.clone()
        elif row.device.type == "cpu":
            before = torch.from_numpy(row.numpy()[touched])  # a third of torch's time
        else:
            before = row[torch.from_numpy(touched).to(row.device)]
        if stop.min_tokens and not (before < torch.inf).all():
            failed[slot] = NOT_NUMBERS
        else:
            adjust_logits(row, tokens, prompt_tokens, sampling, stop, lists)
            if mask is not None:
                _exclude(row, mask)
        return touched, before
    return None


def _exclude(row: Tensor, mask: Mask) -> None:
    """Make impossible what ``mask [vocab]`` does not admit."""
    if row.device.type == "cpu":
        np.copyto(row.numpy(), -np.inf, where=~mask)  # a tenth of torch's time
    else:
        row[torch.from_numpy(~mask).to(row.device)] = -torch.inf


def _blame(
    logits: Tensor, position: int, slot: int, changed: tuple[Int64s | None, Tensor] | None, failed: Failures
) -> None:
    """Note whether the model or the request is to blame for a row without a next token, judging by the row before it
    was ``changed``."""
    if changed is not None:
        touched, before = changed
        everything = slice(None)
        logits[position, everything if touched is None else torch.from_numpy(touched).to(logits.device)] = before
        if _best(logits[position : position + 1])[1].all():
            failed.setdefault(slot, NOTHING_LEFT)
            return
    failed[slot] = NOT_NUMBERS


def _best(logits: Tensor) -> tuple[Int64s, NDArray[np.bool_]]:
    """The best token of each row, and whether its logit is a number: it is not where any logit is NaN or plus infinity,
    nor where all are minus infinity."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        best: Int64s = rows.argmax(-1)  # eight times as fast as torch's
        return best, np.isfinite(rows[np.arange(len(rows)), best])
    tokens = logits.argmax(-1)
    peaks = logits.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), peaks.isfinite().cpu().numpy()


def _draw(logits: Tensor, row_ids: Int64s, slots: Int64s, table: SlotTable, ahead: Int64s | int) -> Int64s:
    device = logits.device
    positions = table.lengths[slots] - table.prompt_tokens[slots] + ahead
    uniform = uniforms(table.seed[slots], table.index[slots], positions)
    columns = (table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], uniform)
    how = Truncation(*(torch.from_numpy(column).to(device) for column in columns))
    rows = torch.from_numpy(row_ids).to(device)
    tokens: Int64s = draw_native(logits, rows, how) if device.type == "cpu" else draw(logits[rows], how).cpu().numpy()
    return tokens


def _report(logits: Tensor, places: Int64s, slots: Int64s, table: SlotTable, sampled: Sampled) -> None:
    groups = defaultdict(list)  # by number of alternatives, and by named ones: one pass for each
    for position in places[table.reports[slots[places]]].tolist():
        sampling = table.sampling_of(int(slots[position]))
        groups[sampling.logprobs or 0, sampling.logprob_token_ids].append(position)
    for (top, token_ids), positions in groups.items():
        rows = logits if len(positions) == len(logits) else logits[positions]
        tokens = torch.from_numpy(sampled.tokens[positions]).to(logits.device)
        sampled.logprobs.update(zip(positions, report_logprobs(rows, tokens, top, token_ids), strict=True))
    beams = places[table.beam_candidates[slots[places]] > 0]
    if len(beams):
        counts = table.beam_candidates[slots[beams]].tolist()
        scores = logits[torch.from_numpy(beams).to(logits.device)]
        best = best_logprobs(scores, log_normalisers(scores), max(counts))
        for position, row, count in zip(beams.tolist(), best, counts, strict=True):
            sampled.candidates[position] = row[:count]


# -- what a request changes


def adjust_logits(
    row: Tensor,
    tokens: NDArray[np.int32] | Tensor,
    prompt_tokens: int,
    sampling: SamplingParams,
    stop: StopParams,
    lists: TokenLists,
) -> None:
    """Apply penalties, bias and ``min_tokens`` to ``row [vocab]`` in place.

    ``tokens``: prompt, then output; a tensor is where ``row`` is. As elsewhere, repetition counts both (CTRL, Keskar et
    al. 2019: positive logits are divided, negative ones multiplied), presence and frequency count the output only
    (OpenAI).
    """
    output = tokens[prompt_tokens:]
    if sampling.repetition_penalty != 1.0:
        seen_ids = _ids(tokens, row.device)
        values = row[seen_ids]
        factor = sampling.repetition_penalty
        row[seen_ids] = torch.where(values > 0, values / factor, values * factor)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(output):
        ids = _ids(output, row.device)
        row[ids] -= sampling.presence_penalty  # once per token, however often it is listed
        row.index_add_(0, ids, torch.full((len(ids),), -sampling.frequency_penalty, device=row.device))
    if sampling.logit_bias:
        row.index_add_(0, *lists.bias_tensors(row.device))
    if len(output) < stop.min_tokens and stop.stop_token_ids:
        row[lists.stop_tensor(row.device)] = -torch.inf
    if sampling.allowed_token_ids and row.device.type == "cpu":
        np.copyto(row.numpy(), -np.inf, where=lists.excluded_mask(len(row)))
    elif sampling.allowed_token_ids:
        allowed = lists.allowed_tensor(row.device)
        allowed_values = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = allowed_values


def _ids(tokens: NDArray[np.int32] | Tensor, device: torch.device) -> Tensor:
    return tokens.long() if isinstance(tokens, Tensor) else torch.from_numpy(tokens.astype(np.int64)).to(device)


def touched_tokens(
    tokens: NDArray[np.int32], prompt_tokens: int, sampling: SamplingParams, lists: TokenLists
) -> NDArray[np.int64] | None:
    """The tokens of which :func:`adjust_logits` or a grammar may change logits, some of them more than once. None: all
    of them."""
    if sampling.allowed_token_ids or sampling.grammar:
        return None
    counted_tokens = tokens if sampling.repetition_penalty != 1.0 else tokens[prompt_tokens:]
    return np.concatenate((counted_tokens, lists.changed)) if len(lists.changed) else counted_tokens.astype(np.int64)


# -- log probabilities


def log_normalisers(logits: Tensor) -> Tensor:
    """``logsumexp`` of each row of ``logits [n, vocab]`` float32 -> ``[n]``."""
    if logits.device.type != "cpu" or logits.stride(-1) != 1:
        return logits.logsumexp(-1)
    normalisers = torch.empty(len(logits))
    _kernels.log_normalisers(logits.data_ptr(), logits.stride(0), logits.shape[1], normalisers.data_ptr(), len(logits))
    return normalisers


def best_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best of each row: logits and tokens, best first."""
    if logits.device.type != "cpu" or logits.stride(-1) != 1 or not count:
        return logits.topk(count, dim=-1)
    values = torch.empty((len(logits), count))
    tokens = torch.empty((len(logits), count), dtype=torch.int64)
    _kernels.best_logits(
        logits.data_ptr(), logits.stride(0), logits.shape[1], count, values.data_ptr(), tokens.data_ptr(), len(logits)
    )
    return values, tokens


def report_logprobs(logits: Tensor, tokens: Tensor, top: int, token_ids: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    """Log probabilities of ``tokens [n]`` under ``logits [n, vocab]``, with the ``top`` best ones of each row, or with
    those of ``token_ids``."""
    reports: list[TokenLogprobs] = []
    for first in range(0, len(tokens), _SLICE_ROWS):
        rows, row_tokens = logits[first : first + _SLICE_ROWS], tokens[first : first + _SLICE_ROWS]
        normalisers = log_normalisers(rows)
        logprobs = (rows.gather(1, row_tokens[:, None])[:, 0] - normalisers).tolist()
        if token_ids:
            values = rows[:, torch.tensor(token_ids, device=rows.device)] - normalisers[:, None]
            best = [list(zip(token_ids, row, strict=True)) for row in values.tolist()]
        else:
            best = best_logprobs(rows, normalisers, top) if top else [[]] * len(logprobs)
        entries = zip(row_tokens.tolist(), logprobs, best, strict=True)
        reports += [TokenLogprobs(token, logprob, tuple(alternatives)) for token, logprob, alternatives in entries]
    return reports


def best_logprobs(logits: Tensor, normalisers: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The ``count`` best (token, logprob) of each row, best first; impossible tokens are left out."""
    values, ids = best_logits(logits, min(count, logits.shape[-1]))
    values = values - normalisers[:, None]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [[(token, value) for token, value in zip(*pair, strict=True) if value > -torch.inf] for pair in pairs]
