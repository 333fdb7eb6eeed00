"""An instance that leaves while it decodes: its requests go on at the other one, with their KV."""

from __future__ import annotations

import functools
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from served_cluster import GREEDY, Server, eventually, served
from tiny_models import one_engine, prompt, save_folder, tiny_module

TOKENS = 400
KINDS = {
    "qwen3_5": (),
    "gemma2": (),
    "llama": ("--dram-memory", "4MiB", "--kv-memory", "512KiB"),
}


@functools.cache
def model(family: str, root: Path) -> tuple[Path, list[list[int]], list[str]]:
    """A model's folder below ``root``, prompts, and what one engine answers to them."""
    folder = save_folder(tiny_module(family, max_position_embeddings=1024), root / family / "tiny")
    prompts = [prompt(40 + 7 * place, place).tolist() for place in range(4)]
    with one_engine(folder) as complete:
        return folder, prompts, [complete(tokens, TOKENS) for tokens in prompts]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def stream(server: Server, tokens: list[int], begun: threading.Semaphore) -> str:
    """One answer, event by event; ``begun`` is released behind the fifth."""
    events = server.client.completions.create(prompt=tokens, max_tokens=TOKENS, stream=True, **GREEDY)
    texts = []
    for event in events:
        texts.append(event.choices[0].text if event.choices else "")
        if len(texts) == 5:
            begun.release()
    return "".join(texts)


def begin_streams(server: Server, prompts: list[list[int]], pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Over both instances; each has its first tokens when this returns."""
    eventually(lambda: server.members() == {"c1", "c2"})
    begun = threading.Semaphore(0)
    answers = [pool.submit(stream, server, tokens, begun) for tokens in prompts]
    for _ in prompts:
        assert begun.acquire(timeout=60)
    return answers


@pytest.mark.parametrize("family", KINDS)
def test_an_instance_leaves_and_no_token_is_computed_twice(family: str, root: Path) -> None:
    folder, prompts, expected = model(family, root)
    flags = ("--colocated", "2", "--policy", "least-load", "--metadata", "none", *KINDS[family])
    with served(folder, *flags) as server, ThreadPoolExecutor(4) as pool:
        answers = begin_streams(server, prompts, pool)
        pid = server.children()["c2"]
        os.kill(pid, signal.SIGTERM)
        assert [answer.result() for answer in answers] == expected
        assert server.gauge("router_migrated_total") > 0 and not server.gauge("router_recomputed_tokens_total")
        assert not server.gauge("router_requests_failed_total")
        eventually(lambda: server.children().get("c2") not in (None, pid) and "c2" in server.members())
        assert expected[0].startswith(f"{server.complete(prompts[0], 20)} ")


@pytest.mark.parametrize("victim", ["c1", "c2"])
def test_either_end_is_killed_while_requests_migrate(victim: str, root: Path) -> None:
    """Answers go on from the tokens that clients have: nothing is lost, and nothing is wrong."""
    folder, prompts, expected = model("llama", root)
    flags = ("--colocated", "2", "--policy", "least-load", "--metadata", "none")
    with served(folder, *flags) as server, ThreadPoolExecutor(4) as pool:
        answers = begin_streams(server, prompts, pool)
        pids = server.children()
        os.kill(pids["c2"], signal.SIGTERM)
        eventually(lambda: server.gauge("router_migrations_total"))
        os.kill(pids[victim], signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
        eventually(lambda: server.members() == {"c1", "c2"})
