"""Running requests that go on at another instance, with their KV: when one drains.

::

    member drains    each of its requests, a few at a time: choose a target, reserve its memory --Migrate--> source
    HandedOver       of the target: the source no longer matters
    MigrationRefused of the source: it goes on there, and is asked again later

Until ``HandedOver`` the request runs at the source. So the target's death costs nothing but the try, and the source's
is one of any instance: the request goes on from the tokens that its client has.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.base.errors import check
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.protocol.messages import Migrate, MigrationRefused, QueryAttempts
from memserve.router.members.loads import Work
from memserve.router.members.registry import Member, MemberState
from memserve.router.parts import RouterParts
from memserve.router.requests.requests import Attempt, RequestPhase, RequestState, RequestTable

MIGRATIONS_MAX = 4
"""Of one source at once: each is done sooner, and the target's steps are not crowded."""
_REFUSALS_MAX = 8
"""A request that its instance keeps so often stays there to its end."""
_LOOK_AGAIN_NS = 200 * NS_PER_MS
"""While a member drains: requests come to it that were on their way, or begin to decode, and targets get room."""
_REPEAT_NS = 5 * NS_PER_S
"""Without word of a migration it is asked for again: the message may be lost."""


_WAITS_NS = NS_PER_S
"""Of requests under pressure, those that have waited for so long go first: nothing of them is computed."""
_FULL_SHARE = 20
"""An instance is under pressure where it has less than one Nth of its memory left."""
_LEFT_TOKENS = 64
"""An answer with fewer tokens to come stays: it is done soon."""


@dataclass(slots=True)
class _Migration:
    """Of one attempt, under way."""

    req: RequestState
    attempt: Attempt
    source: Member
    target: Member
    since_ns: int


class Migrations:
    """All requests that are to change their instance."""

    def __init__(self, parts: RouterParts, requests: RequestTable) -> None:
        self._requests, self._placer, self._admission = requests, parts.placer, parts.admission
        self._registry, self._loads = parts.tables.registry, parts.tables.loads
        self._sessions, self._named_prefixes = parts.sessions, parts.named_prefixes
        self._timers, self._outbox, self._counters = parts.timers, parts.outbox, parts.counters
        self._is_on, self._balances = parts.config.migration != "off", parts.config.migration == "auto"
        #: by attempt
        self._migrations: dict[str, _Migration] = {}
        #: by attempt: how often its instance has kept it
        self._refusals: dict[str, int] = {}
        self._looks_at_ns: int | None = None
        #: members that had said, when they were heard last, that requests wait for memory
        self._pressed: set[Member] = set()

    # -- draining members

    def on_draining(self, now_ns: int) -> None:
        """A member drains: what it runs is to go elsewhere."""
        if self._is_on:
            self._look_at(now_ns)

    def _look_at(self, due_ns: int) -> None:
        self._looks_at_ns = due_ns
        self._timers.arm(due_ns, self._look, None)

    def _look(self, _: None, now_ns: int) -> None:
        """Ask for what can migrate, as long as a member with requests drains."""
        if self._looks_at_ns is None or now_ns < self._looks_at_ns:
            return
        self._looks_at_ns = None
        draining = [member for member in self._registry if member.state is MemberState.DRAINING and member.shares_kv]
        for member in draining:
            self._empty_member(member, now_ns)
        if any(member.attempts for member in draining):
            self._look_at(now_ns + _LOOK_AGAIN_NS)

    def _empty_member(self, member: Member, now_ns: int) -> None:
        room = MIGRATIONS_MAX - sum(migration.source is member for migration in self._migrations.values())
        for attempt_id in list(member.attempts):
            if room <= 0:
                return
            req = self._requests.by_attempt[attempt_id]
            if req.attempt is not None and self._may_migrate(req, req.attempt, member):
                room -= self._start(req, req.attempt, member, now_ns)

    def _may_migrate(self, req: RequestState, attempt: Attempt, member: Member) -> bool:
        """Whether ``member`` runs it, alone, and can give it away. A request that is on its way has to arrive first."""
        is_settled = req.phase is RequestPhase.HANDED_OVER or attempt.decode_at is None
        one_line = req.request.n == 1 and not req.request.beam_width and not attempt.is_shared
        kept_often = self._refusals.get(attempt.attempt_id, 0) >= _REFUSALS_MAX
        return attempt.runs_at is member and is_settled and one_line and not attempt.early and not kept_often

    def _start(self, req: RequestState, attempt: Attempt, source: Member, now_ns: int, *, idle: bool = False) -> bool:
        """False: no instance has room for it. ``idle``: none where nothing waits."""
        target = self._placer.choose_target(req, source, idle=idle)
        if target is None:
            return False
        name = attempt.attempt_id
        self._requests.start_migration(req, attempt, target)
        for pin in self._admission.memory.reserve_at_target(req, attempt, target):
            self._named_prefixes.evict_pin(pin)
        self._move_charge(req, attempt, target)
        self._migrations[name] = migration = _Migration(req, attempt, source, target, now_ns)
        self._counters.migrations += 1
        self._ask(migration)
        self._timers.arm(now_ns + _REPEAT_NS, self._repeat, name)
        return True

    def _ask(self, migration: _Migration) -> None:
        caches = migration.target.info.caching
        self._outbox.send(
            migration.source.peer, Migrate(migration.attempt.attempt_id, migration.target.peer, copies_ahead=caches)
        )

    def _repeat(self, name: str, now_ns: int) -> None:
        migration = self._migrations.get(name)
        if migration is None or now_ns < migration.since_ns + _REPEAT_NS:
            return  # it has ended; another one of the attempt has a timer of its own
        migration.since_ns = now_ns
        self._ask(migration)
        self._timers.arm(now_ns + _REPEAT_NS, self._repeat, name)

    def _move_charge(self, req: RequestState, attempt: Attempt, to: Member) -> None:
        """Its decoding counts at ``to`` from now on."""
        self._loads.discharge_work(attempt.charges.pop())
        tokens = len(req.request.prompt) + max(map(len, req.emitted))
        attempt.charges.append(self._loads.charge_work(to.number, Work(0, 1, tokens)))

    # -- members under pressure

    def on_load_told(self, member: Member, now_ns: int) -> None:
        """``member`` has said how busy it is: where requests wait for its memory, and another one has room, one
        goes there."""
        load, was_pressed = member.load, member in self._pressed
        if not self._balances or load is None or not member.is_open or not member.shares_kv:
            return
        if not load.requests_waiting or load.hbm_blocks_available > member.info.hbm_blocks // _FULL_SHARE:
            self._pressed.discard(member)
            return
        self._pressed.add(member)
        if not was_pressed:
            return  # it may be over with the next step
        if any(member in (migration.source, migration.target) for migration in self._migrations.values()):
            return  # what it says does not count that yet
        late: list[tuple[RequestState, Attempt]] = []
        long: list[tuple[RequestState, Attempt]] = []
        for req in [self._requests.by_attempt[name] for name in member.attempts]:
            attempt = req.attempt
            if attempt is None or not self._may_migrate(req, attempt, member):
                continue
            if req.phase is not RequestPhase.PREFILLING and _tokens_left(req) >= _LEFT_TOKENS:
                long.append((req, attempt))
            elif req.phase is RequestPhase.PREFILLING and now_ns - attempt.dispatched_ns > _WAITS_NS:
                late.append((req, attempt))
        long.sort(key=lambda pair: (-len(pair[0].request.prompt) - len(pair[0].emitted[0]), pair[1].number))
        any(self._start(req, attempt, member, now_ns, idle=True) for req, attempt in (*late, *long))

    # -- how a migration ends

    def on_handed_over(self, req: RequestState, attempt: Attempt, now_ns: int) -> None:
        """The target has it: the next one's turn."""
        migration = self._migrations.pop(attempt.attempt_id, None)
        if migration is not None:
            self._counters.migrated += 1
            self._sessions.record_route(req.request.tenant, req.request.session, [migration.target])
            if migration.source.state is MemberState.DRAINING:
                self._look_at(now_ns)

    def on_refused(self, sender: Member, message: MigrationRefused, now_ns: int) -> None:
        """The source keeps it."""
        migration = self._migrations.get(message.request_id)
        if migration is not None and migration.source is sender:
            self._refusals[message.request_id] = self._refusals.get(message.request_id, 0) + 1
            self._end(migration)

    def _end(self, migration: _Migration) -> None:
        req, attempt, target = migration.req, migration.attempt, migration.target
        del self._migrations[attempt.attempt_id]
        self._requests.end_migration(attempt, target)
        self._admission.memory.free_at_target(attempt, target)
        self._move_charge(req, attempt, migration.source)

    def on_attempt_over(self, attempt: Attempt) -> None:
        """The attempt has ended or failed."""
        self._migrations.pop(attempt.attempt_id, None)
        self._refusals.pop(attempt.attempt_id, None)

    def on_member_gone(self, member: Member) -> None:
        """Requests that were to migrate to ``member`` go on where they are: their instances are asked whether they have
        them, for the word that they had left may have gone with ``member``."""
        self._pressed.discard(member)
        for migration in [migration for migration in self._migrations.values() if migration.target is member]:
            source = migration.source
            self._end(migration)
            query = QueryAttempts((migration.attempt.attempt_id,), source.totals.dispatches)
            self._outbox.send(source.peer, query)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless each migration is that of a live attempt."""
        for name, migration in self._migrations.items():
            req, attempt = migration.req, migration.attempt
            check(req.attempt is attempt and self._requests.by_attempt.get(name) is req, "{} has ended", name)
            check(attempt.first is migration.source, "{} migrates from {}", name, migration.source)
            check(attempt.decode_at is migration.target, "{} migrates to {}", name, migration.target)
            check(req.phase is not RequestPhase.HANDED_OVER, "{} has migrated", name)
        for name in self._refusals:
            check(name in self._requests.by_attempt, "{} was refused, and has ended", name)


def _tokens_left(req: RequestState) -> int:
    return req.request.stop.max_tokens - len(req.emitted[0])
