"""Who has memory for one more request, as the gate counts it (level 2).

An attempt holds what it needs on the instances that work for it, from dispatch until it is over: a prefill instance the
prompt's blocks, who decodes those of prompt and output. What is pinned, or may be fetched by others, cannot be evicted
for it (``cluster.gate_claims``). Instances keep their own books; these here say whether a request that is let in will
find room, before it is sent anywhere.

What is left of a request that has ended is cache. By default it is nobody's. With ``evictions_max`` it counts as taken
until the pressure of a newcomer takes it (``policy.pressure``), or it is too long ago (``kept_ns``).
"""

from __future__ import annotations

import numpy as np

from memserve.cluster.gate_claims import Claims
from memserve.cluster.jobs import Attempt, Job
from memserve.cluster.loads import Ints, LoadTable
from memserve.cluster.registry import Member, Registry
from memserve.config import AdmissionConfig
from memserve.errors import check
from memserve.policy.admission import full_need, prompt_need, with_reuse
from memserve.policy.bestfit import BlockLedger, Need, best_fit, required_blocks
from memserve.policy.pressure import Pressure
from memserve.policy.routing import teams
from memserve.types import Admission, Role

_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
Team = list[tuple[Role, Ints]]
"""Instances that do the same for a request, by role and number."""


class GateMemory:
    """The ledger of all instances, fed by membership, dispatches and their ends."""

    __slots__ = ("_ages", "_coming", "_config", "_loads", "_registry", "_snug", "claims", "ledger", "pressure")

    def __init__(self, config: AdmissionConfig, policy: str, registry: Registry, loads: LoadTable) -> None:
        self._config, self._snug = config, policy == "best-fit"
        self._registry, self._loads = registry, loads
        self.ledger = BlockLedger()
        self.pressure = Pressure(self.ledger)
        self.claims = Claims(self.ledger)
        #: all and only the attempts that hold memory: when they got it
        self._ages: dict[str, int] = {}
        #: for each of them whose KV is on its way to who decodes: the names that its blocks will have there
        self._coming: dict[str, tuple[bytes, ...]] = {}

    # -- what a request needs

    def _need(self, job: Job, role: Role, *, decodes: bool) -> Need:
        """On an instance of ``role``, which ``decodes`` what it has computed.

        Whose prompt fits is never too large for its answers: an instance cuts what is generated to what it has room
        for, and lets sequences of one request take turns. So they need no more than the largest instance has.
        """
        config = self._config
        unit, generated = self._unit_tokens(), max(len(tokens) for tokens in job.emitted)
        need = prompt_need(job.request, unit, generated)
        if decodes:
            most = int(self.ledger.blocks_total(self._loads.open_numbers(role)).max(initial=0))
            whole = full_need(job.request, config.output_tokens_max, unit, generated)
            need = Need(max(need.blocks, min(whole.blocks, most)))
        return with_reuse(need, self._shared(job.identities or b""))

    def _shared(self, identities: bytes) -> bytes:
        """The blocks that are counted once: all that are alike or, unless reuse is looked at, those that are pinned."""
        if self._config.mode is Admission.CACHE:
            return identities
        return self.claims.pinned_part(identities) if self._config.unit_tokens is None else b""

    @property
    def wants_identities(self) -> bool:
        """Whether it matters what a prompt's blocks are."""
        return self._config.mode is Admission.CACHE or self.claims.has_pins

    def _kept_need(self, identities: bytes, tokens: int) -> Need:
        """Of the first ``tokens`` of a prefix, where they are kept."""
        if self._config.unit_tokens is not None:
            return Need(required_blocks(tokens, self._config.unit_tokens))
        return with_reuse(Need(tokens // self._unit_tokens()), identities)

    def _unit_tokens(self) -> int:
        geometry = self._registry.geometry
        return self._config.unit_tokens or (geometry.block_tokens if geometry is not None else 1)

    def _blocks_total(self, member: Member) -> int:
        return member.info.hbm_blocks * member.info.geometry.block_tokens // self._unit_tokens()

    # -- whether there is room

    def fits(self, job: Job) -> bool:
        """Whether some instance, or some pair of them, has room for all of ``job``; makes room where that is allowed.

        Also when nobody is there: then it is for others to wait.
        """
        return all(self._room_for(needs) for needs in self._needs(job))

    def fits_but_for_pins(self, job: Job) -> bool:
        """The same if all pins were given up."""
        with self.claims.lifted():
            return self.fits(job)

    def let_go(self, now: int) -> bool:
        """Count no longer what was kept long enough; whether there was any."""
        return self.pressure.let_go(now, self._config.kept_ns) > 0

    def room_in_ns(self, job: Job, now: int) -> int:
        """How long until ``job`` fits but for pins, as what has ended is let go, if nobody else comes; ``kept_ns`` at
        most."""
        at_most_ns = now + self._config.kept_ns
        until_ns = now
        with self.claims.lifted():
            for needs in self._needs(job):
                ends = [self.pressure.room_at_ns(need, node) for need, numbers in needs for node in numbers.tolist()]
                until_ns = max(until_ns, min([end for end in ends if end is not None], default=at_most_ns))
        return until_ns - now

    def never_fits(self, job: Job) -> str | None:
        """Why ``job`` could not run even if all others were gone; ``None`` = it could."""
        teams_here = self._teams(len(job.request.prompt)) or self._teams(0)
        for team in teams_here:
            needs = [self._need(job, role, decodes=self._decodes(role, len(teams_here) > 1)).total for role, _ in team]
            totals = [int(self.ledger.blocks_total(numbers).max()) for _, numbers in team]
            if all(need > total for need, total in zip(needs, totals, strict=True)):
                return f"it needs {min(needs)} blocks of KV memory, no instance has more than {max(totals)}"
        return None

    def _needs(self, job: Job) -> list[list[tuple[Need, Ints]]]:
        """Of each team of instances that ``job`` needs one of: what it needs there, by role."""
        teams_here = self._teams(len(job.request.prompt))
        paired = len(teams_here) > 1
        return [[(self._need(job, role, decodes=self._decodes(role, paired)), numbers) for role, numbers in team]
                for team in teams_here]  # fmt: skip

    def _room_for(self, needs: list[tuple[Need, Ints]]) -> bool:
        """Whether one of a team has room, or may make it."""
        if any((self.ledger.blocks_left(numbers, need) >= 0).any() for need, numbers in needs):
            return True
        limit = self._config.evictions_max
        return any(limit and self.pressure.relieve(need, numbers.tolist(), limit) for need, numbers in needs)

    @staticmethod
    def _decodes(role: Role, paired: bool) -> bool:
        """Whether an instance of this role keeps what it has computed the prompt of."""
        return role is not Role.PREFILL or not paired

    def _teams(self, prompt_tokens: int) -> list[Team]:
        """Who computes such prompts, and who decodes when that is somebody else; each with its open instances."""
        able = {role: numbers for role in _ROLES if len(numbers := self._able(role, prompt_tokens))}
        return [[(role, able[role]) for role in team if role in able] for team in teams(able) if team]

    def _able(self, role: Role, prompt_tokens: int) -> Ints:
        """Those of a role whose context such a prompt fits into, as placement sees it."""
        numbers = self._loads.open_numbers(role)
        return numbers[self._loads.context_limit[numbers] > prompt_tokens]

    def narrow(self, job: Job, role: Role, numbers: Ints) -> Ints:
        """Those of ``numbers`` that have room, be it but for pins; by policy ``best-fit`` the one with the least left
        over.

        All of them when none has: whoever was let in goes somewhere.
        """
        paired = len(self._teams(len(job.request.prompt))) > 1
        need = self._need(job, role, decodes=self._decodes(role, paired))
        left = self.ledger.blocks_left(numbers, need)
        fitting = left >= 0
        if not fitting.any():
            with self.claims.lifted():
                left = self.ledger.blocks_left(numbers, need)
            fitting = left >= 0
        if not fitting.any():
            return numbers
        return best_fit(numbers, left, self._work_tokens(numbers)) if self._snug else numbers[fitting]

    def _work_tokens(self, numbers: Ints) -> Ints:
        """Outstanding work of each: tokens to be computed, and tokens to be read in each step."""
        own, reported, since = self._loads.tables[:, :, numbers]
        prefill, _, context = np.maximum(own, reported + since)
        work: Ints = prefill + context
        return work

    # -- what happens to attempts

    def dispatched(self, job: Job, attempt: Attempt) -> list[str]:
        """It holds what it needs from now on. Returns the pins that have to go for it: there is no other room."""
        self._ages[attempt.attempt_id] = self.pressure.age()
        given_up = []
        for member in attempt.involved:
            role, alone = member.info.role, attempt.decode_at is None
            need = self._need(job, role, decodes=alone or member is attempt.decode_at)
            if member is attempt.decode_at:
                need = self._as_it_comes(attempt, member, need)
            self.ledger.allocate(attempt.attempt_id, member.number, need)
            given_up += self.claims.give_way(member.number)
        for holder in attempt.holders:
            lender = self._registry.get(holder.peer)
            if lender is not None:
                prefix = self._kept_need(job.identities or b"", holder.prefix_tokens)
                self.claims.lend(attempt.attempt_id, lender.number, prefix)
        return given_up

    def _as_it_comes(self, attempt: Attempt, member: Member, need: Need) -> Need:
        """The same need where blocks that are on their way have no names yet: two requests that come with the same
        prefix bring it twice. Only what is there when they begin is shared."""
        known = self.ledger.known(member.number, need.names)
        if member.info.caching and known < len(need.names):
            self._coming[attempt.attempt_id] = need.names
        return Need(need.total - known, need.names[:known])

    def _has_come(self, attempt: Attempt, member: Member) -> None:
        """Its blocks are in the index of who decodes; what somebody else has brought meanwhile is there twice."""
        names = self._coming.pop(attempt.attempt_id, ())
        had = self.ledger.needs(member.number, attempt.attempt_id)
        if names and had is not None:
            twice = self.ledger.known(member.number, names) - len(had.names)
            self.ledger.free(attempt.attempt_id, member.number)
            need = Need(had.total - len(names) + twice, names)
            self.ledger.allocate(attempt.attempt_id, member.number, need)

    def computed(self, attempt: Attempt) -> bool:
        """Its prompt is computed: it fetches nothing any more. Whether that leaves more room."""
        return self.claims.returned(attempt.attempt_id)

    def handed_over(self, attempt: Attempt) -> None:
        """The decode instance has it all: the other one's part is over."""
        if attempt.decode_at is not None:
            self._has_come(attempt, attempt.decode_at)
        self._give_back(attempt, attempt.first, keeps=True)

    def over(self, attempt: Attempt, *, completed: bool) -> None:
        """It has ended. ``completed``: what it has computed stays in the cache."""
        for member in attempt.involved:
            self._give_back(attempt, member, keeps=completed)
        self.claims.returned(attempt.attempt_id)
        self._coming.pop(attempt.attempt_id, None)
        del self._ages[attempt.attempt_id]

    def _give_back(self, attempt: Attempt, member: Member, *, keeps: bool) -> None:
        if keeps and self._config.evictions_max is not None and member.info.caching:
            self.pressure.retire(attempt.attempt_id, member.number, self._ages[attempt.attempt_id])
        else:
            self.ledger.free(attempt.attempt_id, member.number)

    # -- what happens to pins

    def may_pin(self, name: str, member: Member, identities: bytes, tokens: int) -> bool:
        """Whether the first ``tokens`` of a prefix may be kept at ``member``: then they count. ``identities``: of its
        whole blocks."""
        return self.claims.may_pin(name, member.number, self._kept_need(identities, tokens))

    def pinned(self, name: str, member: Member, identities: bytes, tokens: int) -> None:
        """So much of it cannot be evicted there."""
        self.claims.pin(name, member.number, self._kept_need(identities, tokens))

    # -- members

    def enter(self, member: Member) -> None:
        """A new instance, empty as far as is known."""
        self.ledger.enter(member.number, self._blocks_total(member))

    def leave(self, member: Member) -> None:
        """It is gone. Attempts there must be over."""
        self.claims.leave(member.number)
        self.ledger.leave(member.number)
        self.pressure.leave(member.number)

    def check_invariants(self, attempts: dict[str, Attempt]) -> None:
        """Raise :class:`InvariantError` unless exactly the live attempts hold memory, and what has ended is listed."""
        self.ledger.check_invariants()
        self.pressure.check_invariants()
        self.claims.check_invariants({name for name, attempt in attempts.items() if attempt.is_computing})
        check(
            list(self._ages) == [a for a in self._ages if a in attempts], f"{list(self._ages)} are not {list(attempts)}"
        )
        check(len(self._ages) == len(attempts), f"{len(self._ages)} attempts hold memory, {len(attempts)} are live")
        for member in self._registry:
            active = {a.attempt_id for a in attempts.values() if member in a.involved}
            kept = set(self.pressure.inactive(member.number))
            held = set(self.ledger.holders(member.number))
            check(not active & kept, f"{active & kept} are active and may be evicted")
            claims = self.claims.holders(member.number)
            check(held == active | kept | claims, f"{member}: {held} hold memory, not {active}, {kept}, {claims}")
