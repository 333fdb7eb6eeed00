"""A sequence in parts on several instances: what the instance with each part is told."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from msgspec import structs

from memserve.cluster.registry import Member
from memserve.messages import Dispatch
from memserve.segments import Segment, Span
from memserve.types import SamplingParams, StopParams, TokenArray, adapter_of, salt_of


class Part(NamedTuple):
    """Tokens ``[first, end)`` of a prompt. The member with the last part also generates."""

    member: Member
    first: int
    end: int


Parts = tuple[Part, ...]


def order_for(parts: Parts, place: int, whole: Dispatch) -> Dispatch:
    """What the member of part ``place`` is told, where ``whole`` is the order for a member that would do all."""
    part, prompt = parts[place], whole.request.prompt
    segments = tuple(Segment(p.member.peer, p.member.info.segments_at, p.end - p.first) for p in parts[:place])
    holds = place < len(parts) - 1
    request = structs.replace(
        whole.request,
        prompt=prompt[part.first : part.end],
        salt=_salt(whole.request.salt, prompt[: part.first]),
        slo_ttft_ns=None,  # it is not the first token of this part that the client waits for
    )
    room = min(p.member.info.sequence_tokens for p in parts) - len(prompt)
    stop = structs.replace(request.stop, max_tokens=min(request.stop.max_tokens, room))
    request = structs.replace(request, stop=stop)
    if holds:  # a prompt, and a draw that no client gets
        request = structs.replace(
            request, n=1, sampling=SamplingParams(temperature=0.0), stop=StopParams(max_tokens=2), slo_tpot_ns=None
        )
        whole = structs.replace(whole, generated=(), ended=())
    span = Span(prompt[: part.first], segments, holds)
    return structs.replace(whole, request=request, decode_at=None, holders=(), return_kv=False, span=span)


def _salt(salt: str, before: TokenArray) -> str:
    """KV of a part is that of its tokens behind those ``before``: of others' only with the same ones."""
    if not len(before):
        return salt
    own = hashlib.blake2b(salt.encode() + b"\0" + before.tobytes(), digest_size=16).hexdigest()
    return salt_of(own, adapter_of(salt))


def where(parts: Parts) -> str:
    """The parts, for people."""
    named = [f"{part.member.name}: tokens {part.first} to {part.end}" for part in parts[:-1]]
    return ", ".join([*named, f"{parts[-1].member.name}: from {parts[-1].first} on"])
