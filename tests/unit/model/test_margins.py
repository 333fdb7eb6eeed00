"""The check that tells answers that float32 decides from those that its rounding does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geometries import SHAPES
from margins import AnswerCheck, token_margins
from memserve.model.sampling import uniforms
from tiny_models import greedy_tokens, prompt


def test_margin_is_how_far_the_nearest_other_token_is() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]))
    assert token_margins(logits, [0, 1], 0) == pytest.approx(np.log([0.5 / 0.3, 0.2 / 0.7]))
    drawn = uniforms(np.array([9], np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64))[0]
    ends = logits[:1].repeat(3, 0)
    margins = np.concatenate([token_margins(ends[:1], [token], 1.0, seed=9) for token in range(3)])
    token = int(np.searchsorted([0.5, 0.8], drawn, side="right"))
    assert [float(margin) > 0 for margin in margins] == [other == token for other in range(3)]
    border = drawn / (1 - drawn)
    assert margins[0] == pytest.approx(np.log(0.5 / 0.5) - np.log(border))
    assert margins[2] == pytest.approx(np.log(border) - np.log(0.8 / 0.2))


@pytest.mark.parametrize("name", ["mqa", "moe", "windows"])
def test_answers_are_right_until_a_token_is_another(name: str) -> None:
    module, question = SHAPES[name].module(), prompt(40, 7)
    tokens = greedy_tokens(module, question, 6)
    check = AnswerCheck(module)
    verdict = check.judge(question.tolist(), tokens, 0)
    assert verdict.is_right and 0 < verdict.rounding < 1e-3
    tokens[3] = (tokens[3] + 1) % 131
    assert not check.judge(question.tolist(), tokens, 0).is_right


def test_tie_is_right_and_not_decided() -> None:
    """Two tokens with the same row of the head: either may come."""
    module, question = SHAPES["mqa"].module(), prompt(40, 3)
    [best] = greedy_tokens(module, question, 1)
    twin = next(token for token in range(3, 131) if token != best and token not in question)
    with torch.no_grad():
        weight = module.get_output_embeddings().weight
        weight[twin] = weight[best] * (1 + 1e-7)
    check = AnswerCheck(module)
    for token in (best, twin):
        verdict = check.judge(question.tolist(), [token], 0)
        assert verdict.is_right and not verdict.is_decided
