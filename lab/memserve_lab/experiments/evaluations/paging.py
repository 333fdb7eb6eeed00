"""``memserve sim paging``: KV memory in blocks beside KV memory that is reserved in one piece (PagedAttention).

The baselines of the paper, at the place where the production scheduler admits a sequence; all else is production's::

    max                 a piece for the longest sequence that the model takes
    pow2                for the prompt, and the answer's length rounded up to a power of two
    oracle              for the prompt and the answer, whose length is known
    static batches      max, and a batch runs until all of its sequences have ended (FasterTransformer)
    blocks              none is reserved: blocks of 16 tokens, one by one

Pieces come from a buddy allocator, as the paper assumes of Orca. A share of memory counts while sequences wait for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from memserve.base.config import AdmissionConfig, ClusterConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import Caching, Role
from memserve.base.units import NS_PER_MS, NS_PER_S, ceil_div
from memserve.instance.machine import Instance
from memserve.instance.scheduler.admission import SequenceAdmission
from memserve.instance.scheduler.sequence import Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve_lab.bench.report_writer import Cell, Drawing, Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.experiments.layerkv import requests
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.nodes import InstanceNode
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Workload

MAX, POW2, ORACLE, STATIC, BLOCKS = "max", "pow2", "oracle", "static batches", "blocks"
WAYS = (STATIC, MAX, POW2, ORACLE, BLOCKS)
UNIT_TOKENS = 16
"""The smallest piece."""
SAMPLE_NS = 500 * NS_PER_MS
LENGTHS = {"sharegpt": ((88, 1.1), (185, 1.1)), "alpaca": ((14, 0.8), (42, 0.8))}
"""Median and spread of prompts and answers: means of 161 and 338, 19 and 58 tokens, as the paper's."""
CROWDED_RATES = {"sharegpt": 100.0, "alpaca": 1000.0}
"""Requests a second, of which most wait for memory in any way."""
SLOTS = 256


class BuddyMemory:
    """Contiguous pieces of powers of two, of ``tokens`` slots in all."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens // UNIT_TOKENS * UNIT_TOKENS
        self._free: dict[int, set[int]] = {}  # by size, where pieces begin
        first = 0
        while first < self.tokens:
            size = UNIT_TOKENS << (((self.tokens - first) // UNIT_TOKENS).bit_length() - 1)
            self._free.setdefault(size, set()).add(first)
            first += size
        self._sizes: dict[int, int] = {}  # of pieces in use

    def allocate(self, tokens: int) -> int | None:
        """Where a piece of at least ``tokens`` begins. None: there is none."""
        size = UNIT_TOKENS << (ceil_div(tokens, UNIT_TOKENS) - 1).bit_length()
        larger = [free_size for free_size, starts in self._free.items() if free_size >= size and starts]
        if not larger:
            return None
        piece_size = min(larger)
        first = min(self._free[piece_size])
        self._free[piece_size].remove(first)
        while piece_size > size:
            piece_size //= 2
            self._free.setdefault(piece_size, set()).add(first + piece_size)
        self._sizes[first] = size
        return first

    def free(self, first: int) -> None:
        """Give a piece back; it joins its buddy where that is free."""
        size = self._sizes.pop(first)
        while (buddy := first ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            first, size = min(first, buddy), 2 * size
        self._free.setdefault(size, set()).add(first)

    @property
    def used_tokens(self) -> int:
        """Of all pieces in use."""
        return sum(self._sizes.values())


class ReservingAdmission(SequenceAdmission):
    """Admits a sequence when there is a piece for all that it is expected to become."""

    def __init__(self, state: SchedulerState, memory: BuddyMemory, reserve: Callable[[Sequence], int]) -> None:
        super().__init__(state)
        self.memory = memory
        self._reserve = reserve
        self.places: dict[Sequence, tuple[int, int]] = {}
        """Where the piece of each begins, and the tokens that it was to hold."""

    def admit(self, sequence: Sequence, now_ns: int) -> bool:
        self.release_ended()
        tokens = self._reserve(sequence)
        place = self.memory.allocate(tokens)
        if place is None:
            return False
        if not super().admit(sequence, now_ns):
            self.memory.free(place)
            return False
        self.places[sequence] = place, tokens
        return True

    def release_ended(self) -> None:
        """Free the pieces of sequences that have ended."""
        for sequence in [sequence for sequence in self.places if sequence.phase is Phase.FINISHED]:
            self.memory.free(self.places.pop(sequence)[0])


class BatchAdmission(ReservingAdmission):
    """Admits a batch in one plan, and the next one when all of it has ended."""

    _opened_ns = -1

    def admit(self, sequence: Sequence, now_ns: int) -> bool:
        self.release_ended()
        if not self.places:
            self._opened_ns = now_ns
        return now_ns == self._opened_ns and super().admit(sequence, now_ns)

    def release_ended(self) -> None:
        if all(sequence.phase is Phase.FINISHED for sequence in self.places):
            super().release_ended()


def tokens_to_reserve(way: str, context: int) -> Callable[[Sequence], int]:
    """What a sequence reserves."""

    def reserve(sequence: Sequence) -> int:
        answer = sequence.max_tokens
        if way == POW2:
            answer = 1 << (answer - 1).bit_length()
        return context if way in (MAX, STATIC) else min(context, sequence.prompt_tokens + answer)

    return reserve


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Of KV memory, while sequences wait for it; together 1."""

    states: float
    """Tokens that are there."""
    reserved: float
    """For tokens that will come."""
    internal: float
    """For tokens that never come."""
    rest: float
    """Between pieces, rounding of pieces, or free."""
    running: float
    """Sequences, on average (no share)."""


class PagingWorld(ReplayWorld):
    """One instance that keeps KV in one of the ways, and samples of its memory."""

    def __init__(self, way: str, kv_tokens: int, setup: Setup, workload: Workload) -> None:
        self.way, self.kv_tokens = way, kv_tokens
        self.admission: ReservingAdmission | None = None
        self.samples: list[MemoryShares] = []
        self._crowded: list[tuple[int, int]] = []
        super().__init__(setup, workload)
        self.clock.call_after(SAMPLE_NS, self._take_sample)

    def new_instance(self, node: InstanceNode) -> Instance:
        instance = super().new_instance(node)
        if self.way != BLOCKS:
            kind = BatchAdmission if self.way == STATIC else ReservingAdmission
            reserve = tokens_to_reserve(self.way, self.setup.machine.context_tokens)
            self.admission = kind(instance.state, BuddyMemory(self.kv_tokens), reserve)
            instance.planner.admission = self.admission
        return instance

    def _take_sample(self) -> None:
        node = self.instances[0]
        node.catch_up()
        state = node.machine.state
        if state.waiting:
            self.samples.append(self._shares_of([*state.decoding.items, *state.prefilling.items, *state.idle.items]))
            self._crowded.append((self.clock.now, self.clients.answered))
        self.clock.call_after(SAMPLE_NS, self._take_sample)

    def _shares_of(self, running: list[Sequence]) -> MemoryShares:
        states = sum(sequence.computed for sequence in running)
        final = sum(sequence.prompt_tokens + sequence.max_tokens for sequence in running)
        if self.admission is None:
            piece_tokens = sum(len(sequence.blocks) for sequence in running) * self.setup.machine.geometry.block_tokens
            reserved, internal = 0, piece_tokens - states
        else:
            piece_tokens = sum(tokens for _, tokens in self.admission.places.values())
            reserved, internal = final - states, piece_tokens - final
        total = self.kv_tokens
        return MemoryShares(
            states / total, reserved / total, internal / total, (total - piece_tokens) / total, float(len(running))
        )

    def mean_shares(self) -> MemoryShares:
        """Over all samples; zeros where nothing ever waited."""
        count = max(1, len(self.samples))
        names = [item.name for item in dataclasses.fields(MemoryShares)]
        return MemoryShares(*(sum(getattr(sample, name) for sample in self.samples) / count for name in names))

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, while others waited for memory. Raises :class:`UserError` where none did."""
        if len(self._crowded) < 2:
            raise UserError("all requests had room", hint="send more of them: --requests")
        (first_ns, before), (last_ns, after) = self._crowded[0], self._crowded[-1]
        return (after - before) / max(1, last_ns - first_ns) * NS_PER_S


def lengths(kind: str, count: int, random: Random, context: int) -> list[tuple[int, int]]:
    """Lengths of prompts and answers of :data:`LENGTHS`, together within the context."""
    shapes: list[tuple[int, int]] = []
    while len(shapes) < count:
        prompt, answer = (
            max(1, round(random.lognormvariate(math.log(median), spread))) for median, spread in LENGTHS[kind]
        )
        if prompt + answer < context:
            shapes.append((prompt, answer))
    return shapes


@dataclass(frozen=True, slots=True)
class PagingPlan:
    """The options of a run."""

    machine: Machine
    """Its blocks of HBM are those of all ways."""
    workloads: tuple[str, ...]
    ways: tuple[str, ...] = WAYS
    requests: int = 200
    """Of ``sharegpt``; as many tokens of ``alpaca`` are ten times as many requests."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PagingPoint:
    """One way with one workload."""

    workload: str
    way: str
    rate: float
    """Requests that end a second while others wait for memory: the most that a queue survives."""
    shares: MemoryShares


def run_way(plan: PagingPlan, kind: str, way: str, rate: float) -> PagingWorld:
    """Simulate one way at ``rate`` requests a second. Raises :class:`UserError` where a request was not answered."""
    machine, random = plan.machine, Random(f"{plan.seed} {kind}")
    kv_tokens = machine.hbm_blocks * machine.geometry.block_tokens
    count = plan.requests * (10 if kind == "alpaca" else 1)
    workload = requests(lengths(kind, count, random, machine.context_tokens), rate, random)
    if way != BLOCKS:  # the pieces are the limit: blocks for as many sequences as there are slots
        blocks = ceil_div(machine.context_tokens, machine.geometry.block_tokens) * SLOTS
        machine = dataclasses.replace(machine, hbm_blocks=blocks)
    patient = AdmissionConfig(waiting_max=1_000_000, wait_ns=100_000 * NS_PER_S)
    cluster = ClusterConfig(Caching.OFF, "least-load", admission=patient, stalled_after_ns=1_000_000 * NS_PER_S)
    scheduler = SchedulerConfig(max_running=SLOTS, max_step_tokens=2048, max_waiting=1_000_000)
    world = PagingWorld(way, kv_tokens, Setup({Role.COLOCATED: 1}, machine, cluster, scheduler), workload)
    world.run_workload()
    if failed := [served for served in world.clients.served if not served.answered]:
        raise UserError(f"{len(failed)} requests were not answered: {failed[0].error or failed[0].finish}")
    return world


# -- the study


@dataclass(slots=True, kw_only=True)
class PagingResults(StudyResults):
    """All points."""

    points: list[PagingPoint] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.points


PAPER = {
    "sharegpt": "The slides: 20 to 40 % of KV memory holds tokens where it is reserved (Orca), 96 % in blocks; 2.5 "
    "times the rate of Orca (max), 6.3 times FasterTransformer's; 1.7 to 4 times the state of the art.",
    "alpaca": "The slides: 1.7 times the rate of Orca, 13 times FasterTransformer's.",
}


class PagingStudy(Study[PagingResults]):
    """Shares of memory, sequences at once and rates, by way."""

    title = "memserve sim paging"

    def __init__(self, plan: PagingPlan, results: PagingResults) -> None:
        super().__init__(results)
        self._plan = plan
        self.drawings = {"paging": Drawing("KV memory by way. Simulated.", draw_shares)}

    def fill_results(self, tell: Tell) -> None:
        plan = self._plan
        for kind in plan.workloads:
            for way in plan.ways:
                world = run_way(plan, kind, way, CROWDED_RATES[kind])
                shares, rate = world.mean_shares(), world.requests_per_s
                self.results.points.append(PagingPoint(kind, way, rate, shares))
                tell(f"{kind}, {way}: {shares.states:.1%} of memory holds tokens, {rate:.2f} requests/s")

    def make_tables(self) -> Iterator[Table]:
        columns = (
            "way", "holds tokens", "reserved", "never used", "between pieces, or free", "sequences at once",
            "requests/s while others wait", "blocks over it",
        )  # fmt: skip
        for kind in self._plan.workloads:
            points = [point for point in self.results.points if point.workload == kind]
            best = next((point.rate for point in points if point.way == BLOCKS), 0.0)
            rows: list[list[Cell]] = [
                [
                    point.way, *(f"{share:.1%}" for share in dataclasses.astuple(point.shares)[:4]),
                    f"{point.shares.running:.1f}", f"{point.rate:.2f}",
                    f"{best / point.rate:.1f}" if best and point.rate else "",
                ]
                for point in points
            ]  # fmt: skip
            title = f"{kind} on {self._plan.machine.name}, {self._plan.machine.hbm_blocks} blocks (simulated)"
            yield Table(title, columns, rows, about=PAPER[kind])

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()


def draw_shares(pyplot: Any, results: PagingResults) -> Any:
    """Bars of memory by way, and of rates."""
    kinds = list(dict.fromkeys(point.workload for point in results.points))
    figure, rows = pyplot.subplots(len(kinds), 2, figsize=(12, 3.6 * len(kinds)), layout="constrained", squeeze=False)
    labels = {"states": "holds tokens", "reserved": "reserved", "internal": "never used", "rest": "between, or free"}
    for kind, (share_axes, rate_axes) in zip(kinds, rows, strict=True):
        points = [point for point in results.points if point.workload == kind]
        names, below = [point.way for point in points], [0.0] * len(points)
        for name, label in labels.items():
            heights = [100 * getattr(point.shares, name) for point in points]
            share_axes.bar(names, heights, bottom=below, label=label)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        share_axes.set(ylabel="KV memory (%)", title=f"{kind}: memory while sequences wait", ylim=(0, 100))
        share_axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
        bars = rate_axes.bar(names, [point.rate for point in points], color="C0")
        rate_axes.bar_label(bars, fmt="%.2f", fontsize=8)
        rate_axes.set(title=f"{kind}: requests/s, while others wait")
    figure.suptitle("KV memory in one piece and in blocks, simulated")
    return figure
