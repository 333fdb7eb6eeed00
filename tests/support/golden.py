"""Golden scripts of machines: what happens, and in short lines what the machine wants done about it.

An action is written as its name and what matters of it: ``Send(p1, Dispatch r1#1, decode at d1)``, ``RunStep(0: slot 0
[0, 8))``. So a script reads like a play, and says everything that a machine may do at each moment, and in which order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memserve.base.types import ClockTicked, CopyBlocks, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.instance.events import AwaitMask, RunStep
from memserve.kv.transfer.events import PullPages, SealPages
from memserve.protocol.events import EmitTokens, RejectRequest, Send
from memserve.protocol.messages import Dispatch, Fetch, Offer, Ready
from memserve.protocol.peers import Message, Peer


class Script:
    """Feeds one machine, with a clock in milliseconds, and compares what it wants done."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def at(self, ms: float, event: Any, *wanted: str) -> list[Any]:
        """At ``ms`` comes ``event``; these actions follow, in this order, and no others."""
        actions = self.machine.handle(event, round(ms * NS_PER_MS))
        self.machine.check_invariants()
        assert [brief(action) for action in actions] == list(wanted)
        return actions

    def later(self, ms: float, *wanted: str) -> list[Any]:
        """Nothing happens until ``ms``; the clock says so."""
        return self.at(ms, ClockTicked(), *wanted)


def brief(action: Any) -> str:
    """An action in a line."""
    match action:
        case Send(to, message):
            return f"Send({to.name}, {_message(message)})"
        case EmitTokens(outputs):
            return f"EmitTokens({'; '.join(map(_output, outputs))})"
        case RunStep(plan):
            return f"RunStep({_plan(plan)})"
        case RejectRequest():
            return f"RejectRequest({action.request_id}, {'never' if action.retry_after_s is None else 'try again'})"
        case SealPages():
            return f"SealPages({_list(action.blocks)}, layers {action.first_layer} to {action.end_layer})"
        case PullPages():
            return f"PullPages({_list(action.src_blocks)} of {action.peer.name} into {_list(action.dst_blocks)})"
        case AwaitMask():
            return f"AwaitMask({action.job_id}, slot {action.slot})"
    words = [_word(getattr(action, name)) for name in type(action).__slots__]
    return f"{type(action).__name__}({', '.join(filter(None, words))})"


def _message(message: Message) -> str:
    match message:
        case Dispatch():
            words = [message.request.request_id, f"decode at {message.decode_at.name}" if message.decode_at else ""]
            words += [f"behind {_tokens(tokens)}" for tokens in message.generated if tokens]
            words += [f"fetch from {holder.peer.name}" for holder in message.holders]
        case Offer():
            words = [message.transfer_id, message.request.request_id if message.request else "", _list(message.blocks)]
        case Ready():
            words = [message.transfer_id, f"{len(message.checksums)} blocks from block {message.first_block}"]
        case Fetch():
            words = [message.transfer_id, f"blocks {message.first_block} to {message.end_block}"]
        case _:
            words = [_word(value) for value in msgspec.structs.astuple(message)]
    return " ".join(filter(None, [type(message).__name__, ", ".join(filter(None, words))]))


def _word(value: Any) -> str:
    """A value in short; empty: what says nothing."""
    match value:
        case Peer():
            return value.name
        case TokenOutput():
            return _output(value)
        case bool():
            return ""
        case str():
            return value
        case tuple() if value and all(isinstance(item, int) and item < 1 << 32 for item in value):
            return _list(value)
        case tuple() if value and all(isinstance(item, tuple) for item in value):
            return " and ".join(map(_tokens, value))
        case tuple() if value and isinstance(value[0], str | TokenOutput):
            return ", ".join(map(_word, value))
        case _ if hasattr(value, "name") and hasattr(value, "value"):  # an enum
            return str(value.name)
        case _ if hasattr(value, "peer"):
            return str(value.peer.name)
        case tuple() if value and hasattr(value[0], "peer"):
            return ", ".join(map(_word, value))
    return ""


def _output(output: TokenOutput) -> str:
    sequence = output.request_id + (f"/{output.index}" if output.index else "")
    ending = f" {output.finish_reason.name}" if output.finish_reason else ""
    return f"{sequence} {output.offset}:{_tokens(output.tokens)}{ending}"


def _tokens(tokens: Any) -> str:
    return "[" + " ".join(map(str, tokens)) + "]"


def _list(blocks: Any) -> str:
    return "blocks " + " ".join(map(str, blocks))


def _plan(plan: Any) -> str:
    rows = zip(plan.slots, plan.starts, plan.counts, plan.sample_slots, strict=True)
    words = [f"close {slot}" for slot in plan.close] + [_copy(order) for order in plan.copies]
    words += [f"open {opened.slot}" for opened in plan.open]
    for slot, start, count, draws in rows:
        words.append(f"slot {slot} [{start}, {start + count})" + (" draws" if draws else ""))
    words += [f"slot {late.slot} draws behind {late.known_tokens}" for late in plan.late_draws]
    return f"{plan.step_id}: {', '.join(words)}"


def _copy(order: CopyBlocks) -> str:
    return f"copy {len(order.src)} from {order.src_tier.name} to {order.dst_tier.name}"
