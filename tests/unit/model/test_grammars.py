"""Masks of grammars: what may come next, in slots that share the threads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from api_world import EOS, TinyModel, encode
from memserve.model.grammars import Grammars

pytest.importorskip("llguidance")


def grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


@pytest.fixture
def grammars() -> Grammars:
    model = TinyModel()
    return Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)


def test_a_mask_follows_the_drawn_tokens_to_the_end(grammars: Grammars) -> None:
    grammars.open(3, grammar('start: "hello" | "help"'), [])
    for token in encode("hello"):
        assert grammars.mask(3)[token] and not grammars.mask(3)[EOS]
        grammars.drawn(3, token)
    assert np.flatnonzero(grammars.mask(3)).tolist() == [EOS]


def test_a_sequence_that_moves_goes_on_where_it_was(grammars: Grammars) -> None:
    tokens = encode("hello")
    grammars.open(0, grammar('start: "hello"'), [])
    for token in tokens[:2]:
        grammars.drawn(0, token) if grammars.mask(0) is not None else None
    grammars.open(1, grammar('start: "hello"'), tokens[:2])
    assert (grammars.mask(0) == grammars.mask(1)).all()


def test_slots_are_apart_and_a_closed_one_is_gone(grammars: Grammars) -> None:
    assert not grammars
    grammars.open(0, grammar('start: "a"'), [])
    grammars.open(1, grammar('start: "b"'), [])
    assert not (grammars.mask(0) & grammars.mask(1)).any()
    grammars.close(0)
    assert 0 not in grammars and 1 in grammars
    grammars.close_all()
    assert not grammars


def test_a_grammar_that_cannot_be_built_fails_its_own_slot(grammars: Grammars) -> None:
    grammars.open(0, grammar("start: /["), [])
    grammars.open(1, grammar('start: "b"'), [])
    with pytest.raises(ValueError, match="lexer"):
        grammars.mask(0)
    grammars.drawn(0, 1)
    assert grammars.mask(1).any()
