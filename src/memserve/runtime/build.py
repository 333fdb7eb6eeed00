"""Puts an engine together: model, device, machine (level 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memserve.config import EngineOptions
from memserve.runtime.threads import set_thread_environment

if TYPE_CHECKING:
    from memserve.model.loading.loader import LoadedModel
    from memserve.runtime.engine import Engine


def build_engine(options: EngineOptions) -> tuple[Engine, LoadedModel]:
    """Load the model and start its engine. Imports torch, so it takes seconds.

    Raises :class:`UserError` when the model cannot be served or the memory cannot hold it.
    """
    set_thread_environment()
    from memserve.instance.machine import Instance
    from memserve.model.device import ModelDevice
    from memserve.model.forward import best_forward
    from memserve.model.loading.loader import load_model
    from memserve.policy.preemption import PreemptionCosts
    from memserve.runtime.engine import Engine
    from memserve.runtime.memory import check_host_memory

    model = load_model(
        options.model, options.dtype, options.device, block_tokens=options.block_tokens, threads=options.threads
    )
    config = options.instance_config(model.geometry, model.max_model_tokens, model.fingerprint)
    check_host_memory(options.dram_memory_bytes + (options.kv_memory_bytes if model.device.type == "cpu" else 0))
    costs = PreemptionCosts(block_bytes=model.geometry.block_bytes)
    machine = Instance(config, model.geometry.block_tokens, costs)
    return Engine(machine, ModelDevice(model, config, best_forward(model.module))), model
