"""``memserve serve --store A,B,C``: real stores as one; one is killed with -9, costs no hit, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from served_cluster import eventually
from served_store import ServedStore, ServerOfStores, facts
from slow_costs import save_slow_costs
from tiny_models import one_engine, prompt, save_folder, tiny_module

BLOCK = 8
"""Tokens: the model's context is 256."""
LENGTH = 205
SEEDS = range(1, 7)
BEHIND = {"llama": 0, "falcon_h1": 4, "gemma2": LENGTH // BLOCK}
"""Blocks that stores keep beside those of a prompt: a recurrent state, or a part of each block, of layers with a
window."""


@pytest.fixture(scope="module", params=BEHIND)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def blocks(family: str) -> int:
    """Of all prompts."""
    return len(SEEDS) * (LENGTH // BLOCK + BEHIND[family])


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 4} if family == "gemma2" else {}
    return save_folder(tiny_module(family, **sizes), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Callable[[list[int], int], str]]:
    with one_engine(model) as answer:
        yield answer


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, ServedStore]]:
    with ExitStack() as stack:
        stores = {}
        for name in "abc":
            (tmp_path / name).mkdir()
            stores[name] = stack.enter_context(ServedStore(tmp_path / name, dram="16MiB"))
        yield stores


def tokens(seed: int) -> list[int]:
    return [int(token) for token in prompt(LENGTH, seed)]


@pytest.fixture
def serving(model: Path, stores: dict[str, ServedStore]) -> Iterator[ServerOfStores]:
    """With two copies of each block."""
    addresses = ",".join(store.address for store in stores.values())
    secret = ("--cluster-secret-file", str(stores["a"].secret_file))
    flags = ("--block-tokens", str(BLOCK), "--store", addresses, "--store-copies", "2")
    serving = ServerOfStores(model, *flags, *secret)
    yield serving
    serving.kill_everything()


def test_killed_store_costs_no_hit_and_is_caught_up(
    family, blocks, serving, stores, model, truth, tmp_path, monkeypatch
) -> None:
    """Of three stores with two copies. What it has lost, memory and all, the others give back."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "first"))
    serving.start()
    for seed in SEEDS:
        assert serving.ask(tokens(seed))["choices"][0]["text"] == truth(tokens(seed), 8)
    eventually(lambda: serving.stored_blocks() >= 2 * blocks)
    counts = serving.blocks_by_store()
    whole = sum(counts.values())
    assert len(counts) == 3 and min(counts.values()) > blocks / 3
    serving.kill_everything()

    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "second"))  # the instance does not know how quick it is
    save_slow_costs(model, BLOCK, windows_apart=family == "gemma2")
    serving.start()
    eventually(lambda: serving.stored_blocks() >= 2 * blocks)
    lost = stores["b"]
    lost.kill()
    for path in Path("/dev/shm").glob(f"memserve-store-{lost.name[:24]}*"):
        path.unlink()
    eventually(lambda: len(serving.blocks_by_store()) == 2)
    for seed in SEEDS:
        answer = serving.ask(tokens(seed))
        assert answer["choices"][0]["text"] == truth(tokens(seed), 8)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= LENGTH // BLOCK * BLOCK, facts(answer)
        assert facts(answer)["fetched_tier"] == "store"
    eventually(lambda: all(count >= blocks for count in serving.blocks_by_store().values()))

    lost.restart()
    eventually(lambda: serving.blocks_by_store().get(lost.name, 0) >= counts[lost.name])
    eventually(lambda: serving.stored_blocks() <= 1.15 * whole)
