"""MemserveConnector in vLLM itself: its classes, its factory, and a whole engine on a tiny model."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine_world import flip_byte, options_of
from memserve.integrations.vllm import register
from served_store import ServedStore
from waiting import eventually

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: docs/guides/VLLM.md says how"),
    pytest.mark.timeout(600),
]

MODULE = "memserve.integrations.vllm"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


def connector_class() -> Any:
    from memserve.integrations.vllm import MemserveConnector

    return MemserveConnector


def transfer_of(store: ServedStore) -> dict[str, Any]:
    """As the guide has it."""
    return {
        "kv_connector": "MemserveConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": options_of(store),
    }  # fmt: skip


def test_methods_are_those_of_vllms_base() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

    kind = connector_class()
    assert not kind.__abstractmethods__ and supports_hma(kind)
    for name, mine in vars(kind).items():
        base = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or not inspect.isfunction(mine) or base is None:
            continue
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(base).parameters), name


def test_vllm_finds_it_by_path_and_by_name() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    by_path = KVTransferConfig(kv_connector="MemserveConnector", kv_role="kv_both", kv_connector_module_path=MODULE)
    by_name = KVTransferConfig(kv_connector="MemserveConnector", kv_role="kv_both")
    for config in (by_path, by_name):
        assert KVConnectorFactory.get_connector_class(config) is connector_class()


def test_messages_between_processes_are_serializable() -> None:
    from memserve.integrations.vllm.connector import MemserveHandshake, MemserveMetadata
    from memserve.integrations.vllm.lookups import RankNames
    from memserve.integrations.vllm.memory import BlockLayout
    from memserve.integrations.vllm.scheduler import KvLoad, Orders, Save
    from memserve.integrations.vllm.shared_kv import KvNames

    orders = Orders((KvLoad("r", (b"h",), (1,)),), (Save((b"i",), (2,)),))
    layout = BlockLayout((8,), b"digest")
    names = (RankNames(b"prefix", layout), RankNames(b"other", layout)), (KvNames(b"", layout),)
    for said in (MemserveMetadata((orders, orders)), MemserveHandshake(names)):
        assert pickle.loads(pickle.dumps(said)) == said


def saved_model(folder: Path, kind: str) -> str:
    """A tiny model with random weights, as a folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4,
    }  # fmt: skip
    if kind == "llama":
        made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **given))
    else:
        window = "sliding_attention"
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=6, head_dim=64, sliding_window=40, layer_types=[*[window] * 2, "full_attention"] * 2,
            query_pre_attn_scalar=64, **given,
        )  # fmt: skip
        made = transformers.Gemma3ForCausalLM(config)
    made.save_pretrained(folder)
    return str(folder)


def fail_loads(patched: pytest.MonkeyPatch) -> list[int]:
    """From now on one value of every second load is lost, and rubbish lies in its place; the losses."""
    import ctypes

    from memserve.integrations.block_cache import BlockCache

    get, failures, calls = BlockCache.get_values, list[int](), iter(range(1 << 30))

    def lossy(pool: BlockCache, values: Any) -> list[bool]:
        found = get(pool, values)
        if next(calls) % 2 == 0:
            failures.append(len(values) // 2)
            for at, nbytes in values[failures[-1]].pieces:
                ctypes.memset(at, 0x40, nbytes)
            found[failures[-1]] = False
        return found

    patched.setattr(BlockCache, "get_values", lossy)
    return failures


def test_a_whole_engine(store: ServedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computed comes from the store once its own cache is empty; damage and a dead store change nothing."""
    answer_alike(store, "llama", tmp_path, monkeypatch)


def test_a_whole_engine_with_windows(store: ServedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most layers have a window that prompts are longer than, and a block table of their own."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    keeps = hasattr(base, "KVConnectorTransferResults")  # else it is refused, and vLLM serves on
    answer_alike(store, "gemma3", tmp_path, monkeypatch, keeps=keeps)


def answer_alike(
    store: ServedStore, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool = True
) -> None:
    """A whole engine, with its KV from everywhere."""
    model = saved_model(tmp_path / "model", kind)
    groups = 1 if kind == "llama" else 2
    for name, value in (
        ("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ):  # fmt: skip
        monkeypatch.setitem(os.environ, name, value)
    import vllm

    llm = vllm.LLM(
        model, dtype="float32", block_size=32, max_model_len=512, max_num_seqs=4, enforce_eager=True, seed=0,
        enable_prefix_caching=True, skip_tokenizer_init=True, num_gpu_blocks_override=60 * groups,
        kv_transfer_config=transfer_of(store),
    )  # fmt: skip
    prompts = [[(7 * number + at * (number + 3)) % 512 for at in range(130 + number)] for number in range(8)]
    greedy = vllm.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)

    def answers() -> tuple[list[list[int]], int]:
        llm.reset_prefix_cache()
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done], sum(one.num_cached_tokens or 0 for one in done)

    with store.client() as client:
        before = client.statistics()["dram_values"]
    right, cached = answers()
    assert cached == 0 and len({tuple(one) for one in right}) > 1
    if not keeps:
        assert answers() == (right, 0)
        llm.llm_engine.engine_core.shutdown()
        return
    with store.client() as client:
        eventually(lambda: client.statistics()["dram_values"] >= before + 8 * 4 * groups)
    assert answers() == (right, 8 * 128)
    with monkeypatch.context() as patched:
        failures = fail_loads(patched)
        assert answers()[0] == right and len(failures) >= 4
    damaged = flip_byte(store, b"MSE1")  # behind the mark of a tail: the number of its pieces
    found, cached = answers()
    assert damaged >= 8 * 4 and found == right and cached < 8 * 128
    store.kill()
    for _ in range(3):
        assert answers()[0] == right
    store.restart()
    llm.llm_engine.engine_core.shutdown()
