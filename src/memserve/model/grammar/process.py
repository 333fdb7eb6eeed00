"""What runs in the processes that build grammars and compute masks. A client's grammar is never built anywhere else.

    instance or router ---- control ----> source: has read the vocabulary, and only forks
           |                                 | fork, for each grammar
           +------- its own socket ----> one process: builds one grammar, computes the masks of its cells

A grammar may take any time and memory, in the build or in a mask, within one call into native code. So each has a
process with limits of its own (:data:`BUILD_BYTES`, :data:`MASK_BYTES`, processor time), which ends alone: the kernel
refuses it memory, or the source kills it. Forking costs 4 ms, and the vocabulary is shared with the source.

Imports little: the source is as large as Python, the grammar engine and the vocabulary.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from contextlib import suppress
from typing import Any

MIB = 1 << 20
BUILD_BYTES = 128 * MIB
"""Address space that a build may take beside what the source has."""
MASK_BYTES = 32 * MIB
"""Address space that each mask may take beside what the grammar had before."""
LOOK_S = 0.02
"""How long a process is looked at: if it has computed for a quarter of that, it computes."""
BUILD_NICE = 10
"""Priority of a build: beside a busy thread of a step it gets a tenth of the core."""
CPU_S = 2
"""Processor time of a build, and of each mask, in whole seconds: the kernel counts no others."""

NOTICED_NS, NOTICED_MASKS = 1_000_000, 64
"""After a mask that took longer, and after so many, the limits are those of the next mask: to set them takes as long
as a mask."""

ORDER = struct.Struct("<4sQ")
"""To the source: what, the number of the grammar. With ``FORK`` come its socket and its memory. ``YIELD``: lowest
priority from now on; ``LOOK``: if it computes now."""
FORK, KILL, YIELD, LOOK = b"fork", b"kill", b"nice", b"look"

ENTRY = struct.Struct("<BxHII")
"""To the process of a grammar: kind, cell, serial number, how many tokens (int32) follow."""
OPEN, TOKENS, CLOSE = 1, 2, 3
"""A matcher in a cell that is free; tokens that it takes in, and a mask is wanted if the serial number is not 0; the
cell is free again."""

REPLY = struct.Struct("<BxHIQQ")
"""Kind, cell, serial number, nanoseconds of processor time, bytes of address space that it has taken so far."""
BUILT, MASK, FAULT = 1, 2, 3
"""The grammar is there; a mask is in its cell; the text in the cell says why there is none (serial number 0: why there
is no grammar)."""

FAULT_BYTES = 240
"""Of the text that says why."""
HEAD_BYTES = 8
"""In front of the memory's content, before the build: how long the grammar's text is."""


def cell_bytes(vocab_size: int) -> int:
    """Bytes of a cell: one bit a token, in whole words."""
    return max(FAULT_BYTES, (vocab_size + 31) // 32 * 4)


# -- the source


class _Source:
    """Forks a process for each grammar, and kills those that are not wanted any more."""

    def __init__(self, control: socket.socket, tokenizer: Any, vocab_size: int) -> None:
        self._control, self._tokenizer, self._vocab_size = control, tokenizer, vocab_size
        self._processes: dict[int, int] = {}  # grammar -> process
        self._looked_at: dict[int, tuple[float, int]] = {}  # process -> until when, its processor time at first
        self._die_with = _death_with_parent()

    def serve_commands(self) -> None:
        """Until the other end of the control line is closed."""
        while True:
            self._control.settimeout(LOOK_S if self._looked_at else 1.0 if self._processes else None)
            try:
                order, fds, _, _ = socket.recv_fds(self._control, ORDER.size, 2)
            except TimeoutError:
                self._reap_children()
                self._lower_busy()
                continue
            if not order:
                break
            command, number = ORDER.unpack(order)
            if command == FORK:
                self._fork_process(number, fds)
            elif (process := self._processes.get(number)) is not None:
                with suppress(ProcessLookupError):
                    if command == KILL:
                        os.kill(process, signal.SIGKILL)
                    elif command == LOOK:
                        self._looked_at.setdefault(process, (time.monotonic() + LOOK_S, _spent_ns(process)))
                    else:
                        os.setpriority(os.PRIO_PROCESS, process, 19)
            self._reap_children()
            self._lower_busy()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _lower_busy(self) -> None:
        """Of those that were late a moment ago, those that have computed since then: others were late for want of a
        core, and would be so more often."""
        now_s = time.monotonic()
        for process, (until_s, before_ns) in list(self._looked_at.items()):
            if now_s < until_s:
                continue
            del self._looked_at[process]
            if _spent_ns(process) - before_ns > LOOK_S * 1e9 / 4:
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, process, 19)

    def _fork_process(self, number: int, fds: list[int]) -> None:
        parent = os.getpid()
        try:
            process = os.fork()
        except OSError as error:  # too many processes, or too little memory: the other end finds its line closed
            print(f"memserve: no process for a grammar: {error}", file=sys.stderr)
            process = -1
        if process:
            for fd in fds:
                os.close(fd)
        if process > 0:
            self._processes[number] = process
        if process:
            return
        status = 1
        with suppress(BaseException):  # whatever it is: this process ends here, and never goes on as another source
            self._die_with(parent)
            self._control.close()
            Grammar(socket.socket(fileno=fds[0]), fds[1], self._tokenizer, self._vocab_size).serve_cells()
            status = 0
        os._exit(status)

    def _reap_children(self) -> None:
        while self._processes:
            process, _ = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            self._processes = {number: pid for number, pid in self._processes.items() if pid != process}


def _spent_ns(process: int) -> int:
    """Processor time of its main thread, which computes masks; 0: it has ended."""
    try:
        with open(f"/proc/{process}/task/{process}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError):
        return 0


def _death_with_parent() -> Any:
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def die_with(parent: int) -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return die_with


# -- the process of one grammar


class Grammar:
    """One grammar, and its matchers by cell."""

    def __init__(self, line: socket.socket, memory: int, tokenizer: Any, vocab_size: int) -> None:
        """``memory``: a descriptor; what it holds is the text of the grammar, then masks. ``tokenizer`` None: the
        grammar is only checked."""
        self._line, self._tokenizer = line, tokenizer
        self._memory = mmap.mmap(memory, 0)
        os.close(memory)
        self._cell_bytes = cell_bytes(vocab_size)
        self._first: tuple[Any, bytes] | None = None  # a matcher at its beginning, and its mask
        self._matchers: dict[int, Any] = {}
        self._space_before = _address_space()
        self._taken = self._masks = 0

    def serve_cells(self) -> None:
        """Until the other end closes the line."""
        _expect_death()
        self._set_limits(BUILD_BYTES)
        length = int.from_bytes(self._memory[:HEAD_BYTES], "little")
        text = self._memory[HEAD_BYTES : HEAD_BYTES + length].decode()
        begun_ns = time.process_time_ns()
        why = self._build_gently(text)
        self._set_limits(MASK_BYTES)
        self._send_reply(FAULT if why else BUILT, 0, 0, begun_ns, why)
        if why or self._tokenizer is None:
            return
        waiting = b""
        while data := self._line.recv(1 << 16):
            waiting += data
            while len(waiting) >= ENTRY.size:
                kind, cell, serial, count = ENTRY.unpack_from(waiting)
                end = ENTRY.size + 4 * count
                if len(waiting) < end:
                    break
                tokens = struct.unpack_from(f"<{count}i", waiting, ENTRY.size)
                waiting = waiting[end:]
                self._handle_entry(kind, cell, serial, tokens)

    def _build_gently(self, text: str) -> str:
        """As :meth:`_build_matcher`, in a thread of low priority: steps need the cores. Masks are then computed at the
        usual one."""
        reasons: list[str] = []

        def build() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BUILD_NICE)
            reasons.append(self._build_matcher(text))

        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        return reasons[0]

    def _build_matcher(self, text: str) -> str:
        """Returns why there is no such grammar; "": it is there."""
        from llguidance import LLMatcher

        if text.startswith(GBNF):
            return self._convert_gbnf(text.removeprefix(GBNF))
        if self._tokenizer is None:
            is_error, messages = LLMatcher.validate_grammar_with_warnings(text, None)
            return _in_words(str(messages[0])) if is_error else ""
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        mask, why = _mask_of(matcher)
        self._first = matcher, mask
        return why

    def _convert_gbnf(self, text: str) -> str:
        """GBNF as a grammar in Lark's form, which takes the place of the text."""
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            lark = str(gbnf_to_lark(text)).encode()
        except Exception as error:  # its parser raises what it meets
            return _in_words(str(error)) if str(error) else type(error).__name__
        if len(lark) > len(self._memory) - HEAD_BYTES:
            return "it is too long in Lark's form"
        self._memory[: HEAD_BYTES + len(lark)] = len(lark).to_bytes(HEAD_BYTES, "little") + lark
        return ""

    def _handle_entry(self, kind: int, cell: int, serial: int, tokens: tuple[int, ...]) -> None:
        if kind == CLOSE:
            self._matchers.pop(cell, None)
            return
        begun_ns = time.process_time_ns()
        if kind == OPEN and self._first is not None:
            self._matchers[cell] = self._first[0].deep_copy()
            if serial and not tokens:
                self._write_cell(cell, self._first[1])
                self._send_reply(MASK, cell, serial, begun_ns)
                return
        matcher = self._matchers[cell]
        for token in tokens:
            matcher.consume_token(token)  # at its end it takes no more: a row that is one too many
        if not serial:
            return
        mask, why = _mask_of(matcher)
        if not why:
            self._write_cell(cell, mask)
        self._masks += 1
        if time.process_time_ns() - begun_ns > NOTICED_NS or not self._masks % NOTICED_MASKS:
            self._set_limits(MASK_BYTES)
        self._send_reply(FAULT if why else MASK, cell, serial, begun_ns, why)

    def _write_cell(self, cell: int, data: bytes) -> None:
        data = data[: self._cell_bytes]  # llguidance's mask has a word more where the vocabulary is whole words
        first = cell * self._cell_bytes
        self._memory[first : first + len(data)] = data

    def _send_reply(self, kind: int, cell: int, serial: int, begun_ns: int, why: str = "") -> None:
        if why:
            self._write_cell(cell, why.encode()[: FAULT_BYTES - 1] + b"\0")
        self._line.sendall(REPLY.pack(kind, cell, serial, time.process_time_ns() - begun_ns, self._taken))

    def _set_limits(self, more_bytes: int) -> None:
        """From now on ``more_bytes`` of address space, and :data:`CPU_S` of processor time, beside those that are
        taken already."""
        space = _address_space()
        self._taken = max(0, space - self._space_before)
        resource.setrlimit(resource.RLIMIT_AS, (space + more_bytes, resource.RLIM_INFINITY))
        used_s = int(time.process_time()) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (used_s, resource.RLIM_INFINITY))


GBNF = "gbnf:"
"""In front of a text in llama.cpp's notation, which is only converted."""

_PAGE_BYTES = resource.getpagesize()


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split(b" ", 1)[0]) * _PAGE_BYTES


def _expect_death() -> None:
    """The first to go where memory is short; what native code says when it ends so concerns no reader of the log."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(quiet, fd)


def _mask_of(matcher: Any) -> tuple[bytes, str]:
    """One bit a token, and why there is none; "": there is one."""
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            return mask, ""
    return b"", _in_words(str(matcher.get_error()))


def _in_words(error: str) -> str:
    """An error of llguidance in one line for people: its first, unless that only announces the next ones."""
    line = error.split("\n", 1)[0].strip()  # the place in the text, or the state of the parser follows
    if line.endswith(":"):
        line = " ".join(error.split())
    return _REASONS.get(line, line) or "the grammar engine gives no reason"


_REASONS = {
    "NoExtension": "no text follows it",
    "NoExtensionBias": "no token of the model begins a text that it allows",
    "ParserTooComplex": "it is too complex for the grammar engine",
    "LexerTooComplex": "its patterns are too complex for the grammar engine",
    "InternalError": "the grammar engine failed",
}
"""llguidance's words -> what they mean."""


def main() -> None:
    """``grammar_process CONTROL VOCABULARY SIZE EOS...``: descriptors of the control line and of the tokenizer's text,
    compressed (-1: there is none, grammars are only checked)."""
    control, vocabulary, vocab_size, *eos = [int(text) for text in sys.argv[1:]]
    for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)  # the end of the control line ends it, after the last answer
    import gc

    import llguidance

    tokenizer = None
    if vocabulary >= 0:
        with mmap.mmap(vocabulary, 0, access=mmap.ACCESS_READ) as text:
            tokenizer = llguidance.LLTokenizer(zlib.decompress(text).decode(), n_vocab=vocab_size, eos_token=eos)
        os.close(vocabulary)
    else:  # what a check imports, it has then imported already
        pass
    gc.collect()
    gc.freeze()  # pages of what is there stay shared with the processes
    _Source(socket.socket(fileno=control), tokenizer, vocab_size).serve_commands()


if __name__ == "__main__":
    main()
