"""The forward port: token ids in, logits out (level 3). Attention goes through the step context."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from memserve.model.linears import pack_linears, widen_head


class Forward(Protocol):
    """Computes one ragged batch. The caller has made the step's attention current (``context.attending``)."""

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """``input_ids, positions [T]`` and ``logits_rows [R]``, all int64 -> logits ``[R, vocab]`` float32."""


class EagerForward:
    """The Hugging Face module as it is, with packed linears on a CPU: serves every family that the probe accepts."""

    def __init__(self, module: Any, *, pack: bool = True) -> None:
        """``pack``: false leaves the module untouched, with logits rounded to its dtype."""
        self._module = module
        self.packed_linears = 0
        if pack:
            widen_head(module)
            self.packed_linears = pack_linears(module)
        self._selects_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """See :class:`Forward`."""
        kept = {"logits_to_keep": logits_rows} if self._selects_rows else {}
        with torch.inference_mode():
            out = self._module(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **kept)
            logits: Tensor = out.logits[0] if self._selects_rows else out.logits[0, logits_rows]
            return logits.float()
