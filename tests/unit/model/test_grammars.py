"""Masks of grammars: what may come next, in slots that share the threads."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch

from api_world import EOS, TinyModel, encode
from memserve.instance.events import OpenSequence
from memserve.model.grammars import Grammars
from memserve.model.sampling import sample
from memserve.model.slots import SlotTable
from memserve.types import SamplingParams, StopParams

pytest.importorskip("llguidance", reason="the grammar engine is not installed: make install")


WAIT_S = 30.0


def grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def build(grammars: Grammars, text: str) -> str:
    """Build a grammar, and wait for that; what was said about it."""
    said: queue.Queue[str] = queue.Queue()
    grammars.build(grammar(text), said.put)
    return said.get(timeout=WAIT_S)


def ready(grammars: Grammars, word: str) -> None:
    assert build(grammars, f'start: "{word}"') == ""


@pytest.fixture
def grammars() -> Grammars:
    model = TinyModel()
    return Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)


def test_a_mask_follows_the_drawn_tokens_to_the_end(grammars: Grammars) -> None:
    assert build(grammars, 'start: "hello" | "help"') == ""
    grammars.open(3, grammar('start: "hello" | "help"'), [])
    for token in encode("hello"):
        assert grammars.mask(3)[token] and not grammars.mask(3)[EOS]
        grammars.drawn(3, token)
    assert np.flatnonzero(grammars.mask(3)).tolist() == [EOS]


def test_a_sequence_that_moves_goes_on_where_it_was(grammars: Grammars) -> None:
    tokens = encode("hello")
    ready(grammars, "hello")
    grammars.open(0, grammar('start: "hello"'), [])
    for token in tokens[:2]:
        grammars.drawn(0, token) if grammars.mask(0) is not None else None
    grammars.open(1, grammar('start: "hello"'), tokens[:2])
    assert (grammars.mask(0) == grammars.mask(1)).all()


def test_slots_are_apart_and_a_closed_one_is_gone(grammars: Grammars) -> None:
    assert not grammars
    for word in "ab":
        ready(grammars, word)
    grammars.open(0, grammar('start: "a"'), [])
    grammars.open(1, grammar('start: "b"'), [])
    assert not (grammars.mask(0) & grammars.mask(1)).any()
    grammars.close(0)
    assert 0 not in grammars and 1 in grammars
    grammars.close_all()
    assert not grammars


def test_a_grammar_that_cannot_be_built_says_so_and_fails_slots_that_name_it(grammars: Grammars) -> None:
    assert "lexer" in build(grammars, "start: /[")
    ready(grammars, "b")
    grammars.open(0, grammar("start: /["), [])
    grammars.open(1, grammar('start: "b"'), [])
    with pytest.raises(ValueError, match="lexer"):
        grammars.mask(0)
    grammars.drawn(0, 1)
    assert grammars.mask(1).any()


def test_slots_with_a_grammar_draw_by_it_and_others_draw_freely(grammars: Grammars) -> None:
    model = TinyModel()
    assert build(grammars, 'start: "hello" | "help"') == ""
    table = SlotTable(4, 32, 4, model.vocab_size, grammars)
    bound = SamplingParams(temperature=1.0, grammar=grammar('start: "hello" | "help"'))
    prompt = np.array(encode("x"), np.int32)
    for slot, sampling in enumerate((bound, SamplingParams(temperature=0.0), bound)):
        table.open(OpenSequence(slot, prompt, len(prompt), slot, sampling, [0], 0, StopParams(16, 0, (EOS,))))
    slots, rows = np.arange(3), np.arange(3)
    generator = torch.Generator().manual_seed(1)
    drawn: list[list[int]] = [[], [], []]
    for _ in range(8):
        logits = torch.randn(3, model.vocab_size, generator=generator)
        free = int(logits[1].argmax())
        tokens = sample(logits, rows, slots, table)
        assert not tokens.failed and tokens.tokens[1] == free
        table.append(slots, tokens.tokens)
        for said, token in zip(drawn, tokens.tokens.tolist(), strict=True):
            said.append(token)
    for said in (drawn[0], drawn[2]):
        text = model.tokenizer.decode(said[: said.index(EOS)])
        assert text in ("hello", "help")
        assert set(said[said.index(EOS) :]) == {EOS}  # rows that are one too many
    table.close_all()
    assert not grammars


def test_a_slot_whose_grammar_is_no_grammar_fails_alone(grammars: Grammars) -> None:
    assert build(grammars, "start: /[")
    table = SlotTable(2, 32, 4, TinyModel().vocab_size, grammars)
    prompt = np.array(encode("x"), np.int32)
    for slot, sampling in enumerate((SamplingParams(grammar=grammar("start: /[")), SamplingParams(temperature=0.0))):
        table.open(OpenSequence(slot, prompt, len(prompt), 0, sampling, [0]))
    drawn = sample(torch.randn(2, TinyModel().vocab_size), np.arange(2), np.arange(2), table)
    assert list(drawn.failed) == [0]


def test_a_grammar_that_is_being_built_holds_up_no_other(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder does not come back until it is released: masks are computed, and another grammar is built."""
    ready(grammars, "b")
    grammars.open(1, grammar('start: "b"'), [])
    build, may_go_on, built = grammars._build, threading.Event(), threading.Event()

    def slowly(vocabulary: Any, text: str) -> Any:
        assert may_go_on.wait(WAIT_S)
        return build(vocabulary, text)

    monkeypatch.setattr(grammars, "_build", slowly)
    grammars.build(grammar('start: "slow"'), lambda _: built.set())
    monkeypatch.setattr(grammars, "_build", build)
    ready(grammars, "another")
    grammars.drawn(1, encode("b")[0])
    assert grammars.mask(1)[EOS] and not built.is_set()
    grammars.open(0, grammar('start: "slow"'), [])  # too early
    with pytest.raises(ValueError, match="not built"):
        grammars.mask(0)
    may_go_on.set()
    assert built.wait(WAIT_S)
    grammars.open(2, grammar('start: "slow"'), [])
    assert grammars.mask(2)[encode("slow")[0]]


def test_a_grammar_is_forgotten_while_its_slots_go_on(grammars: Grammars) -> None:
    ready(grammars, "hello")
    grammars.open(0, grammar('start: "hello"'), [])
    grammars.forget(grammar('start: "hello"'))
    grammars.forget(grammar('start: "unknown"'))
    assert grammars.mask(0)[encode("hello")[0]]
    grammars.open(1, grammar('start: "hello"'), [])
    with pytest.raises(ValueError, match="not built"):
        grammars.mask(1)


def test_the_vocabulary_is_read_once_and_the_tokenizer_is_let_go(grammars: Grammars) -> None:
    first = grammars.read_vocabulary()
    assert first.result(WAIT_S) is grammars.read_vocabulary().result() and grammars._tokenizer is None
