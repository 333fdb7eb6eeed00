"""Which instance computes and which decodes: each policy's choices, and what must hold for any candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster_world import GEOMETRY, World, a_request, info
from memserve import _core
from memserve.base.config import ClusterConfig
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.costs import CopyCurve, CostModel
from memserve.kv.identity import block_identities, namespace_id
from memserve.kv.reuse import Prefix, decide_batch
from memserve.protocol.messages import Dispatch, Heartbeat, Join, KvChange, KvEvents, Leave
from memserve.protocol.peers import Load, Peer
from memserve.router.events import InstanceDrained, MessageArrived, RequestArrived, Send
from memserve.router.machine import Cluster
from memserve.router.members.loads import LoadTable, Work
from memserve.router.placement.candidates import OVERLOAD_FACTOR, OVERLOAD_TOKENS, Ask, Candidate, Holding
from memserve.router.placement.placer import ALL_OF
from memserve.router.placement.routing import (
    first_cost,
    handoff_ns,
    lacking_ns,
    others_ns,
    policy_named,
    route,
    split,
    weigh,
)

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
COSTS = CostModel()
ASK = Ask(1000, 64, token_bytes=1000)


def some(*roles: Role, **fields) -> list[Candidate]:
    """Candidates of these roles; ``fields`` give one value each."""
    return [
        Candidate(k, f"i{k}", role, **{name: values[k] for name, values in fields.items()})
        for k, role in enumerate(roles)
    ]


def choice(policy: str, ask: Ask, candidates: list[Candidate]) -> tuple[int, int | None]:
    decided = route(policy, ask, candidates)
    assert decided is not None and decided.reason
    return decided.first.number, decided.decode_at.number if decided.decode_at else None


def test_every_policy_of_the_configuration_exists():
    for name in ROUTING_POLICIES.built_in:
        assert callable(policy_named(name))


# -- teams


@pytest.mark.parametrize("roles, expected", [
    ([P, D], ([0], [1])),
    ([P, D, C], ([0, 2], [1])),  # colocated instances are as good as a pair
    ([P, C], ([1], [])),  # without decode instances prefill ones only while nobody else is there
    ([D, C], ([1], [])),
    ([P, P], ([0, 1], [])),
    ([D], ([0], [])),
    ([S], ([], [])),
    ([P, D, S], ([0], [1])),
])  # fmt: skip
def test_roles_stand_in_for_each_other(roles, expected):
    first, decoders = split(some(*roles))
    assert ([c.number for c in first], [c.number for c in decoders]) == expected


def test_route_without_candidates_is_none():
    assert route("cost", ASK, []) is None
    assert route("cost", ASK, some(P, D, takes_requests=[False, False])) is None


# -- each policy


def test_least_load_counts_tokens_to_compute_and_tokens_to_read():
    candidates = some(P, P, D, D, prefill_tokens=[500, 400, 0, 0], context_tokens=[0, 0, 80, 90])
    assert choice("least-load", ASK, candidates) == (1, 2)
    candidates = some(C, C, prefill_tokens=[100, 0], context_tokens=[0, 200])
    assert choice("least-load", ASK, candidates) == (0, None)


def test_equal_ones_go_to_the_lowest_number_unless_one_is_known():
    candidates = some(C, C, C)
    for policy in ROUTING_POLICIES.built_in:
        assert choice(policy, ASK, candidates) == (0, None)
        assert choice(policy, Ask(1000, favourites=(2,)), candidates) == (2, None)


def test_a_session_stays_unless_its_instance_is_overloaded():
    ask = Ask(1000, favourites=(1, 3))
    assert choice("session", ask, some(P, P, D, D, prefill_tokens=[0, OVERLOAD_TOKENS, 0, 0])) == (1, 3)
    assert choice("session", ask, some(P, P, D, D, prefill_tokens=[0, OVERLOAD_TOKENS + 1, 0, 0])) == (0, 3)
    least = 10_000
    limit = OVERLOAD_FACTOR * least + OVERLOAD_TOKENS
    assert choice("session", ask, some(P, P, D, D, prefill_tokens=[least, limit, 0, 0])) == (1, 3)


def test_the_prompt_tree_takes_the_longest_prefix():
    candidates = some(P, P, D, D, matched_tokens=[64, 96, 32, 0], prefill_tokens=[0, 900, 0, 0])
    assert choice("prompt-tree", ASK, candidates) == (1, 2)
    decided = route("prompt-tree", ASK, candidates)
    assert "96 of 1000 tokens" in decided.reason


def test_prompt_tree_avoids_overloaded_instance_with_reason():
    candidates = some(P, P, P, matched_tokens=[900, 64, 0], prefill_tokens=[90_000, 100, 0])
    assert choice("prompt-tree", ASK, candidates) == (1, None)
    assert "i0 has 900, but 90000 tokens of work" in route("prompt-tree", ASK, candidates).reason


def test_cost_weighs_the_queue_against_the_prefix():
    for queue, expected in ((500, 0), (50_000, 1)):
        assert choice("cost", ASK, some(C, C, matched_tokens=[900, 0], prefill_tokens=[queue, 0])) == (expected, None)


def test_cost_spares_a_queue_what_another_instance_has():
    """What is computed beyond what the holder would compute delays those behind it: none where no queue is."""
    for queue, expected in ((4500, 0), (0, 1)):
        busy = some(C, C, matched_tokens=[900, 0], prefill_tokens=[queue + 1500, queue])
        assert choice("cost", ASK, busy) == (expected, None)
        unknown = some(C, C, prefill_tokens=[queue + 1500, queue])
        assert choice("cost", ASK, unknown) == (1, None), "one of them computes all of it in any case"


def test_cost_counts_all_sequences_where_memory_is_full():
    for room, expected in ((500, 0), (2000, 1)):
        full = some(
            C, C, matched_tokens=[900, 0], prefill_tokens=[4000, 0], sequences=[20, 20], room_tokens=[2000, room]
        )
        assert choice("cost", ASK, full) == (expected, None)


def test_cost_counts_fetched_kv_as_if_it_were_computed():
    ask = Ask(1000, 64, token_bytes=100, holdings=(Holding(0, 900, "h"),))
    holder, fetcher = some(C, C, matched_tokens=[900, 0], prefill_tokens=[2000, 1500], host_id=["h", "h"])
    assert first_cost(ask, fetcher).fetch_ns and first_cost(ask, fetcher).total_ns < first_cost(ask, holder).total_ns
    assert choice("cost", ask, [holder, fetcher]) == (0, None)
    assert choice("cost", ask, [holder, structs.replace(fetcher, prefill_tokens=0)]) == (1, None)


def test_explanation_of_cost_names_what_others_lose():
    candidates = some(C, C, matched_tokens=[900, 0], prefill_tokens=[20_000, 1000])
    first, second = candidates
    spared_ns = lacking_ns(ASK, second) - lacking_ns(ASK, first)
    assert others_ns(ASK, second, lacking_ns(ASK, first)) == spared_ns, "a queue of one such prompt"
    decided = route("cost", ASK, candidates)
    assert decided.first is second and f"others {spared_ns / 1e6:.1f}" in decided.reason
    alone = structs.replace(ASK, least_lacking_ns=lacking_ns(ASK, first))
    assert route("cost", alone, [second]).reason == decided.reason, "of all, where only the best are shown"
    assert "others" not in route("cost", ASK, some(C, C)).reason


def test_room_is_without_those_that_wait_for_it():
    """The instance runs the first of two contexts, and has known of both for a heartbeat."""
    loads = LoadTable()
    loads.add_member(0, C, 1000, 10)
    charges = [loads.charge_work(0, Work(0, 1, tokens)) for tokens in (64, 40)]
    assert loads.room_tokens(np.array([0]), 32).tolist() == [320 - 104]
    loads.apply_heartbeat(0, Load(sequences_running=1, context_tokens_running=64, hbm_blocks_available=8))
    assert loads.room_tokens(np.array([0]), 32).tolist() == [256 - 40]
    row = _core.shortlist(
        [np.array([0])], loads.tables, loads.room_blocks, np.zeros((2, 8), np.int64), (), (), (1, 1), 6
    )
    assert row[0][4] * 32 - row[0][5] == 256 - 40, "native code sees the same"
    assert loads.room_tokens_of(0, 32) == 256 - 40
    loads.discharge_work(charges[0])
    assert loads.room_tokens_of(0, 32) == 256 - 40, "what it gives back is in the next heartbeat"


def test_cost_prefers_hbm_to_dram_and_its_own_to_others():
    assert choice("cost", ASK, some(C, C, matched_tokens=[900, 900], dram_tokens=[900, 0])) == (1, None)
    ask = Ask(1000, token_bytes=1000, holdings=(Holding(1, 900, "h"),))
    assert choice("cost", ask, some(C, C, matched_tokens=[0, 900], host_id=["h", "h"])) == (1, None)


def test_cost_sends_to_decoders_that_have_most_already():
    ask = Ask(8000, 64, token_bytes=100_000)
    assert choice("cost", ask, some(P, D, D, matched_tokens=[0, 0, 7000])) == (0, 2)


def test_cost_counts_the_state_that_goes_with_kv():
    """Beside a large state a prompt is sooner computed again, and goes to a decoder as if it were longer."""
    ask = Ask(1000, token_bytes=1000, block_tokens=10, holdings=(Holding(1, 900, "h"),))
    heavy = structs.replace(ask, state_blocks=1_000_000)
    first, _ = some(C, C, host_id=["h", "h"], costs=[SLOW, SLOW])
    assert first_cost(ask, first).fetch_ns and not first_cost(heavy, first).fetch_ns
    first, decoder = some(P, D, host_id=["h", "h"], matched_tokens=[0, 500])
    longer = structs.replace(ask, prompt_tokens=10_001_000)
    assert handoff_ns(heavy, first, decoder) == handoff_ns(longer, first, decoder) > handoff_ns(ask, first, decoder)


def test_cost_avoids_the_network_when_it_can():
    ask = Ask(8000, 64, token_bytes=100_000)
    candidates = some(P, P, D, D, host_id=["a", "b", "b", "c"], prefill_tokens=[0, 10, 0, 0])
    assert choice("cost", ask, candidates) == (1, 2)


SLOW, NEAR = COSTS.with_prefill_scale(10.0), CopyCurve(1000.0, 0.0, 0.0)


def test_cost_knows_each_instance_by_its_own_profile():
    """A slow machine computes no long prompt, unless the quick one has far more to do; and the machine that pulls is
    the one whose link counts."""
    assert choice("cost", ASK, some(C, C, costs=[SLOW, COSTS])) == (1, None)
    assert choice("cost", ASK, some(C, C, costs=[SLOW, COSTS], prefill_tokens=[0, 100_000])) == (0, None)
    assert choice("cost", ASK, some(P, P, D, D, costs=[SLOW, COSTS, COSTS, replace(COSTS, same_host=NEAR)],
                                    host_id=["h", "h", "h", "h"])) == (1, 3)  # fmt: skip


def test_cost_prices_transfers_as_instances_do():
    """In whole blocks, each with the price of its pieces: as :func:`decide_batch` has it for the fetch."""
    geometry = KVGeometry(4, 2, 16, 16, "float32", block_tokens=8)
    costs = replace(COSTS, same_host=CopyCurve(1000.0, 100.0, 0.001), swap_in=CopyCurve(500.0, 50.0, 0.001))
    ask = Ask(
        1000, token_bytes=geometry.token_bytes, block_tokens=8, holdings=(Holding(9, 800, "h"),),
        handoff_pieces=geometry.num_layers,
    )  # fmt: skip
    (first,) = some(P, host_id=["h"], matched_tokens=[160], dram_tokens=[80], costs=[costs])
    (decided,) = decide_batch(costs, geometry, [Prefix(1000, 80, 80, 640)])
    found = first_cost(ask, first)
    assert (found.fetch_ns, found.swap_ns) == (decided.choice.wait_ns, decided.choice.swap_ns)
    assert found.total_ns == decided.expected_ns
    assert found.fetch_ns == costs.same_host.ns(80 * geometry.block_bytes, 80)
    (decoder,) = some(D, host_id=["h"], matched_tokens=[160], costs=[costs])
    assert handoff_ns(ask, first, decoder) == costs.same_host.ns(
        105 * geometry.block_bytes, 105 * 4
    )  # 840 tokens, page by page


def test_cost_does_not_decode_where_there_is_no_room():
    assert choice("cost", ASK, some(P, D, D, room_tokens=[9999, 10, 9999])) == (0, 2)


def test_queue_hides_the_fetch_time():
    """A queue of prompts hides the transfer of this one's prefix."""
    ask = Ask(8000, token_bytes=10_000, holdings=(Holding(9, 7000, "h"),))
    idle, busy = some(C, C, host_id=["h", "h"], prefill_tokens=[0, 4000])
    for candidate in (idle, busy):
        cost = first_cost(ask, candidate)
        assert cost.reused_tokens == 7000 and cost.fetch_ns > 0
        assert cost.total_ns == max(cost.queue_ns, cost.fetch_ns) + cost.prefill_ns


def test_a_fetch_waits_for_no_step_but_what_it_brings_does():
    """The step that computes the rest comes behind the one under way, as if the KV had been there."""
    ask = Ask(8000, token_bytes=10_000, holdings=(Holding(9, 7000, "h"),))
    (busy,) = some(C, host_id=["h"], sequences=[8], context_tokens=[8000])
    step_ns = COSTS.decode_step_ns(8, 8000)
    cost = first_cost(ask, busy)
    assert (cost.reused_tokens, cost.queue_ns) == (7000, step_ns)
    assert cost.total_ns == cost.fetch_ns + step_ns + cost.prefill_ns
    few = Ask(1000, token_bytes=10_000, holdings=(Holding(9, 8, "h"),))
    assert first_cost(few, busy).fetch_ns == 0, "8 tokens are not worth a transfer"


def test_cost_always_computes_one_token():
    (candidate,) = some(C, matched_tokens=[1000])
    assert first_cost(ASK, candidate).reused_tokens == 999


# -- any candidates

TOKENS = st.integers(0, 20_000)


@st.composite
def situations(draw) -> tuple[Ask, list[Candidate]]:
    prompt = draw(st.integers(1, 9000))
    candidates = []
    for number in range(draw(st.integers(0, 7))):
        matched = draw(st.integers(0, prompt))
        candidates.append(
            Candidate(
                number,
                f"i{number}",
                draw(st.sampled_from([P, D, C, S])),
                draw(st.sampled_from(["", "a", "b"])),
                draw(st.booleans()),
                draw(TOKENS),
                draw(st.integers(0, 64)),
                draw(TOKENS),
                draw(TOKENS),
                matched,
                draw(st.integers(0, matched)),
            )
        )
    holdings = [Holding(c.number, c.matched_tokens, c.host_id) for c in candidates if c.matched_tokens]
    longest = tuple(sorted(holdings, key=lambda h: -h.tokens)[:4])
    favourites = tuple(draw(st.sets(st.integers(0, 7), max_size=2)))
    return Ask(prompt, draw(st.integers(0, 500)), draw(st.integers(1, 4)), 1000, favourites, longest), candidates


@given(situations(), st.sampled_from(list(ROUTING_POLICIES.built_in)))
def test_route_chooses_an_accepting_instance_if_any(situation, policy):
    ask, candidates = situation
    decided = route(policy, ask, candidates)
    able = [c for c in candidates if c.takes_requests and c.role is not S]
    assert (decided is None) == (not able)
    if decided is None:
        return
    chosen = [c for c in (decided.first, decided.decode_at) if c is not None]
    assert all(c in able for c in chosen)
    if decided.decode_at is not None:
        assert (decided.first.role, decided.decode_at.role) == (P, D)
    elif decided.first.role is not C:
        assert not ({P, D} <= {c.role for c in able}), "a pair was there"
    assert decided == route(policy, ask, list(reversed(candidates))), "the order of candidates is nothing"


@given(situations())
def test_prompt_tree_takes_longest_match_not_overloaded(situation):
    ask, candidates = situation
    decided = route("prompt-tree", ask, candidates)
    if decided is None:
        return
    first, decoders = split(candidates)
    for chosen, among in ((decided.first, first), (decided.decode_at, decoders)):
        if chosen is not None:
            limit = OVERLOAD_FACTOR * min(c.work_tokens for c in among) + OVERLOAD_TOKENS
            fair = [c for c in among if c.work_tokens <= limit]
            assert chosen in fair
            longest = max(c.matched_tokens for c in fair)
            assert chosen.matched_tokens == longest
            assert chosen.work_tokens == min(c.work_tokens for c in fair if c.matched_tokens == longest)


@given(situations())
def test_cost_is_never_worse_than_its_own_alternatives(situation):
    ask, candidates = situation
    decided = route("cost", ask, candidates)
    if decided is None:
        return
    first, decoders = split(candidates)
    weighed = {(w.first.number, w.decode_at and w.decode_at.number): w.total_ns for w in weigh(ask, first, decoders)}
    pairs = sum(len(decoders) if c.role is P and decoders else 1 for c in first)
    assert len(weighed) == pairs, "every possibility is weighed"
    chosen = weighed[decided.first.number, decided.decode_at and decided.decode_at.number]
    assert chosen == min(weighed.values())


@given(situations(), st.integers(0, 6))
def test_less_to_do_never_makes_an_instance_dearer(situation, which):
    ask, candidates = situation
    for candidate in candidates[which : which + 1]:
        idle = Candidate(
            candidate.number, candidate.name, candidate.role, candidate.host_id, matched_tokens=ask.prompt_tokens
        )
        assert first_cost(ask, idle).total_ns <= first_cost(ask, candidate).total_ns


# -- many instances: what is looked at is enough


PROFILES = replace(COSTS, machine="quick"), replace(SLOW, machine="slow")


def crowd(policy: str, seed: int, prompt: list[int]) -> Cluster:
    """Forty busy instances of three roles and two kinds of machines, some of which have some of ``prompt``."""
    rng = np.random.default_rng(seed)
    cluster = Cluster(ClusterConfig(policy=policy))
    names = block_identities(namespace_id("", "ns"), a_request("", prompt).prompt, GEOMETRY.block_tokens)
    for k in range(40):
        peer = Peer(f"i{k}", 1)
        prefill, context = rng.integers(0, 30_000, 2).tolist()
        machine = structs.replace(info(peer.name, (P, D, C)[k % 3]), costs=PROFILES[k % 2].to_json())
        room = (1 << 20) if policy != "best-fit" else int(rng.integers(0, 40))
        said = [Join(machine), Heartbeat(Load(0, k % 5, prefill, context, room))]
        if rng.random() < 0.5:
            change = KvChange("stored", Tier(k % 2), b"".join(names[: int(rng.integers(1, len(names) + 1))]))
            said.append(KvEvents(0, (change,)))
        for message in said:
            cluster.handle(MessageArrived(peer, message), 0)
    cluster.check_invariants()
    return cluster


def sent_to(cluster: Cluster, prompt: list[int]) -> tuple[str, str | None]:
    """The instance that computes, and the one that decodes if that is another one."""
    actions = cluster.handle(RequestArrived(a_request("r", prompt)), 1)
    ((to, order),) = [(a.to.name, a.message) for a in actions if isinstance(a, Send)]
    return to, order.decode_at.name if order.decode_at else None


def everybody(cluster: Cluster, prompt: list[int]) -> list[Candidate]:
    """All members as candidates, put together the slow way."""
    dumped = {}
    for view in cluster.instances():
        number = cluster._registry.get(view.peer).number
        held = {bytes(name): (hbm, dram) for name, hbm, dram in cluster._trees.directory.dump(number)}
        names = block_identities(namespace_id("", "ns"), a_request("", prompt).prompt, GEOMETRY.block_tokens)
        depth = next((k for k, name in enumerate(names) if name not in held), len(names))
        dram = sum(held[name][0] == 0 for name in names[:depth])
        load = view.load
        dumped[number] = Candidate(
            number, view.peer.name, view.role, view.host_id, view.state == "live", load.prefill_tokens_queued,
            load.sequences_running, load.context_tokens_running, load.hbm_blocks_available * GEOMETRY.block_tokens,
            depth * GEOMETRY.block_tokens, dram * GEOMETRY.block_tokens, PROFILES[int(view.peer.name[1:]) % 2],
        )  # fmt: skip
    return list(dumped.values())


@pytest.mark.parametrize("policy", list(ROUTING_POLICIES.built_in))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_few_candidates_are_enough(policy, seed):
    """The choice among those that placement looks at is the choice among all."""
    assert ALL_OF < 40 // 3
    prompt = [k % 7 for k in range(41)]
    cluster = crowd(policy, seed, prompt)
    known = everybody(cluster, prompt)
    lenders = sorted(known, key=lambda c: (-c.matched_tokens, c.dram_tokens > 0, c.number))  # PD-Caching-3: all lend
    longest = tuple(Holding(c.number, c.matched_tokens, c.host_id) for c in lenders[:1])
    ask = Ask(len(prompt), 4, token_bytes=GEOMETRY.token_bytes, holdings=longest, block_tokens=GEOMETRY.block_tokens)
    expected = route(policy, ask, known)
    decoder = expected.decode_at.name if expected.decode_at else None
    assert sent_to(cluster, prompt) == (expected.first.name, decoder)


def test_dead_and_draining_instances_are_never_chosen():
    world = World([(f"i{k}", C) for k in range(20)], policy="least-load")
    for k in range(0, 20, 2):
        world.post(InstanceDrained(f"i{k}"))
    for k in range(1, 19, 4):
        world.hear(Peer(f"i{k}", 1), Leave())
    able = {view.peer.name for view in world.cluster.instances() if view.state == "live"}
    used = set()
    for k in range(50):
        ((to, _),) = world.sent(world.post(RequestArrived(a_request(f"r{k}", [1, 2, 3]))), Dispatch)
        used.add(to)
    assert used == able and len(able) == 5


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "b", "c", "d", "e"]), st.integers(0, 12)), max_size=40
    )
)
def test_equal_hosts_and_equal_profiles_have_equal_codes(steps):
    """Members come and go; unknown hosts have code 0, and codes never exceed the number of columns."""
    table, living, profiles = LoadTable(), {}, {}
    for number, host_id, machine in steps:
        if number in living:
            table.remove_member(number)
            del living[number], profiles[number]
        else:
            profiles[number] = COSTS.with_prefill_scale(float(machine))
            table.add_member(number, C, 100, 10, host_id, profiles[number])
            living[number] = host_id
        codes = table.profiles.tolist()
        assert all((codes[a] == codes[b]) == (profiles[a] == profiles[b]) for a in living for b in living)
        assert max(codes) <= len(table)
        codes = table.hosts.tolist()
        assert all((codes[k] == 0) == (living.get(k, "") == "") for k in range(len(table)))
        assert all((codes[a] == codes[b]) == (living[a] == living[b]) for a in living for b in living)
        assert max(codes) <= len(table)
