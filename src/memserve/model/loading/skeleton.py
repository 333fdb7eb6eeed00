"""A model built without its weights: what transformers makes of ``config.json`` before it reads a file.

transformers builds every model on torch's meta device, whose tensors have shapes and no bytes. torch computes there in
Python: its first sum or quotient imports sympy, 0.4 seconds and 35 MB of each start. A model needs that for a few
numbers only, the frequencies of rotary positions, and for initial values that no tensor keeps. So here ranges of
numbers are real ones, what is computed from them is computed by the CPU's own kernels, and nothing is initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from memserve.model.loading.formats.checkpoint import forget_quantisation
from memserve.system.imports import load_meta_shapes

T = TypeVar("T")

_INITIAL = "torch.nn.init"


def build_skeleton(build: Callable[[], T]) -> T:
    """What ``build`` returns, which makes a model on the meta device, or reads one by way of it.

    The device is to be set inside of it: what is set outside would come after this. Raises what ``build`` raises.
    """
    try:
        with _RealRanges():
            return build()
    except (RuntimeError, TypeError):
        if load_meta_shapes():  # the first model of a process that needs them
            return build_skeleton(build)
        # a model may join such numbers with tensors that have none, which torch refuses: then all are without
        return build()


def plain_config(folder: Path) -> Any:
    """transformers' config of a model folder, as of a model whose weights are numbers."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    forget_quantisation(config)
    return config


def auto_class(config: Any) -> Any:
    """transformers' class that makes the model of ``config``: causal language models, and those of images and text,
    whose text is served."""
    causal: Any = transformers.AutoModelForCausalLM
    images: Any = transformers.AutoModelForImageTextToText
    return images if type(config) in images._model_mapping and type(config) not in causal._model_mapping else causal


def empty_module(folder: Path) -> Any:
    """The module that the folder's config describes; nothing of it is allocated, and no weight is tied."""
    config = plain_config(folder)

    def build() -> Any:
        with torch.device("meta"), no_init_weights():
            return auto_class(config).from_config(config)

    return build_skeleton(build)


def described_weights(folder: Path) -> int:
    """How many values the model of ``config.json`` has, tied ones twice."""
    return sum(value.numel() for value in empty_module(folder).parameters())


class _RealRanges(TorchFunctionMode):
    """Within it, ``torch.arange`` makes numbers where it would make none, and nothing is initialised without memory."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if function is torch.arange and _is_meta(named.get("device")):
            named["device"] = "cpu"
        elif getattr(function, "__module__", "") == _INITIAL:
            target = named.get("tensor", args[0] if args else None)
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return function(*args, **named)


def _is_meta(device: Any) -> bool:
    """Whether a call that names ``device`` would make a tensor without bytes."""
    return device is not None and torch.device(device).type == "meta"
