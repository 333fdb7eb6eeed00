"""``/v1/embeddings``: exact beside transformers, whatever chunks and cached prefixes it is computed with."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from api_world import EOS, SCRIPT_TEXT, running_server, says, serve, tiny_tokenizer
from fake_engine import FakeEngine
from memserve.api.http.config import ApiConfig
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.units import MIB
from memserve.host.build import build_engine
from memserve.model.loading.pooling import pooling_of

CONTEXT = 1024
CHAT = [{"role": "user", "content": "The cat sat."}, {"role": "assistant", "content": "It sat on a rug."}]
TEXTS = ["The capital of France is Paris.", "hello", "Grüße aus 東京 😀! " * 9, "The capital of Spain. " * 12]


def save_model(folder: Path, family: str, pooling: str, *, normalizes: bool = True, **config: Any) -> Any:
    """A random model with the files that sentence-transformers writes; returns it in transformers."""
    torch.manual_seed(2)
    sizes = {
        "vocab_size": tiny_tokenizer().backend_tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": CONTEXT, "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS,
        "tie_word_embeddings": family == "qwen3", **config,
    }  # fmt: skip
    module = AutoModelForCausalLM.from_config({"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**sizes)).eval()
    module.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return module


@dataclass
class Embedder:
    """A served model, and the same in transformers."""

    client: openai.OpenAI
    engine: Any
    module: Any
    pooling: str
    normalizes: bool

    def expected(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            states = self.module.model(torch.tensor([tokens])).last_hidden_state[0]
        pooled = (states[-1] if self.pooling == "lasttoken" else states.mean(0)).numpy()
        return pooled / np.linalg.norm(pooled) if self.normalizes else pooled

    def ask(self, texts: Any, **fields: Any) -> list[np.ndarray]:
        answer = self.client.embeddings.create(model="tiny", input=texts, **fields)
        return [np.array(entry.embedding, np.float32) for entry in answer.data]


def tokens_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text))


@contextmanager
def embedder(
    folder: Path,
    family: str,
    pooling: str,
    *,
    normalizes: bool = True,
    embedding_tokens_max: int = 0,
    files: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Embedder]:
    module = save_model(folder, family, pooling, normalizes=normalizes, **config)
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    steps = SchedulerConfig(max_running=8, max_step_tokens=64)  # long texts take several chunks
    options = EngineOptions(str(folder), dtype="float32", kv_memory_bytes=2 * MIB, threads=1, scheduler=steps)
    engine, model = build_engine(options)
    try:
        api = ApiConfig(embedding_tokens_max=embedding_tokens_max)
        with running_server(engine, model, aliases=["tiny"], config=api) as world:
            yield Embedder(world.client(), engine, module, pooling, normalizes)
    finally:
        engine.close(10)


KINDS = [("llama", "mean_tokens", True), ("llama", "lasttoken", False), ("qwen3", "lasttoken", True),
         ("qwen3", "mean_tokens", False)]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]} {kind[1]}")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    family, pooling, normalizes = request.param
    with embedder(tmp_path_factory.mktemp("model") / "m", family, pooling, normalizes=normalizes) as served:
        yield served


def test_embeddings_equal_transformers(served: Embedder) -> None:
    expected = [served.expected(tokens_of(text)) for text in TEXTS]
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    for texts in (TEXTS, [tokens_of(text) for text in TEXTS]):
        for _ in range(2):  # then prefixes are cached
            for got, wanted in zip(served.ask(texts), expected, strict=True):
                np.testing.assert_allclose(got, wanted, atol=2e-5)
    (alone,) = served.ask(TEXTS[3])
    np.testing.assert_allclose(alone, expected[3], atol=2e-5)
    (alone,) = served.ask(tokens_of(TEXTS[3]))
    np.testing.assert_allclose(alone, expected[3], atol=2e-5)


def test_longer_text_behind_a_cached_prefix_is_exact(served: Embedder) -> None:
    before = served.engine.stats().instance.cached_tokens
    for count in (12, 20, 28):
        text = "A common beginning of many texts. " * count + str(count)
        np.testing.assert_allclose(served.ask(text)[0], served.expected(tokens_of(text)), atol=2e-5)
    reused = served.engine.stats().instance.cached_tokens - before
    assert reused > 100 if served.pooling == "lasttoken" else reused == 0


def test_many_embeddings_at_once_are_exact(served: Embedder) -> None:
    texts = [f"{number} " + "and so on, with words " * (number % 30) for number in range(64)]
    for text, got in zip(texts, served.ask(texts), strict=True):
        np.testing.assert_allclose(got, served.expected(tokens_of(text)), atol=2e-5)


def test_base64_usage_and_length(served: Embedder) -> None:
    raw = served.client.embeddings.with_raw_response.create(model="tiny", input=TEXTS[:2], encoding_format="float")
    body = json.loads(raw.text)
    assert body["usage"] == {key: sum(len(tokens_of(text)) for text in TEXTS[:2]) for key in body["usage"]}
    assert [entry["index"] for entry in body["data"]] == [0, 1] and body["object"] == "list"
    assert len(body["data"][0]["embedding"]) == 32
    for got, entry in zip(served.ask(TEXTS[:2]), body["data"], strict=True):  # the client asks for base64
        np.testing.assert_array_equal(got, np.array(entry["embedding"], np.float32))
    (cut,) = served.ask(TEXTS[3], extra_body={"truncate_prompt_tokens": 10})
    np.testing.assert_allclose(cut, served.expected(tokens_of(TEXTS[3])[:10]), atol=2e-5)


@pytest.mark.parametrize("fields", [{"input": []}, {"input": [1.5]}, {"input": ""}, {"input": "x", "dimensions": 16},
                                    {"input": "x", "encoding_format": "int8"}, {"input": "hello " * 2000},
                                    {"input": "x", "dims": 1}, {}, {"input": "x", "messages": CHAT},
                                    {"messages": [{"role": "user"}]}, {"input": [-1]},
                                    {"input": ["x"] * 1025, "padding": "max_length"},
                                    {"input": "x", "truncate_prompt_tokens": CONTEXT + 1},
                                    {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
                                    ])  # fmt: skip
def test_wrong_bodies_of_embeddings_are_400(served: Embedder, fields: dict[str, Any]) -> None:
    url = f"{served.client.base_url}embeddings"
    assert httpx.post(url, json={"model": "tiny", **fields}).status_code == 400


def test_model_that_embeds_generates_no_text(served: Embedder) -> None:
    for path in ("completions", "chat/completions", "responses", "messages"):
        answer = httpx.post(f"{served.client.base_url}{path}", json={"prompt": "x"})
        assert answer.status_code == 404 and "gives embeddings" in answer.json()["error"]["message"]


def test_a_text_as_long_as_the_context_is_embedded(served: Embedder) -> None:
    tokens = (tokens_of(TEXTS[3]) * 40)[:CONTEXT]
    np.testing.assert_allclose(served.ask(tokens)[0], served.expected(tokens), atol=2e-5)
    with pytest.raises(openai.BadRequestError, match="Please reduce the length"):
        served.ask([*tokens, 1])
    first, last = (
        served.ask([*tokens, 7, 8], extra_body={"truncate_prompt_tokens": -1, "truncation_side": side})[0]
        for side in ("right", "left")
    )
    np.testing.assert_allclose(first, served.expected(tokens), atol=2e-5)
    np.testing.assert_allclose(last, served.expected([*tokens[2:], 7, 8]), atol=2e-5)


def test_padded_texts_are_as_long_as_the_context(served: Embedder) -> None:
    (padded,) = served.ask("hello", extra_body={"padding": "max_length"})
    ids = tokens_of("hello")
    np.testing.assert_allclose(padded, served.expected(ids + [EOS] * (CONTEXT - len(ids))), atol=2e-5)


def test_conversations_are_embedded_through_the_template(served: Embedder) -> None:
    url = str(served.client.base_url).removesuffix("v1/")
    for path in ("v1/embeddings", "invocations"):
        for open_end in ({}, {"add_generation_prompt": True}):
            body = {"messages": CHAT, "encoding_format": "float", **open_end}
            answer = httpx.post(url + path, json=body).raise_for_status().json()
            text = tiny_tokenizer().apply_chat_template(
                CHAT, tokenize=False, **{"add_generation_prompt": False, **open_end}
            )
            np.testing.assert_allclose(answer["data"][0]["embedding"], served.expected(tokens_of(text)), atol=2e-5)
            assert answer["usage"]["prompt_tokens"] == len(tokens_of(text))


def test_normalising_is_chosen_by_the_request(served: Embedder) -> None:
    plain, unit = (served.ask(TEXTS[0], extra_body={"use_activation": on})[0] for on in (False, True))
    assert abs(np.linalg.norm(plain) - 1) > 1e-3
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), atol=1e-6)


def test_pooling_is_vllms_form_with_its_errors(served: Embedder) -> None:
    url = str(served.client.base_url).replace("/v1/", "/pooling")
    answer = httpx.post(url, json={"input": TEXTS[:2], "task": "embed"}).raise_for_status().json()
    for entry, text in zip(answer["data"], TEXTS, strict=False):
        np.testing.assert_allclose(entry["data"], served.expected(tokens_of(text)), atol=2e-5)
    for task, message in (("classify", "Unsupported task: 'classify'"), ("plugin", "No IOProcessor plugin installed.")):
        error = httpx.post(url, json={"input": "x", "task": task}).json()["error"]
        assert error["type"] == "BadRequestError" and error["message"].startswith(message)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_numbers_come_as_bytes_of_any_dtype(served: Embedder, dtype: str, endianness: str) -> None:
    url, floats = f"{served.client.base_url}embeddings", served.ask(TEXTS[:2])
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(dtype) or getattr(torch, dtype)
    expected = b""
    for values in floats:
        raw = torch.from_numpy(values).to(kind).view(torch.uint8).numpy()
        raw = raw.reshape(-1, kind.itemsize)[:, ::-1] if endianness == "big" else raw
        expected += raw.tobytes()
    body = {"input": TEXTS[:2], "embed_dtype": dtype, "endianness": endianness}
    with_header = httpx.post(url, json={**body, "encoding_format": "bytes"})
    assert with_header.content == httpx.post(url, json={**body, "encoding_format": "bytes_only"}).content == expected
    metadata = json.loads(with_header.headers["metadata"])
    assert [entry["end"] - entry["start"] for entry in metadata["data"]] == [32 * kind.itemsize] * 2
    assert metadata["data"][1]["end"] == len(expected) and metadata["usage"]["prompt_tokens"] > 0
    in_base64 = httpx.post(url, json={**body, "encoding_format": "base64"}).json()["data"]
    assert b"".join(base64.b64decode(entry["embedding"]) for entry in in_base64) == expected


def test_cohere_form_has_all_its_types(served: Embedder) -> None:
    url = str(served.client.base_url).replace("/v1/", "/v2/embed")
    expected = [served.expected(tokens_of(text)) for text in TEXTS]
    body = {"texts": TEXTS, "embedding_types": ["float", "binary", "ubinary", "base64"]}
    answer = httpx.post(url, json=body).raise_for_status().json()
    for place, values in enumerate(expected):
        forms = {kind: entries[place] for kind, entries in answer["embeddings"].items()}
        np.testing.assert_allclose(forms["float"], values, atol=2e-5)
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(forms["base64"]), "<f4"), forms["float"], atol=1e-6)
        bits = np.packbits(np.array(forms["float"]) >= 0)
        assert forms["ubinary"] == bits.tolist() and forms["binary"] == (bits.astype(int) - 128).tolist()
    assert answer["texts"] == TEXTS
    assert answer["meta"]["billed_units"]["input_tokens"] == sum(len(tokens_of(text)) for text in TEXTS)


def test_cohere_form_cuts_where_it_is_told(served: Embedder) -> None:
    url = str(served.client.base_url).replace("/v1/", "/v2/embed")
    text = "".join(f"{number} and so on " for number in range(400))
    ids = tokens_of(text)
    for cut, tokens in ((None, ids[:CONTEXT]), ("END", ids[:CONTEXT]), ("START", ids[-CONTEXT:])):
        body = {"texts": [text], **({} if cut is None else {"truncate": cut})}
        answer = httpx.post(url, json=body).raise_for_status().json()
        np.testing.assert_allclose(answer["embeddings"]["float"][0], served.expected(tokens), atol=2e-5)
    for wrong in ({"truncate": "NONE"}, {"truncate": "NONE", "max_tokens": 9}, {"input_type": "search_query"}):
        answer = httpx.post(url, json={"texts": [text], **wrong})
        assert answer.status_code == 400, wrong
    assert "Unsupported input_type" in answer.json()["error"]["message"]
    assert httpx.post(url, json={}).status_code == 400


def test_texts_are_ranked_by_their_embeddings(served: Embedder) -> None:
    url = str(served.client.base_url).removesuffix("v1/")
    units = [values / np.linalg.norm(values) for values in (served.expected(tokens_of(text)) for text in TEXTS)]
    expected = [float(units[0] @ values) for values in units[1:]]
    for names in (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
        for path in ("score", "invocations"):
            answer = httpx.post(url + path, json=dict(zip(names, (TEXTS[0], TEXTS[1:]), strict=True))).json()
            assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=2e-5)
    for path in ("rerank", "invocations"):
        answer = httpx.post(url + path, json={"query": TEXTS[0], "documents": TEXTS[1:]}).raise_for_status().json()
        order = [entry["index"] for entry in answer["results"]]
        assert order == sorted(range(3), key=lambda place: -expected[place])
        assert answer["results"][0]["relevance_score"] == pytest.approx(max(expected), abs=2e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(tokens_of(text)) for text in TEXTS)
    refused = httpx.post(url + "rerank", json={"query": "x " * 2000, "documents": ["x"]})
    assert refused.status_code == 400 and "Please reduce the length of the input prompt" in refused.text


def test_long_texts_are_embedded_in_pieces(tmp_path: Path) -> None:
    tokens = (tokens_of("A common beginning of many texts. ") * 400)[: 2 * CONTEXT + 100]
    with embedder(tmp_path / "m", "llama", "mean_tokens", embedding_tokens_max=3 * CONTEXT) as served:
        pieces = [tokens[first : first + CONTEXT] for first in range(0, len(tokens), CONTEXT)]
        with torch.inference_mode():
            states = [served.module.model(torch.tensor([piece])).last_hidden_state[0] for piece in pieces]
        mean = torch.cat(states).mean(0).numpy()
        for asked in (tokens, [tokens, tokens_of("hello")]):
            np.testing.assert_allclose(served.ask(asked)[0], mean / np.linalg.norm(mean), atol=2e-5)
        with pytest.raises(openai.BadRequestError, match="Please reduce"):
            served.ask(tokens * 2)


def test_input_types_are_those_of_the_models_files(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Find: ", "document": ""}}
    with embedder(tmp_path / "m", "qwen3", "lasttoken", files={"config_sentence_transformers.json": prompts}) as served:
        url = str(served.client.base_url).replace("/v1/", "/v2/embed")
        for kind, before in (("query", "Find: "), ("search_query", "Find: "), ("search_document", "")):
            answer = httpx.post(url, json={"texts": [TEXTS[0]], "input_type": kind}).raise_for_status().json()
            expected = served.expected(tokens_of(before + TEXTS[0]))
            np.testing.assert_allclose(answer["embeddings"]["float"][0], expected, atol=2e-5)
        assert httpx.post(url, json={"texts": ["x"], "input_type": "image"}).status_code == 400


def test_dimensions_are_cut_and_normalised_again(tmp_path: Path) -> None:
    with embedder(tmp_path / "m", "qwen3", "lasttoken", matryoshka_dimensions=[8, 16]) as served:
        whole = served.expected(tokens_of(TEXTS[0]))
        for size in (8, 16):
            (cut,) = served.ask(TEXTS[0], dimensions=size)
            np.testing.assert_allclose(cut, whole[:size] / np.linalg.norm(whole[:size]), atol=2e-5)
        with pytest.raises(openai.BadRequestError, match="32, or one of"):
            served.ask(TEXTS[0], dimensions=12)


def test_files_say_how_a_model_embeds(tmp_path: Path) -> None:
    save_model(tmp_path / "cls", "llama", "cls_token")
    with pytest.raises(UserError, match="pooling_mode_cls_token"):
        pooling_of(tmp_path / "cls", "auto")
    assert pooling_of(tmp_path / "cls", "none") is None
    assert pooling_of(tmp_path, "auto") is None, "no file says that it embeds"
    chosen = pooling_of(tmp_path, "last")
    assert chosen is not None and (chosen.kind, chosen.normalizes) == ("last", True)


def test_models_whose_logits_are_no_states_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "llama", "lasttoken")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(UserError, match="final_logit_softcapping"):
        build_engine(EngineOptions(str(tmp_path / "m"), dtype="float32", kv_memory_bytes=MIB, threads=1))


def test_generating_models_say_how_they_would_embed() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world, pytest.raises(openai.NotFoundError, match="--pooling last"):
        world.client().embeddings.create(model="x", input="hello")
