"""What a new user meets first: advised sizes, the shape and the context that are served, defaults of a chat."""

from __future__ import annotations

import random

import httpx
import pytest

from api_world import TinyModel, running_server, says
from fake_engine import FakeEngine
from memserve.api.openai.interfaces import sampling_params_of
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.base.units import GIB, MIB, flag_bytes, parse_bytes
from memserve.instance.scheduler.capacity import context_note, context_tokens, streamed_tokens

GEOMETRY = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")


def test_advised_size_is_sufficient_as_printed() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        count = draw.randrange(1, 1 << draw.randrange(1, 43))
        typed = parse_bytes(flag_bytes(count))
        assert count <= typed <= count + max(count // 10, 1), flag_bytes(count)
    assert (flag_bytes(384 * MIB), flag_bytes(2 * GIB), flag_bytes(1000)) == ("384MiB", "2GiB", "1000")


@pytest.mark.parametrize(("text", "count"), [("1.4MiB", 1468007), ("0.1k", 103), ("1.5 GB", 1_500_000_000), ("7", 7)])
def test_a_size_is_never_less_than_what_was_typed(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["9" * 5000, "1." + "9" * 5000, "1e3", "\u0663MiB", "-1", ""])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="as a size"):
        parse_bytes(text)


def test_the_advice_for_too_little_kv_memory_can_be_followed() -> None:
    with pytest.raises(UserError) as refused:
        EngineOptions(kv_memory_bytes=parse_bytes("1.4MiB")).instance_config(GEOMETRY, 8192, "n")
    advised = refused.value.hint.rpartition(" ")[2]
    assert EngineOptions(kv_memory_bytes=parse_bytes(advised)).instance_config(GEOMETRY, 8192, "n").pool.hbm_blocks >= 2


def note(options: EngineOptions, model_tokens: int = 8192) -> tuple[int, str]:
    config = options.instance_config(GEOMETRY, model_tokens, "n")
    served = context_tokens(config.max_model_tokens, config.pool, GEOMETRY.block_tokens)
    return served, context_note(served, model_tokens, options, config.pool, GEOMETRY)


def test_context_note_advises_flag_and_sufficient_value() -> None:
    assert note(EngineOptions()) == (8192, "")
    served, why = note(EngineOptions(kv_memory_bytes=64 * MIB))
    advised = why.partition("--kv-memory ")[2].split()[0]
    assert served < 8192 and note(EngineOptions(kv_memory_bytes=parse_bytes(advised))) == (8192, "")
    assert note(EngineOptions(kv_memory_bytes=parse_bytes(advised) - 2 * GEOMETRY.block_bytes))[0] < 8192
    served, why = note(EngineOptions(max_model_tokens=100))
    assert served == 100 and why.startswith("--max-model-tokens 100 ")


def test_context_note_by_layer_names_the_tier_that_is_short() -> None:
    by_layer = SchedulerConfig(layerwise="auto")

    def served(kv_mib: int, dram_mib: int) -> tuple[int, str]:
        options = EngineOptions(kv_memory_bytes=kv_mib * MIB, dram_memory_bytes=dram_mib * MIB, scheduler=by_layer)
        config = options.instance_config(GEOMETRY, 8192, "n")
        tokens = streamed_tokens(8192, config.pool, GEOMETRY.block_tokens, GEOMETRY.num_layers)
        return tokens, context_note(tokens, 8192, options, config.pool, GEOMETRY)

    tokens, why = served(64, 64)
    wanted_mib = parse_bytes(why.partition("--dram-memory ")[2].split()[0]) // MIB + 1
    assert tokens < 8192 and served(64, wanted_mib) == (8192, "")
    tokens, why = served(4, wanted_mib)
    more_mib = parse_bytes(why.partition("--kv-memory ")[2].split()[0]) // MIB + 1
    assert tokens < 8192 and served(more_mib, wanted_mib) == (8192, "") and more_mib < 64


def test_prompt_beyond_served_context_is_refused_with_advice() -> None:
    model = TinyModel(max_model_tokens=40, context_note="--kv-memory 2MiB would serve 64")
    with running_server(FakeEngine(says("hello")), model) as world:
        refused = httpx.post(world.url + "/v1/completions", json={"model": model.name, "prompt": [5] * 41}, timeout=30)
    assert refused.status_code == 400
    assert "40 tokens (of this server: --kv-memory 2MiB would serve 64)" in refused.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_an_exact_answer_is_refused_where_kv_is_rounded(endpoint: str) -> None:
    """A clear 400, which names the field and the option; elsewhere the field is accepted."""
    said = {"prompt": "hello"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    for option in ({}, {"kv_dtype": "int8"}, {"kv_lower_dtype": "int8"}):
        model = TinyModel(**option)
        asked = {"model": model.name, "max_tokens": 2, **said}
        with running_server(FakeEngine(says("hello")), model) as world:
            url = f"{world.url}/v1/{endpoint}"
            exact = httpx.post(url, json=asked | {"exact": True}, timeout=30)
            others = [httpx.post(url, json=asked | more, timeout=30) for more in ({}, {"exact": False})]
        assert [answer.status_code for answer in others] == [200, 200]
        assert exact.status_code == (400 if option else 200)
        for name in option:
            error = exact.json()["error"]
            assert error["param"] == "exact" and "--" + name.replace("_", "-") in error["message"]


def test_a_chat_without_max_tokens_ends_at_the_servers_bound() -> None:
    model = TinyModel(default_max_tokens=3)
    asked = {"model": model.name, "messages": [{"role": "user", "content": "hello"}]}
    with running_server(FakeEngine(says("The capital of France is Paris.")), model) as world:
        bounded = httpx.post(world.url + "/v1/chat/completions", timeout=30, json=asked).json()
        whole = httpx.post(
            world.url + "/v1/chat/completions", timeout=30, json=asked | {"max_completion_tokens": 200}
        ).json()
        least = httpx.post(world.url + "/v1/chat/completions", timeout=30, json=asked | {"min_tokens": 5}).json()
    assert bounded["choices"][0]["finish_reason"] == "length" and bounded["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert least["usage"]["completion_tokens"] == 5


def test_unset_sampling_is_the_models_then_openais() -> None:
    model = TinyModel(generation_defaults={"temperature": 0.2, "top_k": -1})
    chosen = sampling_params_of(model, {"top_p": 0.5, "temperature": None, "seed": 3})
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0.2, 0.5, 0, 0.0)
    assert sampling_params_of(model, {"temperature": 0.0}).temperature == 0.0
