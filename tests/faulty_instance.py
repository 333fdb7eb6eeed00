"""A real instance process that fails at a chosen moment: the launcher of the failure matrix, not a test.

    python tests/faulty_instance.py --fault kill --phase transferring [--skip 1] -- instance --join HOST:PORT ...

Everything after ``--`` is the command line of ``memserve``. The process watches its own machine; when it comes into
``phase`` (for the ``skip + 1``-th time) the fault happens, once:

    kill            it kills itself with SIGKILL
    stop:SECONDS    it stops itself with SIGSTOP, and goes on after that time
    cut:SECONDS     nothing leaves or reaches its mailbox for that time
    corrupt         one byte of the next page that it pulls is flipped on the way
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PHASES = ("queued", "prefilling", "transferring", "decoding", "returning")


def phases_of(event: Any, actions: list[Any]) -> set[str]:
    """Which phases of a request this event and these actions show."""
    from memserve.instance.events import RunStep, StepFinished
    from memserve.kv_transfer.events import PullPages
    from memserve.messages import Dispatch, Fetch, Offer, Ready
    from memserve.serving import MessageArrived, Send

    found: set[str] = set()
    said = [action.message for action in actions if isinstance(action, Send)]
    heard = event.message if isinstance(event, MessageArrived) else None
    if isinstance(heard, Dispatch | Fetch) or (isinstance(heard, Offer) and heard.request is not None):
        found.add("queued")
    if any(isinstance(a, RunStep) and any(count > 1 for count in a.plan.counts) for a in actions):
        found.add("prefilling")
    if any(isinstance(action, PullPages) for action in actions) or any(isinstance(m, Ready) for m in said):
        found.add("transferring")
    if isinstance(event, StepFinished) and event.tokens:
        found.add("decoding")
    if any(isinstance(m, Offer) and m.request is None for m in [heard, *said]):
        found.add("returning")
    return found


class Faults:
    """Counts down to the moment, then does it."""

    def __init__(self, fault: str, phase: str, skip: int) -> None:
        self.kind, _, seconds = fault.partition(":")
        self.seconds = float(seconds or 0)
        self.phase, self.left = phase, skip
        self.done = False
        self.cut_until = 0.0
        self.corrupt_next = False

    @property
    def cut(self) -> bool:
        """Whether the mailbox is cut off now."""
        return time.monotonic() < self.cut_until

    def saw(self, phases: set[str]) -> None:
        """The machine was in these phases."""
        if self.done or self.phase not in phases:
            return
        self.left -= 1
        if self.left >= 0:
            return
        self.done = True
        print(f"fault: {self.kind} while {self.phase}", file=sys.stderr, flush=True)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "cut":
            self.cut_until = time.monotonic() + self.seconds
        elif self.kind == "corrupt":
            self.corrupt_next = True


def watch_machine(faults: Faults) -> None:
    """Show every event and its actions to ``faults``, before the host performs them."""
    from memserve.instance.machine import Instance

    original = Instance.handle

    def handle(self: Instance, event: Any, now: int) -> list[Any]:
        actions = original(self, event, now)
        faults.saw(phases_of(event, actions))
        return actions

    Instance.handle = handle


def cut_mailbox(faults: Faults) -> None:
    """While cut, messages get lost in both directions; the connections stay up."""
    from memserve.runtime.links.mailbox import ZmqMailbox

    send, build = ZmqMailbox.send, ZmqMailbox.__init__

    def lossy_send(self: Any, to: Any, message: Any) -> None:
        if not faults.cut:
            send(self, to, message)

    def lossy_build(self: Any, *args: Any, **kwargs: Any) -> None:
        names = ("me", "secret", "host", "port", "on_message")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        deliver: Callable[[Any, Any], None] = given["on_message"]

        def lossy_deliver(sender: Any, message: Any) -> None:
            if not faults.cut:
                deliver(sender, message)

        build(self, **{**given, "on_message": lossy_deliver})

    ZmqMailbox.send = lossy_send
    ZmqMailbox.__init__ = lossy_build


def corrupt_pulls(faults: Faults) -> None:
    """Flip a byte behind the back of the copy, before its checksum is taken: what a bad link would do."""
    import ctypes

    from memserve import _core

    copy, seal = _core.copy_ranges_sealed, _core.seal_ranges

    def flip(address: int) -> None:
        faults.corrupt_next = False
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 0x10

    def bad_copy(dst: int, dst_offsets: Any, src: int, src_offsets: Any, range_bytes: int, threads: int = 1) -> Any:
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
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--skip", type=int, default=0)
    args = parser.parse_args(sys.argv[1:split])
    faults = Faults(args.fault, args.phase, args.skip)
    watch_machine(faults)
    cut_mailbox(faults)
    corrupt_pulls(faults)
    sys.argv = ["memserve", *sys.argv[split + 1 :]]
    from memserve.cli.main import main as memserve

    memserve()


if __name__ == "__main__":
    main()
