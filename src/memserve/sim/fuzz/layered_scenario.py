"""KV by layer in a scenario, for those that have it: memory that long prompts do not fit into, and such prompts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from memserve.sim.fuzz.clients import FLOOD, QUIET, VOCAB, Conversation, Turn
from memserve.units import NS_PER_MS

LAYERWISE = ("auto", "off")
LAYERED_SHARE = 0.1
"""Of all scenarios, those with KV by layer."""
LAYERED_FAULTS = ("row", "device", "device", "kill", "slow-device", "slow-tier")
"""Where anything goes wrong at all, some of these do as well: each ends or delays what is being moved."""


@dataclass(frozen=True)
class LayeredSetup:
    """What a seed decides of KV by layer. All instances have as many layers: they exchange KV."""

    context_tokens: int
    hbm_blocks: tuple[int, ...]
    """Of each instance: the context fits, and at most one more."""
    dram_blocks: tuple[int, ...]
    chunk: int
    link_bytes_s: float | None
    """Of the link between the tiers. None: it carries everything."""
    step_ns: tuple[int, int]
    layers: int = 5


def draw_layered(random: Random, instances: int, block_tokens: int) -> LayeredSetup:
    """Pools of which a long prompt takes more than half."""
    context = random.choice([80, 112, 144])
    least = -(-context // block_tokens) + 1
    return LayeredSetup(
        context,
        tuple(least + random.randint(least // 4, 3 * least // 4) for _ in range(instances)),
        tuple(random.choice([least, 3 * least, 6 * least]) for _ in range(instances)),
        random.choice([4, 4, 4, 8, 12]),
        random.choice([None, 125_000.0, 500_000.0, 2_000_000.0]),
        random.choice(
            [(1 * NS_PER_MS, 6 * NS_PER_MS), (1 * NS_PER_MS, 6 * NS_PER_MS), (4 * NS_PER_MS, 20 * NS_PER_MS)]
        ),
    )


def crowd(random: Random, conversations: list[Conversation], instances: int, context_tokens: int) -> list[Conversation]:
    """A few of the clients, the whole flood if there is one, and clients that begin at once, each with a long document
    that others may have, too."""
    documents = [[random.randrange(VOCAB) for _ in range(context_tokens)] for _ in range(3)]
    few = [conversation for conversation in conversations if conversation.tenant in (FLOOD, QUIET)]
    few += [conversation for conversation in conversations if conversation not in few][:3]
    tenants = sorted({conversation.tenant for conversation in few} - {FLOOD, QUIET}) or [""]
    hurry_ns = random.choice([1, 20, 100, 300]) * NS_PER_MS
    return few + [
        Conversation(
            f"d{number}",
            random.choice(tenants),
            random.choice(["", f"d{number}"]),
            random.choice(documents)[: int(random.choice([0.4, 0.6, 0.75, 0.85]) * context_tokens)],
            [_turn(random) for _ in range(random.choice([1, 2, 3]))],
            random.randint(0, hurry_ns),
        )
        for number in range(instances // 2 + random.randint(3, 6))
    ]


def _turn(random: Random) -> Turn:
    """One line of tokens, often a long one: sequences that part do not lie by layer."""
    return Turn(
        [random.randrange(VOCAB) for _ in range(random.choice([0, 1, 3, 5]))],
        random.choice([0, 0, 20 * NS_PER_MS]),
        max_tokens=random.choice([1, 8, 16, 32, 32]),
        seed=random.randrange(1000),
        lifetime_ns=random.choice([None, None, None, None, 60 * NS_PER_MS]),
        cancel_after_ns=random.choice([None, None, None, random.randint(0, 200) * NS_PER_MS]),
        stop_string_after=random.choice([None, None, None, 3]),
        use_cache=random.random() < 0.9,
    )
