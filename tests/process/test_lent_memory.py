"""Memory that a process without a model lends to a cluster: the instance's KV goes there, and is fetched from there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from memserve import PoolPeer, UserError
from memserve.base.types import KVGeometry
from ports import free_port
from served_cluster import eventually
from served_store import SECRET, ServerOfStores, facts
from slow_costs import save_slow_costs
from tiny_models import one_engine, prompt, save_folder, tiny_module

BLOCK = 8
LENGTH = 205
SEEDS = range(1, 5)
BLOCKS = len(SEEDS) * (LENGTH // BLOCK)
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim_k=16, head_dim_v=16, dtype="float32", block_tokens=4)
"""Of the peer's own pool: another model's."""


def tokens(seed: int) -> list[int]:
    return [int(token) for token in prompt(LENGTH, seed)]


@pytest.fixture
def peer() -> Iterator[PoolPeer]:
    with PoolPeer(GEOMETRY, name="idle", secret=SECRET, hbm_bytes=1 << 20) as peer:
        yield peer


def test_instances_keep_kv_in_lent_memory(tmp_path: Path, peer: PoolPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that begins anew has nothing of its own; what it computed before comes from the peer's memory, until
    that is taken back."""
    model = save_folder(tiny_module("llama"), tmp_path / "tiny")
    with one_engine(model) as answer:
        truth = {seed: answer(tokens(seed), 8) for seed in SEEDS}
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(model, BLOCK)
    secret, port = tmp_path / "secret", free_port()
    secret.write_text(SECRET)
    secret.chmod(0o600)
    at = ("--cluster-port", str(port), "--cluster-secret-file", str(secret))
    serving = ServerOfStores(model, "--block-tokens", str(BLOCK), *at)
    serving.start()
    try:
        assert serving.ask(tokens(SEEDS[0]))["choices"][0]["text"] == truth[SEEDS[0]]
        files_before = set(os.listdir("/dev/shm"))
        lent = peer.lend_memory(16 << 20, f"127.0.0.1:{port}")
        assert lent.is_member

        def has_everything() -> bool:
            """The instance may hear of the lent memory after its owner: KV goes there when it is used again."""
            for seed in SEEDS:
                assert serving.ask(tokens(seed))["choices"][0]["text"] == truth[seed]
            return serving.blocks_by_store().get("idle", 0) >= BLOCKS

        eventually(has_everything)
        assert lent.read_numbers()["dram_values"] >= BLOCKS
        names = {name for name in set(os.listdir("/dev/shm")) - files_before if "idle" in name}
        assert not names, "nothing is left in memory where this process is killed"

        (before,) = serving.server.children().values()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: set(serving.server.children().values()) - {before})
        serving.pids |= set(serving.server.children().values())
        for seed in SEEDS:
            answer_again = serving.ask(tokens(seed))
            assert answer_again["choices"][0]["text"] == truth[seed]
            assert answer_again["usage"]["prompt_tokens_details"]["cached_tokens"] >= LENGTH // BLOCK * BLOCK
            assert facts(answer_again)["fetched_tier"] == "store"

        assert peer.alloc_mem(4) is not None, "its own pool is there meanwhile"
        lent.close()
        eventually(lambda: "idle" not in serving.blocks_by_store())
        with pytest.raises(UserError, match="no more"):
            lent.read_numbers()
        for seed in SEEDS:
            assert serving.ask(tokens(seed))["choices"][0]["text"] == truth[seed]
    finally:
        serving.kill_everything()


def test_memory_is_not_lent_where_nobody_takes_it(peer: PoolPeer) -> None:
    """No router, no address, no room for two blocks of 4 KiB."""
    unused = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match="has not answered within"):
        peer.lend_memory(1 << 20, unused, timeout_s=0.5)
    with pytest.raises(UserError, match="HOST:PORT"):
        peer.lend_memory(1 << 20, "nowhere")
    with pytest.raises(UserError, match="less than two blocks"):
        peer.lend_memory(4096, unused)
