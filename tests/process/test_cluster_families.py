"""Sessions of other families, with real KV, through a prefill and a decode process, against the own eager path."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from geometries import SHAPES
from served_cluster import Server, eventually
from tiny_models import greedy_tokens, prompt, save_folder, tiny_module

TURNS, NEW_TOKENS = 4, 12
END = 2
"""A token without text."""


def text_of(tokens: list[int]) -> str:
    """Of an answer."""
    return " ".join(f"w{token}" for token in tokens if token != END)


@pytest.mark.parametrize("name", ["windows", "latents"])
def test_sessions_through_two_processes_are_lossless(name: str, tmp_path: Path) -> None:
    """Four turns, each behind all that was said before; fetched, transferred and returned KV of windows and all."""
    shape = SHAPES[name]
    module = shape.module()
    roles = ("--prefill", "1", "--decode", "1", "--transfer", "by-layer")
    server = Server(save_folder(module, tmp_path / "tiny"), *roles, *shape.memory_flags(640))
    try:
        said = np.zeros(0, np.int32)
        for turn in range(TURNS):
            said = np.concatenate([said, prompt(40, turn)])
            text = server.complete(said.tolist(), NEW_TOKENS)
            answer = greedy_tokens(module, said, NEW_TOKENS, [int(word[1:]) for word in text.split()])
            assert text == text_of(answer)
            said = np.concatenate([said, np.array(answer, np.int32)])
        eventually(lambda: server.counter("taken_over") == TURNS)  # the last one, with the next heartbeat
        eventually(lambda: server.counter("cached_tokens") > 0)  # of another instance, with a heartbeat of its own
    finally:
        server.process.terminate()
        server.process.wait(60)


def test_clusters_on_several_made_up_gpus_are_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill instance of two GPUs, a decode instance of one: KV is read out of two memories into one, and back."""
    pytest.importorskip("triton", reason="triton is not installed")
    support = Path(__file__).resolve().parent.parent / "support"
    paths = [str(support / "made_up_gpus"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = tiny_module("qwen3")
    roles = "--prefill", "1", "--prefill-tensor-parallel", "2", "--decode", "1"
    server = Server(save_folder(module, tmp_path / "tiny"), *roles, "--device", "cuda")
    try:
        said = np.zeros(0, np.int32)
        for turn in range(2):
            said = np.concatenate([said, prompt(40, turn)])
            text = server.complete(said.tolist(), NEW_TOKENS)
            answer = greedy_tokens(module, said, NEW_TOKENS, [int(word[1:]) for word in text.split()])
            assert text == text_of(answer)
            said = np.concatenate([said, np.array(answer, np.int32)])
        eventually(lambda: server.counter("taken_over") == 2)
    finally:
        server.process.terminate()
        server.process.wait(60)
