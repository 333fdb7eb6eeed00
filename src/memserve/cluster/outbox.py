"""What one ``handle`` asks the host to do (level 2)."""

from __future__ import annotations

from collections.abc import Iterable

from memserve.cluster.events import ClusterAction, EmitTokens, RejectRequest, Send
from memserve.messages import AnyMessage, Peer
from memserve.types import TokenOutput


class Outbox:
    """Messages in the order in which they were written; tokens of all requests in one action before them."""

    __slots__ = ("_actions", "_outputs")

    def __init__(self) -> None:
        self._actions: list[ClusterAction] = []
        self._outputs: list[TokenOutput] = []

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

    def take(self) -> list[ClusterAction]:
        """Everything since the last time."""
        actions, self._actions = self._actions, []
        if self._outputs:
            actions.insert(0, EmitTokens(self._outputs))
            self._outputs = []
        return actions
