"""The study of snapshots: proportions of real models, and what each policy keeps."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Qwen3NextConfig

from memserve_lab.experiments.state_hits import (
    BLOCK_TOKENS,
    ENDS,
    EVERY_BLOCK,
    MARCONI,
    MARCONI_7B,
    OURS,
    QWEN3_NEXT,
    Asked,
    IntervalPolicy,
    LruPolicy,
    MarconiPolicy,
    arrivals,
    measure_point,
    replay,
    unlimited,
)
from memserve_lab.workloads.builtin import conversations
from memserve_lab.workloads.sessions import chat_workload


def chats(count: int = 40) -> list[Asked]:
    workload = chat_workload(conversations(3, count), source="built-in")
    return arrivals(workload, sessions_per_s=1.0, think_s=10.0, seed=3)


def test_proportions_are_those_of_transformers() -> None:
    config = Qwen3NextConfig()
    attends = config.layer_types.count("full_attention")
    assert (QWEN3_NEXT.attention_layers, QWEN3_NEXT.state_layers) == (attends, config.num_hidden_layers - attends)
    assert QWEN3_NEXT.kv_values == 2 * config.num_key_value_heads * config.head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = values * config.linear_key_head_dim * 4  # float32
    tail = (2 * keys + values) * config.linear_conv_kernel_dim * 2
    assert QWEN3_NEXT.state_bytes == state + tail
    assert (QWEN3_NEXT.token_bytes, QWEN3_NEXT.page_tokens) == (24_576, 1_056)


def test_turns_arrive_in_order_and_sessions_interleave() -> None:
    requests = chats(10)
    firsts = [number for number, asked in enumerate(requests) if len(asked.prompt) < 60]
    assert len(requests) > 20 and max(firsts) > len(firsts)
    for number, asked in enumerate(requests):
        before = [r for r in requests[:number] if np.array_equal(r.prompt[:8], asked.prompt[:8])]
        assert all(len(r.prompt) <= len(asked.prompt) for r in before)


@pytest.mark.parametrize("model", [QWEN3_NEXT, MARCONI_7B], ids=lambda model: model.name)
def test_nothing_hits_more_than_unlimited_memory(model) -> None:
    requests = chats()
    ceiling = unlimited(requests)
    much = 10**12
    every_block = replay(model, requests, much, IntervalPolicy(BLOCK_TOKENS))
    assert 0.995 * ceiling < every_block.rate <= ceiling  # a last block that is just full has none
    for policy in (None, LruPolicy(), MarconiPolicy(model, 1.0)):
        hits = replay(model, requests, much, policy)
        assert 0.9 * ceiling < hits.rate <= ceiling and not hits.skipped
        assert hits.taken < every_block.taken / 3


def test_with_little_memory_few_snapshots_hit_more() -> None:
    requests = chats(100)
    point = measure_point("chats", QWEN3_NEXT, requests, 2.0, unlimited(requests))
    assert point.times_every_block > 3
    assert point.hits[OURS].rate > point.hits[MARCONI].rate > point.hits[ENDS].rate > point.hits[EVERY_BLOCK].rate


def test_a_request_beyond_the_memory_is_counted_as_missed() -> None:
    long = Asked(np.arange(5000, dtype=np.int32), np.arange(3, dtype=np.int32))
    short = Asked(np.arange(100, dtype=np.int32), np.arange(3, dtype=np.int32))
    hits = replay(QWEN3_NEXT, [long, short, short], 100_000_000, None)
    assert (hits.skipped, hits.prompt_tokens, hits.cached_tokens) == (1, 5200, 96)
