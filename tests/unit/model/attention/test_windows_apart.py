"""Models whose layers read a window beside others that read everything: their KV lies apart, and every token is the
model's own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_answers import (
    ask,
    ask_several,
    best_beam,
    check_cold_and_warm,
    check_drafted,
    own_best_beam,
    resumable,
    serving,
)
from memserve import LLM
from memserve.base.errors import InvariantError, UserError
from memserve.instance.events import PlaceWindow
from memserve.model import arena
from memserve.model.attention.layouts import PartTables
from tiny_models import greedy_answers, greedy_tokens, prompt, save_folder, tiny_module

ANSWER = 40
SIZES = {
    "gemma2": {"num_hidden_layers": 5}, "gpt_oss": {"num_hidden_layers": 4}, "gemma3n": {}, "gemma4": {},
    "llama4": {}, "mistral": {},
}  # fmt: skip
"""Five layers: three read a window, so a part has two blocks and the second is half empty; of four two do. Layers that
read others' KV; layers of two shapes; chunks of 48 tokens, which end within blocks; windows alone, beside blocks that
only name tokens."""


def module_of(family: str) -> Any:
    return tiny_module(family, **SIZES[family])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windows")
    return {family: save_folder(module_of(family), root / family) for family in SIZES}


def serving_apart(folder: Path, **options: Any) -> AbstractContextManager[LLM]:
    return serving(folder, **{"kv_memory": "4MiB", "window_kv": "apart"} | options)


FORKED = ("gemma2", "gpt_oss", "gemma4", "mistral")
STEPS = {"whole": {}, "chunks": {"max_step_tokens": 24}}
WORKERS = {
    "gemma2": {"pipeline_parallel": 2}, "gpt_oss": {"tensor_parallel": 2}, "gemma4": {"pipeline_parallel": 2},
    "mistral": {"tensor_parallel": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(pytest.param(family, STEPS[steps], id=f"{family}-{steps}") for family in SIZES for steps in STEPS),
        *(pytest.param(family, STEPS["chunks"] | many, id=f"{family}-workers") for family, many in WORKERS.items()),
    ],
)
def test_answers_are_the_models_own(family: str, options: dict[str, int], folders: dict[str, Path]) -> None:
    """Together and alone, cold and with the cache, past the window in prompt and answer."""
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((1, 5, 40, 64, 100, 180))]
    with serving_apart(folders[family], **options) as llm:
        cached = [resumable(len(tokens)) for tokens in prompts]
        check_cold_and_warm(llm, module_of(family), prompts, cached, ANSWER)
        assert llm.stats().instance.window_parts_passed > 0


@pytest.mark.parametrize("family", SIZES)
def test_a_prefix_is_found_wherever_prompts_part(family: str, folders: dict[str, Path]) -> None:
    """As long as memory is there, parts behind the window stay, and with them every place to go on from."""
    module, common = module_of(family), prompt(140, 5)
    with serving_apart(folders[family]) as llm:
        for seed, shared, cached in ((1, 140, 0), (2, 140, 128), (3, 70, 64), (4, 100, 96)):
            tokens = [*common[:shared].tolist(), *prompt(40, seed).tolist()]
            [(answer, found)] = ask(llm, [tokens], ANSWER)
            assert (answer, found) == (greedy_tokens(module, np.array(tokens, np.int32), ANSWER, answer), cached)


def test_more_sequences_fit_than_together(folders: dict[str, Path]) -> None:
    """Memory for a few sequences whole: with windows apart more run at once, in fewer steps, and no token changes."""
    family = "gpt_oss"
    prompts = [prompt(130 + seed, seed).tolist() for seed in range(8)]
    steps, answers = {}, {}
    for place in ("together", "apart"):
        with serving_apart(folders[family], window_kv=place, kv_memory="640KiB", max_step_tokens=64) as llm:
            answers[place] = [answer for answer, _ in ask(llm, prompts, 60)]
            steps[place] = llm.stats().instance.steps
    assert answers["together"] == answers["apart"]
    assert answers["apart"] == greedy_answers(module_of(family), prompts, 60, answers["apart"])
    assert steps["apart"] < 0.9 * steps["together"]


@pytest.mark.parametrize("family", SIZES)
def test_preempted_sequences_go_on_as_they_were(family: str, folders: dict[str, Path]) -> None:
    prompts = [prompt(60 + 7 * seed, seed).tolist() for seed in range(8)]
    memory = {"gemma4": "832KiB", "mistral": "736KiB"}.get(family, "640KiB")
    with serving_apart(folders[family], kv_memory=memory, max_step_tokens=64) as llm:
        answers = [answer for answer, _ in ask(llm, prompts, 140)]
        stats = llm.stats().instance
        assert stats.preemptions_recompute > 0 and stats.window_parts_given_up > 0
    assert answers == greedy_answers(module_of(family), prompts, 140, answers)


@pytest.mark.parametrize("family", FORKED)
def test_sequences_of_one_prompt_part(family: str, folders: dict[str, Path]) -> None:
    tokens = prompt(45, 6)
    with serving_apart(folders[family]) as llm:
        answers = [answer for _ in range(2) for answer in ask_several(llm, tokens.tolist(), 3, ANSWER)]
    assert answers == [greedy_tokens(module_of(family), tokens, ANSWER, answers[0])] * 6


@pytest.mark.parametrize("family", FORKED)
def test_beams_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    tokens = prompt(40, 7).tolist()
    with serving_apart(folders[family]) as llm:
        assert best_beam(llm, tokens, 3, 12) == own_best_beam(module_of(family), tokens, 3, 12)


@pytest.mark.parametrize("family", FORKED)
def test_drafts_give_the_models_own_tokens(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafted(monkeypatch, folders[family], module_of(family), window_kv="apart")


def test_rounded_kv_is_read_alike(folders: dict[str, Path]) -> None:
    """Codes lie apart as well: the same tokens as together, cold and warm."""
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((40, 150))]
    answers = []
    for place in ("apart", "together"):
        with serving_apart(folders["gemma2"], window_kv=place, kv_dtype="int8") as llm:
            answers += [[answer for answer, _ in ask(llm, prompts, ANSWER)] for _ in range(2)]
    assert all(answer == answers[0] for answer in answers)


def test_nothing_behind_the_window_is_read(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are not numbers where the table still points: an answer of numbers has not looked there."""
    tokens, mapped = prompt(150, 3), arena._mapped

    def without_numbers(blocks: int, block_bytes: int) -> torch.Tensor:
        memory = mapped(blocks, block_bytes)
        memory.view(torch.float32).fill_(float("nan"))
        return memory

    monkeypatch.setattr(arena, "_mapped", without_numbers)
    with serving_apart(folders["gemma2"], max_step_tokens=32, kv_memory="2MiB") as llm:
        [(answer, cached)] = ask(llm, [tokens.tolist()], ANSWER)
    assert (answer, cached) == (greedy_tokens(module_of("gemma2"), tokens, ANSWER, answer), 0)


def test_a_context_has_room_that_it_has_not_together(folders: dict[str, Path]) -> None:
    lengths = {}
    for place in ("apart", "together"):
        with serving_apart(folders["gemma2"], window_kv=place, kv_memory="256KiB", max_step_tokens=32) as llm:
            lengths[place] = llm.model.max_model_tokens
    assert lengths["apart"] > 1.2 * lengths["together"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dram_memory": "8MiB"}, "second tier"),
        ({"layerwise": "auto", "dram_memory": "8MiB"}, "second tier"),
        ({"window_kv": "beside"}, "'beside'"),
    ],
)
def test_what_cannot_lie_apart_is_refused(options: dict[str, Any], text: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=text), serving_apart(folders["gemma2"], **options):
        pass


@pytest.mark.parametrize(
    ("family", "options", "text"),
    [
        ("gemma3n", {"pipeline_parallel": 2}, "divided among workers"),  # each layer has inputs from the embedding
        ("gemma4", {"tensor_parallel": 2}, "several shapes is not served by several workers"),
        ("gemma4", {"kv_dtype": "int8"}, "several shapes is not served with rounded KV"),
        ("gemma4", {"dram_memory": "8MiB", "kv_lower_dtype": "int8"}, "several shapes is not served with rounded KV"),
        ("gemma4", {"dram_memory": "8MiB", "layerwise": "auto"}, "several shapes is not served by layer"),
    ],
)
def test_what_unequal_layers_are_not_served_with(
    family: str, options: dict[str, Any], text: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=text), serving_apart(folders[family], **({"window_kv": "auto"} | options)):
        pass


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_unequal_layers_lie_together_over_two_tiers(family: str, folders: dict[str, Path]) -> None:
    """Memory for half of the prompts, and DRAM for all: KV moves between the tiers in pages of one size."""
    prompts = [prompt(100 + seed, seed).tolist() for seed in range(8)]
    options = {"window_kv": "auto", "kv_memory": "1MiB", "dram_memory": "8MiB"}
    with serving_apart(folders[family], **options) as llm:
        cold, warm = (ask(llm, prompts, 20) for _ in range(2))
        assert llm.stats().instance.window_parts_passed == 0
    answers = [answer for answer, _ in cold]
    expected = greedy_answers(module_of(family), prompts, 20, answers)
    assert (cold, warm) == tuple([(answer, cached) for answer in expected] for cached in (0, 96))


def test_parts_are_placed_whole_and_within_the_table() -> None:
    parts = PartTables(3, 2, 4)
    parts.place_window(PlaceWindow(1, 2, [7, 8, 9, 4, 5, 6]))
    assert parts.tables[:, 1].tolist() == [[0, 0, 7, 4], [0, 0, 8, 5], [0, 0, 9, 6]]
    for wrong in (PlaceWindow(1, 2, [7, 8]), PlaceWindow(1, 4, [7, 8, 9])):
        with pytest.raises(InvariantError):
            parts.place_window(wrong)
