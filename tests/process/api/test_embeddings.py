"""``/v1/embeddings``: exact beside transformers, whatever chunks and cached prefixes it is computed with."""

from __future__ import annotations

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
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.units import MIB
from memserve.host.build import build_engine
from memserve.model.loading.pooling import pooling_of

CONTEXT = 1024
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
def embedder(folder: Path, family: str, pooling: str, *, normalizes: bool = True, **config: Any) -> Iterator[Embedder]:
    module = save_model(folder, family, pooling, normalizes=normalizes, **config)
    steps = SchedulerConfig(max_running=8, max_step_tokens=64)  # long texts take several chunks
    options = EngineOptions(str(folder), dtype="float32", kv_memory_bytes=2 * MIB, threads=1, scheduler=steps)
    engine, model = build_engine(options)
    try:
        with running_server(engine, model, aliases=["tiny"]) as world:
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
                                    {"input": "x", "dims": 1}])  # fmt: skip
def test_wrong_bodies_of_embeddings_are_400(served: Embedder, fields: dict[str, Any]) -> None:
    url = f"{served.client.base_url}embeddings"
    assert httpx.post(url, json={"model": "tiny", **fields}).status_code == 400


def test_model_that_embeds_generates_no_text(served: Embedder) -> None:
    for path in ("completions", "chat/completions", "responses", "rerank"):
        answer = httpx.post(f"{served.client.base_url}{path}", json={"prompt": "x"})
        assert answer.status_code == 404 and "gives embeddings" in answer.json()["error"]["message"]


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
