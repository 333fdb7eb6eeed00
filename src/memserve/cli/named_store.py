"""The store that ``memserve serve --store HOST:PORT`` names: it runs already, and is asked to join."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.cli.options import split_address
from memserve.errors import StoreUnavailable, UserError
from memserve.runtime.links.devices import own_address, with_port
from memserve.runtime.private_files import Secret

if TYPE_CHECKING:
    from memserve.runtime.router import RouterEngine

FIND_S = 30.0
"""How long the start waits until the store answers at all."""
JOIN_S = 60.0
"""How long the store may take to join, once it has answered; it may begin another life meanwhile."""
DECLINED_S = 12.0
"""A store that belongs to another router finds out within so many seconds that this router is gone."""
_LOOK_S = 2.0
_KNOCK_S = 1.0
_LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class NamedStore:
    """A store that has answered."""

    name: str
    """Under which it joins."""
    address: str
    """``HOST:PORT``."""

    def check_joins(self, engine: RouterEngine, seconds: float) -> None:
        """Raise :class:`UserError` when it has not joined for ``seconds`` and will not."""
        declined = engine.declined
        if declined is not None and declined.peer.name == self.name and seconds > DECLINED_S:
            hint = "end `memserve serve` there, or start a store of its own for this one: a store has one router"
            raise UserError(f"the store at {self.address} does not join: {declined.why}", hint=hint)
        if seconds > JOIN_S:
            here = engine.address.removeprefix("tcp://")
            hint = f"can its host reach this router at {here} (--cluster-host)? The log of the store has more"
            raise UserError(f"the store at {self.address} answers, and has not joined for {seconds:.0f} s", hint=hint)


def find_store(address: str, secret: Secret, cluster_host: str, say: Callable[[str], None]) -> NamedStore:
    """Wait until the store at ``address`` (``HOST:PORT``) answers, for ``FIND_S`` at most.

    Raises :class:`UserError` when nothing answers there by then; at once for another secret, and where the store could
    not reach a router at ``cluster_host``."""
    from memserve.client.arguments import own_host
    from memserve.client.connection import Connection

    host, port = split_address(address, "--store")
    address = with_port(host, port)
    if own_address(cluster_host) in _LOOPBACK and own_address(host) is None:
        hint = "name the address by which other hosts reach this one: --cluster-host HOST"
        raise UserError(f"the store at {address} cannot reach a router at {cluster_host}", hint=hint, param="store")
    deadline, is_told = time.monotonic() + FIND_S, False
    line = Connection(address, "default", secret, 1, own_host(address))
    try:
        while True:
            try:
                session = line.session(time.monotonic() + _LOOK_S)
                return NamedStore(session.peer.name, address)
            except StoreUnavailable:
                _complain(address, secret, is_late=time.monotonic() >= deadline)
            if not is_told:
                say(f"waiting for the store at {address}, for up to {FIND_S:.0f} s ...")
            is_told = True
    finally:
        line.close()


def _complain(address: str, secret: Secret, *, is_late: bool) -> None:
    """Raise :class:`UserError` where it is of no use to wait for a store."""
    from memserve.runtime.links.knock import Knock, knock

    match knock(f"tcp://{address}", secret, _KNOCK_S):
        case Knock.TURNED_AWAY:
            hint = "give the file that this store was started with: --cluster-secret-file FILE"
            raise UserError(f"the store at {address} has another secret", hint=hint, param="cluster_secret_file")
        case Knock.SILENT:
            what = "nothing answers there"
            hint = f"start it: memserve store --listen {address} --cluster-secret-file FILE; or correct the address"
        case Knock.LET_IN:
            what = "it takes the secret, and does not answer as a store"
            hint = "give the address that `memserve store --listen` has"
    if is_late:
        raise UserError(f"no store at {address}: {what}", hint=hint, param="store")
