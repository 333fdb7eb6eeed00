"""Models with recurrent states, served by one engine: every token is the model's own, and what is cached is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_answers import (
    ANSWER,
    BLOCK,
    ask,
    ask_several,
    best_beam,
    check_cold_and_warm,
    check_drafted,
    own_best_beam,
    resumable,
    serving,
)
from memserve.base.errors import UserError
from tiny_models import STATEFUL, greedy_answers, greedy_tokens, prompt, save_folder, tiny_module

FEW = ("qwen3_5", "jamba", "mamba2", "lfm2")
"""One of each kind: a delta net, Mamba that goes on by one token, no attention at all, convolutions alone."""


SMALL = {"qwen3_5": "224KiB", "falcon_h1": "512KiB"}
"""Memory for two sequences, or so."""
FITS_ONE = {"qwen3_5": "192KiB", "qwen3_next": "192KiB", "olmo_hybrid": "96KiB", "lfm2": "96KiB", "jamba": "144KiB"}
FITS_ONE |= {
    "falcon_h1": "288KiB",
    "bamba": "144KiB",
    "granitemoehybrid": "144KiB",
    "mamba2": "56KiB",
    "mamba": "56KiB",
}
"""Memory for one conversation."""
PROMPTS = [prompt(length, seed).tolist() for seed, length in enumerate((1, 5, 40, 64, 100))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stateful")
    return {family: save_folder(tiny_module(family), root / family) for family in STATEFUL}


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 24}], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", STATEFUL)
def test_answers_are_the_models_own(family: str, options: dict[str, int], folders: dict[str, Path]) -> None:
    """The cache has all but the last block of each prompt."""
    with serving(folders[family], **options) as llm:
        check_cold_and_warm(llm, tiny_module(family), PROMPTS, [resumable(len(tokens)) for tokens in PROMPTS])


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
            assert ask_several(llm, tokens.tolist(), 3) == [expected] * 3


@pytest.mark.parametrize("family", FEW)
def test_beams_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    tokens = prompt(40, 7).tolist()
    with serving(folders[family]) as llm:
        assert best_beam(llm, tokens, 3, 12) == own_best_beam(tiny_module(family), tokens, 3, 12)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_preempted_sequences_go_on_as_they_were(family: str, folders: dict[str, Path]) -> None:
    """Memory for a few of eight sequences: they are preempted again and again, and lose no token."""
    prompts = [prompt(40 + 3 * seed, seed).tolist() for seed in range(8)]
    with serving(folders[family], kv_memory=SMALL[family]) as llm:
        answers = [answer for answer, _ in ask(llm, prompts, 80)]
        assert answers == greedy_answers(tiny_module(family), prompts, 80, answers)
        stats = llm.stats().instance
        assert stats.preemptions_recompute > 0 and not stats.preemptions_swap


@pytest.mark.parametrize("family", sorted(FITS_ONE))
def test_what_leaves_for_dram_is_gone_on_from(family: str, folders: dict[str, Path]) -> None:
    """Memory for some of several conversations, and a second tier for all: each next turn goes on behind its last
    answer, and most of what that takes comes from DRAM."""
    module, sizes = tiny_module(family), {"kv_memory": FITS_ONE[family], "dram_memory": "8MiB"}
    turns = [prompt(60 + 7 * seed, 30 + seed).tolist() for seed in range(6)]
    with serving(folders[family], **sizes) as llm:
        for turn in range(3):
            for place, tokens in enumerate(turns):
                [(answer, cached)] = ask(llm, [tokens])
                assert answer == greedy_tokens(module, np.array(tokens, np.int32), ANSWER, answer)
                assert cached == ((len(tokens) - 10 - 1) // BLOCK * BLOCK if turn else 0)
                turns[place] = [*tokens, *answer, *prompt(10, 50 + turn).tolist()]
        stats = llm.stats().instance
        assert stats.dram_tokens_reused > 6 * 60


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_preempted_sequences_come_back_from_dram(family: str, folders: dict[str, Path]) -> None:
    """Of eight sequences some leave for DRAM with their states, and compute no token twice."""
    prompts = [prompt(40 + 3 * seed, seed).tolist() for seed in range(8)]
    sizes = {"kv_memory": SMALL[family], "dram_memory": "8MiB"}
    with serving(folders[family], preemption="swap", **sizes) as llm:
        answers = [answer for answer, _ in ask(llm, prompts, 80)]
        assert answers == greedy_answers(tiny_module(family), prompts, 80, answers)
        stats = llm.stats().instance
        assert stats.preemptions_swap > 0 and not stats.preemptions_recompute
        # the last token of each answer is not computed
        assert stats.computed_tokens == sum(map(len, prompts)) + 8 * 79


@pytest.mark.parametrize("family", FEW)
def test_16_bits_are_kept_as_transformers_keeps_them(family: str, folders: dict[str, Path]) -> None:
    """States may be wider than activations. What is cached changes no answer, and the first tokens are the model's:
    behind this prompt no two come near each other."""
    module, tokens = tiny_module(family), prompt(70, 10)
    with serving(folders[family], dtype="bfloat16") as llm:
        cold, warm = (ask(llm, [tokens.tolist()])[0] for _ in range(2))
    assert (cold[1], warm[1]) == (0, 64)
    assert [cold[0][:1], warm[0][:1]] == [greedy_tokens(module, tokens, 1)] * 2


@pytest.mark.parametrize("family", SMALL)
def test_states_beside_kv_in_codes_are_kept(family: str, folders: dict[str, Path]) -> None:
    """The same tokens cold and from the cache, whole and in pieces, on one tier and from DRAM."""
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((40, 100, 75))]
    ways: list[dict[str, Any]] = [{}, {"max_step_tokens": 24}, {"kv_memory": SMALL[family], "dram_memory": "8MiB"}]
    answers = []
    for way in ways:
        with serving(folders[family], kv_dtype="int8", **way) as llm:
            cold, warm = ask(llm, prompts), ask(llm, prompts)
        assert [count for _, count in warm] == [resumable(len(tokens)) for tokens in prompts]
        answers += [[answer for answer, _ in turn] for turn in (cold, warm)]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("family", FEW)
def test_no_cache_means_no_snapshots(family: str, folders: dict[str, Path]) -> None:
    module, tokens = tiny_module(family), prompt(70, 8)
    expected = greedy_tokens(module, tokens, ANSWER)
    with serving(folders[family], enable_prefix_caching=False) as llm:
        assert [ask(llm, [tokens.tolist()]) for _ in range(2)] == [[(expected, 0)]] * 2


@pytest.mark.parametrize("family", STATEFUL)
def test_states_go_back_to_the_last_right_draft(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafted(monkeypatch, folders[family], tiny_module(family))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dram_memory": "8MiB", "kv_lower_dtype": "int8"}, "rounded KV"),
        ({"layerwise": "auto", "dram_memory": "8MiB"}, "by layer"),
        ({"kv_memory": "16KiB"}, "too little"),
    ],
)
def test_what_is_not_there_yet_is_refused(options: dict[str, Any], text: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=text), serving(folders["qwen3_5"], **options):
        pass
