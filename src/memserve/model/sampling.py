"""From a step's logits to tokens, logprobs and beam candidates, after the changes that requests make to the logits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve import _kernels
from memserve.instance.events import RowFailed
from memserve.instance.grammar_events import GRAMMAR_FAILED
from memserve.model.drawing import Truncation, draw, draw_native, uniforms
from memserve.model.one_grammar import Mask
from memserve.model.slots import NOT_NUMBERS, NOTHING_LEFT, Failures, Int64s, SlotTable, each, stage
from memserve.model.token_lists import TokenLists
from memserve.types import SamplingParams, StopParams, TokenLogprobs

_SLICE_ROWS = 64
"""Rows with a log-softmax at a time: a long prompt times a vocabulary is hundreds of megabytes."""


@dataclass(slots=True)
class Drawn:
    """One token per draw, and the requested logprobs and candidates by position in ``tokens``."""

    tokens: Int64s
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    failed: Failures = field(default_factory=dict)
    """Slots that draw nothing; their place in ``tokens`` still holds a token."""
    late: frozenset[int] = frozenset()
    """Likewise, because their masks are not there: their logits are kept (``SlotTable.late``)."""


def sample(logits: Tensor, rows: Int64s, slots: Int64s, table: SlotTable, ahead: Int64s | int = 0) -> Drawn:
    """Draw a token for each of ``slots [n]`` from row ``rows[i]`` of ``logits [r, vocab]`` float32: its next one, or
    the one ``ahead [n]`` tokens behind that.

    ``logits`` may be changed. Greedy rows take the best token, the lowest id among equals. A beam row reports its best
    candidates, and its best token stands in ``tokens``. What fails for one slot fails for that slot alone.
    """
    plain = not (table.adjusts[slots] | table.reports[slots] | (table.beam_candidates[slots] > 0)).any()
    greedy: NDArray[np.bool_] = table.temperature[slots] == 0
    if plain and greedy.all():
        best, sound = _best(logits)
        drawn = Drawn(best[rows])
        return drawn if sound.all() else _without(drawn, slots, ~sound[rows], NOT_NUMBERS)
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
    drawn = Drawn(best, failed=failed, late=late)
    if failed or late or not sound.all():
        for position in np.flatnonzero(~sound).tolist():
            if int(slots[position]) not in late:
                _blame(logits, position, int(slots[position]), changed.get(position), failed)
        sound = np.array([slot not in failed and slot not in late for slot in slots.tolist()], np.bool_)
    random = ~greedy & (table.beam_candidates[slots] == 0) & sound
    if random.any():

        def draw_some(chosen: Int64s) -> None:
            further = ahead if isinstance(ahead, int) else ahead[chosen]
            drawn.tokens[chosen] = _draw(logits, chosen, slots[chosen], table, further)

        each(drawn.failed, "drawing its next token", slots, draw_some, np.flatnonzero(random))
    if not plain:
        wanted = np.flatnonzero((table.reports[slots] | (table.beam_candidates[slots] > 0)) & sound)
        each(
            drawn.failed,
            "reporting its logprobs",
            slots,
            lambda some: _report(logits, some, slots, table, drawn),
            wanted,
        )
    return drawn


def sample_drafts(
    logits: Tensor, slots: Int64s, drafts: list[list[int]], table: SlotTable
) -> tuple[list[list[int]], Failures]:
    """Draw behind each token of rows with drafts, as if one by one: ``logits [n, vocab]`` float32 are those of all
    positions of all rows; ``slots[i]`` has the row with ``drafts[i]`` behind its first token. Returns for each row what
    it draws, up to the first draw that is not the next draft."""
    widths = np.array([1 + len(tokens) for tokens in drafts])
    begins = np.cumsum(widths) - widths
    ahead = np.arange(len(logits)) - np.repeat(begins, widths)
    found = sample(logits, np.arange(len(logits)), np.repeat(slots, widths), table, ahead)
    drawn = []
    for begin, foretold in zip(begins.tolist(), drafts, strict=True):
        tokens = found.tokens[begin : begin + len(foretold) + 1].tolist()
        right = next((at for at, token in enumerate(foretold) if tokens[at] != token), len(foretold))
        drawn.append(tokens[: right + 1])
    return drawn, found.failed


def _without(drawn: Drawn, slots: Int64s, bad: NDArray[np.bool_], why: RowFailed) -> Drawn:
    for position in np.flatnonzero(bad).tolist():
        drawn.failed.setdefault(int(slots[position]), why)
    return drawn


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
                masks[position] = None if slot in table.late else table.grammars.mask(slot)
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
    with stage(failed, slot, "changing its logits"):
        known, prompt_tokens = table.tokens[slot, : table.lengths[slot]], int(table.prompt_tokens[slot])
        sampling, stop, lists = table.sampling(slot), table.stop(slot), table.lists(slot)
        touched = touched_tokens(known, prompt_tokens, sampling, lists)
        if touched is None:
            before = row.clone()
        elif row.device.type == "cpu":
            before = torch.from_numpy(row.numpy()[touched])  # a third of torch's time
        else:
            before = row[torch.from_numpy(touched).to(row.device)]
        if stop.min_tokens and not (before < torch.inf).all():
            failed[slot] = NOT_NUMBERS
        else:
            adjust_logits(row, known, prompt_tokens, sampling, stop, lists)
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


def _draw(logits: Tensor, chosen: Int64s, slots: Int64s, table: SlotTable, ahead: Int64s | int) -> Int64s:
    device = logits.device
    positions = table.lengths[slots] - table.prompt_tokens[slots] + ahead
    uniform = uniforms(table.seed[slots], table.index[slots], positions)
    columns = (table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], uniform)
    how = Truncation(*(torch.from_numpy(column).to(device) for column in columns))
    rows = torch.from_numpy(chosen).to(device)
    tokens: Int64s = draw_native(logits, rows, how) if device.type == "cpu" else draw(logits[rows], how).cpu().numpy()
    return tokens


def _report(logits: Tensor, places: Int64s, slots: Int64s, table: SlotTable, drawn: Drawn) -> None:
    asked = defaultdict(list)  # by number of alternatives, and by named ones: one pass for each
    for position in places[table.reports[slots[places]]].tolist():
        sampling = table.sampling(int(slots[position]))
        asked[sampling.logprobs or 0, sampling.logprob_token_ids].append(position)
    for (top, named), positions in asked.items():
        rows = logits if len(positions) == len(logits) else logits[positions]
        tokens = torch.from_numpy(drawn.tokens[positions]).to(logits.device)
        drawn.logprobs.update(zip(positions, report_logprobs(rows, tokens, top, named), strict=True))
    beams = places[table.beam_candidates[slots[places]] > 0]
    if len(beams):
        counts = table.beam_candidates[slots[beams]].tolist()
        scores = logits[torch.from_numpy(beams).to(logits.device)]
        best = best_logprobs(scores, log_normalisers(scores), max(counts))
        for position, row, count in zip(beams.tolist(), best, counts, strict=True):
            drawn.candidates[position] = row[:count]


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
        seen = _ids(tokens, row.device)
        values = row[seen]
        factor = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(output):
        ids = _ids(output, row.device)
        row[ids] -= sampling.presence_penalty  # once per token, however often it is listed
        row.index_add_(0, ids, torch.full((len(ids),), -sampling.frequency_penalty, device=row.device))
    if sampling.logit_bias:
        row.index_add_(0, *lists.biased(row.device))
    if len(output) < stop.min_tokens and stop.stop_token_ids:
        row[lists.stops(row.device)] = -torch.inf
    if sampling.allowed_token_ids and row.device.type == "cpu":
        np.copyto(row.numpy(), -np.inf, where=lists.excluded(len(row)))
    elif sampling.allowed_token_ids:
        allowed = lists.allowed(row.device)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept


def _ids(tokens: NDArray[np.int32] | Tensor, device: torch.device) -> Tensor:
    return tokens.long() if isinstance(tokens, Tensor) else torch.from_numpy(tokens.astype(np.int64)).to(device)


def touched_tokens(
    tokens: NDArray[np.int32], prompt_tokens: int, sampling: SamplingParams, lists: TokenLists
) -> NDArray[np.int64] | None:
    """The tokens of which :func:`adjust_logits` or a grammar may change logits, some of them more than once. None: all
    of them."""
    if sampling.allowed_token_ids or sampling.grammar:
        return None
    known = tokens if sampling.repetition_penalty != 1.0 else tokens[prompt_tokens:]
    return np.concatenate((known, lists.changed)) if len(lists.changed) else known.astype(np.int64)


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


def report_logprobs(logits: Tensor, tokens: Tensor, top: int, named: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    """Log probabilities of ``tokens [n]`` under ``logits [n, vocab]``, with the ``top`` best ones of each row, or with
    the ``named`` ones."""
    reports: list[TokenLogprobs] = []
    for first in range(0, len(tokens), _SLICE_ROWS):
        rows, chosen = logits[first : first + _SLICE_ROWS], tokens[first : first + _SLICE_ROWS]
        normalisers = log_normalisers(rows)
        own = (rows.gather(1, chosen[:, None])[:, 0] - normalisers).tolist()
        if named:
            values = rows[:, torch.tensor(named, device=rows.device)] - normalisers[:, None]
            best = [list(zip(named, row, strict=True)) for row in values.tolist()]
        else:
            best = best_logprobs(rows, normalisers, top) if top else [[]] * len(own)
        entries = zip(chosen.tolist(), own, best, strict=True)
        reports += [TokenLogprobs(token, logprob, tuple(others)) for token, logprob, others in entries]
    return reports


def best_logprobs(logits: Tensor, normalisers: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The ``count`` best (token, logprob) of each row, best first; impossible tokens are left out."""
    values, ids = best_logits(logits, min(count, logits.shape[-1]))
    values = values - normalisers[:, None]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [[(token, value) for token, value in zip(*pair, strict=True) if value > -torch.inf] for pair in pairs]
