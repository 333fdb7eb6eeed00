"""An engine without a model, for tests of the edges: it says what a script tells it, as fast as the test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memserve.base.types import FinishReason, NamedPrefix, Request, TokenArray, TokenLogprobs, TokenOutput
from memserve.host.engine import Refusal, Rejected
from memserve.host.stats import EngineStats
from memserve.instance.stats import InstanceStats, TierStats
from memserve.system.loop import EngineStopped

Sink = Callable[[TokenOutput | Rejected], None]
Script = Callable[[Request, int], Sequence[int]]
"""What sequence ``index`` of a request says. When the script is over, it starts again."""

BLOCK_TOKENS = 4


@dataclass
class _Running:
    request: Request
    sink: Sink
    said: list[int] = field(default_factory=list)  # tokens given so far, one number a sequence
    ended: dict[int, FinishReason] = field(default_factory=dict)
    started: bool = False


class FakeEngine:
    """Answers from ``script``. ``step_s=None``: nothing happens until the test calls :meth:`step`."""

    def __init__(
        self, script: Script, *, step_s: float | None = 0.0, max_requests: int = 4096, retry_after_s: float | None = 1.0
    ) -> None:
        self.script = script
        self.max_requests = max_requests
        self.retry_after_s = retry_after_s
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        self.tools: list[tuple[str, str]] = []
        self.stats_error: Exception | None = None
        self.submit_error: Exception | None = None
        self.logprob_of: Callable[[int], float] = lambda index: -0.5  # of every token that a sequence draws
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._known: dict[str, set[tuple[int, ...]]] = {}  # tenant -> prefixes of whole blocks
        self._changed = threading.Condition()
        self._closing = False
        self._steps = 0
        if step_s is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    # -- what the edges call

    @property
    def closing(self) -> bool:
        return self._closing

    def submit(self, request: Request, sink: Sink) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        if self._closing:
            sink(Rejected(request.request_id, "the server is shutting down", 5.0, Refusal.CLOSING))
            return
        with self._changed:
            self.submitted.append(request)
            if len(self._running) < self.max_requests:
                self._running[request.request_id] = _Running(request, sink, [0] * request.n)
                self._changed.notify_all()
                return
        refusal = Refusal.IMPOSSIBLE if self.retry_after_s is None else Refusal.BUSY
        sink(Rejected(request.request_id, "the queue is full", self.retry_after_s, refusal))

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            running = self._running.get(request_id)
            if running is not None:
                for index in range(running.request.n):
                    self._end(running, index, FinishReason.CANCELLED)
            self._changed.notify_all()

    def stop_sequence(self, request_id: str, index: int) -> None:
        with self._changed:
            self.stopped.append((request_id, index))
            running = self._running.get(request_id)
            if running is not None:
                self._end(running, index, FinishReason.STOP)
            self._changed.notify_all()

    def note_tool(self, request_id: str, tool: str) -> None:
        self.tools.append((request_id, tool))

    def stats(self) -> EngineStats:
        if self.stats_error is not None:
            raise self.stats_error
        instance = InstanceStats(
            requests_arrived=len(self.submitted),
            hbm=TierStats(blocks_total=100, blocks_free=70, blocks_cached=20),
            running_slots_tokens=64,
            running_tokens=50,
        )
        return EngineStats(steps=self._steps, machine_ns=10_000_000, device_ns=1_000_000_000, instance=instance)

    def close(self, timeout_s: float = 5.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._step_s is not None:
            self._thread.join(timeout_s)

    # -- what the tests call

    @property
    def requests_outstanding(self) -> int:
        with self._changed:
            return len(self._running)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until ``condition`` holds; it is looked at whenever something happens to a request."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def step(self) -> None:
        """Give one token to every running sequence."""
        with self._changed:
            self._steps += 1
            for running in list(self._running.values()):
                self._advance(running)
            self._changed.notify_all()

    # -- inside

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closing)
                if self._closing:
                    return
            self.step()
            if self._step_s:
                time.sleep(self._step_s)  # the pretended device

    def _advance(self, running: _Running) -> None:
        request = running.request
        late = request.deadline_ns is not None and time.monotonic_ns() > request.deadline_ns
        for index in range(request.n):
            if index in running.ended:
                continue
            if late:
                self._end(running, index, FinishReason.DEADLINE)
                continue
            words = self.script(request, index)
            token = words[running.said[index] % len(words)]
            running.said[index] += 1
            reason = None
            if token in request.stop.stop_token_ids and running.said[index] > request.stop.min_tokens:
                reason = FinishReason.STOP
            elif running.said[index] >= request.stop.max_tokens:
                reason = FinishReason.LENGTH
            self._emit(running, index, (token,), reason)

    def _emit(self, running: _Running, index: int, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        request = running.request
        first = not running.started
        running.started = True
        cached = self._look_up(request) if first else 0
        if reason is not None:
            self._finish(running, index, reason)
        sampling = request.sampling
        logprob = self.logprob_of(index)
        count = sampling.logprobs
        logprobs = tuple(_logprobs(token, count, logprob) for token in tokens) if count is not None else ()
        prompt = None
        if first and sampling.prompt_logprobs:
            rest = (_logprobs(int(token), count or 0, -0.5) for token in request.prompt[1:])
            prompt = (None, *rest)
        running.sink(
            TokenOutput(request.request_id, index, tokens, logprobs, reason, cached, prompt,
                        queue_ns=2_000_000 if first else None)
        )  # fmt: skip

    def _end(self, running: _Running, index: int, reason: FinishReason) -> None:
        if index not in running.ended:
            self._emit(running, index, (), reason)

    def _finish(self, running: _Running, index: int, reason: FinishReason) -> None:
        running.ended[index] = reason
        if len(running.ended) == running.request.n:
            self._running.pop(running.request.request_id, None)

    def _look_up(self, request: Request) -> int:
        """A prefix cache that never forgets: whole blocks, and never the last token of a prompt."""
        known = self._known.setdefault(request.isolation, set())
        tokens = request.prompt.tolist()
        prefixes = [tuple(tokens[:end]) for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)]
        cached = max((len(prefix) for prefix in prefixes if prefix in known), default=0) if request.use_cache else 0
        known.update(prefixes)
        return cached


def _logprobs(token: int, count: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, tuple((token + rank, logprob - rank) for rank in range(count)))


class PinningFake(FakeEngine):
    """Remembers pins, and answers at the second look, as a cluster does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pins: dict[tuple[str, str], tuple[list[int], int]] = {}
        self.unpinned: list[tuple[str, str]] = []
        self.looks = 0
        self.silent = False

    def pin_prefix(self, handle: str, tenant: str, tokens: TokenArray, ttl_ns: int, salt: str = "") -> None:
        with self._changed:
            self.pins[tenant, handle] = (tokens.tolist(), ttl_ns)
            self._changed.notify_all()

    def unpin_prefix(self, handle: str, tenant: str) -> None:
        self.unpinned.append((tenant, handle))
        self.pins.pop((tenant, handle), None)

    def pinned_tokens(self, handles: Sequence[str], tenant: str) -> list[int | None]:
        self.looks += 1
        if self.silent:
            raise EngineStopped
        pins = [self.pins.get((tenant, handle)) for handle in handles]
        if self.looks % 2:
            return [None] * len(handles)
        return [len(pin[0]) // BLOCK_TOKENS * BLOCK_TOKENS if pin is not None else None for pin in pins]

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        if self.silent:
            raise EngineStopped
        with self._changed:
            end_ns = time.monotonic_ns()
            kept = [(name, tokens, ttl_ns) for (owner, name), (tokens, ttl_ns) in self.pins.items() if owner == tenant]
        return [NamedPrefix(name, len(tokens), end_ns + ttl_ns) for name, tokens, ttl_ns in kept]
