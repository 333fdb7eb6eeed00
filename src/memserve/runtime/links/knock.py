"""Why no router answers: whether something listens at its address, and takes the cluster's secret."""

from __future__ import annotations

import enum
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from memserve.runtime.links.curve import Context, CurveKeys, watch
from memserve.runtime.private_files import Secret, followed


class Knock(enum.Enum):
    """What an address does with a knock."""

    SILENT = "silent"  # nothing listens there, or nothing comes through
    TURNED_AWAY = "turned away"  # something listens, and does not take the secret
    LET_IN = "let in"  # a member of the cluster, which may not be the router


def knock(address: str, secret: Secret, timeout_s: float) -> Knock:
    """Connect to ``address`` (``tcp://host:port``) as a member would, say nothing, and leave; with each secret, where
    there are several. Blocks for ``timeout_s`` each at most."""
    found = [_knock(address, keys, timeout_s) for keys in CurveKeys.all_in(followed(secret).value())]
    return next((one for one in (Knock.LET_IN, Knock.TURNED_AWAY) if one in found), Knock.SILENT)


def _knock(address: str, keys: CurveKeys, timeout_s: float) -> Knock:
    context: Context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.ipv6 = "[" in address
        keys.speak(socket)
        monitor = watch(socket)
        socket.connect(address)
        deadline = time.monotonic() + timeout_s
        found = Knock.SILENT
        if monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            event = int(parse_monitor_message(monitor.recv_multipart())["event"])
            found = Knock.LET_IN if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else Knock.TURNED_AWAY
        socket.disable_monitor()
        return found
    except zmq.ZMQError:
        return Knock.SILENT  # no address, or no more sockets
    finally:
        context.destroy(linger=0)
