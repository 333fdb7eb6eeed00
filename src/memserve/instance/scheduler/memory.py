"""A sequence's blocks: the only module that talks to the pool on a sequence's behalf.

Nothing here preempts: a call that lacks room changes nothing and says so.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from memserve.base.errors import check
from memserve.base.units import ceil_div
from memserve.instance.layerwise.placement import WholeBlocks
from memserve.instance.scheduler.states import states_of
from memserve.instance.scheduler.windows import windows_of
from memserve.kv.contents import ContentReuse, describe_runs
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import Lease

if TYPE_CHECKING:
    from memserve.base.types import Request, TokenArray
    from memserve.instance.scheduler.sequence import Sequence
    from memserve.kv.costs import PreemptionModel
    from memserve.kv.pool import BlockPool
    from memserve.kv.state_snapshot import Lease


class PublishListener(Protocol):
    """Hears what sequences put into the prefix cache."""

    def on_published(self, sequence: Sequence, tokens: TokenArray, first_block: int) -> None:
        """The cache has got the blocks from ``first_block`` on of ``tokens``; they are the sequence's own now."""

    def on_reused(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The sequence goes on from ``tokens``, which were cached here."""

    def on_left_in_dram(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The cache has got ``tokens`` from a sequence that lay by layer, and that lets go of them now."""

    def on_discarded(self, sequence: Sequence, tokens: TokenArray) -> None:
        """What the sequence has published, ``tokens``, is not to be trusted."""


class SequenceMemory:
    """Gives blocks to sequences and takes them back, each reference exactly once."""

    def __init__(self, pool: BlockPool, block_tokens: int, costs: PreemptionModel) -> None:
        self.pool = pool
        self._caches = pool.config.caching
        self.costs = costs
        self.block_tokens = block_tokens
        self.copied_on_write = 0
        self.layers = WholeBlocks(pool)
        self.states = states_of(pool, costs)
        self.windows = windows_of(pool)
        #: None: no store keeps what is cached here
        self.listener: PublishListener | None = None
        #: None: KV is used at its place alone
        self.contents: ContentReuse | None = None
        self.why_no_contents = "the server was started without --nonprefix-reuse"
        self.dram_tokens_reused = 0  # brought up from DRAM by a match instead of being computed

    # -- coming

    def attach(self, sequence: Sequence, headroom: int) -> bool:
        """Give a waiting sequence the blocks of all its known tokens, from the cache as far as possible.

        ``headroom`` blocks more must be available, and stay so. Sets ``computed`` to the tokens with KV that is there
        already: at most ``known - 1``, since the last one's logits are needed.
        """
        if sequence.dram_blocks:
            return self._swap_in(sequence, headroom)
        tokens = sequence.known_tokens()
        if self._missing_blocks(sequence, tokens) + headroom > self.pool.available():
            return False
        reusable = self.reusable_tokens(tokens)[: self._worth_reusing(sequence, tokens)]
        if self._attach_prefix(sequence, tokens, reusable):
            if sequence.group.request.nonprefix_reuse:
                self._take_contents(sequence, tokens)
            return True
        # A fully cached prompt needs a copy of its last block, one block more than its tokens have. Where that does not
        # fit, the last token is computed in a new block.
        return self._attach_prefix(sequence, tokens, reusable[: len(tokens) - 1])

    def evict_layers_for(self, sequence: Sequence, headroom: int) -> bool:
        """Give up layers that others keep in HBM without need, if :meth:`attach` then has the blocks that it needs."""
        return self.layers.is_by_layer and self.layers.evict_layers(self._blocks_needed(sequence) + headroom)

    def attach_by_layer(self, sequence: Sequence, headroom: int, *, crowded: bool) -> bool:
        """As :meth:`attach`, for a sequence that has no room whole or, if ``crowded``, shall take none that parked ones
        wait for. False: nothing has changed."""
        reads = self.reads_cache(sequence)
        if not self.layers.attach_by_layer(sequence, headroom, reads_cache=reads, crowded=crowded):
            return False
        self.dram_tokens_reused += sequence.computed - len(sequence.blocks) * self.block_tokens
        return True

    def _worth_reusing(self, sequence: Sequence, tokens: TokenArray) -> int:
        """How many of ``tokens`` may come from the cache: copying some of them up from DRAM may take too long."""
        if not self.pool.config.dram_blocks or not self.reads_cache(sequence):
            return len(tokens)
        hbm, dram = self.pool.match_blocks(sequence.group.isolation, tokens)
        blocks = self.costs.reusable_blocks(len(tokens), self.block_tokens, hbm, dram)
        return len(tokens) if blocks == hbm + dram else blocks * self.block_tokens

    def adopt_blocks(
        self, sequence: Sequence, blocks: list[int], lease: Lease | None, tokens: int, state: Items[int] = ()
    ) -> None:
        """Take over ``blocks`` with the KV of the first ``tokens`` tokens, their references, and the pin; and in
        ``state`` the recurrent state behind them, if layers have one, or the parts of their window."""
        (self.windows if self.windows.has_windows else self.states).adopt_state(sequence, tokens, state)
        sequence.blocks, sequence.lease = blocks, lease
        sequence.published = lease.tokens if lease is not None else 0
        sequence.computed = sequence.writable_until = tokens
        if sequence.published:
            self.windows.on_published(sequence, sequence.known_tokens()[: sequence.published])

    def reads_cache(self, sequence: Sequence) -> bool:
        """Whether cached KV may stand in for computing. Logprobs of the prompt need every prompt position computed."""
        group = sequence.group
        return self._uses_cache(group.request) and (group.prompt_logprobs is None or bool(sequence.out))

    def _uses_cache(self, request: Request) -> bool:
        """Whether the request takes part in the cache at all: then, and only then, its sequences have leases."""
        return self._caches and request.use_cache

    def blocks_held(self, sequence: Sequence) -> int:
        """HBM blocks of ``sequence``: of its table, frames, and parts."""
        return sequence.blocks_held + self.windows.blocks_held(sequence)

    def has_blocks_for(self, sequence: Sequence, headroom: int) -> bool:
        """Whether :meth:`attach` has the blocks that it needs at least."""
        return self._blocks_needed(sequence) + headroom <= self.pool.available()

    def _blocks_needed(self, sequence: Sequence) -> int:
        return len(sequence.dram_blocks) or self._missing_blocks(sequence, sequence.known_tokens())

    def _missing_blocks(self, sequence: Sequence, tokens: TokenArray) -> int:
        matched_tokens = 0
        if self.reads_cache(sequence):
            matched_tokens = self.pool.match(sequence.group.isolation, self.reusable_tokens(tokens))
        entries = ceil_div(len(tokens), self.block_tokens) - matched_tokens // self.block_tokens
        return self.windows.blocks_for(entries, matched_tokens)

    @property
    def needs_more_than_blocks(self) -> bool:
        """Whether a sequence goes on only where more is there than blocks: a state, or a window."""
        return self.states.has_states or self.windows.has_windows

    def reusable_tokens(self, tokens: TokenArray) -> TokenArray:
        """What of a sequence's known tokens the cache may stand in for. The last one is computed in any case: where no
        state goes back by one, and no window reaches further back than from a prefix's end, it is not cached either."""
        return tokens[: len(tokens) - 1] if self.needs_more_than_blocks else tokens

    def _take_contents(self, sequence: Sequence, tokens: TokenArray) -> None:
        """Let KV of the same tokens behind others stand in for what comes behind the cached prefix."""
        group = sequence.group
        reason = self._why_exact(sequence)
        if self.contents is None or reason:
            group.facts.append(("nonprefix_reuse", f"not used: {reason}"))
            return
        result = self.contents.place_runs(sequence.key, group.isolation, tokens, sequence.computed, sequence.blocks)
        if result is None:
            group.facts.append(("nonprefix_reuse", "nothing else of the prompt was found"))
            return
        sequence.inexact, runs = result
        found_tokens = sum([run.count for run in runs])
        group.facts += [
            ("inexact_tokens", sequence.inexact.tokens),
            ("inexact_recomputed_tokens", found_tokens - sequence.inexact.tokens),
            ("inexact_ranges", describe_runs(runs)),
        ]

    def _why_exact(self, sequence: Sequence) -> str:
        """Why a sequence is served without inexact KV. Empty: it need not be."""
        group = sequence.group
        if self.contents is None:
            return self.why_no_contents
        if not self.reads_cache(sequence):
            return "the request needs its whole prompt computed"
        if (group.admitted_ns is not None or sequence.out) and not group.inexact_tokens:
            return "it began exactly, here or elsewhere"
        if group.beam is not None or group.muted:
            return "it is a beam search"
        if group.span is not None:
            return "instances share the sequence"
        remote = group.remote
        if group.is_leaving or (remote is not None and (remote.home or remote.decode_at) is not None):
            return "prefill and decode instances hand KV over, which has to be exact"
        return ""

    def _acquire_prefix(self, sequence: Sequence, tokens: TokenArray) -> Lease | None:
        request = sequence.group.request
        if not self._uses_cache(request):
            return None
        return self.pool.acquire(sequence.group.isolation, tokens if self.reads_cache(sequence) else tokens[:0])

    def _attach_prefix(self, sequence: Sequence, tokens: TokenArray, reusable: TokenArray) -> bool:
        """Acquire the cached prefix of ``reusable`` and allocate the rest of ``tokens``."""
        lease = self._acquire_prefix(sequence, reusable)
        blocks = list(lease.blocks) if lease is not None else []
        sequence.lease, sequence.blocks = lease, blocks
        if lease is not None:
            self.states.choose_source(sequence, lease)
            self.windows.take_lease(sequence, lease)
        sequence.published = lease.tokens if lease is not None else 0
        # the last token is computed even where its KV is cached: its logits are needed
        sequence.computed = min(sequence.published, len(tokens) - 1)
        missing_blocks = ceil_div(len(tokens), self.block_tokens) - len(blocks)
        # all is cached, so the last token is written again, into a block that others read
        fits = self.make_private(sequence) if missing_blocks <= 0 else self._extend_blocks(sequence, missing_blocks)
        if not fits:
            self._drop_blocks(sequence)
        elif lease is not None:
            self.dram_tokens_reused += lease.dram_tokens
            if lease.tokens and self.listener is not None:
                self.listener.on_reused(sequence, tokens[: lease.tokens])
        return fits

    def _extend_blocks(self, sequence: Sequence, count: int) -> bool:
        blocks = self.pool.allocate(self.windows.blocks_to_extend(sequence, count))
        if blocks is None:
            return False
        self.append_blocks(sequence, blocks, count)
        return True

    def append_blocks(self, sequence: Sequence, blocks: list[int], entries: int) -> list[int]:
        """Add blocks that were allocated for ``entries`` new entries of this sequence; returns those of the entries."""
        own_blocks = self.windows.take_blocks(sequence, blocks, entries)
        sequence.blocks.extend(own_blocks)
        self._set_writable(sequence)
        return own_blocks

    def _set_writable(self, sequence: Sequence) -> None:
        sequence.writable_until = self.windows.writable_end(sequence, sequence.table_entries * self.block_tokens)

    # -- running

    def next_write_is_shared(self, sequence: Sequence) -> bool:
        """Whether the next token falls into a block of the sequence that a fork may share."""
        if sequence.layered is not None or sequence.computed >= len(sequence.blocks) * self.block_tokens:
            return False
        return self.windows.may_share_next(sequence)

    def make_private(self, sequence: Sequence) -> bool:
        """Copy-on-write: make the block of the next token private. False: no room for a copy."""
        place = sequence.computed // self.block_tokens
        old = sequence.blocks[place]
        if self.pool.is_shared(old):
            new = self.pool.copy_block(old)
            if new is None:
                return False
            if not self.windows.make_private(sequence, place, copies=True):
                self.pool.release([new])
                return False
            sequence.blocks[place] = new
            self.pool.release([old])
            self.copied_on_write += 1
        else:
            self.windows.make_private(sequence, place, copies=False)
        self._set_writable(sequence)
        return True

    def place_parts(self, sequence: Sequence, end: int) -> bool:
        """Where KV of windows lies apart, a place for that of the tokens ``[computed, end)``, which has blocks. False:
        no room."""
        has_room = self.windows.place_parts(sequence, end)
        self._set_writable(sequence)
        return has_room

    def unpin_published(self, sequence: Sequence) -> bool:
        """Give up the pin on the published prefix. False: there is none.

        Where the cache has other blocks for these tokens (they were computed twice, or copied on write), the pin keeps
        those from eviction although the sequence does not read them.
        """
        if sequence.lease is None or not sequence.published:
            return False
        self.pool.unpin(sequence.lease)
        request = sequence.group.request
        sequence.lease = self.pool.acquire(sequence.group.isolation, request.prompt[:0])
        sequence.published = 0
        return True

    def _publishable_blocks(self, sequence: Sequence) -> int:
        # a token that is computed but not known yet has KV without a name: the index could not find it
        return min(sequence.computed, sequence.known_length, _trusted(sequence)) // self.block_tokens

    def has_more_to_publish(self, sequence: Sequence) -> bool:
        """Whether :meth:`publish` has anything to do."""
        return (
            sequence.lease is not None and self._publishable_blocks(sequence) * self.block_tokens > sequence.published
        )

    def publish(self, sequence: Sequence) -> None:
        """Put the full blocks of the known tokens computed so far into the prefix cache."""
        if sequence.lease is None:
            return
        full = self._publishable_blocks(sequence)
        tokens = full * self.block_tokens
        if tokens > sequence.published:
            known_tokens, blocks = sequence.known_tokens()[:tokens], sequence.blocks[:full]
            isolation = sequence.group.isolation
            self.pool.publish(sequence.lease, isolation, known_tokens, blocks, written_by=sequence.scheduled_step)
            if self.listener is not None:
                self.listener.on_published(sequence, known_tokens, sequence.published // self.block_tokens)
            if self.contents is not None:
                self.contents.index.note_published(sequence.key, isolation, known_tokens, sequence.request_id)
            sequence.published = tokens
            self.states.on_published(sequence)
            self.windows.on_published(sequence, known_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share all KV of ``parent``, which has computed all known tokens of ``child`` but the last.

        The child pins the published prefix, too: it may outlive the parent.
        """
        shared = parent.blocks
        if parent.lease is not None:
            tokens = parent.known_tokens()[: parent.published]
            # the parent's own parts are shared, not those that the cache has
            acquire = self.pool.acquire_kv if self.windows.has_windows else self.pool.acquire
            child.lease = acquire(parent.group.isolation, tokens)
            child.published = child.lease.tokens
            shared = shared[len(child.lease.blocks) :]
            child.blocks = list(child.lease.blocks)
        self.pool.retain(shared)
        child.blocks = child.blocks + shared
        child.computed, child.inexact = parent.computed, parent.inexact
        # both must copy the last block before they write: neither knows which of them writes first
        child.writable_until = parent.writable_until = parent.computed
        self.states.fork(parent, child)
        self.windows.fork(parent, child)

    # -- going

    def detach(self, sequence: Sequence) -> None:
        """Publish full blocks, then return every block on every tier."""
        if self.layers.arrives(sequence):
            self.abandon_blocks(sequence)  # its blocks have nothing yet
            return
        if sequence.dram_blocks:
            self.pool.release_dram(sequence.dram_blocks)
            sequence.dram_blocks = []
        self.publish(sequence)
        cached_tokens = self.layers.detach_sequence(sequence, publishes=self._uses_cache(sequence.group.request))
        if cached_tokens is not None and self.listener is not None:
            self.listener.on_left_in_dram(sequence, cached_tokens)
        self.states.leave_snapshot(sequence)
        self._drop_blocks(sequence)

    def abandon_blocks(self, sequence: Sequence) -> None:
        """Return every block without publishing: its content cannot be relied upon."""
        if sequence.dram_blocks:
            self.pool.release_dram(sequence.dram_blocks)
            sequence.dram_blocks = []
        self._drop_blocks(sequence)

    def discard_kv(self, sequence: Sequence) -> None:
        """Return every block, and remove the tokens from the index, except blocks that others hold at this moment: the
        next request with this prefix computes it."""
        by_layer = sequence.layered
        reused = sequence.published if by_layer is None else by_layer.cached * self.block_tokens
        cached = sequence.known_tokens()[:reused]
        self.abandon_blocks(sequence)
        self.forget_kv(sequence, cached)  # after the own references are gone: the index keeps blocks that others hold

    def forget_kv(self, sequence: Sequence, cached: TokenArray) -> None:
        """Remove ``cached``, whole blocks with which ``sequence`` begins, from the index. It holds none of them."""
        if not self._uses_cache(sequence.group.request) or not len(cached):
            return
        self.states.discard(sequence, cached)
        if self.listener is not None:
            self.listener.on_discarded(sequence, cached)  # first: what waits for a store holds blocks as well
        self.pool.delete(sequence.group.isolation, cached)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.layers.detach_sequence(sequence, publishes=False)
        self.states.drop_sequence(sequence)
        self.windows.drop_sequence(sequence)
        if self.contents is not None and sequence.inexact is not None:
            self.contents.cancel_moves(sequence.key)
            sequence.inexact = None
        if sequence.lease is not None:
            self.pool.unpin(sequence.lease)
            sequence.lease = None
        if sequence.blocks:
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        sequence.computed = sequence.published = sequence.writable_until = 0
        sequence.resumed = len(sequence.out)  # what is computed in their place has drawn none of them

    # -- swapping

    def is_swapped_at_no_cost(self, sequence: Sequence) -> bool:
        """Whether DRAM has the KV already, all but the last blocks of it."""
        return self.layers.is_in_dram(sequence)

    def swap_out(self, sequence: Sequence) -> bool:
        """Move the blocks to DRAM. False: it has no room. ``computed`` stays.

        No further block is published: blocks that the index holds, too, would occupy both tiers. With inexact KV that
        lies ahead of what is computed it is not done either: what comes again is looked up again.
        """
        if sequence.inexact is not None and not sequence.inexact.is_behind(sequence.computed):
            return False
        has_copy = self.layers.is_in_dram(sequence)
        state_blocks = self.states.reserve_below(sequence)
        if state_blocks is None:
            return False
        dram_blocks = self.layers.to_dram(sequence) if has_copy else self._copy_out(sequence)
        if dram_blocks is None:
            self.pool.release_dram(state_blocks)
            return False
        self.states.swap_out(sequence, state_blocks)
        if sequence.lease is not None:
            self.pool.unpin(sequence.lease)
            sequence.lease = None
        sequence.dram_blocks, sequence.blocks = dram_blocks, []
        sequence.published = sequence.writable_until = 0
        return True

    def _copy_out(self, sequence: Sequence) -> list[int] | None:
        blocks = sequence.blocks[: ceil_div(sequence.computed, self.block_tokens)]
        dram_blocks = self.pool.swap_out(blocks) if blocks else None
        if dram_blocks is not None and len(blocks) < len(sequence.blocks):
            self.pool.release(sequence.blocks[len(blocks) :])  # nothing is written there
        return dram_blocks

    def _swap_in(self, sequence: Sequence, headroom: int) -> bool:
        check(not sequence.blocks, f"{sequence.request_id} is swapped out but has HBM blocks")
        missing_blocks = ceil_div(sequence.known_length, self.block_tokens)
        if missing_blocks + headroom > self.pool.available():
            return False
        if not self.layers.swap_in(sequence):
            return False
        request = sequence.group.request
        if self._uses_cache(request):
            sequence.lease = self.pool.acquire(sequence.group.isolation, request.prompt[:0])
        # Blocks of tokens that are not computed yet: where they are lacking, the step asks for them again.
        sequence.writable_until = len(sequence.blocks) * self.block_tokens
        extra = missing_blocks - len(sequence.blocks)
        if extra > 0:
            self._extend_blocks(sequence, extra)
        self.states.swap_in(sequence)
        return True


def _trusted(sequence: Sequence) -> int:
    """How many tokens have KV that is exact, and that no step under way can spoil. Where earlier parts of the sequence
    lie elsewhere, a step may fail to read them: what it has computed counts when a token is known that was drawn behind
    it."""
    span = sequence.group.span
    if sequence.inexact is not None:  # what is computed behind it has read it
        return sequence.inexact.exact_tokens
    if span is not None and span.stripes:  # until its prompt is complete
        return 0
    if span is None or not span.segments:
        return sequence.known_length
    return sequence.known_length - 1 if len(sequence.out) > sequence.resumed else 0
