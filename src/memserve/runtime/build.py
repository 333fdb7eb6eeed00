"""Puts an engine together: model, device, machine (level 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memserve.config import EngineOptions
from memserve.errors import UserError

if TYPE_CHECKING:
    from memserve.model.loader import LoadedModel
    from memserve.runtime.engine import Engine


def build_engine(options: EngineOptions) -> tuple[Engine, LoadedModel]:
    """Load the model and start its engine. Imports torch, so it takes seconds.

    Raises :class:`UserError` when the model cannot be served or the memory cannot hold it.
    """
    from memserve.instance.machine import Instance
    from memserve.model.device import ModelDevice
    from memserve.model.loader import load_model
    from memserve.runtime.engine import Engine

    model = load_model(options.model, dtype=options.dtype, device=options.device, threads=options.threads)
    if options.block_tokens != model.geometry.block_tokens:
        raise UserError(f"this model is served with blocks of {model.geometry.block_tokens} tokens")
    config = options.instance_config(model.geometry, model.max_model_tokens, model.fingerprint)
    machine = Instance(config, model.geometry.block_tokens)
    device = ModelDevice(model, config)
    return Engine(machine, device), model
