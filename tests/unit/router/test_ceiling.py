"""What the router's machine counts of prompts, and the map of their prefixes."""

from __future__ import annotations

from cluster_world import BLOCK, World, a_request, cached
from memserve.base.types import Caching, Role, Tier
from memserve.router.placement.prefix_directory import HeldBlocks

COLOCATED = [("c1", Role.COLOCATED), ("c2", Role.COLOCATED)]


def tokens(world: World, tenant: str | None = None) -> tuple[int, int]:
    """Prompt tokens, and how many of them were new."""
    stats = world.cluster.stats()
    count = stats.prompt_tokens if tenant is None else stats.tenant_prompt_tokens[tenant]
    return count.total, round(count.new)


def test_tokens_of_an_earlier_prompt_are_not_new() -> None:
    world = World(COLOCATED)
    world.ask(a_request("a", range(4 * BLOCK + 1)))
    assert tokens(world) == (17, 17)
    world.ask(a_request("b", range(6 * BLOCK + 1)))
    assert tokens(world) == (17 + 25, 17 + 9), "two blocks and a token"
    world.run()
    world.check_repeatable()


def test_answer_is_known_to_next_prompt_of_conversation() -> None:
    world = World(COLOCATED)
    prompt = list(range(2 * BLOCK + 1))
    client = world.ask(a_request("a", prompt, max_tokens=2 * BLOCK))
    world.run()
    assert tokens(world) == (9, 9), "an answer is no prompt"
    world.ask(a_request("b", [*prompt, *client.got[0], 1]))
    assert tokens(world) == (9 + 18, 9 + 2), "four whole blocks are known"
    world.run()


def test_last_prompt_token_counts_as_computed() -> None:
    world = World(COLOCATED)
    for name in ("a", "b"):
        world.ask(a_request(name, range(2 * BLOCK)))
    assert tokens(world) == (16, 8 + 4), "its last block cannot be reused"
    world.run()


def test_a_second_attempt_does_not_count_again() -> None:
    world = World([("c1", Role.COLOCATED)])
    world.instances["c1"].refuses = ("busy", 1.0)
    world.add("c2", Role.COLOCATED)
    world.ask(a_request("a", range(4 * BLOCK + 1)))
    world.say_all(world.instances["c1"])
    world.run()
    assert tokens(world) == (17, 17)


def test_tenants_are_counted_apart() -> None:
    world = World(COLOCATED)
    for tenant in ("ada", "bob", "bob"):
        world.ask(a_request(f"{tenant}{len(world.clients)}", range(4 * BLOCK + 1), tenant=tenant))
    assert tokens(world, "ada") == (17, 17) and tokens(world, "bob") == (34, 18) and tokens(world) == (51, 35)
    assert list(world.cluster.prefix_trees("ada")) == ["ada"]
    world.run()


def test_without_caching_nothing_is_counted() -> None:
    world = World(COLOCATED, caching=Caching.OFF)
    world.ask(a_request("a", range(4 * BLOCK + 1)))
    world.run()
    assert tokens(world) == (0, 0) and world.cluster.prefix_trees(None) == {}


def test_the_map_names_the_holders_of_a_shared_prefix() -> None:
    world = World(COLOCATED)
    shared = list(range(2 * BLOCK))
    for name, last in (("a", 40), ("b", 41)):
        world.ask(a_request(name, [*shared, *[last] * BLOCK, 1]))
    world.run()
    cached(world, "c2", shared[:BLOCK], Tier.DRAM)
    (root,) = world.cluster.prefix_trees(None)[""]
    assert (root.blocks, root.uses) == (2, 2)
    assert [(child.blocks, child.uses) for child in root.children] == [(1, 1), (1, 1)]
    assert {held.member for held in root.holders} <= {"c1", "c2"} and root.holders
    assert all(isinstance(held, HeldBlocks) and held.upper_blocks + held.lower_blocks <= 2 for held in root.holders)
    world.kill("c1")
    world.kill("c2")
    world.wait(60 * 10**9)
    assert world.cluster.prefix_trees(None)[""][0].holders == (), "what is gone holds nothing"
