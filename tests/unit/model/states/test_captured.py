"""Layers with states as operations of a captured forward, beside the modules that they stand for."""

from __future__ import annotations

import ctypes
import inspect
import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memserve.instance.events import StepPlan, TakeSnapshot
from memserve.model.attention.backends import choose_backend
from memserve.model.attention.context import OrderedAttention, StepRows, step_attention
from memserve.model.capture.forward import CapturedForward, best_forward, capture_forward
from memserve.model.forward import EagerForward
from memserve.model.loading.probe import DenseAttention, probe_model
from memserve.model.states import recurrence
from memserve.model.states.layers import states_of, step_states
from memserve.model.states.memory import RaggedStates, SlotStates
from tiny_models import STATEFUL, VOCAB, tiny_module

ONE_BY_ONE = ("jamba", "mamba")
"""Mamba's first version: its layers run as they are."""
RECOGNISED = [family for family in STATEFUL if family not in ONE_BY_ONE]
SLOTS, BLOCKS, BLOCK = 4, 5, 32


class Lives:
    """Sequences in slots of their own, in steps that are the same for every forward."""

    def __init__(self, family: str, *, captured: bool) -> None:
        module = tiny_module(family)
        self.geometry, layers = probe_model(module, "float32", BLOCK)
        self.states = states_of(module).geometry
        self.forward = best_forward(module) if captured else EagerForward(module)
        assert isinstance(self.forward, CapturedForward) == captured
        self.arena = torch.zeros(SLOTS * BLOCKS * self.geometry.block_bytes, dtype=torch.uint8)
        self.attention = choose_backend(self.arena, self.geometry) if layers else None
        self.tables = np.arange(SLOTS * BLOCKS, dtype=np.int32).reshape(SLOTS, BLOCKS)
        self.pages = torch.zeros((8, self.states.nbytes), dtype=torch.uint8)
        self.memory = SlotStates(self.states, SLOTS, self.pages)
        self.memory.tokens[:] = 0

    def step(
        self, rows: dict[int, int], snapshots: tuple[tuple[int, int, int], ...] = (), late: tuple[int, ...] = ()
    ) -> Tensor:
        """``rows``: tokens by slot. ``snapshots``: slot, tokens and page. -> logits of the last token of each."""
        slots, counts = np.array(list(rows), np.int64), np.array(list(rows.values()), np.int64)
        starts, ends = self.memory.tokens[slots].copy(), np.cumsum(counts)
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        owners = np.repeat(slots, counts)
        plan = StepPlan(0, snapshots=[TakeSnapshot(slot, tokens, [page]) for slot, tokens, page in snapshots])
        states = RaggedStates(self.memory, plan, (slots, starts, counts), late)
        attention: Any = None
        if self.attention is not None:
            q_starts, contexts = np.concatenate([[0], ends]).astype(np.int32), (starts + counts).astype(np.int32)
            rows_of = StepRows(self.tables, slots.astype(np.int32), q_starts, contexts)
            attention = OrderedAttention(self.attention(rows_of))
        ids = torch.as_tensor((positions * 37 + owners * 11) % VOCAB)
        with step_attention(attention), step_states(states):
            logits: Tensor = self.forward(ids, torch.as_tensor(positions), torch.as_tensor(ends - 1))
        states.finish()
        return logits.clone()

    def run(self) -> list[Tensor]:
        """Prompts, chunks and single tokens; snapshots inside of rows and behind them; a row whose draw was late."""
        results = [
            self.step({0: 45, 2: 1, 1: 7}, snapshots=((0, 32, 0), (0, 40, 1), (1, 7, 2))),
            self.step({0: 1, 1: 70, 2: 1}, snapshots=((1, 64, 3), (0, 46, 4))),
            self.step({2: 1, 0: 1, 1: 1}),
            self.step({3: 3}),
            self.step({3: 1, 0: 1, 1: 5, 2: 1}, snapshots=((2, 4, 5),), late=(0, 1)),
            self.step({0: 1, 3: 1, 1: 2}),
        ]
        assert self.memory.tokens.tolist() == [48, 80, 4, 5]
        used = self.pages[:6]
        parts = torch.cat([used, torch.stack([self.memory.of_slot(slot) for slot in range(SLOTS)])])
        values = [part.float().flatten() for part in _parts(parts, self.states)]
        return [*results, *values]


def _parts(states: Tensor, geometry: Any) -> list[Tensor]:
    pairs = zip(geometry.parts, geometry.offsets, strict=False)
    return [states[:, at : at + part.nbytes].view(getattr(torch, part.dtype)) for part, at in pairs]


@pytest.mark.parametrize("family", RECOGNISED)
def test_steps_leave_what_the_modules_leave(family: str) -> None:
    """Logits, the states of all slots, and every snapshot."""
    for got, want in zip(*(Lives(family, captured=captured).run() for captured in (True, False)), strict=True):
        assert float((got - want).abs().max()) <= 2e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("family", RECOGNISED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_captured(family: str, dtype: str) -> None:
    """The comparison at load has passed then: in one piece and in several."""
    module = tiny_module(family).to(getattr(torch, dtype))
    probe_model(module, dtype, BLOCK)
    assert capture_forward(module) is not None


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_what_is_not_recognised_runs_as_it_is(family: str, caplog: pytest.LogCaptureFixture) -> None:
    module = tiny_module(family)
    probe_model(module, "float32", BLOCK)
    with caplog.at_level(logging.WARNING):
        assert isinstance(best_forward(module), EagerForward)
    assert "not captured" in caplog.text and "a state that no operation has made" in caplog.text


@pytest.mark.parametrize("kind", ["convolve", "delta_rule"])
def test_wrong_operations_are_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lose the state before a piece cost speed, not tokens: one piece alone would not show it."""
    right = getattr(recurrence._kernels, kind)

    def forget(*arguments: Any) -> None:
        pieces, count = arguments[-4:-2]
        table = np.ctypeslib.as_array((ctypes.c_int64 * (5 * count)).from_address(pieces))
        kept, table[2::5] = table[2::5].copy(), 0
        right(*arguments)
        table[2::5] = kept

    monkeypatch.setattr(recurrence._kernels, kind, forget)
    module = tiny_module("qwen3_5")
    probe_model(module, "float32", BLOCK)
    assert capture_forward(module) is None


def test_a_short_convolution_leaves_nothing_to_torch() -> None:
    """Between linears of LFM2 there are a convolution over states, attention, and what runs natively."""
    module = tiny_module("lfm2")
    probe_model(module, "bfloat16", BLOCK)
    captured = capture_forward(module)
    assert captured is not None and captured.native is not None
    body = captured.native.source.split("run(", 1)[1]
    assert body.count("arg") == 2 and body.count("attend = op") == 1  # two layers' convolutions, one of attention
    assert not any(word in body for word in ("mul", "transpose", "chunk", "linear"))


def test_other_threads_compute_as_ever_during_a_recording() -> None:
    """The functions that stand in for a class's own are those of the recording's thread alone."""
    module = tiny_module("qwen3_5")
    probe_model(module, "float32", BLOCK)
    layer, ids = states_of(module).layers[0].module, torch.arange(9)[None]
    names, results = inspect.unwrap(type(layer).forward).__globals__, list[Tensor]()
    original = names["causal_conv1d_fn"]

    def compute() -> None:
        with torch.inference_mode(), step_attention(DenseAttention()):
            results.append(module(input_ids=ids, position_ids=ids, use_cache=False).logits)

    compute()
    with recurrence._stand_ins(layer, SimpleNamespace()):
        assert names["causal_conv1d_fn"] is not original
        other = threading.Thread(target=compute)
        other.start()
        other.join()
    assert names["causal_conv1d_fn"] is original
    assert len(results) == 2 and torch.equal(*results)
