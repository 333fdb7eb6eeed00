"""Instances without a machine, behind real mailboxes: they say what instances say, and can die in the middle."""

from __future__ import annotations

import threading
import time
from typing import Any

from memserve.base.types import FinishReason, KVGeometry, Role, TokenOutput
from memserve.host.stats import EngineStats
from memserve.protocol.messages import (
    AnyMessage,
    Cancel,
    Dispatch,
    Expelled,
    Heartbeat,
    Join,
    JoinAccepted,
    Pin,
    Pinned,
    StopSequence,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress

SECRET = "a secret that only this test knows"
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim_k=8, head_dim_v=8, dtype="float32")


def true_token(prompt: Any, place: int) -> int:
    """Token ``place`` of the one right answer to ``prompt``."""
    return (int(sum(int(token) for token in prompt)) * 31 + place * 7) % 1000


class FakeInstance:
    """Answers each ``Dispatch`` by one token every ``token_s``, from a thread of its own."""

    def __init__(self, name: str, router: str, *, token_s: float = 0.0, join: bool = True) -> None:
        self.me = Peer(name, time.time_ns())
        self.heard: list[AnyMessage] = []
        self.alive = True
        self.token_s = token_s
        self._stopped: set[str] = set()  # requests, and (request, sequence) pairs as text
        self._threads: list[threading.Thread] = []
        self._router = Peer(ROUTER, 0)
        self.welcomed = threading.Event()
        self._mailbox = ZmqMailbox(self.me, ListenAddress(SECRET), self._hear)
        self.info = PeerInfo(
            self.me, Role.COLOCATED, self._mailbox.address, "model", GEOMETRY, 64, 0, 512, True, publishes_events=False
        )
        self._mailbox.connect(self._router, router)
        if join:
            self._start(self._beat)
            assert self.welcomed.wait(20)

    def send(self, message: AnyMessage) -> None:
        """Say something to the router."""
        self._mailbox.send(self._router, message)

    def die(self) -> None:
        """Without a word."""
        self.alive = False
        for thread in self._threads:
            thread.join(20)
        self._mailbox.close()

    def has_heard(self, kind: type) -> list[Any]:
        """Messages of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _beat(self) -> None:
        beats = 0
        while self.alive:
            if self.welcomed.is_set():
                beats += 1
                self.send(Heartbeat(Load(), 0, EngineStats(steps=beats).encode()))
            else:
                self.send(Join(self.info))
            time.sleep(0.05)

    def _hear(self, sender: Peer, message: AnyMessage) -> None:
        self.heard.append(message)
        match message:
            case JoinAccepted():
                self.welcomed.set()
            case Expelled():
                self.welcomed.clear()
            case Dispatch():
                self._start(self._answer, message)
            case Cancel(request_id):
                self._stopped.add(request_id)
            case StopSequence(request_id, index):
                self._stopped.add(f"{request_id}/{index}")
            case Pin(handle, _, tokens):
                self.send(Pinned(handle, len(tokens) // 32 * 32))

    def _answer(self, order: Dispatch) -> None:
        request = order.request
        for index in range(request.n):
            done = len(order.generated[index]) if order.generated else 0
            for place in range(done, request.stop.max_tokens):
                time.sleep(self.token_s)
                if not self.alive or {request.request_id, f"{request.request_id}/{index}"} & self._stopped:
                    return
                last = FinishReason.LENGTH if place == request.stop.max_tokens - 1 else None
                token = true_token(request.prompt, place)
                output = TokenOutput(request.request_id, index, (token,), finish_reason=last, offset=place)
                self.send(Tokens((output,)))
