"""A real server of a model with a recurrent state: answers over HTTP, with one instance and with two."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from served_cluster import Server, eventually
from tiny_models import one_engine, prompt, save_folder, tiny_module


@pytest.mark.parametrize(("family", "instances"), [("qwen3_5", 1), ("mamba2", 1), ("falcon_h1", 2)])
def test_a_server_answers_as_the_model(family: str, instances: int, tmp_path: Path) -> None:
    """Prompts of many lengths, twice, then longer ones that begin alike; the second time the cache is used."""
    folder = save_folder(tiny_module(family), tmp_path / "tiny")
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((5, 40, 70))]
    prompts += [[*prompts[2], *prompt(40, seed).tolist()] for seed in (7, 8, 9)]
    with one_engine(folder) as complete:
        expected = [complete(tokens, 20) for tokens in prompts]
    server = Server(folder, *(["--colocated", str(instances)] if instances > 1 else []))
    try:
        assert [server.complete(tokens, 20) for tokens in prompts] == expected
        assert [server.complete(tokens, 20) for tokens in prompts] == expected
        eventually(lambda: server.counter("cached_tokens") > 0 and server.counter("snapshots_used") > 0)
        eventually(lambda: not server.held())
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


def test_a_server_of_prefill_and_decode_is_refused(tmp_path: Path) -> None:

    folder = save_folder(tiny_module("qwen3_5"), tmp_path / "model")
    command = [sys.executable, "-m", "memserve", "serve", "--model", str(folder), "--dtype", "float32", "--port", "0"]
    command += ["--kv-memory", "4MiB", "--prefill", "1", "--decode", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert "is not handed over from prefill to decode instances yet" in ended.stdout + ended.stderr
