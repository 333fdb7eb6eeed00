"""Puts the parts together: a model, a device and a machine, as an engine or as a member of a cluster."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.base.config import EngineOptions, InstanceConfig
from memserve.base.errors import UserError
from memserve.base.states import cache_groups
from memserve.base.types import AS_COMPUTED, Role
from memserve.base.units import human_bytes
from memserve.protocol.peers import Peer
from memserve.system.process import set_thread_environment

if TYPE_CHECKING:
    from pathlib import Path

    from memserve.host.engine import Engine
    from memserve.instance.machine import Instance
    from memserve.kv.costs import CostModel
    from memserve.model.device import ModelDevice
    from memserve.model.gpu.streams import Gpu
    from memserve.model.loading.loader import LoadedModel
    from memserve.model.workers.gpu_processes import GpuWorkers
    from memserve.model.workers.processes import Divided


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded model, what computes with it, and what decides."""

    model: LoadedModel
    config: InstanceConfig
    device: ModelDevice | Divided
    machine: Instance
    costs: CostModel
    """Measured on this machine, or the defaults."""
    profile_path: Path
    """Where they are kept."""


def build_parts(
    options: EngineOptions,
    *,
    self_peer: Peer | None = None,
    role: Role = Role.COLOCATED,
    identity_key: bytes | None = None,
    nixl_at: str | None = None,
) -> Parts:
    """Load the model and build its device and its machine. Imports torch, so it takes seconds.

    ``self_peer``: None: the engine is alone. Else: its name in a cluster, where its KV lies in memory that peers may
    read, and ``identity_key`` is the cluster's. ``nixl_at``: the host at which NIXL listens; None: it is not used.
    Raises
    :class:`UserError` when the model cannot be served or the memory cannot hold it.
    """
    set_thread_environment()
    from memserve.model.gpu.streams import open_gpu
    from memserve.model.workers.gpu_processes import GpuWorkers

    options = options.for_role(role)
    model = _load_with_adapters(options)
    gpu = open_gpu(model.device, options.gpu_memory_share)
    shared, workers = self_peer is not None, None
    if gpu is not None and options.parallel.worker_count > 1:
        workers = GpuWorkers(options, model, gpu, shared=shared, nixl_at=nixl_at)
    try:
        return _assemble_parts(options, model, gpu, workers, self_peer, role, identity_key)
    except BaseException:
        if workers is not None:
            workers.close()
        raise


def _assemble_parts(
    options: EngineOptions, model: LoadedModel, gpu: Gpu | None, gpu_workers: GpuWorkers | None, self_peer: Peer | None,
    role: Role, identity_key: bytes | None,
) -> Parts:  # fmt: skip
    from memserve.host.profile_file import load_profile, profile_path
    from memserve.instance.machine import Instance
    from memserve.instance.scheduler.capacity import context_note, kv_tokens
    from memserve.kv.costs import PreemptionCosts
    from memserve.model.gpu.setup import kv_bytes_here, shares_gpu_kv
    from memserve.model.loading.loader import model_sizes
    from memserve.model.workers.processes import slot_bytes
    from memserve.system.memory import check_host_memory, memory_bound, resident_bytes

    on_gpu = gpu is not None
    model = _prepare_model(model, options, on_gpu=on_gpu)
    geometry = model.geometry
    sizes = model_sizes(model)  # with its weights
    kv_bytes = gpu_workers.kv_bytes() if gpu_workers else kv_bytes_here(options, sizes) if on_gpu else None
    config = options.instance_config(
        geometry, model.max_model_tokens, model.fingerprint, model.vocab_size, on_gpu=on_gpu, kv_bytes=kv_bytes,
        states=model.states, slot_bytes=slot_bytes(options.parallel, model), layout=model.layout,
    )  # fmt: skip
    if config.pool.states is not None and self_peer is not None:
        config = dataclasses.replace(config, pool=config.pool.with_whole_snapshots())
    shares_kv = not on_gpu or self_peer is not None
    if model.states:
        _warn_of_slots(model, options, config)
    if gpu_workers is not None and self_peer is not None:
        shares_kv = shares_gpu_kv(gpu_workers.why_unshared, role)
    reports_layers = config.pool.page_is_layer and options.parallel.pipeline == 1  # no worker sees all layers of stages
    drawn = int(model.pooling is not None)  # behind a text that fills the context, by a step that has its last token
    exchange = dataclasses.replace(config.exchange, shares_kv=shares_kv, reports_layers=reports_layers)
    pool = dataclasses.replace(config.pool, identity_key=identity_key)
    adapters = model.adapters.digests if model.adapters is not None else frozenset()
    config = dataclasses.replace(
        config, role=role, exchange=exchange, pool=pool, adapters=adapters, why_keys_stay=model.why_keys_stay,
        max_model_tokens=config.max_model_tokens + drawn,
    )  # fmt: skip
    check_host_memory(options.dram_memory_bytes + (0 if on_gpu else options.kv_memory_bytes))
    profiled = model.fingerprint, geometry, model.device.type + options.parallel.text, options.threads
    costs = load_profile(*profiled)
    preemption_costs = PreemptionCosts(block_bytes=geometry.block_bytes, profile=costs if costs.is_measured else None)
    machine = Instance(config, geometry.block_tokens, preemption_costs, self_peer=self_peer, geometry=geometry)
    note = context_note(machine.context_tokens - drawn, model.max_model_tokens, options, config.pool, geometry)
    served = dataclasses.replace(
        model,
        max_model_tokens=machine.context_tokens - drawn,
        context_note=note,
        kv_tokens=kv_tokens(config.pool.hbm_blocks, machine.pool.state_blocks, geometry.block_tokens),
        kv_lower_dtype=options.kv_lower_dtype,
    )
    bound = memory_bound(sizes, geometry, config, in_cluster=self_peer is not None)
    device = gpu_workers.build_device(served, config) if gpu_workers else _build_device(
        served, options, config, gpu, shared=self_peer is not None
    )  # fmt: skip
    if not on_gpu:
        device.bound_bytes = bound.total_bytes
        log.info("memory: %s resident, at most %s", human_bytes(resident_bytes()), bound)
    return Parts(served, config, device, machine, costs, profile_path(*profiled))


def _prepare_model(model: LoadedModel, options: EngineOptions, *, on_gpu: bool) -> LoadedModel:
    """``model`` with places for the KV of its layers and, if that is asked for, with what moves its keys to other
    positions, or why nothing does."""
    from memserve.model.rotation import find_rotation

    model = model.lay_out_kv(
        windows_apart=options.keeps_windows_apart(on_gpu=on_gpu), shares_kv=options.shares_layers_kv
    )
    if (layout := model.layout) is not None:
        groups = ", ".join(map(str, cache_groups(model.geometry, layout.layers, model.states)))
        log.info("KV lies %s: %s", "apart" if layout.is_apart else "together", groups)
    if not options.scheduler.nonprefix_reuse:
        return model
    cases = (
        (on_gpu, "instances on GPUs do not move KV yet"),
        (options.parallel.worker_count > 1, "instances of several workers do not move KV yet"),
        (options.kv_dtype != AS_COMPUTED, "KV is rounded here (--kv-dtype)"),
    )
    reason = next((reason for applies, reason in cases if applies), "")
    if not reason:
        try:
            return dataclasses.replace(model, rotation=find_rotation(model))
        except UserError as error:
            reason = error.message
    log.warning("--nonprefix-reuse: requests are served exactly, because %s", reason)
    return dataclasses.replace(model, why_keys_stay=reason)


def _warn_of_slots(model: LoadedModel, options: EngineOptions, config: InstanceConfig) -> None:
    """Say what limits how many sequences of a model with a recurrent state run at once."""
    slots = config.scheduler.max_running
    if slots < options.scheduler.max_running:
        size, memory = human_bytes(model.states.nbytes), human_bytes(options.kv_memory_bytes)
        log.warning("%d sequences run at once: a state takes %s of %s of KV memory", slots, size, memory)


def _build_device(
    model: LoadedModel, options: EngineOptions, config: InstanceConfig, gpu: Gpu | None, *, shared: bool
) -> ModelDevice | Divided:
    """``shared``: peers read its KV."""
    from memserve.model.capture.forward import best_forward
    from memserve.model.device import ModelDevice
    from memserve.model.gpu.setup import build_gpu_device

    if options.parallel.worker_count > 1:
        from memserve.model.workers.processes import build_divided

        return build_divided(model, options, config, shared=shared)
    if gpu is not None:
        return build_gpu_device(model, config, gpu, best_forward(model.module), shared=shared)
    forward = best_forward(model.module, fingerprint=model.fingerprint if model.adapters is None else None)
    return ModelDevice(model, config, forward, shared=shared)


def _load_with_adapters(options: EngineOptions) -> LoadedModel:
    """The model with its adapters; for several GPUs in host memory. Raises :class:`UserError`."""
    from memserve.model.gpu.setup import check_gpu_count, refuse_on_gpu, refuse_without_gpu
    from memserve.model.loading.loader import load_model
    from memserve.system.gpus import device_here, take_gpu
    from memserve.system.memory import usable_cores

    parallel, threads = options.parallel, options.threads
    workers, device = parallel.worker_count, take_gpu(options.device, parallel.worker_count)
    gpus = device_here(device).gpus
    if gpus:
        refuse_on_gpu(options)
        check_gpu_count(workers, len(gpus))
    if workers > 1:
        threads = parallel.threads_each(threads or usable_cores())
    model = load_model(
        options.model, options.dtype, device, block_tokens=options.block_tokens, threads=threads, lora=options.lora,
        on_host=workers > 1, kv_bytes=options.kv_memory_bytes + options.dram_memory_bytes,
        quantization=options.quantization, pooling=options.pooling, updates=options.lora_updates,
    )  # fmt: skip
    if model.device.type == "cpu":
        refuse_without_gpu(options)
    if model.pooling is not None and (workers > 1 or model.adapters is not None):
        hint = "leave out --tensor-parallel, --pipeline-parallel and --lora, or use --pooling none"
        raise UserError("a model that embeds is served by one worker, without adapters", hint=hint, param="pooling")
    return model.keep_kv_as(options.kv_dtype)


def build_engine(options: EngineOptions) -> tuple[Engine, LoadedModel]:
    """An engine for the clients of this process; see :func:`build_parts`."""
    from memserve.host.engine import Engine

    parts = build_parts(options)
    return Engine(parts.machine, parts.device), parts.model
