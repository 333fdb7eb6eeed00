"""A cluster of processes with ``--kv-lower-dtype``: KV goes through HBM from one to the other, and what is told."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest

from served_cluster import Server, eventually
from tiny_models import prompt, save_folder, tiny_module

BLOCK_BYTES, LOWER_BLOCK_BYTES = 3 * 2 * 32 * 16 * 4, 3 * 1280
ROUNDS, PROMPTS, NEW_TOKENS = 3, 6, 8


def metrics(server: Server) -> str:
    return httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=60).text


def test_pd_instances_round_kv_in_dram_and_share_through_hbm(tmp_path: Path) -> None:
    """Three prompts fit into HBM, six come by turns: each finds its prefix in the DRAM of the prefill instance."""
    options = ("--kv-memory", f"{14 * BLOCK_BYTES}B", "--dram-memory", "2MiB", "--kv-lower-dtype", "int8")
    server = Server(save_folder(tiny_module("llama"), tmp_path / "tiny"), "--prefill", "1", "--decode", "1", *options)
    try:
        assert server.process.stdout is not None
        told = [*server.lines, *(server.process.stdout.readline() for _ in range(2))]
        assert any("not lossless" in line and "int8" in line for line in told)
        for _ in range(ROUNDS):
            for seed in range(PROMPTS):
                assert server.complete(prompt(100, seed).tolist(), NEW_TOKENS)
        eventually(lambda: server.counter("taken_over") == ROUNDS * PROMPTS)
        eventually(lambda: server.counter("cached_tokens") >= (ROUNDS - 1) * PROMPTS * 64)
        assert server.counter("transfers_failed") == server.counter("checksum_mismatches") == 0

        eventually(lambda: re.search(r'role="prefill",state="cached",tier="dram"} [1-9]', metrics(server)))
        page = metrics(server)
        sizes = re.findall(r'memserve_instance_block_bytes{instance="\w+",role="\w+",tier="(\w+)"} (.+)', page)
        assert {(tier, float(size)) for tier, size in sizes} == {("hbm", BLOCK_BYTES), ("dram", LOWER_BLOCK_BYTES)}
        with pytest.raises(openai.BadRequestError, match="--kv-lower-dtype"):
            server.client.completions.create(prompt=[5], max_tokens=1, model="tiny", extra_body={"exact": True})
    finally:
        server.process.terminate()
        server.process.wait(60)
