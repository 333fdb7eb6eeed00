"""Recurrent states between instances: what is handed over, fetched and sent back is KV with the state behind it."""

from __future__ import annotations

import pytest

from fleet_store import StoreMember, split, with_store
from fleet_world import BLOCK, GEOMETRY, LAYERS, Fleet, TransferMode, computed, fleet_config, pair, stats, story_of
from instance_world import PROMPT, VOCAB, request
from memserve.base.errors import InvariantError
from memserve.base.states import StatePages
from memserve.base.types import FinishReason, Tier
from memserve.base.units import NS_PER_MS
from memserve.instance.cluster.handoff_sender import HandoffSender
from memserve.instance.events import RowFailed
from memserve.instance.scheduler.states import RecurrentStates
from memserve.kv.costs import CostModel, PrefillCurve
from memserve.kv.identity import state_identities
from memserve.kv.pool import BlockPool
from memserve.kv.transfer.receiver import Receiver
from memserve.protocol.messages import Fetch, Offer, Withdraw
from memserve.protocol.peers import Holder
from memserve_lab.sim.reference.device import fail_row
from memserve_lab.sim.reference.oracle import Violation

BLOCK_BYTES = LAYERS * 32
STATES = {
    "a page": StatePages(10, 1),
    "a block and two pages": StatePages(BLOCK_BYTES + 40, 2),
    "three blocks": StatePages(3 * BLOCK_BYTES, 3),
}
MODES = list(TransferMode)
DEAR = CostModel(prefill=PrefillCurve(0.0, 10.0 * NS_PER_MS, 0.0))
"""Whatever can be fetched is worth it."""


def stateful_pair(states="a block and two pages", **sizes):
    return pair(*({"hbm": 60, "states": STATES[states], **sizes} for _ in range(2)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("states", STATES)
def test_a_conversation_goes_on_where_its_kv_and_state_came(mode, states):
    """Five turns: the decode instance computes no token of a prompt, and the prefill instance none of an answer's
    blocks, because both came home."""
    fleet = stateful_pair(states)
    history, cached = PROMPT[:9], []
    for turn in range(5):
        job = fleet.submit(request(f"t{turn}", history, max_tokens=9), "p", "d", transfer=mode, return_kv=True)
        fleet.run()
        assert story_of(job)["prefilled_at"] == "p"
        cached.append((job.cached[0], len(history)))
        history = [*history, *job.got[0], turn % VOCAB]
    p, d = stats(fleet, "p"), stats(fleet, "d")
    assert len(fleet.handed_over) == p.handed_over == d.taken_over == 5 and not fleet.refused
    assert d.computed_tokens == 5 * 8 and d.blocks_reused > 0 and p.blocks_come_home > 0
    # of each later turn all whole blocks but those of the last answered token and the new one
    assert all(length - tokens <= BLOCK + 1 for tokens, length in cached[1:])
    assert p.snapshots_used == 4
    fleet.finish()


def test_a_handoff_moves_kv_and_one_state_and_nothing_more():
    """Bytes are those of the blocks of the prompt, and of the pages that the state fills."""
    fleet = stateful_pair("a block and two pages")
    job = fleet.submit(request("a", PROMPT[:22], max_tokens=4), "p", "d")
    fleet.run()
    story = story_of(job)
    assert story["handoff_bytes"] == 6 * BLOCK_BYTES + story["handoff_state_bytes"]
    assert story["handoff_state_bytes"] == BLOCK_BYTES + 2 * 32
    assert stats(fleet, "d").bytes_received == 6 * BLOCK_BYTES + BLOCK_BYTES + 2 * 32
    assert stats(fleet, "d").blocks_received == 6
    fleet.finish()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [1, 8, 9, 22])
def test_prompts_of_any_length_are_handed_over(n, tokens):
    """Those that fill their last block, and such that do not; parallel samples share what came."""
    fleet = stateful_pair(running=8)
    job = fleet.submit(request("a", PROMPT[:tokens], max_tokens=6, n=n), "p", "d")
    fleet.finish()
    assert job.attempt == 0 and fleet.handed_over == ["a#0"]
    assert all(reason is FinishReason.LENGTH for reason in job.final.values())
    assert fleet.members["d"].device.states.loaded == n


def test_beams_stay_where_their_prompt_is_computed():
    """They begin one token before its end, where no state stands."""
    fleet = stateful_pair(running=8)
    job = fleet.submit(request("a", PROMPT[:9], max_tokens=6, n=2, beam_width=3), "p", "d")
    fleet.finish()
    assert job.attempt == 0 and not fleet.handed_over


def test_without_room_for_its_state_a_request_stays():
    """The prompt fills the memory: the offer is taken back, and nothing is lost."""
    fleet = pair({"hbm": 7, "states": STATES["three blocks"]}, {"hbm": 30, "states": STATES["three blocks"]})
    job = fleet.submit(request("a", PROMPT[:21], max_tokens=3), "p", "d")
    fleet.finish()
    assert job.attempt == 0 and not fleet.handed_over
    assert story_of(job)["handoff_not_made"] == "no room for the state"


# -- fetches


def fetching(fleet, prompt, tokens):
    """What ``d`` computes of ``prompt``, of which ``p`` is said to hold ``tokens``; and the job."""
    before, peer = computed(fleet, "d"), fleet.members["p"].peer
    job = fleet.submit(request("b", prompt, max_tokens=1), "d", None, holders=(Holder(peer, tokens),))
    fleet.run()
    return computed(fleet, "d") - before, job


@pytest.mark.parametrize("states", STATES)
def test_a_prefix_is_fetched_with_its_state(states):
    fleet = stateful_pair(states)
    fleet.submit(request("a", PROMPT[:18], max_tokens=3), "p")
    fleet.run()
    spent, job = fetching(fleet, PROMPT[:22], 18)
    assert spent == 22 - 16 and stats(fleet, "d").fetched_tokens == 16 and stats(fleet, "d").snapshots_used == 1
    story, pages = story_of(job), STATES[states].layers_of_last(GEOMETRY)
    assert story["cached_tokens_hbm"] == story["fetched_tokens"] == 16
    assert story["fetched_state_bytes"] == (STATES[states].pages_each - 1) * BLOCK_BYTES + pages * 32
    fleet.finish()


def test_no_more_kv_is_fetched_than_a_state_stands_behind():
    """Prompts part in the middle of what the holder has: its KV reaches farther than its last snapshot there."""
    fleet = stateful_pair()
    fleet.submit(request("short", PROMPT[:10], max_tokens=1), "p")
    fleet.submit(request("long", PROMPT[:30], max_tokens=1), "p")
    fleet.run()
    spent, _ = fetching(fleet, [*PROMPT[:20], 1, 2, 3, 4, 5], 20)
    assert stats(fleet, "d").fetched_tokens == 8 and spent == 25 - 8
    offer = next(m for m in fleet.members["p"].said if isinstance(m, Offer))
    assert len(offer.tokens) == 8 and offer.state_blocks == 2
    fleet.finish()


def test_kv_without_a_state_is_not_offered():
    fleet = stateful_pair()
    fleet.submit(request("a", PROMPT[:30], max_tokens=1), "p")
    fleet.run()
    spent, _ = fetching(fleet, [*PROMPT[:20], 1, 2, 3, 4, 5], 20)
    assert spent == 25 and not stats(fleet, "d").fetched_tokens
    said = [message for message in fleet.members["p"].said if isinstance(message, Offer | Withdraw)]
    assert [type(message) for message in said] == [Withdraw]
    fleet.finish()


def test_only_the_state_is_pulled_where_the_kv_is_here():
    """The own snapshot went, its KV did not: the peer's state comes alone."""
    fleet = stateful_pair("a page")
    for name in "pd":
        fleet.submit(request(f"of {name}", PROMPT[:18], max_tokens=1), name)
    fleet.run()
    machine = fleet.members["d"].machine
    machine.pool.forget_snapshots("", request("x", PROMPT[:18]).prompt)
    machine.state.costs.model = DEAR  # this device computes in no time
    spent, _ = fetching(fleet, PROMPT[:22], 18)
    assert spent == 6 and stats(fleet, "d").bytes_received == 32
    assert any(isinstance(message, Fetch) and message.state_blocks == 1 for message in fleet.members["d"].said)
    fleet.finish()


# -- stores


def stored(states, **sizes):
    sizes = {"hbm": 96, "states": STATES[states], **sizes}
    return with_store(p=fleet_config(**sizes), d=fleet_config(**sizes))


def from_store(fleet, prompt, tokens):
    """What ``d`` computes of ``prompt``, of which the store is said to hold ``tokens``."""
    machine, before = fleet.members["d"].machine, computed(fleet, "d")
    machine.state.costs.model = DEAR
    holder = Holder(fleet.members["s"].peer, tokens, Tier.DRAM)
    fleet.submit(request(f"s{before}", prompt, max_tokens=1), "d", None, holders=(holder,))
    fleet.run()
    return computed(fleet, "d") - before


@pytest.mark.parametrize("states", STATES)
def test_a_store_keeps_prompts_and_answers_with_their_states(states):
    fleet = stored(states)
    job = fleet.submit(request("a", PROMPT[:18], max_tokens=11), "p")
    fleet.run()
    blocks = 16 // BLOCK + 12 // BLOCK + 2 * STATES[states].pages_each  # of the prompt, of its answer, of their ends
    assert stats(fleet, "p").store_blocks_taken == blocks and not stats(fleet, "p").store_blocks_failed
    assert from_store(fleet, [*PROMPT[:18], *job.got[0], 1, 2], 28) == 18 + 11 + 2 - 28
    assert from_store(fleet, [*PROMPT[:17], 9, 9, 9, 9], 16) == 21 - 16
    assert stats(fleet, "d").snapshots_used == 2 and stats(fleet, "d").store_tokens == 28
    fleet.finish()


@pytest.mark.parametrize("states", STATES)
def test_store_that_joins_late_gets_reused_states(states):
    sizes = {"hbm": 96, "states": STATES[states]}
    fleet = Fleet(p=fleet_config(**sizes), d=fleet_config(**sizes))
    fleet.submit(request("a", PROMPT[:18], max_tokens=1), "p")
    fleet.run()
    fleet.members["s"] = StoreMember(fleet)
    fleet.welcome_all()
    fleet.submit(request("b", [*PROMPT[:17], 9], max_tokens=1), "p")
    fleet.run()
    assert stats(fleet, "p").store_blocks_taken == 16 // BLOCK + STATES[states].pages_each
    assert from_store(fleet, [*PROMPT[:17], 9, 9, 9, 9], 16) == 21 - 16
    fleet.finish()


@pytest.mark.parametrize("what", ["dies", "forgets KV", "forgets a state", "is damaged"])
def test_a_store_without_kv_or_state_costs_no_answer(what):
    fleet = stored("a block and two pages")
    fleet.submit(request("a", PROMPT[:18], max_tokens=1), "p")
    fleet.run()
    store = fleet.members["s"]
    holder = Holder(store.peer, 16, Tier.DRAM)
    names = split(store.pool.identities("", request("x", PROMPT[:16]).prompt))
    lost = {"forgets KV": names[0], "forgets a state": state_identities(names[-1], 2)[1]}.get(what)
    if lost is not None:
        store.pool.release([store.pool.table.pop(lost)])
    fleet.members["d"].corrupt_pulls = what == "is damaged"
    fleet.members["d"].machine.state.costs.model = DEAR
    fleet.submit(request("b", PROMPT[:22], max_tokens=3), "d", None, holders=(holder,))
    if what == "dies":
        fleet.run(until=lambda: store.jobs)
        fleet.kill("s")
    fleet.finish()
    assert not stats(fleet, "d").snapshots_used and computed(fleet, "d") >= 22


def test_what_is_not_to_be_trusted_is_forgotten_with_its_states():
    """A row without numbers may have read wrong KV: the store gives up the blocks, and every state on their path."""
    fleet = stored("a block and two pages")
    fleet.submit(request("a", PROMPT[:18], max_tokens=1), "p")
    fleet.run()
    p, store = fleet.members["p"], fleet.members["s"]
    fleet.submit(request("b", PROMPT[:22], max_tokens=8), "p")
    fleet.run(until=lambda: p.plans)
    plan = p.plans.popleft()
    finished = p.device.run_plan(plan)
    fail_row(plan, finished, plan.slots[0], RowFailed("no numbers", kv_is_suspect=True))
    p.post(finished)
    names = split(store.pool.identities("", request("x", PROMPT[:16]).prompt))
    fleet.run(until=lambda: store.forgotten)
    assert {*names, *state_identities(names[-1], 2)} <= set(store.forgotten)
    assert not set(state_identities(names[-1], 2)) & store.pool.table.keys()


# -- pulls and seals are beside plans


def test_a_snapshot_is_sealed_when_its_plan_has_run():
    """It is cached as soon as the plan is made, so a peer may ask for it before it is there, and its KV long since."""
    fleet = stateful_pair("a page")
    p, d = fleet.members["p"], fleet.members["d"]
    fleet.submit(request("longer", PROMPT[:30], max_tokens=1), "p")
    fleet.run()
    fleet.submit(request("a", PROMPT[:10], max_tokens=1), "p")
    fleet.run(until=lambda: p.plans)
    tokens = request("x", PROMPT[:8]).prompt
    p.hear(Fetch("d/1/99", "", tokens, 0, 2, 0, 1), d.peer)
    assert p.machine.pool.match("", tokens) == 8 and p.plans and not p.jobs
    while p.plans:
        p.do_plan()
    assert [len(job.blocks) for job in p.jobs] == [2, 1]


def test_what_a_plan_reads_is_written_when_it_has_run():
    """A sequence goes on from a snapshot that goes before the plan is made: its blocks may be given to an import."""
    fleet = stateful_pair("three blocks")
    fleet.submit(request("a", PROMPT[:10], max_tokens=1), "p")
    fleet.run()
    machine = fleet.members["p"].machine
    pool, states, access = machine.pool, machine.state.memory.states, machine.pool.access
    lease = pool.acquire("", request("x", PROMPT[:8]).prompt)
    snapshot, blocks = lease.snapshot, list(lease.snapshot.pages)
    assert access.last_touch(Tier.HBM, blocks) <= access.last_finished
    states.choose_source("a sequence", lease)
    pool.snapshots.forget(snapshot)
    assert access.last_touch(Tier.HBM, blocks) == access.last_made + 1


# -- planted faults: each is noticed by the device, whose states are numbers made of all tokens


def _sealed_before_it_is_taken(monkeypatch):
    def announce(self, remote, sequence, end_block, plan):
        snapshot = self._state.memory.states.take_for_peer(sequence)
        self._exchange.more_blocks(remote.offer_id, snapshot.pages)
        self._exchange.announce_state(remote.offer_id, end_block, fence=0)
        self._state.memory.states.forget(snapshot)

    monkeypatch.setattr(HandoffSender, "_announce_state", announce)


def _of_the_token_before(monkeypatch):
    take_end = RecurrentStates._take_end

    def take_before(self, sequence):
        take_end(self, sequence)
        slot, tokens, snapshot = self._taking[-1]
        self._taking[-1] = slot, max(1, tokens - 1), snapshot

    monkeypatch.setattr(RecurrentStates, "_take_end", take_before)


def _behind_other_kv(monkeypatch):
    insert = BlockPool.insert_state

    def insert_shorter(self, tenant, tokens, blocks):
        return insert(self, tenant, tokens[: max(BLOCK, len(tokens) - BLOCK)], blocks)

    monkeypatch.setattr(BlockPool, "insert_state", insert_shorter)


def _used_before_it_is_here(monkeypatch):
    announce = Receiver._announce_pages

    def announce_early(self, imported, ready):
        announce(self, imported, ready)
        if imported.placement is not None and imported.offer.state_blocks:
            imported.placement.arrived[-imported.offer.state_blocks :] = True
            imported.placement.announced[-imported.offer.state_blocks :] = True

    monkeypatch.setattr(Receiver, "_announce_pages", announce_early)


PLANTS = [_sealed_before_it_is_taken, _of_the_token_before, _behind_other_kv, _used_before_it_is_here]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_noticed(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((Violation, InvariantError, AssertionError)):
        for states in STATES:
            test_a_conversation_goes_on_where_its_kv_and_state_came(TransferMode.BY_REQUEST_AGG, states)
