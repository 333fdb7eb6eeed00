"""The API in front of the real engine and a tiny random model: bad input and crowds leak no block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from api_world import CONTEXT_TOKENS, EOS, World, running_server, tiny_tokenizer
from hostile_grammar import Target
from hostile_requests import HostileCase, check_answer, hostile_cases, send
from hostile_storm import fresh_seed, storm
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.units import KIB, MIB
from memserve.host.build import build_engine
from memserve.instance.stats import InstanceStats
from memserve.model import sampling
from memserve.system.memory import resident_bytes
from waiting import eventually

NAME = "tiny-llama"
STORM_ATTACKS = 400
KV_BYTES = 160 * KIB
"""20 blocks of 32 tokens: a crowd must queue and preempt."""


def save_tiny_model(folder: Path) -> None:
    """A random Llama that speaks the tests' tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_tokenizer().backend_tokenizer.get_vocab_size(),
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS, eos_token_id=EOS, bos_token_id=None, pad_token_id=EOS,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@dataclass
class WholeWorld:
    """A server with everything behind it."""

    world: World
    http: httpx.Client

    def instance(self) -> InstanceStats:
        return self.world.engine.stats().instance

    def check_nothing_is_held(self) -> None:
        """In the end there is no sequence, and only the cache holds blocks. A session's prefix is pinned only once its
        answer was sent, and unpinned when its time is over."""

        def held() -> tuple[int, ...]:
            stats = self.instance()
            used = stats.hbm.blocks_total - stats.hbm.blocks_free - stats.hbm.blocks_cached
            return (self.world.engine.requests_outstanding, stats.sequences_running, stats.requests_waiting,
                    stats.running_slots_tokens, used)  # fmt: skip

        eventually(lambda: not any(held()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeWorld]:
    folder = tmp_path_factory.mktemp("model") / NAME
    save_tiny_model(folder)
    options = EngineOptions(
        model=str(folder),
        dtype="float32",
        kv_memory_bytes=KV_BYTES,
        threads=1,
        scheduler=SchedulerConfig(max_running=16),
    )
    engine, model = build_engine(options)
    try:
        with (
            running_server(engine, model) as world,
            httpx.Client(base_url=world.url, timeout=60) as http,
        ):
            yield WholeWorld(world, http)
        assert engine.requests_outstanding == 0
    finally:
        engine.close(10)


@pytest.mark.parametrize(
    "case", list(hostile_cases(NAME, CONTEXT_TOKENS, "hello " * CONTEXT_TOKENS)), ids=lambda case: case.name
)
def test_hostile_request_leaks_nothing(whole: WholeWorld, case: HostileCase) -> None:
    before = whole.instance().requests_arrived
    check_answer(case, send(whole.http, case))
    assert whole.instance().requests_arrived == before
    whole.check_nothing_is_held()


def test_clients_that_leave_in_the_middle_leak_nothing(whole: WholeWorld) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2}
    for _ in range(5):
        with whole.http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
    whole.check_nothing_is_held()


def test_a_storm_of_random_requests_fails_no_step(whole: WholeWorld) -> None:
    """Another one in each run; ``HOSTILE_SEED=N`` repeats one."""
    greedy = {"model": NAME, "prompt": "hello world", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    before = whole.http.post("/v1/completions", json=greedy).json()["choices"]
    seed = fresh_seed()
    target = Target(NAME, CONTEXT_TOKENS, tiny_tokenizer().backend_tokenizer.get_vocab_size())
    result = asyncio.run(storm(whole.world.url, target, seed, range(STORM_ATTACKS), clients=16))
    assert not result.misses, f"HOSTILE_SEED={seed}: {len(result.misses)} misses\n" + "\n".join(result.misses[:5])
    for document in whole.http.get("/v1/documents").json()["data"]:
        assert whole.http.delete(f"/v1/documents/{document['id']}").status_code in (200, 404)
    eventually(lambda: not whole.instance().pins)  # sessions end by themselves
    whole.check_nothing_is_held()
    stats = whole.instance()
    assert (stats.steps_failed, stats.rows_failed, stats.finished["error"]) == (0, 0, 0), f"HOSTILE_SEED={seed}"
    assert stats.requests_finished >= STORM_ATTACKS // 20, "hardly any reached the model"
    assert whole.http.post("/v1/completions", json=greedy).json()["choices"] == before, f"HOSTILE_SEED={seed}"


def test_300_clients_on_a_tiny_pool_all_get_an_answer(whole: WholeWorld) -> None:
    async def one(number: int) -> tuple[int, int]:
        body = {"model": NAME, "prompt": f"{number} " * 20, "max_tokens": 12, "ignore_eos": True, "n": 1 + number % 2}
        # one client with 300 connections looks at all of them, for each, whenever an answer comes
        async with httpx.AsyncClient(base_url=whole.world.url, timeout=240) as client:
            response = await client.post("/v1/completions", json=body)
        return response.status_code, response.json().get("usage", {}).get("completion_tokens", 0)

    async def crowd() -> list[tuple[int, int]]:
        return await asyncio.gather(*map(one, range(300)))

    answers = asyncio.run(crowd())
    stats = whole.instance()
    assert stats.hbm.blocks_total == 20
    assert stats.preemptions_swap + stats.preemptions_recompute > 0, "the pool was not tiny enough to test anything"
    assert answers == [(200, 12 * (1 + number % 2)) for number in range(300)]
    whole.check_nothing_is_held()
    assert whole.http.get("/health").status_code == 200


def test_the_same_seed_gives_the_same_answer_streamed_or_not(whole: WholeWorld) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 30, "seed": 7, "stop": "e"}
    texts = [whole.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)]
    with whole.world.client() as client:
        chunks = client.completions.create(model=NAME, prompt="hello", max_tokens=30, seed=7, stop="e", stream=True)
        texts.append("".join(chunk.choices[0].text for chunk in chunks))
    assert len(set(texts)) == 1 and "e" not in texts[0]
    whole.check_nothing_is_held()


def test_excluding_every_token_is_400(whole: WholeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered as one: 400, not 500."""

    def ruin(row: torch.Tensor, tokens: Any, *_: object) -> None:
        row[torch.tensor(tokens.tolist())] = torch.inf  # as a tiny divisor would

    monkeypatch.setattr(sampling, "adjust_logits", ruin)
    body = {"model": NAME, "prompt": "hello", "max_tokens": 3, "repetition_penalty": 1.1}
    answer = whole.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_token_left"), answer.text
    whole.check_nothing_is_held()


def test_schema_too_complex_for_grammar_engine_is_400(whole: WholeWorld) -> None:
    """It is found while the answer is drawn, and no other request notices."""
    pytest.importorskip("llguidance", reason="the grammar engine is not installed: make install")
    fields = {f"f{at}": {"enum": [1]} for at in range(700)}
    schema = {"type": "object", "properties": fields, "required": ["f699"], "additionalProperties": False}
    body = {"model": NAME, "prompt": "hello", "max_tokens": 30, "structured_outputs": {"json": schema}}
    answer = whole.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "grammar_too_complex"), answer.text
    assert "items" in error["message"] and "\n" not in error["message"]
    small = {**body, "structured_outputs": {"json": {"enum": [1]}}}
    assert whole.http.post("/v1/completions", json=small).json()["choices"][0]["text"] == "1"
    whole.check_nothing_is_held()


BOMBS = {
    "structured_outputs": {"json": {"type": "integer", "multipleOf": 99999989}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "integer", "multipleOf": 99999971}},
    },
}


@pytest.mark.parametrize("field", BOMBS)
def test_a_grammar_that_would_take_gigabytes_ends_alone(whole: WholeWorld, field: str) -> None:
    """The answer is an error, and comes while others get theirs; this process does not grow, and no other is left."""
    pytest.importorskip("llguidance", reason="the grammar engine is not installed: make install")
    small = {"model": NAME, "prompt": "hello", "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
    assert whole.http.post("/v1/completions", json=small).json()["choices"][0]["text"] in ("yes", "no")
    resident = resident_bytes()
    route = "/v1/chat/completions" if field == "response_format" else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "x"}]} if field == "response_format" else {"prompt": "x"}
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(whole.http.post, route, json={"model": NAME, "max_tokens": 4, **asked, field: BOMBS[field]})
        answers = 0
        while not bomb.done() or not answers:
            assert whole.http.post("/v1/completions", json=small).json()["choices"][0]["text"] in ("yes", "no")
            answers += 1
        answer = bomb.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_too_complex"), answer.text
    assert resident_bytes() - resident < 64 * MIB
    whole.check_nothing_is_held()


def test_logprobs_of_a_prompt_do_not_depend_on_the_cache(whole: WholeWorld) -> None:
    body = {"model": NAME, "prompt": "hello world " * 12, "max_tokens": 0, "echo": True, "logprobs": 1}
    cold, warm = (whole.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"] for _ in range(2))
    assert cold["tokens"] == warm["tokens"]
    assert cold["token_logprobs"][1:] == pytest.approx(warm["token_logprobs"][1:], abs=1e-4)
    assert max(cold["token_logprobs"][1:]) < 0
