"""Models that keep latents, served: by one engine that has too little memory, by instances, out of a store."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from geometries import SHAPES
from memserve import LLM
from memserve.base.errors import UserError
from memserve.base.types import SamplingParams
from memserve.cli.doctor import check_memory_bound
from served_cluster import Server, eventually
from slow_costs import save_slow_costs
from tiny_models import LATENT, greedy_answers, greedy_tokens, prompt, save_folder, tiny_module

TOKEN_BYTES = 3 * 32 * 4
"""Of a tiny model: three layers, latents of 24 elements and rotary keys of 8, in float32."""
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0)


def kv_flags(tokens: int, dram_tokens: int = 0) -> dict[str, str]:
    return {"kv_memory": f"{tokens * TOKEN_BYTES}B", "dram_memory": f"{dram_tokens * TOKEN_BYTES}B"}


@pytest.mark.parametrize("family", LATENT)
def test_an_engine_with_little_memory_is_exact(family: str, tmp_path: Path) -> None:
    """Eight prompts at once, in chunks, in memory for three of them: swapped out and preempted, then from the cache."""
    module = tiny_module(family)
    prompts = [prompt(60 + 9 * number, number) for number in range(8)]
    options = {"dtype": "float32", "threads": 1, "block_tokens": 16, "max_step_tokens": 40}
    folder = str(save_folder(tiny_module(family), tmp_path / "tiny"))
    with LLM(folder, **options, **kv_flags(512, 2048)) as llm, ThreadPoolExecutor(8) as pool:

        def answer(number: int) -> list[int]:
            [result] = llm.generate([prompts[number].tolist()], GREEDY, max_tokens=NEW_TOKENS, ignore_eos=True)
            return list(result.outputs[0].tokens)

        answers, again = (list(pool.map(answer, range(8))) for _ in range(2))
        stats = llm._engine.stats().instance
    assert answers == again == greedy_answers(module, prompts, NEW_TOKENS, answers)
    assert stats.preemptions_swap + stats.preemptions_recompute > 0 and stats.cached_tokens > 0


def test_kv_by_layer_is_exact(tmp_path: Path) -> None:
    """Each layer reads pages of its own, while prompts begin for which there is no room."""
    module = tiny_module("deepseek_v3", num_hidden_layers=18)
    prompts = [prompt(150 + 7 * number, number) for number in range(6)]
    folder = str(save_folder(module, tmp_path / "tiny"))
    options = {"dtype": "float32", "threads": 1, "block_tokens": 16, "max_step_tokens": 16, "layerwise": "static-1"}
    with LLM(folder, **options, **kv_flags(512 * 6, 4096 * 6), enable_prefix_caching=False) as llm:
        with ThreadPoolExecutor(6) as pool:
            asked = [
                pool.submit(llm.generate, [tokens.tolist()], GREEDY, max_tokens=12, ignore_eos=True)
                for tokens in prompts
            ]
            answers = [list(future.result()[0].outputs[0].tokens) for future in asked]
        layers = llm._engine.stats().instance.layers
    assert answers == greedy_answers(module, prompts, 12, answers)
    assert layers.begun + layers.converted > 0


def test_drafts_are_checked_exactly(tmp_path: Path) -> None:
    """Rows of a few tokens, of which some are taken back."""
    module = tiny_module("minicpm3")
    tokens = [*prompt(30, 5).tolist() * 3]
    folder = str(save_folder(tiny_module("minicpm3"), tmp_path / "tiny"))
    with LLM(folder, dtype="float32", threads=1, draft_tokens=4, **kv_flags(1024)) as llm:
        [result] = llm.generate([tokens], GREEDY, max_tokens=40, ignore_eos=True)
    answer = list(result.outputs[0].tokens)
    assert answer == greedy_tokens(module, np.array(tokens, np.int32), 40, answer)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_keeps_latents_over_a_restart(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode instances of DeepSeek V3's KV, and a disk; a second cluster begins with what it holds. One
    worker prefills, and two decode."""
    shape, tokens = SHAPES["latents"], prompt(100, 1)
    module = shape.module()
    folder = save_folder(module, tmp_path / "tiny")
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folder, shape.kv.block_tokens)
    flags = ("--prefill", "1", "--decode", "1", *shape.memory_flags(512), "--metadata", str(tmp_path / "state"))
    flags += ("--decode-tensor-parallel", str(workers))
    flags += ("--ssd", f"{tmp_path}/ssd=512MiB", "--store-dram", "64MiB", "--ssd-sync", "none")
    for cached_tokens in (0, 96):
        text = ask_once(Server(folder, *flags), tokens, cached_tokens)
        answer = greedy_tokens(module, tokens, 8, [int(word[1:]) for word in text.split()])
        assert text == " ".join(f"w{token}" for token in answer if token != 2)  # the end has no text


def ask_once(server: Server, tokens: np.ndarray, cached_tokens: int) -> str:
    """A cluster that has so many of ``tokens`` from its start on, and at its end three blocks in its store."""
    try:
        if cached_tokens:
            eventually(lambda: server.gauge("store_tree_blocks") >= 3)
        text = server.complete(tokens.tolist(), 8)
        eventually(lambda: server.gauge("store_disk_values") >= 3)
        eventually(lambda: server.counter("cached_tokens") >= cached_tokens)
        assert server.counters("checksum_mismatches", "transfers_failed") == [0, 0]
        return text
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


def test_what_latents_do_not_allow_is_refused(tmp_path: Path) -> None:
    folder = str(save_folder(tiny_module("deepseek_v2"), tmp_path / "tiny"))
    with pytest.raises(UserError, match="latents that attention reads are kept as they are computed"):
        LLM(folder, dtype="float32", threads=1, kv_memory="4MiB", kv_dtype="int8")


def test_doctor_says_where_the_bytes_of_a_token_come_from(tmp_path: Path) -> None:
    folder = save_folder(tiny_module("deepseek_v3"), tmp_path / "tiny")
    findings = {finding.name: finding.detail for finding in check_memory_bound(str(folder))}
    assert findings["KV of a token"] == "192 bytes = 3 layers x 1 latent x 32 elements x 2 bytes"
    assert "activations" in findings["instance memory"]


def test_stages_share_the_layers(tmp_path: Path) -> None:
    """Two workers, each with the latents of its layers."""
    module, tokens = tiny_module("deepseek_v2"), prompt(70, 2)
    folder = str(save_folder(module, tmp_path / "tiny"))
    with LLM(folder, dtype="float32", threads=2, pipeline_parallel=2, kv_memory="4MiB") as llm:
        [result] = llm.generate([tokens.tolist()], GREEDY, max_tokens=8, ignore_eos=True)
    assert list(result.outputs[0].tokens) == greedy_tokens(module, tokens, 8)
