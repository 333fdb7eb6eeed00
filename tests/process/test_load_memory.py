"""``bench/load_memory.py`` with a smaller model: a start holds the weights once, the first one and later ones."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from places import ROOT

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 4096, "vocab_size": 32000,
}  # fmt: skip
"""0.43 GB in bfloat16: twice that is more than the bound, 1.15 times the weights and 0.7 GB."""
KV = {"kv_memory": "16MiB", "max_model_len": 512}


@pytest.fixture(scope="module")
def bench() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("load_memory", ROOT / "bench" / "load_memory.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["load_memory"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(bench: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.write_random_model(tmp_path_factory.mktemp("large") / "large", SIZES)


def test_each_start_holds_the_weights_once(bench: types.ModuleType, model: Path, tmp_path: Path) -> None:
    weights = bench.weights_bytes(str(model))
    bound = bench.bound_bytes(weights)
    assert bound < 2 * weights + 400_000_000, "a start that holds them twice would pass"
    starts = [bench.measure_start(str(model), tmp_path / "cache", dtype="bfloat16", **KV) for _ in range(2)]
    assert [start.peak_bytes <= bound for start in starts] == [True, True], (bound, starts)
    assert starts[0].answer == starts[1].answer


def test_a_conversion_does_not_hold_the_model(bench: types.ModuleType, model: Path, tmp_path: Path) -> None:
    """In float32, as it is read, the model would take 0.86 GB."""
    path = bench.write_gguf(model, SIZES, tmp_path / "large.gguf")
    start = bench.measure_start(str(path), tmp_path / "cache", dtype="bfloat16", **KV)
    assert 0 < start.children_bytes <= 1_000_000_000, start
    assert start.peak_bytes <= bench.bound_bytes(bench.weights_bytes(str(path))), start
