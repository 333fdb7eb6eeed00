"""Devices and models by name, and the times of steps and copies on them: published figures, not measurements.

A profile of ``memserve profile`` is better wherever there is one (:mod:`memserve_lab.sim.timed_device` takes either).
Peak rates are those of the vendors' data sheets, dense, without sparsity; the share that a serving engine reaches is
assumed: ``COMPUTE_SHARE`` of the arithmetic in prompts, ``MEMORY_SHARE`` of the memory's bandwidth in decoding. Model
shapes are those of the published ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.base.units import GIB, NS_PER_MS, NS_PER_S, NS_PER_US, ceil_div
from memserve.kv.costs import CopyCurve, CostModel, DecodeCurve, PrefillCurve

COMPUTE_SHARE = 0.55
"""Reached share of the peak arithmetic, in longer prompts (Vidur and LayerKV fit 0.4 to 0.65 for A100 and H100)."""
MEMORY_SHARE = 0.75
"""Reached share of the peak bandwidth, when weights and KV are read to draw one token."""
MEMORY_USED = 0.9
"""Share of the device's memory for weights and KV: vLLM's ``gpu_memory_utilization``."""
PARALLEL_SHARE = 0.9
"""What remains of the speed each time the number of devices that share one model is doubled (all-reduces)."""
SEAL_BYTE_NS = 0.05
"""Checksums at 20 GB/s, beside the device's work. A transfer's curve counts them, as a measured one does."""
BLOCK_TOKENS = 32
Named = TypeVar("Named")


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One accelerator, or one host's processors."""

    name: str
    flops: float
    """Dense bf16 operations a second, multiply and add counted as two."""
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    """Bandwidth to devices of other instances, one way."""
    host_bytes_per_s: float
    """Bandwidth of a link to the host's memory, one way."""
    step_ns: int
    """Fixed time of every step beside arithmetic and memory: launches, sampling."""
    source: str
    devices_per_host_link: int = 1
    """Devices that share one such link."""

    def host_rate(self, devices: int) -> float:
        """Bandwidth of ``devices`` to the host's memory, in bytes a second, one way."""
        return self.host_bytes_per_s * ceil_div(devices, self.devices_per_host_link)


DEVICES = {
    device.name: device
    for device in (
        DeviceModel(
            "h100", 989e12, 3.35e12, 80 * 10**9, 50e9, 55e9, 2 * NS_PER_MS,
            "NVIDIA H100 SXM data sheet; link: one ConnectX-7 of 400 Gbit/s; host: PCIe 5 x16",
        ),
        DeviceModel(
            "h800", 989e12, 3.35e12, 80 * 10**9, 200e9, 55e9, 2 * NS_PER_MS,
            "NVIDIA H800 SXM: as H100, NVLink of 400 GB/s both ways together (MemServe 8.1); host: PCIe 5 x16",
        ),
        DeviceModel(
            "h200", 989e12, 4.8e12, 141 * 10**9, 50e9, 55e9, 2 * NS_PER_MS,
            "NVIDIA H200 SXM data sheet; link and host as H100",
        ),
        DeviceModel(
            "a100", 312e12, 2.039e12, 80 * 10**9, 25e9, 25e9, 2 * NS_PER_MS,
            "NVIDIA A100 80GB SXM data sheet; link: one ConnectX-6 of 200 Gbit/s; host: PCIe 4 x16",
        ),
        DeviceModel(
            "a100-40gb", 312e12, 1.555e12, 40 * 10**9, 25e9, 25e9, 2 * NS_PER_MS,
            "NVIDIA A100 40GB SXM data sheet; link and host as A100",
        ),
        DeviceModel(
            "l40s", 362e12, 0.864e12, 48 * 10**9, 12.5e9, 25e9, 2 * NS_PER_MS,
            "NVIDIA L40S data sheet; link: 100 Gbit/s; host: PCIe 4 x16",
        ),
        DeviceModel(
            "l20", 119.5e12, 0.864e12, 48 * 10**9, 12.5e9, 25e9, 2 * NS_PER_MS,
            "NVIDIA L20 data sheet; link: 100 Gbit/s; host: one PCIe 4 x16 for two devices, as in LayerKV's testbed", 2,
        ),
        DeviceModel(
            "cpu", 0.65e12, 40e9, 24 * 10**9, 1.1e9, 12e9, 6 * NS_PER_MS,
            "two Zen 4 cores with avx512_bf16, fitted to SmolLM2-135M: 1,348 prompt tokens/s, 23.5 ms a step; "
            "link: TCP on loopback; host: memcpy",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that cost time and memory."""

    name: str
    layers: int
    query_values: int
    """Number of query heads times their size."""
    kv_heads: int
    head_dim: int
    parameters: float
    active_parameters: float
    """Parameters used for one token: fewer in a mixture of experts."""
    context_tokens: int

    def geometry(self, block_tokens: int = BLOCK_TOKENS, dtype: str = "bfloat16") -> KVGeometry:
        """Geometry of the model's KV cache."""
        return KVGeometry(self.layers, self.kv_heads, self.head_dim, self.head_dim, dtype, block_tokens)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights in bf16."""
        return 2 * self.parameters

    @property
    def token_flops(self) -> float:
        """Operations of the linear layers for one token: a multiplication and an addition per parameter."""
        return 2 * self.active_parameters

    @property
    def pair_flops(self) -> float:
        """Operations of attention for one query and key, over all layers: a dot product and a weighted sum (LayerKV,
        equation 3, counts the same: ``2 * layers * hidden * s^2`` for the ``s^2 / 2`` pairs of a causal prompt)."""
        return 4 * self.layers * self.query_values


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 128, 6.74e9, 6.74e9, 4096),
        ModelShape("llama-2-7b-16k", 32, 4096, 32, 128, 6.74e9, 6.74e9, 16896),
        ModelShape("llama-2-13b", 40, 5120, 40, 128, 13.0e9, 13.0e9, 4096),
        ModelShape("opt-13b", 40, 5120, 40, 128, 13.0e9, 13.0e9, 2048),
        ModelShape("llama-3-8b", 32, 4096, 8, 128, 8.03e9, 8.03e9, 131072),
        ModelShape("llama-3-70b", 80, 8192, 8, 128, 70.6e9, 70.6e9, 131072),
        ModelShape("llama-3.1-70b", 80, 8192, 8, 128, 70.6e9, 70.6e9, 131072),
        ModelShape("yi-34b-200k", 60, 7168, 8, 128, 34.4e9, 34.4e9, 200000),
        ModelShape("qwen3-8b", 36, 4096, 8, 128, 8.19e9, 8.19e9, 131072),
        ModelShape("qwen3-32b", 64, 8192, 8, 128, 32.8e9, 32.8e9, 131072),
        ModelShape("qwen3-30b-a3b", 48, 4096, 4, 128, 30.5e9, 3.3e9, 262144),
        ModelShape("smollm2-135m", 30, 576, 3, 64, 134.5e6, 134.5e6, 8192),
        ModelShape("smollm2-1.7b", 24, 2048, 32, 64, 1.71e9, 1.71e9, 8192),
    )
}
"""Llama 3 with the context of 3.1; Qwen3 with YaRN; Llama 2 as LayerKV uses it, with prompts of 16k."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one instance: devices that share one model."""

    name: str
    geometry: KVGeometry
    context_tokens: int
    hbm_blocks: int
    dram_blocks: int
    costs: CostModel
    """The curves that decisions use."""
    devices: int = 1
    """Number of devices, for the cost of a cluster."""
    roof: Roof | None = None
    """How long steps take; ``None``: as ``costs`` says."""
    link_bytes_per_s: float = 1e9
    """Bandwidth into, and out of, the instance."""
    host_bytes_per_s: float | None = None
    """Bandwidth between HBM and DRAM, each way. None: as the curve of swaps says."""
    measured: bool = False

    @property
    def host_rate(self) -> float:
        """Bandwidth between HBM and DRAM in bytes a second, each way."""
        return self.host_bytes_per_s or NS_PER_S / max(self.costs.swap_in.byte_ns, 1e-3)


@dataclass(frozen=True, slots=True)
class Roof:
    """Roofline: a step takes the longer of its arithmetic and of reading the weights, plus the time to read KV.

    ``flops`` and ``bytes_per_s`` are the reached rates of all devices of an instance together.
    """

    flops: float
    bytes_per_s: float
    weight_bytes: float
    token_flops: float
    pair_flops: float
    token_bytes: float
    fixed_ns: int

    def step_ns(self, new_tokens: int, pairs: int, rows: int, context_tokens: int) -> int:
        """Time of a step of ``new_tokens`` prompt tokens with ``pairs`` of query and key, and ``rows`` decoding
        sequences."""
        attention_ns = pairs * self.pair_flops / self.flops * NS_PER_S
        fixed_ns, context_ns = self._line(new_tokens + rows)
        return round(fixed_ns + attention_ns + context_ns * context_tokens)

    def decode_line(self, rows: int) -> tuple[float, float]:
        """A step that only decodes ``rows`` sequences: its time, and the time per token attended to (ns)."""
        return self._line(rows)

    def _line(self, tokens: int) -> tuple[float, float]:
        linear_ns = tokens * self.token_flops / self.flops * NS_PER_S
        weights_ns = self.weight_bytes / self.bytes_per_s * NS_PER_S
        return self.fixed_ns + max(linear_ns, weights_ns), self.token_bytes / self.bytes_per_s * NS_PER_S


def machine(
    model: str, device: str, devices: int = 1, dram_bytes: int = 0, block_tokens: int = BLOCK_TOKENS
) -> Machine:
    """``model`` on ``devices`` of a kind, by their names. Raises :class:`UserError` for unknown ones, and where the
    weights leave no room for KV."""
    shape, kind = find(MODELS, model, "model"), find(DEVICES, device, "device")
    doublings = max(0, devices.bit_length() - 1)
    reached = devices * PARALLEL_SHARE**doublings
    geometry = shape.geometry(block_tokens)
    roof = Roof(
        kind.flops * COMPUTE_SHARE * reached, kind.memory_bytes_per_s * MEMORY_SHARE * reached,
        shape.weight_bytes, shape.token_flops, shape.pair_flops, geometry.token_bytes, kind.step_ns,
    )  # fmt: skip
    room_bytes = devices * kind.memory_bytes * MEMORY_USED - shape.weight_bytes
    hbm_blocks = int(room_bytes // geometry.block_bytes)
    if hbm_blocks < 2:
        need = int(shape.weight_bytes / (kind.memory_bytes * MEMORY_USED)) + 1
        hint = f"give it more devices: {device}x{need}"
        raise UserError(f"{model} needs {shape.weight_bytes / GIB:.0f} GiB for its weights alone", hint=hint)
    return Machine(
        f"{model} on {devices} {device}" if devices > 1 else f"{model} on {device}",
        geometry, shape.context_tokens, hbm_blocks, dram_bytes // geometry.block_bytes,
        _curves(roof, kind, devices, f"{model} on {device}"), devices, roof, kind.link_bytes_per_s * devices,
        kind.host_rate(devices),
    )  # fmt: skip


def with_step_ns(machine: Machine, step_ns: int) -> Machine:
    """``machine``, each step of which takes ``step_ns`` beside arithmetic and memory: an engine's own time. Raises
    :class:`UserError` for a measured one, whose steps are known."""
    if machine.roof is None:
        raise UserError("a measured profile has its own steps", hint="leave the time of a step out")
    added_ns, costs = step_ns - machine.roof.fixed_ns, machine.costs
    prefill = replace(costs.prefill, step_ns=costs.prefill.step_ns + added_ns)
    decode = replace(costs.decode, step_ns=costs.decode.step_ns + added_ns)
    roof = replace(machine.roof, fixed_ns=step_ns)
    return replace(machine, roof=roof, costs=replace(costs, prefill=prefill, decode=decode))


def _curves(roof: Roof, kind: DeviceModel, devices: int, name: str) -> CostModel:
    """The roofline as curves: close to it for long prompts and small batches, where decisions differ."""
    weights_ns = roof.weight_bytes / roof.bytes_per_s * NS_PER_S
    token_ns, pair_ns = roof.token_flops / roof.flops * NS_PER_S, roof.pair_flops / roof.flops * NS_PER_S
    context_ns = roof.token_bytes / roof.bytes_per_s * NS_PER_S
    swap = CopyCurve(20.0 * NS_PER_US, 2.0 * NS_PER_US, NS_PER_S / kind.host_rate(devices))
    byte_ns = SEAL_BYTE_NS + NS_PER_S / (kind.link_bytes_per_s * devices)
    link = CopyCurve(200.0 * NS_PER_US, 2.0 * NS_PER_US, byte_ns)
    return CostModel(
        PrefillCurve(roof.fixed_ns + weights_ns / 2, token_ns, pair_ns),
        DecodeCurve(roof.fixed_ns + weights_ns, 0.0, context_ns),
        swap, swap, link, link, machine=kind.name, model=name,
    )  # fmt: skip


def find(choices: dict[str, Named], name: str, subject: str) -> Named:
    """``known[name]``; raises :class:`UserError` with the known names if there is none."""
    if name not in choices:
        raise UserError(f"unknown {subject} {name!r}", hint=f"one of {', '.join(choices)}")
    return choices[name]
