"""A real instance process that fails at a chosen moment: the launcher of the failure matrix, not a test.

    python tests/support/faulty_instance.py --fault kill --moment taking-over [--skip 1] -- instance --join ...

Everything after ``--`` is the command line of ``memserve``. The process watches its own machine; at ``moment`` (for the
``skip + 1``-th time) the fault happens, once:

    kill              it kills itself with SIGKILL
    stop:SECONDS      it stops itself with SIGSTOP, and goes on after that time
    cut:SECONDS       nothing leaves or reaches its mailbox for that time; KV can still be pulled
    cut-data:SECONDS  the other way around: no KV comes or goes, while messages do. A copy out of shared memory stands
                      still in its middle for that time; connections of NIXL are shut down as soon as they are made
    corrupt           one byte of the next page that it pulls is flipped on the way
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MOMENTS = {
    "queued": "a request waits here, for others run in its place",
    "prefilling": "a step computes a piece of a prompt",
    "decoding": "a step computes the next token of a sequence",
    "handing-over": "the decode instance may pull KV of a prompt from here",
    "taking-over": "KV of a prompt is being pulled from the prefill instance",
    "fetch-asked": "another instance was asked for a prefix",
    "fetching": "that prefix is being pulled",
    "fetch-heard": "another instance asks for a prefix",
    "lending": "that instance may pull the prefix from here",
    "sending-home": "the prefill instance may pull KV of an answer from here (PD-Caching-3)",
    "coming-home": "KV of an answer is being pulled from the decode instance",
}
OFFERED = {"handoff": "handing-over", "fetch": "lending", "return": "sending-home"}
PULLED = {"handoff": "taking-over", "fetch": "fetching", "return": "coming-home"}
PORT_RANGE = "UCX_TCP_PORT_RANGE"
"""Set where KV moves over NIXL: ``FIRST-LAST``, the ports of its connections."""
POLL_S = 0.01


class Watch:
    """Tells from what an instance hears and does which moments it goes through."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        """Of each transfer that is under way: handoff, fetch, return."""
        self.pullable: dict[Any, set[str]] = {}
        """By peer, the transfers of which it has said that pages are ready."""

    def moments(self, machine: Any, event: Any, actions: list[Any]) -> set[str]:
        """What this event and these actions show."""
        from memserve.instance.events import RunStep
        from memserve.kv.transfer.events import PullPages
        from memserve.protocol.events import MessageArrived, Send

        waiting, running = machine.state.waiting_and_running()
        found = {"queued"} if waiting and running else set()
        if isinstance(event, MessageArrived):
            found |= self._heard(event.sender, event.message)
        for action in actions:
            if isinstance(action, RunStep):
                found |= {"prefilling"} if any(count > 1 for count in action.plan.counts) else set()
                found |= {"decoding"} if action.plan.decodes else set()
            elif isinstance(action, Send):
                found |= self._said(action.message)
            elif isinstance(action, PullPages):
                kinds = {self.kinds[transfer] for transfer in self.pullable.get(action.peer, ())}
                found |= {PULLED[kind] for kind in kinds} if len(kinds) == 1 else set()  # else it is not known which
        return found

    def _heard(self, sender: Any, message: Any) -> set[str]:
        from memserve.protocol.messages import Fetch, Offer, Ready, Release, Withdraw

        match message:
            case Fetch():
                self.kinds[message.transfer_id] = "fetch"
                return {"fetch-heard"}
            case Offer():
                self._offered(message)
            case Ready() if message.transfer_id in self.kinds:
                self.pullable.setdefault(sender, set()).add(message.transfer_id)
            case Withdraw() | Release():
                self._over(message.transfer_id)
        return set()

    def _said(self, message: Any) -> set[str]:
        from memserve.protocol.messages import Fetch, Offer, Ready, Release, Withdraw

        match message:
            case Fetch():
                self.kinds[message.transfer_id] = "fetch"
                return {"fetch-asked"}
            case Offer():
                self._offered(message)
            case Ready() if message.transfer_id in self.kinds:
                return {OFFERED[self.kinds[message.transfer_id]]}
            case Withdraw() | Release():
                self._over(message.transfer_id)
        return set()

    def _offered(self, offer: Any) -> None:
        self.kinds.setdefault(offer.transfer_id, "handoff" if offer.request is not None else "return")

    def _over(self, transfer: str) -> None:
        self.kinds.pop(transfer, None)
        for transfers in self.pullable.values():
            transfers.discard(transfer)


class Faults:
    """Counts down to the moment, then does it."""

    def __init__(self, fault: str, moment: str, skip: int) -> None:
        self.kind, _, seconds = fault.partition(":")
        self.seconds = float(seconds or 0)
        self.moment, self.left = moment, skip
        self.armed = self.done = False
        self.cut_until = self.data_cut_until = 0.0
        self.corrupt_next = False

    @property
    def cut(self) -> bool:
        """Whether the mailbox is cut off now."""
        return time.monotonic() < self.cut_until

    @property
    def data_cut(self) -> bool:
        """Whether no KV comes or goes now."""
        return time.monotonic() < self.data_cut_until

    def saw(self, moments: set[str]) -> None:
        """The machine went through these moments."""
        if self.armed or self.moment not in moments:
            return
        self.left -= 1
        if self.left >= 0:
            return
        self.armed = True
        if self.seconds:
            threading.Timer(self.seconds, lambda: print("fault over", file=sys.stderr, flush=True)).start()
        if self.kind == "kill":
            self.happened()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            self.happened()
            subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "cut":
            self.happened()
            self.cut_until = time.monotonic() + self.seconds
        elif self.kind == "cut-data":
            self.data_cut_until = time.monotonic() + self.seconds
            if PORT_RANGE in os.environ:
                threading.Thread(target=self._cut_connections, daemon=True).start()
        elif self.kind == "corrupt":
            self.corrupt_next = True

    def happened(self) -> None:
        """Say so, once: the fault has met something."""
        if not self.done:
            self.done = True
            print(f"fault: {self.kind} while {self.moment}", file=sys.stderr, flush=True)

    def _cut_connections(self) -> None:
        """NIXL's, whichever there are while the cut lasts."""
        while self.data_cut:
            if sum(shut_down(int(name)) for name in os.listdir("/proc/self/fd")):
                self.happened()
            time.sleep(POLL_S)


def shut_down(descriptor: int) -> bool:
    """Shut this connection down, if it is one of NIXL's: those have an end in the range that UCX was given."""
    first, _, last = os.environ[PORT_RANGE].partition("-")
    try:
        duplicate = os.dup(descriptor)
    except OSError:  # that of the listing itself
        return False
    if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
        os.close(duplicate)
        return False
    with socket.socket(fileno=duplicate) as connection, contextlib.suppress(OSError):
        ends = (connection.getsockname(), connection.getpeername())  # raises for one that listens
        if connection.family == socket.AF_INET and any(int(first) <= end[1] <= int(last) for end in ends):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def watch_machine(faults: Faults) -> None:
    """Show every event and its actions to ``faults``, before the host performs them."""
    from memserve.instance.machine import Instance

    original, watch = Instance.handle, Watch()

    def handle(self: Instance, event: Any, now_ns: int) -> list[Any]:
        actions = original(self, event, now_ns)
        faults.saw(watch.moments(self, event, actions))
        return actions

    Instance.handle = handle


def cut_mailbox(faults: Faults) -> None:
    """While cut, messages get lost in both directions; the connections stay up."""
    from memserve.transport.mailbox import ZmqMailbox

    send, build = ZmqMailbox.send, ZmqMailbox.__init__

    def lossy_send(self: Any, to: Any, message: Any) -> None:
        if not faults.cut:
            send(self, to, message)

    def lossy_build(self: Any, *args: Any, **kwargs: Any) -> None:
        names = ("self_peer", "where", "on_message")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        deliver: Callable[[Any, Any], None] = given["on_message"]

        def lossy_deliver(sender: Any, message: Any) -> None:
            if not faults.cut:
                deliver(sender, message)

        build(self, **{**given, "on_message": lossy_deliver})

    ZmqMailbox.send = lossy_send
    ZmqMailbox.__init__ = lossy_build


def spoil_copies(faults: Faults) -> None:
    """Flip a byte behind the back of a copy, before its checksum is taken: what a bad link would do. Or let the copy
    stand still half-way, as memory does that has to be brought from somewhere first."""
    import ctypes

    import numpy as np

    from memserve import _core

    copy, seal = _core.copy_ranges_sealed, _core.seal_ranges

    def flip(address: int) -> None:
        faults.corrupt_next = False
        faults.happened()
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 0x10

    def bad_copy(dst: int, dst_offsets: Any, src: int, src_offsets: Any, range_bytes: int, threads: int = 1) -> Any:
        if faults.data_cut and PORT_RANGE not in os.environ:
            half = len(dst_offsets) // 2
            first = copy(dst, dst_offsets[:half], src, src_offsets[:half], range_bytes, threads)
            faults.happened()
            time.sleep(max(0.0, faults.data_cut_until - time.monotonic()))
            rest = copy(dst, dst_offsets[half:], src, src_offsets[half:], range_bytes, threads)
            return np.concatenate([first, rest])
        sums = copy(dst, dst_offsets, src, src_offsets, range_bytes, threads)
        if not faults.corrupt_next:
            return sums
        flip(dst + int(dst_offsets[0]) + range_bytes // 2)
        return seal(dst, dst_offsets, range_bytes, threads)

    _core.copy_ranges_sealed = bad_copy


def main() -> None:
    """Arm the fault, then be an instance."""
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", required=True)
    parser.add_argument("--moment", choices=MOMENTS, required=True)
    parser.add_argument("--skip", type=int, default=0)
    args = parser.parse_args(sys.argv[1:split])
    faults = Faults(args.fault, args.moment, args.skip)
    watch_machine(faults)
    cut_mailbox(faults)
    spoil_copies(faults)
    sys.argv = ["memserve", *sys.argv[split + 1 :]]
    from memserve.cli.main import main as memserve

    memserve()


if __name__ == "__main__":
    main()
