"""Which instances share a sequence that fits none of them.

Parts are filled from the front, each with as many whole blocks as its instance holds, so that the last one has most
room for the answer. An attempt that follows a failed one puts the same parts at the same instances, as far as they are
there: what they have computed is in their caches.

One such sequence runs at a time: two of them, each with half of its instances, would wait for each other for ever. That
holds for one router; where others have such sequences, an instance refuses a part while it has one of another. All
routers take instances in the order of their names, so the one that is furthest in it is refused by none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memserve.base.config import ClusterConfig
from memserve.protocol.peers import PeerInfo
from memserve.router.members.loads import LoadTable
from memserve.router.members.registry import Member, Registry
from memserve.router.placement.candidates import Candidate, Route
from memserve.router.placement.placer import Placement
from memserve.router.requests.requests import Part, Parts, RequestState, RequestTable

PATIENCE = 4
"""A request whose sequence was shared waits so many times as long for instances: one has to be started anew."""


class SpanPlacer:
    """Decides; changes nothing."""

    def __init__(self, config: ClusterConfig, registry: Registry, loads: LoadTable, requests: RequestTable) -> None:
        self._config, self._registry, self._loads, self._requests = config, registry, loads, requests

    def choose_placement(self, req: RequestState) -> Placement | None:
        """Parts for ``req``, which fits no instance. None: there are none, or not now."""
        if not self._may_split(req) or self._is_busy(req):
            return None
        emitted = max(map(len, req.emitted))
        keeps_places = bool(req.parts) and not was_refused(req)
        parts = self._cut_parts(req, self._members_in_order(req), emitted, keeps_places=keeps_places)
        if parts is None:
            return None
        first = parts[0].member
        candidate = Candidate(first.number, first.name, first.info.role, first.info.host_id, costs=first.costs)
        route = Route(candidate, None, f"no instance holds {len(req.request.prompt) + emitted} tokens alone")
        return Placement(route, first, None, (), len(req.request.prompt) + emitted, parts)

    def may_place_later(self, req: RequestState) -> bool:
        """Whether ``req`` may get parts later: others run, or an instance of its last ones is about to come back."""
        return self._may_split(req) and (self._is_busy(req) or bool(req.parts))

    def longest_sequence(self) -> int:
        """The longest prompt and answer that instances can share now, the prompt's tokens with one more."""
        return longest_sequence([member.info for member in self._able_members()], self._config.sequence_instances_max)

    def _may_split(self, req: RequestState) -> bool:
        """Logprobs of a whole prompt, and beams, need all of it at one instance; admission by memory counts one."""
        request = req.request
        split = request.beam_width == 0 and not request.sampling.prompt_logprobs
        return split and self._config.sequence_instances_max > 1

    def _is_busy(self, req: RequestState) -> bool:
        """Whether another one runs, or tries again and again to get instances: one does, not all that wait."""
        running, waiting = self._requests.by_attempt.values(), self._requests.unplaced.values()
        if any(rival.attempt is not None and rival.attempt.is_shared for rival in running):
            return True
        return not was_refused(req) and any(was_refused(rival) for rival in waiting)

    def _able_members(self) -> list[Member]:
        return [m for m in self._registry if m.info.segments_at and m.is_open]

    def _members_in_order(self, req: RequestState) -> list[Member]:
        """Those of the last attempt at their places, others by their work."""
        able = [m for m in self._able_members() if req.avoid.get(m.peer, 0.0) == 0.0]
        able.sort(key=lambda m: (sum(self._loads.work_of(m.number)), m.number))
        by_name = {m.name: m for m in able}
        places = [by_name.pop(part.member.name, None) for part in req.parts]
        rest = list(by_name.values())
        filled = [m if m is not None else rest.pop(0) if rest else None for m in places]
        return [m for m in filled if m is not None] + rest

    def _cut_parts(
        self, req: RequestState, members: Sequence[Member], emitted: int, *, keeps_places: bool
    ) -> Parts | None:
        """As few parts as hold prompt and answer; else as many as there may be, with what they can hold."""
        prompt, answer = len(req.request.prompt), max(1, req.request.stop.max_tokens)
        best_parts: Parts | None = None
        for count in range(2, min(len(members), self._config.sequence_instances_max) + 1):
            group = members[:count] if keeps_places else in_turn(members[:count])
            most = min(m.info.sequence_tokens for m in group)
            parts, first = [], 0
            for member in group[:-1]:
                end = min(
                    first + _segment_tokens(member.info), _whole_block_tokens(prompt - 1, member.info)
                )  # one is left at least
                if end > first:
                    parts.append(Part(member, first, end))
                first = max(first, end)
            room = group[-1].info.context_tokens - (prompt - first)
            if parts and room > emitted and prompt + emitted < most:
                best_parts = (*parts, Part(group[-1], first, prompt))
                if room >= min(answer, most - prompt):
                    break
        return best_parts


def was_refused(req: RequestState) -> bool:
    """Whether an instance has refused a part of ``req`` last, because it has one of another router's sequence."""
    return bool(req.parts and req.past) and req.past[-1].failure == "refused"


def in_turn(members: Sequence[Member]) -> list[Member]:
    """In the order in which every router takes them."""
    return sorted(members, key=lambda member: member.name)


def _segment_tokens(info: PeerInfo) -> int:
    """The most tokens that an instance keeps for others: whole blocks."""
    return _whole_block_tokens(info.context_tokens - 1, info)


def _whole_block_tokens(tokens: int, info: PeerInfo) -> int:
    return tokens // info.geometry.block_tokens * info.geometry.block_tokens


def longest_sequence(infos: Iterable[PeerInfo], instances_max: int) -> int:
    """The longest sequence, prompt and answer, of which instances with these descriptions can each compute a part; 0:
    fewer than two can compute any."""
    able = sorted((info for info in infos if info.segments_at), key=_segment_tokens, reverse=True)[:instances_max]
    if len(able) < 2:
        return 0
    return min(sum(map(_segment_tokens, able)) + 1, min(info.sequence_tokens for info in able))
