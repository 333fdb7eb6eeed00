"""``bench/rivals.py``: taking turns, medians, ratios, and what happens where a rival is not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from places import ROOT

BENCH = ROOT / "bench"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rivals() -> types.ModuleType:
    return load("rivals")


class Counting:
    """An engine that only writes down what it was asked for. A second a token, by a clock of its own: nothing that it
    does takes time."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # prompts, tokens of the first one, tokens to generate
        self.time_s = 0.0

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        self.calls.append((len(prompts), len(prompts[0]), tokens))
        self.time_s += tokens


def test_measurements_have_the_shapes_of_the_table(rivals: types.ModuleType) -> None:
    engines = load("rival_engines")
    counting = type("Engine", (Counting, engines.Engine), {})()
    engines.CLOCK[0] = lambda: counting.time_s
    answer = engines.measure(counting, {**rivals.SHAPES["prefill 2048"], "seed": 1})
    assert set(answer) == {"prefill_tok_s", "ttft_cold_ms", "ttft_warm_ms"}
    assert counting.calls == [(1, 2048, 1), (1, 2048, 1)]

    counting.calls.clear()
    rate = engines.measure(counting, {**rivals.SHAPES["decode, batch 8"], "seed": 1})
    assert rate == {"decode_tok_s": 8.0}
    assert counting.calls == [(8, 128, 1), (8, 128, 1), (8, 128, 65)]


def test_engine_not_installed_is_skipped_with_reason(rivals: types.ModuleType, tmp_path: Path) -> None:
    bare = rivals.Engine("llama.cpp", "llamacpp", sys.executable, {"model": "absent.gguf", "dtype": "bfloat16"})
    ready, skipped = rivals.run([bare], [], 1, tmp_path)
    bare.end()
    assert ready == []
    name, _, reason = skipped[0].partition(": ")
    assert name == "llama.cpp" and "Error" in reason


def test_table_shows_medians_and_ratios(rivals: types.ModuleType) -> None:
    mine = rivals.Engine("memserve", "memserve", "", {}, once={"version": "1", "startup_s": 2.0})
    rival = rivals.Engine("rival", "vllm", "", {}, once={"version": "2", "startup_s": 5.0})
    mine.samples["decode, batch 1", "decode_tok_s"] = [90.0, 100.0, 500.0]
    rival.samples["decode, batch 1", "decode_tok_s"] = [50.0]
    table = rivals.table([mine, rival])
    assert "| decode, batch 1 [tok/s] | 100 | 50.0 (2.00x) |" in table
    assert "| start-up [s] | 2.0 | 5.0 (2.50x) |" in table, "less is better: the ratio is turned round"
    assert "prefill" not in table, "nothing was measured, so nothing is shown"
