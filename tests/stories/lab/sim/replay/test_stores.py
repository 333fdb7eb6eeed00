"""Stores in a replayed cluster: what production's store would serve comes from the tier where production has it."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission, Caching, Role
from memserve.base.units import GIB, MIB, NS_PER_S
from memserve.cli.main import run
from memserve.store.disks.events import DisksConfig
from memserve_lab.cli.sim_studies import read_multiples
from memserve_lab.experiments.thrash import Contender, Plan, Talk, ThrashResults, ThrashStudy
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Setup, StoreSetup
from memserve_lab.sim.replay.stores import HitTokens
from memserve_lab.sim.replay.world import ReplayWorld, usage
from memserve_lab.sim.timed_disk import DiskModel, TimedDisk, disk_model
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

MACHINE = dataclasses.replace(machine("llama-3-8b", "h100"), hbm_blocks=200, context_tokens=4000)
BLOCK_BYTES = MACHINE.geometry.block_bytes
PROMPT = 3200  # tokens: 100 blocks, half of HBM
QUICK_DISK = disk_model("100/100")


def prompts(*firsts: int, gap_s: float = 2.0) -> Workload:
    """One session for each prompt, which begins with block ``first``; equal numbers are equal prompts."""
    sessions = tuple(
        Session(f"s{at}", (Turn(Blocks(16, (Span(first, PROMPT),)), 5, due_s=at * gap_s),), history=History.GIVEN)
        for at, first in enumerate(firsts)
    )
    return Workload("blocks", "test", sessions)


def played(workload: Workload, stores: StoreSetup | None, **fields: object) -> ReplayWorld:
    setup = Setup({Role.COLOCATED: 1}, MACHINE, stores=stores, **fields)
    world = ReplayWorld(setup, workload)
    world.run_workload()
    for node in (world.router, *world.instances, *world.stores):
        node.machine.check_invariants()
    return world


def tiers(world: ReplayWorld) -> list[str]:
    """Where the cached part of each prompt lay. Empty: it was computed."""
    return [(s.fetched_tier or "hbm") if s.cached_tokens else "" for s in world.clients.served]


A, B, C, D = 1, 10_001, 20_001, 30_001


def test_each_prompt_comes_from_the_highest_tier_that_has_it() -> None:
    """HBM holds one and a half prompts beside their answers, the store's memory 150 blocks, the disk all: the last
    prompt is in HBM, the one before in the store's memory, the oldest on the disk alone."""
    world = played(prompts(A, B, C, C, A), StoreSetup(150 * BLOCK_BYTES, (4 * GIB,), model=QUICK_DISK))
    assert tiers(world) == ["", "", "", "hbm", "ssd"]
    used = usage(world)
    cached = [s.cached_tokens for s in world.clients.served]
    assert cached == [0, 0, 0, PROMPT - 1, PROMPT - 1]
    assert used.hits == HitTokens(hbm=PROMPT - 1, ssd=PROMPT - 1)
    assert used.stores is not None
    assert (used.stores.blocks_stored, used.stores.blocks_lent, used.stores.reads_late) == (300, 100, 0)
    assert 50 <= used.stores.reads <= 100 and used.stores.read_bytes == used.stores.reads * BLOCK_BYTES


def test_memory_of_the_store_needs_no_disk() -> None:
    world = played(prompts(A, B, C, D, A, B), StoreSetup(1000 * BLOCK_BYTES))
    assert tiers(world) == ["", "", "", "", "store", "store"]
    cold, warm = world.clients.served[0], world.clients.served[4]
    assert warm.first_ns is not None and cold.first_ns is not None
    assert warm.first_ns - warm.scheduled_ns < (cold.first_ns - cold.scheduled_ns) / 2
    assert played(prompts(A, B, C, D, A, B), None).clients.served[4].cached_tokens == 0


def test_a_disk_slower_than_computing_is_not_read() -> None:
    """As in production: the costs of the store's disk are told, and computing is quicker."""
    world = played(prompts(A, B, C, D, A), StoreSetup(150 * BLOCK_BYTES, (4 * GIB,), model=disk_model("sata")))
    used = usage(world).stores
    assert used is not None and tiers(world)[-1] == "" and used.reads == 0 and used.written_bytes > 0


def test_equal_runs_are_equal_whether_steps_are_skipped_or_not() -> None:
    """To the nanosecond, with all counts of the store."""

    def seen(**fields: object) -> tuple[object, ...]:
        stores = StoreSetup(150 * BLOCK_BYTES, (1 * GIB,), model=QUICK_DISK)
        world = played(prompts(A, B, C, A, D, B, A, gap_s=0.3), stores, **fields)
        rows = [(s.first_ns, s.end_ns, s.cached_tokens, s.fetched_tier) for s in world.clients.served]
        return rows, usage(world).stores, usage(world).hits

    first = seen()
    assert first == seen() == seen(fast_forwards=False)


def test_a_budget_is_never_exceeded() -> None:
    """The disk's own count, which the store's machine does not see, stays within what a day may see at every moment."""
    budget = 2 * GIB
    work = prompts(*range(1, 2_000_001, 100_000))
    free = played(work, StoreSetup(150 * BLOCK_BYTES, (64 * GIB,)))
    stores = StoreSetup(150 * BLOCK_BYTES, (64 * GIB,), DisksConfig(writes_per_day_bytes=budget))
    bound = played(work, stores)
    unlimited, limited = usage(free).stores, usage(bound).stores
    assert unlimited is not None and limited is not None
    assert unlimited.refused_budget == 0 and unlimited.written_bytes > budget
    assert sum(disk.written_bytes for disk in bound.stores[0].disks) == limited.written_bytes
    assert 0 < limited.written_bytes <= budget and limited.busiest_day_bytes <= budget
    assert limited.refused_budget > 0 and limited.write_amplification >= 1.0
    # what may be written at once, and what has come since at the rate of a day
    burst = budget // 8
    assert limited.written_bytes <= burst + (budget - burst) * bound.elapsed_s / 86_400 + 64 * MIB


def test_impossible_store_setups_are_refused() -> None:
    with pytest.raises(UserError, match="less than two blocks"):
        Setup({Role.COLOCATED: 1}, MACHINE, stores=StoreSetup(BLOCK_BYTES))
    with pytest.raises(UserError, match="0 stores"):
        Setup({Role.COLOCATED: 2}, MACHINE, stores=StoreSetup(GIB, count=0))
    with pytest.raises(UserError, match="without caching"):
        Setup({Role.COLOCATED: 1}, MACHINE, ClusterConfig(Caching.OFF), stores=StoreSetup(GIB))


# -- disks


def ends(jobs: list[tuple[str, int]], model: DiskModel) -> list[int]:
    """When jobs end that are all given at 0."""
    clock, found = Clock(), [0] * len(jobs)
    disk = TimedDisk(clock, model)
    for at, (kind, nbytes) in enumerate(jobs):

        def done(at: int = at) -> None:
            found[at] = clock.now

        (disk.begin_read if kind == "read" else disk.begin_write)(nbytes, done)
    while clock.run_one():
        pass
    return found


GIG = DiskModel("test", 1e9, 0.5e9, 1000, 300, 0, "test", depth=2)


def test_a_disk_takes_latency_and_bandwidth() -> None:
    assert ends([("read", 1000)], GIG) == [2000]
    assert ends([("write", 1000)], GIG) == [2300]


def test_jobs_share_the_bandwidth_and_the_rest_waits() -> None:
    """Two reads at half the speed each; of three, with two places, the third begins when one has ended."""
    assert ends([("read", 1000)] * 2, GIG) == [3000, 3000]
    assert ends([("read", 1000)] * 3, GIG) == [3000, 3000, 5000]
    assert ends([("read", 1000), ("read", 3000)], GIG) == [3000, 5000]


def test_reads_and_writes_share() -> None:
    """The write has had 700 ns alone when the read begins; 1,300 ns of work are left, which take twice as long beside
    the read's 1,000."""
    assert ends([("read", 1000), ("write", 1000)], GIG) == [3000, 3300]


def test_a_deep_queue_gets_the_whole_bandwidth() -> None:
    """A thousand reads: one latency for each pair alone, the bandwidth for all."""
    deep = dataclasses.replace(GIG, depth=32)
    together, alone = ends([("read", 10_000)] * 1000, deep)[-1], ends([("read", 10_000)], GIG)[0]
    assert 10_000_000 <= together < 10_000_000 * 1.01 < 1000 * alone


def test_a_disk_is_named_or_given_by_its_speed() -> None:
    assert disk_model("6.5/3.5").read_bytes_per_s == disk_model("nvme").read_bytes_per_s
    for wrong in ("floppy", "1/", "0/1", "a/b"):
        with pytest.raises(UserError):
            disk_model(wrong)


# -- the commands


def test_sim_run_tells_tiers_and_wear(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sim", "run", "--workload", "chat", "--sessions", "6", "--instances", "colocated=1", "--kv-blocks", "60"]
    assert run([*command, "--store", "2GiB", "--ssd", "4GiB", "--ssd-writes-per-day", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "hit tokens by tier: " in out and "write amplification 1.0" in out and "of 1.0 GiB in 24 hours" in out
    assert run([*command, "--store", "2GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--ssd", "1MiB"],
        ["--ssd-sync", "always"],
        ["--ssd-writes-per-day", "1GiB"],
        ["--stores", "2"],
        ["--store", "1GiB", "--ssd", "1GiB", "--ssd-device", "floppy"],
        ["--store", "1GiB", "--ssd-admission", "third-hit"],
        ["--store", "1MiB"],
        ["--store", "1GiB", "--caching", "off"],
    ],
)
def test_impossible_stores_are_one_clear_error(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "run", "--workload", "uniform", "--sessions", "2", "--instances", "colocated=1", *flags]) == 1
    told = capsys.readouterr().err
    assert "error:" in told and "hint:" in told


# -- more conversations than fit


def test_beyond_what_fits_a_store_and_admission_keep_the_speed(tmp_path) -> None:
    """Alone, four times what fits computes every history again. With both, histories come from the store."""
    talk = Talk(turns=3, first_tokens=2000, turn_tokens=200, answer_tokens=8)
    small = dataclasses.replace(MACHINE, hbm_blocks=400)
    alone = Setup({Role.COLOCATED: 1}, small)
    gate = AdmissionConfig(Admission.CACHE, waiting_max=1000, wait_ns=60 * NS_PER_S)
    both = dataclasses.replace(alone, cluster=ClusterConfig(admission=gate), stores=StoreSetup(3200 * BLOCK_BYTES))
    plan = Plan((Contender("alone", alone), Contender("both", both)), (1.0, 4.0), talk, 4.0, 6.0)
    assert plan.fitting == 400 * 32 // talk.tokens == 5
    study = ThrashStudy(plan, ThrashResults(machine={"simulated": "test"}))
    lines: list[str] = []
    study.run_study(lines.append)
    speeds = {(p.contender, p.multiple): p.requests_per_s for p in study.results.points}
    hits = {(p.contender, p.multiple): p.hit_rate for p in study.results.points}
    assert len(lines) == 4 and hits["alone", 1.0] > 0.4 > 0.1 > hits["alone", 4.0]
    assert speeds["alone", 4.0] < 0.7 * speeds["alone", 1.0]
    assert speeds["both", 4.0] > 0.9 * speeds["both", 1.0]
    assert sum(p.rejected for p in study.results.points) == 0
    study.write_report(tmp_path)
    assert (tmp_path / "report.md").read_text().count("| alone |") == 2


def test_conversations_that_do_not_fit_at_all_are_refused() -> None:
    plan = Plan((Contender("x", Setup({Role.COLOCATED: 1}, MACHINE)),), (1.0,), Talk(first_tokens=10_000), 1.0, 1.0)
    with pytest.raises(UserError, match="does not fit"):
        _ = plan.fitting
    assert read_multiples("8,1,2") == (1.0, 2.0, 8.0)
    for wrong in ("", "0", "x", "-1"):
        with pytest.raises(UserError):
            read_multiples(wrong)
    assert list(itertools.pairwise(read_multiples("1,4"))) == [(1.0, 4.0)]
