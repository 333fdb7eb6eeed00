"""Where the KV of sequences lies, as the scheduler sees it: each block whole, in HBM.

:class:`WholeBlocks` has nothing to decide and nothing to move. :class:`~memserve.instance.layerwise.placer.LayerPlacer`
is the other way, of which this is the interface: the scheduler calls both alike, and asks which it is only where that
saves work (``is_by_layer``).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from memserve.base.types import TokenArray
from memserve.instance.events import LinkUse, StepPlan
from memserve.instance.layerwise.budget import Overtaking
from memserve.instance.layerwise.state import LayerReport

if TYPE_CHECKING:
    from memserve.instance.scheduler.sequence import Sequence
    from memserve.kv.pool import BlockPool


class WholeBlocks:
    """Every block lies whole; what was swapped out comes up before the rows of the plan that brings it."""

    is_by_layer = False
    """Whether sequences may lie by layer."""
    needs_dram = False
    """Whether one that streams can send nothing down, and has no more room above."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_tokens = pool.block_tokens
        #: how much prompts without room may compute beside answers; none does where blocks lie whole
        self.overtaking = Overtaking(self._block_tokens, 0)

    # -- a plan is made

    def begin_plan(self, plan: StepPlan, *, beside: bool) -> None:
        """``plan`` is begun; ``beside``: others decode in it."""

    def sequences_to_park(self, decoding: Many[Sequence]) -> Many[Sequence]:
        """Those of ``decoding`` that give up HBM before the plan that is being made."""
        return ()

    def sequences_at_rest(self, decoding: Many[Sequence]) -> Many[Sequence]:
        """Those of ``decoding``, not all, that have no row in the plan that is being made."""
        return ()

    def move(self, plan: StepPlan, decoding: Many[Sequence], *, keeps: bool) -> None:
        """Before the rows of ``plan``: what is complete moves. ``keeps``: free HBM may be used to keep layers, beside
        those ``decoding``."""

    def up_again(self, prefilling: Iterable[Sequence]) -> Many[Sequence]:
        """Those that were parked, and whose blocks are up."""
        return ()

    def note_rows(self, sequence: Sequence, start: int, end: int) -> None:
        """The plan that is being made computes tokens ``[start, end)`` of ``sequence``."""

    def place_layers(self, plan: StepPlan) -> None:
        """Behind the rows of a plan: tell the device where everything lies."""

    # -- a sequence comes

    def swap_in(self, sequence: Sequence) -> bool:
        """Bring the blocks of a sequence up that was swapped out. False: no room."""
        blocks = self._pool.swap_in(sequence.dram_blocks)
        if blocks is None:
            return False
        sequence.dram_blocks, sequence.blocks = [], blocks
        return True

    def arrives(self, sequence: Sequence) -> bool:
        """Whether its blocks come up beside the rows of others: it has none yet."""
        return False

    def may_offload(self, sequence: Sequence) -> bool:
        """Whether nothing but its KV's own place would change."""
        return False

    def attach_by_layer(self, sequence: Sequence, headroom: int, *, reads_cache: bool, crowded: bool) -> bool:
        """Let a waiting sequence begin that has no room whole. False: it cannot, or that would not help."""
        return False

    def resume_by_layer(self, sequence: Sequence, headroom: int) -> bool:
        """Let a sequence that was swapped out go on with its layers in DRAM. False: it would wait for them, or has no
        room."""
        return False

    def blocks_to_reserve(self, blocks: int) -> int:
        """HBM blocks to leave to prompts where a parked sequence, which needs ``blocks``, may go on."""
        return 0

    def least_piece(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are worth a row: less costs more than it brings."""
        return self._block_tokens

    def overtaking_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens of ``budget`` for the next piece of a prompt without room."""
        return budget

    # -- room is needed

    def convert_running(self, running: Many[Sequence], head: Sequence) -> None:
        """``head`` waits for room: let one of ``running`` make some from now on."""

    def evict_layer(self) -> bool:
        """Give up HBM that is used without need. False: there is none."""
        return False

    def evict_layers(self, needed: int) -> bool:
        """Give up as much of that as makes ``needed`` blocks available. False: that would not do."""
        return False

    # -- a sequence goes

    def is_in_dram(self, sequence: Sequence) -> bool:
        """Whether DRAM has nearly all of its KV already."""
        return False

    def to_dram(self, sequence: Sequence) -> list[int] | None:
        """Give up all HBM of such a sequence for blocks of DRAM. None: no room there, and nothing has changed."""
        return None

    def detach_sequence(self, sequence: Sequence, *, publishes: bool) -> TokenArray | None:
        """Give up everything but whole blocks; returns the tokens that the prefix cache has got, if ``publishes``."""
        return None

    # -- what has happened, what there is

    def on_step_finished(self, link: LinkUse, step_ns: int) -> None:
        """A step of ``step_ns`` has used the link between HBM and DRAM."""

    def report_placement(self, sequence: Sequence) -> None:
        """``sequence`` ends: say how it lay, for its client."""

    @property
    def parks(self) -> bool:
        """Whether sequences wait behind their first token, in DRAM."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether anything lies by layer, or comes up."""
        return False

    def report(self, parked: int) -> LayerReport:
        """What lies by layer. ``parked``: sequences that wait in DRAM."""
        return LayerReport()

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise :class:`InvariantError` where its books and ``sequences``, all there are, contradict. For tests."""
