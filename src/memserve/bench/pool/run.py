"""All of ``memserve bench pool``, part by part; what was measured is kept when it ends early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from memserve.bench.pool.calls import measure_accounts, measure_swaps
from memserve.bench.pool.index import race
from memserve.bench.pool.moves import bytes_needed, measure_moves, open_mover, works_of
from memserve.bench.pool.pair import Pair
from memserve.bench.pool.peers import measure_peers, open_peers
from memserve.bench.pool.results import ForwardPoint, PoolResults
from memserve.bench.sheet import Spent
from memserve.config import EngineOptions
from memserve.errors import UserError
from memserve.options import with_values
from memserve.runtime.profile import NETWORK_ENVIRONMENT, StepProfiler, open_profiler
from memserve.types import KVGeometry
from memserve.units import MIB

LINKS: dict[str, tuple[str, dict[str, str]]] = {
    "shared memory": ("shm", {}),
    "NIXL": ("nixl", {}),
    "NIXL over TCP": ("nixl", NETWORK_ENVIRONMENT),
}
"""Name -> link and environment. NIXL on one host lets the kernel copy; over TCP it stands for two hosts."""
CACHED_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
STEP_TOKENS = 4096
"""The longest prompt whose forward is timed: it is computed in one step."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How much is measured."""

    blocks: tuple[int, ...]
    """Blocks of a call; the cached ratio is varied at the largest but no more than a prompt of 4,096 tokens."""
    prompt_tokens: tuple[int, ...]
    """Lengths at which the indexes race, and the model's forward is timed where it fits."""
    tree_prompts: int
    rounds: int
    """Of calls that keep accounts and of the race; what moves bytes is repeated ``copy_rounds`` times."""
    copy_rounds: int
    sweep_bytes: int


FULL = PoolPlan((1, 4, 16, 64, 128), (512, 1024, 2048, 4096, 8192, 16384, 32768), 100, 200, 12, 64 * MIB)
QUICK = PoolPlan((1, 8, 64), (512, 2048, 8192), 20, 40, 3, 16 * MIB)


def measure(plan: PoolPlan, options: EngineOptions, results: PoolResults, tell: Tell) -> None:
    """Fill ``results``; Ctrl-C ends it early and marks them partial. Raises :class:`UserError` for a bad model."""
    try:
        with ExitStack() as stack:
            tell("loading the model ...")
            profiler = _open(options, results, stack)
            tell("calls that keep accounts (figure 9)")
            results.calls += measure_accounts(
                results.geometry.block_tokens, plan.blocks, _ratio_blocks(plan, results), plan.tree_prompts, plan.rounds
            )
            tell("swaps (figure 9)")
            results.calls += measure_swaps(results.geometry, plan.blocks, plan.copy_rounds)
            tell("indexes (figure 10)")
            _race(plan, results)
            tell("the model's forward (figure 10)")
            _forwards(plan, results, profiler)
        _between_processes(plan, results, tell)
    except KeyboardInterrupt:
        results.partial = "interrupted"


def _open(options: EngineOptions, results: PoolResults, stack: ExitStack) -> StepProfiler:
    model, _, profiler = open_profiler(with_values(options, {("scheduler", "max_step_tokens"): STEP_TOKENS}))
    stack.callback(profiler.close)
    results.model, results.geometry = model.name, model.geometry
    return profiler


def _ratio_blocks(plan: PoolPlan, results: PoolResults) -> int:
    """Blocks of the prompts whose cached ratio is varied."""
    return min(max(plan.blocks), max(1, STEP_TOKENS // results.geometry.block_tokens))


def _race(plan: PoolPlan, results: PoolResults) -> None:
    works = [(tokens, 0.0) for tokens in plan.prompt_tokens]
    middle = plan.prompt_tokens[len(plan.prompt_tokens) // 2]
    works += [(middle, ratio) for ratio in CACHED_RATIOS if ratio > 0]
    results.index += race(results.geometry.block_tokens, works, plan.tree_prompts, plan.rounds)


def _forwards(plan: PoolPlan, results: PoolResults, profiler: StepProfiler) -> None:
    lengths = [tokens for tokens in plan.prompt_tokens if tokens <= STEP_TOKENS and profiler.fits(1, tokens)]
    rounds = max(1, plan.copy_rounds // 4)
    for tokens in lengths:
        times = [profiler.prefill_ns(tokens, 0) for _ in range(rounds + 1)]
        results.forward.append(ForwardPoint(tokens, Spent.of(times[1:])))


def _between_processes(plan: PoolPlan, results: PoolResults, tell: Tell) -> None:
    tell("calls between two processes (figure 9)")
    with ExitStack() as stack:
        pairs = _open_all(lambda link, environment: open_peers(
            results.geometry, link, max(plan.blocks), environment), results, stack)  # fmt: skip
        results.calls += measure_peers(pairs, plan.blocks, _ratio_blocks(plan, results), plan.copy_rounds)
    tell("aggregated against discrete (figure 11)")
    works = works_of(results.geometry, plan.sweep_bytes)
    with ExitStack() as stack:
        pairs = _open_all(lambda link, environment: open_mover(
            results.geometry, link, bytes_needed(works), environment), results, stack)  # fmt: skip
        for move in measure_moves(pairs, works, plan.copy_rounds):
            results.moves.append(move)


def _open_all(
    open_pair: Callable[[str, dict[str, str]], Pair], results: PoolResults, stack: ExitStack
) -> dict[str, Pair]:
    """The links that work here; the others are noted."""
    pairs = {}
    for name, (link, environment) in LINKS.items():
        try:
            pair = pairs[name] = open_pair(link, environment)
        except UserError as error:
            if (note := f"{name} was left out: {error}") not in results.notes:
                results.notes.append(note)
        else:
            stack.callback(pair.close)
    return pairs


def empty_results(command: str, plan: PoolPlan) -> PoolResults:
    """Nothing measured yet."""
    return PoolResults(command, "", KVGeometry(1, 1, 1, 1, "bfloat16"), plan.tree_prompts)
