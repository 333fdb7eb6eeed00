"""From thousands of instances to the few that a policy looks at, and to a decision (level 2).

Everything per instance is done on arrays. What remains are, for each role, the instances with the least work, those
with the longest prefix, and those best in the sum of both, which is the shape of any sensible policy: nobody else can
be better in one respect without being worse in another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memserve.cluster.handles import Handles
from memserve.cluster.jobs import Job
from memserve.cluster.loads import ROLE_CODE, Ints, LoadTable, Mask
from memserve.cluster.registry import Member, Registry
from memserve.cluster.sessions import Sessions
from memserve.cluster.trees import Matches, Trees
from memserve.config import ClusterConfig
from memserve.messages import Holder
from memserve.policy.routing import Ask, Candidate, Holding, Route, RoutingCosts, route
from memserve.types import Caching, Role, Tier

ALL_OF = 8
"""So many instances of a role are all looked at."""
BEST_OF = 3
"""Of more, so many in each respect."""
HOLDERS_MAX = 3
"""Peers named to the instance for fetching from."""


class Placement(NamedTuple):
    """Who runs a request."""

    route: Route
    first: Member
    decode_at: Member | None
    holders: tuple[Holder, ...]
    prompt_tokens: int
    """To be computed or reused."""


class Placer:
    """Decides; changes nothing."""

    __slots__ = ("_config", "_handles", "_loads", "_registry", "_sessions", "_trees", "costs")

    def __init__(
        self,
        config: ClusterConfig,
        costs: RoutingCosts,
        registry: Registry,
        trees: Trees,
        loads: LoadTable,
        sessions: Sessions,
        handles: Handles,
    ) -> None:
        self._config = config
        #: what is known of the members' machines
        self.costs = costs
        self._registry, self._trees, self._loads = registry, trees, loads
        self._sessions, self._handles = sessions, handles

    def place(self, job: Job) -> Placement | None:
        """Who runs ``job``; ``None`` = nobody takes requests that it has not tried, with room for its prompt."""
        prompt_tokens = max(1, len(job.request.prompt))
        usable = self._usable(job, prompt_tokens)
        if not usable.any():
            return None
        matches = self._trees.match(self._identities(job), len(self._loads))
        prompt_tokens += max(len(tokens) for tokens in job.emitted)
        ask = self._ask(job, prompt_tokens, matches)
        candidates = self._candidates(ask, usable, matches)
        decided = route(self._config.policy, ask, candidates, self.costs)
        if decided is None:
            return None
        first = self._registry.numbered(decided.first.number)
        decode_at = decided.decode_at and self._registry.numbered(decided.decode_at.number)
        holders = self._holders(ask, decided.first, matches) if first.info.caching else ()
        return Placement(decided, first, decode_at or None, holders, prompt_tokens)

    def longest_context(self) -> int:
        """The longest sequence that any instance which takes requests can run; 0 = there is none."""
        loads = self._loads
        able = loads.is_open & (loads.role != ROLE_CODE[Role.STORE])
        return int(loads.context_limit[able].max(initial=0))

    def _usable(self, job: Job, prompt_tokens: int) -> Mask:
        loads = self._loads
        usable: Mask = loads.is_open & (loads.context_limit > prompt_tokens) & (loads.role != ROLE_CODE[Role.STORE])
        for peer in job.avoid:
            member = self._registry.get(peer)
            if member is not None:
                usable[member.number] = False
        return usable

    def _identities(self, job: Job) -> bytes:
        """Computed when it is needed first: before any member has joined, nobody knows of what model they are."""
        if job.identities is None:
            request, geometry = job.request, self._registry.geometry
            if self._config.caching is Caching.OFF or not request.use_cache or geometry is None:
                return b""
            namespace = self._registry.namespace
            job.identities = self._trees.identities(request.tenant, namespace, request.prompt, geometry.block_tokens)
        return job.identities

    def _block_tokens(self) -> int:
        geometry = self._registry.geometry
        return geometry.block_tokens if geometry is not None else 1

    def _ask(self, job: Job, prompt_tokens: int, matches: Matches) -> Ask:
        request, geometry = job.request, self._registry.geometry
        favourites = self._sessions.numbers(request.tenant, request.session)
        pinned = self._handles.place_of(request.tenant, request.session)
        if pinned is not None and pinned.number not in favourites:
            favourites = (pinned.number, *favourites)
        return Ask(
            prompt_tokens,
            request.stop.max_tokens,
            max(request.n, request.beam_width),
            geometry.token_bytes if geometry is not None else 0,
            favourites,
            self._longest(matches),
        )

    def _longest(self, matches: Matches) -> tuple[Holding, ...]:
        """The holders of most of the prompt, those with less of it in DRAM first: one more than will be named."""
        holders = matches.holders
        score = 2 * matches.blocks[holders] - (matches.dram_blocks[holders] > 0)
        best = holders[_smallest(-score, holders, HOLDERS_MAX + 1)]
        block_tokens = self._block_tokens()
        return tuple(
            Holding(number, int(matches.blocks[number]) * block_tokens, self._registry.numbered(number).info.host_id)
            for number in best.tolist()
        )

    def _candidates(self, ask: Ask, usable: Mask, matches: Matches) -> list[Candidate]:
        loads = self._loads
        work = loads.work()
        block_tokens = self._block_tokens()
        matched = matches.blocks * block_tokens
        busy = work[0] + work[2]
        chosen: dict[int, None] = {}
        for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED):
            numbers = np.flatnonzero(usable & (loads.role == ROLE_CODE[role]))
            for number in _few(numbers, busy, matched, ask.favourites):
                chosen[number] = None
        some = np.fromiter(chosen, np.int64, len(chosen))
        room = loads.room_blocks[some] * block_tokens - loads.context_sent()[some]
        columns = np.stack((*work[:, some], room, matched[some], matches.dram_blocks[some]))
        return [
            self._candidate(number, column, block_tokens)
            for number, column in zip(chosen, columns.T.tolist(), strict=True)
        ]

    def _candidate(self, number: int, column: list[int], block_tokens: int) -> Candidate:
        prefill, sequences, context, room, matched, dram_blocks = column
        info = self._registry.numbered(number).info
        dram = dram_blocks * block_tokens
        return Candidate(
            number, info.peer.name, info.role, info.host_id, True, prefill, sequences, context, room, matched, dram
        )

    def _holders(self, ask: Ask, first: Candidate, matches: Matches) -> tuple[Holder, ...]:
        return tuple(
            Holder(
                self._registry.numbered(holding.number).peer,
                holding.tokens,
                Tier.DRAM if matches.dram_blocks[holding.number] else Tier.HBM,
            )
            for holding in ask.holdings
            if holding.number != first.number and holding.tokens > first.matched_tokens
        )[:HOLDERS_MAX]


def _smallest(score: Ints, numbers: Ints, count: int) -> Ints:
    """Positions of the ``count`` smallest scores, in order; of equal ones those with the lowest number."""
    if not len(score):
        return np.zeros(0, np.int64)
    distinct: Ints = score * (int(numbers.max()) + 1) + numbers
    if len(distinct) > count:
        best = np.argpartition(distinct, count)[:count]
        return best[np.argsort(distinct[best])]
    return np.argsort(distinct)


def _few(numbers: Ints, busy: Ints, matched: Ints, favourites: tuple[int, ...]) -> list[int]:
    """Of the instances ``numbers`` those worth a look, in order of their numbers."""
    if len(numbers) <= ALL_OF:
        kept: list[int] = numbers.tolist()
        return kept
    busy, matched = busy[numbers], matched[numbers]
    scores = (busy - matched, busy, -matched) if matched.any() else (busy,)
    best = {int(numbers[at]) for score in scores for at in _smallest(score, numbers, BEST_OF)}
    best.update(int(number) for number in favourites if number in numbers)
    return sorted(best)
