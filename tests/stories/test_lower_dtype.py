"""``--kv-dtype`` and ``--kv-lower-dtype`` in a whole engine: swap, prefixes in DRAM, KV by layer, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memserve import LLM
from memserve.base.errors import UserError
from memserve.base.kv_layout import lower_block_bytes
from memserve.base.types import KV_DTYPES, KVGeometry
from memserve.instance.stats import InstanceStats
from tiny_models import prompt, save_folder, tiny_module

LOWER = ("int8", "fp8", "int4")
BLOCK_BYTES = 3 * 2 * 8 * 16 * 4  # layers, heads, tokens, K and V of 8, float32
KV = KVGeometry(3, 2, 8, 8, "float32", 8)
LOWER_BLOCK_BYTES = {lower: lower_block_bytes(KV, lower) for lower in KV_DTYPES}
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "block_tokens": 8}
PROMPTS = [prompt(100 + 8 * at, at).tolist() for at in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tiny_module("llama"), Path(tmp_path_factory.mktemp("models")) / "tiny"))


def engine(model: str, blocks: int, lower: str, **options: Any) -> LLM:
    return LLM(
        model, kv_memory=blocks * BLOCK_BYTES, dram_memory=400 * BLOCK_BYTES, kv_lower_dtype=lower, **OPTIONS, **options
    )


def stats_of(llm: LLM) -> InstanceStats:
    found = llm.stats().instance
    assert found is not None
    return found


def first_logprobs(llm: LLM) -> list[float]:
    """Of the first token of each prompt, one after the other."""
    return [llm.generate([some], **GREEDY)[0].outputs[0].logprobs[0].logprob for some in PROMPTS]


@pytest.mark.parametrize("lower", LOWER)
def test_lower_dtype_prefix_is_close_and_does_not_drift(model: str, lower: str) -> None:
    """HBM holds one prompt: each of the next rounds finds all of them in DRAM, and sends them there again."""
    with engine(model, 24, lower) as llm:
        rounds = [first_logprobs(llm) for _ in range(4)]
        stats = stats_of(llm)
    assert stats.dram_tokens_reused > 3 * 90 * len(PROMPTS)
    assert stats.dram.block_bytes == LOWER_BLOCK_BYTES[lower] and stats.hbm.block_bytes == BLOCK_BYTES
    assert stats.dram.blocks_total == 400 * BLOCK_BYTES // LOWER_BLOCK_BYTES[lower]
    off = [abs(a - b) for a, b in zip(rounds[0], rounds[1], strict=True)]
    assert 0 < max(off) < {"int8": 0.2, "fp8": 1.0, "int4": 3.0}[lower], "rounded, and not wrong"
    assert rounds[1] == rounds[2] == rounds[3]


@pytest.fixture(scope="module")
def never_swapped(model: str) -> list[list[int]]:
    """Answers of 60 tokens where there is room for all."""
    with engine(model, 400, "auto", enable_prefix_caching=False) as llm:
        return [answer.outputs[0].tokens for answer in llm.generate(PROMPTS, **{**GREEDY, "max_tokens": 60})]


@pytest.mark.parametrize("lower", ["auto", *LOWER])
def test_sequences_are_swapped_out_and_in(model: str, lower: str, never_swapped: list[list[int]]) -> None:
    with engine(model, 40, lower, preemption="swap", enable_prefix_caching=False) as llm:
        answers = llm.generate(PROMPTS, **{**GREEDY, "max_tokens": 60})
        stats = stats_of(llm)
    assert stats.preemptions_swap and not stats.preemptions_recompute
    assert stats.dram.blocks_free == stats.dram.blocks_total
    assert all(len(answer.outputs[0].tokens) == 60 for answer in answers)
    same = sum(answer.outputs[0].tokens == tokens for answer, tokens in zip(answers, never_swapped, strict=True))
    assert same >= 1, "those that were not swapped out"
    if lower == "auto":
        assert same == len(PROMPTS)


@pytest.mark.parametrize("lower", ["auto", *LOWER])
def test_layerwise_transfers_use_the_dram_dtype(model: str, lower: str) -> None:
    # Of each prompt without room one layer stays, however fast the machine is; `auto` goes by what it measures.
    by_layer = {"layerwise": "static-1", "max_step_tokens": 16, "enable_prefix_caching": False}
    with engine(model, 64, lower, **by_layer) as llm:
        answers = llm.generate([prompt(150 + 7 * at, at).tolist() for at in range(10)], **{**GREEDY, "max_tokens": 30})
        layers = stats_of(llm).layers
    assert all(len(answer.outputs[0].tokens) == 30 for answer in answers)
    assert layers.begun + layers.converted and layers.sequences == layers.parked == layers.dram_pages == 0
    page_bytes = LOWER_BLOCK_BYTES[lower] // 3
    crossed = layers.link.down_bytes, layers.link.up_bytes
    assert min(crossed) > 0 and [nbytes % page_bytes for nbytes in crossed] == [0, 0]


WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"max_step_tokens": 24}, "alone": {"max_running": 1},
    "swapped": {"blocks": 24, "preemption": "swap", "enable_prefix_caching": False},
    "computed again": {"blocks": 24, "preemption": "recompute", "enable_prefix_caching": False},
    "out of DRAM": {"blocks": 12},
    "by layer": {"blocks": 32, "layerwise": "static-1", "max_step_tokens": 16, "enable_prefix_caching": False},
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", LOWER)
def test_coded_kv_answers_alike_whatever_way_it_takes(model: str, kv_dtype: str) -> None:
    """Cold and warm, in chunks, preempted, down in DRAM and back: nothing is rounded again."""
    block_bytes = replace(KV, block_tokens=16, kv_dtype=kv_dtype).block_bytes
    asked = {**GREEDY, "max_tokens": 40}

    def answers(llm: LLM) -> list[list[int]]:
        return [answer.outputs[0].tokens for answer in llm.generate(PROMPTS, **asked)]

    def coded(blocks: int = 400, **options: Any) -> LLM:
        memory = {"kv_memory": blocks * block_bytes, "dram_memory": 400 * block_bytes}
        return LLM(model, dtype="float32", threads=1, block_tokens=16, kv_dtype=kv_dtype, **memory, **options)

    with coded() as llm:
        expected = answers(llm)
        assert answers(llm) == expected and stats_of(llm).cached_tokens
        assert stats_of(llm).hbm.block_bytes == stats_of(llm).dram.block_bytes == block_bytes
        with pytest.raises(UserError, match=rf"rounded to {kv_dtype} here .--kv-dtype.*leave out exact"):
            llm.generate([PROMPTS[0]], exact=True, max_tokens=1)
    used = {}
    for way, options in WAYS.items():
        with coded(**options) as llm:
            assert [answers(llm) for _ in range(2)] == [expected] * 2, way
            used[way] = stats_of(llm)
    assert used["swapped"].preemptions_swap and used["computed again"].preemptions_recompute
    assert used["out of DRAM"].dram_tokens_reused and used["by layer"].layers.link.down_bytes


def test_exact_is_refused_where_kv_may_be_rounded(model: str) -> None:
    with engine(model, 40, "int8") as llm:
        with pytest.raises(UserError, match=r"rounded to int8 here .--kv-lower-dtype.*leave out exact"):
            llm.generate([PROMPTS[0]], exact=True, max_tokens=1)
        assert llm.generate([PROMPTS[0]], exact=False, max_tokens=1)
    with engine(model, 40, "auto") as llm:
        assert llm.generate([PROMPTS[0]], exact=True, max_tokens=1)
