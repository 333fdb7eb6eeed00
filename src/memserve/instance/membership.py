"""Who gives orders to an instance, and who else is a member of its cluster (level 2)."""

from __future__ import annotations

from memserve.kv_transfer.exchange import Exchange
from memserve.kv_transfer.outcomes import Outcome
from memserve.messages import ROUTER, AnyMessage, JoinAccepted, Peer, PeerInfo


class Membership:
    """The router, and the peers that it has told of."""

    __slots__ = ("_exchange", "_peers", "me", "router")

    def __init__(self, exchange: Exchange, me: Peer) -> None:
        self._exchange = exchange
        self._peers: dict[str, Peer] = {}
        self.me = me
        self.router: Peer | None = None

    def obeys(self, sender: Peer) -> bool:
        """Whether ``sender`` is the router. The first that calls itself so is."""
        if self.router is None and sender.name == ROUTER:
            self.router = sender
        return sender == self.router

    def is_superseded(self, sender: Peer, message: AnyMessage) -> bool:
        """A new incarnation of the router makes itself known by ``JoinAccepted``: what the old one sent is void."""
        known = self.router
        newer = known is not None and sender.name == ROUTER and sender.generation > known.generation
        return newer and isinstance(message, JoinAccepted)

    def welcome(self, message: JoinAccepted, now: int) -> list[Outcome]:
        """These are the members, and nobody else."""
        names = {info.peer.name for info in message.peers}
        outcomes: list[Outcome] = []
        for peer in [peer for name, peer in self._peers.items() if name not in names]:
            outcomes += self.gone(peer, now)
        for info in message.peers:
            outcomes += self.joined(info, now)
        return outcomes

    def joined(self, info: PeerInfo, now: int) -> list[Outcome]:
        """There is one more."""
        if info.peer.name == self.me.name:
            return []
        self._peers[info.peer.name] = info.peer
        return self._exchange.peer_joined(info, now)

    def gone(self, peer: Peer, now: int) -> list[Outcome]:
        """There is one less."""
        if self._peers.get(peer.name) == peer:
            del self._peers[peer.name]
        return self._exchange.peer_gone(peer, now)

    def begin_anew(self, me: Peer) -> None:
        """A member of nothing, called ``me`` from now on."""
        self._peers.clear()
        self.me, self.router = me, None
        self._exchange.reborn(me)
