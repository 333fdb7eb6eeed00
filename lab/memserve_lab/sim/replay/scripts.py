"""The tokens of a session's requests, including the answers that it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from memserve.base.types import TokenArray
from memserve_lab.workloads.records import Blocks, Chat, History, Session, Text
from memserve_lab.workloads.tokens import ByteMeter, Meter, said_tokens

_NOTHING = np.zeros(0, np.int32)
_ODD, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(34)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat template puts around messages, in tokens; int32 ``[n]`` each."""

    head: TokenArray = field(default_factory=lambda: _NOTHING)
    """Before a chat without a system message."""
    opens: dict[str, TokenArray] = field(default_factory=dict)
    """Before a message, by its role."""
    close: TokenArray = field(default_factory=lambda: _NOTHING)
    """Behind a message."""
    reply: TokenArray = field(default_factory=lambda: _NOTHING)
    """Behind the last message: the answer begins."""


class Script:
    """One session. Turns are asked for in order, each once, with :meth:`add_answer` in between."""

    __slots__ = ("_frame", "_meter", "_said", "_session")

    def __init__(self, session: Session, meter: Meter | None = None, frame: Frame | None = None) -> None:
        self._session, self._meter, self._frame = session, meter or ByteMeter(), frame
        self._said = _NOTHING

    def prompt_of(self, number: int) -> TokenArray:
        """Prompt of turn ``number``, int32 ``[n]``."""
        turn = self._session.turns[number]
        match turn.says:
            case Blocks() as blocks:
                added = fast_tokens(blocks)
            case Chat() as chat if self._frame is not None:
                added = self._framed_tokens(chat, self._frame)
            case Chat() | Text():
                added = said_tokens(turn, self._meter)
        closed = self._session.history is History.CLOSED and len(self._said)
        prompt = _joined(self._said, added) if closed else added
        self._said = prompt
        if self._frame is not None and isinstance(turn.says, Chat):
            return _joined(prompt, self._frame.reply)
        return prompt

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Append the answer to the last prompt."""
        if self._session.history is not History.CLOSED:
            return
        answer = np.asarray(tokens, dtype=np.int32)
        if self._frame is None:
            self._said = _joined(self._said, answer)
        else:
            self._said = _joined(self._said, self._frame.reply, answer, self._frame.close)

    def _framed_tokens(self, chat: Chat, frame: Frame) -> TokenArray:
        parts: list[TokenArray] = []
        whole = self._session.history is History.GIVEN or not len(self._said)
        if whole and chat.messages and chat.messages[0].role != "system":
            parts.append(frame.head)
        for message in chat.messages:
            parts += [frame.opens.get(message.role, _NOTHING), self._meter.encode_text(message.content), frame.close]
        return _joined(*parts)


def fast_tokens(blocks: Blocks) -> TokenArray:
    """Tokens of a prompt that is known by its blocks, int32 ``[blocks.tokens]``: equal blocks, equal tokens.

    As ``workloads.tokens.tokens_of``, but without the limit of a vocabulary and ten times as fast: token ``j`` of a
    block is a hash of the block's number plus ``j``.
    """
    return _joined(*(_span_tokens(span.first, span.tokens, blocks.block_tokens) for span in blocks.spans))


def _joined(*parts: TokenArray) -> TokenArray:
    if len(parts) == 1:
        return parts[0]
    joined: TokenArray = np.concatenate((_NOTHING, *parts), dtype=np.int32)
    return joined


def _span_tokens(first: int, tokens: int, block_tokens: int) -> NDArray[np.int32]:
    count = -(-tokens // block_tokens)
    names = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    names *= _ODD
    names >>= _SHIFT  # 30 bits are left: adding a place inside the block does not overflow
    table: NDArray[np.int32] = np.add.outer(names.astype(np.int32), _places(block_tokens))
    return table.ravel()[:tokens]


@cache
def _places(block_tokens: int) -> NDArray[np.int32]:
    return np.arange(block_tokens, dtype=np.int32)
