"""The map of prefixes beside a plain count of every prefix of every prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from memserve.router.placement import prefix_directory as prefix_map
from memserve.router.placement.prefix_directory import PROMPTS_MAX, PrefixNode, RecentPrompts


def chained(words: Sequence[int]) -> list[bytes]:
    """Identities of blocks: each stands for all words up to its own."""
    names, chain = [], b""
    for word in words:
        chain = hashlib.blake2b(chain + bytes([word]), digest_size=16).digest()
        names.append(chain)
    return names


def walked(nodes: Sequence[PrefixNode], depth: int = 0) -> Iterator[tuple[int, PrefixNode]]:
    """Each node, with the blocks up to its end."""
    for node in nodes:
        yield depth + node.blocks, node
        yield from walked(node.children, depth + node.blocks)


@pytest.mark.parametrize("seed", range(20))
def test_every_node_counts_the_prompts_that_go_through_it(seed: int) -> None:
    rng, recent = np.random.default_rng(seed), RecentPrompts()
    prompts = [list(rng.integers(0, 2, rng.integers(0, 9))) for _ in range(60)]
    every = [name for prompt in prompts for name in chained(prompt)]
    held = {every[at] for at in rng.integers(0, len(every), 40)}

    def match(identities: bytes) -> list[tuple[str, int, int]]:
        blocks = [identities[at : at + 16] for at in range(0, len(identities), 16)]
        has = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
        return [("c1", has, min(1, has))] if has else []

    for now, prompt in enumerate(prompts):
        recent.add_prompt("ada", b"".join(chained(prompt)), now)
    trees = recent.build_trees(None, match).get("ada", ())
    names = [chained(prompt) for prompt in prompts]
    uses = {name: sum(name in prompt for prompt in names) for prompt in names for name in prompt}
    by_short = {name[:8].hex(): name for name in uses}
    for depth, node in walked(trees):
        name = by_short[node.name]
        through = [at for at, prompt in enumerate(names) if name in prompt]
        assert names[through[0]].index(name) == depth - 1
        assert (node.uses, node.used_ns) == (uses[name], through[-1])
        path = names[through[0]][:depth]
        has = next((at for at, block in enumerate(path) if block not in held), depth)
        mine = max(0, has - (depth - node.blocks))
        blocks = [(one.upper_blocks, one.lower_blocks) for one in node.holders]
        assert blocks == ([(mine - 1, 1)] if mine else [])
    assert sum(node.blocks for _, node in walked(trees)) == len(uses), "each different block once"
    for _, node in [*walked(trees), (0, PrefixNode("", 0, 0, 0, (), trees))]:
        order = [child.uses for child in node.children]
        assert order == sorted(order, reverse=True)
        assert len(node.children) != 1 or node.children[0].uses < node.uses or not node.name, "a run is one node"


def test_tenants_are_apart() -> None:
    recent = RecentPrompts()
    for tenant in ("ada", "bob"):
        recent.add_prompt(tenant, b"".join(chained([ord(tenant[0]), 1])), 7)
    assert list(recent.build_trees(None, lambda _: ())) == ["ada", "bob"]
    assert list(recent.build_trees("bob", lambda _: ())) == ["bob"] and recent.build_trees("eve", lambda _: ()) == {}


def test_recent_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentPrompts()
    for number in range(PROMPTS_MAX + 10):
        recent.add_prompt("", b"".join(chained([number % 256, number // 256])), number)
    assert sum(node.uses for node in recent.build_trees(None, lambda _: ())[""]) == PROMPTS_MAX
    monkeypatch.setattr(prefix_map, "BYTES_MAX", 64)
    recent.add_prompt("", b"".join(chained([9] * 100)), 1)
    assert [node.uses for node in recent.build_trees(None, lambda _: ())[""]] == [1], "the last one stays, however long"


def test_a_long_conversation_is_one_branch() -> None:
    recent = RecentPrompts()
    words = [number % 251 for number in range(PROMPTS_MAX)]
    for turn in range(1, PROMPTS_MAX + 1):
        recent.add_prompt("", b"".join(chained(words[:turn])), turn)
    depths = [depth for depth, _ in walked(recent.build_trees(None, lambda _: ())[""])]
    assert depths == list(range(1, PROMPTS_MAX + 1))
