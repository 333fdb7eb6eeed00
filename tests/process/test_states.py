"""A real server of a model with a recurrent state: answers over HTTP, with one instance and with two."""

from __future__ import annotations

from pathlib import Path

import pytest

from memserve.base.units import NS_PER_S
from memserve.host.profile_file import profile_path, save_profile
from memserve.kv.costs import CostModel, PrefillCurve
from memserve.model.loading.loader import load_model
from served_cluster import ask_until_fetched, eventually, served
from slow_costs import save_slow_costs
from tiny_models import one_engine, prompt, save_folder, tiny_module


def growing_prompts() -> list[list[int]]:
    """Of many lengths, and longer ones that begin alike."""
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((5, 40, 70))]
    return prompts + [[*prompts[2], *prompt(40, seed).tolist()] for seed in (7, 8, 9)]


@pytest.mark.parametrize(("family", "instances"), [("qwen3_5", 1), ("mamba2", 2), ("falcon_h1", 2)])
def test_a_server_answers_as_the_model(family: str, instances: int, tmp_path: Path) -> None:
    """Twice; the second time the cache is used."""
    folder = save_folder(tiny_module(family), tmp_path / "tiny")
    prompts = growing_prompts()
    with one_engine(folder) as complete:
        expected, begins = ([complete(tokens, count) for tokens in prompts] for count in (20, 8))
    with served(folder, *(["--colocated", str(instances)] if instances > 1 else [])) as server:
        assert [server.complete(tokens, 20) for tokens in prompts] == expected
        assert [server.complete(tokens, 8) for tokens in prompts] == begins
        eventually(lambda: min(server.counters("cached_tokens", "snapshots_used")) > 0)


@pytest.mark.parametrize(
    ("family", "memory"),
    [("qwen3_5", []), ("mamba2", []), ("lfm2", ["--kv-memory", "192KiB", "--dram-memory", "8MiB"])],
    ids=["qwen3_5", "mamba2", "lfm2 on two tiers"],
)
def test_prefill_and_decode_answer_as_the_model(
    family: str, memory: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, warm, and as turns of a conversation: what the decode instance has computed comes back with its state."""
    folder = save_folder(tiny_module(family), tmp_path / "tiny")
    prompts = growing_prompts()
    turns = [prompts[2], [*prompts[2], *prompt(50, 11).tolist()]]
    with one_engine(folder) as complete:
        expected, begins = ([complete(tokens, count) for tokens in prompts] for count in (40, 8))
        for _ in range(2):
            said = [int(word[1:]) for word in complete(turns[-1], 34).split()]
            turns.append([*turns[-1], *said, *prompt(9, len(turns)).tolist()])
        answers = [complete(tokens, 34) for tokens in turns]
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folder)
    with served(folder, "--prefill", "1", "--decode", "1", *memory) as server:
        assert [server.complete(tokens, 40) for tokens in prompts] == expected
        cold_tokens = server.counter("cached_tokens")
        assert [server.complete(tokens, 8) for tokens in prompts] == begins
        eventually(lambda: server.counter("cached_tokens") > cold_tokens)
        assert [server.complete(tokens, 34) for tokens in turns] == answers
        count = 2 * len(prompts) + len(turns)
        eventually(lambda: server.counters("taken_over", "handed_over") == [count, count])
        eventually(lambda: min(server.counters("returned_blocks", "reused_blocks")) > 0)
        assert not server.counter("transfers_failed")


def test_a_busy_instance_lends_kv_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one instance answers, the other one gets what continues a prompt of the first, and fetches that."""
    folder = save_folder(tiny_module("falcon_h1"), tmp_path / "tiny")
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    loaded = load_model(str(folder), "float32", "cpu", block_tokens=32, threads=1)
    slow = CostModel(PrefillCurve(token_ns=0.2 * NS_PER_S), machine="slow")  # whatever can be fetched is worth it
    save_profile(profile_path(loaded.fingerprint, loaded.geometry, "cpu", 1), {"costs": slow.to_dict()})
    flags = ("--colocated", "2", "--policy", "least-load")
    with one_engine(folder) as complete, served(folder, *flags) as server:
        assert ask_until_fetched(server, lambda tokens, count, _: complete(tokens, count)) == 96
        eventually(lambda: server.counter("snapshots_used") > 0)
