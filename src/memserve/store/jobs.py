"""Numbers and actions that the parts of a store's machine share."""

from __future__ import annotations

from memserve.messages import AnyMessage, Peer
from memserve.serving import Send
from memserve.store.events import StoreAction


class Jobs:
    """Jobs for the host, and everything else that it is asked for, in order."""

    def __init__(self) -> None:
        self._number = 0
        self._actions: list[StoreAction] = []

    def new(self) -> int:
        """The number of a job."""
        self._number += 1
        return self._number

    def ask(self, action: StoreAction) -> None:
        """Have the host do something."""
        self._actions.append(action)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Send a message."""
        self._actions.append(Send(to, message))

    def take(self) -> list[StoreAction]:
        """What was asked for since the last call."""
        actions, self._actions = self._actions, []
        return actions
