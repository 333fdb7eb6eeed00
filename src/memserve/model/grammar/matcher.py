"""The process of one grammar, as the process that wants its masks sees it: cells, each with a matcher."""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve.base.units import MIB
from memserve.model.grammar import process as wire

YIELD_S = 0.05
"""A grammar one of whose masks takes longer has the lowest priority from then on: steps need the cores."""

TOO_MUCH = (
    f"it takes more than {wire.CPU_S} s of computing or {wire.BUILD_BYTES // MIB} MiB to build, or more than "
    f"{wire.CPU_S} s or {wire.MASK_BYTES // MIB} MiB from one token to the next"
)
STOPPED = "it was given up"
_READ_BYTES = 1 << 16

Mask = NDArray[np.bool_]
"""``[vocab]``: the tokens that may come next."""


class Owner(Protocol):
    """What starts, watches and kills the process."""

    vocab_size: int

    def send_command(self, command: bytes, number: int, fds: Sequence[int] = ()) -> None:
        """Tell the source."""

    def kill_process(self, number: int) -> None:
        """End a process."""

    def watch_process(self, process: GrammarProcess) -> None:
        """Read as soon as there is something, and send the rest of what is to be sent."""

    def start_timer(self, process: GrammarProcess) -> None:
        """It is waited for."""

    def on_memory_grown(self) -> None:
        """A process has more memory than before."""

    def forget_process(self, process: GrammarProcess) -> None:
        """It has ended."""


class GrammarProcess:
    """The process of one grammar, and its cells: each has a matcher. All but ``on_built`` and ``on_mask`` may be called
    from any thread; those are called once, from any."""

    def __init__(self, owner: Owner, number: int, text: bytes, cells: int, on_built: Callable[[str], None]) -> None:
        self.number, self._owner = number, owner
        self._cells = cells
        self._cell_bytes = wire.cell_bytes(owner.vocab_size)
        self._lock = threading.RLock()  # guards all below
        self._text = text
        self._line: socket.socket | None = None
        self._memory: mmap.mmap | None = None
        self._on_built: Callable[[str], None] | None = on_built
        self._outgoing, self._serial = bytearray(), 0
        self._wanted_serials: dict[int, int] = {}  # cell -> serial number of its last mask
        self._replies: dict[int, tuple[int, int]] = {}  # cell -> kind, serial number of its last reply
        self._waiting: dict[int, Callable[[], None]] = {}  # cell -> what is called when its mask is there
        self._received = b""
        #: why it has ended. Empty: it has not
        self.ended = ""
        #: address space that it has taken, as it has said
        self.taken_bytes = 0
        #: whether it has the lowest priority, because it took long
        self.yields = False
        #: how many masks were asked for, and how many of those were not there
        self.masks = self.masks_late = 0
        #: when it has said something (of ``time.monotonic``)
        self.last_reply_s = 0.0

    # -- its life

    def start_process(self) -> None:
        """Start it. Only its owner's thread calls this."""
        ours, child_socket = socket.socketpair()
        size = max(wire.HEAD_BYTES + 2 * len(self._text), self._cells * self._cell_bytes)
        memory = os.memfd_create("memserve-grammar")
        with child_socket:
            try:
                os.ftruncate(memory, size)
                mapped = mmap.mmap(memory, size)
                head = len(self._text).to_bytes(wire.HEAD_BYTES, "little")
                mapped[: len(head) + len(self._text)] = head + self._text
                with self._lock:
                    if self.ended:
                        ours.close()
                        return
                    ours.setblocking(False)
                    self._line, self._memory, self._text = ours, mapped, b""
                self._owner.send_command(wire.FORK, self.number, [child_socket.fileno(), memory])
            finally:
                os.close(memory)
        self._owner.watch_process(self)

    def end_process(self, why: str = STOPPED) -> None:
        """Kill it. What waits for it is told ``why``."""
        self._on_lost(why)
        self._owner.kill_process(self.number)

    def _on_lost(self, why: str) -> None:
        with self._lock:
            if self.ended:
                return
            self.ended, calls = why, list(self._waiting.values())
            on_built, self._on_built = self._on_built, None
            self._waiting.clear()
            if self._line is not None:
                self._line.close()
                self._line = None
        self._owner.forget_process(self)
        if on_built is not None:
            on_built(why)
        for call in calls:
            call()

    def lower_priority(self) -> None:
        """It works at the lowest priority from now on."""
        if not self.yields:
            self.yields = True
            self._owner.send_command(wire.YIELD, self.number)

    def look_at(self) -> None:
        """It works at the lowest priority from now on if it computes now."""
        self._owner.send_command(wire.LOOK, self.number)

    # -- cells

    def open_cell(self, cell: int, tokens: Sequence[int]) -> None:
        """A matcher in a free cell, which takes in ``tokens``."""
        self._request_mask(wire.OPEN, cell, tokens)

    def take_tokens(self, cell: int, tokens: Sequence[int]) -> None:
        """The matcher of a cell takes in further ``tokens``."""
        self._request_mask(wire.TOKENS, cell, tokens)

    def close_cell(self, cell: int) -> None:
        """The cell is free again."""
        with self._lock:
            self._wanted_serials.pop(cell, None)
            self._replies.pop(cell, None)
            self._waiting.pop(cell, None)
            self._outgoing += wire.ENTRY.pack(wire.CLOSE, cell, 0, 0)

    def _request_mask(self, kind: int, cell: int, tokens: Sequence[int]) -> None:
        with self._lock:
            self._serial = self._serial % 0xFFFFFFFF + 1
            self._wanted_serials[cell] = self._serial
            self._outgoing += wire.ENTRY.pack(kind, cell, self._serial, len(tokens))
            self._outgoing += np.asarray(tokens, np.int32).tobytes()

    def send_pending(self) -> None:
        """Send what cells were told since the last call; of a long text, the rest when there is room."""
        with self._lock:
            if self._line is None or not self._outgoing:
                return
            try:
                sent_bytes = self._line.send(self._outgoing)
            except BlockingIOError:
                sent_bytes = 0
            except OSError:
                sent_bytes = len(self._outgoing)  # it has ended: that is found when it is read
            del self._outgoing[:sent_bytes]
            rest = bool(self._outgoing)
        if rest:
            self._owner.watch_process(self)

    def wait_mask(self, cell: int, until_s: float) -> Mask | None:
        """What may come next in ``cell``. Waits until ``until_s`` (of ``time.monotonic``); None: it is not known by
        then. Raises ``ValueError`` with the reason where there is no mask."""
        while True:
            with self._lock:
                self.read_replies()
                if self._is_there(cell):
                    return self._read_mask(cell)
                line = self._line
            left_s = until_s - time.monotonic()
            if line is None or left_s <= 0:
                return None
            with suppress(OSError, ValueError):  # it was closed meanwhile
                poll = select.poll()
                poll.register(line, select.POLLIN)
                poll.poll(1e3 * left_s)

    def await_mask(self, cell: int, on_mask: Callable[[], None]) -> None:
        """``on_mask`` is called once there is a mask, or will never be one; at once, if that is so already."""
        with self._lock:
            self.read_replies()
            ready = self._is_there(cell) or cell not in self._wanted_serials
            if not ready:
                self._waiting[cell] = on_mask
        if ready:
            on_mask()
        else:
            self._owner.start_timer(self)
            self._owner.watch_process(self)

    def _is_there(self, cell: int) -> bool:
        return bool(self.ended) or self._replies.get(cell, (0, 0))[1] == self._wanted_serials.get(cell, 0)

    def _read_mask(self, cell: int) -> Mask:
        kind = self._replies.get(cell, (0, 0))[0]
        if self.ended:
            raise ValueError(self.ended)
        first = cell * self._cell_bytes
        if kind != wire.MASK or self._memory is None:
            raise ValueError(self._read_fault(first))
        bits = np.frombuffer(self._memory, np.uint8, (self._owner.vocab_size + 7) // 8, first)
        mask: Mask = np.unpackbits(bits, count=self._owner.vocab_size, bitorder="little").view(np.bool_)
        return mask

    def _read_fault(self, first: int) -> str:
        if self._memory is None:
            return STOPPED
        return self._memory[first : first + wire.FAULT_BYTES].split(b"\0", 1)[0].decode(errors="replace")

    def converted_text(self) -> str:
        """What has taken the place of its text (:data:`memserve.model.grammar.process.GBNF`)."""
        with self._lock:
            if self._memory is None:
                return ""
            length = int.from_bytes(self._memory[: wire.HEAD_BYTES], "little")
            return self._memory[wire.HEAD_BYTES : wire.HEAD_BYTES + length].decode()

    # -- what it says

    @property
    def is_awaited(self) -> bool:
        """Whether something happens when it says something."""
        return self._on_built is not None or bool(self._waiting) or bool(self._outgoing)

    @property
    def has_to_send(self) -> bool:
        """Whether more is to be sent."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Of its line; -1: there is none."""
        return -1 if self._line is None else self._line.fileno()

    def read_replies(self) -> None:
        """Take in what it has said."""
        calls: list[Callable[[], None]] = []
        while (data := self._receive_bytes()) is not None:
            if not data:
                self._on_lost(TOO_MUCH)
                return
            with self._lock:
                self.last_reply_s = time.monotonic()
                self._received += data
                whole = len(self._received) // wire.REPLY.size * wire.REPLY.size
                replies, self._received = self._received[:whole], self._received[whole:]
                for reply in wire.REPLY.iter_unpack(replies):
                    calls += self._on_reply(*reply)
            if len(data) < _READ_BYTES:
                break
        for call in calls:
            call()

    def _receive_bytes(self) -> bytes | None:
        with self._lock:
            if self._line is None:
                return None
            try:
                return self._line.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                return b""

    def _on_reply(self, kind: int, cell: int, serial: int, spent_ns: int, taken_bytes: int) -> list[Callable[[], None]]:
        if serial and spent_ns > YIELD_S * 1e9:
            self.lower_priority()
        if taken_bytes != self.taken_bytes:
            self.taken_bytes = taken_bytes
            self._owner.on_memory_grown()
        if not serial:
            on_built, self._on_built = self._on_built, None
            why = self._read_fault(0) if kind == wire.FAULT else ""
            return [] if on_built is None else [lambda: on_built(why)]
        self._replies[cell] = kind, serial
        if serial == self._wanted_serials.get(cell) and cell in self._waiting:
            return [self._waiting.pop(cell)]
        return []
