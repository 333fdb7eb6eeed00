"""Measures what computing and moving KV cost on this machine, and fits the curves (MemServe 5.3).

Steps are timed on the real device with exactly the rows that are asked for: new tokens behind cached ones, or sequences
of given contexts that decode. What the cached KV contains does not matter to the time, so it is not computed first, and
a minute is enough.

Transfers are timed between two processes: one owns pages and seals them, the other pulls. Both are children, started
afresh: a link's library reads its environment once, and the process that measures shall not carry what the other has
mapped. A sample lasts from asking for the pages until their checksums were compared, as a fetch does.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memserve import _core
from memserve.base.config import EngineOptions, InstanceConfig
from memserve.base.errors import UserError
from memserve.base.types import CopyBlocks, KVGeometry, Role, SamplingParams, Tier
from memserve.base.units import MIB, ceil_div
from memserve.host.build import build_parts
from memserve.host.profile_file import Measured, Profile
from memserve.instance.events import LoadState, OpenSequence, PlaceWindow, StepPlan
from memserve.kv.costs import CostModel, Quality, Sample, fit_copy, fit_decode, fit_held_out, fit_prefill
from memserve.kv.transfer.events import PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.data_port import PagePort, open_data_port
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import Device

if TYPE_CHECKING:
    from memserve.model.loading.loader import LoadedModel

CACHED_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
DECODE_CONTEXTS = (64, 128, 256, 1024, 4096)
COPY_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS_MAX = 5
SAMPLES_MIN = 5
"""With fewer a curve cannot be fitted to two thirds of them and tried on the rest."""
SHARES = {"prefill": 0.55, "decode": 0.25, "swap": 0.1, "transfer": 0.1}
"""Shares of the time that a profile may take."""

ARENA_BYTES_MAX = 128 * MIB
_START_S = 30.0
_PULL_S = 20.0
_OWNER, _TAKER = Peer("profile-owner", 1), Peer("profile-taker", 1)

NETWORK_ENVIRONMENT = {"UCX_TLS": "tcp,self"}
"""Another host cannot be asked: this one's own TCP stands for the network."""


Links = dict[str, tuple[str, dict[str, str]]]
"""Curve -> link and environment."""
LINKS: Links = {"same_host": ("shm", {}), "network": ("curve", {})}
NIXL_LINKS: Links = LINKS | {"network": ("nixl", NETWORK_ENVIRONMENT)}
"""Of instances that read other hosts over NIXL."""

Point = TypeVar("Point", bound=Hashable)
Tell = Callable[[str], None]


class StepProfiler:
    """Times single steps of one device, which has no other user meanwhile."""

    def __init__(self, device: Device, config: InstanceConfig, block_tokens: int, vocab_size: int) -> None:
        self._device = device
        self._config = config
        self._block_tokens = block_tokens
        self._rng = np.random.default_rng(7)
        self._vocab_size = vocab_size
        self._step_ids = itertools.count(1)

    def fits_pool(self, batch: int, tokens: int) -> bool:
        """Whether ``batch`` sequences of ``tokens`` each can be in the pool at once."""
        config = self._config
        blocks = batch * ceil_div(tokens + 1, self._block_tokens)
        within = tokens < config.max_model_tokens and batch <= config.scheduler.max_running
        return within and blocks <= config.pool.hbm_blocks

    def prefill_ns(self, new_tokens: int, context_tokens: int) -> int:
        """One step that computes ``new_tokens`` behind ``context_tokens``, and draws one token."""
        return self.prompts_ns(1, new_tokens, context_tokens)

    def prompts_ns(self, batch: int, new_tokens: int, context_tokens: int, from_dram: bool = False) -> int:
        """One step that computes ``new_tokens`` of each of ``batch`` prompts behind ``context_tokens`` each.

        ``from_dram``: the whole blocks of the contexts are brought up from DRAM in that step, before it computes.
        """
        return self._time_step(batch, context_tokens + new_tokens, new_tokens, context_tokens if from_dram else 0)

    def decode_ns(self, batch: int, context_tokens: int) -> int:
        """One step of ``batch`` sequences that attend to ``context_tokens`` each."""
        return self._time_step(batch, context_tokens, 1)

    def copy_ns(self, src: Tier, dst: Tier, blocks: int) -> int:
        """Copying ``blocks`` blocks between tiers: every other one, as after some time in service."""
        limit = min(self._config.pool.hbm_blocks, self._config.pool.dram_blocks)
        places = [(2 * index) % limit + (2 * index) // limit for index in range(blocks)]
        plan = StepPlan(next(self._step_ids), copies=[CopyBlocks(src, dst, places, places[::-1])])
        return self._device.execute(plan).device_ns

    def close(self) -> None:
        """Give the device back."""
        self._device.close()

    def _time_step(self, batch: int, tokens: int, new_tokens: int, dram_tokens: int = 0) -> int:
        plan = StepPlan(next(self._step_ids))
        blocks = ceil_div(tokens + 1, self._block_tokens)
        if swapped := dram_tokens // self._block_tokens:
            above = [slot * blocks + index for slot in range(batch) for index in range(swapped)]
            plan.copies.append(CopyBlocks(Tier.DRAM, Tier.HBM, list(range(len(above))), above))
        for slot in range(batch):
            ids = self._rng.integers(self._vocab_size // 100, self._vocab_size, tokens, dtype=np.int32)
            own_blocks = list(range(slot * blocks, (slot + 1) * blocks))
            plan.open.append(OpenSequence(slot, ids, tokens, 0, SamplingParams(temperature=0.0), own_blocks))
            if self._config.pool.states is not None:
                pages = list(range(self._config.pool.states.pages_each)) if tokens > new_tokens else []
                plan.states.append(LoadState(slot, tokens - new_tokens, pages))  # whatever lies there
            if (windows := self._config.pool.windows) is not None:  # written over each other: only time counts
                parts = [block for block in own_blocks for _ in range(windows.part_blocks)]
                plan.windows.append(PlaceWindow(slot, 0, parts))
            plan.slots.append(slot)
            plan.starts.append(tokens - new_tokens)
            plan.counts.append(new_tokens)
            plan.sample_slots.append((slot,))
        spent_ns = self._device.execute(plan).device_ns
        self._device.execute(StepPlan(next(self._step_ids), close=list(range(batch))))
        return spent_ns


def open_profiler(options: EngineOptions) -> tuple[LoadedModel, InstanceConfig, StepProfiler]:
    """Load the model and make a device of it, as an engine has it. Imports torch, so it takes seconds.

    Raises :class:`UserError` as :func:`memserve.host.build.build_parts`.
    """
    parts = build_parts(options)
    model = parts.model
    profiler = StepProfiler(parts.device, parts.config, model.geometry.block_tokens, model.vocab_size)
    return model, parts.config, profiler


def measure_steps(
    profiler: StepProfiler, config: InstanceConfig, geometry: KVGeometry, seconds: float, tell: Tell
) -> Measured:
    """Samples of prefill, decode and swap, in about ``seconds``."""
    for new_tokens in (8, 64, 256):  # threads, kernels, first-touch memory
        if profiler.fits_pool(1, new_tokens):
            profiler.prefill_ns(new_tokens, 0)
    samples: dict[str, Sequence[Sample]] = {}
    tell("prefill: prompt lengths and cached ratios")
    samples["prefill"] = _prefill_samples(profiler, config.scheduler.step_tokens, SHARES["prefill"] * seconds)
    tell("decode: batches and contexts")
    samples["decode"] = _decode_samples(profiler, SHARES["decode"] * seconds)
    blocks = [count for count in COPY_BLOCKS if count <= min(config.pool.hbm_blocks, config.pool.dram_blocks)]
    if len(blocks) < SAMPLES_MIN:
        return Measured(samples, dict.fromkeys(("swap_in", "swap_out"), "the pool has hardly any second tier"))
    tell("swap: between the tiers")
    for curve, src, dst in (("swap_in", Tier.DRAM, Tier.HBM), ("swap_out", Tier.HBM, Tier.DRAM)):
        times = timed_rounds(blocks, partial(profiler.copy_ns, src, dst), SHARES["swap"] * seconds / 2)
        samples[curve] = [Sample(count * geometry.block_bytes, count, ns) for count, ns in times.items()]
    return Measured(samples)


def _prefill_samples(profiler: StepProfiler, step_tokens: int, seconds: float) -> list[Sample]:
    grid = prefill_grid(profiler, step_tokens)
    times = timed_rounds(grid, lambda point: profiler.prefill_ns(*point), seconds)
    return [Sample(new, context, ns) for (new, context), ns in times.items()]


def _decode_samples(profiler: StepProfiler, seconds: float) -> list[Sample]:
    grid = [(b, c) for b in DECODE_BATCHES for c in DECODE_CONTEXTS if profiler.fits_pool(b, c)]
    grid.sort(key=lambda point: point[0] * point[1])
    times = timed_rounds(grid, lambda point: profiler.decode_ns(*point), seconds)
    return [Sample(batch, batch * context, ns) for (batch, context), ns in times.items()]


def prefill_grid(profiler: StepProfiler, step_tokens: int) -> list[tuple[int, int]]:
    """Pairs of (new tokens, cached tokens): figure 13's prompt lengths and cached ratios, the quick ones first."""
    points = []
    for length, ratio in itertools.product(PROMPT_TOKENS, CACHED_RATIOS):
        cached = round(length * ratio)
        if length - cached <= step_tokens and profiler.fits_pool(1, length):
            points.append((length - cached, cached))
    return sorted(points)


def timed_rounds(points: Sequence[Point], time_one: Callable[[Point], int], seconds: float) -> dict[Point, int]:
    """The median time of each point: see :func:`all_rounds`."""
    return {point: round(median(spent)) for point, spent in all_rounds(points, time_one, seconds).items()}


def all_rounds(
    points: Sequence[Point], time_one: Callable[[Point], int], seconds: float, rounds: int | None = None
) -> dict[Point, list[int]]:
    """The times of each point in as many rounds as ``seconds`` allow (at most ``rounds``); interleaved, so that a slow
    moment of the machine does not fall on one point alone.

    The first point of all is thrown away once: it pays for what is only done once. When not even the first round fits,
    its last points are left out.
    """
    if not points:
        return {}
    deadline = time.perf_counter() + seconds
    time_one(points[0])
    times: dict[Point, list[int]] = {}
    for turn in range(rounds or ROUNDS_MAX):
        for point in points:
            if time.perf_counter() > deadline and (turn > 0 or len(times) >= 3):
                return times
            times.setdefault(point, []).append(time_one(point))
    return times


def fit_profile(measured: Measured, machine: str, model: str) -> Profile:
    """The cost model through the samples; what was not measured keeps its conservative default.

    Raises :class:`UserError` when there is too little to fit.
    """
    if len(measured.samples.get("prefill", ())) < SAMPLES_MIN:
        raise UserError("too few prompts could be measured", hint="give it more --seconds, or --kv-memory")
    fits: dict[str, Callable[[Sequence[Sample]], Any]] = {"prefill": fit_prefill, "decode": fit_decode}
    curves: dict[str, Any] = {}
    quality: dict[str, Quality] = {}
    for name, samples in measured.samples.items():
        if len(samples) >= SAMPLES_MIN:
            curves[name], quality[name] = fit_held_out(samples, fits.get(name, fit_copy))
    return Profile(CostModel(**curves, machine=machine, model=model), quality, measured)


# -- transfers


def with_transfers(
    measured: Measured, geometry: KVGeometry, seconds: float, tell: Tell, links: Links = LINKS
) -> Measured:
    """``measured`` and what moving pages between two processes costs, in about ``seconds``."""
    samples, failures = dict(measured.samples), dict(measured.failures)
    for curve, (link, environment) in links.items():
        tell(f"transfer: between two processes over {link}")
        try:
            samples[curve] = measure_transfer(geometry, link, seconds / 2, environment)
        except UserError as error:
            failures[curve] = str(error)
    return replace(measured, samples=samples, failures=failures)


def measure_transfer(
    geometry: KVGeometry,
    link: str,
    seconds: float,
    environment: dict[str, str] | None = None,
    block_counts: Sequence[int] = COPY_BLOCKS,
) -> list[Sample]:
    """Samples of ``(bytes, pieces)`` over ``link`` (``shm``, ``curve`` or ``nixl``): in whole blocks, and page by page.

    Raises :class:`UserError` when the link does not work here.
    """
    blocks = min(max(block_counts), ARENA_BYTES_MAX // geometry.block_bytes)
    if blocks < 2:
        raise UserError("the model's blocks are too large to be moved for a test")
    settings = (geometry, link, blocks, environment or {}, secrets.token_urlsafe())
    context = multiprocessing.get_context("spawn")
    owner_side, taker_side = context.Pipe()
    ours, result_side = context.Pipe()
    owner = context.Process(target=_run_owner, args=(owner_side, *settings), daemon=True)
    taker_args = (result_side, taker_side, seconds, tuple(block_counts))
    taker = context.Process(target=_run_taker, args=(*taker_args, *settings), daemon=True)
    for process in (owner, taker):
        process.start()
    for end in (owner_side, taker_side, result_side):
        end.close()
    try:
        answer: Any = ours.recv() if ours.poll(_START_S + 3 * seconds + _PULL_S) else "no answer in time"
    except EOFError:
        answer = "the measuring process died"
    finally:
        for process in (taker, owner):
            process.terminate()
            process.join()
    if isinstance(answer, str):
        raise UserError(f"cannot move pages over {link}: {answer}")
    return [Sample(*sample) for sample in answer]


def _run_owner(connection: Connection, geometry: KVGeometry, link: str, blocks: int, *settings: Any) -> None:
    """The owner's process: seals the first ``n`` blocks as often as ``n`` is asked for."""
    with _open_port(geometry, link, blocks, *settings) as (port, answers):
        connection.send(port.describe(_profile_peer(_OWNER, geometry, blocks)))
        port.add_peer(connection.recv())  # members know each other
        while True:
            try:
                count = connection.recv()
            except EOFError:
                return
            port.start(SealPages(0, Tier.HBM, tuple(range(count)), 0, geometry.num_layers))
            sealed = answers.get()
            connection.send(sealed.checksums)


def _run_taker(
    results: Connection, owner: Connection, seconds: float, block_counts: Sequence[int],
    geometry: KVGeometry, link: str, blocks: int, *settings: Any,
) -> None:  # fmt: skip
    """The taker's process: measures, and tells the samples or what went wrong."""
    with _open_port(geometry, link, blocks, *settings) as (port, answers):
        if not owner.poll(_START_S):
            results.send("the other process does not start")
            return
        port.add_peer(owner.recv())
        owner.send(port.describe(_profile_peer(_TAKER, geometry, blocks)))

        def pull(point: tuple[int, bool]) -> int:
            count, by_page = point
            started_ns = time.perf_counter_ns()
            owner.send(count)
            ids, layers = tuple(range(count)), geometry.num_layers
            pages = PullPages(1, _OWNER, Tier.HBM, ids, Tier.HBM, ids, 0, layers, owner.recv(), by_page)
            port.start(pages)
            pulled = answers.get(timeout=_PULL_S)
            if pulled.error:
                raise UserError(pulled.error)
            return time.perf_counter_ns() - started_ns

        points = [(count, by_page) for count in block_counts if count <= blocks for by_page in (False, True)]
        try:
            times = timed_rounds(points, pull, seconds)
        except (UserError, queue.Empty, EOFError) as error:
            results.send(str(error) or "a pull did not end")
            return
        pieces = {False: 1, True: geometry.num_layers}
        results.send([(n * geometry.block_bytes, n * pieces[paged], ns) for (n, paged), ns in times.items()])


@contextmanager
def _open_port(
    geometry: KVGeometry, link: str, blocks: int, environment: dict[str, str], secret: str
) -> Iterator[tuple[PagePort, queue.SimpleQueue[Any]]]:
    os.environ.update(environment)
    arena = _core.SharedArena(blocks * geometry.block_bytes)
    np.frombuffer(memoryview(arena), dtype=np.uint8)[:] = (
        1  # pages that exist: the kernel's zeros are no memory to read
    )
    answers: queue.SimpleQueue[PagesSealed | PagesPulled] = queue.SimpleQueue()
    port = open_data_port(link, geometry, {Tier.HBM: arena}, answers.put, ListenAddress(secret))
    try:
        yield port, answers
    finally:
        port.close()


def _profile_peer(peer: Peer, geometry: KVGeometry, blocks: int) -> PeerInfo:
    return PeerInfo(peer, Role.COLOCATED, "", "profile", geometry, blocks, 0, 0, False)
