"""Signals that ask a process to end (level 3): Ctrl-C, SIGTERM, and SIGHUP, which says that its terminal has closed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class EndAsked(BaseException):
    """A signal asked for the end of the process. Not an ``Exception``: nothing that goes on may swallow it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.signal_name = name


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals after which a process ends in good order. ``nohup`` has SIGHUP ignored, and it stays ignored."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(sig for sig in asking if sig != signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN)


class Askings:
    """Counts how often the end was asked for: a second time means now. A closing terminal sends several SIGHUP (the
    kernel, the shell): they count once."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        """Of the signals that counted, in order."""

    def came(self, sig: int) -> bool:
        """A signal came; whether it counts."""
        name = signal.Signals(sig).name
        if name == "SIGHUP" and name in self.names:
            return False
        self.count += 1
        self.names.append(name)
        return True


def on_ending_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """``handler`` takes every ending signal from now on. Main thread only."""
    for sig in ending_signals():
        signal.signal(sig, handler)


def ignore_terminal() -> None:
    """From now on Ctrl-C and a closed terminal are no concern of this process: another one will end it."""
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Until the end of the block an ending signal raises :class:`EndAsked` here (Ctrl-C: ``KeyboardInterrupt``), once:
    what was started by then is ended in good order, and no second signal may interrupt that."""
    before = {sig: signal.getsignal(sig) for sig in ending_signals()}
    asked = Askings()

    def raise_once(sig: int, frame: FrameType | None) -> None:
        if asked.came(sig) and asked.count == 1:
            raise KeyboardInterrupt if sig == signal.SIGINT else EndAsked(asked.names[0])

    on_ending_signals(raise_once)
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
