"""The fleet machine: which engine gets a request, when another one does, and what all of them have cached.

The sister of ``cluster.machine`` for engines that are no members: they speak OpenAI's HTTP, send no heartbeats and
answer in text. Admission, load, prefix directory and policies are those of the cluster; what differs is here: health by
asking, KV events of other engines (``fleet.kv_feed``), and attempts that can be repeated only before the first byte.

::

    waits --admitted--> under way --AnswerBegan--> begun --AnswerEnded--> gone
      |                  |     ^                    (an engine that falls silent: Abort, and the host ends it)
      rejected           +-----+ AttemptFailed: another engine, as long as there is one; then GiveUp

Where engines have roles, a long prompt that none has cached is computed first by one of ``role=prefill``
(``PromptComputed``); that it could not be does not matter: the engine that answers computes it itself. Of engines that
answer in pairs, both are under way at the same time; if one fails, the attempt has, and the other may be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from memserve.base.config import ClusterConfig
from memserve.base.errors import check, refuse_event
from memserve.base.types import Role
from memserve.fleet.engines import CONTEXT_MAX, Engines, FleetEngine, fingerprint_of, team_of
from memserve.fleet.kv_formats import Hash
from memserve.fleet.messages import (
    PREFILL_TOKENS,
    AnswerBegan,
    AnsweredElsewhere,
    AnswerEnded,
    AttemptFailed,
    EngineAnswered,
    EngineJoined,
    EngineLeft,
    EngineMissed,
    EngineSpec,
    EngineView,
    FleetAction,
    FleetEvent,
    ForwardRequest,
    GiveUp,
    KvReceived,
    Prefill,
    PromptArrived,
    PromptComputed,
    PromptSpace,
    ReplayEnded,
    RouterJoined,
    RouterLeft,
    TimePassed,
)
from memserve.fleet.routers.admission import FleetAdmission
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.events import MessageArrived, RejectRequest
from memserve.router.admission.controller import Rejection
from memserve.router.admission.needs import with_operator_settings
from memserve.router.members.loads import Charge, LoadTable, Work
from memserve.router.outbox import Timers
from memserve.router.placement.candidates import Ask, Candidate, Route
from memserve.router.placement.prefix_directory import Trees
from memserve.router.placement.routing import policy_named
from memserve.router.report import AdmissionStats, Counters
from memserve.router.requests.requests import RequestState

RETRY_AFTER_S = 5.0
"""After which a client may ask again when no engine takes requests."""


@dataclass(slots=True)
class _Entry:
    """A request that has not ended."""

    state: RequestState
    arrival: PromptArrived
    engine: FleetEngine | None = None
    charge: Charge | None = None
    failures: dict[str, AttemptFailed] = field(default_factory=dict)
    """By engine."""
    may_split: bool = True
    """Its prompt may be computed by another engine than answers; False as well once that was tried."""
    is_computing: bool = False
    """``engine`` computes its prompt, for another one to answer."""
    is_computed: bool = False
    """An engine has."""
    partner: FleetEngine | None = None
    """Computes the prompt for ``engine``, which waits for it; ``None``: none does, or it has."""
    partner_charge: Charge | None = None
    identities: dict[int, bytes] = field(default_factory=dict)
    """Of its prompt's blocks, by engine; only while it is placed."""

    @property
    def space(self) -> PromptSpace:
        """What its prompt's numbers are."""
        return self.arrival.space

    def may_have(self, engine: FleetEngine) -> bool:
        """Whether ``engine`` has its model, and was neither ruled out nor tried."""
        arrival = self.arrival
        has_model = arrival.model in engine.report.models or not arrival.model
        is_allowed = arrival.engines is None or engine.name in arrival.engines
        is_allowed = is_allowed and (engine.spec.may_be_handed_out or not arrival.is_handed_out)
        return has_model and is_allowed and engine.name not in self.failures

    def reason_against(self, engine: FleetEngine) -> str:
        """Why ``engine`` cannot have it by itself; empty: nothing that is known."""
        if not engine.is_open:
            return engine.reason or "it leaves"
        if engine.spec.computes_in_pairs:
            return "it answers in a pair alone"
        is_below = self.arrival.is_handed_out and not engine.spec.may_be_handed_out
        return f"gateways do not reach it below {engine.spec.base_path}" if is_below else ""


class Fleet:
    """Decides; deterministic. Each request ends with one ``RejectRequest`` or ``GiveUp``, or with an
    ``AnswerEnded`` of its host."""

    def __init__(
        self,
        specs: list[EngineSpec],
        config: ClusterConfig,
        *,
        identity_key: bytes = DEFAULT_KEY,
        prefill_tokens: int = PREFILL_TOKENS,
        is_follower: bool = False,
    ) -> None:
        """``prefill_tokens``: uncached tokens that are worth a second engine. ``is_follower``: another router decides
        on admission, where there is any."""
        self.config, self._prefill_tokens = config, prefill_tokens
        self._decide = policy_named(config.policy)
        self._timers, self._loads, self._actions = Timers(), LoadTable(), list[FleetAction]()
        self._trees = Trees(config, self._timers, Counters(), identity_key)
        self._entries: dict[str, _Entry] = {}
        self._admission = FleetAdmission(
            config, self._loads, self._timers, self._place_admitted, self._reject_request, is_follower=is_follower
        )
        self._engines = Engines(specs, config, self._loads, self._trees, self._actions.append, identity_key)
        self._handlers = self._handlers_of_events()

    # -- the one mutator

    def _handlers_of_events(self) -> dict[type[FleetEvent], Callable[[Any, int], None]]:
        """What each event leads to."""
        engines = self._engines
        return {
            PromptArrived: self._on_prompt_arrived,
            PromptComputed: lambda event, now_ns: self._on_prompt_computed(event.request_id, now_ns),
            AnswerBegan: lambda event, now_ns: self._on_answer_began(event.request_id, now_ns),
            AnswerEnded: self._on_answer_ended,
            AttemptFailed: self._on_attempt_failed,
            AnsweredElsewhere: self._on_answered_elsewhere,
            EngineAnswered: engines.on_engine_answered,
            EngineMissed: engines.on_engine_missed,
            KvReceived: engines.on_kv_received,
            ReplayEnded: lambda event, _: engines.on_replay_ended(event),
            EngineJoined: lambda event, _: engines.add_engine(event.spec),
            EngineLeft: lambda event, _: engines.remove_engine(event),
            RouterJoined: self._admission.on_router_joined,
            RouterLeft: self._admission.on_router_left,
            MessageArrived: self._admission.on_message,
            TimePassed: lambda _event, _now_ns: None,
        }

    def handle(self, event: FleetEvent, now_ns: int) -> list[FleetAction]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order."""
        self._handlers.get(type(event), refuse_event)(event, now_ns)
        self._timers.run_due(now_ns)
        self._admission.admit_waiting(now_ns)
        actions = [*self._actions, *self._admission.take_messages(now_ns)]
        self._actions.clear()
        return actions

    # -- requests

    def _on_prompt_arrived(self, event: PromptArrived, now_ns: int) -> None:
        request = with_operator_settings(event.request, self.config.admission)
        check(request.request_id not in self._entries, "{} is known", request.request_id)
        state = RequestState(request, now_ns)
        entry = self._entries[request.request_id] = _Entry(state, event, may_split=event.may_split)
        if not self._open_for(entry):
            self._fail_request(entry, now_ns)
            return
        self._admission.add_request(state, now_ns)

    def _place_admitted(self, req: RequestState, now_ns: int) -> None:
        self._place_request(self._entries[req.request_id], now_ns)

    def _reject_request(self, rejection: Rejection, now_ns: int) -> None:
        request_id, reason = rejection.req.request_id, rejection.reason
        self._actions.append(RejectRequest(request_id, reason, rejection.retry_after_s, rejection.is_overload))
        self._remove_entry(self._entries[request_id], now_ns)

    def _open_for(self, entry: _Entry) -> list[FleetEngine]:
        """Engines that may be tried."""
        return [engine for engine in self._engines if engine.is_open and entry.may_have(engine)]

    def _place_request(self, entry: _Entry, now_ns: int) -> None:
        engines = self._open_for(entry) if len(entry.failures) < self.config.attempts_max else []
        if not engines:
            self._fail_request(entry, now_ns)
            return
        candidates = self._candidates_of(entry, engines)
        request = entry.state.request
        ask = Ask(max(1, len(request.prompt)), request.stop.max_tokens, request.n)
        cached = max(candidate.matched_tokens for candidate in candidates.values())
        splits = entry.may_split and len(request.prompt) - cached >= self._prefill_tokens
        team = team_of(engines, splits=splits, is_computed=entry.is_computed)
        if not team.engines:
            self._fail_request(entry, now_ns)
            return
        route = self._decide(ask, [candidates[engine.name] for engine in team.engines], ())
        target = next(engine for engine in team.engines if engine.number == route.first.number)
        # where there are engines for prompts alone, one of them answers as well, rather than none
        is_only = len(team.engines) == len(engines)
        entry.is_computing = not team.answering and target.spec.role is Role.PREFILL and not is_only
        fallbacks = self._rank_fallbacks(entry, ask, [candidates[e.name] for e in team.engines if e is not target])
        self._charge_attempt(entry, target, route.first, now_ns)
        if team.answering:
            self._add_answering(entry, [candidates[engine.name] for engine in team.answering], team.answering, ask)
        self._actions.append(self._attempt_action(entry, route, fallbacks))

    def _candidates_of(self, entry: _Entry, engines: list[FleetEngine]) -> dict[str, Candidate]:
        """``engines`` by name, as the policies see them."""
        entry.identities = identities = {engine.number: self._prompt_identities(entry, engine) for engine in engines}
        matches = {packed: self._trees.match_prompt(packed, len(self._loads)) for packed in set(identities.values())}
        return {
            engine.name: self._candidate_of(
                entry, engine, int(matches[identities[engine.number]].blocks[engine.number])
            )
            for engine in engines
        }

    def _rank_fallbacks(self, entry: _Entry, ask: Ask, candidates: list[Candidate]) -> tuple[str, ...]:
        """The engines that would be tried after the first one, in order, where a gateway tries them by itself."""
        names: list[str] = []
        # a relay asks again after a failure, with what is known then; a gateway is told once
        most = self.config.attempts_max - 1 if entry.arrival.is_handed_out and not entry.is_computing else 0
        while candidates and len(names) < most:
            best = self._decide(ask, candidates, ()).first
            names.append(best.name)
            candidates = [candidate for candidate in candidates if candidate.number != best.number]
        return tuple(names)

    def _attempt_action(self, entry: _Entry, route: Route, fallbacks: tuple[str, ...]) -> Prefill | ForwardRequest:
        request = entry.state.request
        engine = "" if entry.engine is None else entry.engine.name
        if entry.is_computing:
            return Prefill(request.request_id, engine, route.reason)
        prompt_facts = entry.space, len(request.prompt), route.first.matched_tokens
        computed_by = "" if entry.partner is None else entry.partner.name
        return ForwardRequest(request.request_id, engine, route.reason, *prompt_facts, computed_by, fallbacks)

    def _add_answering(
        self, entry: _Entry, candidates: list[Candidate], engines: Sequence[FleetEngine], ask: Ask
    ) -> None:
        """Beside the engine that was chosen to compute the prompt, choose the one of ``engines`` that answers."""
        # its partner gives it the KV of the whole prompt, whatever it has itself
        has_all = [structs.replace(candidate, matched_tokens=ask.prompt_tokens) for candidate in candidates]
        number = self._decide(ask, has_all, ()).first.number
        request = entry.state.request
        entry.partner, entry.partner_charge = entry.engine, entry.charge
        engine = entry.engine = next(engine for engine in engines if engine.number == number)
        work = Work(1, request.n, request.n * len(request.prompt))
        entry.charge = self._loads.charge_work(engine.number, work)
        engine.attempts[request.request_id] = None
        engine.view = replace(engine.view, requests=engine.view.requests + 1)

    def _prompt_identities(self, entry: _Entry, engine: FleetEngine) -> bytes:
        request, block_tokens = entry.state.request, engine.block_tokens(entry.space)
        weights = engine.report.models.get(entry.arrival.model, engine.base_model)
        fingerprint = fingerprint_of(weights, entry.space, block_tokens)
        return self._trees.prompt_identities(request.salt, fingerprint, request.prompt, block_tokens)

    def _candidate_of(self, entry: _Entry, engine: FleetEngine, blocks: int) -> Candidate:
        work, room = self._loads.work_of(engine.number), int(self._loads.room_blocks[engine.number])
        return Candidate(
            engine.number,
            engine.name,
            Role.COLOCATED,
            prefill_tokens=work.prefill_tokens,
            sequences=work.sequences,
            context_tokens=work.context_tokens,
            room_tokens=room if engine.report.kv_tokens else CONTEXT_MAX,
            matched_tokens=blocks * engine.block_tokens(entry.space),
        )

    def _charge_attempt(self, entry: _Entry, engine: FleetEngine, candidate: Candidate, now_ns: int) -> None:
        request = entry.state.request
        tokens, n = len(request.prompt), 1 if entry.is_computing else request.n
        # computed elsewhere already: it takes the KV, and has a step's worth to do
        work = Work(1 if entry.is_computed else max(1, tokens - candidate.matched_tokens), n, n * tokens)
        entry.engine, entry.charge = engine, self._loads.charge_work(engine.number, work)
        engine.attempts[request.request_id] = None
        engine.view = replace(
            engine.view,
            requests=engine.view.requests + 1,
            prompt_tokens=engine.view.prompt_tokens + tokens,
            matched_tokens=engine.view.matched_tokens + candidate.matched_tokens,
        )
        if engine.listener is not None:
            engine.listener.on_prompt_sent(now_ns)
        by_events = entry.space is PromptSpace.TOKENS
        self._trees.expect_blocks(engine.number, entry.identities[engine.number], now_ns, by_events=by_events)
        entry.identities = {}  # of a long prompt they take a lot of room

    def _on_prompt_computed(self, request_id: str, now_ns: int) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.partner is not None:
            entry.partner.view = replace(entry.partner.view, prefills=entry.partner.view.prefills + 1)
            self._detach_partner(entry)
            return
        if entry is None or entry.engine is None or not entry.is_computing:
            return
        entry.engine.view = replace(entry.engine.view, prefills=entry.engine.view.prefills + 1)
        entry.may_split, entry.is_computed = False, True
        self._detach_engine(entry)
        self._place_request(entry, now_ns)

    def _on_answer_began(self, request_id: str, now_ns: int) -> None:
        entry = self._entries.get(request_id)
        if entry is None or entry.charge is None or entry.engine is None:
            return
        if entry.partner is not None:  # else there would be nothing to answer with
            self._on_prompt_computed(request_id, now_ns)
        entry.state.introduced[0] = True
        computed = entry.charge.work._replace(prefill_tokens=0)
        self._loads.discharge_work(entry.charge)
        entry.charge = self._loads.charge_work(entry.engine.number, computed)

    def _on_answer_ended(self, event: AnswerEnded, now_ns: int) -> None:
        entry = self._entries.get(event.request_id)
        if entry is None:  # it was rejected meanwhile
            return
        if event.is_cut and entry.engine is not None:
            entry.engine.view = replace(entry.engine.view, failed=entry.engine.view.failed + 1)
        self._remove_entry(entry, now_ns)

    def _on_attempt_failed(self, event: AttemptFailed, now_ns: int) -> None:
        entry = self._entries.get(event.request_id)
        engine = None if entry is None else entry.partner if event.is_of_partner else entry.engine
        if entry is None or engine is None:
            return
        engine.view = replace(engine.view, failed=engine.view.failed + 1)
        if not entry.is_computing:  # else it may still have to answer, when no other one does
            entry.failures[engine.name] = event
        entry.may_split = False
        # a closed port will not take the next request either: the poll may come a second later
        if event.refuses:
            self._engines.close_engine(engine, event.reason)
        self._detach_engine(entry)
        self._place_request(entry, now_ns)

    def _on_answered_elsewhere(self, event: AnsweredElsewhere, now_ns: int) -> None:
        entry = self._entries.get(event.request_id)
        engine = next((engine for engine in self._engines if engine.name == event.engine), None)
        if entry is None or entry.engine is None or entry.is_computing or engine in (None, entry.engine):
            return
        entry.engine.view = replace(entry.engine.view, failed=entry.engine.view.failed + 1)
        self._detach_engine(entry)
        self._charge_attempt(entry, engine, self._candidates_of(entry, [engine])[engine.name], now_ns)

    def _fail_request(self, entry: _Entry, now_ns: int) -> None:
        failures = entry.failures
        if failures:
            last = list(failures.values())[-1]
            causes = "; ".join(f"{name}: {failure.reason}" for name, failure in failures.items())
            reason = f"No engine answered the request: {causes}"
            # the first of them that has room again may be asked
            waits = [attempt.retry_after_s for attempt in failures.values() if attempt.retry_after_s is not None]
            action = GiveUp(entry.state.request_id, last.status, reason, min(waits, default=None))
        else:
            reasons = {engine.name: entry.reason_against(engine) for engine in self._engines}
            causes = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
            reason = f"No engine with this model takes requests now: {causes}"
            action = GiveUp(entry.state.request_id, 503, reason, RETRY_AFTER_S)
        self._actions.append(action)
        self._remove_entry(entry, now_ns)

    def _detach_partner(self, entry: _Entry) -> None:
        if entry.partner is not None and entry.partner_charge is not None:
            self._loads.discharge_work(entry.partner_charge)
            del entry.partner.attempts[entry.state.request_id]
            self._engines.remove_if_done(entry.partner)
        entry.partner = entry.partner_charge = None

    def _detach_engine(self, entry: _Entry) -> None:
        self._detach_partner(entry)
        if entry.engine is not None and entry.charge is not None:
            self._loads.discharge_work(entry.charge)
            del entry.engine.attempts[entry.state.request_id]
            self._engines.remove_if_done(entry.engine)
        entry.engine = entry.charge = None
        entry.is_computing = False

    def _remove_entry(self, entry: _Entry, now_ns: int) -> None:
        self._detach_engine(entry)
        del self._entries[entry.state.request_id]
        self._admission.release_request(entry.state, now_ns)

    # -- views

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``TimePassed`` is worth sending at the latest; ``None``: nothing is waited for."""
        return self._timers.next_ns

    def engines_by_model(self) -> dict[str, list[str]]:
        """Every model that an engine has shown, with the engines that have it and take requests."""
        engines_by_model: dict[str, list[str]] = {}
        for engine in self._engines:
            for model in engine.report.models:
                engines_by_model.setdefault(model, []).extend([engine.name] if engine.is_open else [])
        return engines_by_model

    def tokenizing_engine(self, model: str) -> str | None:
        """The engine to ask for a prompt's tokens; ``None``: none of those with ``model`` publishes KV events, so that
        the text will do."""
        able = [e for e in self._engines if e.is_open and model in e.report.models and e.spec.kind.has_roles]
        if not any(engine.feed is not None for engine in able):
            return None
        return min(able, key=lambda engine: (len(engine.attempts), engine.number)).name

    def engine_views(self) -> list[EngineView]:
        """All engines, in the order of the options."""
        return [engine.current_view(self._trees.block_count(engine.number)) for engine in self._engines]

    def kv_counts(self, name: str) -> dict[Hash, tuple[int, int]]:
        """Copies of each block that this engine is known to have, upper and lower tier, by its own hash. For checks."""
        return self._engines.block_counts(name)

    def admission_stats(self) -> AdmissionStats:
        """Totals and gauges of admission."""
        return self._admission.snapshot()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        entries = self._entries.values()
        charges = [charge for entry in entries for charge in (entry.charge, entry.partner_charge) if charge is not None]
        self._loads.check_invariants(
            charges, {engine.number: (Role.COLOCATED, engine.is_open) for engine in self._engines}
        )
        for engine in self._engines:
            request_ids = [name for name, entry in self._entries.items() if engine in (entry.engine, entry.partner)]
            check(
                sorted(request_ids) == sorted(engine.attempts),
                "{} has {}, not {}",
                engine.name,
                engine.attempts,
                request_ids,
            )
        self._trees.check_invariants()
        self._admission.check_invariants()
