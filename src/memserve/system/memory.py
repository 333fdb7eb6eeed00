"""How much memory and how many cores this machine has for us, and how much an instance takes at most."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memserve.base.config import InstanceConfig
from memserve.base.errors import UserError
from memserve.base.kv_layout import lower_block_bytes
from memserve.base.types import KVGeometry
from memserve.base.units import MIB, human_bytes

_CGROUP = Path("/sys/fs/cgroup")

PROGRAM_BYTES = 510 * MIB
"""Python, torch, transformers and this package, with their code: resident before there are weights."""
PRIMITIVE_BYTES = 800_000
"""What one of oneDNN's primitives takes at most: measured between 0.3 MB (float32) and 0.8 MB (bfloat16)."""
SOURCE_TOKEN_BYTES = 32
"""Of each token that is looked through for runs, where each sequence has published one block of 16 tokens or more."""
PEERS_BYTES = 8 * MIB
"""What of peers' arenas may count as resident in a process that reads them."""
LOGITS_COPIES = 4
"""Logits, their adjusted copy, log-probabilities, and what sorting them takes: float32 each."""
ACTIVATION_COPIES = 6
"""Widest values of a step that live at once: a linear's input and output, a residual, and what the allocator keeps."""

LATENT_SCRATCH_BYTES = 32 * MIB
"""Of keys and values that a step makes of latents, beside those of its own tokens."""

TRIM_EVERY_S = 15.0
"""So long may heap pages be free before the system has them back: a trim takes some milliseconds."""
_M_ARENA_MAX = -8  # in malloc.h


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model's memory depends on."""

    weights_bytes: int
    widest: int
    """Columns of the widest linear but the head."""
    vocab: int
    value_bytes: int
    """Bytes of one weight or activation."""


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """What an instance on a CPU may have resident at most, by what it is for; see docs/concepts/MEMORY.md."""

    program_bytes: int
    weights_bytes: int
    arenas_bytes: int
    peers_bytes: int
    primitives_bytes: int
    activations_bytes: int
    logits_bytes: int
    requests_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = {part.name.removesuffix("_bytes"): getattr(self, part.name) for part in dataclasses.fields(self)}
        terms = " + ".join(f"{name} {human_bytes(value)}" for name, value in parts.items())
        return f"{human_bytes(self.total_bytes)} = {terms}"


def sizes_from_config(config: Mapping[str, Any], weights_bytes: int) -> ModelSizes:
    """The sizes of a model in 16 bits that is not loaded, from its ``config.json``. Raises ``KeyError``."""
    hidden = int(config["hidden_size"])
    widest = int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden)
    return ModelSizes(weights_bytes, 2 * widest, int(config["vocab_size"]), 2)


def geometry_from_config(config: Mapping[str, Any], block_tokens: int) -> KVGeometry:
    """The KV in 16 bits of a model that is not loaded, as its ``config.json`` describes it; loading looks closer.
    Raises ``KeyError``."""
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    if config.get("kv_lora_rank") and config.get("qk_rope_head_dim"):  # latents, and a rotary key
        latent, rotary = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        return KVGeometry(layers, 1, latent + rotary, latent, "bfloat16", block_tokens, latent=True)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return KVGeometry(layers, kv_heads, head_dim, head_dim, "bfloat16", block_tokens)


def step_bytes(model: ModelSizes, tokens: int, running: int) -> int:
    """The most that a step of ``tokens`` takes beside weights and KV, with ``running`` sequences."""
    return _activations_bytes(model, tokens) + _logits_bytes(model, running)


def _activations_bytes(model: ModelSizes, tokens: int) -> int:
    return tokens * model.widest * model.value_bytes * ACTIVATION_COPIES


def _logits_bytes(model: ModelSizes, running: int) -> int:
    from memserve.base.config import PROMPT_LOGPROBS_MAX

    return (running + PROMPT_LOGPROBS_MAX) * model.vocab * 4 * LOGITS_COPIES


def memory_bound(model: ModelSizes, geometry: KVGeometry, config: InstanceConfig, *, in_cluster: bool) -> MemoryBound:
    """The most that an instance of ``model`` should have resident."""
    from memserve.system.process import PRIMITIVES_MAX

    scheduler, pool = config.scheduler, config.pool
    step_tokens = max(scheduler.step_tokens, scheduler.max_running)
    streamed = pool.dram_blocks * geometry.block_tokens if scheduler.layerwise != "off" else 0
    longest = min(config.max_model_tokens, max(streamed, pool.tokens_in(geometry.block_tokens)))
    sources = pool.source_tokens(geometry.block_tokens) if scheduler.nonprefix_reuse else 0
    slots_bytes = 0 if pool.states is None else scheduler.max_running * pool.states.state_bytes  # beside the arena
    return MemoryBound(
        program_bytes=PROGRAM_BYTES,
        weights_bytes=model.weights_bytes,
        arenas_bytes=pool.hbm_blocks * geometry.block_bytes
        + (pool.dram_blocks - pool.ssd_blocks) * lower_block_bytes(geometry, pool.lower_dtype)
        + slots_bytes,
        peers_bytes=PEERS_BYTES + pool.hbm_blocks * geometry.block_bytes if in_cluster else 0,
        primitives_bytes=PRIMITIVES_MAX * PRIMITIVE_BYTES,
        activations_bytes=_activations_bytes(model, step_tokens) + LATENT_SCRATCH_BYTES * geometry.latent,
        logits_bytes=_logits_bytes(model, scheduler.max_running),
        requests_bytes=(scheduler.max_waiting + scheduler.max_running) * longest * 4 + sources * SOURCE_TOKEN_BYTES,
    )


def resident_bytes() -> int:
    """What this process has resident now, maps that it shares with others included; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


@contextmanager
def no_collections() -> Iterator[None]:
    """For a start in a program of a library's user, if it looks for garbage: imports of torch and transformers make
    half a million objects, and to look among them again and again costs a second. At the end it is looked for once."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()  # a load leaves 60 MB in reference cycles (graphs, the tokenizer's files)
        trim_heap()


@contextmanager
def objects_that_stay() -> Iterator[None]:
    """For the start of a process of ours: what is made here (half a million objects of torch and transformers) stays.

    To look for garbage among them again and again costs a sixth of the start, and later a pause in the middle of
    serving. Not for a library's user: other objects would stay as well.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        trim_heap()
        gc.freeze()
    finally:
        gc.enable()


YOUNG_OBJECTS_MAX = 10_000
"""More than what the requests that a server answers at once consist of: most are gone when they would be looked at."""


def collect_rarely() -> None:
    """For a process of ours that answers requests, which leave no reference cycles: look for garbage among young
    objects every :data:`YOUNG_OBJECTS_MAX`. Python does it every 700, most of which are still in use."""
    gc.set_threshold(YOUNG_OBJECTS_MAX, 20, 50)


def trim_heap() -> None:
    """Give free heap pages back to the system. glibc keeps those below the highest one in use: 300 MB after packing a
    small model, and tens of MB for each thread that allocates under mixed load."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_heap_small(every_s: float = TRIM_EVERY_S) -> None:
    """From now on all threads of this process share one heap, and its free pages go back to the system regularly.

    glibc gives each thread a heap of its own, and each keeps the most that its thread ever needed. For processes of
    ours, before they start threads; ``MALLOC_ARENA_MAX`` in the environment says how many heaps there may be instead.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)

    def run() -> None:
        while True:
            time.sleep(every_s)
            trim_heap()

    threading.Thread(target=run, name="heap-trim", daemon=True).start()


def available_memory_bytes() -> int | None:
    """The kernel's estimate, or what the control group leaves, whichever is less; ``None``: neither is known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    return min([available, *_bytes_left_by_group()])


def _bytes_left_by_group() -> Iterator[int]:
    """Bytes that each control group of this process leaves, its caches of files counted as free: the kernel drops them
    before it kills."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    group_paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for root, path, (limit_name, used_name, caches) in (
        (_CGROUP, group_paths.get("", "/"), ("memory.max", "memory.current", ("inactive_file", "active_file"))),
        (_CGROUP / "memory", group_paths.get("memory", "/"), ("memory.limit_in_bytes", "memory.usage_in_bytes",
                                                      ("total_inactive_file", "total_active_file"))),
    ):  # fmt: skip
        place = root / path.lstrip("/")
        for group in (place, *place.parents):
            if group == root.parent:
                break
            try:
                limit, used = (group / limit_name).read_text().strip(), int((group / used_name).read_text())
                if limit != "max":
                    yield int(limit) - used + _sum_counters(group / "memory.stat", caches)
            except (OSError, ValueError):  # the root has no limit, a container may see only its own group
                continue


def _sum_counters(stat: Path, names: tuple[str, ...]) -> int:
    try:
        pairs = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(value) for name, value in pairs if name in names)


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, or by the control group's share of time if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period))) if quota != "max" else cores
    except (OSError, ValueError):
        return cores


def check_host_memory(wanted_bytes: int) -> None:
    """Refuse KV memory that this machine cannot hold: the kernel would grant it, and kill the server under load.

    Raises :class:`UserError`.
    """
    available = available_memory_bytes()
    if available is not None and wanted_bytes > available:
        raise UserError(
            f"{human_bytes(wanted_bytes)} of KV memory are asked for, and {human_bytes(available)} are available",
            hint="give less with --kv-memory and --dram-memory, or close other programs",
            param="kv_memory",
        )


def check_model_memory(name: str, weights_bytes: int, largest_bytes: int, kv_bytes: int) -> None:
    """Refuse a model that this machine cannot hold, before anything of it is read: the kernel would begin to load it,
    and kill the process at the end. Raises :class:`UserError`.

    ``weights_bytes``: of all weights as they are computed; ``largest_bytes``: of the largest, which is there twice
    while it is packed; ``kv_bytes``: of the KV memory beside them.
    """
    available = available_memory_bytes()
    program_bytes = max(0, PROGRAM_BYTES - resident_bytes())
    needed = weights_bytes + largest_bytes + program_bytes + kv_bytes
    if available is not None and needed > available:
        raise UserError(
            f"{name} does not fit into memory: it needs {human_bytes(needed)} (weights {human_bytes(weights_bytes)}, "
            f"KV {human_bytes(kv_bytes)}, and what loading and the program take), and {human_bytes(available)} are "
            "available",
            hint="serve a smaller model, use --dtype bfloat16 if this is float32, give less with --kv-memory and "
            "--dram-memory, or close other programs",
            param="model",
        )
