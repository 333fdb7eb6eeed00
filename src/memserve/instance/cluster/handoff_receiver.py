"""Requests whose prompt is computed elsewhere and that are decoded here, and KV that goes back there.

A request is known here from its ``Offer`` on, as a group whose sequence is WAITING_FOR_REMOTE_KV: it can be cancelled
and runs out of time like any other. Its blocks come by the exchange; then its sequences are REMOTE_KV_READY and wait
for a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import structs

from memserve.base.types import FinishReason, Tier, TokenArray
from memserve.base.units import NS_PER_MS
from memserve.instance.intake import RequestIntake
from memserve.instance.scheduler.sequence import Cause, Fact, Group, RemoteState, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.events import HandoffArrived, HandoffFailed, HandoffOffered
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks
from memserve.protocol.events import RejectRequest
from memserve.protocol.peers import Peer


@dataclass(frozen=True, slots=True)
class _Generated:
    """Generated KV to be sent back: ``blocks[i]``, and behind them ``dram_blocks``, is block ``first_block + i`` of
    ``tokens``, one reference each."""

    home: Peer
    tenant: str
    tokens: TokenArray
    first_block: int
    blocks: list[int]
    dram_blocks: list[int]
    state: Lease | None
    """The snapshot behind ``tokens``, where layers have one."""


class HandoffReceiver:
    """All requests that are on their way here."""

    def __init__(self, state: SchedulerState, intake: RequestIntake, exchange: Exchange) -> None:
        self._state = state
        self._intake = intake
        self._exchange = exchange
        #: import id -> the request that it brings
        self.pending_imports: dict[str, Group] = {}
        self._generated: list[_Generated] = []
        self.taken_over = 0
        #: of them: into DRAM
        self.parked = 0
        self.failed = 0
        self.blocks_sent_back = 0

    def on_offered(self, outcome: HandoffOffered, now_ns: int) -> RejectRequest | None:
        """Another instance prefills a request for this one. Returns the rejection, if it is rejected."""
        offer, request = outcome.offer, outcome.offer.request
        if request is None:
            return None
        existing = self._state.groups.get(request.request_id)
        if existing is not None and existing.remote is not None and existing.remote.import_id is not None:
            self._replace_import(existing, existing.remote, outcome)  # the sender was interrupted, and begins anew
            return None
        # where it migrates, its client has tokens: the first one's objective is no matter here
        refusal = self._intake.rejection_of(
            structs.replace(request, slo_ttft_ns=None) if offer.migrates else request, now_ns
        )
        if refusal is not None:
            self._exchange.give_up(outcome.transfer_id, refusal.reason)
            return refusal
        deadline_ns = None if offer.deadline_in_ns is None else now_ns + offer.deadline_in_ns
        group = self._intake.open_group(request, now_ns, deadline_ns)
        group.prompt_logprobs = None  # reported where they were computed
        group.remote = RemoteState(import_id=outcome.transfer_id, deadline_ns=deadline_ns)
        self._intake.enqueue_group(group, Cause.REMOTE_KV_EXPECTED)
        self.pending_imports[outcome.transfer_id] = group
        return None

    def _replace_import(self, group: Group, remote: RemoteState, outcome: HandoffOffered) -> None:
        old = remote.import_id or ""
        self._exchange.give_up(old, "offered anew")
        del self.pending_imports[old]
        remote.import_id = outcome.transfer_id
        self.pending_imports[outcome.transfer_id] = group

    # -- the KV is here

    def on_arrived(self, outcome: HandoffArrived, now_ns: int, facts: list[Fact]) -> bool:
        """The KV has come: the sequences wait for slots. False: the KV is of no use; nothing of it is held."""
        group = self.pending_imports.pop(outcome.transfer_id)
        remote = group.remote
        unknown = self._intake.unknown_token(outcome.first_tokens)
        if remote is None or unknown or not _agrees(group, outcome) or (group.beam is not None and outcome.state):
            self._release_blocks(outcome)
            self.failed += 1
            self._state.drop_group(group)
            return False
        remote.import_id = None
        group.admitted_ns = now_ns  # the instance that computed the prompt has counted it
        group.facts += [*facts, ("handoff_ms", round((now_ns - group.arrived_ns) / NS_PER_MS, 3))]  # since the offer
        if outcome.offer.return_kv and group.request.n == 1 and group.beam is None:
            remote.home, remote.home_tokens = outcome.sender, len(outcome.offer.tokens)
        self.taken_over += 1
        tokens = len(outcome.offer.tokens)
        first = next(iter(group.sequences.values()))
        if outcome.tier is Tier.DRAM:
            first.out, first.computed, first.dram_blocks = list(outcome.first_tokens[0]), tokens, outcome.blocks
            self._state.park_sequence(first)
            self.parked += 1
            self._end_early(first, remote, outcome.ended_indices)
            self._await_grammar(group)
            return True
        self._state.memory.adopt_blocks(
            first, outcome.blocks, outcome.lease, tokens if group.beam is None else tokens - 1, outcome.state
        )
        self._state.move(first, Cause.REMOTE_KV_ARRIVED)
        if group.beam is None:
            self._fork_sequences(group, first, outcome)
            for sequence in list(group.sequences.values()):
                self._end_early(sequence, remote, outcome.ended_indices)
        self._await_grammar(group)
        return True

    def _fork_sequences(self, group: Group, first: Sequence, outcome: HandoffArrived) -> None:
        """Each sequence gets its own tokens; all share the prompt's blocks."""
        group.forks_pending = 0
        first.out = list(outcome.first_tokens[first.index])
        for index in range(1, group.request.n):
            child = group.new_sequence()
            child.out = list(outcome.first_tokens[index])
            self._state.memory.fork(first, child)
            self._state.move(child, Cause.REMOTE_KV_ARRIVED)

    def _end_early(self, sequence: Sequence, remote: RemoteState, ended_indices: tuple[int, ...]) -> None:
        if sequence.index in ended_indices:
            self._state.finish_silently(sequence)
            return
        reason = FinishReason.STOP if sequence.index in remote.stopped else sequence.known_ending
        if reason is not None:
            self._intake.finish_known(sequence, reason)

    def _await_grammar(self, group: Group) -> None:
        """If the grammar of ``group`` is still being built: memory does not wait for that. The KV is given up; what the
        cache has of it is found again on admission."""
        if self._state.grammars.is_awaited(group.wanted_grammar):
            for sequence in list(group.sequences.values()):
                self._state.reset_sequence(sequence)

    def _release_blocks(self, outcome: HandoffArrived) -> None:
        if outcome.lease is not None:
            self._state.memory.pool.unpin(outcome.lease)
        pool = self._state.memory.pool
        (pool.release if outcome.tier is Tier.HBM else pool.release_dram)(outcome.blocks)
        pool.release(outcome.state)

    # -- the KV will not come

    def on_failed(self, outcome: HandoffFailed) -> RejectRequest | None:
        """The router tries another instance, from the tokens that the client has."""
        group = self.pending_imports.pop(outcome.transfer_id, None)
        if group is None:
            return None
        self.failed += 1
        self._state.drop_group(group)
        return RejectRequest(group.request.request_id, f"handoff failed: {outcome.reason}", 0.0)

    def on_withdrawn(self, import_id: str) -> None:
        """The request goes on, or has ended, where its prompt was computed."""
        group = self.pending_imports.get(import_id)
        if group is not None:
            self._state.drop_group(group)

    def on_request_ended(self, group: Group) -> None:
        """The request has ended: its KV is no longer wanted."""
        remote = group.remote
        if remote is not None and remote.import_id is not None:
            self._exchange.give_up(remote.import_id, "the request has ended")
            self.pending_imports.pop(remote.import_id, None)
            remote.import_id = None

    def clear(self) -> None:
        """The instance was expelled: no generated KV is sent back."""
        for part in self._generated:
            self._release_generated(part)
            self._release_state(part)
        self._generated.clear()

    def _release_generated(self, part: _Generated) -> None:
        self._state.memory.pool.release(part.blocks)
        self._state.memory.pool.release_dram(part.dram_blocks)

    def _release_state(self, part: _Generated) -> None:
        if part.state is not None:
            self._state.memory.pool.unpin(part.state)
            self._state.memory.pool.release(part.state.blocks)

    # -- sending generated KV back

    def keep_generated(self, sequence: Sequence) -> None:
        """Keep the whole blocks behind those that the prefill instance has, until they are offered to it."""
        remote, block_tokens = sequence.group.remote, self._state.memory.block_tokens
        if remote is None or remote.home is None:
            return
        first, end = remote.home_tokens // block_tokens, min(sequence.computed, sequence.known_length) // block_tokens
        by_layer, dram_blocks, memory = sequence.layered, list[int](), self._state.memory
        pool, state = memory.pool, None
        if memory.states.has_states:  # KV that no state stands behind is computed there
            state = memory.states.lend_last(sequence, (first + 1) * block_tokens)
            end = state.tokens // block_tokens if state is not None else first
        if memory.windows.has_windows and end > first:
            state = memory.windows.lend(sequence, end * block_tokens)
            end = end if state is not None else first
        blocks = sequence.blocks[first:end]
        if by_layer is not None:  # what lies in HBM behind it is on its way down
            end = min(end, by_layer.first + len(by_layer.dram_blocks))
            blocks = sequence.blocks[first : by_layer.first]
            dram_blocks = by_layer.dram_blocks[max(0, first - by_layer.first) : max(0, end - by_layer.first)]
        if first < end <= sequence.table_entries:
            pool.retain(blocks)
            pool.retain_dram(dram_blocks)
            tokens = sequence.known_tokens()[: end * block_tokens]
            generated = _Generated(remote.home, sequence.group.isolation, tokens, first, blocks, dram_blocks, state)
            self._generated.append(generated)

    def send_back(self, now_ns: int) -> None:
        """Offer generated KV to the instances that computed the prompts."""
        for part in self._generated:
            offered = OfferedBlocks(
                part.tenant, part.tokens, part.blocks, first_block=part.first_block, dram_blocks=part.dram_blocks,
                state=part.state,
            )  # fmt: skip
            offer_id = self._exchange.offer_blocks(part.home, offered, now_ns)
            count = len(part.blocks) + len(part.dram_blocks)
            self._exchange.announce_computed(offer_id, part.first_block, part.first_block + count)
            if part.state is not None:
                self._exchange.announce_state(offer_id, part.first_block + count)
            self._release_generated(part)
            self.blocks_sent_back += count
        self._generated.clear()


def _agrees(group: Group, outcome: HandoffArrived) -> bool:
    """Whether the KV is that of the request's prompt and of all tokens of each live sequence but the last."""
    request, tokens, firsts = group.request, outcome.offer.tokens, outcome.first_tokens
    if group.beam is not None:
        return not firsts and np.array_equal(tokens, request.prompt)
    if len(firsts) != request.n:
        return False
    live = [firsts[index] for index in range(request.n) if index not in outcome.ended_indices]
    return bool(live) and all(generated and _continues(tokens, request.prompt, generated) for generated in live)


def _continues(tokens: TokenArray, prompt: TokenArray, generated: tuple[int, ...]) -> bool:
    expected_tokens = np.concatenate((prompt, np.asarray(generated[:-1], dtype=np.int32)))
    return np.array_equal(tokens, expected_tokens)
