"""The tokens that a request names: made into tensors once, whatever the number of its sequences."""

from __future__ import annotations

import numpy as np
import torch

from memserve.base.types import SamplingParams, StopParams
from memserve.instance.events import OpenSequence
from memserve.model import slots
from memserve.model.sampling import sample
from memserve.model.slots import SlotModel, SlotTable, TokenLists

VOCAB, SLOTS = 1000, 8


def opened(sampling: SamplingParams, stop: StopParams) -> SlotTable:
    """A table with sequences of one request in all of its slots."""
    table = SlotTable(SLOTS, 64, 32, SlotModel(VOCAB))
    for slot in range(SLOTS):
        table.open_slot(OpenSequence(slot, np.array([3, 4], np.int32), 2, slot, sampling, [slot], 0, stop))
    return table


def test_sequences_of_a_request_share_its_lists(monkeypatch) -> None:
    made = []
    monkeypatch.setattr(slots, "TokenLists", lambda *of: made.append(of) or TokenLists(*of))
    table = opened(SamplingParams(allowed_token_ids=tuple(range(900))), StopParams(stop_token_ids=(2,)))
    assert len(made) == 1 and all(table.lists_of(slot) is table.lists_of(0) for slot in range(SLOTS))
    for slot in range(SLOTS):
        table.close_slot(slot)
    other = opened(SamplingParams(logit_bias=((5, 1.0),)), StopParams(stop_token_ids=(2,)))
    assert len(made) == 2 and other.lists_of(0).changed.tolist() == [5]


def test_lists_change_logits_as_each_token_alone_would() -> None:
    allowed, bias = tuple(range(0, VOCAB, 7)), tuple((token, token / 100) for token in range(0, VOCAB, 3))
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=allowed, logit_bias=bias)
    stop = StopParams(16, 4, (0, 7))
    table = opened(sampling, stop)
    logits = torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(5))
    expected = logits.clone()
    for token, value in bias:
        expected[:, token] += value
    expected[:, [token for token in range(VOCAB) if token not in allowed or token in stop.stop_token_ids]] = -torch.inf
    drawn = sample(logits.clone(), np.arange(SLOTS), np.arange(SLOTS), table)
    assert drawn.tokens.tolist() == expected.argmax(-1).tolist() and not drawn.failed


def test_a_named_token_outside_the_vocabulary_fails_its_row() -> None:
    for sampling in (
        SamplingParams(allowed_token_ids=(1, VOCAB)),
        SamplingParams(logit_bias=((-1, 1.0),)),
        SamplingParams(logprobs=0, logprob_token_ids=(VOCAB,)),
    ):
        assert sorted(opened(sampling, StopParams()).failed) == list(range(SLOTS))
    assert sorted(opened(SamplingParams(), StopParams(stop_token_ids=(VOCAB,))).failed) == list(range(SLOTS))
