"""From a step's logits to tokens, logprobs and beam candidates (level 3)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.model.sampling.drawing import Truncation, draw, draw_native
from memserve.model.sampling.logprobs import adjust_logits, best_logprobs, log_normalisers, report_logprobs
from memserve.model.sampling.philox import uniforms
from memserve.model.slots import Int64s, SlotTable
from memserve.types import TokenLogprobs


@dataclass(slots=True)
class Drawn:
    """One token a draw, and what was asked for beside it, by position in ``tokens``."""

    tokens: Int64s
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def sample(logits: Tensor, rows: Int64s, slots: Int64s, table: SlotTable) -> Drawn:
    """Draw a token for each of ``slots [n]`` from row ``rows[i]`` of ``logits [r, vocab]`` float32.

    ``logits`` may be changed. Greedy rows take the best token, the lowest id among equals. A beam row reports its best
    candidates, and its best token stands in ``tokens``.
    """
    plain = not (table.adjusts[slots] | table.reports[slots] | (table.beam_candidates[slots] > 0)).any()
    greedy: NDArray[np.bool_] = table.temperature[slots] == 0
    if plain and greedy.all():
        return Drawn(_best(logits)[rows])
    if len(rows) != len(logits) or (rows != np.arange(len(rows))).any():
        logits = logits[torch.from_numpy(rows).to(logits.device)]
    for position in np.flatnonzero(table.adjusts[slots]).tolist():
        slot = int(slots[position])
        known = table.tokens[slot, : table.lengths[slot]]
        adjust_logits(logits[position], known, int(table.prompt_tokens[slot]), table.sampling(slot), table.stop(slot))
    drawn = Drawn(_best(logits))
    random = ~greedy & (table.beam_candidates[slots] == 0)
    if random.any():
        chosen = np.flatnonzero(random)
        drawn.tokens[chosen] = _draw(logits, chosen, slots[chosen], table)
    if not plain:
        _report(logits, slots, table, drawn)
    return drawn


def _best(logits: Tensor) -> Int64s:
    if logits.device.type == "cpu":
        best: Int64s = logits.numpy().argmax(-1)  # eight times as fast as torch's
        return best
    return logits.argmax(-1).cpu().numpy()


def _draw(logits: Tensor, chosen: Int64s, slots: Int64s, table: SlotTable) -> Int64s:
    device = logits.device
    positions = table.lengths[slots] - table.prompt_tokens[slots]
    uniform = uniforms(table.seed[slots], table.index[slots], positions)
    columns = (table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], uniform)
    how = Truncation(*(torch.from_numpy(column).to(device) for column in columns))
    rows = torch.from_numpy(chosen).to(device)
    tokens: Int64s = draw_native(logits, rows, how) if device.type == "cpu" else draw(logits[rows], how).cpu().numpy()
    return tokens


def _report(logits: Tensor, slots: Int64s, table: SlotTable, drawn: Drawn) -> None:
    asked = defaultdict(list)  # by how many alternatives, so that equal wishes cost one pass
    for position in np.flatnonzero(table.reports[slots]).tolist():
        asked[table.sampling(int(slots[position])).logprobs or 0].append(position)
    for top, positions in asked.items():
        rows = logits if len(positions) == len(logits) else logits[positions]
        tokens = torch.from_numpy(drawn.tokens[positions]).to(logits.device)
        drawn.logprobs.update(zip(positions, report_logprobs(rows, tokens, top), strict=True))
    beams = np.flatnonzero(table.beam_candidates[slots] > 0)
    if len(beams):
        counts = table.beam_candidates[slots[beams]].tolist()
        scores = logits[torch.from_numpy(beams).to(logits.device)]
        best = best_logprobs(scores, log_normalisers(scores), max(counts))
        drawn.candidates = {
            position: row[:count] for position, row, count in zip(beams.tolist(), best, counts, strict=True)
        }
