"""An instance machine that runs many like steps in one go, for a host that knows the coming events.

A simulator knows, in virtual time, that no event will come before the device has finished some number of steps, and it
can tell from each token when it was drawn (``timed_device.Moments``). So :class:`FastForwardInstance` is told of many
steps at once, and emits further tokens of a sequence late. Afterwards its state is exactly as if it had handled each
``StepFinished`` by itself: ``tests/twins/lab/sim/test_fast_forward.py`` compares it with an ``Instance``. Only
like steps are skipped: whatever ends a sequence, grows a table by eviction, copies, admits, hands over or has a
deadline is left to :meth:`Instance.handle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from memserve.base.errors import check
from memserve.base.types import FinishReason, TokenLogprobs, TokenOutput
from memserve.instance.events import Action
from memserve.instance.machine import Instance
from memserve.instance.scheduler.batch import InflightPlan
from memserve.instance.scheduler.results import StepResults
from memserve.instance.scheduler.sequence import Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.protocol.events import EmitTokens

_Emitted = dict[tuple[str, int], tuple[Sequence, int]]
"""(request id, index) -> a sequence that has emitted tokens here, and how many."""


class _LateResults(StepResults):
    """Leaves out plain tokens of sequences that were decoding when the step began."""

    __slots__ = ("_emitted",)

    def __init__(self, state: SchedulerState, emitted: _Emitted) -> None:
        super().__init__(state)
        self._emitted = emitted

    def reported_places(self, plan: InflightPlan, special: set[int]) -> Iterable[int]:
        if plan.decode_rows == len(plan.targets):
            return sorted(special)
        return sorted(special.union(range(plan.decode_rows, len(plan.targets))))

    def emit_token(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: TokenLogprobs | None, reason: FinishReason | None
    ) -> None:
        waits = reason is None and logprobs is None and sequence.phase is Phase.IDLE
        if not (waits and (sequence.request_id, sequence.index) in self._emitted):  # else its next token comes soon
            super().emit_token(sequence, tokens, logprobs, reason)


class FastForwardInstance(Instance):
    """As ``Instance``, but further tokens of a sequence are emitted with its end, when it is preempted, or by
    :meth:`take_held_tokens`. Ids of requests are not used twice."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._emitted: _Emitted = {}
        self._preemptions = 0  # when outputs were told last
        self.results = _LateResults(self.state, self._emitted)

    def _take_outputs(self) -> list[TokenOutput]:
        outputs = [self._complete_output(output) for output in super()._take_outputs()]
        counters = self.state.counters
        preemptions = counters.preempted_by_swap + counters.preempted_by_recompute
        if preemptions != self._preemptions:  # further tokens may take long
            self._preemptions = preemptions
            outputs += self._take_held((Phase.PREEMPTED, Phase.WAITING, Phase.PARKED))
        return outputs

    def _complete_output(self, output: TokenOutput) -> TokenOutput:
        """``output``, with the tokens before it that were not emitted yet."""
        key, offset = (output.request_id, output.index), output.offset
        sequence, emitted = self._emitted.get(key) or (None, offset)
        if output.finish_reason is not None:
            self._emitted.pop(key, None)
        else:
            group = self.state.groups.get(output.request_id)
            if group is not None and output.index in group.sequences:
                self._emitted[key] = group.sequences[output.index], offset + len(output.tokens)
        if sequence is None or emitted == offset:
            return output
        return structs.replace(output, tokens=(*sequence.out[emitted:offset], *output.tokens), offset=emitted)

    def take_held_tokens(self) -> list[Action]:
        """All tokens that are not emitted yet, one output for each sequence, as they are told to the routers."""
        outputs = self._take_held(
            (Phase.DECODING, Phase.IDLE, Phase.PREFILLING, Phase.PREEMPTED, Phase.WAITING, Phase.PARKED)
        )
        if not outputs:
            return []
        return self.link.send_outputs(outputs) if self.link is not None else [EmitTokens(outputs)]

    def _take_held(self, phases: tuple[Phase, ...]) -> list[TokenOutput]:
        outputs = []
        for key, (sequence, emitted) in list(self._emitted.items()):
            if sequence.phase is Phase.FINISHED:
                del self._emitted[key]  # it has left for another instance
            elif sequence.phase in phases and emitted < len(sequence.out):
                outputs.append(TokenOutput(*key, tuple(sequence.out[emitted:]), offset=emitted))
                self._emitted[key] = sequence, len(sequence.out)
        return outputs

    # -- many steps at once

    def steps_ahead(self) -> int:
        """How many of the next steps are certain to be alike, and to be followed by like plans, if no other event comes
        before they end."""
        state, link = self.state, self.link
        decoding = state.decoding.items
        has_other_work = (
            state.waiting or state.parked or state.prefilling.items or state.remote_kv_ready or state.idle.items
        )
        unsettled = state.closing or state.slots_unknown or state.memory.pool.has_copies
        unsettled = unsettled or state.memory.layers.is_busy
        if not decoding or has_other_work or unsettled or len(self.inflight) < self.config.scheduler.steps_in_flight:
            return 0
        if any(plan.void or plan.chunks or plan.prefill_tokens or plan.targets != decoding for plan in self.inflight):
            return 0
        if link is not None and (link.sender.leaving or link.exchange.holds_back):
            return 0
        steps = min([sequence.left for sequence in decoding]) - 1
        if not steps or any(_is_special(sequence, state.memory.block_tokens) for sequence in decoding):
            return 0
        return min(steps, self._steps_with_room(steps))

    def _steps_with_room(self, limit: int) -> int:
        """Steps until tables need more blocks than are free, which other sequences would have to give."""
        memory = self.state.memory
        room = [sequence.writable_until - sequence.computed for sequence in self.state.decoding.items]
        free, block_tokens = memory.pool.blocks_free, memory.block_tokens
        if free >= sum(max(0, -(-(limit - tokens_left) // block_tokens)) for tokens_left in room):
            return limit
        return max(0, min(room))

    def fast_forward(self, tokens: list[int], steps_ns: list[int]) -> None:
        """As ``len(tokens)`` events ``StepFinished``: step ``i`` drew ``tokens[i]`` for every sequence, and took
        ``steps_ns[i]``. At most :meth:`steps_ahead` steps.

        Afterwards the plans under way are those of ``len(tokens)`` steps later.
        """
        state, steps = self.state, len(tokens)
        state.serve_decodes(steps)
        decoding = state.decoding.items
        self._grow_tables(steps)
        if state.objectives is not None or state.memory.layers.is_by_layer:
            for step_ns in steps_ns:
                state.costs.learn_step(0, len(decoding), step_ns)
        if state.memory.layers.is_by_layer:
            for step_ns in steps_ns:
                state.memory.layers.overtaking.pass_time(step_ns, len(state.groups))
        for sequence in decoding:
            sequence.out.extend(tokens)
            sequence.computed += steps
            sequence.left -= steps
            sequence.scheduled_step += steps
        for plan in self.inflight:
            plan.step_id += steps
        self.planner.next_step_id += steps
        if self.link is not None:
            exchange = self.link.exchange
            exchange.plan_made(self.planner.next_step_id - 1)
            outcomes = exchange.plan_finished(self.inflight[0].step_id - 1, 0)
            check(not outcomes, "a transfer waited for one of these steps")
        counters = state.counters
        counters.steps += steps
        counters.device_ns += sum(steps_ns)
        counters.decode_tokens += steps * len(decoding)
        counters.generated_tokens += steps * len(decoding)

    def _grow_tables(self, steps: int) -> None:
        """Blocks for the skipped plans, in the order in which they would have allocated them."""
        memory, block_tokens = self.state.memory, self.state.memory.block_tokens
        asking: dict[int, list[Sequence]] = {}
        for sequence in self.state.decoding.items:
            for step in range(sequence.writable_until - sequence.computed, steps, block_tokens):
                asking.setdefault(step, []).append(sequence)
        for step in sorted(asking):
            blocks = memory.pool.allocate(len(asking[step]))
            check(blocks is not None, "there was room for these steps")
            for sequence, block in zip(asking[step], blocks or (), strict=True):
                memory.append_blocks(sequence, [block], 1)


def _is_special(sequence: Sequence, block_tokens: int) -> bool:
    """Whether its tokens need more handling than appending, or are written to a shared block."""
    group = sequence.group
    if sequence.stops or group.muted or group.beam is not None:
        return True
    shares = sequence.writable_until != len(sequence.blocks) * block_tokens
    return shares or group.request.sampling.logprobs is not None
