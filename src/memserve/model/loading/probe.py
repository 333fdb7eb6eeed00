"""The probe: one small forward at load that finds every attention layer, or refuses the model.

No per-family knowledge and no guessing from the config: what reaches our attention function is what the KV cache must
hold. The same forward is compared with the family's own eager attention, so a family that does more than its call shows
(a position bias added through the mask, for example) is refused instead of served wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memserve.base.errors import UserError
from memserve.base.layer_kv import LayerKv, LayerLayout, keep_every_layer
from memserve.base.states import naming_geometry
from memserve.base.types import KVGeometry
from memserve.model.attention.context import ATTENTION_NAME, CHUNK_ATTRIBUTE, register_attention, step_attention
from memserve.model.attention.expansions import Expansion, install_expansion
from memserve.model.attention.reference import attend_dense
from memserve.model.counts import find_counting, install_counting, is_counting
from memserve.model.experts import use_our_experts
from memserve.model.forward import remember_weights_alone, weights_alone
from memserve.model.loading.cache import read_record, record_name, write_record
from memserve.model.loading.formats.headers import errors_named
from memserve.model.loading.stored import stored_of
from memserve.model.quantised import is_quantised
from memserve.model.states.layers import StateLayers, install_states, states_of
from memserve.model.states.probe import find_states

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_PROBE_TOKENS = 6
HINT = "serve a model that attends through transformers' attention interface (Llama, Qwen, Gemma, OPT, ...)"


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """What one layer passed to attention."""

    layer: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int
    sinks: bool = False
    query_heads: int = 0
    latent_dim: int = 0
    """Of its latents; 0: it keeps none."""
    rotary_dim: int = 0
    linear: str = ""
    """The name in the layer's module of what expands them."""
    chunk: int = 0
    owner: int | None = None
    """The layer whose keys and values it got."""

    @property
    def kept(self) -> LayerKv:
        """What it keeps."""
        if self.latent_dim:
            return LayerKv(1, self.latent_dim + self.rotary_dim, 0, self.window, self.chunk)
        sizes = self.kv_heads, self.head_dim_k, self.head_dim_v
        return LayerKv(*sizes, self.window, self.chunk, self.owner)


class DenseAttention:
    """A ``StepAttention`` without pages: one sequence from position 0. Keeps a record."""

    def __init__(self) -> None:
        self.layers: list[ProbedLayer] = []
        #: what the layers got
        self._keys_and_values: list[tuple[Tensor, Tensor]] = []

    def run_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        pairs = enumerate(self._keys_and_values)
        owner = next((number for number, (keys, values) in pairs if keys is k and values is v), None)
        self._keys_and_values.append((k, v))
        if expansion is not None:
            k, v = expansion.expand(k)
        sizes = k.shape[1], k.shape[3], v.shape[3]
        found = ProbedLayer(layer, *sizes, window, sinks is not None, q.shape[1], chunk=chunk, owner=owner)
        self.layers.append(found)
        mixed = attend_dense(q[0], k[0], v[0], scale, window, softcap, sinks, chunk)
        return mixed.transpose(0, 1)[None].contiguous()


def probe_model(
    module: Any, dtype: str, block_tokens: int, *, keep_latents: bool = True
) -> tuple[KVGeometry, list[ProbedLayer]]:
    """Switch ``module`` to our attention and find its KV geometry, and its layers with a recurrent state
    (:func:`memserve.model.states.layers.states_of`). Raises :class:`UserError` for what cannot be served.

    ``module``: a transformers causal language model, loaded with its eager attention. The layers are those that attend.
    Where none does, blocks are as small as can be: they hold no KV. ``keep_latents``: false: layers that could keep
    latents keep what is made of them, keys and values of all heads.
    """
    family = module.config.model_type
    vocab = module.config.get_text_config().vocab_size
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=module.device) * 7919 % vocab
    with _watching_linears(module) as alone:
        expected = _last_logits(module, ids, family)
    remember_weights_alone(module, alone)
    states = _find_states(module, ids, family)
    _use_our_attention(module)
    attention = DenseAttention()
    with step_attention(attention):
        logits = _last_logits(module, ids, family)
    # beside states, not every layer attends, and one module may attend in several: their order names them
    layers = (
        [replace(layer, layer=place) for place, layer in enumerate(attention.layers)] if states else attention.layers
    )
    _check_layers(layers, module.config.get_text_config().num_hidden_layers, family, beside_states=bool(states))
    # rounding alone makes 0.2 of a small model with weights of 4 bits; the comparison in pieces looks closer
    limit = 1e-3 if dtype == "float32" else 0.4 if is_quantised(module) else 0.2
    _check_logits(logits, expected, limit, family)
    if keep_latents and (latent_layers := _find_latents(module, layers, ids, family)):
        layers = latent_layers
        _install_latents(module, layers)
        with step_attention(DenseAttention()):
            _check_logits(_last_logits(module, ids, family), expected, limit, family)
    if not states and _counts_tokens(module, ids):
        install_counting(module)
    if states:
        geometry, attending = replace(states.geometry, attends=bool(layers)), [seen.layer for seen in attention.layers]
        install_states(module, replace(states, geometry=geometry, attending=tuple(attending)))
        if not layers:
            return naming_geometry(geometry, dtype, block_tokens), layers
    return _geometry_of(layers, dtype, block_tokens), layers


def probe_once(
    module: Any, dtype: str, block_tokens: int, fingerprint: str, *, keep_latents: bool = True
) -> tuple[KVGeometry, list[ProbedLayer]]:
    """As :func:`probe_model`, whose findings are remembered by the model's ``fingerprint``, but for those on states."""
    name = record_name("probe" if keep_latents else "probe-expanded", fingerprint, dtype)
    record = read_record(name)
    known = record.get("layers")
    if known is None:
        geometry, layers = probe_model(module, dtype, block_tokens, keep_latents=keep_latents)
        if not states_of(module):  # else modules are to be found, and not only numbers
            found = {"layers": [asdict(layer) for layer in layers], "alone": weights_alone(module)}
            write_record(name, found | {"counts": is_counting(module)})
        return geometry, layers
    _use_our_attention(module)
    layers = [ProbedLayer(**layer) for layer in known]
    remember_weights_alone(module, record.get("alone", ()))
    if record.get("counts"):
        install_counting(module)
    _install_latents(module, layers)
    return _geometry_of(layers, dtype, block_tokens), layers


@contextmanager
def _watching_linears(module: Any) -> Iterator[list[str]]:
    """Afterwards, the names of the linears that were not called though the module around them was: LongCat's routers
    multiply by the weight themselves."""
    called: set[str] = set()
    alone: list[str] = []
    handles = [
        part.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, part in module.named_modules()
    ]
    try:
        yield alone
    finally:
        for handle in handles:
            handle.remove()
    linears = (name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear))
    alone += [name for name in linears if name not in called and name.rpartition(".")[0] in called]


def _use_our_attention(module: Any) -> None:
    register_attention()
    module.set_attn_implementation(ATTENTION_NAME)
    _install_chunks(module)
    use_our_experts(module)


def _install_chunks(module: Any) -> None:
    """Tell layers of their chunks: transformers says them to no attention function, but in the mask that it gets."""
    text = module.config.get_text_config()
    kinds, size = getattr(text, "layer_types", None) or [], getattr(text, "attention_chunk_size", None)
    if not size or "chunked_attention" not in kinds:
        return
    for part in module.modules():
        number = getattr(part, "layer_idx", None)
        if isinstance(number, int) and kinds[number : number + 1] == ["chunked_attention"]:
            setattr(part, CHUNK_ATTRIBUTE, int(size))


def _geometry_of(layers: list[ProbedLayer], dtype: str, block_tokens: int) -> KVGeometry:
    first = layers[0]
    if first.latent_dim:
        sizes = 1, first.latent_dim + first.rotary_dim, first.latent_dim
        return KVGeometry(len(layers), *sizes, dtype, block_tokens, latent=True)
    return LayerLayout(keep_every_layer([layer.kept for layer in layers])).block_geometry(dtype, block_tokens)


# -- layers that keep latents


class _WatchedAttention(DenseAttention):
    """Knows which keys and values came to it last."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[ProbedLayer] = []
        #: made by the last expansion, with what it was made of
        self.made: tuple[Tensor, Tensor, ProbedLayer] | None = None

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        if self.made is not None and k is self.made[0] and v is self.made[1] and q.shape[1] == k.shape[1]:
            self.found.append(self.made[2])
        self.made = None
        return super().run_attention(layer, q, k, v, **options)


def _find_latents(module: Any, layers: list[ProbedLayer], ids: Tensor, family: str) -> list[ProbedLayer]:
    """``layers`` with what their latents are; none, unless all of them keep latents of one shape.

    A layer keeps latents if it has transformers' ``expand_kv``, of which attention gets the results as they are, and
    these are what :class:`Expansion` says: a linear of the first argument, and the second one for all heads. All that
    is compared here."""
    parts, attention = _expanding_parts(module), _WatchedAttention()
    if not parts or len(parts) != len(layers):
        return []
    for part in parts:
        part.expand_kv = partial(_watch_expansion, part, part.expand_kv, attention)
    try:
        with step_attention(attention):
            _last_logits(module, ids, family)
    finally:
        for part in parts:
            del part.expand_kv  # the class has it
    if len(attention.found) != len(layers) or len(set(attention.found)) != 1:
        log.info("a %s model keeps expanded keys and values: its layers do more than expand latents", family)
        return []
    rotary_dim, latent_dim, linear = (first := attention.found[0]).rotary_dim, first.latent_dim, first.linear
    return [replace(layer, latent_dim=latent_dim, rotary_dim=rotary_dim, linear=linear) for layer in layers]


def _watch_expansion(
    part: Any, original: Callable[..., tuple[Tensor, Tensor]], attention: _WatchedAttention, *args: Tensor
) -> tuple[Tensor, Tensor]:
    """Let ``part`` expand its latents, and tell ``attention`` when it does that by one linear."""
    called: list[str] = []
    linears = [(name, child) for name, child in part.named_children() if isinstance(child, torch.nn.Linear)]
    handles = [child.register_forward_hook(lambda *_, name=name: called.append(name)) for name, child in linears]
    try:
        keys, values = original(*args)
    finally:
        for handle in handles:
            handle.remove()
    latents, rotary = args
    if len(called) == 1 and latents.shape[:2] == rotary.shape[:2] == (1, 1):
        linear, (latent_dim, rotary_dim) = getattr(part, called[0]), (latents.shape[3], rotary.shape[3])
        key_dim, heads = keys.shape[3] - rotary_dim, keys.shape[1]
        outputs = heads * (key_dim + values.shape[3])
        if linear.bias is None and key_dim > 0 and (linear.in_features, linear.out_features) == (latent_dim, outputs):
            expansion = Expansion(linear, heads, key_dim, latent_dim)
            ours = expansion.expand(expansion.join_latents(latents, rotary))
            if all(_is_alike(own, made) for own, made in zip(ours, (keys, values), strict=True)):
                found = ProbedLayer(0, 1, 1, 1, 0, latent_dim=latent_dim, rotary_dim=rotary_dim, linear=called[0])
                attention.made = keys, values, found
    return keys, values


def _is_alike(own: Tensor, made: Tensor) -> bool:
    """Up to rounding."""
    limit = 1e-4 if made.dtype == torch.float32 else 0.05
    return own.shape == made.shape and float((own - made).float().norm()) <= limit * float(made.float().norm())


def _expanding_parts(module: Any) -> list[Any]:
    return [part for part in module.modules() if callable(getattr(part, "expand_kv", None))]


def _install_latents(module: Any, layers: list[ProbedLayer]) -> None:
    for part, layer in zip(_expanding_parts(module), layers, strict=False):
        if layer.latent_dim:
            key_dim = layer.head_dim_k - layer.rotary_dim
            linear = getattr(part, layer.linear)
            install_expansion(part, Expansion(linear, layer.kv_heads, key_dim, layer.latent_dim))


def _find_states(module: Any, ids: Tensor, family: str) -> StateLayers:
    failure = f"a {family} model cannot be served: its forward refused a plain step with a cache"
    with errors_named(failure, HINT), stored_of(module).computing_as_stored():
        return find_states(module, ids)


def _counts_tokens(module: Any, ids: Tensor) -> bool:
    computing = stored_of(module).computing_as_stored()
    with step_attention(DenseAttention()), torch.inference_mode(), computing:
        return find_counting(module, ids)


def _last_logits(module: Any, ids: Tensor, family: str) -> Tensor:
    positions = torch.arange(len(ids), device=ids.device)
    failure = f"a {family} model cannot be served: its forward refused a plain step"
    with errors_named(failure, HINT), torch.inference_mode(), stored_of(module).computing_as_stored():
        out = module(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    last: Tensor = out.logits[0, -1].float()
    return last


def _check_layers(layers: list[ProbedLayer], expected: int, family: str, *, beside_states: bool) -> None:
    layer_numbers = [layer.layer for layer in layers]
    if not layer_numbers and not beside_states:
        raise UserError(
            f"a {family} model cannot be served: its attention does not use transformers' interface", hint=HINT
        )
    if layer_numbers != list(range(expected)) and not beside_states:
        absent = sorted(set(range(expected)) - set(layer_numbers))
        story = (
            f"layers {absent} have no attention of this kind"
            if absent
            else f"its layers attend in order {layer_numbers}"
        )
        raise UserError(f"a {family} model cannot be served: {story}", hint=HINT)


def _check_logits(logits: Tensor, expected: Tensor, limit: float, family: str) -> None:
    """Ours and the family's own attention agree up to rounding, measured against the spread of the logits."""
    error = float((logits - expected).square().mean().sqrt() / expected.std())
    if not error <= limit:
        raise UserError(
            f"a {family} model cannot be served: its logits change by {error:.0%} with the attention that it describes",
            hint=HINT,
        )
