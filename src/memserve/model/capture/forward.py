"""Captured forwards: a Hugging Face module as one flat list of fused operations, on a CPU or a GPU.

Record the forward twice, merge the recordings into a graph for any number of tokens, rewrite it, compile it, and
compare it with the module it came from. Nothing here knows a model family; where any stage meets something unknown, the
module runs as it is (:class:`memserve.model.forward.EagerForward`), which is slower and never wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from memserve.base.states import NO_STATE, StateGeometry
from memserve.model.attention.context import OrderedAttention, step_attention
from memserve.model.attention.expansions import copy_expansions, own_expansions
from memserve.model.capture import operations as fused
from memserve.model.capture.emit import NativeStep, emit
from memserve.model.capture.functional import drop_writes
from memserve.model.capture.lower import Lowering
from memserve.model.capture.passes import (
    Packs,
    has_mutation,
    keep_stored_embeddings,
    match_gates,
    match_products,
    match_residuals,
    match_rms_norms,
    match_rotary,
    normalise_linears,
    pack_expert_layers,
    pack_linears,
    share_tied_embedding,
    simplify,
    widen_logits,
)
from memserve.model.capture.record import CaptureRefused, generalise, record, without_adapters
from memserve.model.capture.shapes import move_views, unflatten_rows
from memserve.model.experts import run_experts
from memserve.model.forward import EagerForward, Forward
from memserve.model.linears import ROWS_NATIVE_MAX, bucket_rows
from memserve.model.loading.cache import read_record, record_name, write_record
from memserve.model.loading.comparison import CarriedAttention
from memserve.model.loading.pages import NO_PAGES, WeightPages, pages_of
from memserve.model.loading.probe import DenseAttention
from memserve.model.loading.stored import NOT_STORED, StoredWeights, stored_of
from memserve.model.lora import RowsOf, has_lora_rows, lora_adapters
from memserve.model.quantised import QuantisedLinear, is_quantised
from memserve.model.states.layers import StateLayers, states_of
from memserve.model.states.memory import LoneSlot
from memserve.model.states.recurrence import RecordedStates
from memserve.model.workers.group import WorkerGroup

if TYPE_CHECKING:
    from memserve.model.workers.gpu_group import GpuWorkerGroup

log = logging.getLogger(__name__)

Inputs = dict[str, Tensor]

_SIZES = ((23, 19), (37, 31))  # (tokens, logits rows) of the two recordings: small and distinctive
_TRIALS = ((1, 1), (7, 2), (31, 31), (150, 31))  # (tokens, rows) compared with the module: few, and at last many
_THRESHOLD_LIMIT = 0.5
"""Of rows so few that rounding may have sent all of them to other experts; what is computed wrongly makes more."""
_ANY_ROWS = 1 << 30  # on a GPU no number of rows is better than another
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 2e-2}  # root mean square / spread of the logits
_QUANTISED_TIMES = 2.0
"""How much more logits may differ where weights have few bits."""
_FEW_ROWS, _FEW_ROWS_TIMES = 2, 2.0
"""And in so few rows once more, but in float32: there rounding alone makes more of a difference, of one row of
SmolLM2-135M in bfloat16 0.10 beside float32, and so 0.13 beside a module that rounds otherwise (torch on matrix units),
and 0.26 where its weights are rounded to int8. In 31 rows it makes 0.04; what is computed wrongly makes 1 and more."""


class CapturedForward:
    """A :class:`memserve.model.forward.Forward` that runs the rewritten graph of one module."""

    def __init__(
        self,
        graph: fx.Graph,
        dtype: torch.dtype,
        adapted: CapturedForward | None = None,
        states: StateGeometry = NO_STATE,
    ) -> None:
        """``adapted``: the same forward for steps with rows that have adapters. ``states``: that layers keep."""
        self._adapted, self._states = adapted, states
        program = emit(graph)
        self._run = program.run
        self.source = program.source
        on_gpu = _is_on_gpu(graph)
        self.native = None if on_gpu else _native_step(graph, dtype)
        self._linears = linears = [node.args[1] for node in graph.nodes if node.target is fused.linear]
        packed = [node.args[3] for node in graph.nodes if node.target is run_experts]
        self._experts = [layer for experts in packed for layer in experts.layers]
        self._is_rounded = bool(self._experts) and dtype != torch.float32
        #: up to this many tokens rows are not padded
        self.fills_up = _ANY_ROWS if on_gpu else ROWS_NATIVE_MAX if all(layer.is_ours for layer in linears) else 0
        self.operations = sum(node.op == "call_function" for node in graph.nodes)
        _forget_values(graph.nodes)

    def choose_kernels(self) -> None:
        """On a GPU, find out by measuring what computes few rows quickest: see :mod:`memserve.model.gpu.linears`."""
        from memserve.model.gpu.linears import choose_kernels, graph_seconds  # needs triton

        began_s = time.monotonic()
        quicker_count = choose_kernels(list(dict.fromkeys(self._linears)), graph_seconds)
        log.info(
            "%d linears of few rows by kernels of our own, found in %.1f s", quicker_count, time.monotonic() - began_s
        )

    def compare(self, trial: Inputs, logits: Tensor, limit: float) -> None:
        """Raise :class:`CaptureRefused` where ``trial`` does not give ``logits``, the module's own.

        Stored weights round activations. So operations are compared with the weights as numbers, and then the native
        step with the operations: a wrong one is not taken for rounding."""
        expected = logits
        if stored := [layer for layer in (*self._linears, *self._experts) if isinstance(layer, QuantisedLinear)]:
            for layer in stored:
                layer.exact = True
            self._check(_logits(self._run_operations, trial, self._states), logits, limit)
            for layer in stored:
                layer.exact = False
            expected = _logits(self._run_operations, trial, self._states)
            limit = max(limit, _TOLERANCE[torch.bfloat16])  # a last digit decides between two integers
        self._check(_logits(self, trial, self._states), expected, limit)
        if self._states:
            self._check(self._logits_in_pieces(trial), expected, limit)
        if self._adapted is not None:
            with lora_adapters(RowsOf()):
                self._adapted.compare(trial, logits, limit)

    def _check(self, logits: Tensor, expected: Tensor, limit: float) -> None:
        """With experts, rounding to 16 bits sends some rows to others than the module's; with most rows it does not."""
        if self._is_rounded and len(logits) <= _FEW_ROWS:
            return _compare(logits, expected, max(limit, _THRESHOLD_LIMIT))
        if self._is_rounded and logits.shape == expected.shape:
            errors = (logits - expected).square().mean(-1)
            usual = errors <= errors.median()
            return _compare(logits[usual], expected[usual], limit)
        return _compare(logits, expected, limit)

    def _logits_in_pieces(self, trial: Inputs) -> Tensor:
        """Of the same tokens, which come in two pieces with single ones between them."""
        tokens, logits = len(trial["input_ids"]), []
        borders = sorted({0, tokens // 2, min(tokens, tokens // 2 + 1), min(tokens, tokens // 2 + 2), tokens})
        slot, attention = LoneSlot(self._states), CarriedAttention()
        for begin, end in pairwise(borders):
            rows = trial["logits_rows"]
            inputs = {name: trial[name][begin:end] for name in ("input_ids", "positions")}
            inputs["logits_rows"] = rows[(begin <= rows) & (rows < end)] - begin
            attention.tokens = end - begin
            with step_attention(OrderedAttention(attention)), slot.passed_on(end - begin):
                logits.append(self(**inputs))
        return torch.cat(logits)

    def use_worker_group(self, crew: WorkerGroup) -> None:
        """Take sums over the workers of ``crew`` from now on."""
        if self.native is not None:
            self.native.use_collective(crew.stage)
        if self._adapted is not None:
            self._adapted.use_worker_group(crew)

    def _run_operations(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._run(input_ids, positions, logits_rows)

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """``input_ids, positions [T]``, ``logits_rows [R]``, int64 -> logits ``[R, vocab]`` float32."""
        if self._adapted is not None and has_lora_rows():
            return self._adapted(input_ids, positions, logits_rows)
        native = self.native
        with torch.inference_mode():
            # Padded once here, so that no linear has to copy its input. Rows mix only in attention, which computes
            # those of its batch.
            padding = bucket_rows(len(input_ids)) - len(input_ids) if len(input_ids) > self.fills_up else 0
            if padding:
                input_ids, positions = pad(input_ids, (0, padding)), pad(positions, (0, padding))
            if native is not None and len(input_ids) <= native.rows_max and len(logits_rows) <= native.rows_max:
                return native(input_ids, positions, logits_rows)
            return self._run(input_ids, positions, logits_rows)


def best_forward(
    module: Any, crew: WorkerGroup | GpuWorkerGroup | None = None, *, fingerprint: str | None = None
) -> Forward:
    """The captured forward if ``module`` can be captured (its weights are freed then), else the module itself.

    ``crew``: the workers of the instance, all of which must compute the same rows, padding included. ``fingerprint``:
    of the model, see :func:`capture_forward`."""
    # operations over states are a CPU's and know whole layers, and workers have parts
    is_on_gpu = next(module.parameters()).device.type != "cpu"
    is_as_it_is = bool(states_of(module)) and (crew is not None or is_on_gpu)
    captured = None if is_as_it_is else capture_forward(module, fingerprint)
    agreed = crew is None or crew.all_agree(0 if captured is None else 1 + captured.fills_up)
    if captured is None or not agreed:
        return EagerForward(module)
    if isinstance(crew, WorkerGroup):
        captured.use_worker_group(crew)
    release_weights(module)
    return captured


def capture_forward(module: Any, fingerprint: str | None = None) -> CapturedForward | None:
    """Capture ``module`` (with our attention and plain linears); if that fails, log the reason and return None.

    ``fingerprint``: of the model, for which it is remembered that the captured forward computes as the module does;
    None: it is compared now.

    The module computes as before unless its pages are known (:func:`memserve.model.loading.pages.pages_of`): then
    only if None is returned. :func:`release_weights` frees what the captured forward does not need.
    """
    pages = pages_of(module)
    known = None if fingerprint is None else record_name("capture", fingerprint, str(module.dtype))
    try:
        forward, vocab = EagerForward(module, pack=False), module.config.get_text_config().vocab_size
        device = next(module.parameters()).device
        is_known = known is not None and read_record(known).get("computes_alike") is True
        trials = [_inputs(*sizes, vocab, device, first_position=3) for sizes in (() if is_known else _TRIALS)]
        with pages.one_layer_at_a_time(module):
            graph = _record_graph(forward, vocab, device, states_of(module))  # its values do not matter
            with stored_of(module).computing_as_stored():
                expected = _expected(forward, trials)
        copy_expansions(module, stored_of(module))
        captured = _captured(graph, module.dtype, pages, stored_of(module), states_of(module).geometry)
        for trial, logits in zip(trials, expected, strict=True):
            captured.compare(trial, logits, _limit(module, len(logits)))
        if known is not None and trials:
            write_record(known, {"computes_alike": True})
        if device.type == "cuda":
            captured.choose_kernels()
    except Exception as error:  # whatever fails here, the module itself still works
        log.warning("the model's forward is not captured, it runs module by module: %s", error)
        pages.restore_dropped()
        return None
    return captured


def _captured(
    graph: fx.Graph,
    dtype: torch.dtype,
    pages: WeightPages,
    stored: StoredWeights = NOT_STORED,
    states: StateGeometry = NO_STATE,
) -> CapturedForward:
    """What runs ``graph``, a recording; where it has adapters in it, with a graph without them for steps without them.
    Both have the same weights. ``pages``: of the module's weights, which are dropped."""
    plain = without_adapters(graph)
    graphs = [graph] if plain is None else [graph, plain]
    recorded = [node for variant in graphs for node in variant.nodes]
    packs: Packs = {}
    owned: dict[int, Tensor] = {}
    for variant in graphs:
        optimise(variant, packs, pages, stored)
    for variant in graphs:
        _own_constants(variant, owned, pages)
    captured = CapturedForward(graph, dtype, states=states)
    if plain is not None:
        captured = CapturedForward(plain, dtype, captured, states)
    _forget_values(recorded)
    return captured


def optimise(graph: fx.Graph, packs: Packs, pages: WeightPages = NO_PAGES, stored: StoredWeights = NOT_STORED) -> None:
    """Run all graph passes, in order. In a graph that mutates values, only linears are packed; ``packs``: those of
    other graphs of the module; ``pages``: of its weights, which are dropped as they are packed;
    ``stored``: those that stay quantised."""
    drop_writes(graph)
    if not has_mutation(graph):
        simplify(graph)
        move_views(graph)
        match_rms_norms(graph)
        match_rotary(graph)
        match_gates(graph)
        if not _is_on_gpu(graph):
            match_products(graph)
            unflatten_rows(graph)
        match_residuals(graph)
    normalise_linears(graph)
    widen_logits(graph)
    pack_linears(graph, packs, pages, stored)
    pack_expert_layers(graph, packs, pages, stored)
    share_tied_embedding(graph)
    keep_stored_embeddings(graph, packs, stored)
    if _is_on_gpu(graph):
        use_gpu_kernels(graph)
    graph.lint()


def _is_on_gpu(graph: fx.Graph) -> bool:
    values = (node.meta["value"] for node in graph.nodes if node.op == "get_attr")
    return any(value.is_cuda for value in values)


def use_gpu_kernels(graph: fx.Graph) -> None:
    """Let fused operations run on the GPU."""
    from memserve.model.gpu.linears import OPERATIONS  # needs triton

    for node in graph.nodes:
        node.target = OPERATIONS.get(node.target, node.target) if node.op == "call_function" else node.target


def _native_step(graph: fx.Graph, dtype: torch.dtype) -> NativeStep | None:
    """The graph for few tokens; None when it mutates values or holds nothing native."""
    if has_mutation(graph):
        return None
    lowered = Lowering(graph, _SIZES[0], dtype).classify_nodes()
    return NativeStep(graph, lowered, ROWS_NATIVE_MAX) if lowered.ops else None


def _own_constants(graph: fx.Graph, owned: dict[int, Tensor], pages: WeightPages) -> None:
    """Copy what is left of the module's weights (embeddings, norms): a captured forward shares no storage with it.

    The weights may be mapped from their file, and the whole file stays resident while one tensor refers to it.
    ``owned``: what was copied for another graph of the module, by the originals' addresses.
    """
    for node in graph.nodes:
        if node.op == "get_attr":
            value = node.meta["value"]
            if id(value) not in owned:
                owned[id(value)] = value.detach() if value.is_cuda else value.detach().clone()
                if pages.is_mapped(value):
                    pages.release_values(value)
            node.meta["value"] = owned[id(value)]


def release_weights(module: Any) -> None:
    """Free all weights of ``module`` once a captured forward replaces it; it cannot compute afterwards."""
    own_expansions(module, stored_of(module))
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    pages_of(module).stop_tracking()


def _inputs(tokens: int, rows: int, vocab: int, device: torch.device | None = None, first_position: int = 0) -> Inputs:
    """Tokens without a pattern, positions from ``first_position`` on, the last ``rows`` rows."""
    places = torch.arange(tokens, device=device)
    return {
        "input_ids": (places + 1) * 7919 % vocab,
        "positions": places + first_position,
        "logits_rows": places[tokens - rows :].clone(),
    }


def _record_graph(forward: Callable[..., Tensor], vocab: int, device: torch.device, layers: StateLayers) -> fx.Graph:
    states = RecordedStates(layers) if layers else None
    traces = [record(forward, _inputs(tokens, rows, vocab, device), states) for tokens, rows in _SIZES]
    (tokens, rows), (other_tokens, other_rows) = _SIZES
    ids, _, row_ids = traces[0].inputs
    graph = generalise(traces[0], traces[1], {(tokens, other_tokens): (ids, 0), (rows, other_rows): (row_ids, 0)})
    _forget_values(traces[1].graph.nodes)
    return graph


def _forget_values(nodes: Iterable[fx.Node]) -> None:
    """Free what the recording computed (tens of megabytes): nodes outlive their graph in caches of torch.fx."""
    for node in nodes:
        node.meta.clear()


def _logits(forward: Callable[..., Tensor], inputs: Inputs, states: StateGeometry = NO_STATE) -> Tensor:
    slot = LoneSlot(states).passed_on(len(inputs["input_ids"])) if states else nullcontext()
    with step_attention(DenseAttention()), slot:
        return forward(**inputs)


def _expected(forward: Callable[..., Tensor], trials: list[Inputs]) -> list[Tensor]:
    """The logits of each trial. All trials are beginnings of the last one, so the module runs once."""
    if not trials:
        return []
    rows = torch.cat([trial["logits_rows"] for trial in trials])
    logits = _logits(forward, trials[-1] | {"logits_rows": rows})
    return list(logits.split_with_sizes([len(trial["logits_rows"]) for trial in trials]))


def _limit(module: Any, rows: int) -> float:
    """How much the logits of ``rows`` rows may differ, of their spread."""
    few_times = _FEW_ROWS_TIMES if rows <= _FEW_ROWS and module.dtype != torch.float32 else 1.0
    return _TOLERANCE[module.dtype] * few_times * (_QUANTISED_TIMES if is_quantised(module) else 1.0)


def _compare(logits: Tensor, expected: Tensor, limit: float) -> None:
    error = float((logits - expected).square().mean().sqrt() / expected.std())
    if logits.shape != expected.shape or not error <= limit:
        raise CaptureRefused(f"the captured forward differs by {error:.2g} of the logits' spread at {len(logits)} rows")
