"""Fences beside a device that does what plans say, at the latest or at any time before: random lives of one pool.

Sequences come, compute, share, are preempted and end while plans are under way; blocks go down and come up; others pull
into new blocks and read cached ones as soon as the fence lets them. Rows and readers know what they must find.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.config import PoolConfig
from memserve.base.types import CopyBlocks, Tier
from memserve.kv.block_access import BlockAccessLog, LastPlans
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.barriers import Barriers
from memserve.kv.transfer.context import Place

BLOCK = 4
Tokens = tuple[int, ...]


@dataclass(eq=False)
class Seq:
    """Blocks of ``tokens``, a reference each. ``computed`` tokens are in memory when all plans made have finished."""

    tokens: Tokens
    blocks: list[int]
    lease: Lease | None
    computed: int
    below: list[int] = field(default_factory=list)  # while it is swapped out
    last_plan: int = 0


@dataclass(eq=False)
class Plan:
    step_id: int
    copies: list[CopyBlocks]
    rows: list[tuple[Tokens, int, list[int]]]  # (tokens up to the row's end, its first one, table)
    executed: bool = False


@dataclass(eq=False)
class Import:
    """New blocks that another thread writes to, once ``fence`` has passed."""

    tokens: Tokens
    places: list[Place]
    fence: int
    written: bool = False


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Life:
    """One pool, its device and its peers; ``random`` decides everything."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.pool = BlockPool(PoolConfig(random.choice([8, 12, 20]), random.choice([0, 4, 12])), BLOCK, "m")
        self.fences = Barriers(self.pool)
        self.memory: dict[Place, Tokens] = {}  # what lies in a block: a prompt up to its last token there
        self.plans: deque[Plan] = deque()
        self.seqs: list[Seq] = []
        self.imports: list[Import] = []
        self.lent: list[tuple[Tokens, list[Place], int]] = []  # cached blocks that a peer reads once a fence has passed
        self.made = 0
        self.at_once = self.sooner = self.later = 0  # fences, beside what one number for all would have said

    # -- the device

    def execute(self, plan: Plan) -> None:
        if plan.executed:
            return
        plan.executed = True
        for copy in plan.copies:
            moved = [self.memory.get((copy.src_tier, src), ()) for src in copy.src]
            self.memory.update({(copy.dst_tier, dst): held for dst, held in zip(copy.dst, moved, strict=True)})
        for tokens, first, table in plan.rows:
            for place in range(blocks_for(len(tokens))):
                begin, end = place * BLOCK, min((place + 1) * BLOCK, len(tokens))
                if begin < first:
                    found = self.memory.get((Tier.HBM, table[place]), ())[: min(end, first)]
                    assert found == tokens[: min(end, first)], f"plan {plan.step_id} reads wrong KV in {table[place]}"
                if end > first:
                    self.memory[Tier.HBM, table[place]] = tokens[:end]

    def plan(self) -> None:
        """Rows for some sequences, and what is full then is published, as an instance does it."""
        if len(self.plans) == 2:
            return
        step_id, rows = self.made + 1, []
        for seq in self.seqs:
            if seq.blocks and seq.computed < len(seq.tokens) and self.random.random() < 0.7:
                end = self.random.randint(seq.computed + 1, len(seq.tokens))
                if self.make_private(seq):
                    rows.append((seq.tokens[:end], seq.computed, list(seq.blocks)))
                    seq.computed, seq.last_plan = end, step_id
        for seq in self.seqs:
            if seq.last_plan == step_id:
                self.publish(seq)
        self.made = step_id
        self.plans.append(Plan(step_id, self.pool.take_copies(), rows))
        self.fences.plan_made(step_id)

    def make_private(self, seq: Seq) -> bool:
        place = seq.computed // BLOCK
        if self.pool.is_shared(seq.blocks[place]):
            new = self.pool.copy_block(seq.blocks[place])
            if new is None:
                return False
            self.pool.release([seq.blocks[place]])
            seq.blocks[place] = new
        return True

    def publish(self, seq: Seq) -> None:
        full = seq.computed // BLOCK
        if seq.lease is not None and full:
            tokens = array(seq.tokens[: full * BLOCK])
            self.pool.publish(seq.lease, "", tokens, seq.blocks[:full], written_by=seq.last_plan)

    def execute_early(self) -> None:
        """In order, but before anybody is told."""
        plan = next((plan for plan in self.plans if not plan.executed), None)
        if plan is not None:
            self.execute(plan)

    def finish(self) -> None:
        if self.plans:
            plan = self.plans.popleft()
            self.execute(plan)
            self.fences.plan_finished(plan.step_id)

    # -- sequences

    def prompt(self) -> Tokens:
        random = self.random
        stem = [random.randrange(2)] * BLOCK + [random.randrange(2)] * BLOCK + [random.randrange(3)] * BLOCK
        return tuple((stem + [random.randrange(2)] * BLOCK)[: random.randint(1, 4 * BLOCK)])

    def admit(self) -> None:
        tokens = self.prompt()
        lease = self.pool.acquire("", array(tokens))
        fresh = self.pool.allocate(blocks_for(len(tokens)) - len(lease.blocks))
        seq = Seq(tokens, [*lease.blocks, *(fresh or ())], lease, min(lease.tokens, len(tokens) - 1))
        self.seqs.append(seq)
        if fresh is None:
            self.end(seq)

    def fork(self) -> None:
        """Another sequence with the same beginning: what is computed is shared until one of them writes to it."""
        seq = self.random.choice(self.seqs) if self.seqs else None
        if seq is not None and seq.blocks:
            shared = seq.blocks[: blocks_for(seq.computed)]
            fresh = self.pool.allocate(len(seq.blocks) - len(shared))
            if fresh is not None:
                self.pool.retain(shared)
                tokens = seq.tokens[: seq.computed] + (7,) * (len(seq.tokens) - seq.computed)
                lease = self.pool.acquire("", array(()))
                self.seqs.append(Seq(tokens, shared + fresh, lease, seq.computed, last_plan=seq.last_plan))

    def end(self, seq: Seq | None = None) -> None:
        """At any time: rows of plans under way may still use its blocks."""
        if seq is None and self.seqs:
            seq = self.random.choice(self.seqs)
        if seq is not None:
            self.seqs.remove(seq)
            if seq.blocks and self.random.random() < 0.5:
                self.publish(seq)
            if seq.lease is not None:
                self.pool.unpin(seq.lease)
            self.pool.release(seq.blocks)
            self.pool.release_dram(seq.below)

    def swap(self) -> None:
        for seq in self.random.sample(self.seqs, min(1, len(self.seqs))):
            if seq.blocks and seq.computed:
                count = blocks_for(seq.computed)
                below = self.pool.swap_out(seq.blocks[:count])
                if below is not None:
                    self.pool.release(seq.blocks[count:])
                    seq.blocks, seq.below = [], below
                    if seq.lease is not None:
                        self.pool.unpin(seq.lease)
                        seq.lease = None
            elif seq.below:
                missing = blocks_for(len(seq.tokens)) - len(seq.below)
                above = self.pool.swap_in(seq.below) if self.pool.available() >= missing + len(seq.below) else None
                if above is not None:
                    seq.blocks, seq.below = above + self.pool.allocate(missing), []
                    seq.lease = self.pool.acquire("", array(()))

    def demote(self) -> None:
        self.pool.demote_blocks(self.random.randint(1, 3))

    # -- others

    def heed(self, fence: int) -> int:
        """Count what a fence by block is worth."""
        now, finished = self.fences.all_settled(), self.fences.last_finished
        assert fence <= now, "waiting for more than everything"
        self.at_once += fence <= finished < now
        self.sooner += finished < fence < now
        self.later += fence == now > finished
        return fence

    def begin_import(self) -> None:
        tier, count = self.random.choice([Tier.HBM, Tier.HBM, Tier.DRAM]), self.random.randint(1, 3)
        got = self.pool.allocate(count) if tier == Tier.HBM else self.pool.allocate_dram_ids(count)
        if got is not None:
            tokens = (100 + self.random.randrange(3),) * count * BLOCK
            places = [(tier, block) for block in got]
            self.imports.append(Import(tokens, places, self.heed(self.fences.safe_to_overwrite(tier, list(got)))))

    def lend(self) -> None:
        tokens = self.random.choice([self.prompt(), *(seq.tokens for seq in self.seqs)])
        hbm, dram = self.pool.export_blocks("", array(tokens))
        places = [(Tier.HBM, block) for block in hbm] + [(Tier.DRAM, block) for block in dram]
        if places:
            self.lent.append((tokens, places, self.heed(self.fences.safe_to_read(places))))

    def go_on(self) -> None:
        """Each does its part when it may: not before, and not always at once."""
        for imported in self.imports:
            if self.fences.has_passed(imported.fence) and self.random.random() < 0.5:
                imported.written = True
                for at, place in enumerate(imported.places):
                    self.memory[place] = imported.tokens[: (at + 1) * BLOCK]
        for entry in [entry for entry in self.lent if self.fences.has_passed(entry[2]) and self.random.random() < 0.7]:
            self.lent.remove(entry)
            tokens, places, _ = entry
            for at, place in enumerate(places):
                assert self.memory.get(place) == tokens[: (at + 1) * BLOCK], f"what is lent is not there: {place}"
            self.give_back(places)

    def end_import(self) -> None:
        """What came is cached; it must not have been written to meanwhile."""
        for imported in [imported for imported in self.imports if imported.written]:
            self.imports.remove(imported)
            for at, place in enumerate(imported.places):
                assert self.memory[place] == imported.tokens[: (at + 1) * BLOCK], f"somebody wrote to {place}"
            blocks = [block for _, block in imported.places]
            in_hbm = len(blocks) if imported.places[0][0] == Tier.HBM else 0
            self.pool.insert("", array(imported.tokens), blocks, in_hbm)
            self.give_back(imported.places)

    def give_back(self, places: list[Place]) -> None:
        self.pool.release([block for tier, block in places if tier == Tier.HBM])
        self.pool.release_dram([block for tier, block in places if tier == Tier.DRAM])

    # -- the whole

    OPS = (
        *(
            "admit",
            "admit",
            "plan",
            "plan",
            "plan",
            "finish",
            "finish",
            "execute_early",
            "end",
            "fork",
            "swap",
            "demote",
        ),
        *("begin_import", "begin_import", "lend", "lend", "go_on", "go_on", "end_import"),
    )

    def live(self, steps: int) -> None:
        for name in self.random.choices(self.OPS, k=steps):
            getattr(self, name)()
            self.fences.check_invariants()
        self.plan() if len(self.plans) < 2 else None
        while self.plans:
            self.finish()
        self.pool.check_invariants()


def lives(seeds: range, steps: int = 300) -> list[Life]:
    found = []
    for seed in seeds:
        found.append(Life(seed))
        try:
            found[-1].live(steps)
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
    return found


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 1 << 40))
def test_blocks_of_plans_in_flight_are_not_read_or_written(seed: int) -> None:
    Life(seed).live(300)


def test_most_need_not_wait() -> None:
    """Although something is under way almost always; and some do wait, for less than everything, or for all of it."""
    done = lives(range(40))
    at_once, sooner, later = (sum(getattr(life, name) for life in done) for name in ("at_once", "sooner", "later"))
    assert at_once > later > 100 and sooner > 50, (at_once, sooner, later)


@pytest.mark.parametrize("safeguard", ["on_blocks_released", "on_copies_recorded", "on_blocks_filled"])
def test_disabling_any_access_log_is_detected(safeguard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAccessLog, safeguard, lambda *_: None)
    with pytest.raises(AssertionError, match=r"reads wrong KV|is not there|somebody wrote"):
        lives(range(40))


@pytest.mark.parametrize("question", ["safe_to_overwrite", "safe_to_read"])
def test_ignoring_any_barrier_is_detected(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Barriers, question, lambda *_: 0)
    with pytest.raises(AssertionError, match=r"reads wrong KV|is not there|somebody wrote"):
        lives(range(40))


@given(st.lists(st.tuples(st.sampled_from(["note", "forget"]), st.integers(1, 9), st.sets(st.integers(0, 5)))))
def test_last_plans_beside_a_plain_list(ops: list[tuple[str, int, set[int]]]) -> None:
    plans, noted, finished = LastPlans(), [], 0
    for name, plan, blocks in ops:
        if name == "forget":
            finished = max(finished, plan)
            plans.forget_until(finished)
        else:
            plans.note_blocks(finished + plan, list(blocks))
            noted.append((finished + plan, blocks))
        for asked in ([0], [1, 2], [3, 4, 5], []):
            expected = max([plan for plan, held in noted if plan > finished and held & set(asked)], default=0)
            assert plans.last_plan_of(asked) == expected
    plans.forget_until(1 << 30)
    assert not plans._blocks, "finished plans are remembered"


def test_waiting_work_is_described_only_on_violation() -> None:
    """The check runs after every event of a fuzzed cluster; a description of an import took a hundred times as long."""

    class Waiting:
        def __call__(self) -> None:
            pass

        def __repr__(self) -> str:
            raise AssertionError("it is described although all is well")

    barriers = Barriers(BlockPool(PoolConfig(4), BLOCK, "test"))
    barriers.when_passed(1, Waiting())
    barriers.check_invariants()
