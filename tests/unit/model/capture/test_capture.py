"""The captured forward against the module it came from, over several families, and the cases that are refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from captured_families import FAMILIES, VOCAB, tiny
from memserve.base.types import KVGeometry
from memserve.model.attention.context import StepRows, step_attention
from memserve.model.attention.latents import choose_attention
from memserve.model.capture import forward as capture
from memserve.model.capture import operations as fused
from memserve.model.capture.forward import capture_forward, release_weights
from memserve.model.forward import EagerForward
from memserve.model.loading.probe import DenseAttention


class Steps:
    """A paged arena of its own and ragged steps over it: the same steps for every forward that is compared."""

    def __init__(self, module: Any, dtype: str) -> None:
        attention = DenseAttention()
        ids = torch.arange(3)
        with torch.inference_mode(), step_attention(attention):
            module(input_ids=ids[None], position_ids=ids[None], use_cache=False)
        first = attention.layers[0]
        self.geometry = KVGeometry(len(attention.layers), first.kv_heads, first.head_dim_k, first.head_dim_v, dtype, 32)
        self.blocks = 12
        self.tables = np.arange(self.blocks, dtype=np.int32).reshape(3, 4)[:, ::-1].copy()

    def run(self, forward: Any) -> list[torch.Tensor]:
        """Three sequences: prompts of 5, 40 and 1 tokens, then a decode, a chunk of 9 and a decode, then decodes."""
        arena = torch.zeros(self.blocks * self.geometry.block_bytes, dtype=torch.uint8)
        attention = choose_attention(arena, self.geometry)
        contexts, results = np.zeros(3, dtype=np.int32), []
        for step, counts in enumerate(([5, 40, 1], [1, 9, 1], [1, 1, 1])):
            contexts = contexts + np.array(counts, dtype=np.int32)
            starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            positions = np.concatenate([np.arange(e - n, e) for e, n in zip(contexts, counts, strict=True)])
            ids = torch.arange(len(positions)) * 37 % VOCAB + step
            with step_attention(attention(StepRows(self.tables, np.arange(3, dtype=np.int32), starts, contexts))):
                results.append(forward(ids, torch.as_tensor(positions), torch.as_tensor(starts[1:] - 1).long()))
        return results


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_equals_module(family: str) -> None:
    """Ragged batches with context, float32: prompts, chunks and decodes give the logits of the module."""
    module = tiny(family)
    steps = Steps(module, "float32")
    expected = steps.run(EagerForward(module, pack=False))
    captured = capture_forward(module)
    assert captured is not None
    release_weights(module)
    for got, want in zip(steps.run(captured), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_bfloat16_stays_within_rounding(family: str) -> None:
    """Fused operations round less often than the ones they replace, so bfloat16 differs, by rounding only."""
    module = tiny(family, torch.bfloat16)
    steps = Steps(module, "bfloat16")
    expected = steps.run(EagerForward(module, pack=False))
    captured = capture_forward(module)
    assert captured is not None
    for got, want in zip(steps.run(captured), expected, strict=True):
        assert float((got - want).square().mean().sqrt() / want.std()) < 0.05


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("tokens", [5, 150])
def test_logits_are_not_rounded_to_bfloat16(family: str, tokens: int) -> None:
    """Few and many rows, captured and module by module, with a soft cap behind the head (gemma2) and without."""
    captured = capture_forward(tiny(family, torch.bfloat16))
    assert captured is not None
    ids = torch.arange(tokens)
    for forward in (captured, EagerForward(tiny(family, torch.bfloat16))):
        with step_attention(DenseAttention()):
            logits = forward(ids % VOCAB, ids, ids)
        assert logits.dtype == torch.float32
        assert float((logits == logits.bfloat16()).float().mean()) < 0.1


def test_llama_layer_is_ten_operations() -> None:
    """What the passes are for: nothing of a Llama layer but attention is left to torch when there are few tokens."""
    captured = capture_forward(tiny("llama"))
    assert captured is not None and captured.native is not None
    layers, per_layer = 2, 9  # norm, qkv, rotary of q and of k, o, norm, gate and up, their product, down
    assert captured.native.operations == layers * per_layer + 2  # the last norm, the head
    body = captured.native.source.split("run(", 1)[1]
    assert body.count("attend") and "linear" not in body and "mul" not in body


def test_fused_operations_are_found_in_families_that_have_them() -> None:
    counts = {}
    for family in ("llama", "qwen3", "gemma2", "gpt_neox", "opt"):
        captured = capture_forward(tiny(family))
        assert captured is not None and captured.native is not None
        counts[family] = captured.native.operations
    # qwen3: two more norms a layer; gemma2: two more norms a layer; the last two have layer norms and plain MLPs
    assert counts["qwen3"] == counts["llama"] + 4
    assert counts["gemma2"] == counts["llama"] + 4
    assert counts["gpt_neox"] >= 2 * 4 + 1
    assert counts["opt"] >= 2 * 4 + 1


def test_sizes_at_the_edge_of_the_native_step() -> None:
    """No logits rows, one token, the largest native step, and one token more."""
    module = tiny("llama")
    captured = capture_forward(module)
    assert captured is not None and captured.native is not None
    limit = captured.native.rows_max
    eager = EagerForward(module, pack=False)
    for tokens, rows in ((1, 0), (1, 1), (limit, 3), (limit + 1, 3), (limit, limit)):
        inputs = capture._inputs(tokens, rows, VOCAB)
        got, want = capture._logits(captured, inputs), capture._logits(eager, inputs)
        assert got.shape == (rows, VOCAB)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_results_of_one_step_survive_the_next() -> None:
    """Native values lie in a workspace that the next step overwrites: logits must not."""
    captured = capture_forward(tiny("llama"))
    first = capture._logits(captured, capture._inputs(4, 4, VOCAB))
    kept = first.clone()
    capture._logits(captured, capture._inputs(9, 5, VOCAB))
    assert torch.equal(first, kept)


def test_released_module_holds_nothing() -> None:
    """The captured forward shares no storage with the module; weights may be mapped from a file."""
    module = tiny("qwen2")
    captured = capture_forward(module)
    assert captured is not None
    inputs = capture._inputs(5, 2, VOCAB)
    before = capture._logits(captured, inputs)
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))
    release_weights(module)
    assert sum(parameter.numel() for parameter in module.parameters()) == 0
    assert torch.equal(capture._logits(captured, inputs), before)


class _Wrapped:
    """A module with a forward that does something on the side."""

    def __init__(self, inner: Any, aside: Any) -> None:
        self._inner, self._aside = inner, aside
        self.config, self.dtype, self.parameters = inner.config, inner.dtype, inner.parameters
        self.modules = inner.modules

    def forward(self, input_ids: Any, position_ids: Any, use_cache: bool, logits_to_keep: Any) -> Any:
        out = self._inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        out.logits = self._aside(out.logits[:, logits_to_keep], input_ids)
        return out

    def __call__(self, **kwargs: Any) -> Any:
        return self.forward(**kwargs)


@pytest.mark.parametrize(
    ("aside", "reason"),
    [
        (lambda logits, ids: logits * (2 if bool((ids > 3).any()) else 1), "Python values"),
        (lambda logits, ids: logits if ids.shape[1] < 30 else logits + 0, "number of operations"),
        (lambda logits, ids: logits * (ids.shape[1] ** 2), "at one size"),
        (lambda logits, ids: logits + (ids.shape[1] if ids.shape[1] > 100 else 0.0), "differs by"),
    ],
)
def test_models_that_do_not_fit_one_graph_run_as_they_are(
    aside: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Branches on values, branches on sizes, sizes that do not scale, and branches that no recording saw."""
    with caplog.at_level(logging.WARNING):
        assert capture_forward(_Wrapped(tiny("llama"), aside)) is None
    lines = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert len(lines) == 1 and reason in lines[0]


def _scatter(logits: torch.Tensor, ids: Any) -> torch.Tensor:
    """As routers of experts do: into a mask, and by a sum in place."""
    mask = torch.zeros_like(logits)
    mask.scatter_(-1, logits.topk(3, dim=-1).indices, 1.0)
    chosen = logits.gather(-1, mask.topk(3, dim=-1).indices)
    chosen /= chosen.abs().sum(-1, keepdim=True) + 1e-3
    return logits * mask + chosen.sum(-1, keepdim=True)


def _write_through_views(logits: torch.Tensor, ids: Any) -> torch.Tensor:
    """As rotary embeddings with several axes do; what was read before, and through another view, is what it was."""
    axes = torch.stack([logits, logits * 2, logits * 3])
    before, first = axes.sum(0), axes[0]
    later = axes[..., 1:9]
    first[..., 1:90:3] = axes[1][..., 1:90:3]
    between = later * 1.0
    axes[0][..., 2:90:3] = axes[2, ..., 2:90:3]
    later.mul_(0.5).add_(1.0)
    copied = torch.empty_like(between).copy_(between)
    between *= 2
    return (
        axes.sum(0)
        + before * 3
        + first
        + torch.nn.functional.pad(between.sum(0) + later[1] + copied[2], (0, VOCAB - 8))
    )


@pytest.mark.parametrize(
    "aside", [lambda logits, ids: logits.clone().mul_(2.0).add_(logits), _scatter, _write_through_views]
)
def test_writes_in_place_become_values(aside: Any) -> None:
    """And the graph is rewritten like any other."""
    wrapped = _Wrapped(tiny("llama"), aside)
    captured = capture_forward(wrapped)
    assert captured is not None and captured.native is not None
    for sizes in ((6, 2), (150, 7)):
        inputs = capture._inputs(*sizes, VOCAB)
        expected = capture._logits(EagerForward(wrapped, pack=False), inputs)
        torch.testing.assert_close(capture._logits(captured, inputs), expected, rtol=1e-4, atol=1e-4)


_BUFFER = torch.zeros(VOCAB)
_FIRST = torch.randn((96, VOCAB), generator=torch.Generator().manual_seed(1))
_SECOND = torch.randn((VOCAB, 96), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "aside",
    [
        lambda logits, ids: (copy := logits.clone(), copy.split(100, -1)[0].mul_(2.0))[0] + 1.0,
        lambda logits, ids: logits + _BUFFER.copy_(torch.ones(VOCAB)),
        lambda logits, ids: logits.clone().copy_(logits[..., :1]),
    ],
    ids=["parts", "constant", "broadcast"],
)
def test_in_place_operations_are_left_in_their_order(aside: Any) -> None:
    """A graph with writes that are not understood is not rewritten, only its linears are packed."""
    wrapped = _Wrapped(tiny("llama"), aside)
    captured = capture_forward(wrapped)
    assert captured is not None and captured.native is None
    inputs = capture._inputs(6, 2, VOCAB)
    torch.testing.assert_close(
        capture._logits(captured, inputs), capture._logits(EagerForward(wrapped, pack=False), inputs)
    )


def test_a_linear_may_read_one_whose_weight_is_read_again() -> None:
    """The first is packed first, and goes before the second is looked at."""

    def aside(logits: Any, ids: Any) -> Any:
        firsts = (torch.nn.functional.linear(value, _FIRST) for value in (logits, logits.tanh()))
        seconds = [torch.nn.functional.linear(first, _SECOND) for first in firsts]
        return seconds[0] + seconds[1]

    wrapped = _Wrapped(tiny("llama"), aside)
    captured = capture_forward(wrapped)
    assert captured is not None
    inputs = capture._inputs(6, 2, VOCAB)
    expected = capture._logits(EagerForward(wrapped, pack=False), inputs)
    torch.testing.assert_close(capture._logits(captured, inputs), expected, rtol=1e-4, atol=1e-3)


def test_wrong_rewrites_are_caught(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The safety net: a pass that changes the result costs speed, not tokens."""
    right = fused.rms_norm
    monkeypatch.setattr(capture, "match_rotary", lambda graph: _break_eps(graph, right))
    with caplog.at_level(logging.WARNING):
        assert capture_forward(tiny("llama")) is None
    assert "differs by" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "rows", "share", "is_captured"),
    [
        (torch.bfloat16, 1, 0.15, True), (torch.bfloat16, 1, 0.3, False), (torch.bfloat16, 31, 0.15, False),
        (torch.float32, 1, 0.00015, False),
    ],
)  # fmt: skip
def test_rounding_of_a_lone_row_is_no_wrong_rewrite(
    dtype: torch.dtype, rows: int, share: float, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row, rounding to 16 bits makes up to twice as much, of the logits' spread, as may differ of many."""

    def rounded(forward: Any, trials: list[Any]) -> list[torch.Tensor]:
        expected = right(forward, trials)
        for at, logits in enumerate(expected):
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
            expected[at] = logits + noise / noise.square().mean().sqrt() * logits.std() * share * (len(logits) == rows)
        return expected

    right = capture._expected
    monkeypatch.setattr(capture, "_expected", rounded)
    assert (capture_forward(tiny("llama").to(dtype)) is not None) is is_captured


def _break_eps(graph: torch.fx.Graph, target: Any) -> None:
    for node in graph.nodes:
        if node.target is target:
            node.args = (*node.args[:2], 0.5, node.args[3])
