"""Cuts and copies of a workload: caps for small models, a smaller block, a sample, the share ratio."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memserve.base.errors import UserError, check
from memserve_lab.workloads.arrivals import draws
from memserve_lab.workloads.records import Blocks, Chat, History, Message, Says, Session, Span, Text, Turn, Workload
from memserve_lab.workloads.tokens import ByteMeter, Meter, said_tokens

MESSAGE_MARGIN_TOKENS = 8
"""Upper bound of a chat template's tokens per message."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Upper bounds, for small models. None: no bound."""

    prompt_tokens_max: int | None = None
    """The whole prompt, history included."""
    output_tokens_max: int | None = None
    turns_max: int | None = None


def capped(workload: Workload, caps: Caps, *, meter: Meter | None = None) -> Workload:
    """``workload`` within ``caps``.

    Answers and turns beyond the bounds are cut off. A session ends before a turn with too long a prompt. If that turn
    is the first, or a whole chat by itself (a document and a question), its prompt is cut instead: to its leading
    blocks, or the head of its longest message, which keeps shared prefixes. The frame of a chat (roles, template) is
    never cut. Under a closed history every answer counts with its longest length.
    """
    for name, bound in (
        ("prompt", caps.prompt_tokens_max),
        ("output", caps.output_tokens_max),
        ("turn", caps.turns_max),
    ):
        if bound is not None and bound < 1:
            raise UserError(f"a {name} cap of {bound} is too small", hint="use at least 1")
    meter = meter or ByteMeter()
    sessions = tuple(replace(s, turns=tuple(_turns_within(s, caps, meter))) for s in workload.sessions)
    dropped = workload.request_count - sum(len(session.turns) for session in sessions)
    return replace(workload, sessions=sessions, notes=(*workload.notes, f"{caps}: {dropped} turns left out"))


def _turns_within(session: Session, caps: Caps, meter: Meter) -> Iterator[Turn]:
    history_tokens = 0
    for number, turn in enumerate(session.turns[: caps.turns_max]):
        if caps.output_tokens_max is not None:
            turn = replace(turn, output_tokens_max=min(turn.output_tokens_max, caps.output_tokens_max))
        prompt_tokens = history_tokens + weight(turn.says, meter)
        if caps.prompt_tokens_max is not None and prompt_tokens > caps.prompt_tokens_max:
            if number and not _is_cut_anywhere(session):
                return
            turn = replace(turn, says=_head(turn.says, caps.prompt_tokens_max, meter))
            prompt_tokens = weight(turn.says, meter)
        yield turn
        if session.history is History.CLOSED:
            history_tokens = prompt_tokens + turn.output_tokens_max


def _is_cut_anywhere(session: Session) -> bool:
    """Whole chats that don't build on each other (a document and one question each): every turn can be cut."""
    return session.history is History.GIVEN and all(isinstance(turn.says, Chat) for turn in session.turns)


def weight(says: Says, meter: Meter) -> int:
    """Tokens of what a turn says, with a margin for the chat template."""
    if isinstance(says, Blocks):
        return says.tokens
    margin = MESSAGE_MARGIN_TOKENS * len(says.messages) if isinstance(says, Chat) else 0
    return len(said_tokens(Turn(says, 1), meter)) + margin


def _head(says: Says, tokens: int, meter: Meter) -> Says:
    match says:
        case Blocks():
            return replace(says, spans=tuple(_span_heads(says.spans, tokens)))
        case Text(text):
            return Text(meter.cut_text(text, tokens))
        case Chat(messages):
            return _chat_head(messages, tokens, meter)


def _span_heads(spans: tuple[Span, ...], tokens: int) -> Iterator[Span]:
    for span in spans:
        if tokens <= 0:
            return
        yield replace(span, tokens=min(span.tokens, tokens))
        tokens -= span.tokens


def _chat_head(messages: tuple[Message, ...], tokens: int, meter: Meter) -> Chat:
    """Cut the longest message until the chat fits; the shorter ones (the question behind a document) stay whole."""
    while (excess := weight(Chat(messages), meter) - tokens) > 0:
        lengths = [len(meter.encode_text(message.content)) for message in messages]
        place = int(np.argmax(lengths))
        if lengths[place] == 0:
            break
        shorter = replace(
            messages[place], content=meter.cut_text(messages[place].content, max(0, lengths[place] - excess))
        )
        messages = (*messages[:place], shorter, *messages[place + 1 :])
    return Chat(messages)


def with_block_tokens(workload: Workload, block_tokens: int) -> Workload:
    """Length-only prompts scaled to blocks of ``block_tokens``: every block keeps its identity, so the prefixes stay.

    A trace of 512-token blocks becomes 32 times shorter with blocks of 16. Text is left as it is.
    """
    check(block_tokens > 0, "a block holds tokens")

    def smaller(turn: Turn) -> Turn:
        if not isinstance(turn.says, Blocks):
            return turn
        old = turn.says.block_tokens
        return replace(turn, says=Blocks(block_tokens, tuple(_scaled(s, old, block_tokens) for s in turn.says.spans)))

    sessions = tuple(replace(s, turns=tuple(smaller(turn) for turn in s.turns)) for s in workload.sessions)
    return replace(workload, sessions=sessions, notes=(*workload.notes, f"blocks of {block_tokens} tokens"))


def _scaled(span: Span, old: int, new: int) -> Span:
    full, rest = divmod(span.tokens, old)
    return Span(span.first, full * new + -(-rest * new // old))


def sampled(workload: Workload, sessions: int, *, seed: int) -> Workload:
    """``sessions`` of the workload's sessions, drawn without repetition, in their old order; all if there are fewer."""
    if sessions >= len(workload.sessions):
        return workload
    indexes = np.sort(draws(seed, "sample").permutation(len(workload.sessions))[:sessions]).tolist()
    note = f"{sessions} of {len(workload.sessions)} sessions"
    return replace(
        workload, sessions=tuple(workload.sessions[n] for n in indexes), seed=seed, notes=(*workload.notes, note)
    )


def with_turns(workload: Workload, turns_min: int) -> Workload:
    """The sessions of at least ``turns_min`` turns. Raises :class:`UserError` when there is none."""
    sessions = tuple(session for session in workload.sessions if len(session.turns) >= turns_min)
    if not sessions:
        longest = max((len(session.turns) for session in workload.sessions), default=0)
        raise UserError(f"no session of {workload.kind} has {turns_min} turns", hint=f"the longest has {longest}")
    note = f"{len(workload.sessions) - len(sessions)} sessions of fewer than {turns_min} turns left out"
    return replace(workload, sessions=sessions, notes=(*workload.notes, note))


def leading(workload: Workload, sessions: int) -> Workload:
    """The first ``sessions`` sessions: of a trace, its beginning, times and prefixes as recorded."""
    if sessions >= len(workload.sessions):
        return workload
    note = f"the first {sessions} of {len(workload.sessions)} sessions"
    return replace(workload, sessions=workload.sessions[:sessions], notes=(*workload.notes, note))


def shared(workload: Workload, ratio: float, *, seed: int) -> Workload:
    """The set of sessions ``ratio`` times, shuffled (MemServe 8.4: "a share ratio of 2 means duplicating this set").

    For a fraction, the seed draws which sessions are copied: 1.5 copies half of them. A copy has a name of its own, so
    that only a scheduler that looks across sessions finds its prefix.
    """
    if ratio < 1:
        raise UserError(f"a share ratio of {ratio}", hint="1 means every session once, 2 every session twice")
    rng, base = draws(seed, "share"), len(workload.sessions)
    copies = [n for _ in range(int(ratio)) for n in range(base)]
    copies += rng.permutation(base)[: round((ratio - int(ratio)) * base)].tolist()
    order, copies_made, copy_counts = rng.permutation(len(copies)).tolist(), [], [0] * base
    for place in order:
        session = workload.sessions[copies[place]]
        copy_counts[copies[place]] += 1
        nth = copy_counts[copies[place]]
        copies_made.append(session if nth == 1 else replace(session, session_id=f"{session.session_id}#{nth}"))
    return replace(workload, sessions=tuple(copies_made), seed=seed, notes=(*workload.notes, f"share ratio {ratio:g}"))
