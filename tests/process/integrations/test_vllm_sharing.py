"""KV that an instance has computed, read as vLLM's connector reads it, and the other way round, through a real store.

The engine of the other project is transformers here: its keys and values, laid out as vLLM's CPU backend has them, are
what an instance must have under the same names.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engine_world import flip_byte, options_of
from memserve import UserError
from memserve.integrations.block_cache import drop_views
from memserve.integrations.store_cache import PoolOptions
from memserve.integrations.vllm.lookups import Lookups
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.shared_kv import Identities, KvNames, KvPool, model_of
from memserve.integrations.vllm.worker import HostMover, WorkerSide
from memserve.kv.identity import identity_key
from memserve.protocol.store import KvModel
from served_cluster import WAIT_S, Server
from served_store import SECRET, ServedStore
from tiny_models import greedy_tokens, prompt, save_folder, tiny_module
from waiting import eventually

BLOCK, BLOCKS = 32, 12
PROMPT = prompt(4 * BLOCK + 5, 3)


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module("llama")


@pytest.fixture(scope="module")
def folder(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(module, tmp_path_factory.mktemp("models") / "tiny")


def vllm_of(folder: Path, module: Any, **changed: Any) -> tuple[Any, Any]:
    """What is read of vLLM's configuration, and of what it says about its KV."""
    config = module.config
    spec = type("FullAttentionSpec", (), {})()
    spec.dtype, spec.block_size, spec.num_kv_heads = torch.float32, BLOCK, config.num_key_value_heads
    spec.head_size = config.hidden_size // config.num_attention_heads
    model = SimpleNamespace(
        model=str(folder), dtype=torch.float32, quantization=None, hf_overrides={}, hf_config=config
    )
    parallel = SimpleNamespace(world_size=1)
    for name, value in changed.items():
        at = spec if hasattr(spec, name) else parallel if hasattr(parallel, name) else model
        setattr(at, name, value)
    names = [f"model.layers.{at}.self_attn.attn" for at in range(config.num_hidden_layers)]
    told = SimpleNamespace(
        model_config=model, parallel_config=parallel, cache_config=SimpleNamespace(cache_dtype="auto")
    )
    return told, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names)])


class Engine:
    """vLLM's memory on a CPU, and the connector's two sides over it."""

    def __init__(self, store: ServedStore, model: KvModel) -> None:
        at = model.geometry
        shape = (BLOCKS, at.num_kv_heads, BLOCK, at.head_dim_k + at.head_dim_v)
        self.caches = {f"layers.{layer}": torch.zeros(shape) for layer in range(at.num_layers)}
        memory, options = HostMemory(self.caches, BLOCKS), PoolOptions.from_mapping(options_of(store))
        pool, names = KvPool(options, model), KvNames(b"", memory.layout)
        self.mover = HostMover(pool, [memory], [names])
        self.worker = WorkerSide(pool, self.mover)
        self.lookups = Lookups(KvPool(options, model))
        self.lookups.set_ranks([(names,)])
        self.identities = Identities("", model, identity_key(SECRET))

    def names(self, tokens: np.ndarray) -> list[bytes]:
        request = SimpleNamespace(request_id="r", num_tokens=len(tokens), all_token_ids=tokens.tolist())
        found = self.identities.identities_of(request, len(tokens) // BLOCK)
        self.identities.forget_request("r")
        return found

    def fill(self, module: Any, tokens: np.ndarray) -> list[torch.Tensor]:
        """Compute ``tokens`` into the blocks from 1 on, as transformers does; what each layer's are."""
        with torch.inference_mode():
            found = module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=True).past_key_values
        right = []
        for layer, cache in enumerate(self.caches.values()):
            keys, values = (found.layers[layer].keys[0], found.layers[layer].values[0])
            whole = [pack(keys, values, at) for at in range(len(tokens) // BLOCK)]
            right.append(torch.stack(whole))
            cache[1 : 1 + len(whole)] = right[-1].reshape(len(whole), *cache.shape[1:])
        return right

    def close(self) -> None:
        self.worker.close()
        self.lookups.close()


def pack(keys: torch.Tensor, values: torch.Tensor, at: int) -> torch.Tensor:
    """One page: of each head its keys by channel, then its values by token."""
    some = slice(at * BLOCK, (at + 1) * BLOCK)
    return torch.cat([keys[:, some].transpose(1, 2).flatten(1), values[:, some].flatten(1)], dim=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    """It knows no model: that of the first client is its own."""
    with ServedStore(tmp_path_factory.mktemp("store"), dram="32MiB") as store:
        yield store


@pytest.fixture(scope="module")
def engine(store: ServedStore, folder: Path, module: Any) -> Iterator[Engine]:
    engine = ready(Engine(store, model_of(*vllm_of(folder, module))))
    yield engine
    engine.close()


def ready(engine: Engine) -> Engine:
    """Once the store has blocks of this model."""
    pools = [engine.worker._pool, engine.lookups.pool]
    eventually(lambda: all(pool.is_up for pool in pools) and engine.lookups.pool._mapped_client() is not None)
    return engine


@pytest.fixture(scope="module")
def server(store: ServedStore, folder: Path, engine: Engine) -> Iterator[Server]:
    with memserve(store, folder) as server:
        yield server


@contextmanager
def memserve(store: ServedStore, folder: Path, *more: str) -> Iterator[Server]:
    named = ("--store", store.address, "--cluster-secret-file", str(store.secret_file))
    server = Server(folder, "--colocated", "1", "--metadata", "none", "--dtype", "float32", *named, *more)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(WAIT_S)


def ask(server: Server, tokens: np.ndarray, count: int = 6) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were not computed."""
    body = {"model": "tiny", "prompt": tokens.tolist(), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_an_instance_reads_what_the_engine_has_put(engine: Engine, server: Server, module: Any) -> None:
    engine.fill(module, PROMPT)
    names = engine.names(PROMPT)
    values = engine.mover.block_values([(0, name, at) for at, name in enumerate(names, 1)])
    engine.worker._pool.put_collected(engine.worker._pool.collect_copies(values))
    assert engine.lookups.prefix_at_once(names) == 4
    eventually(lambda: ask(server, PROMPT[: 4 * BLOCK + 1], 1)[1] == 4 * BLOCK)
    text, cached = ask(server, PROMPT)
    assert cached == 4 * BLOCK and text == words(greedy_tokens(module, PROMPT, 6))


def test_the_engine_reads_what_an_instance_has_computed(engine: Engine, server: Server, module: Any) -> None:
    tokens = prompt(5 * BLOCK + 3, 4)
    text, cached = ask(server, tokens)
    assert cached == 0 and text == words(greedy_tokens(module, tokens, 6))
    names = engine.names(tokens)
    eventually(lambda: engine.lookups.prefix_at_once(names) == 5)
    right = engine.fill(module, tokens)
    for cache in engine.caches.values():
        cache.zero_()
    values = engine.mover.block_values([(0, name, at) for at, name in enumerate(names, 3)])
    count, views = engine.lookups.pool.hold_values(values)
    drop_views(views)
    assert count == 5 and engine.worker._pool.get_values(values) == [True] * 5
    for cache, wanted in zip(engine.caches.values(), right, strict=True):
        assert torch.allclose(cache[3:8].reshape(wanted.shape), wanted, atol=1e-4), "keys and values lie elsewhere"
        assert not cache[8:].any()


def test_damage_is_found(
    engine: Engine, server: Server, store: ServedStore, module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(3 * BLOCK + 1, 5)
    right = engine.fill(module, tokens)
    names = engine.names(tokens)
    values = engine.mover.block_values([(0, name, at) for at, name in enumerate(names, 1)])
    pool = engine.worker._pool
    pool.put_collected(pool.collect_copies(values))
    assert pool.exists(names) == [True] * 3
    assert flip_byte(store, right[1][1].numpy().tobytes()[:64]) >= 1
    with caplog.at_level(logging.WARNING):
        count, views = engine.lookups.pool.hold_values(values)
    drop_views(views)
    assert count == 1 and "disagrees with its checksums" in caplog.text
    pool.put_collected(pool.collect_copies(values[1:2]))
    flip_byte(store, right[0][2].numpy().tobytes()[:64])
    assert pool.get_values(values) == [True, True, False], "and of what was promised already"
    assert pool.exists(names) == [True, True, False]


def test_an_instance_that_shares_with_no_engine(tmp_path: Path, folder: Path, module: Any) -> None:
    tokens = prompt(4 * BLOCK + 5, 6)
    with ServedStore(tmp_path, dram="32MiB") as store:
        engine = ready(Engine(store, model_of(*vllm_of(folder, module))))
        engine.fill(module, tokens)
        names, pool = engine.names(tokens), engine.worker._pool
        values = engine.mover.block_values([(0, name, at) for at, name in enumerate(names, 1)])
        pool.put_collected(pool.collect_copies(values))
        assert pool.exists(names) == [True] * 4
        with memserve(store, folder, "--no-foreign-kv") as alone:
            for _ in range(3):
                assert ask(alone, tokens)[0] == words(greedy_tokens(module, tokens, 6))
            assert alone.counter("store_tokens") == 0
        engine.close()


@pytest.mark.parametrize("changed", [{"block_size": 64}, {"num_kv_heads": 1}])
def test_other_blocks_are_refused(engine: Engine, store: ServedStore, folder: Path, module: Any, changed: Any) -> None:
    model = model_of(*vllm_of(folder, module, **changed))
    with pytest.raises(UserError, match=r"refuses this client.*(tokens|shape)"):
        KvPool(PoolOptions.from_mapping(options_of(store)), model)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"world_size": 2}, "spread"), ({"quantization": "awq"}, "quantized"), ({"dtype": torch.bfloat16}, "KV as"),
        ({"hf_overrides": {"a": 1}}, "overridden"), ({"model": "org/model"}, "no folder"),
    ],
)  # fmt: skip
def test_unsupported_vllm_configurations_are_not_shared(
    folder: Path, module: Any, changed: dict[str, Any], why: str
) -> None:
    config, caches = vllm_of(folder, module)
    for name, value in changed.items():
        setattr(config.parallel_config if name == "world_size" else config.model_config, name, value)
    with pytest.raises(UserError, match=why):
        model_of(config, caches)


def test_sharing_imports_no_torch() -> None:
    code = "import sys\nimport memserve.integrations.vllm.shared_kv\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
