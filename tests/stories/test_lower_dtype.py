"""``--kv-lower-dtype`` in a whole engine: swap, prefixes in DRAM, KV by layer, and what is told and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memserve import LLM
from memserve.base.errors import UserError
from memserve.instance.stats import InstanceStats
from tiny_models import prompt, save_folder, tiny_module

LOWER = ("int8", "fp8")
BLOCK_BYTES = 3 * 2 * 8 * 16 * 4  # layers, heads, tokens, K and V of 8, float32
LOWER_BLOCK_BYTES = 3 * 320  # of each layer 256 values of a byte, 4 scales, and zeros to a multiple of 64
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
    assert stats.dram.block_bytes == LOWER_BLOCK_BYTES and stats.hbm.block_bytes == BLOCK_BYTES
    assert stats.dram.blocks_total == 400 * BLOCK_BYTES // LOWER_BLOCK_BYTES
    off = [abs(a - b) for a, b in zip(rounds[0], rounds[1], strict=True)]
    assert 0 < max(off) < (0.2 if lower == "int8" else 1.0), "rounded, and not wrong"
    assert rounds[1] == rounds[2] == rounds[3]


@pytest.mark.parametrize("lower", ["auto", *LOWER])
def test_sequences_are_swapped_out_and_in(model: str, lower: str) -> None:
    with engine(model, 40, lower, preemption="swap", enable_prefix_caching=False) as llm:
        answers = llm.generate(PROMPTS, **{**GREEDY, "max_tokens": 60})
        stats = stats_of(llm)
    with engine(model, 400, "auto", enable_prefix_caching=False) as llm:
        expected = llm.generate(PROMPTS, **{**GREEDY, "max_tokens": 60})
    assert stats.preemptions_swap and not stats.preemptions_recompute
    assert stats.dram.blocks_free == stats.dram.blocks_total
    assert all(len(answer.outputs[0].tokens) == 60 for answer in answers)
    same = sum(a.outputs[0].tokens == b.outputs[0].tokens for a, b in zip(answers, expected, strict=True))
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
    page_bytes = (BLOCK_BYTES if lower == "auto" else LOWER_BLOCK_BYTES) // 3
    crossed = layers.link.down_bytes, layers.link.up_bytes
    assert min(crossed) > 0 and [nbytes % page_bytes for nbytes in crossed] == [0, 0]


def test_exact_is_refused_where_kv_may_be_rounded(model: str) -> None:
    with engine(model, 40, "int8") as llm:
        with pytest.raises(UserError, match=r"rounded to int8 here .--kv-lower-dtype.*leave out exact"):
            llm.generate([PROMPTS[0]], exact=True, max_tokens=1)
        assert llm.generate([PROMPTS[0]], exact=False, max_tokens=1)
    with engine(model, 40, "auto") as llm:
        assert llm.generate([PROMPTS[0]], exact=True, max_tokens=1)
