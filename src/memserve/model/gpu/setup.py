"""An instance on a GPU: what is refused at the start, how much of the memory is KV, the device with its graphs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memserve.base.config import EngineOptions, InstanceConfig
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import GIB, MIB, human_bytes
from memserve.system.gpus import check_device_name

if TYPE_CHECKING:
    from memserve.model.forward import Forward
    from memserve.model.gpu.device import GpuDevice
    from memserve.model.gpu.streams import Gpu
    from memserve.model.loading.loader import LoadedModel
    from memserve.system.memory import ModelSizes

log = logging.getLogger(__name__)

CONTEXT_BYTES = GIB // 2
"""What the driver takes of the GPU's memory for a process: its context, kernels, workspaces of libraries."""
GRAPHS_BYTES = 256 * MIB
"""Memory of the captured graphs beside what steps take."""

GPU_SHARE = 0.9
"""Of a GPU's memory, what instances on it share: the rest is the driver's, and fragments."""


def on_gpus(engine: EngineOptions, number: int, workers: Sequence[int], gpus: int) -> EngineOptions:
    """The options of instance ``number`` of those of a host with so many ``gpus``: as many GPUs as it has ``workers``,
    by turns, and of each an equal share of nine tenths of its memory, unless a size is given.

    Raises :class:`UserError` where there are too few."""
    if not gpus:
        return engine
    first, fullest = _assign_gpus(workers, gpus)
    device = f"cuda:{first[number]}" if gpus > 1 else engine.device
    return _with_share(dataclasses.replace(engine, device=device), 1 / fullest)


def _assign_gpus(workers: Sequence[int], gpus: int) -> tuple[list[int], int]:
    """The first GPU of each instance, and how many instances the fullest GPU has."""
    instances, first = [0] * gpus, []
    for count in workers:
        check_gpu_count(count, gpus)
        least = min(
            range(gpus - count + 1), key=lambda index: (max(instances[index : index + count]), index % count > 0, index)
        )
        first.append(least)
        for index in range(least, least + count):
            instances[index] += 1
    return first, max(instances)


def _with_share(engine: EngineOptions, part: float) -> EngineOptions:
    """Options of an instance that has ``part`` of its GPUs, unless a size is given."""
    if engine.gpu_memory_share is not None or engine.kv_memory_bytes != EngineOptions().kv_memory_bytes:
        return engine
    return dataclasses.replace(engine, gpu_memory_share=round(GPU_SHARE * part, 4))


def as_reserved(
    engine: EngineOptions, role: Role, reserved: Mapping[str, float]
) -> tuple[EngineOptions, dict[str, float]]:
    """The options of an instance for which Ray reserves ``reserved``, and what Ray is to reserve. ``--device auto`` is
    a GPU where one is reserved, else the CPU; ``cuda`` reserves one for each worker.

    Raises :class:`UserError` for GPUs that do not suit the instance."""
    workers = engine.parallel.for_role(role).worker_count
    check_device_name(engine.device)
    if ":" in engine.device:
        hint = "use --device auto, cpu or cuda; --ray-resources says how many"
        raise UserError(f"Ray chooses the GPUs, and --device {engine.device} names one", hint=hint, param="device")
    gpus = reserved.get("GPU", workers if engine.device == "cuda" else 0)
    if engine.device == "cpu" or not gpus:
        refuse_without_gpu(engine)
        return dataclasses.replace(engine, device="cpu"), dict(reserved)
    if gpus != workers and not (workers == 1 and gpus < 1):
        hint = f"give --ray-resources {role.value}=CPU:1,GPU:{workers}, or other workers, or --device cpu"
        needs = f"{workers} GPUs" if workers > 1 else "one GPU or a part of it"
        text = f"a {role.value} instance of {workers} worker{'s' * (workers > 1)} needs {needs}, and not {gpus:g}"
        raise UserError(text, hint=hint, param="ray_resources")
    refuse_on_gpu(engine)
    check_gpu_shares(engine.gpu_memory_share, [1] * int(1 / min(gpus, 1)), 1)
    options = _with_share(dataclasses.replace(engine, device="cuda"), min(gpus, 1))
    return options, {**reserved, "GPU": float(gpus)}


def check_gpu_count(workers: int, gpus: int) -> None:
    """Raise :class:`UserError` for an instance of more workers than there are GPUs."""
    if workers > gpus:
        available = "one GPU is" if gpus == 1 else f"{gpus} GPUs are"
        hint = f"lower --tensor-parallel times --pipeline-parallel to {gpus}, or use --device cpu"
        text = f"an instance of {workers} workers needs {workers} GPUs of this host, and {available} here"
        raise UserError(text, hint=hint, param="tensor")


def check_gpu_shares(share: float | None, workers: Sequence[int], gpus: int) -> None:
    """Raise :class:`UserError` for instances, of so many ``workers`` each, that ask for more than their GPUs have, all
    together."""
    instances = _assign_gpus(workers, gpus)[1] if gpus else 0
    if share is not None and share * instances > 1:
        hint = f"give --gpu-memory-share {GPU_SHARE / instances:.2f}"
        raise UserError(
            f"{instances} instances cannot have {share:g} of one GPU each", hint=hint, param="gpu_memory_share"
        )


def refuse_on_gpu(options: EngineOptions) -> None:
    """Raise :class:`UserError` for what there is on a CPU alone."""
    if options.scheduler.link_bytes_s is not None:
        hint = "leave out --link-gbps, or use --device cpu"
        raise UserError("a GPU has a link of its own to DRAM: none is emulated", hint=hint, param="link_bytes_s")
    if options.lora_updates.lora_folder and options.parallel.worker_count > 1:
        hint = "use --lora, or instances of one GPU each"
        raise UserError("adapters of several GPUs do not come and go yet", hint=hint, param="lora_folder")


def refuse_without_gpu(options: EngineOptions) -> None:
    """Raise :class:`UserError` for what means nothing without a GPU."""
    if options.gpu_memory_share is not None:
        hint = "give the KV cache a size instead: --kv-memory 8GiB, or kv_memory='8GiB'"
        raise UserError("--gpu-memory-share needs a GPU, and none is used", hint=hint, param="gpu_memory_share")


def shares_gpu_kv(why_not: str, role: Role) -> bool:
    """Whether other processes can read the KV of an instance on several GPUs: not where there is a reason ``why_not``.

    Raises :class:`UserError` for prefill and decode instances, which are of no use then."""
    if why_not and role in (Role.PREFILL, Role.DECODE):
        hint = "use --colocated N, or prefill and decode instances of one GPU each"
        raise UserError(f"KV of this instance cannot be handed over: {why_not}", hint=hint, param="tensor")
    if why_not:
        log.warning("KV of this instance stays in it, no other instance and no store reads it: %s", why_not)
    return not why_not


def gpu_kv_bytes(options: EngineOptions, total: int, free: int, held_bytes: int, step: int) -> int:
    """Memory for KV on a GPU with ``total`` bytes, of which ``free`` are; ``held_bytes``: what this process has of it,
    ``step``: what a step needs.

    Raises :class:`UserError` where ``--kv-memory`` does not fit.
    """
    room = free - step - GRAPHS_BYTES
    if options.gpu_memory_share is not None:
        share_bytes = int(options.gpu_memory_share * total) - held_bytes - CONTEXT_BYTES - step - GRAPHS_BYTES
        if share_bytes <= 0:
            need = (held_bytes + CONTEXT_BYTES + step + GRAPHS_BYTES) / total
            raise UserError(
                f"{options.gpu_memory_share:.0%} of the GPU's {human_bytes(total)} hold weights and steps, and no KV",
                hint=f"give more than --gpu-memory-share {min(need, 1.0):.2f}, or lower --max-step-tokens",
                param="gpu_memory_share",
            )
        return min(share_bytes, room)
    if options.kv_memory_bytes > room:
        remaining, requested = human_bytes(max(room, 0)), human_bytes(options.kv_memory_bytes)
        raise UserError(
            f"the GPU has {remaining} left for KV, and {requested} are asked for",
            hint="give less with --kv-memory, or end what else runs on the GPU",
            param="kv_memory",
        )
    return options.kv_memory_bytes


def kv_bytes_here(options: EngineOptions, sizes: ModelSizes) -> int:
    """As :func:`gpu_kv_bytes`, for this process's GPU and a model that lies on it."""
    import torch

    from memserve.base.config import STEP_TOKENS_GPU
    from memserve.system.memory import step_bytes

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    tokens = options.scheduler.max_step_tokens or STEP_TOKENS_GPU
    needed = step_bytes(sizes, tokens, options.scheduler.max_running)
    kv_bytes = gpu_kv_bytes(options, total, free, torch.cuda.memory_reserved(), needed)
    log.info("GPU: %s for KV, %s free of %s", human_bytes(kv_bytes), human_bytes(free), human_bytes(total))
    return kv_bytes


def build_gpu_device(
    model: LoadedModel, config: InstanceConfig, gpu: Gpu, forward: Forward, *, shared: bool
) -> GpuDevice:
    """The device, with its graphs captured."""
    from memserve.model.gpu.device import GpuDevice

    check_pages(model.geometry.page_bytes)
    device = GpuDevice(model, config, gpu, forward, shared=shared)
    device_with_graphs(device)
    return device


def check_pages(nbytes: int) -> None:
    """Raise :class:`UserError` for pages, or runs of one head, that are no whole words."""
    if nbytes % 8:
        hint = "use --block-tokens 32, or --device cpu"
        raise UserError("pages on a GPU are whole words of 8 bytes", hint=hint, param="block_tokens")


def device_with_graphs(device: GpuDevice) -> None:
    """Capture the graphs of its decode steps."""
    device.capture_graphs(
        lambda captured_count, of: log.info("capturing CUDA graphs of decode steps: %d of %d", captured_count, of)
    )
