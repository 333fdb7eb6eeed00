"""ShareGPT type: chats of several turns, the history made of the answers that the model under test gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memserve.workloads.records import Conversation
from memserve.workloads.tokens import ByteMeter, Meter
from memserve.workloads.words import Chat, Message, Session, Turn, Workload

ANSWER_TOKENS_DEFAULT = 256
"""The answer's bound where no answer is recorded."""


def chat_workload(
    conversations: Sequence[Conversation],
    *,
    kind: str = "chat",
    source: str,
    meter: Meter | None = None,
    answer_tokens_default: int = ANSWER_TOKENS_DEFAULT,
) -> Workload:
    """A session a conversation: the people's messages as recorded, answers as long as the recorded ones (MemServe 8.2).

    Messages of several people, or of tools, between two answers belong to one turn. A conversation where no user asks
    anything is left out.
    """
    meter = meter or ByteMeter()
    sessions = []
    for conversation in conversations:
        turns = tuple(_turns(conversation, meter, answer_tokens_default))
        if turns:
            sessions.append(Session(conversation.record_id, turns, group=conversation.group))
    silent = len(conversations) - len(sessions)
    notes = (f"{silent} conversations without a question left out",) if silent else ()
    return Workload(kind, source, tuple(sessions), notes=notes)


def _turns(conversation: Conversation, meter: Meter, answer_tokens_default: int) -> Iterator[Turn]:
    for asked, answer in exchanges(conversation.messages):
        bound = len(meter.encode(answer)) if answer is not None else answer_tokens_default
        yield Turn(Chat(asked), max(1, bound), answer=answer)


def exchanges(messages: Sequence[Message]) -> Iterator[tuple[tuple[Message, ...], str | None]]:
    """``(messages, answer)`` for each answer of the assistant; what was asked last may have none.

    An assistant that speaks first, or again, answers nothing: the words stay in the history as given.
    """
    asked: list[Message] = []
    for message in messages:
        if message.role != "assistant" or not _is_asked(asked):
            asked.append(message)
            continue
        yield tuple(asked), message.content
        asked = []
    if _is_asked(asked):
        yield tuple(asked), None


def _is_asked(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].role not in ("assistant", "system")
