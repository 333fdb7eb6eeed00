"""One answer with a key as the router sees it: its phases, and what instances have told of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from memserve.answers import AnswerLog
from memserve.messages import Peer
from memserve.transitions import Transitions


class AnswerPhase(enum.Enum):
    """Where an answer with a key stands."""

    NEW = enum.auto()
    REPORTED = enum.auto()  # an instance has (a part of) it, no client has asked this router for it
    ATTENDED = enum.auto()  # a connection gets it
    UNATTENDED = enum.auto()  # its request goes on, its client is gone
    KEPT = enum.auto()  # complete
    GONE = enum.auto()


class AnswerCause(enum.Enum):
    """Why an answer changes its phase."""

    INSTANCE_TOLD = enum.auto()
    CLIENT_CAME = enum.auto()
    CLIENT_LEFT = enum.auto()
    COMPLETED = enum.auto()
    TURNED_AWAY = enum.auto()  # its request ended before what an instance has was used
    DROPPED = enum.auto()  # there is no answer, its time is over, or others need the memory


ANSWER = Transitions(
    "An answer with a key at the router",
    AnswerPhase.NEW,
    {
        (AnswerPhase.NEW, AnswerCause.INSTANCE_TOLD): AnswerPhase.REPORTED,
        (AnswerPhase.NEW, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.REPORTED, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.REPORTED, AnswerCause.DROPPED): AnswerPhase.GONE,
        (AnswerPhase.ATTENDED, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.ATTENDED, AnswerCause.CLIENT_LEFT): AnswerPhase.UNATTENDED,
        (AnswerPhase.ATTENDED, AnswerCause.COMPLETED): AnswerPhase.KEPT,
        (AnswerPhase.ATTENDED, AnswerCause.TURNED_AWAY): AnswerPhase.REPORTED,
        (AnswerPhase.ATTENDED, AnswerCause.DROPPED): AnswerPhase.GONE,
        (AnswerPhase.UNATTENDED, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.UNATTENDED, AnswerCause.COMPLETED): AnswerPhase.KEPT,
        (AnswerPhase.UNATTENDED, AnswerCause.TURNED_AWAY): AnswerPhase.REPORTED,
        (AnswerPhase.UNATTENDED, AnswerCause.DROPPED): AnswerPhase.GONE,
        (AnswerPhase.KEPT, AnswerCause.CLIENT_CAME): AnswerPhase.KEPT,
        (AnswerPhase.KEPT, AnswerCause.DROPPED): AnswerPhase.GONE,
    },
)
"""A further client with the key takes the answer over: mostly it is the same one, and the server has not noticed that
its first connection is dead. One reader also means one that stops sequences, and one that is waited for."""


@dataclass(slots=True, eq=False)
class Held:
    """What one instance has of an answer."""

    answer: Answer
    peer: Peer
    attempt_id: str
    runs: bool
    created_s: int
    log: AnswerLog

    @property
    def name(self) -> tuple[Peer, str]:
        """Of what one instance has of one attempt."""
        return self.peer, self.attempt_id


@dataclass(slots=True, eq=False)
class Answer:
    """One answer."""

    key: str
    asked: str
    created_s: int
    phase: AnswerPhase = ANSWER.initial
    request_id: str = ""
    """Of the live request; empty: there is none."""
    sequences: int = 1
    reader: str = ""
    """The connection that gets it, by the name that it has given to the request; empty: none."""
    until_ns: int = 0
    """When it is dropped, while no client waits for it."""
    log: AnswerLog = field(default_factory=AnswerLog)
    held: list[Held] = field(default_factory=list)
    """What instances have told, as long as the request was not placed."""
    awaited: dict[Peer, None] = field(default_factory=dict)
    """Instances that were asked for it, and have not told yet."""

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        return self.log.nbytes + sum(held.log.nbytes for held in self.held)
