"""The errors that memserve raises on purpose.

"Not enough room" is never one of them: calls that may lack room return ``None``.
"""

from __future__ import annotations


class MemserveError(Exception):
    """Base of every error that memserve raises on purpose."""


class UserError(MemserveError):
    """Bad input from a person or a client: one line, and a hint that says what to do."""

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class StoreUnavailable(UserError):
    """A store does not answer in time, was restarted, or cannot be reached; ``hint`` says what to do."""


class InvariantError(MemserveError):
    """A bug in memserve: a promise that the code makes to itself does not hold."""


def check(condition: object, message: str, *about: object) -> None:
    """Raise :class:`InvariantError` unless ``condition`` holds (unlike ``assert``, also under ``-O``). ``about`` fills
    the ``{}`` of ``message``, which costs nothing as long as all is well."""
    if not condition:
        raise InvariantError(message.format(*about) if about else message)


def refuse_event(event: object, now_ns: int) -> None:
    """Of a machine, for events that it has no handler for; raises :class:`InvariantError`."""
    check(False, "unknown event {!r} at {} ns", event, now_ns)
