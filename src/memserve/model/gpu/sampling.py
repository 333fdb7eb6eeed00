"""Drawing on a GPU without waiting for it: the tokens stay there for the next step, and the host reads them later.

What rows ask for beyond that (grammars, beams, prompts' logprobs, drafts) needs the host between two steps, and is done
as on a CPU (:mod:`memserve.model.sampling`).

What the device knows of slots without the host: the tokens, so that a step reads what the one before it has drawn,
and the block tables.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memserve.base.types import TokenLogprobs
from memserve.model.gpu.streams import Gpu
from memserve.model.sampling import (
    Sampled,
    Truncation,
    adjust_logits,
    best_logits,
    draw_without_sync,
    log_normalisers,
    uniforms,
)
from memserve.model.slots import NOT_NUMBERS, NOTHING_LEFT, Failures, Int32s, Int64s, SlotTable, isolate_row


class SlotMirror:
    """``tokens [slots + 1, max_tokens]`` and ``tables [slots + 1, entries]`` int32 on the device. The last row is of
    no slot: rows that pad a batch are computed with it."""

    def __init__(self, gpu: Gpu, slots: SlotTable, scratch_block: int) -> None:
        """``scratch_block``: what padding writes to."""
        self._gpu, self._slots = gpu, slots
        count, width = slots.tokens.shape
        self.padding = count
        self.tokens = gpu.zeros(count + 1, width, dtype=torch.int32)
        self.tables = gpu.zeros(count + 1, slots.tables.shape[1], dtype=torch.int32)
        self.tables[count, 0] = scratch_block
        self._stale_tokens: list[tuple[int, int, int]] = []  # (slot, first, end)
        self._stale_tables: list[tuple[int, int, int]] = []

    def tokens_changed(self, slot: int, first: int, end: int) -> None:
        """The host has put tokens ``[first, end)`` into ``slot``."""
        self._stale_tokens.append((slot, first, end))

    def table_changed(self, slot: int, first: int, end: int) -> None:
        """The host has put entries ``[first, end)`` into the table of ``slot``."""
        self._stale_tables.append((slot, first, end))

    def send_changes(self) -> None:
        """Send what the host has changed, in the stream in use."""
        for stale, device, host in (
            (self._stale_tokens, self.tokens, self._slots.tokens),
            (self._stale_tables, self.tables, self._slots.tables),
        ):
            if stale:
                self._send_stale(list(dict.fromkeys(stale)), device, host)
                stale.clear()

    def _send_stale(self, stale: list[tuple[int, int, int]], device: Tensor, host: Int32s) -> None:
        width = host.shape[1]
        places = np.concatenate([np.arange(slot * width + first, slot * width + end) for slot, first, end in stale])
        places = np.unique(places)  # an entry that is named twice has one value: the host's of now
        pairs = self._gpu.send(torch.from_numpy(np.stack((places, host.reshape(-1)[places]))))
        device.view(-1)[pairs[0]] = pairs[1].int()

    def write_sampled(self, slots: Tensor, positions: Tensor, sampled: Tensor) -> None:
        """Put ``drawn [n]`` at ``positions [n]`` of ``slots [n]``, all int64 on the device."""
        self.tokens[slots, positions] = sampled.int()

    def given_positions(self, slots: Int64s, positions: Int64s) -> Int64s:
        return self._slots.given_positions(slots, positions)

    def gather_inputs(self, owners: Int64s, positions: Int64s) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a batch as the forward takes them, both ``[T]`` int64 on the device."""
        forward_positions = self._slots.given_positions(owners, positions)
        rows = self._gpu.send(torch.from_numpy(np.stack((owners, positions, forward_positions))))
        return self.tokens[rows[0], rows[1]].long(), rows[2]


@dataclass(frozen=True, slots=True)
class _Report:
    """Logprobs of draws that ask for the same, to be read by the host."""

    draws: list[int]
    logprobs: Tensor  # [n]
    values: Tensor  # [n, alternatives]
    ids: Tensor


@dataclass(slots=True)
class BegunDraw:
    """Draws that the device has begun: :meth:`collect_sampled` when it is done."""

    slots: Int64s
    positions: Int64s
    """Where in its slot each token stands."""
    tokens: Tensor
    sound: Tensor
    """``[2, n]``: whether logits were numbers, before the requests' changes and behind them."""
    reports: list[_Report] = field(default_factory=list)
    failed: Failures = field(default_factory=dict)

    def collect_sampled(self) -> Sampled:
        """What was drawn."""
        sampled = Sampled(self.tokens.numpy().copy(), failed=self.failed)
        before, behind = self.sound.numpy()
        for draw in np.flatnonzero(~(before & behind)).tolist():
            sampled.failed.setdefault(int(self.slots[draw]), NOTHING_LEFT if before[draw] else NOT_NUMBERS)
        for report in self.reports:
            columns = report.logprobs.tolist(), report.values.tolist(), report.ids.tolist()
            for draw, logprob, values, ids in zip(report.draws, *columns, strict=True):
                if int(self.slots[draw]) not in sampled.failed:
                    alternatives = tuple(
                        (token, value) for token, value in zip(ids, values, strict=True) if value > -np.inf
                    )
                    sampled.logprobs[draw] = TokenLogprobs(int(sampled.tokens[draw]), logprob, alternatives)
        return sampled


def begin_draw(
    gpu: Gpu, logits: Tensor, rows: Int64s, slots: Int64s, table: SlotTable, mirror: SlotMirror
) -> BegunDraw:
    """As :func:`memserve.model.sampling.sample`, for slots without grammar and beams. The tokens are in ``mirror`` for
    what is enqueued from now on; the table knows nothing of them yet."""
    if len(rows) != len(logits) or (rows != np.arange(len(rows))).any():
        logits = logits[gpu.send(torch.from_numpy(rows))]
    positions = table.lengths[slots].copy()
    before, failed = _are_numbers(logits), Failures()
    for draw in np.flatnonzero(table.adjusts[slots]).tolist():
        slot = int(slots[draw])
        with isolate_row(failed, slot, "changing its logits"):
            slot_tokens, prompt_tokens = mirror.tokens[slot, : int(positions[draw])], int(table.prompt_tokens[slot])
            how = table.sampling_of(slot), table.stop_of(slot), table.lists_of(slot)
            adjust_logits(logits[draw], slot_tokens, prompt_tokens, *how)
    behind, tokens = _are_numbers(logits), logits.argmax(-1)
    random = table.temperature[slots] > 0
    if random.any():
        sampled = _draw(gpu, torch.where(behind[:, None], logits, 0.0), slots, positions, table)
        tokens = sampled if random.all() else torch.where(gpu.send(torch.from_numpy(random)), sampled, tokens)
    places = gpu.send(torch.from_numpy(np.stack((slots, positions))))
    mirror.write_sampled(places[0], places[1], tokens)
    reports = _reports(gpu, logits, tokens, slots, table)
    return BegunDraw(
        slots, positions, gpu.fetch_to_host(tokens), gpu.fetch_to_host(torch.stack((before, behind))), reports, failed
    )  # fmt: skip


def _are_numbers(logits: Tensor) -> Tensor:
    """Whether each row has a best token: its largest logit is a number. ``[n]`` bool."""
    return logits.amax(-1).isfinite()


def _draw(gpu: Gpu, logits: Tensor, slots: Int64s, positions: Int64s, table: SlotTable) -> Tensor:
    uniform = uniforms(table.seed[slots], table.index[slots], positions - table.prompt_tokens[slots])
    warm = np.where(table.temperature[slots] > 0, table.temperature[slots], np.float32(1))  # greedy rows are not used
    top_k, top_p = table.top_k[slots], table.top_p[slots]
    columns = (warm, top_k, top_p, table.min_p[slots], uniform)
    how = Truncation(*(gpu.send(torch.from_numpy(column)) for column in columns))
    return draw_without_sync(logits, how, top_k, top_p)


def _reports(gpu: Gpu, logits: Tensor, tokens: Tensor, slots: Int64s, table: SlotTable) -> list[_Report]:
    groups = defaultdict(list)
    for draw in np.flatnonzero(table.reports[slots]).tolist():
        sampling = table.sampling_of(int(slots[draw]))
        groups[sampling.logprobs or 0, sampling.logprob_token_ids].append(draw)
    reports = []
    for (top, token_ids), draws in groups.items():
        draw_ids = gpu.send(torch.tensor(draws))
        rows, row_tokens = logits[draw_ids], tokens[draw_ids]
        normalisers = log_normalisers(rows)
        if token_ids:
            ids = gpu.send(torch.tensor(token_ids)).expand(len(draws), -1)
            values = rows.gather(1, ids)
        else:
            values, ids = best_logits(rows, min(top, rows.shape[-1]))
        logprobs = rows.gather(1, row_tokens[:, None])[:, 0] - normalisers
        reports.append(
            _Report(
                draws,
                gpu.fetch_to_host(logprobs),
                gpu.fetch_to_host(values - normalisers[:, None]),
                gpu.fetch_to_host(ids.contiguous()),
            )
        )
    return reports
