"""Positions that depend on a sequence's length: as transformers has them, in any chunks and batches, never shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memserve import LLM
from memserve.base.types import NO_REGIMES, PositionRegimes, adapter_of, salt_of
from memserve.model.rotary import LENGTH_SHIFT, LengthRotary, install_length_rotaries, length_rotaries
from tiny_models import CONTEXT_TOKENS, prompt, save_folder, tiny_module

FAMILIES = ("longrope", "dynamic")
ORIGINAL = 64
LENGTHS = (5, 20, 64, 65, 130)
NEW_TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}


def generated(family: str, tokens: np.ndarray) -> list[int]:
    """What transformers' ``generate`` gives: of a fresh module, for it remembers the longest call."""
    module = tiny_module(family)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    module.generation_config.eos_token_id = None
    out = module.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    return out[0, len(tokens) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module(family), tmp_path_factory.mktemp("tiny") / family)


@pytest.fixture(scope="module")
def answers(family: str) -> dict[int, list[int]]:
    """By length of the prompt. A longrope answer that crosses keeps its prompt's regime: it is not compared."""
    crosses = range(ORIGINAL - NEW_TOKENS + 2, ORIGINAL + 1) if family == "longrope" else ()
    return {length: generated(family, prompt(length, length)) for length in LENGTHS if length not in crosses}


def test_tables_are_those_of_transformers(family: str) -> None:
    ((_, _, theirs),) = length_rotaries(tiny_module(family))
    ours, x = LengthRotary(theirs), torch.zeros(1)
    positions = torch.arange(200)[None]
    for length in (3, ORIGINAL, ORIGINAL + 1, 200):
        ((_, _, fresh),) = length_rotaries(tiny_module(family))
        part = positions[:, :length]
        for got, want in zip(ours(x, part + (length << LENGTH_SHIFT)), fresh(x, part), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    mixed = torch.tensor([3, 200, 3]) << LENGTH_SHIFT
    cos, _ = ours(x, (torch.tensor([2, 100, 2]) + mixed)[None])
    assert torch.equal(cos[0, 0], cos[0, 2]) and not torch.equal(cos[0, 0], cos[0, 1])


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 24}], ids=["whole", "chunks"])
def test_answers_on_either_side_are_those_of_generate(
    folder: Path, answers: dict[int, list[int]], options: dict[str, Any]
) -> None:
    prompts = [prompt(length, length).tolist() for length in answers]
    with LLM(str(folder), dtype="float32", kv_memory="8MiB", threads=1, **options) as llm:
        assert llm.model.max_model_tokens == CONTEXT_TOKENS, "what the factor promises"
        for _ in ("cold", "warm"):
            got = [list(done.outputs[0].tokens) for done in llm.generate(prompts, **GREEDY)]
            assert dict(zip(answers, got, strict=True)) == answers
        alone = [list(llm.generate([one], **GREEDY)[0].outputs[0].tokens) for one in prompts]
        assert alone == got


def test_regimes_share_no_prefix(folder: Path, family: str, answers: dict[int, list[int]]) -> None:
    long = prompt(130, 130).tolist()
    with LLM(str(folder), dtype="float32", kv_memory="8MiB", threads=1, block_tokens=8) as llm:
        short, whole, longer, again = (
            llm.generate([tokens], **GREEDY)[0] for tokens in (long[:60], long, [*long, 7], long)
        )
        assert list(whole.outputs[0].tokens) == answers[130]
        assert short.cached_tokens == 0 and whole.cached_tokens == 0, "KV of the short prompt has other positions"
        assert longer.cached_tokens == (128 if family == "longrope" else 0)
        assert again.cached_tokens >= 120 and list(again.outputs[0].tokens) == answers[130]


def test_an_answer_keeps_its_prompts_regime(folder: Path, family: str) -> None:
    """It crosses the original length, is preempted, and computed again: the same tokens."""
    tokens = prompt(60, 3).tolist()
    with LLM(str(folder), dtype="float32", kv_memory="8MiB", threads=1) as llm:
        (roomy,) = llm.generate([tokens], temperature=0, max_tokens=80, ignore_eos=True)
        block = llm.model.geometry.block_bytes
    small = {"kv_memory": 8 * block, "preemption": "recompute", "enable_prefix_caching": False}
    with LLM(str(folder), dtype="float32", threads=1, **small) as llm:
        both = llm.generate([tokens, prompt(62, 4).tolist()], temperature=0, max_tokens=80, ignore_eos=True)
        assert llm.stats().instance.preemptions_recompute > 0
    assert list(both[0].outputs[0].tokens) == list(roomy.outputs[0].tokens)


def test_models_of_a_known_length_are_left_as_they_are() -> None:
    module = tiny_module("llama")
    rotary = module.model.rotary_emb
    assert length_rotaries(module) == []
    assert module.model.rotary_emb is rotary


def test_an_unknown_form_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_module("longrope")
    monkeypatch.setattr(LengthRotary, "_long_frequencies", lambda self, lengths: self.long * 1.01)
    theirs = module.model.rotary_emb
    assert install_length_rotaries(module) is None
    assert module.model.rotary_emb is theirs


def test_salts_name_the_regime() -> None:
    long, each = PositionRegimes(64), PositionRegimes(64, by_length=True)
    assert [
        NO_REGIMES.regime_of(9999),
        long.regime_of(64),
        long.regime_of(65),
        each.regime_of(64),
        each.regime_of(65),
    ] == ["", "", "long", "", "length65"]
    assert salt_of("abc", "", "long") == "long-abc" and salt_of("abc", "d1", "long") == "lora-d1-long-abc"
    assert adapter_of(salt_of("abc", "d1", "long")) == "d1" and adapter_of("long-abc") == ""
    assert len({salt_of(salt, "", regime) for salt in ("", "ab") for regime in ("", "long", "length65")}) == 6
