"""When the machine acts, and what it asks its host for, in which order: timers, actions, durability."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from memserve.base.errors import check
from memserve.base.types import Role, TokenOutput
from memserve.protocol.events import KeyConflict
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve.protocol.records import AnyRecord
from memserve.router.events import (
    AdapterAnswered,
    AdapterNamesChanged,
    ClusterAction,
    EmitTokens,
    MemberChange,
    Note,
    RejectRequest,
    Remember,
    ReportMember,
    Send,
)

Subject = TypeVar("Subject")


class Timers:
    """One heap for all deadlines. Entries are never moved or removed: the function that is called looks whether it is
    time, and arms again if not.

    So renewing a deadline costs nothing: a member that beats twice a second has one entry in ``dead_after_ns``.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[Any, int], None], Any]] = []
        self._armed = 0
        #: the earliest entry; None: there is none
        self.next_ns: int | None = None

    def arm(self, when_ns: int, wake: Callable[[Subject, int], None], subject: Subject) -> None:
        """Call ``wake(subject, now)`` at ``when_ns``. Entries of one time come in the order in which they were
        armed."""
        self._armed += 1
        heapq.heappush(self._heap, (when_ns, self._armed, wake, subject))
        self.next_ns = self._heap[0][0]

    def run_due(self, now_ns: int) -> None:
        """Call what is due, earliest first; what is armed meanwhile for ``now_ns`` or before comes as well."""
        while self.next_ns is not None and self.next_ns <= now_ns:
            _, _, wake, subject = heapq.heappop(self._heap)
            self.next_ns = self._heap[0][0] if self._heap else None
            wake(subject, now_ns)


class Outbox:
    """Messages in the order in which they were written; tokens of all requests in one action before them.

    Between the two stands what must be durable before any of the messages leaves; behind them what may be so later.
    Tokens promise nothing about the cluster, so they wait for no disk. Reports to operators come last.
    """

    def __init__(self, remembers: bool) -> None:
        self._actions: list[ClusterAction] = []
        self._outputs: list[TokenOutput] = []
        self._ahead: list[AnyRecord] = []
        self._later: list[AnyRecord] = []
        self._reports: list[ReportMember] = []
        #: whether the host keeps records; else they are not even made where that costs something
        self.remembers = remembers
        #: requests with a key, and what becomes of their outputs
        self._keyed_answers: Mapping[str, Reads] = {}
        self._relay: Callable[[TokenOutput], TokenOutput | None] = lambda output: output

    def relay_keyed(self, keyed: Mapping[str, Reads], relay: Callable[[TokenOutput], TokenOutput | None]) -> None:
        """Outputs of the requests in ``keyed`` go through ``relay``: to the connection that reads them, or to none."""
        self._keyed_answers, self._relay = keyed, relay

    def record_ahead(self, record: AnyRecord) -> None:
        """Durable before any message of this event leaves."""
        if self.remembers:
            self._ahead.append(record)

    def record_later(self, record: AnyRecord) -> None:
        """Durable some time later."""
        if self.remembers:
            self._later.append(record)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Send ``message`` to ``to``."""
        self._actions.append(Send(to, message))

    def emit_output(self, output: TokenOutput) -> None:
        """News for a client."""
        if output.request_id in self._keyed_answers:
            relayed = self._relay(output)
            if relayed is None:
                return
            output = relayed
        self._outputs.append(output)

    def reject_request(
        self,
        request_id: str,
        reason: str,
        retry_after_s: float | None,
        overloaded: bool = False,
        *,
        conflict: KeyConflict | None = None,
        is_reader: bool = False,
    ) -> None:
        """A request that will not be run. ``is_reader``: the name is that of a connection, not that of a request."""
        keyed = self._keyed_answers.get(request_id) if not is_reader else None
        name = request_id if keyed is None else keyed.reader
        if name:
            self._actions.append(RejectRequest(name, reason, retry_after_s, overloaded, conflict))

    def answer_adapter(self, answer: AdapterAnswered) -> None:
        """A client's call about an adapter has come to its end."""
        self._actions.append(answer)

    def change_adapter_names(self, names: AdapterNamesChanged) -> None:
        """Clients find other adapters from now on."""
        self._actions.append(names)

    def report_member(
        self, change: MemberChange, peer: Peer, address: str = "", why: str = "", *, role: Role | None = None
    ) -> None:
        """News of a member for operators."""
        self._reports.append(ReportMember(change, peer, address, why, role))

    def take_actions(self) -> list[ClusterAction]:
        """Everything since the last call."""
        actions, self._actions = self._actions, []
        if self._ahead:
            actions.insert(0, Remember(tuple(self._ahead)))
            self._ahead.clear()
        if self._later:
            actions.append(Note(tuple(self._later)))
            self._later.clear()
        if self._outputs:
            actions.insert(0, EmitTokens(self._outputs))
            self._outputs = []
        actions += self._reports
        self._reports.clear()
        return actions


class Reads(Protocol):
    """An answer, as far as it matters here."""

    @property
    def reader(self) -> str:
        """The connection that gets it; empty: none."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write records down, in order."""

    records: Sequence[AnyRecord]
    number: int | None
    """N: once these records and all before them are durable, or cannot be made so,
    :meth:`DurabilityGate.release_actions` is to be called with N. None: nothing waits for them."""


class DurabilityGate:
    """Holds back a router's actions until what they depend on is durable.

    An action behind a ``Remember`` waits until its records are durable. So does every later message to a peer for which
    an earlier one waits: each member hears all in order. Everything else goes on: no request is slowed by a pin that
    waits for the disk.
    """

    def __init__(self) -> None:
        self._writes_requested = self._writes_released = 0
        #: actions that wait, with the number of the Write that they wait for; numbers never fall
        self._waiting: deque[tuple[int, ClusterAction]] = deque()
        #: messages among them, by receiver
        self._waiting_messages: Counter[Peer] = Counter()

    def admit_actions(self, actions: Iterable[ClusterAction]) -> list[ClusterAction | Write]:
        """What is to be done now of the actions that one event led to; the rest follows from
        :meth:`release_actions`."""
        ready: list[ClusterAction | Write] = []
        is_behind = False
        for action in actions:
            if isinstance(action, Note):
                ready.append(Write(action.records, None))
            elif isinstance(action, Remember):
                is_behind = True
                self._writes_requested += 1
                ready.append(Write(action.records, self._writes_requested))
            elif isinstance(action, ReportMember | RejectRequest):
                ready.append(action)  # operators and clients hear it whatever the disk does: it promises nothing
            elif is_behind or (isinstance(action, Send) and action.to in self._waiting_messages):
                self._hold_action(action)
            else:
                ready.append(action)
        return ready

    def release_actions(self, number: int) -> list[ClusterAction]:
        """What waited for the Write of this number, or for one before it."""
        self._writes_released = max(self._writes_released, number)
        ready: list[ClusterAction] = []
        while self._waiting and self._waiting[0][0] <= self._writes_released:
            _, action = self._waiting.popleft()
            if isinstance(action, Send):
                self._waiting_messages[action.to] -= 1
                if not self._waiting_messages[action.to]:
                    del self._waiting_messages[action.to]
            ready.append(action)
        return ready

    def _hold_action(self, action: ClusterAction) -> None:
        self._waiting.append((self._writes_requested, action))
        if isinstance(action, Send):
            self._waiting_messages[action.to] += 1

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if actions wait out of order, or for nothing."""
        numbers = [number for number, _ in self._waiting]
        check(numbers == sorted(numbers), "actions wait out of order")
        check(
            all(self._writes_released < number <= self._writes_requested for number in numbers),
            "an action waits for nothing",
        )
        waiting = Counter(action.to for _, action in self._waiting if isinstance(action, Send))
        check(
            waiting == self._waiting_messages, "messages wait for {}, counted are {}", waiting, self._waiting_messages
        )
