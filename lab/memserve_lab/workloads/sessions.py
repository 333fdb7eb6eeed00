"""Sessions of the three types of MemServe 8.2, of groups that share a system prompt, and of one length.

========= =========================================================================================
chats     ShareGPT type: several turns; the history holds the answers of the model under test
documents LooGLE type: a long document and several questions; also worked examples (few-shot prompts)
agents    ReAct type: think, act, observe behind worked examples (Yao et al. 2022)
groups    many tenants, each with a long system prompt and several users
uniform   prompts and answers of one length (MemServe figure 12: 1,024 and 32 tokens)
========= =========================================================================================
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence

from memserve.base.errors import UserError, check
from memserve.base.units import ceil_div
from memserve_lab.workloads.arrivals import draws, prose
from memserve_lab.workloads.records import (
    Blocks,
    Chat,
    Conversation,
    Document,
    Episode,
    History,
    Message,
    Question,
    Says,
    Session,
    Span,
    Step,
    Text,
    Turn,
    Workload,
)
from memserve_lab.workloads.tokens import ByteMeter, Meter

ANSWER_TOKENS_DEFAULT = 256
"""The answer's bound where no answer is recorded."""
DOCUMENT_TOKENS = 1024
"""Tokens of a document that its questions are about (MemServe 8.2: "the first 1k tokens")."""
QUESTIONS = 5
"""Questions of a session (MemServe 8.2: "the first five associated questions")."""
SHOTS = 2
"""Worked examples in front of an agent's question ("a long two-shot example", MemServe 8.2)."""
STOP = ("\nObservation",)
UNIFORM_BLOCK_TOKENS = 16


# -- chats


def chat_workload(
    conversations: Sequence[Conversation],
    *,
    kind: str = "chat",
    source: str,
    meter: Meter | None = None,
    answer_tokens_default: int = ANSWER_TOKENS_DEFAULT,
) -> Workload:
    """One session per conversation: user messages as recorded, answers as long as the recorded ones (MemServe 8.2).

    All messages between two answers (of several users, or of tools) form one turn. Conversations without a question
    are left out.
    """
    meter = meter or ByteMeter()
    sessions = []
    for conversation in conversations:
        turns = tuple(_chat_turns(conversation, meter, answer_tokens_default))
        if turns:
            sessions.append(Session(conversation.record_id, turns, group=conversation.group))
    silent = len(conversations) - len(sessions)
    notes = (f"{silent} conversations without a question left out",) if silent else ()
    return Workload(kind, source, tuple(sessions), notes=notes)


def _chat_turns(conversation: Conversation, meter: Meter, answer_tokens_default: int) -> Iterator[Turn]:
    for question_messages, answer in exchanges(conversation.messages):
        yield Turn(Chat(question_messages), _bound(answer, meter, answer_tokens_default), answer=answer)


def exchanges(messages: Sequence[Message]) -> Iterator[tuple[tuple[Message, ...], str | None]]:
    """``(messages, answer)`` per answer of the assistant; the last question may have none.

    An assistant message that follows no question (the first one, or a second in a row) stays in the history as given.
    """
    question_messages: list[Message] = []
    for message in messages:
        if message.role != "assistant" or not _is_asked(question_messages):
            question_messages.append(message)
            continue
        yield tuple(question_messages), message.content
        question_messages = []
    if _is_asked(question_messages):
        yield tuple(question_messages), None


def _is_asked(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].role not in ("assistant", "system")


def _bound(answer: str | None, meter: Meter, default: int = ANSWER_TOKENS_DEFAULT) -> int:
    """The answer's length: the recorded one's, or ``default``."""
    return default if answer is None else max(1, len(meter.encode_text(answer)))


# -- documents


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
    """One session per document. Requests are in causal order and do not see each other's answers (MemServe 8.2)."""
    meter = meter or ByteMeter()
    sessions = []
    for document in documents:
        head = meter.cut_text(document.text, document_tokens)
        turns = tuple(
            Turn(_document_says(head, question, layout), _bound(question.answer, meter), answer=question.answer)
            for question in document.questions[:questions]
        )
        if turns:
            sessions.append(Session(document.record_id, turns, history=History.GIVEN))
    notes = (f"documents cut to {document_tokens} tokens, {questions} questions at most",)
    return Workload(kind, source, tuple(sessions), notes=notes)


def _document_says(head: str, question: Question, layout: Layout) -> Says:
    if layout is Layout.PLAIN:
        return Text(f"{head}\n\nQ: {question.question}\nA:")
    return Chat((Message("system", f"Answer from this document.\n\n{head}"), Message("user", question.question)))


# -- agents


def react_workload(
    episodes: Sequence[Episode],
    examples: str,
    *,
    source: str,
    seed: int,
    sessions: int | None = None,
    more_questions: Sequence[str] = (),
    shots: int = SHOTS,
    meter: Meter | None = None,
) -> Workload:
    """One session per episode, one turn per step; the model writes thought and action, the recorded observation
    follows whatever the model wrote::

        <examples>                      shared by all sessions
        Question: ...
        Thought 1:                      <- turn 1 ends here; the model goes on, up to "\\nObservation"
        Observation 1: ...
        Thought 2:                      <- turn 2

    ``sessions`` beyond the episodes ask one of ``more_questions`` (or an old question again) and get the observations
    of a drawn episode: real lengths and step counts.
    """
    meter, head = meter or ByteMeter(), _examples_head(examples, shots)
    episodes = [episode for episode in episodes if episode.steps]
    check(episodes, "an episode with a step to draw from")
    rng, sessions_made = draws(seed, "react"), []
    for number in range(len(episodes) if sessions is None else sessions):
        further = number - len(episodes)
        episode = episodes[number] if further < 0 else episodes[int(rng.integers(len(episodes)))]
        asks_another = further >= 0 and more_questions
        question = more_questions[further % len(more_questions)] if asks_another else episode.question
        name = f"{episode.record_id}-{number}" if further >= 0 else episode.record_id
        sessions_made.append(Session(name, _agent_turns(head, question, episode.steps, meter), group="react"))
    return Workload("react", source, tuple(sessions_made), seed=seed, notes=(f"{shots} worked examples in front",))


def _examples_head(examples: str, shots: int) -> str:
    """The first ``shots`` examples of a prompt: each begins with ``Question:`` at the start of a line."""
    starts = [match.start() for match in re.finditer(r"^Question:", examples, flags=re.MULTILINE)]
    return examples if shots >= len(starts) else examples[: starts[shots]]


def _agent_turns(head: str, question: str, steps: Sequence[Step], meter: Meter) -> tuple[Turn, ...]:
    turns, prompt_text = [], f"{head.rstrip()}\nQuestion: {question}\nThought 1:"
    for number, step in enumerate(steps, 1):
        answer = f" {step.thought}\nAction {number}: {step.action}"
        turns.append(Turn(Text(prompt_text), _bound(answer, meter), answer=answer, stop=STOP))
        prompt_text = f"\nObservation {number}: {step.observation}\nThought {number + 1}:"
    return tuple(turns)


# -- groups, and requests of one length


def group_workload(
    *,
    seed: int,
    groups: int = 150,
    users: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 120,
    answer_tokens: int = 100,
    turns: int = 1,
    meter: Meter | None = None,
) -> Workload:
    """``groups`` x ``users`` sessions in random order. Each group shares one system prompt of ``prefix_tokens``,
    written from the seed; every user asks another question."""
    meter = meter or ByteMeter()
    heads = [
        Message("system", meter.cut_text(prose(draws(seed, "head", group), prefix_tokens), prefix_tokens))
        for group in range(groups)
    ]
    order = draws(seed, "order").permutation(groups * users).tolist()
    sessions = []
    for place in order:
        group, user = divmod(place, users)
        name = f"group-{group}-user-{user}"
        rng = draws(seed, name)
        questions_asked = [
            Message("user", meter.cut_text(prose(rng, question_tokens), question_tokens)) for _ in range(turns)
        ]
        conversations = [(heads[group], questions_asked[0]), *((message,) for message in questions_asked[1:])]
        turns_made = tuple(Turn(Chat(messages), answer_tokens) for messages in conversations)
        sessions.append(Session(name, turns_made, group=f"group-{group}"))
    notes = (f"{groups} groups of {users} users, {prefix_tokens} tokens shared by a group",)
    return Workload("groups", "built-in", tuple(sessions), seed=seed, notes=notes)


def uniform_workload(
    requests: int, *, prompt_tokens: int, shared_tokens: int = 0, output_tokens: int, seed: int = 0
) -> Workload:
    """``requests`` sessions of one turn; all prompts begin with the same ``shared_tokens`` tokens and share no more.
    Workloads of two seeds share nothing.

    Raises :class:`UserError` when more is shared than a prompt holds.
    """
    if shared_tokens > prompt_tokens:
        message = f"prompts of {prompt_tokens} tokens cannot share {shared_tokens}"
        raise UserError(message, hint="make --shared-tokens smaller, or --prompt-tokens larger")
    shared_blocks = ceil_div(shared_tokens, UNIFORM_BLOCK_TOKENS)
    own_blocks = ceil_div(prompt_tokens - shared_tokens, UNIFORM_BLOCK_TOKENS)
    first = seed * (shared_blocks + requests * own_blocks)
    sessions = []
    for number in range(requests):
        own_span = Span(first + shared_blocks + number * own_blocks, prompt_tokens - shared_tokens)
        spans = tuple(span for span in (Span(first, shared_tokens), own_span) if span.tokens)
        turn = Turn(Blocks(UNIFORM_BLOCK_TOKENS, spans), output_tokens)
        sessions.append(Session(f"request-{number}", (turn,), history=History.GIVEN))
    return Workload("uniform", f"{prompt_tokens} + {output_tokens} tokens", tuple(sessions), seed=seed)
