"""The comparison at load: is the model still itself when a prompt comes in pieces, with what is kept between them?

The probe sees one forward. A family that carries anything else from one forward to the next (a recurrent state that
the probe has missed, compressed keys) passes it, and would be wrong from the second step on. So the module is run once
as it is, without a cache, and once in chunks and single tokens with keys, values and states alone. Their logits must
agree, up to a few times what rounding makes of them: that is measured by a third run, in one piece with our attention.
The verdict is remembered by fingerprint, so that later starts pay nothing.

Where a few positions differ and most do not, the pieces are right and a sum was rounded across a threshold (a router
that masks experts, for one): what is carried wrongly differs everywhere behind the first piece.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memserve.base.errors import UserError
from memserve.base.states import StateGeometry
from memserve.base.units import MIB
from memserve.model.attention.context import ATTENTION_NAME, OrderedAttention, step_attention
from memserve.model.attention.expansions import Expansion
from memserve.model.attention.reference import attend_dense
from memserve.model.loading.cache import cached_fingerprint, read_record, record_name, write_record
from memserve.model.loading.formats.headers import errors_named
from memserve.model.loading.pages import WeightPages, pages_of
from memserve.model.loading.probe import HINT, ProbedLayer
from memserve.model.loading.stored import stored_of
from memserve.model.states.layers import LoneStates, states_of, step_states

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

KIND = "comparison"
"""Of the records of verdicts."""

TOKENS_LEAST, TOKENS_USUAL = 24, 80
BEYOND_WINDOW_TOKENS = 16
OPERATIONS_MAX = 2e12
"""Of one of the two forwards: some ten seconds of a laptop. A model that would need more is compared with a shorter
prompt, which may end before its window does."""
FLOAT32_BYTES_MAX = 600 * MIB
"""A model of 16 bits that takes no more in float32 is compared in that."""
POSITIONS_MAX = 48
"""Whose logits are compared."""
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (0.02, 0.2), "float16": (5e-3, 0.05)}
"""Root mean square of a position's difference, as a share of the logits' spread: what is always right, and always
wrong. Between them :data:`ROUNDINGS` decides."""
ROUNDINGS = 6.0
"""How many times as much as in one piece, at the median, logits in pieces may differ."""
DIFFERING_SHARE = 0.25
"""Of the positions that come after the first piece, how many may differ by more."""
BEHIND_BORDER = 2
"""With convolutions over tokens, so many positions at the beginning of each piece are compared in any case: where a
layer has lost the tail of one, no others need differ."""
DIFFERING_BEHIND = 0.5
"""Of those, how many may differ by more."""


_NARROW = (torch.bfloat16, torch.float16)


class CarriedAttention:
    """A ``StepAttention`` for one sequence that comes in pieces: keys and values are all that it keeps."""

    def __init__(self) -> None:
        #: of the piece that runs; None: all that attention gets
        self.tokens: int | None = None
        self._carried: dict[int, tuple[Tensor, Tensor]] = {}

    def run_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0,
        sinks: Tensor | None = None, chunk: int = 0, expansion: Expansion | None = None,
    ) -> Tensor:  # fmt: skip
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        surplus = 0 if self.tokens is None else q.shape[2] - self.tokens
        if surplus:
            q, k, v = (x[:, :, : self.tokens] for x in (q, k, v))
            options: Any = {
                "window": window, "softcap": softcap, "sinks": sinks, "chunk": chunk, "expansion": expansion,
            }  # fmt: skip
            mixed = self.run_attention(layer, q, k, v, scale=scale, **options)
            return torch.nn.functional.pad(mixed, (0, 0, 0, 0, 0, surplus))
        pairs = zip(self._carried.get(layer, (k[:, :, :0], v[:, :, :0])), (k, v), strict=True)
        k, v = (torch.cat(pair, dim=2) for pair in pairs)  # copies: what a step computed is overwritten by the next one
        self._carried[layer] = k, v
        if expansion is not None and q.shape[2] == 1:  # single tokens as they are served, absorbed
            q = expansion.absorb_queries(q)
            latents = attend_dense(q[0], k[0], v[0], scale, window, softcap, sinks, chunk).transpose(0, 1)[None]
            return expansion.values_of(latents)
        if expansion is not None:
            k, v = expansion.expand(k)
        return attend_dense(q[0], k[0], v[0], scale, window, softcap, sinks, chunk).transpose(0, 1)[None].contiguous()


class Carried:
    """What goes from one piece of a sequence to the next: keys and values, and states where layers have them. Between
    two pieces a state is copied, as when a sequence goes on from a snapshot."""

    def __init__(self, geometry: StateGeometry, dtype: str) -> None:
        self._attention = CarriedAttention()
        self._has_states = bool(geometry)
        self._states = LoneStates(geometry, torch.float32 if dtype == "float32" else None)

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Around the next piece."""
        if not self._has_states:
            with step_attention(self._attention):
                yield
            return
        with step_attention(OrderedAttention(self._attention)), step_states(self._states):
            yield
        self._states = self._states.copy_states()


def compare_in_pieces(module: Any, layers: list[ProbedLayer], dtype: str, longest: int | None = None) -> None:
    """Raise :class:`UserError` where ``module``, switched to our attention, computes another thing in pieces than it
    does without a cache and with its own attention.

    ``layers``: what the probe found. ``longest``: of a prompt that may be tried; None: any. In 16 bits the logits of a
    sound model may differ by a fifth (Gemma 3 270M): what fails there is decided in float32."""
    if dtype == "float32":
        return _compare_in(module, layers, dtype, longest)
    if not _goes_in_float32(module):
        try:
            return _compare_in(module, layers, dtype, longest)
        except UserError as error:
            log.info("compared again in float32: %s", error.message)
    with _in_float32(module):  # in 16 bits a weak state passes for rounding
        return _compare_in(module, layers, "float32", longest)


def _compare_in(module: Any, layers: list[ProbedLayer], dtype: str, longest: int | None) -> None:
    """As :func:`compare_in_pieces`, with tolerances for ``dtype``, in which ``module`` computes."""
    family, vocab = module.config.model_type, module.config.get_text_config().vocab_size
    tokens = _tokens(module, layers, longest)
    if tokens < 4:
        return
    states = states_of(module)
    if getattr(module, "_is_stateful", False) and not states:  # in 16 bits a weak state could pass for rounding
        raise UserError(
            f"a {family} model cannot be served: it keeps a state beside keys and values, which would be lost",
            hint=HINT,
        )
    ids = (torch.arange(tokens, device=module.device) * 7919 + 13) % vocab
    first = max(1, tokens // 3)
    pieces = [0, first, first + 1, first + 2, first + 2 + (tokens - first - 2) // 2, tokens]
    spread = _spread(first, tokens)
    behind = _behind_borders(module, pieces)
    positions = sorted({*spread, *behind})
    failure = f"a {family} model cannot be served: its forward refused a plain step"
    numbers = stored_of(module).computing_as_stored(dtype=getattr(torch, dtype))
    with errors_named(failure, HINT), torch.inference_mode(), numbers:
        module.set_attn_implementation("eager")
        try:
            expected = _logits(module, ids, None, positions)
        finally:
            module.set_attn_implementation(ATTENTION_NAME)
        carried = Carried(states.geometry, dtype)
        with carried.passed_on():
            whole = _logits(module, ids, 0, positions)
        piece_logits, carried = [], Carried(states.geometry, dtype)
        for begin, end in itertools.pairwise(pieces):
            if begin < end:
                compared = [position for position in positions if begin <= position < end]
                with carried.passed_on():
                    piece_logits.append(_logits(module, ids[begin:end], begin, compared))
    errors, rounding = (position_errors(logits, expected) for logits in (torch.cat(piece_logits), whole))
    right, wrong_from = TOLERANCE[dtype]
    if not float(rounding.median()) <= wrong_from:
        raise UserError(
            f"a {family} model cannot be served: given each token's position it computes other logits than without "
            f"(by {float(rounding.median()):.0%} at the median of a prompt of {tokens} tokens), so it counts otherwise",
            hint=HINT,
        )
    allowed = min(max(right, ROUNDINGS * float(rounding.median())), wrong_from)
    differs = dict(zip(positions, (~(errors <= allowed)).tolist(), strict=True))
    wrong, wrong_behind = (sum(map(differs.__getitem__, at)) / max(1, len(at)) for at in (spread, behind))
    if wrong > DIFFERING_SHARE or wrong_behind > DIFFERING_BEHIND:
        by = float(errors.median())
        why = "it carries more from one step to the next than keys and values"
        if states:  # Nemotron-H and Zamba2 bound time steps where several tokens come at once, and nowhere else
            why = "besides its states it carries more, or transformers computes single tokens otherwise than several"
        raise UserError(
            f"a {family} model cannot be served: in pieces it computes other logits at {wrong:.0%} of the positions of "
            f"a prompt of {tokens} tokens, by {by:.0%} at the median; {why}",
            hint=HINT,
        )


def _goes_in_float32(module: Any) -> bool:
    """Whether there is room for float32, or a reason to look closely: convolutions over tokens carry their tail."""
    weights = sum(parameter.numel() for parameter in module.parameters())
    return 4 * weights <= FLOAT32_BYTES_MAX or _has_convolutions(module)


def _has_convolutions(module: Any) -> bool:
    return any(isinstance(part, torch.nn.Conv1d) for part in module.modules())


def _behind_borders(module: Any, pieces: list[int]) -> list[int]:
    """The first positions of all pieces but the first, for a module with convolutions over tokens."""
    if not _has_convolutions(module):
        return []
    ends = pieces[-1]
    behind = {border + place for border in pieces[1:-1] for place in range(BEHIND_BORDER)}
    return sorted(position for position in behind if position < ends)


@contextmanager
def _in_float32(module: Any) -> Iterator[None]:
    """Compute in float32: with a second copy of a small model, else of one layer at a time, for as long as it computes.
    Afterwards the weights are the very same tensors: they may be mapped from their file."""
    large = 4 * sum(parameter.numel() for parameter in module.parameters()) > FLOAT32_BYTES_MAX
    layers = [layer for part in module.modules() if large and isinstance(part, torch.nn.ModuleList) for layer in part]
    pages = pages_of(module)
    stored = stored_of(module)  # weights without numbers
    without = {id(weight) for weight in module.parameters() if stored.has(weight.detach())}
    wide = {id(layer): _Widened(layer, pages, without) for layer in layers}
    inside = {id(weight) for part in wide.values() for weight in part.narrow}
    rest = _Widened(module, pages, without | inside)
    handles = []
    for layer in layers:
        part = wide[id(layer)]
        handles.append(layer.register_forward_pre_hook(lambda *_, part=part: part.widen_weights()))
        handles.append(layer.register_forward_hook(lambda *_, part=part: part.restore_weights(), always_call=True))
    rest.widen_weights()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in (rest, *wide.values()):
            part.restore_weights()


class _Widened:
    """What of a module has 16 bits, and nothing else: some buffers are in float32 for a reason."""

    def __init__(self, module: Any, pages: WeightPages, without: Collection[int] = ()) -> None:
        """``without``: the ids of weights that are left alone."""
        values = (*module.parameters(), *module.buffers())
        self.narrow = [weight for weight in values if weight.dtype in _NARROW and id(weight) not in without]
        self._originals: list[Tensor] = []
        self._pages = pages

    def widen_weights(self) -> None:
        """Put float32 copies in the place of the weights."""
        if not self._originals:
            self._originals = [weight.data for weight in self.narrow]
            for weight, original in zip(self.narrow, self._originals, strict=True):
                weight.data = original.float()
            self._pages.release_values(*(original for original in self._originals if self._pages.is_mapped(original)))

    def restore_weights(self) -> None:
        """Put the weights themselves back."""
        for weight, original in zip(self.narrow, self._originals, strict=False):
            weight.data = original
        self._originals = []


def position_errors(logits: Tensor, expected: Tensor) -> Tensor:
    """Of each position, as a share of its logits' spread."""
    return (logits - expected).square().mean(-1).sqrt() / expected.std(-1)


def _tokens(module: Any, layers: list[ProbedLayer], longest: int | None) -> int:
    """How many to try: past every window, as far as that is affordable."""
    weights = sum(parameter.numel() for parameter in module.parameters())
    affordable = int(OPERATIONS_MAX / max(1, 2 * weights))
    reaches = [max(layer.window, layer.chunk) for layer in layers]
    window_tokens = max([TOKENS_USUAL, *(reach + BEYOND_WINDOW_TOKENS for reach in reaches if reach)])
    limits = [window_tokens, max(TOKENS_LEAST, affordable)]
    text = module.config.get_text_config()
    limits += [size for size in (longest, getattr(text, "max_position_embeddings", None)) if size]
    return int(min(limits))


def _spread(first: int, tokens: int) -> list[int]:
    """Positions from ``first`` on whose logits are compared."""
    step = max(1, -(-(tokens - first) // POSITIONS_MAX))
    return sorted({*range(first, tokens, step), tokens - 1})


def _logits(module: Any, ids: Tensor, begin: int | None, compared: list[int]) -> Tensor:
    """Float32 logits ``[kept, vocab]`` of tokens that begin at position ``begin``; None: at 0, in the module's own
    count, which may differ from ours (RoBERTa's begins behind the id of its padding)."""
    positions = {}
    if begin is not None:
        positions["position_ids"] = torch.arange(begin, begin + len(ids), device=ids.device)[None]
    out = module(input_ids=ids[None], use_cache=False, **positions)
    logits: Tensor = out.logits[0, [position - (begin or 0) for position in compared]].float()
    return logits


# -- the verdict


def verdicts_on(folder: Path) -> dict[str, str]:
    """The verdicts on a model folder by dtype, as far as there are any (:func:`read_verdict`); reads no weights."""
    identity = cached_fingerprint(folder)
    names = {dtype: record_name(KIND, identity, dtype) for dtype in TOLERANCE} if identity is not None else {}
    read = {dtype: read_verdict(name) for dtype, name in names.items()}
    return {dtype: refused for dtype, refused in read.items() if refused is not None}


def read_verdict(name: str) -> str | None:
    """Why the model is refused; empty: it is served; None: it was not compared yet."""
    verdict = read_record(name).get("refused")
    return verdict if isinstance(verdict, str) else None


def compare_once(
    module: Any, layers: list[ProbedLayer], dtype: str, fingerprint: str, longest: int | None = None
) -> None:
    """As :func:`compare_in_pieces`, unless the verdict is known. Raises :class:`UserError`."""
    name = record_name(KIND, fingerprint, dtype)
    refused = read_verdict(name)
    if refused is None:
        try:
            compare_in_pieces(module, layers, dtype, longest)
            refused = ""
        except UserError as error:
            refused = error.message
        write_record(name, {"refused": refused})
    if refused:
        raise UserError(refused, hint=HINT)
