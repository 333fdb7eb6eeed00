"""The engines of a fleet: which are well, how busy they are, what they have cached, and which may do what.

vLLM's engines with roles do the parts of a request one after the other: one computes the prompt, and then another one,
or the same, answers; each can answer alone. SGLang's do both at the same time: the one that answers is sent the request
together with the one that computes its prompt, and waits for that; neither answers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memserve.base.config import ClusterConfig
from memserve.base.errors import check
from memserve.base.types import Role
from memserve.fleet.kv_events import EngineKvFeed, KvEntries, KvListener
from memserve.fleet.kv_formats import Hash
from memserve.fleet.messages import (
    Abort,
    EngineAnswered,
    EngineGone,
    EngineLeft,
    EngineMissed,
    EngineReport,
    EngineSpec,
    EngineView,
    FleetAction,
    KvReceived,
    PromptSpace,
    ReplayEnded,
    RequestReplay,
)
from memserve.kv.identity import namespace_id
from memserve.protocol.peers import Load
from memserve.router.members.loads import LoadTable
from memserve.router.placement.prefix_directory import Trees

TEXT_BLOCK = 32
"""Numbers in a block of a prompt in ``PromptSpace.TEXT``: 128 bytes."""
PROMPT_TOKENS_USUAL = 512
"""A request that another client sent is taken to have this many tokens."""
CONTEXT_MAX = 1 << 40
"""What an engine can run it says itself, with a 400."""


@dataclass(slots=True)
class FleetEngine:
    """One engine."""

    spec: EngineSpec
    number: int
    listener: KvListener | None
    """Of its KV events; None: it publishes none."""
    view: EngineView
    """Its totals."""
    is_open: bool = False
    """It takes new requests."""
    answered_ns: int = 0
    is_leaving: bool = False
    """It is gone when its last request has ended."""
    reason: str = "it has not answered yet"
    """Why it is not open."""
    report: EngineReport = field(default_factory=lambda: EngineReport({}))
    attempts: dict[str, None] = field(default_factory=dict)
    """Requests that were sent there and have not ended, in order."""

    @property
    def feed(self) -> EngineKvFeed | None:
        """What is known of its cache; None: it publishes no KV events."""
        return self.listener.feed if self.listener is not None else None

    @property
    def name(self) -> str:
        """``HOST:PORT``."""
        return self.spec.name

    @property
    def base_model(self) -> str:
        """The weights behind its KV events; empty: unknown."""
        return next(iter(self.report.models.values()), "")

    def block_tokens(self, space: PromptSpace) -> int:
        """Of the blocks by which a prompt in ``space`` is compared."""
        if space is PromptSpace.TEXT:
            return TEXT_BLOCK
        return self.feed.block_tokens if self.feed is not None and self.feed.block_tokens else TEXT_BLOCK

    def current_view(self, cached_blocks: int) -> EngineView:
        """It now, for metrics."""
        feed = self.feed
        return replace(
            self.view,
            up=self.is_open,
            models=tuple(self.report.models),
            requests_open=len(self.attempts),
            cached_blocks=cached_blocks,
            kv_batches=feed.batches if feed else 0,
            kv_gaps=feed.gaps if feed else 0,
            kv_forgotten=feed.forgotten if feed else 0,
            report=self.report,
        )


class Engines:
    """All engines by name, in the order of the options."""

    def __init__(
        self,
        specs: list[EngineSpec],
        config: ClusterConfig,
        loads: LoadTable,
        trees: Trees,
        act: Callable[[FleetAction], None],
        identity_key: bytes,
    ) -> None:
        """``act`` takes what is to be done."""
        self._dead_after_ns, self._loads, self._trees, self._act = config.dead_after_ns, loads, trees, act
        self._key = identity_key
        self._by_name: dict[str, FleetEngine] = {}
        for spec in specs:
            self.add_engine(spec)

    def add_engine(self, spec: EngineSpec) -> None:
        """One more, not open yet."""
        check(spec.name not in self._by_name, "{} is named twice", spec.name)
        used_numbers = {engine.number for engine in self}
        # the lowest that is free: columns of loads and trees are as long as the highest
        number = next(index for index in range(len(used_numbers) + 1) if index not in used_numbers)
        engine = self._by_name[spec.name] = FleetEngine(spec, number, None, EngineView(spec.name, spec.kind, up=False))
        if spec.events:
            engine.listener = KvListener(self._open_feed(engine, self._key), bool(spec.replay))
        self._trees.add_member(number, publishes=bool(spec.events))
        self._open_engine(engine)
        self.close_engine(engine, engine.reason)

    def remove_engine(self, event: EngineLeft) -> None:
        """It gets nothing new."""
        engine = self._by_name[event.name]
        engine.is_leaving = True
        self.close_engine(engine, "it leaves")
        self.remove_if_done(engine)

    def remove_if_done(self, engine: FleetEngine) -> None:
        """It is gone, if it leaves and its last request has ended."""
        if engine.is_leaving and not engine.attempts:
            del self._by_name[engine.name]
            self._trees.remove_member(engine.number)
            self._loads.remove_member(engine.number)
            self._act(EngineGone(engine.name))

    def _open_feed(self, engine: FleetEngine, key: bytes) -> EngineKvFeed:
        def root(block_tokens: int) -> bytes:
            return namespace_id("", fingerprint_of(engine.base_model, PromptSpace.TOKENS, block_tokens), key)

        entries = KvEntries(engine.number, self._trees.directory, key, root)
        return EngineKvFeed(entries, bool(engine.spec.replay), engine.spec.events_format)

    def __iter__(self) -> Iterator[FleetEngine]:
        return iter(self._by_name.values())

    # -- health and load

    def _open_engine(self, engine: FleetEngine) -> None:
        engine.is_open = True
        self._loads.add_member(engine.number, Role.COLOCATED, CONTEXT_MAX, 0)

    def close_engine(self, engine: FleetEngine, reason: str) -> None:
        """It takes no new requests until it answers again."""
        engine.is_open, engine.reason = False, reason
        self._loads.close_member(engine.number)

    def on_engine_answered(self, event: EngineAnswered, now_ns: int) -> None:
        """It is well."""
        engine, report = self._by_name[event.name], event.report
        last_report, engine.report = engine.report, report
        engine.answered_ns, engine.reason = now_ns, ""
        if engine.feed is not None and (last_report.started_s, last_report.models) != (report.started_s, report.models):
            engine.feed.on_engine_restarted()
        was_open = engine.is_open or engine.is_leaving
        if not was_open:
            self._open_engine(engine)
        if engine.listener is not None:
            is_busy = bool(engine.attempts)
            first = engine.listener.on_answered(is_new=not was_open, is_busy=is_busy, now_ns=now_ns)
            self._request_replay(engine, first)
        if report.running is not None:
            self._loads.apply_heartbeat(engine.number, _load_of(report, report.running))

    def on_engine_missed(self, event: EngineMissed, now_ns: int) -> None:
        """It did not answer. An engine that refuses may still finish what it has; a silent one is given up."""
        engine = self._by_name[event.name]
        # what it streams may still come: a port can be closed before a server has drained
        if event.refuses:
            self.close_engine(engine, event.reason)
        elif now_ns - max(engine.answered_ns, event.last_seen_ns) >= self._dead_after_ns:
            self.close_engine(engine, event.reason)
            for request_id in engine.attempts:
                self._act(Abort(request_id, engine.name, f"it has fallen silent: {event.reason}"))

    # -- KV events

    def block_counts(self, name: str) -> dict[Hash, tuple[int, int]]:
        """What it has published and not removed, as :meth:`EngineKvFeed.block_counts` tells it."""
        feed = self._by_name[name].feed
        return feed.block_counts() if feed is not None else {}

    def on_kv_received(self, event: KvReceived, now_ns: int) -> None:
        """A batch of its KV events."""
        engine = self._by_name[event.name]
        if engine.listener is not None:
            self._request_replay(engine, engine.listener.on_received(event, now_ns))

    def on_replay_ended(self, event: ReplayEnded) -> None:
        """No more of what it was asked for will come."""
        engine = self._by_name[event.name]
        if engine.listener is not None:
            self._request_replay(engine, engine.listener.on_replay_ended())

    def _request_replay(self, engine: FleetEngine, first: int | None) -> None:
        """``first`` None: nothing is missing, or it was asked for."""
        if first is not None:
            self._act(RequestReplay(engine.name, first))


@dataclass(frozen=True, slots=True)
class Team:
    """Engines of which one is chosen; none: no engine that is there can do it."""

    engines: Sequence[FleetEngine]
    answering: Sequence[FleetEngine] = ()
    """Not empty: the chosen one computes the prompt, and one of these answers."""


def team_of(engines: Sequence[FleetEngine], *, splits: bool, is_computed: bool) -> Team:
    """Those of ``engines`` that may do the next part. ``splits``: the prompt is worth a second engine; ``is_computed``:
    it was computed already.

    Of engines that need not be two, only those that decode for others are known to read what those have computed;
    while there are none, others do both parts, at last also those that else compute alone."""
    # those that answer only together: engines of other kinds do not speak their protocol
    pairing = [engine for engine in engines if engine.spec.computes_in_pairs]
    single = [engine for engine in engines if not engine.spec.computes_in_pairs]
    computing, answering = _of_role(pairing, Role.PREFILL), _of_role(pairing, Role.DECODE)
    if computing and answering and (splits or not single):
        return Team(computing, answering)
    prefill, decode = _of_role(single, Role.PREFILL), _of_role(single, Role.DECODE)
    if splits and prefill and decode:
        return Team(prefill)
    if is_computed and decode:
        return Team(decode)
    return Team(decode + _of_role(single, Role.COLOCATED) or prefill)


def _of_role(engines: Sequence[FleetEngine], role: Role) -> list[FleetEngine]:
    return [engine for engine in engines if engine.spec.role is role]


def _load_of(report: EngineReport, running: int) -> Load:
    context = int(report.kv_usage * report.kv_tokens) or running * PROMPT_TOKENS_USUAL
    return Load(
        requests_waiting=report.waiting,
        sequences_running=running,
        prefill_tokens_queued=report.waiting * PROMPT_TOKENS_USUAL,
        context_tokens_running=context,
        hbm_blocks_available=max(0, report.kv_tokens - context),
    )


def fingerprint_of(model: str, space: PromptSpace, block_tokens: int) -> str:
    """What tells the blocks of one model, space and size from all others."""
    return f"{model}\x1f{space}\x1f{block_tokens}"
