"""``--layerwise auto`` in a whole engine: prompts that wait for memory otherwise, and the same tokens."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from geometries import SHAPES
from memserve import LLM
from memserve.base.errors import UserError
from memserve.base.types import SamplingParams
from memserve.instance.layerwise.state import LayerReport
from memserve.model.tier_file import TierFile
from tiny_models import greedy_answers, greedy_tokens, prompt, save_folder, tiny_module

SHAPE = SHAPES["mqa"]
OPTIONS = {"dtype": "float32", "threads": 1, "block_tokens": 8, "max_step_tokens": 16, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(SHAPE.module(), Path(tmp_path_factory.mktemp("models")) / "tiny"))


def answers(model: str, **options: object) -> tuple[list[tuple[int, ...]], LayerReport]:
    """Greedy tokens of six prompts at once, and what became of their KV by layer."""
    with LLM(model, **OPTIONS, **options) as llm, ThreadPoolExecutor(6) as pool:
        greedy = SamplingParams(temperature=0)
        asked = [
            pool.submit(llm.generate, [[int(token) for token in prompt(150 + 7 * at, at)]], greedy, max_tokens=12)
            for at in range(6)
        ]
        tokens = [tuple(future.result()[0].outputs[0].tokens) for future in asked]
        return tokens, llm._engine.stats().instance.layers


def test_prompts_that_do_not_fit_begin_all_the_same(model: str) -> None:
    block_bytes = 8 * SHAPE.in_dtype("float32").token_bytes
    expected, unused = answers(model, kv_memory=f"{400 * block_bytes}B")
    little = {"kv_memory": f"{64 * block_bytes}B", "dram_memory": f"{400 * block_bytes}B"}
    tokens, layers = answers(model, **little, layerwise="static-1")
    assert tokens == expected
    by_layer = layers.begun + layers.converted  # which of both depends on the order in which prompts arrive
    assert by_layer and layers.link.down_bytes >= by_layer * block_bytes
    assert layers.sequences == layers.parked == layers.dram_pages == 0, "all have ended"
    assert layers.link.busy_ns > 0 and 0 <= layers.link.hidden_share <= 1
    assert unused == LayerReport()


LONG_SHAPES = [("mqa", "float32"), ("llama3", "float32"), ("smollm2", "bfloat16")]
HBM_TOKENS, LONG_TOKENS, CONTEXT = 128, 450, 512
"""Of KV memory, of a prompt more than three times as long, and of the models."""
COUNT = 8
"""Of the tokens of an answer."""
GREEDY = SamplingParams(temperature=0)


def long_module(name: str) -> Any:
    """A small random model with the KV of ``name``."""
    return tiny_module(SHAPES[name].family, 0, **SHAPES[name].sizes, max_position_embeddings=CONTEXT)


def little_memory(name: str, dtype: str = "float32") -> dict[str, Any]:
    """KV memory for :data:`HBM_TOKENS`, and DRAM for the whole context of two sequences."""
    token_bytes = SHAPES[name].in_dtype(dtype).token_bytes
    hbm, dram = f"{HBM_TOKENS * token_bytes}B", f"{2 * CONTEXT * token_bytes}B"
    sizes = {"dtype": dtype, "block_tokens": 16, "kv_memory": hbm, "dram_memory": dram}
    return OPTIONS | sizes | {"layerwise": "auto"}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(long_module("mqa"), tmp_path_factory.mktemp("models") / "long"))


def answers_of(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, max_tokens=count, ignore_eos=True)
    return [list(output.outputs[0].tokens) for output in outputs]


def common_length(answer: list[int], other_answer: list[int]) -> int:
    """Tokens up to the first that the rounding of bfloat16 decides: other rows of a step, another token."""
    pairs = zip(answer, other_answer, strict=True)
    return next((at for at, (token, same) in enumerate(pairs) if token != same), len(answer))


@pytest.mark.parametrize(("name", "dtype"), LONG_SHAPES)
def test_context_beyond_kv_memory_has_the_models_own_tokens(name: str, dtype: str, tmp_path: Path) -> None:
    """Alone, and beside others: each prompt's tokens are those of transformers, or of much memory."""
    module = long_module(name)
    folder = str(save_folder(module, tmp_path / name))
    prompts = [prompt(LONG_TOKENS, 1).tolist(), *(prompt(30 + 9 * at, at).tolist() for at in range(4))]
    with LLM(folder, **little_memory(name, dtype)) as llm:
        assert llm.model.max_model_tokens == CONTEXT > 3 * HBM_TOKENS
        alone = answers_of(llm, prompts[:1], COUNT)
        together = answers_of(llm, prompts, COUNT)
        layers = llm._engine.stats().instance.layers
    if dtype == "float32":
        expected, sure = greedy_answers(module, prompts, COUNT, together), [COUNT] * len(prompts)
    else:
        with LLM(folder, **OPTIONS | {"dtype": dtype, "block_tokens": 16}) as llm:
            expected = answers_of(llm, prompts, COUNT)
            singly = [answers_of(llm, [tokens], COUNT)[0] for tokens in prompts]
        sure = [common_length(*pair) for pair in zip(expected, singly, strict=True)]
        assert sum(sure) >= COUNT * len(prompts) // 2, "rounding decides nearly all of it"
    assert alone[0][: sure[0]] == expected[0][: sure[0]]
    assert all(a[:count] == b[:count] for a, b, count in zip(together, expected, sure, strict=True))
    read_bytes = 2 * COUNT * (LONG_TOKENS - HBM_TOKENS) * SHAPES[name].in_dtype(dtype).token_bytes
    assert layers.begun >= 2 and layers.link.up_bytes > read_bytes
    assert layers.sequences == layers.dram_pages == 0, "all have ended"


@pytest.mark.parametrize("dram_tokens", [0, 64])
def test_layers_stream_from_a_file(long_model: str, tmp_path: Path, dram_tokens: int) -> None:
    """What DRAM has no room for lies on disk; of the file nothing is left."""
    prompts = [prompt(LONG_TOKENS, 1).tolist(), *(prompt(30 + 9 * at, at).tolist() for at in range(4))]
    token_bytes = SHAPES["mqa"].in_dtype("float32").token_bytes
    memory = little_memory("mqa") | {"dram_memory": f"{dram_tokens * token_bytes}B", "kv_ssd": f"{tmp_path}=64MiB"}
    with LLM(long_model, **memory) as llm:
        assert llm.model.max_model_tokens == CONTEXT
        tokens = answers_of(llm, prompts, COUNT)
        layers = llm._engine.stats().instance.layers
        assert not list(tmp_path.iterdir())
    assert tokens == greedy_answers(long_module("mqa"), prompts, COUNT, tokens)
    assert layers.begun and layers.link.up_bytes > COUNT * (LONG_TOKENS - HBM_TOKENS) * token_bytes


def test_damage_on_disk_never_gives_a_wrong_token(
    long_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: it is computed again. Always: the request ends with an error, and others go on."""
    long, short, read, reads = prompt(LONG_TOKENS, 1), prompt(30, 2), TierFile.read_pages, [0]

    def read_after_damage(file: TierFile, pages: Any, target: int, target_pages: Any) -> None:
        reads[0] += 1
        if reads[0] == 30:
            with open(f"/proc/self/fd/{file._fd}", "r+b") as there:
                os.pwrite(there.fileno(), b"torn", int(file._places_of(pages)[0]) * file._page_bytes)
        if reads[0] < 0:
            raise OSError(errno.EIO, "the disk is gone")
        read(file, pages, target, target_pages)

    monkeypatch.setattr(TierFile, "read_pages", read_after_damage)
    memory = little_memory("mqa") | {"dram_memory": "0B", "kv_ssd": f"{tmp_path}=64MiB"}
    with LLM(long_model, **memory) as llm:
        answer = answers_of(llm, [long.tolist()], COUNT)[0]
        assert reads[0] > 30 and llm._engine.stats().instance.steps_failed >= 1
        assert answer == greedy_tokens(long_module("mqa"), long, COUNT, answer)
        reads[0] = -1_000_000
        failed = llm.generate([long.tolist()], GREEDY, max_tokens=20)[0].outputs[0]
        assert failed.finish_reason == "error"
        answer = answers_of(llm, [short.tolist()], COUNT)[0]
    assert answer == greedy_tokens(long_module("mqa"), short, COUNT, answer)


def test_answer_grows_beyond_kv_memory(long_model: str) -> None:
    """It begins whole, and goes on by layer."""
    tokens = prompt(100, 3)
    with LLM(long_model, **little_memory("mqa")) as llm:
        answer = answers_of(llm, [tokens.tolist()], 60)[0]
        layers = llm._engine.stats().instance.layers
    assert answer == greedy_tokens(long_module("mqa"), tokens, 60, answer)
    assert layers.begun + layers.resumed >= 1


def test_what_lies_whole_is_refused_beyond_kv_memory(long_model: str) -> None:
    with LLM(long_model, **little_memory("mqa")) as llm:
        with pytest.raises(UserError, match=f"n, beams or logprobs of its prompt is {HBM_TOKENS + 1}"):
            llm.generate([prompt(LONG_TOKENS, 1).tolist()], GREEDY, n=2, max_tokens=4)
        with pytest.raises(UserError, match=f"{CONTEXT}"):
            llm.generate([prompt(CONTEXT, 1).tolist()], GREEDY, max_tokens=4)


def test_without_dram_there_is_nowhere_to_lie(model: str) -> None:
    with pytest.raises(UserError, match="--dram-memory 2GiB"):
        LLM(model, **OPTIONS, layerwise="auto")
    with pytest.raises(UserError, match="off or auto"):
        LLM(model, **OPTIONS, layerwise="sometimes")
