"""A workload as if the model gave the recorded answers: token by token, or as blocks without text.

The simulator plays :func:`as_blocks`; statistics weigh it. Under a closed history the answers are the recorded ones;
where none is recorded, private tokens of the answer's length stand in for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memserve.errors import InvariantError
from memserve.types import TokenArray
from memserve.workloads.prefixes import runs_of
from memserve.workloads.tokens import ByteMeter, Meter, tokens_of
from memserve.workloads.words import Blocks, Chat, History, Session, Span, Text, Turn, Workload

VOCAB_DEFAULT = 1 << 31
"""Synthesised blocks differ in every token where no model bounds the ids."""
UNKNOWN_BLOCK_BASE = 1 << 62
"""Answers that were not recorded are blocks from here on: no trace numbers its own so high."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as recorded: the whole prompt and the answer, int32 ``[n]`` each."""

    prompt: TokenArray
    answer: TokenArray

    @property
    def output_tokens(self) -> int:
        """The answer's length."""
        return len(self.answer)


def unrolled(session: Session, meter: Meter | None = None, *, vocab_size: int = VOCAB_DEFAULT) -> Iterator[Asked]:
    """The requests of ``session`` in order, histories written out."""
    meter = meter or ByteMeter()
    said = np.zeros(0, np.int32)
    for number, turn in enumerate(session.turns):
        added = said_tokens(turn, meter, vocab_size=vocab_size)
        prompt = np.concatenate([said, added]) if session.history is History.CLOSED else added
        answer = _answer_tokens(session, number, meter, vocab_size)
        yield Asked(prompt, answer)
        said = np.concatenate([prompt, answer])


def said_tokens(turn: Turn, meter: Meter, *, vocab_size: int = VOCAB_DEFAULT) -> TokenArray:
    """Token ids of what one turn says, int32 ``[n]``; a chat is weighed as ``role: content`` lines."""
    match turn.says:
        case Text(text):
            return meter.encode(text)
        case Chat(messages):
            return meter.encode("".join(f"{message.role}: {message.content}\n" for message in messages))
        case Blocks() as blocks:
            return tokens_of(blocks, vocab_size=vocab_size)


def _answer_tokens(session: Session, number: int, meter: Meter, vocab_size: int) -> TokenArray:
    turn = session.turns[number]
    if turn.answer is not None and not isinstance(turn.says, Blocks):
        return meter.encode(turn.answer)[: turn.output_tokens_max]
    private = UNKNOWN_BLOCK_BASE + (zlib.crc32(session.session_id.encode()) << 20) + number
    return tokens_of(Blocks(turn.output_tokens_max, (Span(private, turn.output_tokens_max),)), vocab_size=vocab_size)


def as_blocks(workload: Workload, *, block_tokens: int, meter: Meter | None = None) -> Workload:
    """The same requests without text: whole prompts as blocks of ``block_tokens``, equal prefix, equal identities.

    What is given in blocks already keeps its own block size.
    """
    names = _BlockNames(block_tokens)
    given = (s if _is_in_blocks(s) else _session_as_blocks(s, names, meter) for s in workload.sessions)
    return replace(workload, sessions=tuple(given))


def blocks_said(turn: Turn) -> Blocks:
    """What a turn says, known to be blocks."""
    if isinstance(turn.says, Blocks):
        return turn.says
    raise InvariantError("this turn is text: call as_blocks first")


def _is_in_blocks(session: Session) -> bool:
    return session.history is History.GIVEN and all(isinstance(turn.says, Blocks) for turn in session.turns)


def _session_as_blocks(session: Session, names: _BlockNames, meter: Meter | None) -> Session:
    asked = unrolled(session, meter)
    turns = tuple(
        replace(turn, says=names.blocks(request.prompt), output_tokens_max=max(1, request.output_tokens), answer=None)
        for turn, request in zip(session.turns, asked, strict=True)
    )
    return replace(session, turns=turns, history=History.GIVEN)


class _BlockNames:
    """A number for each distinct (prefix, block), in order of appearance."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[tuple[int, bytes], int] = {}

    def blocks(self, prompt: TokenArray) -> Blocks:
        """The prompt as spans of block numbers."""
        step, ids, before = self._block_tokens, [], 0
        for start in range(0, len(prompt), step):
            key = (before, prompt[start : start + step].tobytes())
            before = self._numbers.setdefault(key, len(self._numbers) + 1)
            ids.append(before)
        return blocks_from_ids(ids, tokens=len(prompt), block_tokens=step)


def blocks_from_ids(ids: list[int] | tuple[int, ...], *, tokens: int, block_tokens: int) -> Blocks:
    """``Blocks`` of a list of identities, one a block, the last one partial where ``tokens`` says so."""
    spans, left = [], tokens
    for first, count in runs_of(ids):
        spans.append(Span(first, min(left, count * block_tokens)))
        left -= spans[-1].tokens
    return Blocks(block_tokens, tuple(spans))
