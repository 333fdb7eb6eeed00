"""``--layerwise auto`` in a whole engine: prompts that wait for memory otherwise, and the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from geometries import SHAPES
from memserve import LLM
from memserve.base.errors import UserError
from memserve.base.types import SamplingParams
from memserve.instance.layerwise.state import LayerReport
from tiny_models import prompt, save_folder

SHAPE = SHAPES["mqa"]
OPTIONS = {"dtype": "float32", "threads": 1, "block_tokens": 8, "max_step_tokens": 16, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(SHAPE.module(), Path(tmp_path_factory.mktemp("models")) / "tiny"))


def answers(model: str, **options: object) -> tuple[list[tuple[int, ...]], LayerReport]:
    """Greedy tokens of ten prompts at once, and what became of their KV by layer."""
    with LLM(model, **OPTIONS, **options) as llm, ThreadPoolExecutor(10) as pool:
        greedy = SamplingParams(temperature=0)
        asked = [
            pool.submit(llm.generate, [[int(token) for token in prompt(150 + 7 * at, at)]], greedy, max_tokens=30)
            for at in range(10)
        ]
        tokens = [tuple(future.result()[0].outputs[0].tokens) for future in asked]
        return tokens, llm._engine.stats().instance.layers


def test_prompts_that_do_not_fit_begin_all_the_same(model: str) -> None:
    block_bytes = 8 * SHAPE.in_dtype("float32").token_bytes
    expected, unused = answers(model, kv_memory=f"{400 * block_bytes}B")
    little = {"kv_memory": f"{64 * block_bytes}B", "dram_memory": f"{400 * block_bytes}B"}
    tokens, layers = answers(model, **little, layerwise="static-1")
    assert tokens == expected
    by_layer = layers.begun + layers.converted  # which of both depends on the order in which prompts arrive
    assert by_layer and layers.link.down_bytes >= by_layer * block_bytes
    assert layers.sequences == layers.parked == layers.dram_pages == 0, "all have ended"
    assert layers.link.busy_ns > 0 and 0 <= layers.link.hidden_share <= 1
    assert unused == LayerReport()


def test_without_dram_there_is_nowhere_to_lie(model: str) -> None:
    with pytest.raises(UserError, match="--dram-memory 2GiB"):
        LLM(model, **OPTIONS, layerwise="auto")
    with pytest.raises(UserError, match="off or auto"):
        LLM(model, **OPTIONS, layerwise="sometimes")
