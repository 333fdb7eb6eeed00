"""The tokens that requests name in their parameters, as tensors: made once for a request, not in each of its rows.

A request may name every token of the vocabulary, and have many sequences.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.types import VOCAB_MAX, SamplingParams, StopParams


class TokenLists:
    """Of one request. Equal tensors for all devices; those of other devices than the CPU are copied when first used."""

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
