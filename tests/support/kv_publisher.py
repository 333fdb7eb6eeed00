"""An engine's KV events over real sockets, for tests."""

from __future__ import annotations

import threading

import zmq

from memserve.fleet.engine_client import END_SEQUENCE


class Publisher:
    """KV events of an engine, as vLLM sends and repeats them."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.events, self.replay = self._bind(self._pub), self._bind(self._router)
        self.kept: list[tuple[int, bytes]] = []
        self._number = 0
        self.asked: list[int] = []
        self.drops: set[int] = set()
        """Batches that the next replay loses on its way."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes]) -> str:
        socket.setsockopt(zmq.LINGER, 0)
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def publish(self, payload: bytes, *, lost: bool = False, kept: bool = True) -> None:
        """The next batch. ``lost``: it does not arrive. ``kept``: it can be repeated."""
        if kept:
            self.kept.append((self._number, payload))
        if not lost:
            self._pub.send_multipart([b"kv@x", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def send_raw(self, *frames: bytes) -> None:
        """Anything."""
        self._pub.send_multipart(list(frames))

    def _serve(self) -> None:
        while not self._ends.is_set():
            if not self._router.poll(20):
                continue
            peer, _, start = self._router.recv_multipart()
            self.asked.append(first := int.from_bytes(start, "big"))
            drops, self.drops = self.drops, set()
            for number, payload in list(self.kept):
                if number >= first and number not in drops:
                    self._router.send_multipart([peer, b"", b"kv@x", number.to_bytes(8, "big"), payload])
            self._router.send_multipart([peer, b"", b"", END_SEQUENCE, b""])

    def close(self) -> None:
        """Release the ports."""
        self._ends.set()
        self._thread.join(10)
        self._context.destroy(linger=0)
