"""Records generated from a seed, for machines without data sets.

Turns, lengths and shared prefixes are close to those of public data of the same kind (MT-Bench-101 and mtRAG chats,
meeting transcripts, HotpotQA agents, Mooncake's conversation trace): a test compares them. The text has no meaning.
"""

from __future__ import annotations

import numpy as np

from memserve_lab.workloads.arrivals import Draws, draws, lognormal_count, prose
from memserve_lab.workloads.records import Conversation, Document, Episode, Lengths, Message, Question, Step
from memserve_lab.workloads.tokens import blocks_from_ids

SOURCE = "built-in"
TRACE_BLOCK_TOKENS = 512
RETRIEVAL_SHARE = 0.2
"""Share of chats with retrieved passages in the last question."""


def conversations(seed: int, count: int) -> list[Conversation]:
    """Chats of 1 to 12 turns: short questions, longer answers; some of the last questions bring long passages."""
    return [_conversation(draws(seed, "chat", number), number) for number in range(count)]


def _conversation(rng: Draws, number: int) -> Conversation:
    messages = []
    for _ in range(lognormal_count(rng, median=3, spread=0.5, at_most=12)):
        messages.append(Message("user", prose(rng, lognormal_count(rng, median=14, spread=1.0, at_most=600))))
        messages.append(Message("assistant", prose(rng, lognormal_count(rng, median=58, spread=0.7, at_most=600))))
    if rng.random() < RETRIEVAL_SHARE:
        passages = prose(rng, lognormal_count(rng, median=450, spread=0.7, at_most=3000))
        messages[-2] = Message("user", f"{passages}\n\n{messages[-2].content}")
    return Conversation(f"chat-{number}", tuple(messages))


def documents(seed: int, count: int, *, words: int = 2000, questions: int = 6) -> list[Document]:
    """Documents of ``words`` words, with questions and short answers."""
    documents_made = []
    for number in range(count):
        rng = draws(seed, "document", number)
        questions_asked = tuple(
            Question(_question(rng), prose(rng, int(rng.integers(20, 118)))) for _ in range(questions)
        )
        documents_made.append(Document(f"document-{number}", prose(rng, words), questions_asked))
    return documents_made


def _question(rng: Draws) -> str:
    return prose(rng, int(rng.integers(6, 18)))[:-1] + "?"


def episodes(seed: int, count: int) -> list[Episode]:
    """Agent episodes of 1 to 7 steps."""
    return [_episode(draws(seed, "episode", number), f"episode-{number}") for number in range(count)]


def _episode(rng: Draws, name: str, *, steps_max: int = 7, observation_words_max: int = 300) -> Episode:
    steps = tuple(
        Step(
            prose(rng, int(rng.integers(8, 36))),
            f"Search[{prose(rng, 3)[:-1]}]",
            prose(rng, lognormal_count(rng, median=95, spread=0.7, at_most=observation_words_max)),
        )
        for _ in range(lognormal_count(rng, median=3.4, spread=0.4, at_most=steps_max))
    )
    return Episode(name, _question(rng), steps)


def examples(seed: int, count: int = 2) -> str:
    """Worked examples for an agent's prompt."""
    lines = []
    for number in range(count):
        episode = _episode(draws(seed, "example", number), "example", steps_max=3, observation_words_max=40)
        lines.append(f"Question: {episode.question}")
        for place, step in enumerate(episode.steps, 1):
            lines += [f"Thought {place}: {step.thought}", f"Action {place}: {step.action}"]
            lines += [f"Observation {place}: {step.observation}"]
    return "\n".join(lines) + "\n"


def trace_rows(seed: int, count: int, *, requests_per_s: float = 3.0) -> list[Lengths]:
    """Rows like Mooncake's conversation trace: one system block for all, chats with prompts that grow row by row."""
    rng = draws(seed, "trace")
    chats: list[list[int]] = []
    next_id, now_s, rows = 1, 0.0, []
    for _ in range(count):
        now_s += float(rng.exponential(1 / requests_per_s))
        if not chats or rng.random() < 0.86:
            chats.append([0])
        chat = chats[max(0, len(chats) - 1 - int(rng.geometric(0.1)))] if rng.random() < 0.5 else chats[-1]
        fresh = lognormal_count(rng, median=9, spread=1.1, at_most=200)
        chat += range(next_id, next_id + fresh)
        next_id += fresh
        tokens = (len(chat) - 1) * TRACE_BLOCK_TOKENS + int(rng.integers(1, TRACE_BLOCK_TOKENS + 1))
        output = lognormal_count(rng, median=250, spread=0.8, at_most=2000)
        blocks = blocks_from_ids(tuple(chat), tokens=tokens, block_tokens=TRACE_BLOCK_TOKENS)
        rows.append(Lengths(float(np.round(now_s, 3)), tokens, output, blocks.spans))
    return rows
