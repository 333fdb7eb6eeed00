"""The prefix trees as a map for people: which prefixes are in use, and which members hold them on which tier.

The directory knows blocks by identity and not what precedes them. The map is therefore drawn from the last prompts: a
radix tree of their blocks, each node a run of blocks that the same prompts share, looked up in the directory. It is
drawn when it is asked for; until then a prompt costs a place in a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memserve.cluster.trees import IDENTITY_BYTES

PROMPTS_MAX = 256
"""Prompts that are remembered."""
BYTES_MAX = 4 << 20
"""And their identities' bytes in total: 262,144 blocks."""


class Held(NamedTuple):
    """What one member has of a run of blocks."""

    member: str
    upper_blocks: int
    """On its upper tier: HBM of an instance, memory of a store."""
    lower_blocks: int
    """On its lower tier alone: DRAM of an instance, disks of a store."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of blocks behind its parent's."""

    name: str
    """Of its last block, 16 hexadecimal digits: the same prefix has the same name."""
    blocks: int
    uses: int
    """Prompts, of those that are remembered, that go through all of it."""
    used_ns: int
    """When the last of them was placed."""
    holders: tuple[Held, ...]
    children: tuple[PrefixNode, ...]
    """Most used first."""


class _Prompt(NamedTuple):
    tenant: str
    identities: bytes
    placed_ns: int

    def block(self, at: int) -> bytes:
        """The identity of block ``at``; ``b""`` behind the end."""
        return self.identities[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES]


Match = Callable[[bytes], Iterable[tuple[str, int, int]]]
"""Identities from the first block on -> member, blocks that it has without a gap, those in its lower tier alone."""


class RecentPrompts:
    """The last prompts that were placed; bounded by number and by bytes."""

    __slots__ = ("_nbytes", "_prompts")

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()
        self._nbytes = 0

    def note(self, tenant: str, identities: bytes, now: int) -> None:
        """A prompt was placed; ``identities`` of its whole blocks."""
        self._prompts.append(_Prompt(tenant, identities, now))
        self._nbytes += len(identities)
        while len(self._prompts) > PROMPTS_MAX or (self._nbytes > BYTES_MAX and len(self._prompts) > 1):
            self._nbytes -= len(self._prompts.popleft().identities)

    def trees(self, tenant: str | None, match: Match) -> dict[str, tuple[PrefixNode, ...]]:
        """By tenant, the most used prefixes first; ``tenant`` None: of all."""
        by_tenant: dict[str, list[_Prompt]] = {}
        for prompt in self._prompts:
            if tenant is None or prompt.tenant == tenant:
                by_tenant.setdefault(prompt.tenant, []).append(prompt)
        return {name: _below(prompts, 0, match) for name, prompts in by_tenant.items()}


def _below(prompts: Sequence[_Prompt], depth: int, match: Match) -> tuple[PrefixNode, ...]:
    """The nodes behind ``depth`` blocks that all ``prompts`` share."""
    groups: dict[bytes, list[_Prompt]] = {}
    for prompt in prompts:
        if block := prompt.block(depth):
            groups.setdefault(block, []).append(prompt)
    nodes = (_node(group, depth, match) for group in groups.values())
    return tuple(sorted(nodes, key=lambda node: (-node.uses, -node.used_ns)))


def _node(group: Sequence[_Prompt], depth: int, match: Match) -> PrefixNode:
    end, first = depth + 1, group[0]
    while (block := first.block(end)) and all(prompt.block(end) == block for prompt in group):
        end += 1
    path = first.identities[: end * IDENTITY_BYTES]
    holders = (_held(found, depth) for found in match(path))
    return PrefixNode(
        path[-IDENTITY_BYTES:][:8].hex(),
        end - depth,
        len(group),
        max(prompt.placed_ns for prompt in group),
        tuple(held for held in holders if held.upper_blocks or held.lower_blocks),
        _below(group, end, match),
    )


def _held(found: tuple[str, int, int], depth: int) -> Held:
    """Of a prefix with ``blocks``, what lies behind ``depth``. What a member has in its lower tier alone is its end:
    blocks leave the upper tier from the leaves."""
    member, blocks, lower = found
    behind = max(0, blocks - depth)
    lower = min(lower, behind)
    return Held(member, behind - lower, lower)
