"""``--lora``: adapters are models to clients, and a cluster keeps their KV apart."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from pathlib import Path

import httpx
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
from memserve.protocol.events import AdapterAnswered
from memserve.protocol.messages import AdapterFiles
from served_cluster import Server, eventually
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


def test_a_name_of_the_model_is_no_name_for_an_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(UserError, match="a name of the model itself"),
        serve(FakeEngine(says("hello")), adapters=read_adapters([f"{MODEL}={adapter}"])),
    ):
        pass
    assert run(["serve", "--model", "/nowhere", "--lora", f"support={adapter / 'gone'}"]) == 1
    said = capsys.readouterr().err
    assert "cannot read the adapter 'support'" in said and "loading" not in said


def test_folder_is_refused_where_adapters_are_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--lora-folder", "/adapters", "--engine", "vllm=http://localhost:1"]) == 1
    assert "do not come and go here" in capsys.readouterr().err


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


def test_documents_are_for_the_model_that_computed_them(adapter: Path) -> None:
    engine = FakeEngine(says("hello"))
    with serve(engine, adapters=read_adapters([f"support={adapter}"])) as world:
        client = world.client()
        put = {"text": "The capital of France is Paris.", "endpoint": "completions"}
        url = f"{world.url}/v1/documents"
        card = httpx.put(f"{url}/book", json=put | {"model": "Support"}, timeout=30).json()
        assert card["model"] == "support"
        httpx.put(f"{url}/plain", json=put, timeout=30)
        assert httpx.put(f"{url}/odd", json=put | {"model": "unknown"}, timeout=30).status_code == 404
        for name, document in (("support", "book"), (MODEL, "plain")):
            client.completions.create(model=name, prompt="hello", extra_body={"document": document})
        with pytest.raises(openai.BadRequestError, match="was computed without an adapter"):
            client.completions.create(model="support", prompt="hello", extra_body={"document": "plain"})
        with pytest.raises(openai.BadRequestError, match="was computed by the adapter 'support'"):
            client.completions.create(model=MODEL, prompt="hello", extra_body={"document": "book"})
    computed, _, asked, plain = engine.submitted
    assert computed.adapter == asked.adapter and asked.isolation == computed.isolation != plain.isolation


class Loading(FakeEngine):
    """An engine that loads what it is told, or says why not."""

    def __init__(self) -> None:
        super().__init__(says("hello"))
        self.loaded: dict[str, AdapterFiles] = {}
        self.known: tuple[AdapterFiles, ...] = ()
        self.answer = AdapterAnswered(0)

    def stored_adapters(self) -> tuple[AdapterFiles, ...]:
        return self.known

    def load_adapter(self, files: AdapterFiles) -> Future[AdapterAnswered]:
        if not self.answer.error:
            self.loaded[files.name] = files
        return self._answered()

    def unload_adapter(self, name: str, *, is_fixed: bool = False) -> Future[AdapterAnswered]:
        del self.loaded[name]
        return self._answered()

    def _answered(self) -> Future[AdapterAnswered]:
        future = Future[AdapterAnswered]()
        future.set_result(self.answer)
        return future


def test_calls_and_their_errors_are_vllm_s(adapter: Path, tmp_path: Path) -> None:
    engine = Loading()
    with serve(engine, lora_folder=adapter.parent) as world:
        client = world.client()

        def load(name: str, path: object, **more: object) -> str:
            body = {"lora_name": name, "lora_path": str(path), **more}
            return client.post("load_lora_adapter", cast_to=str, body=body)

        def unload(name: str) -> str:
            return client.post("unload_lora_adapter", cast_to=str, body={"lora_name": name})

        assert load("new", adapter) == "Success: LoRA adapter 'new' added successfully."
        assert [card.id for card in client.models.list()] == [MODEL, "new"]
        card = client.models.retrieve("new")
        assert (card.parent, card.root) == (MODEL, str(adapter))
        with pytest.raises(openai.BadRequestError, match="'NEW' has already been loaded"):
            load("NEW", adapter)
        assert "Success" in load("New", adapter.name, load_inplace=True), "relative to the folder"
        with pytest.raises(openai.BadRequestError, match="conflicts with a served base model"):
            load(MODEL, adapter)
        with pytest.raises(openai.BadRequestError, match="Both 'lora_name' and 'lora_path' must be provided"):
            load("", adapter)
        outside = save_adapter(tmp_path / "outside", tiny_module("llama"), ["q_proj"], seed=1)
        (adapter.parent / "link").symlink_to(outside)
        for path in ("/not/an/adapter", outside, "../outside", "link", adapter.parent):
            with pytest.raises(openai.NotFoundError, match="No adapter found for"):
                load("other", path)
        odd = adapter.parent / "odd"
        odd.mkdir()
        (odd / "adapter_config.json").write_text("this is not json")
        with pytest.raises(openai.InternalServerError, match="cannot read the adapter"):
            load("odd", odd)
        engine.answer = AdapterAnswered(0, "c1: it does not fit")
        with pytest.raises(openai.InternalServerError, match="c1: it does not fit"):
            load("unfit", adapter)
        engine.answer = AdapterAnswered(0, "no instance", is_passing=True)
        with pytest.raises(openai.InternalServerError, match="no instance") as raised:
            load("unfit", adapter)
        assert raised.value.status_code == 503 and raised.value.response.headers["retry-after"]
        engine.answer = AdapterAnswered(0)
        assert [card.id for card in client.models.list()] == [MODEL, "new"], "what failed has changed nothing"
        assert unload("new") == "Success: LoRA adapter 'new' removed successfully."
        with pytest.raises(openai.NotFoundError, match="'new' cannot be found"):
            unload("new")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="new", prompt="hello")
        assert httpx.post(f"{world.url}/adapters", json={"name": "sage", "src": str(adapter)}).status_code == 200
        headers = {"X-Amzn-SageMaker-Adapter-Identifier": "sage"}
        asked = httpx.post(f"{world.url}/invocations", json={"prompt": "hello"}, headers=headers)
        assert asked.json()["model"] == "sage"
        assert httpx.delete(f"{world.url}/adapters/sage").status_code == 200
        assert httpx.delete(f"{world.url}/adapters/sage").status_code == 404
    assert not engine.loaded


def test_names_of_the_last_server_are_there(adapter: Path) -> None:
    engine = Loading()
    engine.known = (AdapterFiles("kept", str(adapter), "c0de"),)
    with serve(engine, lora_folder=adapter.parent) as world:
        world.client().completions.create(model="kept", prompt="hello")
    assert engine.submitted[0].adapter == "c0de"
    engine.loaded = {files.name: files for files in engine.known}
    with serve(engine) as world:
        assert [card.id for card in world.client().models.list()] == [MODEL]
    assert not engine.loaded, "without --lora-folder instances are not asked to have it"


def test_operators_keys_are_needed_where_there_are_some(adapter: Path) -> None:
    body = {"lora_name": "new", "lora_path": str(adapter)}
    cases = (
        ({"api_keys": ["user"], "metrics_keys": ["operator"]}, {"user": 401, "operator": 200, "other": 401}),
        ({"api_keys": ["user"]}, {"user": 200, "other": 401}),
    )
    for keys, expected in cases:
        with serve(Loading(), lora_folder=adapter.parent, **keys) as world:
            for key, status in expected.items():
                headers = {"authorization": f"Bearer {key}"}
                url = f"{world.url}/v1/load_lora_adapter"
                assert httpx.post(url, json=body, headers=headers).status_code == status, (keys, key)
    with serve(FakeEngine(says("hello"))) as world:
        refused = httpx.post(f"{world.url}/v1/load_lora_adapter", json=body)
        assert refused.status_code == 404 and "--lora-folder" in refused.json()["error"]["message"]


def test_cluster_loads_unloads_and_remembers_adapters(tmp_path: Path) -> None:
    """A prefill and a decode instance: exact at both, kept through the death of one and of the router."""
    module, place = tiny_module("llama"), tmp_path / "adapters"
    one = save_adapter(place / "one", module, ["q_proj", "v_proj"], 1)
    two = save_adapter(place / "two", module, ["q_proj", "down_proj"], 2, dora=True, saves=("lm_head",))
    wholes = {"tiny": module, "one": merged(module, one), "two": merged(module, two)}
    folder, tokens = save_folder(module, tmp_path / "tiny"), prompt(100, seed=3)
    flags = "--prefill", "1", "--decode", "1", "--metadata", str(tmp_path / "records"), "--lora-folder", str(place)

    def check(server: Server, cached: int, **names: str) -> None:
        for name, whole in names.items():
            answer = server.client.completions.create(
                model=name, prompt=tokens.tolist(), max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            expected = greedy_tokens(wholes[whole], np.array(tokens), 12)
            assert answer.choices[0].text.split() == [f"w{token}" for token in expected], (name, whole)
            assert answer.usage.prompt_tokens_details.cached_tokens in (cached, 96), name

    def call(server: Server, what: str, **body: object) -> str:
        return server.client.post(f"{what}_lora_adapter", cast_to=str, body=body)

    server = Server(folder, *flags)
    try:
        call(server, "load", lora_name="a", lora_path=str(one))
        call(server, "load", lora_name="b", lora_path="two")
        assert [card.id for card in server.client.models.list()] == ["tiny", "a", "b"]
        check(server, 0, tiny="tiny", a="one", b="two")
        long = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
        stream = server.client.completions.create(model="a", prompt=tokens.tolist(), stream=True, **long)
        first = next(iter(stream)).choices[0].text
        call(server, "unload", lora_name="a")
        with pytest.raises(openai.NotFoundError):
            server.client.completions.create(model="a", prompt="w3")
        text = first + "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        expected = greedy_tokens(wholes["one"], np.array(tokens), 60)
        assert text.split() == [f"w{token}" for token in expected], "what runs goes on with its adapter"
        call(server, "load", lora_name="a", lora_path=str(two))
        call(server, "load", lora_name="b", lora_path=str(one), load_inplace=True)
        check(server, 96, a="two", b="one")
        pid = server.children()["d1"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.children().get("d1") not in (None, pid) and len(server.members()) == 2)
        check(server, 96, a="two", b="one", tiny="tiny")
    finally:
        server.process.kill()
        server.process.wait(60)
    server = Server(folder, *flags)
    try:
        assert [card.id for card in server.client.models.list()] == ["tiny", "b", "a"]
        check(server, 0, a="two", b="one", tiny="tiny")
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_any_router_loads_adapters_and_knows_them(tmp_path: Path) -> None:
    """Two routers at one port: what one of them has been asked for, both serve when the call is answered; also after
    the death of either, and of an instance."""
    module, place = tiny_module("llama"), tmp_path / "adapters"
    one = save_adapter(place / "one", module, ["q_proj", "v_proj"], 1)
    fixed = save_adapter(tmp_path / "fixed", module, ["q_proj"], 2)
    wholes = {"tiny": module, "a": merged(module, one), "kept": merged(module, fixed)}
    folder, tokens = save_folder(module, tmp_path / "tiny"), prompt(40, seed=3)
    flags = ["--routers", "2", "--metadata", str(tmp_path / "records"), "--lora-folder", str(place)]
    server = Server(folder, *flags, "--lora", f"kept={fixed}")

    def ask(path: str, **body: object) -> httpx.Response:
        """Over a connection of its own: any router may get it."""
        return httpx.post(f"{server.url}/{path}", json=body, timeout=60)

    def check_all(**found: bool) -> None:
        """Often enough that both routers are asked."""
        for _ in range(12):
            for name, is_found in found.items():
                body = {"model": name, "prompt": tokens.tolist(), "max_tokens": 6, "temperature": 0}
                answer = ask("completions", **body, ignore_eos=True)
                assert (answer.status_code == 200) == is_found, (name, answer.text)
                if is_found:
                    expected = greedy_tokens(wholes[name], np.array(tokens), 6)
                    shown = [f"w{token}" for token in expected if token not in (0, 2)]  # the others are special
                    assert answer.json()["choices"][0]["text"].split() == shown, name

    try:
        assert len(server.children()) == 2, "an instance, and a router that is not the owner"
        check_all(tiny=True, kept=True, a=False)
        for _ in range(4):
            assert ask("load_lora_adapter", lora_name="a", lora_path="one").status_code == 200
            check_all(a=True)
            assert ask("unload_lora_adapter", lora_name="a").status_code == 200
            check_all(a=False)
        assert ask("load_lora_adapter", lora_name="a", lora_path="one").status_code == 200
        assert ask("unload_lora_adapter", lora_name="kept").status_code == 200
        check_all(a=True, kept=False, tiny=True)
        for name, pid in server.children().items():
            os.kill(pid, signal.SIGKILL)
            eventually(lambda name=name, pid=pid: server.children().get(name) not in (None, pid))
            eventually(lambda: ask("completions", model="a", prompt="w3", max_tokens=1).status_code == 200)
            eventually(lambda: len(server.members()) == 1)
            check_all(a=True, kept=False, tiny=True)
    finally:
        server.process.kill()
        server.process.wait(60)
