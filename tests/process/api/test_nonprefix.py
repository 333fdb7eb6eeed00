"""KV from behind other tokens over HTTP, in clusters of real processes: what an answer says of it, what it leaves."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from memserve.api.openai.request.schema import INEXACT_HEADER
from served_cluster import Server, served
from tiny_models import prompt, save_folder, tiny_module

CHUNKS = [prompt(48, seed).tolist() for seed in range(3)]
FIRST = [*CHUNKS[0], *CHUNKS[1], *CHUNKS[2], *prompt(30, 9).tolist()]
PROMPT = [*prompt(5, 7).tolist(), *CHUNKS[2], *CHUNKS[0], *prompt(40, 8).tolist()]
COLONY = "--colocated", "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with served(folder, *COLONY, "--nonprefix-reuse", "--nonprefix-recompute", "0.25") as server:
        ask(server, FIRST)
        yield server


def ask(server: Server, tokens: list[int], **more) -> httpx.Response:
    fields = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    answer = httpx.post(f"{server.url}/completions", json=fields | more, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def test_answer_says_that_it_is_inexact_and_where_kv_came_from(server):
    answer = ask(server, PROMPT, nonprefix_reuse=True, explain=True)
    assert INEXACT_HEADER == "x-memserve-inexact"
    reused = int(answer.headers[INEXACT_HEADER])
    assert reused == 2 * 36  # of two chunks of 48 tokens, a quarter of each computed anew
    body = answer.json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "inexact_tokens": reused}
    explained = body["memserve"]
    assert explained["inexact_tokens"] == reused
    assert explained["computed_tokens"] == len(PROMPT) - reused
    story = {entry["fact"]: entry["value"] for entry in explained["story"]}
    ranges = story["inexact_ranges"].split(", [")
    assert ranges[0].startswith("[5, 53) from 96 of ") and ranges[1].startswith("53, 101) from 0 of ")
    assert server.counter("inexact_tokens") >= reused


def test_streams_say_so_in_their_header(server):
    answer = ask(server, PROMPT, nonprefix_reuse=True, stream=True, stream_options={"include_usage": True})
    assert answer.headers["x-memserve-inexact"] == "72"
    assert '"inexact_tokens":72' in answer.text


def test_exact_requests_find_nothing_inexact(server, folder):
    """Bit for bit what a server without the option answers, before and after inexact ones with the same prompt."""
    answers = []
    with served(folder, *COLONY) as plain:
        ask(plain, FIRST)
        for each in (plain, server):
            asked = [ask(each, PROMPT, nonprefix_reuse=True), ask(each, PROMPT), ask(each, PROMPT)]
            assert ("x-memserve-inexact" in asked[0].headers) == (each is server)
            assert not any("x-memserve-inexact" in answer.headers for answer in asked[1:])
            answers.append([answer.json()["choices"] for answer in asked[1:]])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("more", [{"exact": True}, {"prompt": [PROMPT, PROMPT], "stream": True}])
def test_what_cannot_be_told_is_refused(server, more):
    fields = {"model": "tiny", "prompt": PROMPT, "nonprefix_reuse": True}
    answer = httpx.post(f"{server.url}/completions", json=fields | more, timeout=120)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "nonprefix_reuse"


def test_prefill_instances_serve_exactly_and_say_why(folder):
    with served(folder, "--prefill", "1", "--decode", "1", "--nonprefix-reuse") as server:
        ask(server, FIRST)
        answer = ask(server, PROMPT, nonprefix_reuse=True, explain=True)
    assert "x-memserve-inexact" not in answer.headers
    story = {entry["fact"]: entry["value"] for entry in answer.json()["memserve"]["story"]}
    assert "which has to be exact" in story["nonprefix_reuse"]
