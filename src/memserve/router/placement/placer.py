"""From thousands of instances to the few that a policy looks at, and to a decision.

Everything per instance is done on arrays, in one native pass for each role. What remains are, depending on the policy:
the instance with the least work, the one with the longest prefix, the one with the longest prefix that is not
overloaded, and those that know the session; for ``cost`` the pair that costs least, for ``best-fit`` the instances with
the least room left over. Every policy would choose alike among all instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from memserve import _core
from memserve.base.config import ClusterConfig
from memserve.base.types import Caching, KVGeometry, Role, Tier, TransferMode
from memserve.protocol.peers import Holder
from memserve.router.admission.needs import Team
from memserve.router.members.loads import ROLE_CODE, Ints, Work, roles_for, sides_of
from memserve.router.members.registry import Member, MemberState
from memserve.router.placement.candidates import (
    IN_BLOCKS,
    OVERLOAD_FACTOR,
    OVERLOAD_TOKENS,
    Ask,
    Candidate,
    Holding,
    Route,
    TransferChoice,
)
from memserve.router.placement.prefix_directory import IDENTITY_BYTES, Matches, tiers_of
from memserve.router.placement.routing import DECODE_WINDOW, policy_named
from memserve.router.placement.transfer_choice import choose_transfer, handoff_of
from memserve.router.requests.requests import Parts, RequestState
from memserve.router.requests.sessions import MemberTables, NamedPrefixes, Sessions

ALL_OF = 6
"""Up to N instances of a role are all looked at; of more, the best in each respect."""
_IDLEST, _LONGEST, _LONGEST_FAIR = range(3)
_RESPECTS = {
    "least-load": (_IDLEST,),
    "session": (_IDLEST,),
    "prompt-tree": (_IDLEST, _LONGEST, _LONGEST_FAIR),
    "affinity": (_IDLEST, _LONGEST_FAIR),
    "best-fit": (_IDLEST,),
}
"""What of ``_core.shortlist`` a policy may choose, or compares with. ``cost`` goes by ``_core.cheapest``; for
``best-fit`` the list is made of instances that fit equally well."""
_ANY_RESPECT = (_IDLEST, _LONGEST, _LONGEST_FAIR)
"""For policies of other distributions."""
SPARE_SHARE = 5
"""An instance to which requests migrate from a full one has one Nth of its memory left behind that."""
HOLDERS_MAX = 3
"""Peers named to the instance for fetching from."""


_WHOLE_BLOCKS = (None, TransferMode.BY_REQUEST_AGG)
"""Modes of which a pair of instances is expected to move whole blocks; ``auto`` (None) is no slower."""
_NO_ROLE = -2
"""A code that no role has."""
_NO_NUMBERS: Ints = np.zeros(0, np.int64)

Most = tuple[int, int, int]
"""Number, blocks, those of them in the member's lower tier alone
(:func:`memserve.router.placement.prefix_directory.tiers_of`)."""


class Placement(NamedTuple):
    """Which instances run a request."""

    route: Route
    first: Member
    decode_at: Member | None
    holders: tuple[Holder, ...]
    prompt_tokens: int
    """To be computed or reused."""
    parts: Parts = ()
    """Of a sequence that is shared; ``first`` has the first of them. Empty: ``first`` has all of it."""
    transfer: TransferChoice = IN_BLOCKS
    """Of what ``decode_at`` lacks."""
    striped: bool = False
    """``parts`` are stripes, computed at once; ``first`` has the last of them."""

    @property
    def members(self) -> list[Member]:
        """All that compute, in the order of their turns; of stripes, the one that decodes first."""
        if self.striped:
            return list({id(part.member): part.member for part in reversed(self.parts)}.values())
        if self.parts:
            return [part.member for part in self.parts]
        return [self.first] if self.decode_at is None else [self.first, self.decode_at]

    def work_by_member(self, width: int) -> tuple[tuple[Member, Work], ...]:
        """The prompt's first, of each that computes some of it, then that of decoding ``width`` sequences."""
        decoding = Work(0, width, width * self.prompt_tokens)
        if self.striped:
            return *((member, self._stripes_of(member)) for member in self.members), (self.first, decoding)
        uncached = max(1, self.prompt_tokens - self.route.first.matched_tokens)
        return (self.first, Work(prefill_tokens=uncached)), (self.decode_at or self.first, decoding)

    def _stripes_of(self, member: Member) -> Work:
        """The tokens that it computes, and beside the runner's, which count as decoding, those that it keeps."""
        own = [part for part in self.parts if part.member is member]
        kept_tokens = 0 if member is self.first else own[-1].end
        return Work(sum([part.end - part.first for part in own]), 0, kept_tokens)


class Placer:
    """Decides; changes nothing."""

    def __init__(self, config: ClusterConfig, tables: MemberTables, sessions: Sessions, handles: NamedPrefixes) -> None:
        self._config, self._memory = config, tables.memory
        self._decide = policy_named(config.policy)
        self._registry, self._trees, self._loads = tables.registry, tables.trees, tables.loads
        self._sessions, self._named_prefixes = sessions, handles
        self._sized: KVGeometry | None = None
        self._token_bytes = 0  # of ``_sized``

    def choose_placement(self, req: RequestState) -> Placement | None:
        """Which instances run ``req``; ``None``: no untried instance takes requests and has room for the prompt.

        A request that goes on needs room for what was generated, too; an instance without that room can only end it.
        """
        prompt_tokens = max(1, len(req.request.prompt))
        emitted_tokens = max(len(tokens) for tokens in req.emitted)
        sides = self._usable_sides(req, prompt_tokens + emitted_tokens)
        if not sides and emitted_tokens:
            sides = self._usable_sides(req, prompt_tokens)
        if not sides:
            return None
        identities = self.prompt_identities(req)
        behind = self._registry.behind_kv
        if behind.most_blocks:  # nothing is to be had behind the last token, which is always computed
            identities = identities[: (prompt_tokens - 1) // self._block_tokens() * IDENTITY_BYTES]
        matches = self._trees.match_prompt(identities, len(self._loads), behind=behind)
        prompt_tokens += emitted_tokens
        most = self._longest_holders(matches)
        ask = self._build_ask(req, prompt_tokens, most)
        ask, (first_of, *decoders) = self._candidates_by_side(ask, sides, matches)
        decided = self._decide(ask, first_of, decoders[0] if decoders else ())
        first = self._registry.member_by_number(decided.first.number)
        decode_at = decided.decode_at and self._registry.member_by_number(decided.decode_at.number)
        matched_tokens = decided.first.matched_tokens
        fetches = first.info.caching and first.shares_kv
        holders = self._fetch_holders(first, matched_tokens, most, identities) if fetches else ()
        transfer = self._choose_transfer(ask, decided, first)
        return Placement(decided, first, decode_at or None, holders, prompt_tokens, transfer=transfer)

    def _choose_transfer(self, ask: Ask, decided: Route, first: Member) -> TransferChoice:
        mode, geometry = self._config.transfer.mode, self._registry.geometry
        if mode is not None:
            return TransferChoice(mode)
        if decided.decode_at is None or geometry is None:
            return IN_BLOCKS
        handoff = handoff_of(ask, decided.first, decided.decode_at, geometry.num_layers, first.info.step_tokens)
        return choose_transfer(handoff, reports_layers=first.info.reports_layers)

    def choose_target(self, req: RequestState, source: Member, *, idle: bool = False) -> Member | None:
        """Where a request that ``source`` decodes may go on: of the instances that decode and have room for all of it
        the one with the least to do. ``idle``: of those where none waits. None: there is none."""
        tokens = len(req.request.prompt) + max(len(emitted) for emitted in req.emitted)
        sides, loads, block_tokens = self._usable_sides(req, tokens), self._loads, self._block_tokens()
        if not sides:
            return None
        numbers = np.concatenate([_NO_NUMBERS, *(numbers for role, numbers in sides[-1] if role.shares_kv)])
        spare = loads.room_tokens(numbers, block_tokens) - tokens
        # nor one where it would end earlier
        length = min(len(req.request.prompt) + req.request.stop.max_tokens, loads.context_limit[source.number])
        fits = (spare >= block_tokens) & (loads.context_limit[numbers] >= length) & (numbers != source.number)
        for index in np.lexsort((numbers, loads.work_tokens(numbers))).tolist():
            member = self._registry.member_by_number(int(numbers[index]))
            is_idle = _stays_idle(member, int(spare[index]) // block_tokens)
            if fits[index] and (is_idle or not idle) and self._memory.has_room_at(req, member):
                return member
        return None

    def _usable_sides(self, req: RequestState, prompt_tokens: int) -> list[Team]:
        """Instances that may compute the prompt, and those that may decode where others do that."""
        narrows = req.avoid or self._memory.is_counting or (req.request.needs_instance and self._loads.has_engines)
        if not narrows and prompt_tokens < self._loads.context_limit_min:
            return self._loads.sides  # each of them may
        roles = roles_for(req.request)
        able = {role: numbers for role in roles if len(numbers := self._usable_numbers(req, role, prompt_tokens))}
        return sides_of(able)

    def _usable_numbers(self, req: RequestState, role: Role, prompt_tokens: int) -> Ints:
        """Numbers of the instances that ``req`` may be dispatched to."""
        loads = self._loads
        numbers = loads.open_numbers(role)
        if not len(numbers):
            return numbers
        if prompt_tokens >= loads.context_limit_min:
            numbers = numbers[loads.context_limit[numbers] > prompt_tokens]
        if req.avoid:
            tried = [member.number for peer in req.avoid if (member := self._registry.get(peer)) is not None]
            numbers = numbers[~np.isin(numbers, tried)]
        return self._memory.filter_by_room(req, role, numbers)

    def prompt_identities(self, req: RequestState) -> bytes:
        """Identities of the whole blocks of the prompt, computed when they are needed first: before any member has
        joined, their model is not known."""
        if req.identities is None:
            request, geometry = req.request, self._registry.geometry
            if self._config.caching is Caching.OFF or not request.use_cache or geometry is None:
                return b""
            namespace = self._registry.namespace
            req.identities = self._trees.prompt_identities(
                request.isolation, namespace, request.prompt, geometry.block_tokens
            )
        return req.identities

    def answer_identities(self, req: RequestState, tokens: Sequence[int]) -> bytes:
        """Identities of the blocks behind the prompt's whole ones that an answer of ``tokens`` has filled."""
        request, prompt_blocks = req.request, req.identities or b""
        whole = len(request.prompt) + len(tokens)
        if not tokens or whole // self._block_tokens() == len(request.prompt) // self._block_tokens():
            return b""
        text = np.concatenate((request.prompt, np.array(tokens, np.int32)))
        namespace = self._registry.namespace
        return self._trees.prompt_identities(request.isolation, namespace, text, self._block_tokens())[
            len(prompt_blocks) :
        ]

    def _block_tokens(self) -> int:
        geometry = self._registry.geometry
        return geometry.block_tokens if geometry is not None else 1

    def _bytes_of_token(self, geometry: KVGeometry | None) -> int:
        if geometry is not self._sized:  # computed once for each model, not for each request
            self._sized, self._token_bytes = geometry, geometry.token_bytes if geometry is not None else 0
        return self._token_bytes

    def _build_ask(self, req: RequestState, prompt_tokens: int, most: list[Most]) -> Ask:
        request, geometry = req.request, self._registry.geometry
        favourites = self._sessions.member_numbers(request.tenant, request.session)
        pinned = self._named_prefixes.place_of(request.tenant, request.session)
        if pinned is not None and pinned.number not in favourites:
            favourites = (pinned.number, *favourites)
        return Ask(
            prompt_tokens,
            request.stop.max_tokens,
            max(request.n, request.beam_width),
            self._bytes_of_token(geometry),
            favourites,
            self._best_holding(most),
            self._block_tokens(),
            1 if geometry is None or self._config.transfer.mode in _WHOLE_BLOCKS else geometry.num_layers,
            self._registry.behind_kv.most_blocks,
        )

    def _longest_holders(self, matches: Matches) -> list[Most]:
        """Instances and stores that have most of the prompt and may be asked for it: decode instances lend theirs in
        PD-Caching-3 only (MemServe 5.1)."""
        if not matches.holders:
            return []
        without = _NO_ROLE if self._config.caching is Caching.PD_CACHING_3 else ROLE_CODE[Role.DECODE]
        columns = matches.columns
        if self._loads.has_engines:  # what they hold is theirs alone
            columns = np.where(self._loads.role == ROLE_CODE[Role.ENGINE], 0, columns)
        return _core.most_of(columns, self._loads.role, without, ROLE_CODE[Role.STORE], HOLDERS_MAX)

    def _best_holding(self, most: list[Most]) -> tuple[Holding, ...]:
        """The holder of most of the prompt. No other matters: an instance that has as much itself fetches nothing."""
        return tuple(self._make_holding(*row) for row in most[:1])

    def _make_holding(self, number: int, blocks: int, lower: int) -> Holding:
        member, block_tokens = self._registry.member_by_number(number), self._block_tokens()
        on_disk = lower * block_tokens if member.is_store else 0
        return Holding(number, blocks * block_tokens, member.info.host_id, on_disk, member.costs.disk)

    def _candidates_by_side(self, ask: Ask, sides: list[Team], matches: Matches) -> tuple[Ask, list[list[Candidate]]]:
        """Those worth a look, of each team, and ``ask`` with what had to be found among all."""
        if self._config.policy == "cost":
            return self._cheapest_pair(ask, sides, matches)
        respects, loads = _RESPECTS.get(self._config.policy, _ANY_RESPECT), self._loads
        overload = OVERLOAD_FACTOR, OVERLOAD_TOKENS
        candidates = []
        for side in sides:
            numbers = [numbers for _, numbers in side]
            if self._config.policy == "best-fit":
                numbers = self._best_fitting_numbers(numbers, ask)
            rows = _core.shortlist(
                numbers, loads.tables, loads.room_blocks, matches.columns, ask.favourites, respects, overload, ALL_OF
            )
            candidates.append([self._make_candidate(ask.block_tokens, *row) for row in rows])
        return ask, candidates

    def _best_fitting_numbers(self, numbers: list[Ints], ask: Ask) -> list[Ints]:
        """Those with the least room left over; the most room where none has enough for the prompt."""
        rooms = [self._loads.room_tokens(group, ask.block_tokens) - ask.prompt_tokens for group in numbers]
        every = np.concatenate(rooms)
        fitting = every[every >= 0]
        best = fitting.min() if len(fitting) else every.max()
        return [group[room == best] for group, room in zip(numbers, rooms, strict=True) if (room == best).any()]

    def _cheapest_pair(self, ask: Ask, sides: list[Team], matches: Matches) -> tuple[Ask, list[list[Candidate]]]:
        """The best pair, or the best one that does all of it."""
        loads, (first, *decoder_sides) = self._loads, sides
        holding = ask.holdings[0] if ask.holdings else Holding(-1, 0)
        *rows, least_lacking_ns = _core.cheapest(
            [(numbers, role is not Role.PREFILL or not decoder_sides) for role, numbers in first],
            [numbers for side in decoder_sides for _, numbers in side],
            loads.tables, loads.room_blocks, matches.columns, loads.hosts, ask.favourites, loads.prices,
            loads.profiles,
            (
                ask.prompt_tokens, ask.max_tokens, ask.sequences, ask.token_bytes, ask.block_tokens,
                ask.handoff_pieces, ask.state_blocks,
            ),
            (holding.number, holding.tokens, holding.disk_tokens), DECODE_WINDOW,
        )  # fmt: skip
        ask = structs.replace(ask, least_lacking_ns=least_lacking_ns)
        return ask, [[self._make_candidate(ask.block_tokens, *row)] for row in rows if row is not None]

    def _make_candidate(self, block_tokens: int, number: int, *row: int) -> Candidate:
        """From a row of the core, where room and matches are in blocks."""
        prefill, sequences, context, room, waiting_tokens, matched, dram = row
        member = self._registry.member_by_number(number)
        info = member.info
        return Candidate(
            number,
            info.peer.name,
            info.role,
            info.host_id,
            prefill_tokens=prefill,
            sequences=sequences,
            context_tokens=context,
            room_tokens=room * block_tokens - waiting_tokens,  # the room of the last heartbeat is for those that ran
            matched_tokens=matched * block_tokens,
            dram_tokens=dram * block_tokens,
            costs=member.costs,
        )

    def holders_for(self, member: Member, identities: bytes, matches: Matches) -> tuple[Holder, ...]:
        """From where ``member`` may fetch more than it has of a prefix with these ``identities``."""
        matched_tokens = int(matches.blocks[member.number]) * self._block_tokens() if matches.holders else 0
        return self._fetch_holders(member, matched_tokens, self._longest_holders(matches), identities)

    def _fetch_holders(
        self, first: Member, matched_tokens: int, most: list[Most], identities: bytes
    ) -> tuple[Holder, ...]:
        """Instances and stores that have more of the prompt than ``first``: most of it first, of equal ones HBM before
        DRAM before a store's DRAM before its disks."""
        block_tokens, has_more = self._block_tokens(), self._registry.behind_kv.most_blocks
        # where more is needed than KV, one with as much may have the state or the window that ``first`` has given up
        least_tokens = matched_tokens + (0 if has_more else 1)
        holders = (
            self._make_holder(number, blocks * block_tokens, lower * block_tokens)
            for number, blocks, lower in most
            if blocks * block_tokens >= least_tokens and number != first.number
        )
        if not self._trees.stores.is_joint:
            return tuple(holders)
        located = (self._with_sources(holder, first, block_tokens, identities) for holder in holders)
        return tuple(holder for holder in located if holder.prefix_tokens >= max(1, least_tokens))

    def _with_sources(self, holder: Holder, first: Member, block_tokens: int, identities: bytes) -> Holder:
        """``holder``, if it stands for all stores: with the store of each block, as far as those that may be asked have
        it; without what is to come behind its KV, it has nothing."""
        member = self._registry.get(holder.peer)
        if member is None or not member.is_store:
            return holder
        stores = {
            store.number: (store.peer, bool(first.info.host_id) and store.info.host_id == first.info.host_id)
            for store in self._registry
            if store.is_store and store.state is not MemberState.REJOINING
        }
        prompt = identities[: holder.prefix_tokens // block_tokens * IDENTITY_BYTES]
        behind = self._trees.stores.names_behind(prompt, self._registry.behind_kv, block_tokens)
        peers, places, spares = self._trees.stores.choose_sources(prompt + behind, stores)
        is_whole = IDENTITY_BYTES * len(places) == len(prompt) + len(behind)
        tokens = len(places) * block_tokens if not behind else holder.prefix_tokens if is_whole else 0
        disk_tokens = min(holder.disk_tokens, tokens)
        return Holder(holder.peer, tokens, holder.tier, disk_tokens, peers, places, spares)

    def _make_holder(self, number: int, tokens: int, lower_tokens: int) -> Holder:
        member = self._registry.member_by_number(number)
        upper, lower = tiers_of(member.info.role)
        tier = lower if lower_tokens else upper
        return Holder(member.peer, tokens, tier, lower_tokens if tier is Tier.SSD else 0)


def _stays_idle(member: Member, spare_blocks: int) -> bool:
    """Whether nothing waits at ``member``, and its memory is not full where it has so many blocks left."""
    waits = member.load is None or member.load.requests_waiting
    return not waits and spare_blocks >= member.info.hbm_blocks // SPARE_SHARE
