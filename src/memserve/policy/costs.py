"""What things cost on this machine, and what follows from it (level 1).

A prefix that was computed before can be *reused* where it lies, *swapped in* from host memory, *fetched* from another
instance, or *recomputed*. Which is cheapest depends on the machine, the model and the length; curves say it (MemServe
5.3 and figure 13), and ``memserve profile`` measures their coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from memserve.errors import UserError
from memserve.policy.curves import CopyCurve, DecodeCurve, PrefillCurve
from memserve.policy.decision import Decision, Option, Prefix, Way
from memserve.types import KVGeometry
from memserve.units import NS_PER_MS, ceil_div

VERSION = 1
"""Of the dictionary form."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Expected times in nanoseconds: never negative, and never less for more work."""

    prefill: PrefillCurve = field(default_factory=PrefillCurve)
    decode: DecodeCurve = field(default_factory=DecodeCurve)
    swap_in: CopyCurve = field(default_factory=lambda: CopyCurve(100_000.0, 5_000.0, 0.2))
    """Host memory to the arena that attention reads (0.2 ns a byte = 5 GB/s)."""
    swap_out: CopyCurve = field(default_factory=lambda: CopyCurve(100_000.0, 5_000.0, 0.2))
    same_host: CopyCurve = field(default_factory=lambda: CopyCurve(2.0 * NS_PER_MS, 10_000.0, 0.25))
    """From another process's shared memory, messages included."""
    network: CopyCurve = field(default_factory=lambda: CopyCurve(10.0 * NS_PER_MS, 30_000.0, 2.0))
    """From another host (2 ns a byte = 0.5 GB/s)."""
    machine: str = ""
    """Where it was measured; empty: these are the defaults."""
    model: str = ""
    """With which model, dtype, device and threads."""

    @property
    def is_measured(self) -> bool:
        """Whether a profile stands behind it."""
        return bool(self.machine)

    def prefill_ns(self, new_tokens: int, context_tokens: int = 0) -> int:
        """Computing ``new_tokens`` behind ``context_tokens`` whose KV is there."""
        return self.prefill.ns(new_tokens, context_tokens)

    def decode_step_ns(self, batch: int, context_tokens: int) -> int:
        """One step of ``batch`` sequences that attend to ``context_tokens`` tokens altogether."""
        return self.decode.ns(batch, context_tokens)

    def swap_in_ns(self, copy_bytes: int, pieces: int = 1) -> int:
        """DRAM to HBM."""
        return self.swap_in.ns(copy_bytes, pieces)

    def swap_out_ns(self, copy_bytes: int, pieces: int = 1) -> int:
        """HBM to DRAM."""
        return self.swap_out.ns(copy_bytes, pieces)

    def transfer_ns(self, copy_bytes: int, same_host: bool = True, pieces: int = 1) -> int:
        """From one instance to another. ``pieces``: blocks when aggregated, pages when discrete."""
        return (self.same_host if same_host else self.network).ns(copy_bytes, pieces)

    def scaled(self, prefill_scale: float) -> CostModel:
        """The same with another speed of computing a prompt: what finished steps have taught."""
        old = self.prefill
        scaled = (old.step_ns * prefill_scale, old.token_ns * prefill_scale, old.pair_ns * prefill_scale)
        return replace(self, prefill=PrefillCurve(*scaled))

    def decide(
        self,
        prompt_tokens: int,
        hbm_tokens: int,
        dram_tokens: int,
        remote_tokens: int,
        geometry: KVGeometry,
        *,
        same_host: bool = True,
        aggregated: bool = True,
        queue_ns: int = 0,
        link_busy_ns: int = 0,
    ) -> Decision:
        """How the pieces of a prompt's prefix get their KV; see :class:`Prefix` for where they lie.

        ``queue_ns``: work that is before this request in any case; a fetch goes on beside it. ``link_busy_ns``:
        fetches before this one. A piece is moved as a whole or not at all: moving costs the same for each of its
        tokens while computing costs more for each further one, so the best point is at an end of a piece. With one
        exception: what can be fetched while the request queues costs nothing, and more of it may not pay.
        """
        prefix = Prefix(prompt_tokens, hbm_tokens, dram_tokens, remote_tokens, same_host)
        pieces_of_block = 1 if aggregated else geometry.num_layers
        return self._decide(prefix, geometry, pieces_of_block, queue_ns, link_busy_ns)

    def decide_batch(
        self, prefixes: Sequence[Prefix], geometry: KVGeometry, *, aggregated: bool = True, queue_ns: int = 0
    ) -> list[Decision]:
        """Decisions for requests that come together, in their order.

        Their fetches share the link: who saves most for its time on it goes first, and the others find it busy.
        """
        pieces_of_block = 1 if aggregated else geometry.num_layers

        def saved_share(at: int) -> float:
            prefix = prefixes[at]
            fetch_ns = self._fetch_ns(prefix, geometry, pieces_of_block, prefix.remote_tokens)
            context = prefix.hbm_tokens + prefix.dram_tokens
            return self.prefill_ns(prefix.remote_tokens, context) / fetch_ns if fetch_ns else 0.0

        decisions: dict[int, Decision] = {}
        link_busy_ns = 0
        for at in sorted(range(len(prefixes)), key=lambda at: (-saved_share(at), at)):
            decision = self._decide(prefixes[at], geometry, pieces_of_block, queue_ns, link_busy_ns)
            link_busy_ns += self._fetch_ns(prefixes[at], geometry, pieces_of_block, decision.tokens(Way.FETCH))
            decisions[at] = decision
        return [decisions[at] for at in range(len(prefixes))]

    def _decide(
        self, prefix: Prefix, geometry: KVGeometry, pieces_of_block: int, queue_ns: int, link_busy_ns: int
    ) -> Decision:
        options: list[Option] = []
        free_ns = queue_ns - link_busy_ns
        hidden_tokens = self._hidden_blocks(prefix, geometry, pieces_of_block, free_ns) * geometry.block_tokens
        for swapped, fetched in (
            (0, 0),
            (prefix.dram_tokens, 0),
            (prefix.dram_tokens, min(hidden_tokens, prefix.remote_tokens)),
            (prefix.dram_tokens, prefix.remote_tokens),
        ):
            pieces = ((Way.REUSE, prefix.hbm_tokens), (Way.SWAP_IN, swapped), (Way.FETCH, fetched))
            moved = _trimmed(pieces, prefix.prompt_tokens - 1)  # the last token's logits are always computed
            if options and moved == options[-1].ways[:-1]:
                continue
            tokens_by = dict(moved)
            context = sum(tokens_by.values())
            new_tokens, fetched = prefix.prompt_tokens - context, tokens_by.get(Way.FETCH, 0)
            fetch_ns = link_busy_ns + self._fetch_ns(prefix, geometry, pieces_of_block, fetched) if fetched else 0
            options.append(
                Option(
                    (*moved, (Way.RECOMPUTE, new_tokens)),
                    wait_ns=max(queue_ns, fetch_ns),
                    swap_ns=self._swap_ns(geometry, tokens_by.get(Way.SWAP_IN, 0)),
                    prefill_ns=self.prefill_ns(new_tokens, context),
                )
            )
        chosen = min(options, key=lambda option: option.expected_ns)
        return Decision(chosen, tuple(option for option in options if option is not chosen))

    def _swap_ns(self, geometry: KVGeometry, tokens: int) -> int:
        blocks = ceil_div(tokens, geometry.block_tokens)
        return self.swap_in_ns(blocks * geometry.block_bytes, blocks)

    def _fetch_ns(self, prefix: Prefix, geometry: KVGeometry, pieces_of_block: int, tokens: int) -> int:
        blocks = ceil_div(tokens, geometry.block_tokens)
        return self.transfer_ns(blocks * geometry.block_bytes, prefix.same_host, blocks * pieces_of_block)

    def _hidden_blocks(self, prefix: Prefix, geometry: KVGeometry, pieces_of_block: int, free_ns: int) -> int:
        """Blocks that can be fetched within ``free_ns``."""
        link = self.same_host if prefix.same_host else self.network
        block_ns = link.piece_ns * pieces_of_block + link.byte_ns * geometry.block_bytes
        if free_ns <= link.start_ns:
            return 0
        return int((free_ns - link.start_ns) / block_ns) if block_ns else prefix.remote_tokens

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> CostModel:
        """The reverse of :meth:`to_dict`. Raises :class:`UserError` for another version, or anything else."""
        if values.get("version") != VERSION:
            raise UserError(f"a cost profile of version {values.get('version')!r}", hint="run: memserve profile")
        try:
            model = msgspec.convert({k: v for k, v in values.items() if k != "version"}, CostModel)
        except msgspec.ValidationError as error:
            raise UserError(f"not a cost profile: {error}", hint="run: memserve profile") from None
        curves = (model.prefill, model.decode, model.swap_in, model.swap_out, model.same_host, model.network)
        if not all(math.isfinite(value) and value >= 0 for curve in curves for value in asdict(curve).values()):
            raise UserError("a cost profile with impossible times", hint="run: memserve profile")
        return model


def _trimmed(pieces: Sequence[tuple[Way, int]], limit: int) -> tuple[tuple[Way, int], ...]:
    """``pieces`` without the empty ones, cut off after ``limit`` tokens."""
    kept: list[tuple[Way, int]] = []
    for way, tokens in pieces:
        tokens = min(tokens, limit)
        if tokens > 0:
            kept.append((way, tokens))
            limit -= tokens
    return tuple(kept)
