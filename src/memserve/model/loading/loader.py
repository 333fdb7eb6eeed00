"""Loads a model and everything that serving it needs to know."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memserve.base.config import DEFAULT_MAX_TOKENS, ROUNDED_KINDS
from memserve.base.deployment import NO_UPDATES, LoraUpdates
from memserve.base.errors import UserError
from memserve.base.layer_kv import LayerKv, LayerLayout, keep_every_layer, lay_out
from memserve.base.states import NO_STATE, StateGeometry, cache_groups
from memserve.base.types import AS_COMPUTED, COARSE_BITS, NO_REGIMES, KVGeometry, Pooling, PositionRegimes
from memserve.model.loading.cache import fingerprint
from memserve.model.loading.checkpoint import load_module, text_weights
from memserve.model.loading.formats.headers import errors_named
from memserve.model.loading.lora import Adapter, read_adapters
from memserve.model.loading.pooling import give_hidden_states, pooling_of
from memserve.model.loading.sources import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_SAMPLING,
    ModelFolder,
    gguf_weights,
    resolve_source,
)
from memserve.system.gpus import device_here
from memserve.system.memory import ModelSizes, check_model_memory

if TYPE_CHECKING:
    import torch

    from memserve.model.loading.formats.checkpoint import QuantisedCheckpoint
    from memserve.model.loading.probe import ProbedLayer
    from memserve.model.loading.stored import StoredWeights
    from memserve.model.lora import Adapters
    from memserve.model.rotary import KeyRotation

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
GENERATION_DEFAULTS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (1e-9, 1), "top_k": (-1, 1 << 30), "min_p": (0, 1), "repetition_penalty": (0.01, 10)
}  # fmt: skip
"""What a model may recommend for requests that do not set it, within the ranges of what they may set. ``do_sample`` is
ignored, as in vLLM."""

TOKENIZER_HINT = "save the tokenizer beside the weights with tokenizer.save_pretrained(folder)"

_CONTEXT_FALLBACK_TOKENS = 2048

_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that attend, as configurations name them."""

_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endofturn|>",
    "<|return|>",
)
"""Tokens by which chat templates end a turn; some checkpoints do not list theirs as an end of sequence."""

_TEXT_END = "<|endoftext|>"
"""It always ends an answer, whether or not a chat model lists it as an end of sequence."""


@dataclass(slots=True)
class LoadedModel:
    """A causal language model with attention that goes through the step context, with plain (not packed) linears."""

    module: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    geometry: KVGeometry
    fingerprint: str  # of config and weights: part of the namespace of every block
    name: str
    max_model_tokens: int  # the model's own; once its KV memory is known, what is served
    vocab_size: int  # token ids that it can read and draw are below
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    device: torch.device
    dtype: torch.dtype
    generation_defaults: dict[str, float] = field(default_factory=dict)  # see GENERATION_DEFAULTS
    context_note: str = ""  # why max_model_tokens is less than the model's own; empty: it is not
    kv_tokens: int = 0  # how many the KV memory holds, once it is known
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS  # of a chat; None: what the context has room for
    kv_lower_dtype: str = AS_COMPUTED  # once its tiers are known; auto: as in the first
    quantization: str = "none"  # auto: some weights are computed with as they are stored
    activation_bits: int = 0  # to which activations are rounded before they meet stored weights; 0: they are not
    attends_plainly: bool = True  # no layer has a window, sinks or a state
    adapters: Adapters | None = None  # LoRA adapters; None: none
    position_regimes: PositionRegimes = NO_REGIMES  # what decides how positions are computed
    query_heads: int = 0  # of every layer; 0: not known, or not alike
    states: StateGeometry = NO_STATE  # what layers carry beside KV
    layers: tuple[LayerKv, ...] = ()  # what each layer that attends keeps
    pooling: Pooling | None = None  # None: it generates; else logits are hidden states (model/loading/pooling.py)
    rotation: KeyRotation | None = None  # what moves keys to other positions; None: nothing, or it was not looked for
    why_keys_stay: str = ""  # why nothing does
    layout: LayerLayout | None = None  # where, if not all keep the same in one block; ``geometry`` is that of a block

    @property
    def kv_dtype(self) -> str:
        """How KV lies in the first tier (:data:`memserve.base.types.KV_DTYPES`)."""
        return self.geometry.kv_dtype

    @property
    def whole_geometry(self) -> KVGeometry:
        """With the pages of all layers."""
        return self.geometry if self.layout is None else replace(self.geometry, num_layers=len(self.layers))

    def keep_kv_as(self, kv_dtype: str) -> LoadedModel:
        """This model, whose KV is to lie so."""
        return replace(self, geometry=replace(self.geometry, kv_dtype=kv_dtype))

    def lay_out_kv(self, *, windows_apart: bool = False, shares_kv: bool = True) -> LoadedModel:
        """This model, with places for the KV of its layers. ``windows_apart``: that of layers which read a window is to
        lie apart where that is worth it; ``shares_kv``: layers that read the KV of another one keep none."""
        if self.geometry.latent or not self.layers:
            return self
        layers = self.layers if shares_kv else keep_every_layer(self.layers)
        layout = lay_out(layers, is_apart=windows_apart and not self.states, context_tokens=self.max_model_tokens)
        block = (layout or LayerLayout(layers)).block_geometry(self.geometry.dtype, self.geometry.block_tokens)
        return replace(self, layout=layout, geometry=replace(block, kv_dtype=self.kv_dtype))


def model_sizes(model: LoadedModel) -> ModelSizes:
    """The sizes that its memory depends on. Call it while the module still has its weights."""
    from torch import nn

    from memserve.model.loading.stored import stored_of

    module = model.module
    head = module.get_output_embeddings()
    linears = [part for part in module.modules() if isinstance(part, nn.Linear) and part is not head]
    widest = max((linear.out_features for linear in linears), default=module.config.get_text_config().hidden_size)
    stored = stored_of(module)
    weights = sum(
        stored.packed_bytes(parameter.detach()) or parameter.numel() * parameter.element_size()
        for parameter in module.parameters()
    )
    weights += 0 if model.adapters is None else model.adapters.nbytes
    return ModelSizes(weights, 2 * widest, model.vocab_size, model.dtype.itemsize)  # gate and up are computed as one


def load_model(
    source: str,
    dtype: str = "auto",
    device: str = "auto",
    *,
    block_tokens: int = 32,
    threads: int | None = None,
    lora: Sequence[str] = (),
    updates: LoraUpdates = NO_UPDATES,
    on_host: bool = False,
    kv_bytes: int | None = None,
    quantization: str = "none",
    pooling: str = "none",
) -> LoadedModel:
    """Load ``source``: a local Hugging Face folder, a ``.gguf`` file, a hub id, or the bundled model's name.

    ``dtype`` is one of :data:`DTYPES`, ``device`` auto, cpu or cuda; ``threads`` is how many threads the CPU
    computes with (``None``: torch's choice, one per core). ``lora``: adapters, each ``NAME=FOLDER``. The linears are
    left plain (:func:`memserve.model.forward.pack_linears`). ``on_host``: leave it in host memory, to be cut. A model
    that does not fit with ``kv_bytes`` of KV is refused before it is read; None: no look. Raises :class:`UserError`."""
    place = _choose_device(device)
    dtype_name, adapters, on_cpu = _choose_dtype(dtype, place), read_adapters(lora), place.type == "cpu"
    import torch

    may_keep = quantization != "none" and _takes_stored(dtype, place, changes=on_host or lora or updates.lora_folder)
    folder, checkpoint = _resolve_and_check(source, dtype_name, kv_bytes if on_cpu else None, keep_file=may_keep)
    folder = _rounded(folder, quantization)
    torch.set_num_threads(threads or torch.get_num_threads())
    module, identity, geometry, layers = _load_and_probe(
        folder, dtype_name, torch.device("cpu") if on_host else place, block_tokens, checkpoint,
        may_keep=may_keep, keep_latents=on_cpu,
    )  # fmt: skip
    tokenizer, original = load_tokenizer(folder), _original_tokens(module)
    _compare(module, layers, folder, dtype_name, (identity, original))
    identity = _keep_file(module, folder, identity) if may_keep and on_cpu else identity
    stored, activation_bits = _choose_bits(module, tokenizer, identity)
    regimes, vocab_size = _install_regimes(module) if original else NO_REGIMES, _vocab_size(module)
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        geometry=geometry,
        fingerprint=_with_regimes(stored, regimes),
        name=folder.name,
        max_model_tokens=_max_model_tokens(module.config, layers, original, regimes),
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(module, tokenizer, folder, vocab_size),
        has_chat_template=bool(tokenizer.chat_template),
        device=place,
        dtype=getattr(torch, dtype_name),
        generation_defaults=_generation_defaults(folder),
        attends_plainly=not original and _attends_plainly(module, layers),
        position_regimes=regimes or NO_REGIMES,
        quantization=quantization if _keeps_weights(module) else "none",
        activation_bits=activation_bits,
        adapters=_adapters(module, adapters, updates, partial(_reload, folder, getattr(torch, dtype_name))),
        query_heads=layers[0].query_heads if len({layer.query_heads for layer in layers}) == 1 else 0,
        states=_states(module, geometry, layers, folder.name),
        layers=tuple(layer.kept for layer in layers),
        pooling=_pooling(module, pooling_of(folder.path, pooling), place),
    ).lay_out_kv(shares_kv=False)


def _pooling(module: Any, pooling: Pooling | None, place: torch.device) -> Pooling | None:
    """How the module embeds, which gives hidden states from now on. Raises :class:`UserError`."""
    if pooling is None:
        return None
    on_gpu = "models embed on CPUs alone" if place.type != "cpu" else ""
    quantised = "its weights are quantised: --quantization none" if _keeps_weights(module) else ""
    return give_hidden_states(module, pooling, on_gpu or quantised)


def _attends_plainly(module: Any, layers: list[ProbedLayer]) -> bool:
    from memserve.model.states.layers import states_of

    return not states_of(module) and not any(layer.kept.is_local or layer.sinks for layer in layers)


def _states(module: Any, geometry: KVGeometry, layers: list[ProbedLayer], name: str) -> StateGeometry:
    """What layers carry beside KV; the log says which groups of layers there are then."""
    from memserve.model.states.layers import states_of

    states = states_of(module).geometry
    if states:
        groups = cache_groups(geometry, [layer.kept for layer in layers], states)
        log.info("%s has %s", name, ", ".join(map(str, groups)))
    return states


def _probe(
    module: Any, dtype: str, block_tokens: int, identity: str, *, keep_latents: bool
) -> tuple[KVGeometry, list[ProbedLayer]]:
    """See :func:`memserve.model.loading.probe.probe_once`; no more of a large model is resident than a layer."""
    from memserve.model.loading.pages import pages_of
    from memserve.model.loading.probe import probe_once

    with pages_of(module).one_layer_at_a_time(module):
        geometry, layers = probe_once(module, dtype, block_tokens, identity, keep_latents=keep_latents)
    formula, layout = geometry.token_formula, LayerLayout(keep_every_layer([layer.kept for layer in layers]))
    if layers and not layout.has_one_shape:
        formula = f"({layout}) elements x {geometry.itemsize} bytes"
    log.info("KV of a token: %d bytes = %s", geometry.token_bytes, formula)
    return geometry, layers


def _takes_stored(dtype: str, place: torch.device, *, changes: object) -> bool:
    """Whether weights may be computed with as they are stored: to ask for float32 is to ask for the arithmetic of the
    numbers. On a GPU 16 bits are all alike, while kernels of a CPU know no float16; and there ``changes`` need numbers:
    weights that are cut for several workers, or have adapters."""
    if place.type == "cpu":
        return dtype in ("auto", "bfloat16")
    return dtype != "float32" and not changes and importlib.util.find_spec("triton") is not None


def _rounded(folder: ModelFolder, kind: str) -> ModelFolder:
    """``folder``, or for a ``kind`` of :data:`ROUNDED_KINDS` its copy with the weights of linears rounded. Raises
    :class:`UserError`."""
    if kind not in ROUNDED_KINDS:
        return folder
    from memserve.model.loading.formats.rounding import rounded_folder

    return rounded_folder(folder, kind)


def _resolve_and_check(
    source: str, dtype: str, kv_bytes: int | None, *, keep_file: bool
) -> tuple[ModelFolder, QuantisedCheckpoint | None]:
    """The folder of ``source``, unless the machine cannot hold it with ``kv_bytes`` of KV; None: without a look. And
    its quantised weights, if they were looked at: to know what the kernels can have takes their scales."""
    import torch

    from memserve.model.loading.formats.checkpoint import quantised_checkpoint

    if kv_bytes is None:
        return resolve_source(source, dtype, keep_file=keep_file), None
    value_bytes = getattr(torch, dtype).itemsize

    def check(name: str, values: int, largest: int) -> None:
        check_model_memory(name, value_bytes * values, value_bytes * largest, kv_bytes)

    folder = resolve_source(source, dtype, lambda path: check(path.name, *gguf_weights(path)), keep_file=keep_file)
    if folder.keeps_file and folder.gguf is not None:  # packed from the file, and a layer of numbers at a time
        largest = value_bytes * text_weights(folder.path)[1]
        check_model_memory(folder.name, folder.gguf.stat().st_size, largest, kv_bytes)
        return folder, None
    checkpoint = quantised_checkpoint(folder.path, folder.name) if keep_file and folder.gguf is None else None
    if checkpoint is not None:
        check_model_memory(folder.name, *checkpoint.resident_bytes(value_bytes), kv_bytes)
    else:
        check(folder.name, *text_weights(folder.path))
    return folder, checkpoint


def _load_and_probe(
    folder: ModelFolder, dtype: str, place: torch.device, block_tokens: int, checkpoint: QuantisedCheckpoint | None,
    *, may_keep: bool, keep_latents: bool,
) -> tuple[Any, str, KVGeometry, list[ProbedLayer]]:  # fmt: skip
    """The module (see :func:`_load`), its fingerprint, its geometry, and its layers that attend. ``keep_latents``: not
    on a GPU, where no kernel reads them yet."""
    import torch

    from memserve.model.forward import linears_alone
    from memserve.model.loading.stored import number_weights, stored_of

    module = _load(folder, getattr(torch, dtype), checkpoint, may_keep=may_keep)
    identity = _fingerprint(module, folder)
    if place.type != "cpu" and len(stored_of(module)):
        from memserve.model.gpu.stored import keep_on_device

        identity = _as_stored(f"{identity} on a GPU")  # activations are not rounded there
        keep_on_device(module, place)
    else:
        module.to(place)
    geometry, layers = _probe(module, dtype, block_tokens, identity, keep_latents=keep_latents)
    number_weights(module, linears_alone(module))
    return module, identity, geometry, layers


def _load(
    folder: ModelFolder, dtype: torch.dtype, checkpoint: QuantisedCheckpoint | None = None, *, may_keep: bool
) -> Any:
    """The module, which has no numbers in the place of weights that stay quantised (``may_keep``: there may be such) as
    in a GGUF file whose description ``folder`` is, or as in a quantised ``checkpoint`` (None: it is to be read)."""
    from memserve.model.loading.formats.checkpoint import quantised_checkpoint
    from memserve.model.loading.stored import NOT_STORED, reserve_stored, stored_in_checkpoint

    described = folder.gguf if folder.keeps_file else None
    if checkpoint is None and may_keep and folder.gguf is None:
        checkpoint = quantised_checkpoint(folder.path, folder.name)
    if checkpoint is not None:
        checkpoint.put_off()
    module = load_module(folder.path, folder.name, dtype, checkpoint=checkpoint)
    if described is not None:
        _remember_stored(module, reserve_stored(module, folder.path, described), folder)
    if checkpoint is None:
        return module
    stored = stored_in_checkpoint(module, checkpoint)
    if stored is None:
        checkpoint = quantised_checkpoint(folder.path, folder.name)
        module = load_module(folder.path, folder.name, dtype, checkpoint=checkpoint)
        stored = NOT_STORED if checkpoint is None else stored_in_checkpoint(module, checkpoint)
    _remember_stored(module, stored or NOT_STORED, folder)
    return module


def _remember_stored(module: Any, stored: StoredWeights, folder: ModelFolder) -> None:
    from memserve.model.loading.stored import remember_stored

    if len(stored):
        remember_stored(module, stored)
        log.info("%d weights stay quantised as in %s", len(stored), folder.name)


def _fingerprint(module: Any, folder: ModelFolder) -> str:
    """Of ``module``, loaded from ``folder``: keys and values are rounded otherwise where weights stay quantised."""
    from memserve.model.loading.stored import stored_of

    identity = fingerprint(folder.path)
    return identity if folder.keeps_file or not len(stored_of(module)) else _as_stored(identity)


def _as_stored(identity: str) -> str:
    return hashlib.blake2b(f"{identity} as stored".encode(), digest_size=16).hexdigest()


def _compare(
    module: Any, layers: list[ProbedLayer], folder: ModelFolder, dtype: str, identity: tuple[str, int]
) -> None:
    """Compare ``module`` with transformers' forward; ``identity``: its fingerprint, and up to how many tokens its
    positions do not depend on a sequence's length. Raises :class:`UserError`."""
    from memserve.model.loading.comparison import compare_once
    from memserve.model.loading.pages import pages_of

    with errors_named(f"cannot use config.json of {folder.name}", "restore it: download it again"):
        plain_tokens = _max_model_tokens(module.config, layers, identity[1])
    with pages_of(module).one_layer_at_a_time(module):
        compare_once(module, layers, dtype, identity[0], plain_tokens)


def _keep_file(module: Any, folder: ModelFolder, identity: str) -> str:
    """Remember which weights of ``module``, loaded from a conversion of a GGUF file, stay quantised as there; its
    fingerprint: see :func:`_fingerprint`."""
    from memserve.model.forward import linears_alone
    from memserve.model.loading.stored import number_weights, stored_in_file

    if folder.gguf is None or folder.keeps_file:
        return identity
    stored = stored_in_file(module, folder.gguf)
    _remember_stored(module, stored, folder)
    number_weights(module, linears_alone(module))
    return _as_stored(identity) if len(stored) else identity


def _keeps_weights(module: Any) -> bool:
    from memserve.model.loading.stored import stored_of

    return len(stored_of(module)) > 0


def _choose_bits(module: Any, tokenizer: Any, identity: str) -> tuple[str, int]:
    """The fingerprint of a model, and how many bits activations have that meet its stored weights; 0: it has none."""
    from memserve.model.loading.precision import choose_activation_bits
    from memserve.model.loading.stored import stored_of

    stored = stored_of(module)
    if not stored.rounds_activations:
        return identity, 0
    stored.activation_bits = bits = choose_activation_bits(module, stored, tokenizer, identity)
    if bits == COARSE_BITS:
        return identity, bits
    return hashlib.blake2b(f"{identity} with {bits} bits".encode(), digest_size=16).hexdigest(), bits


def _adapters(
    module: Any, adapters: Sequence[Adapter], updates: LoraUpdates, reload: Callable[[], Any]
) -> Adapters | None:
    if not adapters and not updates.lora_folder:
        return None
    from memserve.model.forward import linears_alone
    from memserve.model.lora import AdapterRoom, Adapters

    room = AdapterRoom(updates.max_loras, updates.max_lora_rank, reload) if updates.lora_folder else None
    return Adapters(module, adapters, linears_alone(module), room)


def _reload(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """The module of ``folder`` again, with numbers. Raises :class:`UserError` where there are none."""
    if folder.keeps_file:
        text, hint = f"the weights of {folder.name} are not there as numbers", "use --quantization none"
        raise UserError(text, hint=hint, param="quantization")
    return load_module(folder.path, folder.name, dtype)


def _choose_device(device: str) -> torch.device:
    import torch

    choice = device_here(device)  # says why, where a GPU cannot be used
    if not choice.gpus:
        if choice.why:
            log.warning("%s", choice.why)
        return torch.device("cpu")
    if torch.cuda.is_available():
        log.info("%s", choice.why)
        return torch.device("cuda")
    why, hint = "torch cannot use it, although the driver shows it", "see what `python -m torch.utils.collect_env` says"
    if device != "auto":
        raise UserError(f"there is no usable CUDA device: {why}", hint=hint, param="device")
    log.warning("device: the CPU, for %s: %s (%s)", choice.gpus[0], why, hint)
    return torch.device("cpu")


def _choose_dtype(dtype: str, device: torch.device) -> str:
    """``auto``: bfloat16 where the hardware multiplies it, else float16 on CUDA and float32 on a CPU."""
    import torch

    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}", hint=f"use one of {', '.join(DTYPES)}", param="dtype")
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def load_tokenizer(folder: ModelFolder) -> Any:
    """The folder's tokenizer. Raises :class:`UserError` when transformers cannot load it."""
    from transformers import AutoTokenizer

    with errors_named(f"{folder.name} has no tokenizer that transformers can load", TOKENIZER_HINT):
        return AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)


def _original_tokens(module: Any) -> int:
    """Up to so many tokens the model's positions do not depend on a sequence's length; 0: they never do."""
    from memserve.model.rotary import length_rotaries, original_tokens

    return min(
        (original_tokens(rotary.config, str(rotary.rope_type)) for *_, rotary in length_rotaries(module)), default=0
    )


def _install_regimes(module: Any) -> PositionRegimes | None:
    """See :func:`memserve.model.rotary.install_length_rotaries`."""
    from memserve.model.rotary import install_length_rotaries

    return install_length_rotaries(module)


def _with_regimes(fingerprint: str, regimes: PositionRegimes | None) -> str:
    """A model's fingerprint: another one where earlier versions mixed KV of several regimes."""
    if regimes is not None and not regimes.original_tokens:
        return fingerprint
    return hashlib.blake2b(f"{fingerprint} by regime".encode(), digest_size=16).hexdigest()


def _max_model_tokens(
    config: Any, layers: list[ProbedLayer], original: int = 0, regimes: PositionRegimes | None = None
) -> int:
    """The longest sequence for which our attention is certainly the model's.

    Windows that a family applies through its mask instead of telling its attention function (chunked attention, for
    one) are invisible to us: up to their size they change nothing, so such a model is served up to that length. So is
    one with positions that depend on lengths in a way that is not known (``original`` tokens, no ``regimes``).
    """
    text = config.get_text_config()
    limits = [int(getattr(text, "max_position_embeddings", None) or _CONTEXT_FALLBACK_TOKENS)]
    if original and regimes is None:
        limits.append(original)
    elif regimes is not None and regimes.by_length:  # the factor says how far it goes
        limits = [int(limits[0] * float(text.rope_parameters["factor"]))]
    kinds = getattr(text, "layer_types", None) or []
    if len(kinds) != len(layers):  # layers with a state do not attend
        kinds = [kind for kind in kinds if kind in _ATTENDING]
    for layer, kind in zip(layers, kinds, strict=False):
        size = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
        if size and not layer.kept.is_local and getattr(text, size, None):
            limits.append(int(getattr(text, size)))
    if min(limits) < limits[0]:
        log.warning("this model's local attention is served as full attention, up to %d tokens", min(limits))
    return min(limits)


def _vocab_size(module: Any) -> int:
    """Tokens that the model both reads and draws, whatever its tokenizer knows."""
    tables = (module.get_input_embeddings(), module.get_output_embeddings())
    return min(int(table.weight.shape[0]) for table in tables)


def _generation_config(folder: ModelFolder) -> dict[str, Any]:
    """What the model's authors recommend. A damaged file is logged and counts as empty: requests can set everything
    that it sets."""
    try:
        written = json.loads((folder.path / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("generation_config.json of %s is not used: %s", folder.name, error)
        return {}
    if not isinstance(written, dict):
        log.warning("generation_config.json of %s is not used: it is not a JSON object", folder.name)
        return {}
    return written


def _generation_defaults(folder: ModelFolder) -> dict[str, float]:
    """Defaults of sampling from ``generation_config.json``: only what it sets, and a request may set, too."""
    written = _generation_config(folder)
    defaults = {}
    for name, (least, most) in GENERATION_DEFAULTS.items():
        value = written.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and least <= value <= most and (name != "top_k" or value == int(value)):
            defaults[name] = value
        else:
            shown = str(value)[:40]
            log.warning("generation_config.json of %s: %s is %s, and is not used", folder.name, name, shown)
    return defaults or (dict(DEFAULT_MODEL_SAMPLING) if folder.name == DEFAULT_MODEL else {})


def _eos_token_ids(module: Any, tokenizer: Any, folder: ModelFolder, vocab_size: int) -> tuple[int, ...]:
    """Every token that ends a sequence: by the generation config, the config, the tokenizer, and the chat template."""
    entries = [
        _generation_config(folder).get("eos_token_id"),
        module.config.get_text_config().__dict__.get("eos_token_id"),
    ]
    entries.append(tokenizer.eos_token_id)
    ids = [token for entry in entries for token in (entry if isinstance(entry, (list, tuple)) else [entry])]
    template, vocab = tokenizer.chat_template or "", tokenizer.get_added_vocab()
    ids += [vocab[token] for token in _TURN_ENDS if token in vocab and token in str(template)]
    ids += [vocab[_TEXT_END]] if _TEXT_END in vocab else []
    ends, odd = set(), []
    for token in ids:
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size:
            ends.add(token)
        elif token is not None and token != -1:
            odd.append(str(token)[:20])
    if odd:
        log.warning("%s lists end-of-sequence tokens outside its vocabulary: %s", folder.name, ", ".join(odd))
    return tuple(sorted(ends))
