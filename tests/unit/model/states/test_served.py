"""Models with recurrent states, served by one engine: every token is the model's own, and what is cached is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memserve import LLM
from memserve.base.errors import UserError
from tiny_models import GREEDY, STATEFUL, greedy_answers, greedy_tokens, prompt, save_folder, tiny_module

BLOCK = 32
ANSWER = 20
FEW = ("qwen3_5", "jamba", "mamba2", "lfm2")
"""One of each kind: a delta net, Mamba that goes on by one token, no attention at all, convolutions alone."""


PROMPTS = [prompt(length, seed).tolist() for seed, length in enumerate((1, 5, 40, 64, 100))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stateful")
    return {family: save_folder(tiny_module(family), root / family) for family in STATEFUL}


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[LLM]:
    options = {"dtype": "float32", "kv_memory": "8MiB", "threads": 1} | options
    with LLM(str(folder), **options) as llm:
        yield llm


def ask(llm: LLM, prompts: list[list[int]], count: int = ANSWER) -> list[tuple[list[int], int]]:
    """Greedy answers and how many tokens of each prompt were cached."""
    results = llm.generate(prompts, GREEDY, max_tokens=count, ignore_eos=True)
    return [(list(result.outputs[0].tokens), result.cached_tokens) for result in results]


def resumable(tokens: int) -> int:
    """Of a prompt of so many tokens, all of which are cached: whole blocks, and one token is computed."""
    return (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 24}], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", STATEFUL)
def test_answers_are_the_models_own(family: str, options: dict[str, int], folders: dict[str, Path]) -> None:
    """Together and alone, cold and with the cache, which then has all but the last block of each prompt."""
    prompts = PROMPTS
    with serving(folders[family], **options) as llm:
        cold = ask(llm, prompts)
        expected = [answer for answer, _ in cold]
        assert expected == greedy_answers(tiny_module(family), prompts, ANSWER, expected)
        assert [cached for _, cached in cold] == [0] * len(prompts)
        warm = ask(llm, prompts)
        assert [answer for answer, _ in warm] == expected
        assert [cached for _, cached in warm] == [resumable(len(tokens)) for tokens in prompts]
        for place in reversed(range(len(prompts))):
            assert ask(llm, prompts[place : place + 1]) == warm[place : place + 1]


@pytest.mark.parametrize("family", FEW)
def test_a_conversation_goes_on_behind_its_answer(family: str, folders: dict[str, Path]) -> None:
    module = tiny_module(family)
    with serving(folders[family]) as llm:
        tokens = prompt(50, 3).tolist()
        for turn in range(3):
            answer, cached = ask(llm, [tokens])[0]
            assert answer == greedy_tokens(module, np.array(tokens, np.int32), ANSWER, answer)
            # the last token of an answer is never computed
            assert cached == ((len(tokens) - 10 - 1) // BLOCK * BLOCK if turn else 0)
            tokens += answer + prompt(10, 10 + turn).tolist()


@pytest.mark.parametrize("family", FEW)
def test_the_third_prompt_that_parts_finds_a_snapshot(family: str, folders: dict[str, Path]) -> None:
    """The first one leaves a snapshot at its end alone, the second one where both part."""
    module, common = tiny_module(family), prompt(70, 5)
    with serving(folders[family]) as llm:
        for seed, cached in ((1, 0), (2, 0), (3, 64), (4, 64)):
            tokens = [*common.tolist(), *prompt(60, seed).tolist()]
            [(answer, found)] = ask(llm, [tokens])
            assert (answer, found) == (greedy_tokens(module, np.array(tokens, np.int32), ANSWER, answer), cached)


@pytest.mark.parametrize("family", FEW)
def test_sequences_of_one_prompt_have_states_of_their_own(family: str, folders: dict[str, Path]) -> None:
    module, tokens = tiny_module(family), prompt(45, 6)
    expected = greedy_tokens(module, tokens, ANSWER)
    with serving(folders[family]) as llm:
        for _ in range(2):
            result = llm.generate([tokens.tolist()], GREEDY, max_tokens=ANSWER, ignore_eos=True, n=3)[0]
            assert [list(output.tokens) for output in result.outputs] == [expected] * 3


@pytest.mark.parametrize("family", FEW)
def test_beams_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    import torch

    module, tokens = tiny_module(family), prompt(40, 7)
    module.set_attn_implementation("eager")
    ids = torch.from_numpy(tokens.astype("int64"))[None]
    options = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "early_stopping": False}
    with torch.inference_mode():
        own = module.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, **options)
    with serving(folders[family]) as llm:
        result = llm.generate([tokens.tolist()], max_tokens=12, ignore_eos=True, beam_width=3)[0]
    assert list(result.outputs[0].tokens) == own[0, len(tokens) :].tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_preempted_sequences_go_on_as_they_were(family: str, folders: dict[str, Path]) -> None:
    """Memory for a few of eight sequences: they are preempted again and again, and lose no token."""
    prompts = [prompt(40 + 3 * seed, seed).tolist() for seed in range(8)]
    geometry_bytes = {"qwen3_5": "224KiB", "falcon_h1": "512KiB"}[family]
    with serving(folders[family], kv_memory=geometry_bytes) as llm:
        answers = [answer for answer, _ in ask(llm, prompts, 80)]
        assert answers == greedy_answers(tiny_module(family), prompts, 80, answers)
        stats = llm.stats().instance
        assert stats.preemptions_recompute > 0 and not stats.preemptions_swap


@pytest.mark.parametrize("family", FEW)
def test_16_bits_are_kept_as_transformers_keeps_them(family: str, folders: dict[str, Path]) -> None:
    """States may be wider than activations. What is cached changes no answer, and the first tokens are the model's."""
    module, tokens = tiny_module(family), prompt(70, 9)
    with serving(folders[family], dtype="bfloat16") as llm:
        cold, warm = (ask(llm, [tokens.tolist()])[0] for _ in range(2))
    assert (cold[1], warm[1]) == (0, 64)
    assert [cold[0][:1], warm[0][:1]] == [greedy_tokens(module, tokens, 1)] * 2


@pytest.mark.parametrize("family", FEW)
def test_no_cache_means_no_snapshots(family: str, folders: dict[str, Path]) -> None:
    module, tokens = tiny_module(family), prompt(70, 8)
    expected = greedy_tokens(module, tokens, ANSWER)
    with serving(folders[family], enable_prefix_caching=False) as llm:
        assert [ask(llm, [tokens.tolist()]) for _ in range(2)] == [[(expected, 0)]] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dram_memory": "8MiB"}, "second tier"),
        ({"draft_tokens": 4}, "drafts"),
        ({"layerwise": "auto", "dram_memory": "8MiB"}, "second tier"),
        ({"kv_dtype": "int8"}, "rounded KV"),
        ({"kv_memory": "16KiB"}, "too little"),
    ],
)
def test_what_is_not_there_yet_is_refused(options: dict[str, Any], text: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=text), serving(folders["qwen3_5"], **options):
        pass
