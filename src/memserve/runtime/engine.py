"""The engine: one instance for the clients of its own process (level 3).

client threads --submit--> inbox --> [machine] --> sinks (new tokens, called by the engine thread)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from memserve.instance.events import Action
from memserve.instance.machine import Instance
from memserve.runtime.clients import Clients, Sink
from memserve.runtime.clients import EngineStopped as EngineStopped
from memserve.runtime.clients import Refusal as Refusal
from memserve.runtime.clients import Rejected as Rejected
from memserve.runtime.hosted import HostedInstance
from memserve.runtime.ports import Device
from memserve.runtime.stats import EngineStats
from memserve.serving import (
    EmitTokens,
    PrefixPinned,
    PrefixUnpinned,
    RejectRequest,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
)
from memserve.types import NamedPrefix, Request, TokenArray


class Engine:
    """Runs requests: thread-safe ``submit``, answers through a sink that the engine thread calls."""

    def __init__(self, machine: Instance, device: Device, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clients = Clients(self.cancel)
        self._instance = HostedInstance(
            machine, device, self._perform, on_broken=self._clients.fail_all, clock_ns=clock_ns
        )
        self._closed = False
        self._instance.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Run ``request``. ``sink`` gets every :class:`TokenOutput`, or one :class:`Rejected`."""
        self._clients.submit(request, sink, lambda request: self._instance.post(RequestArrived(request)))

    def cancel(self, request_id: str) -> None:
        """End every sequence of the request; unknown ids are ignored (it may just have ended)."""
        self._instance.post(RequestCancelled(request_id))

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence with ``FinishReason.STOP``: the edge found a stop string."""
        self._instance.post(SequenceStopped(request_id, index))

    def pin(self, handle: str, tenant: str, tokens: TokenArray, ttl_ns: int, salt: str = "") -> None:
        """Keep what is cached of ``tokens`` for ``ttl_ns`` under a name. Repeated: renewed, extended."""
        self._instance.post(PrefixPinned(handle, tenant, tokens, ttl_ns, salt))

    def unpin(self, handle: str, tenant: str) -> None:
        """Give the name up; unknown ones are ignored."""
        self._instance.post(PrefixUnpinned(handle, tenant))

    def pinned_tokens(self, handles: Sequence[str], tenant: str) -> list[int | None]:
        """How much of it is pinned. Raises as :meth:`stats`."""
        machine = self._instance.machine
        return self._instance.ask(lambda: [machine.pinned_tokens(handle, tenant) for handle in handles])

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """What is kept under a tenant's names; their times are those of the engine's clock. Raises as :meth:`stats`."""
        return self._instance.ask(lambda: self._instance.machine.named_prefixes(tenant))

    def stats(self) -> EngineStats:
        """A consistent snapshot of counters and gauges.

        Raises ``TimeoutError`` when the engine is stuck, :class:`EngineStopped` when it has ended: that one at once.
        """
        return self._instance.stats()

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return self._clients.outstanding

    @property
    def closing(self) -> bool:
        """Whether new requests are refused: the engine is closing, or its machine broke."""
        return self._clients.closing

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, stop both threads and free the device."""
        if self._closed:
            return
        self._closed = True
        for request_id in self._clients.close():
            self.cancel(request_id)
        self._instance.close(timeout_s)

    def _perform(self, action: Action) -> None:
        """Does the machine's bidding, in the engine thread. Without peers it has nothing to say to any."""
        if isinstance(action, EmitTokens):
            self._clients.deliver(action.outputs)
        elif isinstance(action, RejectRequest):
            self._clients.reject(action.request_id, action.reason, action.retry_after_s, action.overloaded)
