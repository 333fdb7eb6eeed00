"""What one ``handle`` asks the host to do (level 2)."""

from __future__ import annotations

from collections.abc import Iterable

from memserve.cluster.events import (
    ClusterAction,
    EmitTokens,
    MemberChange,
    Note,
    RejectRequest,
    Remember,
    ReportMember,
    Send,
)
from memserve.messages import AnyMessage, Peer
from memserve.metadata import AnyRecord
from memserve.types import TokenOutput


class Outbox:
    """Messages in the order in which they were written; tokens of all requests in one action before them.

    Between the two stands what must be durable before any of the messages leaves; behind them what may be so later.
    Tokens promise nothing about the cluster, so they wait for no disk. Reports to operators come last.
    """

    __slots__ = ("_actions", "_ahead", "_later", "_outputs", "_reports", "remembers")

    def __init__(self, remembers: bool) -> None:
        self._actions: list[ClusterAction] = []
        self._outputs: list[TokenOutput] = []
        self._ahead: list[AnyRecord] = []
        self._later: list[AnyRecord] = []
        self._reports: list[ReportMember] = []
        #: whether the host keeps records; else they are not even made where that costs something
        self.remembers = remembers

    def remember(self, record: AnyRecord) -> None:
        """Durable before any message of this event leaves."""
        if self.remembers:
            self._ahead.append(record)

    def note(self, record: AnyRecord) -> None:
        """Durable some time."""
        if self.remembers:
            self._later.append(record)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Say ``message`` to ``to``."""
        self._actions.append(Send(to, message))

    def tell_all(self, peers: Iterable[Peer], message: AnyMessage) -> None:
        """The same to everybody."""
        for peer in peers:
            self._actions.append(Send(peer, message))

    def emit(self, output: TokenOutput) -> None:
        """News for a client."""
        self._outputs.append(output)

    def reject(self, request_id: str, reason: str, retry_after_s: float | None, overloaded: bool = False) -> None:
        """A request that will not be run."""
        self._actions.append(RejectRequest(request_id, reason, retry_after_s, overloaded))

    def report(self, change: MemberChange, peer: Peer, address: str = "", why: str = "") -> None:
        """News of a member for operators."""
        self._reports.append(ReportMember(change, peer, address, why))

    def take(self) -> list[ClusterAction]:
        """Everything since the last time."""
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
