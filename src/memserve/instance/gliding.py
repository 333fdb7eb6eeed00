"""Many steps in one go, where nothing can happen but one more token for each sequence (level 2).

A host that knows that no event will come before the device has finished so many steps (a simulator does, in virtual
time) may tell them all at once: afterwards the machine is exactly as if it had handled each ``StepFinished`` by itself.
Only steps that are all alike are told so. What ends a sequence, grows a table by eviction, copies, admits, hands over
or has a deadline is left to :meth:`Instance.handle`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from memserve.errors import check
from memserve.instance.outstanding import Outstanding
from memserve.instance.planner import Planner
from memserve.instance.sequence import Sequence

if TYPE_CHECKING:
    from memserve.instance.cluster_link import ClusterLink


def steps_ahead(planner: Planner, under_way: Items[Outstanding], depth: int, link: ClusterLink | None) -> int:
    """How many of the next steps to finish are sure to be alike, and to be followed by plans that are; 0 = none is."""
    roster = planner.roster
    decoding = roster.decoding.items
    busy_elsewhere = roster.waiting or roster.working.items or roster.landed or roster.idle.items
    unsettled = roster.closing or roster.slots_unknown or roster.ended_orders or roster.interrupted or roster.homeward
    if not decoding or busy_elsewhere or unsettled or roster.memory.pool.has_copies or len(under_way) < depth:
        return 0
    if any(memo.void or memo.chunks or memo.prefill_tokens or memo.targets != decoding for memo in under_way):
        return 0
    if link is not None and (link.handoffs.leaving or link.exchange.holds_back):
        return 0
    steps = min([sequence.left for sequence in decoding]) - 1
    if not steps or any(_is_special(sequence, roster.memory.block_tokens) for sequence in decoding):
        return 0
    return min(steps, _steps_with_room(planner, steps))


def _is_special(sequence: Sequence, block_tokens: int) -> bool:
    """Whether its tokens are more than tokens, or fall into a block that it shares."""
    group = sequence.group
    if sequence.stops or not sequence.told or group.muted or group.beam is not None:
        return True
    shares = sequence.writable_until != len(sequence.blocks) * block_tokens
    return shares or group.request.sampling.logprobs is not None


def _steps_with_room(planner: Planner, limit: int) -> int:
    """Steps until tables need more blocks than are free: those would have to be taken from somebody."""
    memory = planner.roster.memory
    room = [sequence.writable_until - sequence.computed for sequence in planner.roster.decoding.items]
    free, block_tokens = memory.pool.blocks_free, memory.block_tokens
    if free >= sum(max(0, -(-(limit - left) // block_tokens)) for left in room):
        return limit
    return max(0, min(room))


def glide(planner: Planner, under_way: Items[Outstanding], link: ClusterLink | None, tokens: list[int], device_ns: int
          ) -> None:  # fmt: skip
    """``len(tokens)`` steps have finished; step ``i`` drew ``tokens[i]`` for every sequence. ``device_ns``: of all.

    At most as many as :func:`steps_ahead` said.
    """
    roster, steps = planner.roster, len(tokens)
    roster.serve_decodes(steps)
    decoding = roster.decoding.items
    _grow(planner, steps)
    for sequence in decoding:
        sequence.out.extend(tokens)
        sequence.computed += steps
        sequence.left -= steps
        sequence.scheduled_step += steps
    for memo in under_way:
        memo.step_id += steps
    planner.next_step_id += steps
    if link is not None:
        link.exchange.glided(steps)
    counters = roster.counters
    counters.steps += steps
    counters.device_ns += device_ns
    counters.decode_tokens += steps * len(decoding)
    counters.generated_tokens += steps * len(decoding)


def _grow(planner: Planner, steps: int) -> None:
    """Blocks for the steps whose plans would have been made: in the order in which those would have asked."""
    memory, block_tokens = planner.roster.memory, planner.roster.memory.block_tokens
    asking: dict[int, list[Sequence]] = {}
    for sequence in planner.roster.decoding.items:
        for step in range(sequence.writable_until - sequence.computed, steps, block_tokens):
            asking.setdefault(step, []).append(sequence)
    for step in sorted(asking):
        blocks = memory.pool.allocate(len(asking[step]))
        check(blocks is not None, "there was room for these steps")
        for sequence, block in zip(asking[step], blocks or (), strict=True):
            memory.append(sequence, [block])
