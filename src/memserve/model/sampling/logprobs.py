"""Log probabilities to report, and adjustments of logits before anything is drawn (level 3)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve import _kernels
from memserve.types import SamplingParams, StopParams, TokenLogprobs

_SLICE_ROWS = 64
"""Rows whose log-softmax exists at a time: a long prompt times a vocabulary is hundreds of megabytes."""


def adjust_logits(
    row: Tensor, tokens: NDArray[np.int32], prompt_tokens: int, sampling: SamplingParams, stop: StopParams
) -> None:
    """Apply penalties, bias and ``min_tokens`` to ``row [vocab]`` in place.

    ``tokens``: prompt, then output. As elsewhere, repetition counts both (CTRL, Keskar et al. 2019: positive logits are
    divided, negative ones multiplied), presence and frequency count the output only (OpenAI).
    """
    output = tokens[prompt_tokens:]
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(tokens.astype(np.int64)).to(row.device)
        values = row[seen]
        factor = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(output):
        ids = torch.from_numpy(output.astype(np.int64)).to(row.device)
        row[ids] -= sampling.presence_penalty  # once a token, however often it is listed
        row.index_add_(0, ids, torch.full((len(ids),), -sampling.frequency_penalty, device=row.device))
    if sampling.logit_bias:
        biased, bias = zip(*sampling.logit_bias, strict=True)
        row.index_add_(0, torch.tensor(biased, device=row.device), torch.tensor(bias, device=row.device))
    if len(output) < stop.min_tokens and stop.stop_token_ids:
        row[torch.tensor(stop.stop_token_ids, device=row.device)] = -torch.inf


def touched_tokens(
    tokens: NDArray[np.int32], prompt_tokens: int, sampling: SamplingParams, stop: StopParams
) -> NDArray[np.int64]:
    """The tokens whose logits :func:`adjust_logits` may change, some of them more than once."""
    known = tokens if sampling.repetition_penalty != 1.0 else tokens[prompt_tokens:]
    others = [token for token, _ in sampling.logit_bias]
    if stop.min_tokens:
        others += stop.stop_token_ids
    return np.concatenate((known, np.array(others, np.int64))) if others else known.astype(np.int64)


def log_normalisers(logits: Tensor) -> Tensor:
    """``logsumexp`` of each row of ``logits [n, vocab]`` float32 -> ``[n]``."""
    if logits.device.type != "cpu" or logits.stride(-1) != 1:
        return logits.logsumexp(-1)
    normalisers = torch.empty(len(logits))
    _kernels.log_normalisers(logits.data_ptr(), logits.stride(0), logits.shape[1], normalisers.data_ptr(), len(logits))
    return normalisers


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if logits.device.type != "cpu" or logits.stride(-1) != 1 or not count:
        return logits.topk(count, dim=-1)
    values = torch.empty((len(logits), count))
    tokens = torch.empty((len(logits), count), dtype=torch.int64)
    _kernels.best_logits(
        logits.data_ptr(), logits.stride(0), logits.shape[1], count, values.data_ptr(), tokens.data_ptr(), len(logits)
    )
    return values, tokens


def report_logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprobs]:
    """Log probabilities of ``tokens [n]`` under ``logits [n, vocab]``, with the ``top`` best ones of each row."""
    reports: list[TokenLogprobs] = []
    for first in range(0, len(tokens), _SLICE_ROWS):
        rows, chosen = logits[first : first + _SLICE_ROWS], tokens[first : first + _SLICE_ROWS]
        normalisers = log_normalisers(rows)
        own = (rows.gather(1, chosen[:, None])[:, 0] - normalisers).tolist()
        best = best_logprobs(rows, normalisers, top) if top else [[]] * len(own)
        named = zip(chosen.tolist(), own, best, strict=True)
        reports += [TokenLogprobs(token, logprob, tuple(others)) for token, logprob, others in named]
    return reports


def best_logprobs(logits: Tensor, normalisers: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The ``count`` best (token, logprob) of each row, best first; impossible tokens are left out."""
    values, ids = _best(logits, min(count, logits.shape[-1]))
    values = values - normalisers[:, None]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [[(token, value) for token, value in zip(*pair, strict=True) if value > -torch.inf] for pair in pairs]
