"""Sequences that instances share, for scenarios that have them: small memories, and prompts that fit none of them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from memserve.sim.fuzz.clients import VOCAB, Conversation, Turn
from memserve.units import NS_PER_MS

SHARED_SHARE = 0.08
"""Of all scenarios with several instances, those with such sequences."""
SHARED_FAULTS = ("device", "device", "kill", "pause", "lose", "delay", "drain")
"""Where anything goes wrong at all, some of these do as well: each ends a part, or delays word of it."""


@dataclass(frozen=True)
class SharedSetup:
    """What a seed decides of them."""

    context_tokens: int
    """The longest sequence: nearly what two instances hold."""
    hbm_blocks: tuple[int, ...]


def draw_shared(random: Random, instances: int, block_tokens: int) -> SharedSetup:
    """Memories that hold about half of the context each."""
    blocks = random.choice([8, 12, 18])
    return SharedSetup(
        (2 * blocks - 1) * block_tokens, tuple(blocks + random.choice([0, 0, 0, 3]) for _ in range(instances))
    )


def long_prompts(random: Random, conversations: list[Conversation], setup: SharedSetup) -> list[Conversation]:
    """A few of the clients, without what keeps a sequence at one instance, and clients with long documents."""
    few = conversations[:4]
    for turn in (turn for conversation in few for turn in conversation.turns):
        turn.beam_width, turn.prompt_logprobs = 0, False
    documents = [[random.randrange(VOCAB) for _ in range(setup.context_tokens)] for _ in range(2)]
    tenants = sorted({conversation.tenant for conversation in few}) or [""]
    return few + [
        Conversation(
            f"l{number}",
            random.choice(tenants),
            random.choice(["", f"l{number}"]),
            random.choice(documents)[: int(random.choice([0.6, 0.7, 0.8]) * setup.context_tokens)],
            [_turn(random) for _ in range(random.choice([1, 1, 2]))],
            random.randint(0, 300) * NS_PER_MS,
        )
        for number in range(random.randint(2, 3))
    ]


def _turn(random: Random) -> Turn:
    return Turn(
        [random.randrange(VOCAB) for _ in range(random.choice([0, 1, 3]))],
        random.choice([0, 20 * NS_PER_MS]),
        max_tokens=random.choice([1, 2, 6, 6]),
        n=random.choice([1, 1, 1, 2]),
        seed=random.randrange(1000),
        lifetime_ns=random.choice([None, None, None, None, 60 * NS_PER_MS]),
        cancel_after_ns=random.choice([None, None, None, random.randint(0, 200) * NS_PER_MS]),
        use_cache=random.random() < 0.8,
    )
