"""Which instance has KV memory for one more request, as the router counts it.

An attempt holds what it needs on the instances that work for it, from dispatch until it is over: the prompt's blocks on
a prefill instance, those of prompt and output where it is decoded. What is pinned, or may be fetched by another
instance, cannot be evicted for it (``Reservations``). Instances keep accounts of their own; the ledger here says
whether an admitted request will find room, before it is sent anywhere.

KV of a finished request is cache. By default it counts as free. With ``evictions_max`` it counts as used until a
new request evicts it (``BlockLedger``), or ``kept_ns`` have passed. With ``hold`` it is *held*
for as long as computing it again would take: a client that asks on at once finds its KV, although others wait.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from memserve.base.config import AdmissionConfig
from memserve.base.errors import check
from memserve.base.types import Admission, Request, Role
from memserve.base.units import NS_PER_S
from memserve.router.admission.ledger import BlockLedger, Need, Reservations, best_fit, block_names, required_blocks
from memserve.router.admission.needs import MemoryNeed, Team, prompt_blocks, whole_blocks
from memserve.router.members.loads import Ints, LoadTable, roles_for, sides_of
from memserve.router.members.registry import Member, Registry
from memserve.router.requests.requests import Attempt, RequestPhase, RequestState

GROWTH_SHARE = 4
"""Chats are taken to grow by one Nth with their next turn."""
HELD_NS_MIN, HELD_NS_MAX = NS_PER_S // 4, 5 * NS_PER_S
"""How long KV of a finished request is held. At least: what a client needs to ask on."""


class MemoryBudget:
    """The ledger of all instances, fed by membership, dispatches and their ends. Without memory-aware admission it
    counts nothing, and everything fits."""

    def __init__(self, config: AdmissionConfig, policy: str, registry: Registry, loads: LoadTable) -> None:
        self._config, self._takes_best_fit = config, policy == "best-fit"
        #: whether memory is looked at
        self.is_counting = config.counts_memory
        #: whether KV of finished requests is held for their clients
        self.holds = config.hold
        #: how long, for the requests that have finished since the last :meth:`expire_kept`
        self._held_ns = HELD_NS_MIN
        self._registry, self._loads = registry, loads
        self.ledger = BlockLedger()
        self.reservations = Reservations(self.ledger)
        #: for each attempt whose KV is on its way to the decode instance: the names that its blocks will have there
        self._incoming: dict[str, tuple[bytes, ...]] = {}
        #: grows whenever needs may change: instances come, go or close, prefixes are pinned or not
        self._state = 0
        #: there may be more room than when the head of the queue was last found to have none
        self.changed = True

    # -- what a request needs

    def need_of(self, req: RequestState) -> MemoryNeed:
        """What ``req`` needs now. It carries the answer until something changes."""
        basis = self._need_basis(req)
        if req.need is None or req.need.basis != basis:
            req.need = self._compute_need(req, basis)
        return req.need

    def _need_basis(self, req: RequestState) -> tuple[int, int, bool]:
        return self._state, max(len(tokens) for tokens in req.emitted), req.identities is None

    def _compute_need(self, req: RequestState, basis: tuple[int, int, bool]) -> MemoryNeed:
        request, unit, generated = req.request, self._unit_tokens(), basis[1]
        prompt = prompt_blocks(request, unit, generated)
        whole = whole_blocks(request, self._config.output_tokens_max, unit, generated)
        # An instance cuts what is generated to its room, and lets sequences of one request take turns: a request whose
        # prompt fits is never too large for its output, and needs no more than the largest instance has.
        roles, loads = roles_for(request), self._loads
        largest = {role: self.ledger.blocks_total(loads.open_numbers(role)).max(initial=0) for role in roles}
        names = block_names(self._counted_once(req.identities or b""))[:prompt]
        # a state is handed over beside the KV; where there is no room for it, the request stays where it is
        state, least = self._state_units(), min((int(most) for most in largest.values() if most), default=0)
        prompt, whole = max(prompt, min(prompt + state, least)), whole + state
        by_role = {role: max(prompt, min(whole, int(most))) for role, most in largest.items()}
        return MemoryNeed(prompt, by_role, names, self._teams_for(request, len(request.prompt)), basis)

    def _counted_once(self, identities: bytes) -> bytes:
        """Blocks that count once for all requests: every one with cache-aware admission, else those that are pinned."""
        if self._config.mode == Admission.CACHE:
            return identities
        return self.reservations.pinned_prefix(identities) if self._config.unit_tokens is None else b""

    @property
    def wants_identities(self) -> bool:
        """Whether it matters which blocks a prompt has."""
        return self.is_counting and (self._config.mode == Admission.CACHE or self.reservations.has_pins)

    def _kept_need(self, identities: bytes, tokens: int) -> Need:
        """Of the first ``tokens`` of a prefix, where they are kept, with the state behind them."""
        state = self._state_units() if tokens else 0
        if self._config.unit_tokens is not None:
            return Need(required_blocks(tokens, self._config.unit_tokens) + state)
        blocks = tokens // self._unit_tokens()
        names = block_names(identities)[:blocks]
        return Need(blocks - len(names) + state, names)

    def _state_units(self) -> int:
        """Of a recurrent state that cannot be given up: handed over, lent or pinned."""
        geometry = self._registry.geometry
        state_tokens = self._registry.behind_kv.most_blocks * (geometry.block_tokens if geometry is not None else 1)
        return required_blocks(state_tokens, self._unit_tokens())

    def _unit_tokens(self) -> int:
        geometry = self._registry.geometry
        return self._config.unit_tokens or (geometry.block_tokens if geometry is not None else 1)

    def _teams_for(self, request: Request, prompt_tokens: int) -> list[Team]:
        """Open members that compute such prompts, and those that decode where others do that. A member takes part if
        the prompt fits into its context, as in placement."""
        able = {}
        for role in roles_for(request):
            numbers = self._loads.open_numbers(role)
            numbers = numbers[self._loads.context_limit[numbers] > prompt_tokens]
            if len(numbers):
                able[role] = numbers
        return sides_of(able)

    # -- whether there is room

    def fits(self, req: RequestState, *, gives_up_held: bool = False, leaves_growth: bool = False) -> bool:
        """Whether of each team some instance has room for all of ``req``; evicts for it where that is allowed. Also
        true where there is no instance: placement then waits for one. ``gives_up_held``: KV that is held for others may
        go. ``leaves_growth``: a request that goes on from nothing leaves room for the others' next turns."""
        if not self.is_counting:
            return True
        if leaves_growth and self.holds and not self.continues_prefix(req):
            return all(self._leaves_growth(needs) for needs in self.need_of(req).by_team())
        limit = sys.maxsize if gives_up_held and self.holds else self._config.evictions_max
        return all(self._has_room(needs, limit) for needs in self.need_of(req).by_team())

    def fits_without_pins(self, req: RequestState) -> bool:
        """:meth:`fits` if all pins were dropped, and nothing were held for others."""
        with self.reservations.without_pins():
            return self.fits(req, gives_up_held=True)

    def _has_room(self, needs: list[tuple[Need, Ints]], limit: int | None) -> bool:
        if any((self.ledger.blocks_left(numbers, need) >= 0).any() for need, numbers in needs):
            return True
        if self.holds and any(self.ledger.inherit_blocks(need, numbers.tolist()) for need, numbers in needs):
            return True
        return any(limit and self.ledger.evict_for(need, numbers.tolist(), limit) for need, numbers in needs)

    def _leaves_growth(self, needs: list[tuple[Need, Ints]]) -> bool:
        for need, numbers in needs:
            for number, blocks_left in zip(
                numbers.tolist(), self.ledger.blocks_left(numbers, need).tolist(), strict=True
            ):
                if blocks_left >= self.ledger.blocks_inactive(number) // GROWTH_SHARE:
                    return True
        return False

    def continues_prefix(self, req: RequestState) -> bool:
        """Whether an instance holds KV of most of the prompt of ``req``: of what it continues, or shares."""
        need = self.need_of(req)
        numbers = [number for team in need.teams for _, role_numbers in team for number in role_numbers.tolist()]
        return any(2 * self.ledger.count_known(number, need.names) > need.prompt for number in numbers)

    def hold_for_request(self, req: RequestState, until_ns: int) -> None:
        """What ``req``, which waits, goes on from is held until then."""
        if self.holds:
            for need, numbers in (pair for team in self.need_of(req).by_team() for pair in team):
                self.ledger.extend_expiry(need, numbers.tolist(), until_ns)

    def on_admitted(self, req: RequestState) -> None:
        """``req`` is about to be placed: what it goes on from is its own."""
        if self.holds:
            for need, numbers in (pair for team in self.need_of(req).by_team() for pair in team):
                self.ledger.free_continued(need, numbers.tolist())

    def expire_kept(self, now_ns: int) -> None:
        """Count no longer what was kept for ``kept_ns``, or held for long enough."""
        if self.ledger.expire_retired(now_ns, self._held_ns if self.holds else self._config.kept_ns):
            self.changed = True
        self._held_ns = HELD_NS_MIN

    def room_in_ns(self, req: RequestState, now_ns: int) -> int:
        """How long until ``req`` fits but for pins, as kept blocks expire, if no other request comes; ``kept_ns`` at
        most."""
        at_most_ns = now_ns + self._config.kept_ns
        until_ns = now_ns
        with self.reservations.without_pins():
            for needs in self.need_of(req).by_team():
                ends = [self.ledger.room_at_ns(need, node) for need, numbers in needs for node in numbers.tolist()]
                until_ns = max(until_ns, min([end for end in ends if end is not None], default=at_most_ns))
        return until_ns - now_ns

    def never_fits(self, req: RequestState) -> str | None:
        """Why ``req`` could not run even on empty instances; ``None``: it could."""
        if not self.is_counting:
            return None
        need = self.need_of(req)
        if not need.teams:
            need = need._replace(teams=self._teams_for(req.request, 0))
        for team in need.by_team():
            needs = [role_need.total for role_need, _ in team]
            totals = [int(self.ledger.blocks_total(numbers).max()) for _, numbers in team]
            if all(blocks > total for blocks, total in zip(needs, totals, strict=True)):
                return f"it needs {min(needs)} blocks of KV memory, no instance has more than {max(totals)}"
        return None

    def filter_by_room(self, req: RequestState, role: Role, numbers: Ints) -> Ints:
        """Those of ``numbers`` that have room, be it without pins; by policy ``best-fit`` the one with the least left
        over. All of them where none has room: an admitted request goes somewhere."""
        if not self.is_counting or not len(numbers):
            return numbers
        need = self.need_of(req).before_handover(role)
        blocks_left = self.ledger.blocks_left(numbers, need)
        if not (blocks_left >= 0).any():
            with self.reservations.without_pins():
                blocks_left = self.ledger.blocks_left(numbers, need)
        if not (blocks_left >= 0).any():
            return numbers
        return (
            best_fit(numbers, blocks_left, self._loads.work_tokens(numbers))
            if self._takes_best_fit
            else numbers[blocks_left >= 0]
        )

    # -- attempts

    def has_room_at(self, req: RequestState, member: Member) -> bool:
        """Whether ``member`` has room for all of ``req``."""
        if not self.is_counting:
            return True
        need = self.need_of(req).need_at(member.info.role, decodes=True)
        return bool(self.ledger.blocks_left(np.array([member.number], np.int64), need)[0] >= 0)

    def reserve_for_attempt(self, req: RequestState, attempt: Attempt) -> list[str]:
        """``attempt`` holds what it needs from now on. Returns the pins that are dropped for it: there is no other
        room."""
        if not self.is_counting:
            return []
        need, dropped = self.need_of(req), []
        for member in attempt.involved:
            decodes = attempt.decode_at is None or member is attempt.decode_at
            member_need = need.need_at(member.info.role, decodes=decodes)
            if member is attempt.decode_at:
                member_need = self._need_on_arrival(attempt, member, member_need)
            dropped += self._hold_blocks(attempt, member, member_need)
        for holder in attempt.holders:
            exporter = self._registry.get(holder.peer)
            if exporter is not None and not exporter.is_store:
                prefix = self._kept_need(req.identities or b"", holder.prefix_tokens)
                self.reservations.export_blocks(attempt.attempt_id, exporter.number, prefix)
        return dropped

    def _hold_blocks(self, attempt: Attempt, member: Member, need: Need) -> list[str]:
        if self.ledger.need_of(member.number, attempt.attempt_id) is not None:
            self.ledger.free_blocks(attempt.attempt_id, member.number)  # it had ended here, and is taken up again
        self.ledger.allocate_blocks(attempt.attempt_id, member.number, need)
        dropped = self.reservations.evict_pins(member.number)
        self._state += bool(dropped)
        return dropped

    def reserve_at_target(self, req: RequestState, attempt: Attempt, target: Member) -> list[str]:
        """``attempt`` is to migrate to ``target``, and holds there what it needs. Returns the pins that are dropped."""
        if not self.is_counting:
            return []
        need = self.need_of(req).need_at(target.info.role, decodes=True)
        return self._hold_blocks(attempt, target, self._need_on_arrival(attempt, target, need))

    def free_at_target(self, attempt: Attempt, target: Member) -> None:
        """It does not migrate there."""
        if self.is_counting:
            self.changed = True
            self.ledger.free_blocks(attempt.attempt_id, target.number)
            self._incoming.pop(attempt.attempt_id, None)

    def _need_on_arrival(self, attempt: Attempt, member: Member, need: Need) -> Need:
        """``need`` where blocks that are on their way have no names yet: two requests that arrive with one prefix bring
        it twice. Only blocks that are there when the transfer begins are shared."""
        known_blocks = self.ledger.count_known(member.number, need.names)
        if member.info.caching and known_blocks < len(need.names):
            self._incoming[attempt.attempt_id] = need.names
        return Need(need.total - known_blocks, need.names[:known_blocks])

    def _on_blocks_arrived(self, attempt: Attempt, member: Member) -> None:
        """Its blocks are in the decode instance's index; those that another request has brought meanwhile are there
        twice."""
        names = self._incoming.pop(attempt.attempt_id, ())
        had = self.ledger.need_of(member.number, attempt.attempt_id)
        if names and had is not None:
            twice = self.ledger.count_known(member.number, names) - len(had.names)
            self.ledger.free_blocks(attempt.attempt_id, member.number)
            need = Need(had.total - len(names) + twice, names)
            self.ledger.allocate_blocks(attempt.attempt_id, member.number, need)

    def on_prefilled(self, attempt: Attempt) -> None:
        """The prompt of ``attempt`` is computed: it fetches nothing any more."""
        if self.reservations.end_exports(attempt.attempt_id):
            self.changed = True

    def on_handed_over(self, attempt: Attempt) -> None:
        """The decode instance has all KV of ``attempt``; the prefill instance, still involved, is about to be done."""
        if self.is_counting:
            self.changed = True
            if attempt.decode_at is not None:
                self._on_blocks_arrived(attempt, attempt.decode_at)
            self._free_attempt(attempt, attempt.first, keeps=not self.holds)

    def release_attempt(self, attempt: Attempt, *, completed: bool) -> int:
        """``attempt`` is over. ``completed``: the KV that it has computed stays in the cache. Returns for how long it
        is held for the client; 0: it is not."""
        if self.is_counting:
            self.changed = True
            for member in attempt.involved:
                self._free_attempt(attempt, member, keeps=completed)
            self.reservations.end_exports(attempt.attempt_id)
            self._incoming.pop(attempt.attempt_id, None)
        return self._held_ns if self.holds and completed else 0

    def _free_attempt(self, attempt: Attempt, member: Member, *, keeps: bool) -> None:
        if keeps and member.info.caching and (self.holds or self._config.evictions_max is not None):
            need = self.ledger.need_of(member.number, attempt.attempt_id)
            if self.holds and need is not None:
                again_ns = member.costs.prefill_ns(need.total * self._unit_tokens())
                self._held_ns = min(max(self._held_ns, again_ns), HELD_NS_MAX)
            self.ledger.retire_request(attempt.attempt_id, member.number, attempt.number)
        else:
            self.ledger.free_blocks(attempt.attempt_id, member.number)

    # -- pins

    def may_pin(self, name: str, member: Member, identities: bytes, tokens: int) -> bool:
        """Whether the first ``tokens`` of a prefix may be pinned at ``member``, beside admitted requests; then they
        count. ``identities``: of its whole blocks."""
        self.invalidate_needs()
        need = self._kept_need(identities, tokens)
        return not self.is_counting or self.reservations.may_pin(name, member.number, need)

    def on_pinned(self, name: str, member: Member, identities: bytes, tokens: int) -> None:
        """The first ``tokens`` of a prefix are pinned at ``member`` under ``name``, and nothing elsewhere."""
        if self.is_counting:
            self.invalidate_needs()
            self.reservations.pin(name, member.number, self._kept_need(identities, tokens))

    def on_unpinned(self, name: str) -> None:
        """Nothing is pinned under ``name``."""
        self.invalidate_needs()
        self.reservations.unpin(name)

    # -- members

    def add_instance(self, member: Member) -> None:
        """A new instance, empty as far as is known."""
        self.invalidate_needs()
        if self.is_counting:
            info = member.info
            self.ledger.add_node(member.number, info.hbm_blocks * info.geometry.block_tokens // self._unit_tokens())

    def restore_used(self, member: Member, used: Sequence[tuple[int, int]], now_ns: int) -> None:
        """KV that requests of the last router used less than ``kept_ns`` ago still counts, and is evicted in the order
        of its last use. ``used``: times and numbers of blocks, least recently used first."""
        if not self.is_counting or self._config.evictions_max is None or not member.info.caching:
            return
        unit, block_tokens = self._unit_tokens(), member.info.geometry.block_tokens
        for index, (used_ns, blocks) in enumerate(used):
            used_ns = min(used_ns, now_ns)  # the last router's clock may have been ahead
            until_ns, age = used_ns + self._config.kept_ns, used_ns - now_ns - 1  # older than every attempt
            if until_ns > now_ns:
                name, blocks = f"{member.name} recovered {index:09}", required_blocks(blocks * block_tokens, unit)
                self.ledger.restore_retired(name, member.number, blocks, age, until_ns)

    def remove_instance(self, member: Member) -> None:
        """An instance is gone; attempts there must be over."""
        self.invalidate_needs()
        if self.is_counting:
            self.reservations.remove_node(member.number)
            self.ledger.remove_node(member.number)

    def invalidate_needs(self) -> None:
        """Needs may have changed, and there may be more room: pins changed, or an instance takes requests from now on,
        or takes none any more and others do its work."""
        self._state += 1
        self.changed = True

    def check_invariants(self, requests: Mapping[str, RequestState]) -> None:
        """Raise :class:`InvariantError` unless exactly the live attempts, kept blocks and reservations hold memory."""
        if not self.is_counting:
            return
        running = [(req, req.attempt) for req in requests.values() if req.attempt is not None]
        self.ledger.check_invariants()
        self.reservations.check_invariants({a.attempt_id for r, a in running if r.phase is RequestPhase.PREFILLING})
        for member in self._registry:
            active = {attempt.attempt_id for _, attempt in running if member in attempt.involved}
            inactive = set(self.ledger.inactive_requests(member.number))
            holders = set(self.ledger.holders_of(member.number))
            check(not active & inactive, "of {}, {} may be evicted", active, inactive)
            reserved = self.reservations.holders_of(member.number)
            check(
                holders == active | inactive | reserved,
                "{}: {} hold memory, not {}, {}, {}",
                member,
                holders,
                active,
                inactive,
                reserved,
            )
        for req, _ in running:
            need = req.need
            if need is not None and need.basis == self._need_basis(req):
                check(need[:3] == self._compute_need(req, need.basis)[:3], f"{req.request_id} carries a wrong need")
