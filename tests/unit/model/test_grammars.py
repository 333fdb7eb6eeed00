"""Masks of grammars: what may come next, in slots that share the threads."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from api_world import EOS, TinyModel, encode
from memserve.base.types import SamplingParams, StopParams
from memserve.instance.events import LateDraw, OpenSequence
from memserve.model.grammar import processes as grammar_processes
from memserve.model.grammar.masks import Grammars
from memserve.model.grammar.matcher import STOPPED, GrammarProcess
from memserve.model.grammar.processes import TOGETHER
from memserve.model.sampling import sample
from memserve.model.slots import SlotModel, SlotTable
from process_tree import children_of
from waiting import eventually, stop_process

pytest.importorskip("llguidance", reason="the grammar engine is not installed: make install")


WAIT_S = 30.0


def grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def build(grammars: Grammars, job_id: int, text: str) -> str:
    """Build a grammar, and wait for that; what was reported about it."""
    reports: queue.Queue[str] = queue.Queue()
    grammars.build_grammar(job_id, grammar(text), reports.put)
    return reports.get(timeout=WAIT_S)


def mask(grammars: Grammars, slot: int) -> Any:
    """The mask of a slot, however late."""
    there = threading.Event()
    grammars.flush_tokens()
    grammars.await_mask(slot, there.set)
    assert there.wait(WAIT_S)
    return grammars.next_mask(slot)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    model = TinyModel()
    made = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids, slots=8)
    yield made
    made.end_processes()


@pytest.mark.parametrize("more_tokens", [0, 1, 31])
def test_masks_of_slots_side_by_side_leave_each_other_alone(more_tokens: int) -> None:
    """Also where a mask of the vocabulary is whole words, at whose end the grammar engine writes one more."""
    model = TinyModel()
    grammars = Grammars(model.tokenizer, 2048 + more_tokens, model.eos_token_ids, slots=3)
    try:
        assert build(grammars, 1, f"start: {' | '.join(map(json.dumps, 'abcdefgh!#$%&()*+,-./0123456789:'))}") == ""
        for slot in range(3):
            grammars.open_slot(slot, 1, [])
        first_mask = mask(grammars, 0).copy()
        assert first_mask[:32].any(), "the first tokens are among those that may come"
        for slot in (2, 1, 0):  # each writes behind its own place, if it does
            grammars.close_slot(slot)
            grammars.open_slot(slot, 1, [])
            mask(grammars, slot)
        for slot in range(3):
            np.testing.assert_array_equal(mask(grammars, slot), first_mask)
    finally:
        grammars.end_processes()


def test_a_mask_follows_the_tokens_to_the_end(grammars: Grammars) -> None:
    assert build(grammars, 1, 'start: "hello" | "help"') == ""
    grammars.open_slot(3, 1, [])
    for token in encode("hello"):
        assert mask(grammars, 3)[token] and not mask(grammars, 3)[EOS]
        grammars.take_token(3, token)
    assert np.flatnonzero(mask(grammars, 3)).tolist() == [EOS]


def test_a_sequence_that_moves_goes_on_where_it_was(grammars: Grammars) -> None:
    tokens = encode("hello")
    assert build(grammars, 1, 'start: "hello"') == ""
    grammars.open_slot(0, 1, [])
    for token in tokens[:2]:
        grammars.take_token(0, token)
    grammars.open_slot(1, 1, tokens[:2])
    assert (mask(grammars, 0) == mask(grammars, 1)).all()


def test_slots_are_apart_and_a_closed_one_is_gone(grammars: Grammars) -> None:
    assert not grammars
    for job_id, word in enumerate("ab", 1):
        assert build(grammars, job_id, f'start: "{word}"') == ""
    grammars.open_slot(0, 1, [])
    grammars.open_slot(1, 2, [])
    assert not (mask(grammars, 0) & mask(grammars, 1)).any()
    grammars.close_slot(0)
    assert 0 not in grammars and 1 in grammars
    grammars.open_slot(0, 2, [])  # another sequence in the slot
    assert (mask(grammars, 0) == mask(grammars, 1)).all()
    grammars.close_all()
    assert not grammars


def test_invalid_grammar_fails_its_slots(grammars: Grammars) -> None:
    assert "lexer" in build(grammars, 1, "start: /[")
    assert build(grammars, 2, 'start: "b"') == ""
    for slot, job_id in enumerate((1, 2, 7)):
        grammars.open_slot(slot, job_id, [])
    for slot in (0, 2):
        with pytest.raises(ValueError, match=r"takes|built"):
            mask(grammars, slot)
    grammars.take_token(0, 1)
    assert mask(grammars, 1).any()


def test_a_grammar_that_allows_no_text_says_so(grammars: Grammars) -> None:
    assert build(grammars, 1, "start: A\nA: /a/ & /b/") == "no token of the model begins a text that it allows"


def test_a_grammar_that_takes_too_much_ends_alone(grammars: Grammars) -> None:
    """Of a multiple of a large number the automaton has as many states. Another grammar is built and used meanwhile."""
    number = {"type": "integer", "multipleOf": 99999989}
    reports: queue.Queue[str] = queue.Queue()
    grammars.build_grammar(1, json.dumps({"grammars": [{"json_schema": number}]}), reports.put)
    assert build(grammars, 2, 'start: "b"') == ""
    grammars.open_slot(0, 2, [])
    assert mask(grammars, 0)[encode("b")[0]]
    assert "MiB to build" in reports.get(timeout=WAIT_S)
    assert build(grammars, 3, 'start: "c"') == ""


def test_a_build_is_stopped_when_it_is_forgotten(grammars: Grammars) -> None:
    """Within a call of native code that would go on for minutes."""
    reports: queue.Queue[str] = queue.Queue()
    number = {"type": "integer", "multipleOf": 99999989}
    assert build(grammars, 1, 'start: "b"') == ""
    grammars.build_grammar(2, json.dumps({"grammars": [{"json_schema": number}]}), reports.put)
    process = grammars._built[2]
    grammars.forget_grammar(2)
    assert reports.get(timeout=WAIT_S) == STOPPED and process.fileno() == -1
    assert build(grammars, 3, 'start: "c"') == ""


@contextmanager
def late_mask(grammars: Grammars) -> Iterator[list[int]]:
    """Slot 0 has drawn the h of hello, and the processes of grammars, which these are, stand still; behind it they run,
    and the mask comes."""
    assert build(grammars, 1, 'start: "hello"') == ""
    grammars.open_slot(0, 1, [])
    assert mask(grammars, 0).any()
    pids = _children(grammars)
    for pid in pids:
        stop_process(pid)
    there = threading.Event()
    try:
        grammars.take_token(0, encode("h")[0])
        grammars.flush_tokens()
        assert grammars.next_mask(0) is None
        grammars.await_mask(0, there.set)
        assert not there.is_set()
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert there.wait(WAIT_S)


def test_step_does_not_wait_for_a_late_mask(grammars: Grammars) -> None:
    """The process is stopped in the place of a mask that takes long."""
    with late_mask(grammars):
        pass
    assert grammars.next_mask(0)[encode("e")[0]]


def test_mask_late_for_want_of_a_core_costs_no_priority(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped in the place of one that gets no core. By the third look the first is over."""
    looks: list[int] = []
    look_at = GrammarProcess.look_at
    monkeypatch.setattr(GrammarProcess, "look_at", lambda process: (looks.append(process.number), look_at(process)))
    with late_mask(grammars) as pids:
        eventually(lambda: len(looks) >= 3)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {0}


def test_a_process_that_is_killed_fails_its_slots_alone(grammars: Grammars) -> None:
    assert build(grammars, 1, 'start: "a"') == ""
    grammars.open_slot(0, 1, [])
    assert mask(grammars, 0).any()
    for pid in _children(grammars):
        os.kill(pid, signal.SIGKILL)
    grammars.take_token(0, encode("a")[0])
    with pytest.raises(ValueError, match="takes more than"):
        mask(grammars, 0)
    assert build(grammars, 2, 'start: "b"') == ""


def test_a_source_that_is_killed_is_started_again(grammars: Grammars) -> None:
    assert build(grammars, 1, 'start: "a"') == ""
    source = grammars._processes._source
    os.kill(source.pid, signal.SIGKILL)
    source.wait()
    grammars.open_slot(0, 1, [])
    with pytest.raises(ValueError, match="takes more than"):  # it ended with its source
        grammars.take_token(0, encode("a")[0])
        mask(grammars, 0)
    assert build(grammars, 2, 'start: "b"') == ""


def test_grammars_that_take_too_much_together_lose_one(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_processes, "TOTAL_BYTES", 0)
    fields = {f"field{at}": {"type": "integer", "minimum": at} for at in range(600)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    reports: queue.Queue[str] = queue.Queue()
    grammars.build_grammar(1, json.dumps({"grammars": [{"json_schema": schema}]}), reports.put)
    first = reports.get(timeout=WAIT_S)
    assert first in ("", TOGETHER)
    grammars.open_slot(0, 1, [])
    with pytest.raises(ValueError, match="together"):
        while True:
            mask(grammars, 0)


def test_slots_with_a_grammar_draw_by_it_and_others_freely(grammars: Grammars) -> None:
    model = TinyModel()
    assert build(grammars, 1, 'start: "hello" | "help"') == ""
    table = SlotTable(4, 32, 4, SlotModel(model.vocab_size), grammars)
    bound = SamplingParams(temperature=1.0, grammar=grammar('start: "hello" | "help"'))
    prompt = np.array(encode("x"), np.int32)
    for slot, sampling in enumerate((bound, SamplingParams(temperature=0.0), bound)):
        stop, job_id = StopParams(16, 0, (EOS,)), 1 if sampling.grammar else 0
        table.open_slot(OpenSequence(slot, prompt, 1, slot, sampling, [0], 0, stop, grammar_job=job_id))
    slots, rows = np.arange(3), np.arange(3)
    generator = torch.Generator().manual_seed(1)
    drawn: list[list[int]] = [[], [], []]
    for _ in range(8):
        for slot in (0, 2):
            mask(grammars, slot)
        logits = torch.randn(3, model.vocab_size, generator=generator)
        free = int(logits[1].argmax())
        tokens = sample(logits, rows, slots, table)
        assert not tokens.failed and not tokens.late and tokens.tokens[1] == free
        table.append_tokens(slots, tokens.tokens)
        for answer, token in zip(drawn, tokens.tokens.tolist(), strict=True):
            answer.append(token)
    for answer in (drawn[0], drawn[2]):
        text = model.tokenizer.decode(answer[: answer.index(EOS)])
        assert text in ("hello", "help")
        assert set(answer[answer.index(EOS) :]) == {EOS}  # rows that are one too many
    table.close_all()
    assert not grammars


def test_late_sample_gives_the_timely_token(grammars: Grammars) -> None:
    """Draws of plans under way have no meaning; the late one is made from the logits of its own step."""
    model = TinyModel()
    assert build(grammars, 1, "start: /[a-z]{9}/") == ""
    table = SlotTable(1, 32, 4, SlotModel(model.vocab_size), grammars)
    sampling = SamplingParams(temperature=0.0, grammar=grammar("start: /[a-z]{9}/"))
    prompt, slots = np.array(encode("x"), np.int32), np.arange(1)
    table.open_slot(OpenSequence(0, prompt, 1, 0, sampling, [0], 0, StopParams(16, 0, (EOS,)), grammar_job=1))
    mask(grammars, 0)
    logits = torch.randn(3, model.vocab_size, generator=torch.Generator().manual_seed(1))
    pids = _children(grammars)
    first = sample(logits[:1].clone(), slots, slots, table)
    assert not first.late
    for pid in pids:
        stop_process(pid)
    try:
        table.append_tokens(slots, first.tokens)
        for row in (1, 2):
            late = sample(logits[row : row + 1].clone(), slots, slots, table)
            assert late.late == {0} and not late.failed
            table.append_tokens(slots, late.tokens)
        assert (table.late[0] == logits[1]).all()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    allowed = torch.from_numpy(mask(grammars, 0))
    due = int(torch.where(allowed, logits[1], -torch.inf).argmax())
    table.drop_late_tokens([LateDraw(0, 2)])
    kept = table.late.pop(0)
    there = sample(kept[None], slots, slots, table)
    assert there.tokens.tolist() == [due] and not there.late
    table.append_tokens(slots, there.tokens)
    assert table.tokens[0, : int(table.lengths[0])].tolist() == [*prompt.tolist(), int(first.tokens[0]), due]
    assert mask(grammars, 0).any()


def test_tokenizer_is_released_and_its_text_retained(grammars: Grammars) -> None:
    grammars.keep_vocabulary()
    grammars.keep_vocabulary()
    assert grammars._tokenizer is None
    assert build(grammars, 1, 'start: "a"') == ""


def _children(grammars: Grammars) -> list[int]:
    """The processes of grammars."""
    return children_of(grammars._processes._source.pid)
