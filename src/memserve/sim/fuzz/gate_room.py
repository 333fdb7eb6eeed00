"""Whether there is room for a request, by a rough estimate without a ledger, names, or shared blocks.

Every request is taken to need all that it could ever need, pins to be as long as requested, and every prefix that may
be fetched to be lent by all instances that have it: what fits then surely fits. A prompt that is larger than any
instance surely does not fit. Between the two only the router's ledger can decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memserve.cluster.machine import Cluster
from memserve.cluster.registry import Member, MemberState
from memserve.cluster.requests import RequestState
from memserve.messages import Peer
from memserve.policy.admission import tokens_needed
from memserve.policy.routing import teams
from memserve.types import Admission, Request, Role
from memserve.units import ceil_div


def fits_surely(
    cluster: Cluster, request: Request, *, empty: bool = False, ended: Iterable[Request], recovered: Mapping[Peer, int]
) -> bool:
    """Whether each team that ``request`` needs has a member with room for it; ``empty``: without other requests and
    pins. ``ended``: requests whose memory counts everywhere as if they still ran there. ``recovered``: further blocks
    that count, in the instance's own block size."""
    sides = _sides(cluster, len(request.prompt))
    live = cluster._lifecycle.requests.by_id | cluster._lifecycle.guests.by_id
    requests = [] if empty else list(live.values())
    kept = sum(_all_of(cluster, gone) for gone in ended)
    paired = len(sides) > 1
    for side in sides:
        decodes = {m: m.info.role is not Role.PREFILL or not paired for m in side}  # a colocated one does in any team
        need = {m: kept + _most(cluster, request, 0, decodes=decodes[m]) for m in side}
        taken = {m: _used(cluster, requests, m) + (0 if empty else _claimed(cluster, requests, m)) for m in side}
        left = {m: recovered.get(m.peer, 0) * ceil_div(m.info.geometry.block_tokens, _unit(cluster)) for m in side}
        if not any(_total(cluster, m) - taken[m] - left[m] >= need[m] for m in side):
            return False
    return bool(sides)


def is_too_large(cluster: Cluster, request: Request) -> bool:
    """Whether some team has no member that could hold the prompt alone."""
    sides = _sides(cluster, len(request.prompt)) or _sides(cluster, 0)
    need = ceil_div(len(request.prompt), _unit(cluster))
    return any(all(need > _total(cluster, member) for member in side) for side in sides)


def _sides(cluster: Cluster, prompt_tokens: int) -> list[Sequence[Member]]:
    """Members that compute such prompts, and, where those hand over, members that decode."""
    here = [m for m in cluster._registry if m.state is MemberState.LIVE and m.info.context_tokens > prompt_tokens]
    roles = teams({member.info.role for member in here})
    return [[member for member in here if member.info.role in team] for team in roles if team]


def _unit(cluster: Cluster) -> int:
    geometry = cluster._registry.geometry
    return cluster.config.admission.unit_tokens or (geometry.block_tokens if geometry is not None else 1)


def _total(cluster: Cluster, member: Member) -> int:
    return member.info.hbm_blocks * member.info.geometry.block_tokens // _unit(cluster)


def _most(cluster: Cluster, request: Request, generated: int, *, decodes: bool) -> int:
    """Blocks that it may need, if sequences share nothing."""
    prompt, own = tokens_needed(request, cluster.config.admission.output_tokens_max, generated)
    if not decodes:
        return ceil_div(prompt + generated, _unit(cluster))
    return max(request.n, request.beam_width) * ceil_div(prompt + own, _unit(cluster))


def _all_of(cluster: Cluster, request: Request) -> int:
    """Blocks that it may have held at its end."""
    tokens = len(request.prompt) + request.stop.max_tokens
    return max(request.n, request.beam_width) * ceil_div(tokens, _unit(cluster))


def _claimed(cluster: Cluster, requests: Sequence[RequestState], member: Member) -> int:
    """Blocks that are pinned there, and blocks that may be lent from there."""
    prefixes = [handle.tokens for handle in cluster.handles() if handle.peer == member.peer]
    for attempt in [req.attempt for req in requests if req.attempt is not None]:
        prefixes += [holder.prefix_tokens for holder in attempt.holders if holder.peer == member.peer]
    return sum(ceil_div(tokens, _unit(cluster)) for tokens in prefixes)


def _used(cluster: Cluster, requests: Sequence[RequestState], member: Member) -> int:
    """Blocks of all requests that run there. A decode instance may hold a prompt twice, if another request brings
    it."""
    used = 0
    for req in requests:
        attempt, generated = req.attempt, max(len(tokens) for tokens in req.emitted)
        if attempt is not None and member in attempt.involved:
            paired = attempt.decode_at is not None
            used += _most(cluster, req.request, generated, decodes=not paired or member is attempt.decode_at)
            if member is attempt.decode_at and cluster.config.admission.mode is Admission.CACHE:
                used += ceil_div(len(req.request.prompt), _unit(cluster))
    return used
