"""Token ids of text and of blocks, and workloads as if the model gave the recorded answers.

A :class:`Meter` turns text into tokens. :class:`TokenizerMeter` uses the served model's tokenizer; :class:`ByteMeter`
needs none and estimates: four bytes per token, close to English text with today's vocabularies.

:func:`as_blocks` makes a workload without text, for the simulator and for statistics. Under a closed history the
answers are the recorded ones; where none is recorded, tokens that occur nowhere else replace it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import InvariantError, check
from memserve.base.types import TokenArray
from memserve_lab.workloads.records import Blocks, Chat, History, Session, Span, Text, Turn, Workload

BYTES_PER_TOKEN = 4
CUT_CHARACTERS = 8
"""Characters encoded at first, for each token to keep."""
POSITIVE = np.int32(0x7FFFFFFF)
SPECIAL_SHARE = 100
"""The lowest 1 / 100 of all ids is never synthesised: tokenizers keep their special tokens there."""
VOCAB_DEFAULT = 1 << 31
"""Synthesised blocks differ in every token where no model bounds the ids."""
UNKNOWN_BLOCK_BASE = 1 << 62
"""Answers without a record are blocks from here on: no trace numbers its own so high."""


class Meter(Protocol):
    """Tokenizes and cuts text."""

    def encode_text(self, text: str) -> TokenArray:
        """Token ids, int32 ``[n]``; equal text gives equal ids."""
        ...

    def cut_text(self, text: str, tokens: int) -> str:
        """The head of ``text``, at most ``tokens`` tokens of it."""
        ...


class ByteMeter:
    """Four UTF-8 bytes per token; the id is the bytes themselves (without the sign bit): equal text, equal ids."""

    def encode_text(self, text: str) -> TokenArray:
        """Token ids, int32 ``[ceil(bytes / 4)]``."""
        raw = text.encode("utf-8", "surrogatepass")
        words = np.frombuffer(raw + b"\0" * (-len(raw) % BYTES_PER_TOKEN), dtype="<i4")
        return words & POSITIVE

    def cut_text(self, text: str, tokens: int) -> str:
        """The head of ``text``, never splitting a character."""
        raw = text.encode("utf-8", "surrogatepass")[: tokens * BYTES_PER_TOKEN]
        return raw.decode("utf-8", "ignore")


class TokenizerMeter:
    """The served model's own tokenizer, given as its two functions (no special tokens added)."""

    def __init__(self, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._decode = encode, decode

    def encode_text(self, text: str) -> TokenArray:
        """Token ids, int32 ``[n]``."""
        return np.asarray(self._encode(text), dtype=np.int32)

    def cut_text(self, text: str, tokens: int) -> str:
        """The text of the first ``tokens`` tokens; a character cut in two is dropped."""
        if tokens < 1:
            return ""
        ids, characters = self._encode(text[: CUT_CHARACTERS * tokens]), CUT_CHARACTERS * tokens
        while len(ids) <= tokens and characters < len(text):  # long tokens: encode more, but rarely the whole text
            characters *= 2
            ids = self._encode(text[:characters])
        return text if len(ids) <= tokens else self._decode(list(ids)[:tokens]).rstrip("�")


def tokens_of(blocks: Blocks, *, vocab_size: int, seed: int = 0) -> TokenArray:
    """Token ids of a length-only prompt, int32 ``[blocks.tokens]``, in ``[vocab_size / 100, vocab_size)``.

    Token ``j`` of block ``b`` depends on ``(seed, b, j)`` alone: equal blocks have equal tokens, and blocks that differ
    share a first token by chance only (once in about ``vocab_size``), so the prefixes are those of the trace.
    """
    lowest = vocab_size // SPECIAL_SHARE
    check(vocab_size - lowest >= 2, "a vocabulary of two tokens at least")
    parts = [_span_tokens(span, blocks.block_tokens, seed) for span in blocks.spans]
    numbers = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
    return (numbers % np.uint64(vocab_size - lowest) + np.uint64(lowest)).astype(np.int32)


def _span_tokens(span: Span, block_tokens: int, seed: int) -> NDArray[np.uint64]:
    place = np.arange(span.tokens, dtype=np.uint64)
    block = np.uint64(span.first) + place // np.uint64(block_tokens)
    return _mix(_mix(block + _mix(np.full(1, seed, np.uint64))) + place % np.uint64(block_tokens))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014): a bijection that scatters neighbours."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as recorded: the whole prompt and the answer, int32 ``[n]`` each."""

    prompt: TokenArray
    answer: TokenArray

    @property
    def output_tokens(self) -> int:
        return len(self.answer)


def unrolled(session: Session, meter: Meter | None = None, *, vocab_size: int = VOCAB_DEFAULT) -> Iterator[Asked]:
    """The requests of ``session`` in order, histories written out."""
    meter = meter or ByteMeter()
    history = np.zeros(0, np.int32)
    for number, turn in enumerate(session.turns):
        added = said_tokens(turn, meter, vocab_size=vocab_size)
        prompt = np.concatenate([history, added]) if session.history is History.CLOSED else added
        answer = _answer_tokens(session, number, meter, vocab_size)
        yield Asked(prompt, answer)
        history = np.concatenate([prompt, answer])


def said_tokens(turn: Turn, meter: Meter, *, vocab_size: int = VOCAB_DEFAULT) -> TokenArray:
    """Token ids of what one turn says, int32 ``[n]``; a chat is tokenized as ``role: content`` lines."""
    match turn.says:
        case Text(text):
            return meter.encode_text(text)
        case Chat(messages):
            return meter.encode_text("".join(f"{message.role}: {message.content}\n" for message in messages))
        case Blocks() as blocks:
            return tokens_of(blocks, vocab_size=vocab_size)


def _answer_tokens(session: Session, number: int, meter: Meter, vocab_size: int) -> TokenArray:
    turn = session.turns[number]
    if turn.answer is not None and not isinstance(turn.says, Blocks):
        return meter.encode_text(turn.answer)[: turn.output_tokens_max]
    private = UNKNOWN_BLOCK_BASE + (zlib.crc32(session.session_id.encode()) << 20) + number
    return tokens_of(Blocks(turn.output_tokens_max, (Span(private, turn.output_tokens_max),)), vocab_size=vocab_size)


def as_blocks(workload: Workload, *, block_tokens: int, meter: Meter | None = None) -> Workload:
    """The same requests without text: whole prompts as blocks of ``block_tokens``; equal prefixes, equal identities.

    Prompts that are blocks already keep their own block size.
    """
    names = _BlockNames(block_tokens)
    sessions_given = (s if _is_in_blocks(s) else _session_as_blocks(s, names, meter) for s in workload.sessions)
    return replace(workload, sessions=tuple(sessions_given))


def blocks_said(turn: Turn) -> Blocks:
    """What a turn says, known to be blocks."""
    if isinstance(turn.says, Blocks):
        return turn.says
    raise InvariantError("this turn is text: call as_blocks first")


def _is_in_blocks(session: Session) -> bool:
    return session.history is History.GIVEN and all(isinstance(turn.says, Blocks) for turn in session.turns)


def _session_as_blocks(session: Session, names: _BlockNames, meter: Meter | None) -> Session:
    prompts = unrolled(session, meter)
    turns = tuple(
        replace(
            turn, says=names.name_blocks(request.prompt), output_tokens_max=max(1, request.output_tokens), answer=None
        )
        for turn, request in zip(session.turns, prompts, strict=True)
    )
    return replace(session, turns=turns, history=History.GIVEN)


class _BlockNames:
    """A number for each distinct (prefix, block), in order of appearance."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[tuple[int, bytes], int] = {}

    def name_blocks(self, prompt: TokenArray) -> Blocks:
        """The prompt as spans of block numbers."""
        step, ids, before = self._block_tokens, [], 0
        for start in range(0, len(prompt), step):
            key = (before, prompt[start : start + step].tobytes())
            before = self._numbers.setdefault(key, len(self._numbers) + 1)
            ids.append(before)
        return blocks_from_ids(ids, tokens=len(prompt), block_tokens=step)


def runs_of(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """``(first, count)`` of each run of consecutive numbers in ``ids``, in order."""
    first = count = 0
    for block in ids:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count


def blocks_from_ids(ids: list[int] | tuple[int, ...], *, tokens: int, block_tokens: int) -> Blocks:
    """``Blocks`` of a list of identities, one per block; the last is partial if ``tokens`` does not fill it."""
    spans, tokens_left = [], tokens
    for first, count in runs_of(ids):
        spans.append(Span(first, min(tokens_left, count * block_tokens)))
        tokens_left -= spans[-1].tokens
    return Blocks(block_tokens, tuple(spans))
