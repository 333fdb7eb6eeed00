"""What one engine in this process answers, and what transformers answers to the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from memserve import LLM
from memserve.instance.scheduler.sequence import Sequence
from memserve.instance.speculation import speculation
from memserve.instance.speculation.drafts import Draft
from memserve.instance.speculation.speculation import Speculation
from memserve_lab.sim.fuzz.scenario_features import Always
from tiny_models import GREEDY, VOCAB, greedy_answers, prompt

BLOCK = 32
ANSWER = 20


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine of one thread in float32, unless ``options`` say otherwise."""
    options = {"dtype": "float32", "kv_memory": "8MiB", "threads": 1} | options
    with LLM(str(folder), **options) as llm:
        yield llm


def ask(llm: LLM, prompts: list[list[int]], count: int = ANSWER) -> list[tuple[list[int], int]]:
    """Greedy answers, and how many tokens of each prompt were cached."""
    results = llm.generate(prompts, GREEDY, max_tokens=count, ignore_eos=True)
    return [(list(result.outputs[0].tokens), result.cached_tokens) for result in results]


def check_drafted(monkeypatch: pytest.MonkeyPatch, folder: Path, module: Any, **options: Any) -> None:
    """Two sequences side by side get the tokens of ``module`` with drafts that are right up to some place or not at
    all."""
    prompts, count = [prompt(45, 6).tolist(), prompt(70, 5).tolist()], 24
    expected = greedy_answers(module, prompts, count)

    def foretell(self: Speculation, asking: Sequence, count: int) -> Draft:
        answer, place = expected[asking.prompt_tokens == len(prompts[1])], len(asking.out) + asking.inflight
        wrong = (0, 2, 9)[place % 3]
        return Draft([(token + (k == wrong)) % VOCAB for k, token in enumerate(answer[place:][:count])])

    monkeypatch.setattr(speculation, "Worth", Always)
    monkeypatch.setattr(speculation.Speculation, "look_up", foretell)
    with serving(folder, draft_tokens=4, **options) as llm:
        answers = [[answer for answer, _ in ask(llm, prompts, count)] for _ in range(2)]
        stats = llm.stats().instance
    assert answers == [expected] * 2
    assert 0 < stats.drafts_kept < stats.drafts_computed


def check_cold_and_warm(
    llm: LLM, module: Any, prompts: list[list[int]], cached: list[int], count: int = ANSWER
) -> None:
    """Greedy answers of ``count`` tokens are those of ``module``, together and alone, cold and with the cache, which
    then has ``cached`` tokens of each prompt."""
    cold = ask(llm, prompts, count)
    expected = [answer for answer, _ in cold]
    assert expected == greedy_answers(module, prompts, count, expected)
    assert [known for _, known in cold] == [0] * len(prompts)
    warm = list(zip(expected, cached, strict=True))
    assert ask(llm, prompts, count) == warm
    for place in reversed(range(len(prompts))):  # as long: few tokens hide a state that is wrong in part
        assert ask(llm, prompts[place : place + 1], count) == warm[place : place + 1]


def ask_several(llm: LLM, tokens: list[int], n: int, count: int = ANSWER) -> list[list[int]]:
    """The greedy answers of ``n`` sequences of one prompt."""
    result = llm.generate([tokens], GREEDY, max_tokens=count, ignore_eos=True, n=n)[0]
    return [list(output.tokens) for output in result.outputs]


def best_beam(llm: LLM, tokens: list[int], width: int, count: int) -> list[int]:
    """Of a beam search."""
    return list(llm.generate([tokens], max_tokens=count, ignore_eos=True, beam_width=width)[0].outputs[0].tokens)


def own_best_beam(module: Any, tokens: list[int], width: int, count: int) -> list[int]:
    """The same by transformers."""
    module.set_attn_implementation("eager")
    ids = torch.tensor([tokens])
    options = {"num_beams": width, "max_new_tokens": count, "min_new_tokens": count, "early_stopping": False}
    options |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        own = module.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return own[0, len(tokens) :].tolist()


def resumable(tokens: int) -> int:
    """Of a prompt of so many tokens, all of which are cached: whole blocks, and one token is computed."""
    return (tokens - 1) // BLOCK * BLOCK
