"""One mailbox of several routers in one process, one for each served model: members find all of them at one address.

A member says with its ``Join`` which model it is for; from then on its messages are that model's router's. Messages of
processes that no router knows are the first one's, which answers them as any router does.
"""

from __future__ import annotations

import itertools
import logging
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence

from memserve.base.errors import InvariantError, UserError
from memserve.protocol.messages import AnyMessage, Join, Refused
from memserve.protocol.peers import Peer
from memserve.transport.outbound import MailboxCounters
from memserve.transport.ports import Mailbox, OnMessage

log = logging.getLogger(__name__)


class SharedMailbox:
    """Owns the mailbox. Thread-safe; each part is a :class:`memserve.transport.ports.Mailbox`."""

    def __init__(self, open_mailbox: Callable[[OnMessage], Mailbox], self_peer: Peer, models: Sequence[str]) -> None:
        """``self_peer``: under which the mailbox is known, and so all routers behind it. ``models``: those whose parts
        will be opened; until then their members are not answered, and ask again."""
        self.self_peer = self_peer
        self.store_numbers = itertools.count()
        """For stores that are invited: each is known under another one."""
        self._lock = threading.Lock()
        self._expected = set(models)
        self._loop: AbstractEventLoop | None = None
        self._parts: dict[str, MailboxPart] = {}  # by model, the first one first
        self._names: dict[str, MailboxPart] = {}  # by the names of members that a part has connected
        self._mailbox = open_mailbox(self._deliver_message)

    def open_part(self, model: str, on_message: OnMessage) -> MailboxPart:
        """The part of ``model``'s router. Raises :class:`UserError` where there is one already."""
        with self._lock:
            if model in self._parts:
                raise UserError(f"the model {model!r} is served already", hint="take another name", param="model")
            self._expected.discard(model)
            part = self._parts[model] = MailboxPart(self, self._mailbox, model, on_message)
            return part

    def read_in(self, loop: AbstractEventLoop | None) -> None:
        """As of any mailbox, for all parts at once; each of them may ask for it."""
        if loop is not self._loop:
            self._loop = loop
            self._mailbox.read_in(loop)

    def close(self) -> None:
        """Close the mailbox. After all parts."""
        self._mailbox.close()

    # -- for the parts

    def connect_peer(self, part: MailboxPart, peer: Peer, address: str) -> None:
        """``peer`` is of ``part`` from now on."""
        with self._lock:
            self._names[peer.name] = part
        self._mailbox.connect(peer, address)

    def disconnect_peer(self, part: MailboxPart, peer: Peer) -> None:
        """``peer`` is of no part any more, unless another incarnation is."""
        self._mailbox.disconnect(peer)
        if part.forget_peer(peer):
            with self._lock:
                if self._names.get(peer.name) is part:
                    del self._names[peer.name]

    def close_part(self, part: MailboxPart) -> None:
        """Its members are not heard any more."""
        with self._lock:
            if self._parts.get(part.model) is part:
                del self._parts[part.model]
            self._names = {name: other for name, other in self._names.items() if other is not part}

    # -- the thread that reads

    def _deliver_message(self, sender: Peer, message: AnyMessage) -> None:
        with self._lock:
            part, why = self._find_part(sender, message)
        if part is not None:
            part.on_message(sender, message)
        elif why:
            log.warning("%s is refused: %s", sender.name, why)
            self._mailbox.send(sender, Refused(why))

    def _find_part(self, sender: Peer, message: AnyMessage) -> tuple[MailboxPart | None, str]:
        """Whose a message is; else why its sender is refused."""
        current, first = self._names.get(sender.name), next(iter(self._parts.values()), None)
        if not isinstance(message, Join):
            return current or first, ""
        model = message.info.model
        part = self._parts.get(model) if model else first
        if part is None:
            if model in self._expected or not self._parts:
                return None, ""
            return None, f"this router serves {', '.join(self._parts) or 'no model'}, not {model!r}: join with --model"
        if current is not None and current is not part:
            return None, f"a member for the model {current.model!r} is called {sender.name!r}: take another --name"
        return part, ""


class MailboxPart:
    """What one router has of the mailbox."""

    def __init__(self, shared: SharedMailbox, mailbox: Mailbox, model: str, on_message: OnMessage) -> None:
        self._shared, self._mailbox = shared, mailbox
        self.model, self.on_message = model, on_message
        self._peers: dict[str, Peer] = {}  # by name, the newest incarnation

    @property
    def address(self) -> str:
        """Where others reach it: at one address for all models."""
        return self._mailbox.address

    @property
    def counters(self) -> MailboxCounters:
        """Of the whole mailbox."""
        return self._mailbox.counters

    def connect(self, peer: Peer, address: str) -> None:
        """As of any mailbox."""
        self._peers[peer.name] = peer
        self._shared.connect_peer(self, peer, address)

    def disconnect(self, peer: Peer) -> None:
        """As of any mailbox."""
        self._shared.disconnect_peer(self, peer)

    def forget_peer(self, peer: Peer) -> bool:
        """Whether ``peer`` was the newest incarnation of its name."""
        if self._peers.get(peer.name) != peer:
            return False
        del self._peers[peer.name]
        return True

    def send(self, to: Peer, message: AnyMessage) -> None:
        """As of any mailbox."""
        self._mailbox.send(to, message)

    def restart_as(self, self_peer: Peer) -> None:
        """Only followers begin anew, and they share no mailbox."""
        raise InvariantError("a router that shares its mailbox keeps its name")

    def read_in(self, loop: AbstractEventLoop | None) -> None:
        """Messages of all parts are read there."""
        self._shared.read_in(loop)

    def close(self) -> None:
        """Hear no more; members of other models go on."""
        self._shared.close_part(self)
