"""The gate's ledger and the truth: production instances with pins, fetches and handovers, where every request is plain.

Messages take no time here. So whenever time is about to pass, the router has heard of everything, and each instance can
be asked what of its memory could not be given to a newcomer: the ledger must count that, and more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import pytest

from memserve.base.config import AdmissionConfig
from memserve.base.types import Admission, Caching
from memserve.base.units import NS_PER_S
from memserve.instance.cluster.link import ClusterLink
from memserve.instance.machine import Instance
from memserve.router.admission.ledger import Reservations
from memserve_lab.sim.fuzz.clients import VOCAB
from memserve_lab.sim.fuzz.scenario import MS, Forced, Scenario, Setting, draw
from memserve_lab.sim.fuzz.world import World

SEEDS = 14


def plain(seed: int, *, tight: bool = False) -> Scenario:
    """Sessions that are pinned after each turn; one sequence a request, no client changes its mind. ``tight``: there is
    little more memory than one of them needs, and pins outlive them all."""
    random = Random(f"pins {seed}")
    caching = random.choice([Caching.PD_CACHING_1, Caching.PD_CACHING_2])
    mix = random.choice(["1C", "2C", "1P1D", "2P2D", "1P1C"])
    scenario = draw(seed, Setting(caching, mix=mix, faulty=False), Forced(routers=1))  # several have no gate
    scenario.delay_ns = (0, 0)
    for number, conversation in enumerate(scenario.conversations):
        conversation.session = f"s{number}"
        conversation.pin_ns = 20_000 * MS if tight else random.choice([None, 20 * MS, 900 * MS])
        for turn in conversation.turns:
            turn.n, turn.beam_width, turn.use_cache, turn.prompt_logprobs = 1, 0, True, False
            turn.stop_string_after = turn.cancel_after_ns = turn.lifetime_ns = None
            turn.max_tokens = max(1, turn.max_tokens)
    if tight:
        scenario.hbm_blocks = tuple(scenario.context_tokens // 4 + 3 for _ in scenario.hbm_blocks)
    mode = random.choice([Admission.MEMORY, Admission.CACHE])
    scenario.admission = AdmissionConfig(mode, waiting_max=1000, wait_ns=3600 * NS_PER_S)
    if mode is Admission.CACHE:  # two that compute the same prefix at once may have it twice, where it counts once
        for number, conversation in enumerate(scenario.conversations):
            conversation.prefix = [number % VOCAB, number // VOCAB, *conversation.prefix]
    return scenario


def lent_to_store(link: ClusterLink) -> int:
    """Blocks that are taken back as soon as a request needs their room."""
    return link.writer.offers.exported


def lent_to_trials(link: ClusterLink) -> int:
    """Blocks of fetches that no request waits for, which both ends give up as soon as a request needs their room."""
    imports = link.exchange._receiver.open
    open_trials = [imports[name] for name in link.fetches.trial_ids if name in imports]
    read = sum(len(export.places) for export in link.exchange._sender.open.values() if export.is_trial)
    return read + sum(len(one.placement.blocks) for one in open_trials if one.placement is not None)


def written_in_vain(link: ClusterLink) -> int:
    """Blocks into which the host still pulls for nothing: it stops within milliseconds, and when cannot be known."""
    pulls = link.exchange._receiver.pulls._under_way.values()
    return sum(len(job.dst_blocks) for pull, job in pulls if pull.imported.over)


def computed_twice(machine: Instance) -> int:
    """Blocks of the cache that a sequence has computed again, because no recurrent state stood behind them: its pin on
    them is given up as soon as a request needs their room."""
    pool, twice = machine.pool, set[int]()
    for group in machine.state.groups.values() if pool.snapshots is not None else ():
        for sequence in group.sequences.values():
            cached = pool.acquire_kv(group.isolation, sequence.known_tokens()[: sequence.published])
            pool.unpin(cached)
            pool.release(cached.blocks)
            twice |= set(cached.blocks) - set(sequence.blocks)
    return len(twice)


class PinnedWorld(World):
    """Looks at ledger and pools whenever nothing is under way."""

    def __init__(self, scenario: Scenario) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(scenario)

    def _run_while(self, condition: Callable[[], bool], end_ns: int) -> None:
        clock = self.clock
        while condition() and (next_ns := clock.next_ns) is not None and next_ns <= end_ns:
            clock.run_one()
            if clock.next_ns is None or clock.next_ns > clock.now:
                self.compare()

    def compare(self) -> None:
        cluster = self.router.machine
        memory = cluster._lifecycle.admission.memory
        for node in self.instances:
            member = cluster._registry.get(node.peer)
            if member is None:
                continue
            pool, link = node.machine.pool, node.machine.link
            taken = pool.config.hbm_blocks - memory.ledger.blocks_free(member.number)
            held = pool.config.hbm_blocks - pool.available() - written_in_vain(link)
            held -= lent_to_store(link) + lent_to_trials(link) + computed_twice(node.machine)
            spare = node.machine.load().sequences_running
            assert held <= taken + spare, f"{node.peer.name}: {held} blocks cannot be evicted, {taken} are counted"
            pinned = node.machine.pins._pins
            self.seen.update(looks=1, pinned=bool(pinned), pinned_beside=bool(pinned) and spare > 0)
            self.seen.update(lent=bool(link.exchange._sender.open))
            self.seen.update(full=memory.ledger.blocks_free(member.number) < 2)

    def gone_by(self) -> Counter[str]:
        counters = [node.machine.state.counters for node in self.instances]
        by_memory = (c.preempted_by_swap + c.preempted_by_recompute - c.preempted_for_slots for c in counters)
        # an answer that outgrows all of HBM, of which its need is counted, goes on by layer: it is parked once for that
        parked = sum(getattr(node.machine.state.memory.layers, "parked", 0) for node in self.instances)
        preempted = sum(by_memory) - parked + sum(c.standstills for c in counters)
        return self.seen + Counter(preempted=preempted) + self.count_achievements()


def looked_at(seeds: Iterable[int], *, tight: bool = False) -> Counter[str]:
    """What happened in all their lives."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = PinnedWorld(plain(seed, tight=tight))
        try:
            world.run_scenario()
        except AssertionError as error:
            error.add_note("\n".join([*world.story[-40:], str(world.scenario)]))
            raise
        seen += world.gone_by()
    return seen


def test_ledger_counts_all_memory_unavailable_to_new_requests() -> None:
    """Looks while nothing is pinned, lent, or nearly full, would prove nothing."""
    seen = looked_at(range(SEEDS))
    assert seen["looks"] > 5_000 and seen["pinned_beside"] > 300 and seen["lent"] > 500 and seen["full"] > 300, seen
    assert seen["fetched"] > 5 and seen["handed_over"] > 50, seen
    assert not seen["preempted"], "who was let in had room to the end"


@pytest.mark.parametrize(("method", "seed"), [("pin", 0), ("export_blocks", 22)])
def test_ledger_without_updates_is_noticed(method: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, method, lambda self, name, node, need: None)
    with pytest.raises(AssertionError, match="cannot be evicted"):
        looked_at([seed])


CROWDED = (1, 10, 12, 19, 28, 90, 131)
"""Where pins at a decode instance leave no room for handovers."""


def test_pins_make_no_request_wait_for_a_lease_to_expire() -> None:
    seen = looked_at(CROWDED, tight=True)
    assert seen["pinned"] > 1_000 and seen["handed_over"] > 50 and not seen["expired"], seen


def test_pins_that_do_not_give_way_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "evict_pins", lambda self, node: [])
    assert looked_at(CROWDED, tight=True)["expired"]
