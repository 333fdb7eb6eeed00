"""Loads a model and everything that serving it needs to know (level 3)."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memserve.config import DEFAULT_MAX_TOKENS
from memserve.errors import UserError
from memserve.model.loading.cache import sampled_digest
from memserve.model.loading.sources import DEFAULT_MODEL, DEFAULT_MODEL_SAMPLING, ModelFolder, resolve_source
from memserve.types import KVGeometry

if TYPE_CHECKING:
    import torch

    from memserve.model.loading.probe import ProbedLayer

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model may recommend for requests that do not say. ``do_sample`` is not asked, as in vLLM."""

_CONTEXT_FALLBACK_TOKENS = 2048

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
"""Nothing that belongs to an answer follows it, whether or not a chat model lists it as an end of sequence."""


@dataclass(slots=True)
class LoadedModel:
    """A causal language model whose attention goes through the step context, with plain (not packed) linears."""

    module: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    geometry: KVGeometry
    fingerprint: str  # of config and weights: part of the namespace of every block
    name: str
    max_model_tokens: int  # the model's own; once its KV memory is known, what is served
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    device: torch.device
    dtype: torch.dtype
    generation_defaults: dict[str, float] = field(default_factory=dict)  # see GENERATION_DEFAULTS
    context_note: str = ""  # why max_model_tokens is less than the model's own; empty: it is not
    kv_tokens: int = 0  # how many the KV memory holds, once it is known
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS  # of a chat; None: what the context has room for


def load_model(
    source: str, dtype: str = "auto", device: str = "auto", *, block_tokens: int = 32, threads: int | None = None
) -> LoadedModel:
    """Load ``source``: a local Hugging Face folder, a ``.gguf`` file, a hub id, or the bundled model's name.

    ``dtype`` is one of :data:`DTYPES`, ``device`` one of :data:`DEVICES`; ``threads`` is how many threads the CPU
    computes with (``None``: torch's choice, one a core). The linears are left plain: see
    :func:`memserve.model.linears.pack_linears`. Raises :class:`UserError` for everything that a user can mend.
    """
    place = _choose_device(device)
    dtype_name = _choose_dtype(dtype, place)
    folder = resolve_source(source, dtype_name)
    import torch

    from memserve.model.loading.probe import probe_model

    if threads is not None:
        torch.set_num_threads(threads)
    module = _load_module(folder, getattr(torch, dtype_name))
    geometry, layers = probe_model(module.to(place), dtype_name, block_tokens)
    tokenizer = load_tokenizer(folder)
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        geometry=geometry,
        fingerprint=fingerprint(folder.path),
        name=folder.name,
        max_model_tokens=_max_model_tokens(module.config, layers),
        vocab_size=module.get_output_embeddings().weight.shape[0],
        eos_token_ids=_eos_token_ids(module, tokenizer),
        has_chat_template=bool(tokenizer.chat_template),
        device=place,
        dtype=getattr(torch, dtype_name),
        generation_defaults=_generation_defaults(folder),
    )


def fingerprint(folder: Path) -> str:
    """32 hex digits of the config and the weights of a model folder (weights are sampled, see ``sampled_digest``)."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest.update(file.name.encode() + sampled_digest(file))
    return digest.hexdigest()


def _choose_device(device: str) -> torch.device:
    import torch

    if device not in DEVICES:
        raise UserError(f"unknown device {device!r}", hint=f"use one of {', '.join(DEVICES)}", param="device")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no usable CUDA device", hint="use --device cpu, or install a CUDA build of torch")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


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


def _load_module(folder: ModelFolder, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    try:
        module = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"transformers cannot load {folder.name} as a causal language model: {reason}",
            hint="give a complete model folder with config.json, tokenizer and safetensors weights",
            param="model",
        ) from error
    module.requires_grad_(False)
    return module.train(False)


def load_tokenizer(folder: ModelFolder) -> Any:
    """The folder's tokenizer. Raises :class:`UserError` when transformers cannot load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{folder.name} has no tokenizer that transformers can load",
            hint="save the tokenizer beside the weights with tokenizer.save_pretrained(folder)",
            param="model",
        ) from error


def _max_model_tokens(config: Any, layers: list[ProbedLayer]) -> int:
    """The longest sequence for which our attention is certainly the model's.

    Windows that a family applies through its mask instead of telling its attention function (chunked attention, for
    one) are invisible to us: up to their size they change nothing, so such a model is served up to that length.
    """
    text = config.get_text_config()
    limits = [int(getattr(text, "max_position_embeddings", None) or _CONTEXT_FALLBACK_TOKENS)]
    kinds = getattr(text, "layer_types", None) or []
    for layer, kind in zip(layers, kinds, strict=False):
        size = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
        if size and not layer.window and getattr(text, size, None):
            limits.append(int(getattr(text, size)))
    if min(limits) < limits[0]:
        log.warning("this model's local attention is served as full attention, up to %d tokens", min(limits))
    return min(limits)


def _generation_defaults(folder: ModelFolder) -> dict[str, float]:
    """What the model's authors recommend, from its ``generation_config.json``; only what they wrote down there."""
    try:
        written = json.loads((folder.path / "generation_config.json").read_text())
        named = {name: written.get(name) for name in GENERATION_DEFAULTS}
    except (OSError, ValueError, AttributeError):
        named = {}
    defaults = {name: value for name, value in named.items() if isinstance(value, (int, float))}
    return defaults or (dict(DEFAULT_MODEL_SAMPLING) if folder.name == DEFAULT_MODEL else {})


def _eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a sequence: by the generation config, the config, the tokenizer, and the chat template."""
    named = [getattr(module.generation_config, "eos_token_id", None), module.config.get_text_config().eos_token_id]
    ids = {token for entry in named for token in (entry if isinstance(entry, list) else [entry])}
    ids.add(tokenizer.eos_token_id)
    template, vocab = tokenizer.chat_template or "", tokenizer.get_added_vocab()
    ids |= {vocab[token] for token in _TURN_ENDS if token in vocab and token in str(template)}
    ids |= {vocab[_TEXT_END]} if _TEXT_END in vocab else set()
    return tuple(sorted(token for token in ids if token is not None))
