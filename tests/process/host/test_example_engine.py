"""``examples/layerwise_handover.py``: its answers are those of one model alone, and each layer travels by itself."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from memserve.host.pool_peer import PoolPeer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "layerwise_handover.py"
LINES_MAX = 60


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("layerwise_handover", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model(example: types.ModuleType) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(example.SMALL).eval()


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LINES_MAX


@pytest.mark.parametrize("blocks", [1, 5])
def test_answer_of_two_engines_is_that_of_one(
    example: types.ModuleType, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = small_model(example), np.arange(7, 7 + blocks * example.BLOCK, dtype=np.int32)
    ids = torch.from_numpy(tokens)[None].long()
    alone = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    sent: list[tuple[int, int]] = []
    start_offer = PoolPeer._start_offer

    def watch(peer: PoolPeer, *arguments: Any) -> Any:
        sent.append(arguments[-1])
        return start_offer(peer, *arguments)

    monkeypatch.setattr(PoolPeer, "_start_offer", watch)
    assert example.hand_over(model, tokens, 9) == alone[0, len(tokens) :].tolist()
    assert sent == [(layer, layer + 1) for layer in range(example.LAYERS)]


def test_prompt_of_the_example_is_found_where_it_was_sent(example: types.ModuleType) -> None:
    """Each page holds what the model computed: keys, then values, of its layer."""
    model, tokens = small_model(example), np.arange(2 * example.BLOCK, dtype=np.int32)
    memory = {"secret": example.SECRET, "hbm_bytes": 8 * example.GEOMETRY.block_bytes}
    with (
        PoolPeer(example.GEOMETRY, name="a", **memory) as one,
        PoolPeer(example.GEOMETRY, name="b", **memory) as two,
        torch.inference_mode(),
    ):
        outgoing = example.Outgoing(one, tokens, one.connect(two.info()))
        model(torch.from_numpy(tokens)[None].long(), past_key_values=outgoing)
        assert outgoing.sent.result() and two.cached_tokens(tokens) == len(tokens)
        keys = outgoing.layers[2].keys[0, :, example.BLOCK :].numpy()
        page = two.view(two.match(tokens)[1])[2].view(np.float32).reshape(example.PAGE)
        assert np.array_equal(page[0], keys)
