"""Shared system prompts in groups (level 1): many tenants, each with a long prompt of its own and several users."""

from __future__ import annotations

from memserve.workloads.draws import draws
from memserve.workloads.prose import prose
from memserve.workloads.tokens import ByteMeter, Meter
from memserve.workloads.words import Chat, Message, Session, Turn, Workload


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
    """``groups`` x ``users`` sessions in random order: one system prompt of ``prefix_tokens`` a group, written from the
    seed; each user's questions are their own."""
    meter = meter or ByteMeter()
    heads = [
        Message("system", meter.cut(prose(draws(seed, "head", group), prefix_tokens), prefix_tokens))
        for group in range(groups)
    ]
    order = draws(seed, "order").permutation(groups * users).tolist()
    sessions = []
    for place in order:
        group, user = divmod(place, users)
        name = f"group-{group}-user-{user}"
        rng = draws(seed, name)
        asked = [Message("user", meter.cut(prose(rng, question_tokens), question_tokens)) for _ in range(turns)]
        said = [(heads[group], asked[0]), *((message,) for message in asked[1:])]
        made = tuple(Turn(Chat(messages), answer_tokens) for messages in said)
        sessions.append(Session(name, made, group=f"group-{group}"))
    notes = (f"{groups} groups of {users} users, {prefix_tokens} tokens shared by a group",)
    return Workload("groups", "built-in", tuple(sessions), seed=seed, notes=notes)
