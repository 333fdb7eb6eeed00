"""Where KV comes from: reused where it lies, swapped in, fetched from another instance, or recomputed.

:func:`decide_batch` chooses for the prompts that an instance gets together (MemServe 4 and 5.3), by the curves of
``kv/costs.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from memserve.base.types import KVGeometry
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.kv.costs import CopyCurve, CostModel

_DISK_PATIENCE = 3


class Way(enum.StrEnum):
    """How one piece of a prompt gets its KV."""

    REUSE = "reuse"  # it lies where attention reads
    SWAP_IN = "swap-in"  # from host memory
    FETCH = "fetch"  # from another instance, or a store
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the pieces of one prompt's prefix lie: first HBM, behind it DRAM, behind it another instance or a store."""

    prompt_tokens: int
    hbm_tokens: int = 0
    dram_tokens: int = 0
    remote_tokens: int = 0
    """Tokens of the other instance, or of the store, beyond the first two pieces."""
    same_host: bool = True
    """Whether its memory can be read in place, as shared memory."""
    fetch_after_ns: int = 0
    """Time until the transfer can begin: steps under way use the blocks that it writes to."""
    disk_tokens: int = 0
    """Of ``remote_tokens``: on the disks of a store, which reads them into its memory first."""
    disk: CopyCurve | None = None
    """What reading those disks costs. None: as the costs of this instance say."""

    link: CopyCurve | None = None
    """What moving from there costs. None: as the costs of this instance say."""
    present_tokens: int = 0
    """Of ``remote_tokens``, the first: their KV is here, and only the recurrent state behind them is not."""
    state_bytes: int = 0
    """Of a recurrent state, which is moved with the KV that it stands behind. 0: layers keep KV alone."""

    @property
    def own_tokens(self) -> int:
        """Tokens in this instance's cache, on either tier."""
        return self.hbm_tokens + self.dram_tokens


@dataclass(frozen=True, slots=True)
class ReuseOption:
    """One way to serve a whole prompt: move the pieces up to some point, compute the rest."""

    ways: tuple[tuple[Way, int], ...]
    """Pieces in order, with their tokens; the last one is always recomputed, and never empty."""
    wait_ns: int
    """Time from now until the prefill can begin: the longer of other work before it and a fetch."""
    swap_ns: int
    prefill_ns: int
    fetch_ends_ns: int = 0
    """Time from now until the link is free again; 0: this option fetches nothing."""

    @property
    def compute_ns(self) -> int:
        """How long this option keeps the device busy."""
        return self.swap_ns + self.prefill_ns

    @property
    def expected_ns(self) -> int:
        """Time from now until the first token."""
        return self.wait_ns + self.compute_ns

    @property
    def name(self) -> str:
        """For example ``reuse 512 + swap-in 256 + recompute 32``."""
        return " + ".join(f"{way} {tokens}" for way, tokens in self.ways)


@dataclass(frozen=True, slots=True)
class Decision:
    """The quickest option, and those that it was preferred to."""

    choice: ReuseOption
    alternatives: tuple[ReuseOption, ...] = ()
    queue_ns: int = 0
    """Time of computing before this prompt."""

    def tokens_of(self, way: Way) -> int:
        """Tokens that get their KV this way."""
        return sum(tokens for chosen_way, tokens in self.choice.ways if chosen_way is way)

    @property
    def expected_ns(self) -> int:
        """Time from now until the first token."""
        return self.choice.expected_ns

    @property
    def reason(self) -> str:
        """Why, in one line for people."""
        text = f"{self.choice.name}: {_ms(self.expected_ns)}"
        if not self.alternatives:
            return text
        rival = min(self.alternatives, key=lambda option: option.expected_ns)
        return f"{text}; {rival.name}: {_ms(rival.expected_ns)}"


def _ms(ns: int) -> str:
    return f"{ns / NS_PER_MS:.1f} ms"


def decide_batch(
    costs: CostModel,
    geometry: KVGeometry,
    prefixes: Sequence[Prefix],
    *,
    queue_ns: int = 0,
    link_busy_ns: int = 0,
) -> list[Decision]:
    """How each of several prompts that arrived together gets its KV, in their order.

    ``queue_ns``: computing before all of them; ``link_busy_ns``: fetches before theirs. A fetch runs while other
    prompts are computed, so a prompt waits for the longer of the two::

        expected(i) = max(queue + computing of those before i, link + fetches of those before i + fetch(i))
                      + swap_in(i) + prefill(i)

    The prompt that saves most computing for its time on the link is decided first, the next one finds device and link
    busy with it, and so on. A batch of one is the plain case.
    """

    def saved_share(index: int) -> float:
        prefix = prefixes[index]
        fetch_ns = _fetch_ns(costs, geometry, prefix, prefix.remote_tokens)
        return costs.prefill_ns(prefix.remote_tokens, prefix.own_tokens) / fetch_ns if fetch_ns else 0.0

    decisions: dict[int, Decision] = {}
    for index in sorted(range(len(prefixes)), key=lambda index: (-saved_share(index), index)):
        decisions[index] = _decide(costs, geometry, prefixes[index], queue_ns, link_busy_ns)
        option = decisions[index].choice
        queue_ns += option.compute_ns
        link_busy_ns = max(link_busy_ns, option.fetch_ends_ns)
    return [decisions[index] for index in range(len(prefixes))]


def _decide(costs: CostModel, geometry: KVGeometry, prefix: Prefix, queue_ns: int, link_busy_ns: int) -> Decision:
    """A piece is moved as a whole or not at all: moving costs the same for each of its tokens, while computing costs
    more for each further one, so the best point is the end of a piece. One exception: what can be fetched while the
    request queues costs nothing, and fetching more of it may not pay."""
    begins_ns = max(link_busy_ns, prefix.fetch_after_ns)
    hidden_tokens = _hidden_tokens(costs, geometry, prefix, queue_ns - begins_ns)
    options: list[ReuseOption] = []
    for swapped, fetched in (
        (0, 0),
        (prefix.dram_tokens, 0),
        (prefix.dram_tokens, hidden_tokens),
        (prefix.dram_tokens, prefix.remote_tokens),
    ):
        moved = _trimmed(
            ((Way.REUSE, prefix.hbm_tokens), (Way.SWAP_IN, swapped), (Way.FETCH, fetched)),
            prefix.prompt_tokens - 1,  # the last token's logits are always computed
        )
        if options and moved == options[-1].ways[:-1]:
            continue
        tokens_by = dict(moved)
        context = sum(tokens_by.values())
        fetched = tokens_by.get(Way.FETCH, 0)
        fetch_ends_ns = begins_ns + _fetch_ns(costs, geometry, prefix, fetched) if fetched else 0
        options.append(
            ReuseOption(
                (*moved, (Way.RECOMPUTE, prefix.prompt_tokens - context)),
                wait_ns=max(queue_ns, fetch_ends_ns),
                swap_ns=_kv_ns(costs.swap_in, geometry, tokens_by.get(Way.SWAP_IN, 0)),
                prefill_ns=costs.prefill_ns(prefix.prompt_tokens - context, context),
                fetch_ends_ns=fetch_ends_ns,
            )
        )
    best = min(options, key=lambda option: option.expected_ns)
    return Decision(best, tuple(option for option in options if option is not best), queue_ns)


def _kv_ns(curve: CopyCurve, geometry: KVGeometry, tokens: int) -> int:
    return curve.kv_ns(tokens, geometry.block_tokens, geometry.token_bytes)


def _fetch_ns(costs: CostModel, geometry: KVGeometry, prefix: Prefix, tokens: int) -> int:
    """The first ``tokens`` of ``prefix.remote_tokens``. Those on a disk may be any of them: as many as there can be."""
    disk = prefix.disk or costs.disk
    read_ns = _kv_ns(disk, geometry, min(tokens, prefix.disk_tokens))
    moved = max(0, tokens - prefix.present_tokens) + ceil_div(prefix.state_bytes, geometry.token_bytes)
    return _kv_ns(prefix.link or costs.link_curve(prefix.same_host), geometry, moved) + read_ns


def _hidden_tokens(costs: CostModel, geometry: KVGeometry, prefix: Prefix, free_ns: int) -> int:
    """How many of the remote tokens can be fetched within ``free_ns``: whole blocks, or all. In the middle of them
    there need be no state to go on from."""
    if prefix.state_bytes:
        tokens = prefix.remote_tokens
        return tokens if tokens and _fetch_ns(costs, geometry, prefix, tokens) <= free_ns else 0
    link, tokens = prefix.link or costs.link_curve(prefix.same_host), prefix.remote_tokens
    block_ns, left_ns = link.piece_ns + link.byte_ns * geometry.block_bytes, free_ns - link.start_ns
    if prefix.disk_tokens:
        disk = prefix.disk or costs.disk
        block_ns, left_ns = block_ns + disk.piece_ns + disk.byte_ns * geometry.block_bytes, left_ns - disk.start_ns
    if left_ns <= 0:
        return 0
    if ceil_div(tokens, geometry.block_tokens) * block_ns <= left_ns:
        return tokens
    return int(left_ns / block_ns) * geometry.block_tokens


def _trimmed(pieces: Sequence[tuple[Way, int]], limit: int) -> tuple[tuple[Way, int], ...]:
    """``pieces`` without the empty ones, cut off after ``limit`` tokens."""
    trimmed: list[tuple[Way, int]] = []
    for way, tokens in pieces:
        tokens = min(tokens, limit)
        if tokens > 0:
            trimmed.append((way, tokens))
            limit -= tokens
    return tuple(trimmed)


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """What to ask another instance for."""

    tokens: int
    """Tokens to fetch behind the own prefix, in whole blocks. 0: computing is expected to be quicker."""
    wait_ns: int
    """How long an answer is worth waiting for."""
    reason: str
    """Why, in one line for people."""
    link_ns: int = 0
    """How long the fetch is expected to keep the link busy."""


def plan_fetches(
    costs: CostModel,
    geometry: KVGeometry,
    prefixes: Sequence[Prefix],
    *,
    queue_ns: int,
    waits_max_ns: Sequence[int],
    link_busy_ns: int = 0,
) -> list[FetchChoice]:
    """How much of each ``remote_tokens`` to fetch, and how long to wait for it, at most ``waits_max_ns``.

    The wait is at most the time that computing the tokens would take, behind the work that is before them anyway: so a
    holder that never answers at most doubles the time to the first token. A disk that stands still costs less: a fetch
    that reads one is waited for as long as other work takes, and ``_DISK_PATIENCE`` times as long as is expected.
    """
    choices = []
    decisions = decide_batch(costs, geometry, prefixes, queue_ns=queue_ns, link_busy_ns=link_busy_ns)
    for prefix, decision, wait_max_ns in zip(prefixes, decisions, waits_max_ns, strict=True):
        tokens = decision.tokens_of(Way.FETCH)
        if prefix.prompt_tokens - 1 - prefix.own_tokens <= tokens < prefix.remote_tokens:
            tokens += 1  # the last token is computed anyway, but its block may be fetched whole
        tokens = tokens // geometry.block_tokens * geometry.block_tokens
        if not tokens:
            choices.append(FetchChoice(0, 0, decision.reason))
            continue
        wait_ns = decision.queue_ns + costs.prefill_ns(tokens, prefix.own_tokens)
        if prefix.disk_tokens:
            wait_ns = min(wait_ns, decision.queue_ns + _DISK_PATIENCE * decision.choice.fetch_ends_ns)
        link_ns = _fetch_ns(costs, geometry, prefix, tokens)
        choices.append(FetchChoice(tokens, max(1, min(wait_max_ns, wait_ns)), decision.reason, link_ns))
    return choices
