"""Why no router answers: whether something listens at its address, and takes the cluster's secret."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from memserve.base.errors import UserError
from memserve.system.secrets import Secret, followed
from memserve.transport.curve import Context, CurveKeys, watch


class ProbeResult(enum.Enum):
    """What an address does with a knock."""

    SILENT = "silent"  # nothing listens there, or nothing comes through
    TURNED_AWAY = "turned away"  # something listens, and does not take the secret
    LET_IN = "let in"  # a member of the cluster, which may not be the router


KNOCK_S = 1.0
"""How long a process that waits for its router may take to find out why."""

_WAITS = {
    ProbeResult.SILENT: ": nothing answers there",
    ProbeResult.TURNED_AWAY: ": what listens there refuses the secret",
    ProbeResult.LET_IN: " to answer: it takes the secret",
}


def knock(address: str, secret: Secret, timeout_s: float) -> ProbeResult:
    """Connect to ``address`` (``tcp://host:port``) as a member would, say nothing, and leave; with each secret, where
    there are several. Blocks for ``timeout_s`` each at most."""
    found = [_knock(address, keys, timeout_s) for keys in CurveKeys.all_in(followed(secret).value())]
    return next((one for one in (ProbeResult.LET_IN, ProbeResult.TURNED_AWAY) if one in found), ProbeResult.SILENT)


def knock_at_all(addresses: Iterable[str], secret: Secret) -> dict[str, ProbeResult]:
    """What each does with a knock. Blocks for ``KNOCK_S`` each at most, with each secret."""
    return {address: knock(address, secret, KNOCK_S) for address in addresses}


def what_is_waited_for(found: Mapping[str, ProbeResult], router: str) -> list[str]:
    """A line for each address that may be that of ``router`` (the words for it, "a router" or "the owner")."""
    return [f"waiting for {router} at {_place(address)}{_WAITS[answer]}" for address, answer in found.items()]


def no_router(found: Mapping[str, ProbeResult], router: str) -> UserError:
    """The end of waiting for ``router``, "a router" or "the owner"."""
    places, kind = ", ".join(map(_place, found)), router.split()[-1]
    if ProbeResult.TURNED_AWAY in found.values():
        hint = "give the file that `memserve serve --cluster-secret-file` was given, and its --cluster-port"
        return UserError(f"the {kind} at {places} refuses the secret", hint=hint, param="join")
    hint = "is `memserve serve --cluster-port` running there, and can this host reach it?"
    return UserError(f"no {kind} answers at {places}", hint=hint, param="join")


def _place(address: str) -> str:
    return address.removeprefix("tcp://")


def _knock(address: str, keys: CurveKeys, timeout_s: float) -> ProbeResult:
    context: Context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.ipv6 = "[" in address
        keys.speak(socket)
        monitor = watch(socket)
        socket.connect(address)
        deadline = time.monotonic() + timeout_s
        found = ProbeResult.SILENT
        if monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            event = int(parse_monitor_message(monitor.recv_multipart())["event"])
            found = ProbeResult.LET_IN if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else ProbeResult.TURNED_AWAY
        socket.disable_monitor()
        return found
    except zmq.ZMQError:
        return ProbeResult.SILENT  # no address, or no more sockets
    finally:
        context.destroy(linger=0)
