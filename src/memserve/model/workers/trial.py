"""The trial of workers whose model is not divided by transformers' plan alone: do they compute what the whole model
does? Asked before the first request, in pieces, with the states that go from one to the next."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from memserve.base.errors import UserError
from memserve.model.attention.context import StepAttention, current_attention, step_attention
from memserve.model.loading.comparison import DIFFERING_SHARE, TOLERANCE, Carried, position_errors
from memserve.model.loading.formats.headers import errors_named
from memserve.model.loading.pages import pages_of
from memserve.model.loading.probe import DenseAttention
from memserve.model.loading.stored import stored_of
from memserve.model.states.layers import states_of
from memserve.model.workers.group import WorkerGroup, collectives
from memserve.model.workers.plans import refuse_division

if TYPE_CHECKING:
    from torch import Tensor

_HINT = "serve it with one worker: --tensor-parallel 1 --pipeline-parallel 1"
_PIECES = (0, 20, 21, 22, 30)
"""Where the pieces begin and end: prompts and single tokens are computed by other code."""


class Trial:
    """What the whole model computes, for the worker that leads: made before it is cut."""

    def __init__(self, module: Any, dtype: str) -> None:
        self._module, self._dtype = module, dtype
        failure = f"a {module.config.model_type} model cannot be tried before it is divided among workers"
        with errors_named(failure, _HINT), pages_of(module).one_layer_at_a_time(module):
            self._expected = _whole_logits(module)

    def compare_together(self, crew: WorkerGroup) -> None:
        """Compute with the other workers, which call :func:`follow_trial`. Raises :class:`UserError` where that gives
        something else; they are told."""
        logits = _divided_logits(self._module, self._dtype, crew)
        errors = position_errors(logits, self._expected)
        differing = float((~(errors <= TOLERANCE[self._dtype][1])).float().mean())
        is_right = differing <= DIFFERING_SHARE  # a router may choose another expert where two are nearly alike
        if not crew.all_agree(int(is_right)) or not is_right:
            by = f"together they compute other logits, by {float(errors.median()):.0%} at the median"
            raise refuse_division(self._module, by)


def follow_trial(module: Any, dtype: str, crew: WorkerGroup) -> None:
    """This worker's part. Raises :class:`UserError` where the one that leads finds a difference."""
    _divided_logits(module, dtype, crew)
    if not crew.all_agree(1):
        raise refuse_division(module, "together they compute other logits")


def _ids(module: Any) -> Tensor:
    vocab: int = module.config.get_text_config().vocab_size
    return (torch.arange(_PIECES[-1]) * 7919 + 13) % vocab


def _whole_logits(module: Any) -> Tensor:
    ids = _ids(module)
    numbers = stored_of(module).computing_as_stored()
    with step_attention(DenseAttention()), torch.inference_mode(), numbers:
        out = module(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False)
    logits: Tensor = out.logits[0].float()
    return logits


def _divided_logits(module: Any, dtype: str, crew: WorkerGroup) -> Tensor:
    """``[T, vocab]``, of the worker that leads. Whatever fails here, no worker waits for another one that is gone."""
    failure = f"a {module.config.model_type} model cannot be divided among workers: its parts do not compute"
    try:
        with errors_named(failure, _HINT):
            return _run_pieces(module, dtype, crew)
    except UserError as error:
        crew.mark_broken(error.message)
        raise


class _SharedHeads:
    """A step's attention that gets the KV heads which the worker's pages are read and written by."""

    def __init__(self, attention: StepAttention, heads: int) -> None:
        self._attention, self._heads = attention, heads

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`. Raises :class:`ValueError`."""
        if k.shape[1] != self._heads:
            raise ValueError(f"layer {layer} has {k.shape[1]} KV heads, and this worker {self._heads}")
        return self._attention.run_attention(layer, q, k, v, **options)


def _run_pieces(module: Any, dtype: str, crew: WorkerGroup) -> Tensor:
    ids, parts = _ids(module), []
    carried = Carried(states_of(module).geometry, dtype)
    for begin, end in itertools.pairwise(_PIECES):
        positions = torch.arange(begin, end)[None]
        numbers = stored_of(module).computing_as_stored()
        with carried.passed_on(), collectives(crew), torch.inference_mode(), numbers:
            with step_attention(_SharedHeads(current_attention(), crew.share.heads[crew.share.part])):
                out = module(input_ids=ids[None, begin:end], position_ids=positions, use_cache=False)
            parts.append(crew.gather_logits(out.logits[0].float()))
    return torch.cat(parts)
