"""What the machine of an engine that is a member is told, and what it asks for (``fleet/members/machine.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memserve.base.types import ClockTicked
from memserve.fleet.members.dialects import AnswerPiece, SequenceCall
from memserve.fleet.messages import EngineReport, KvReceived, ReplayEnded
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.peers import Peer


@dataclass(frozen=True, slots=True)
class ReportRead:
    """Event: the engine is well, and says this of itself."""

    report: EngineReport


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """Event: the engine has answered a part of a call."""

    call_id: int
    piece: AnswerPiece


@dataclass(frozen=True, slots=True)
class CallBroke:
    """Event: the engine does not answer a call, or no further."""

    call_id: int
    reason: str
    is_final: bool = False
    """It will never answer this one: what is wrong with it it has said."""


@dataclass(frozen=True, slots=True)
class GenerationBegun:
    """Event: the router has taken the member to be dead, and it goes on as ``self_peer``: all work is dropped."""

    self_peer: Peer


@dataclass(frozen=True, slots=True)
class StartCall:
    """Action: ask the engine to go on with a sequence."""

    call_id: int
    call: SequenceCall


@dataclass(frozen=True, slots=True)
class EndCall:
    """Action: nothing waits for this call any more."""

    call_id: int


@dataclass(frozen=True, slots=True)
class RepeatEvents:
    """Action: ask the engine for its batches of KV events from ``first`` on."""

    first: int


EngineMemberEvent = (
    MessageArrived | ReportRead | PieceArrived | CallBroke | KvReceived | ReplayEnded | GenerationBegun | ClockTicked
)
EngineMemberAction = Send | EmitTokens | RejectRequest | StartCall | EndCall | RepeatEvents
Actions = Sequence[EngineMemberAction]
