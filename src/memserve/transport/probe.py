"""Why no router answers: whether something listens at its address, and takes the cluster's secret."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from memserve.base.errors import UserError
from memserve.system.secrets import Secret, as_followed
from memserve.transport.curve import Context, CurveKeys, open_monitor


class ProbeResult(enum.Enum):
    """What an address does with a probe."""

    NO_ANSWER = "no answer"  # nothing listens there, or nothing comes through
    REJECTED = "rejected"  # something listens, and does not take the secret
    ACCEPTED = "accepted"  # a member of the cluster, which may not be the router


PROBE_S = 1.0
"""How long a process that waits for its router may take to find out why."""

_WAITS = {
    ProbeResult.NO_ANSWER: ": nothing answers there",
    ProbeResult.REJECTED: ": what listens there refuses the secret",
    ProbeResult.ACCEPTED: " to answer: it takes the secret",
}


def probe_address(address: str, secret: Secret, timeout_s: float) -> ProbeResult:
    """Connect to ``address`` (``tcp://host:port``) as a member would, say nothing, and leave; with each secret, where
    there are several. Blocks for ``timeout_s`` each at most."""
    results = [_probe_with_keys(address, keys, timeout_s) for keys in CurveKeys.all_in(as_followed(secret).value())]
    return next(
        (result for result in (ProbeResult.ACCEPTED, ProbeResult.REJECTED) if result in results), ProbeResult.NO_ANSWER
    )


def probe_all(addresses: Iterable[str], secret: Secret) -> dict[str, ProbeResult]:
    """What each does with a probe. Blocks for ``PROBE_S`` each at most, with each secret."""
    return {address: probe_address(address, secret, PROBE_S) for address in addresses}


def waiting_lines(results: Mapping[str, ProbeResult], router: str) -> list[str]:
    """A line for each address that may be that of ``router`` (the words for it, "a router" or "the owner")."""
    return [f"waiting for {router} at {_host_port(address)}{_WAITS[answer]}" for address, answer in results.items()]


def no_router_error(results: Mapping[str, ProbeResult], router: str) -> UserError:
    """The end of waiting for ``router``, "a router" or "the owner"."""
    places, kind = ", ".join(map(_host_port, results)), router.split()[-1]
    if ProbeResult.REJECTED in results.values():
        hint = "give the file that `memserve serve --cluster-secret-file` was given, and its --cluster-port"
        return UserError(f"the {kind} at {places} refuses the secret", hint=hint, param="join")
    hint = "is `memserve serve --cluster-port` running there, and can this host reach it?"
    return UserError(f"no {kind} answers at {places}", hint=hint, param="join")


def _host_port(address: str) -> str:
    return address.removeprefix("tcp://")


def _probe_with_keys(address: str, keys: CurveKeys, timeout_s: float) -> ProbeResult:
    context: Context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.ipv6 = "[" in address
        keys.configure_client(socket)
        monitor = open_monitor(socket)
        socket.connect(address)
        deadline = time.monotonic() + timeout_s
        result = ProbeResult.NO_ANSWER
        if monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            event = int(parse_monitor_message(monitor.recv_multipart())["event"])
            result = ProbeResult.ACCEPTED if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else ProbeResult.REJECTED
        socket.disable_monitor()
        return result
    except zmq.ZMQError:
        return ProbeResult.NO_ANSWER  # no address, or no more sockets
    finally:
        context.destroy(linger=0)
