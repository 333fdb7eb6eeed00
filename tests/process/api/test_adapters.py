"""``--lora``: adapters are models to clients, and a cluster keeps their KV apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest

from api_world import MODEL, says, serve
from fake_engine import FakeEngine
from lora_files import merged, save_adapter
from memserve.api.openai.request.plan import session_of
from memserve.base.errors import UserError
from memserve.base.types import salt_of, tenant_of
from memserve.cli.main import run
from memserve.model.loading.lora import read_adapters
from served_cluster import Server
from tiny_models import greedy_tokens, prompt, save_folder, tiny_module

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "support", tiny_module("llama"), ["q_proj"], seed=1)


def test_adapter_is_served_as_a_model_and_named_in_answers(adapter: Path) -> None:
    adapters = read_adapters([f"Support={adapter}"])
    engine = FakeEngine(says("hello"))
    with serve(engine, adapters=adapters) as world:
        client = world.client()
        cards = {card.id: card for card in client.models.list()}
        assert list(cards) == [MODEL, "Support"]
        assert (cards["Support"].parent, cards["Support"].root) == (MODEL, "support")
        assert client.models.retrieve("support") == cards["Support"]
        chat = client.chat.completions.create(model="Support", messages=CHAT)
        chunks = list(client.chat.completions.create(model="support", messages=CHAT, stream=True))
        response = client.responses.create(model="Support", input="hello")
        plain = client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
        assert {chat.model, response.model, *(chunk.model for chunk in chunks)} == {"Support"}
        assert plain.model == MODEL
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=CHAT)
    assert [request.adapter for request in engine.submitted] == [adapters[0].digest] * 3 + [""]
    assert len({request.isolation for request in engine.submitted}) == 2
    assert {tenant_of(request.isolation) for request in engine.submitted} == {engine.submitted[0].tenant}


def test_a_session_keeps_its_name_whatever_computes_it() -> None:
    for salt in ("", "5a17", salt_of("", "c0de"), salt_of("5a17", "c0de")):
        handle = f"salted:{salt}:session:talk" if salt else "session:talk"
        assert session_of(handle) == "talk"


def test_documents_are_for_the_model_itself(adapter: Path) -> None:
    with serve(FakeEngine(says("hello")), adapters=read_adapters([f"support={adapter}"])) as world:
        client = world.client()
        with pytest.raises(openai.BadRequestError, match="without an adapter"):
            client.completions.create(model="support", prompt="hello", extra_body={"document": "book"})


def test_a_name_of_the_model_is_no_name_for_an_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(UserError, match="a name of the model itself"),
        serve(FakeEngine(says("hello")), adapters=read_adapters([f"{MODEL}={adapter}"])),
    ):
        pass
    assert run(["serve", "--model", "/nowhere", "--lora", f"support={adapter / 'gone'}"]) == 1
    said = capsys.readouterr().err
    assert "cannot read the adapter 'support'" in said and "loading" not in said


def test_adapters_are_applied_at_prefill_and_decode(tmp_path: Path) -> None:
    module = tiny_module("llama")
    places = {name: save_adapter(tmp_path / name, module, ["q_proj", "v_proj"], at) for at, name in enumerate("ab")}
    wholes = {"tiny": module} | {name: merged(module, place) for name, place in places.items()}
    folder = save_folder(module, tmp_path / "tiny")
    tokens = prompt(100, seed=3)
    flags = [word for name, place in places.items() for word in ("--lora", f"{name}={place}")]
    server = Server(folder, "--prefill", "1", "--decode", "1", "--metadata", "none", *flags)
    try:
        for cached in (0, 96):
            for name, whole in wholes.items():
                answer = server.client.completions.create(
                    model=name, prompt=tokens.tolist(), max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
                )
                expected = greedy_tokens(whole, np.array(tokens), 12)
                assert answer.choices[0].text.split() == [f"w{token}" for token in expected], (name, cached)
                assert answer.usage.prompt_tokens_details.cached_tokens == cached, name
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0
