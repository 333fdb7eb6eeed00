"""LooGLE type (level 1): a long document and several questions, each prompt the document and one question.

Also worked examples followed by questions (few-shot prompts): the same pattern with plain text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from memserve.workloads.chats import ANSWER_TOKENS_DEFAULT
from memserve.workloads.records import Document, Question
from memserve.workloads.tokens import ByteMeter, Meter
from memserve.workloads.words import Chat, History, Message, Says, Session, Text, Turn, Workload

DOCUMENT_TOKENS = 1024
"""The head of a document that is asked about (MemServe 8.2: "the first 1k tokens")."""
QUESTIONS = 5
"""Questions of a session (MemServe 8.2: "the first five associated questions")."""


class Layout(enum.StrEnum):
    """How document and question are put together."""

    CHAT = "chat"  # the document is the system message, the question the user's
    PLAIN = "plain"  # one text, for completion endpoints and base models


def document_workload(
    documents: Sequence[Document],
    *,
    kind: str = "documents",
    source: str,
    meter: Meter | None = None,
    document_tokens: int = DOCUMENT_TOKENS,
    questions: int = QUESTIONS,
    layout: Layout = Layout.CHAT,
) -> Workload:
    """A session a document; its requests are in causal order and don't see each other's answers (MemServe 8.2)."""
    meter = meter or ByteMeter()
    sessions = []
    for document in documents:
        head = meter.cut(document.text, document_tokens)
        turns = tuple(_turn(head, question, meter, layout) for question in document.questions[:questions])
        if turns:
            sessions.append(Session(document.record_id, turns, history=History.GIVEN))
    notes = (f"documents cut to {document_tokens} tokens, {questions} questions at most",)
    return Workload(kind, source, tuple(sessions), notes=notes)


def _turn(head: str, question: Question, meter: Meter, layout: Layout) -> Turn:
    bound = len(meter.encode(question.answer)) if question.answer is not None else ANSWER_TOKENS_DEFAULT
    return Turn(_says(head, question.question, layout), max(1, bound), answer=question.answer)


def _says(head: str, question: str, layout: Layout) -> Says:
    if layout is Layout.PLAIN:
        return Text(f"{head}\n\nQ: {question}\nA:")
    return Chat((Message("system", f"Answer from this document.\n\n{head}"), Message("user", question)))
