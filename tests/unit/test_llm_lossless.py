"""Through ``memserve.LLM``, whatever the settings: the tokens that transformers' ``generate`` gives (fp32, greedy)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memserve import LLM, SamplingParams, UserError
from memserve.base.types import FinishReason
from memserve.instance.speculation import speculation
from memserve_lab.sim.fuzz.scenario_features import Always
from tiny_models import prompt, save_folder, tiny_module

NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0)
SHARED = prompt(70, seed=0)
PROMPTS = [np.concatenate([SHARED[: 10 + 12 * i], prompt(5 + 3 * i, seed=i + 1)]).tolist() for i in range(6)]
TINY_POOL_BLOCKS = 10
"""Six sequences of up to five blocks: some must give way."""

World = tuple[Path, Any, list[list[int]]]
"""A model's folder, its module, and what it answers to every prompt."""


def generate(module: Any, tokens: list[int], **how: Any) -> Any:
    """transformers' answer, with the module's own attention."""
    module.set_attn_implementation("eager")
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        return module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            **how,
        )


def fresh_tokens(sequence: torch.Tensor, tokens: list[int], end: int) -> list[int]:
    """What was generated, without the padding behind the end-of-sequence token."""
    out = sequence[len(tokens) :].tolist()
    return out[: out.index(end) + 1] if end in out else out


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2", "opt", "gpt_neox"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, list[list[int]]]:
    """A tiny model's folder, the module, and what it answers to every prompt."""
    module = tiny_module(request.param)
    folder = save_folder(module, tmp_path_factory.mktemp("models") / request.param)
    end = module.config.eos_token_id
    return folder, module, [fresh_tokens(generate(module, p).sequences[0], p, end) for p in PROMPTS]


def load(folder: Path, blocks: int = 100, **options: Any) -> LLM:
    """An engine on ``folder`` with ``blocks`` blocks of KV and as many in DRAM."""
    settings = {"dtype": "float32", "threads": 1, "max_running": 6, **options}
    size = block_bytes(folder)
    return LLM(str(folder), kv_memory=blocks * size, dram_memory=100 * size, **settings)


@cache
def block_bytes(folder: Path) -> int:
    """Of one block of the model's KV, which lies together where there is DRAM."""
    with LLM(str(folder), dtype="float32", threads=1, kv_memory="8MiB", window_kv="together") as llm:
        return llm.model.geometry.block_bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"caching": False},
        {"prefill_chunk_tokens": 16},
        {"max_running": 1},
        {"steps_in_flight": 1},
        {"blocks": TINY_POOL_BLOCKS, "preemption": "swap"},
        {"blocks": TINY_POOL_BLOCKS, "preemption": "recompute"},
        {"blocks": TINY_POOL_BLOCKS, "preemption": "swap", "caching": False},
        {"draft_tokens": 6},
        {"draft_tokens": 6, "blocks": TINY_POOL_BLOCKS, "preemption": "recompute"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_greedy_tokens_equal_generate(world: World, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "Worth", Always)  # a busy machine decides that drafts do not pay
    folder, _, want = world
    with load(folder, **options) as llm:
        for _ in range(2):  # the second time from the cache, where there is one
            results = llm.generate(PROMPTS, GREEDY, max_tokens=NEW_TOKENS)
            assert [r.outputs[0].tokens for r in results] == want
        stats = llm.stats().instance
    assert stats is not None and (stats.hbm.blocks_free + stats.hbm.blocks_cached) == stats.hbm.blocks_total
    assert bool(stats.cached_tokens) == options.get("caching", True)
    assert bool(stats.drafts_kept) == bool(options.get("draft_tokens")), "the second answers are in the cache"
    if options.get("blocks") and options["preemption"] == "swap":
        assert stats.preemptions_swap and not stats.preemptions_recompute
    if options.get("blocks") and options["preemption"] == "recompute":
        assert stats.preemptions_recompute and not stats.preemptions_swap


def test_parallel_samples_of_a_greedy_request_are_all_the_answer(world: World) -> None:
    folder, _, want = world
    with load(folder, max_running=8) as llm:
        results = llm.generate(PROMPTS, GREEDY, max_tokens=NEW_TOKENS, n=4)
        assert llm.stats().instance.copied_on_write > 0
    assert [[o.tokens for o in r.outputs] for r in results] == [[w] * 4 for w in want]


def test_beam_search_equals_transformers(world: World) -> None:
    """Same beams, same order, same scores, through copy-on-write forks of the blocks."""
    folder, module, _ = world
    end = module.config.eos_token_id
    with load(folder) as llm:
        results = llm.generate(PROMPTS[:3], GREEDY, max_tokens=NEW_TOKENS, n=2, beam_width=3)
    for tokens, result in zip(PROMPTS, results, strict=False):
        beams = generate(module, tokens, num_beams=3, num_return_sequences=2, early_stopping=False, output_scores=True)
        for output, sequence, score in zip(result.outputs, beams.sequences, beams.sequences_scores, strict=True):
            assert output.tokens == fresh_tokens(sequence, tokens, end)
            assert output.cumulative_logprob / len(output.tokens) == pytest.approx(float(score), abs=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "llama")


def test_seeded_samples_do_not_depend_on_what_runs_beside_them(llama: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11, top_p=0.9)
    with load(llama) as llm:
        together = [r.outputs[0].tokens for r in llm.generate(PROMPTS, sampling, max_tokens=12, ignore_eos=True)]
    with load(llama, max_running=1, caching=False) as llm:
        alone = [r.outputs[0].tokens for r in llm.generate(PROMPTS, sampling, max_tokens=12, ignore_eos=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) > 1


def test_a_stop_string_ends_the_text_before_it(llama: Path) -> None:
    with load(llama) as llm:
        whole = llm.generate([PROMPTS[0]], GREEDY, max_tokens=10, ignore_eos=True)[0]
        third = whole.text.split()[2]
        cut = llm.generate([PROMPTS[0]], GREEDY, max_tokens=10, ignore_eos=True, stop=[third])[0]
    assert cut.outputs[0].finish_reason is FinishReason.STOP
    assert cut.text == whole.text[: whole.text.index(third)]


def test_unservable_request_is_one_clear_error(llama: Path) -> None:
    with load(llama) as llm:
        with pytest.raises(UserError, match="maximum context length"):
            llm.generate([[5] * 10_000])
        assert llm.generate([5, 6, 7], GREEDY, max_tokens=1)[0].outputs[0].tokens, "and the next one is served"
    with pytest.raises(UserError, match="blocks"):
        LLM(str(llama), dtype="float32", kv_memory="1KiB")
