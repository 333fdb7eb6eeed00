"""Real servers of models whose windows' KV lies apart: answers over HTTP, with one instance and with two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from served_cluster import ask_until_fetched, eventually, served
from slow_costs import save_slow_costs
from tiny_models import greedy_tokens, prompt, save_folder, tiny_module

SIZES = {"gemma2": {"num_hidden_layers": 4}, "gpt_oss": {"num_hidden_layers": 4}}
"""Two layers read a window of 24 tokens; of the other families some do, or read a chunk of 48."""


def answer_of(module: Any, tokens: list[int], count: int, text: str) -> list[int]:
    """By transformers; ``text``: what a server has answered."""
    guess = [int(word[1:]) for word in text.split()]
    return greedy_tokens(module, np.array(tokens, np.int32), count, guess)


def shown(tokens: list[int]) -> str:
    """As text, which has no special token: 0 and 2 are."""
    return " ".join(f"w{token}" for token in tokens if token not in (0, 2))


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gemma2", ()),
        ("gpt_oss", ()),
        ("gemma2", ("--decode-tensor-parallel", "2")),
        ("gemma4", ()),
        ("llama4", ()),
        ("mistral", ()),
    ],
    ids=["gemma2", "gpt_oss", "gemma2, two workers decode", "gemma4", "llama4", "mistral"],
)
def test_prefill_and_decode_answer_as_the_model(family: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Cold, warm, and as turns of a conversation: what the decode instance has computed comes back with its window."""
    module = tiny_module(family, **SIZES.get(family, {}))
    folder = save_folder(module, tmp_path / "tiny")
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((5, 40, 70, 140))]
    with served(folder, "--prefill", "1", "--decode", "1", *flags) as server:
        texts = [server.complete(tokens, 40) for tokens in prompts]
        answers = [answer_of(module, *asked) for asked in zip(prompts, [40] * 4, texts, strict=True)]
        assert texts == list(map(shown, answers))
        cold_tokens = server.counter("cached_tokens")
        assert [server.complete(tokens, 8) for tokens in prompts] == [shown(answer[:8]) for answer in answers]
        eventually(lambda: server.counter("cached_tokens") > cold_tokens)
        turn = prompts[2]
        for number in range(3):
            text = server.complete(turn, 34)
            answer = answer_of(module, turn, 34, text)
            assert text == shown(answer)
            turn = [*turn, *answer, *prompt(9, number).tolist()]
        count = 2 * len(prompts) + 3
        eventually(lambda: server.counters("taken_over", "handed_over") == [count, count])
        eventually(lambda: min(server.counters("returned_blocks", "reused_blocks", "window_parts_passed")) > 0)
        assert not server.counter("transfers_failed")


def test_a_busy_instance_lends_kv_with_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one instance answers, the other one gets what continues a prompt of the first, and fetches that."""
    module = tiny_module("gemma2", **SIZES["gemma2"])
    folder = save_folder(module, tmp_path / "tiny")
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folder, windows_apart=True)
    with served(folder, "--colocated", "2", "--policy", "least-load") as server:
        assert ask_until_fetched(server, lambda *asked: shown(answer_of(module, *asked))) == 96


def test_a_store_keeps_windows_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and their parts, of layers of two shapes. A second cluster begins with them, also where another prompt
    leaves the first one."""
    module = tiny_module("gemma4")
    folder, tokens = save_folder(module, tmp_path / "tiny"), prompt(140, 1).tolist()
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folder, windows_apart=True)
    flags = ["--prefill", "1", "--decode", "1", "--metadata", str(tmp_path / "state")]
    flags += ["--ssd", f"{tmp_path}/ssd=64MiB", "--store-dram", "16MiB", "--ssd-sync", "none"]
    with served(folder, *flags) as server:
        text = server.complete(tokens, 8)
        assert text == shown(answer_of(module, tokens, 8, text))
        eventually(lambda: server.gauge("store_disk_values") >= 20)  # four blocks, and a part of four of each
        assert server.counter("window_parts_passed")
    with served(folder, *flags) as server:
        eventually(lambda: server.gauge("store_tree_blocks") >= 20)
        for begin in (128, 64):
            other = [*tokens[:begin], *prompt(40, begin).tolist()]
            known_tokens = server.counter("cached_tokens")
            text = server.complete(other, 8)
            assert text == shown(answer_of(module, other, 8, text))
            eventually(
                lambda known_tokens=known_tokens, begin=begin: server.counter("cached_tokens") >= known_tokens + begin
            )
        assert server.counters("checksum_mismatches", "transfers_failed") == [0, 0]
