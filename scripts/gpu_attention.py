"""Attention on a CUDA device: against float64, and how fast. Parts of ``scripts/gpu_check.py``."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpu_report import CODED, NO_DEVICE, NotRun, Row, has_device, need_device

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "unit" / "model" / "attention" / "test_triton_attention.py"
sys.path.insert(0, str(ROOT / "src"))

from memserve.base.types import KVGeometry  # noqa: E402  # needs the path above
from memserve.model.attention.context import StepRows  # noqa: E402  # needs the path above
from memserve.model.attention.reference import reference_pages  # noqa: E402  # needs the path above
from memserve.model.attention.triton_attention import TritonBatch, attend  # noqa: E402  # needs the path above

DECODE = [(1, 2048), (1, 32768), (8, 2048), (32, 2048), (128, 2048), (256, 512)]  # rows, context
FULL_TOKENS = 32 * 2048
"""A decode that reads the KV of so many tokens has work for the whole device."""
CODED_DECODES = [(1, 32768), (8, 2048), (32, 2048), (128, 2048)]
SETTINGS_DECODES = [(1, 1, 8192), (8, 1, 1024), (32, 1, 2048), (128, 1, 2048)]  # rows, new tokens, context
PREFILL = [(1, 2048, 2048), (4, 512, 512), (1, 512, 16384), (8, 512, 4096)]  # rows, new tokens, context


def milliseconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median time of ``run`` on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return float(np.median(times))


class Step:
    """One random step: ``rows`` sequences of ``context`` tokens, ``count`` of which are new."""

    def __init__(
        self, geometry: KVGeometry, heads: int, rows: int, count: int, context: int, device: str = "cuda"
    ) -> None:
        self.geometry, self.rows, self.count, self.context = geometry, rows, count, context
        dtype = getattr(torch, geometry.dtype)
        blocks = -(-context // geometry.block_tokens)
        rng = np.random.default_rng(rows * 1_000_003 + context)
        order = torch.from_numpy(rng.permutation(rows * blocks).astype(np.int32))
        self.tables = order.view(rows, blocks).to(device)
        self.arena = torch.empty(rows * blocks * geometry.block_bytes, dtype=torch.uint8, device=device)
        starts = np.arange(rows + 1, dtype=np.int32) * count
        contexts = np.full(rows, context, np.int32)
        self.batch = TritonBatch(
            self.arena, geometry, StepRows(self.tables, np.arange(rows, dtype=np.int32), starts, contexts)
        )
        if geometry.code_depth:
            self._draw_codes()
        else:
            self.arena.view(dtype).normal_()
        tokens = rows * count

        def draw(heads: int, width: int) -> torch.Tensor:
            return torch.randn(tokens, heads, width, dtype=dtype, device=device)

        self.q = draw(heads, geometry.head_dim_k)
        self.k = draw(geometry.num_kv_heads, geometry.head_dim_k)
        self.v = draw(geometry.num_kv_heads, geometry.head_dim_v)
        self.out = torch.empty(tokens, heads, geometry.head_dim_v, dtype=dtype, device=device)
        self.scale = geometry.head_dim_k**-0.5

    def _draw_codes(self) -> None:
        """Any codes but those that are no numbers in e4m3; maxima about 1."""
        sizes, codes = self.batch.shape_constants(), self.batch.code_constants()
        words = self.arena.random_(0, 256).bitwise_and_(0xFE).view(torch.int32).view(-1, sizes["HEAD"])
        maxima = words[:, int(codes["DK_MAXIMA"]) :]
        bits = (torch.rand_like(maxima, dtype=torch.float32) + 0.5).bfloat16().view(torch.int16).int()
        maxima.copy_(bits | bits << 16)

    def run(self, layer: int = 0, **options: object) -> torch.Tensor:
        attend(self.batch, layer, self.q, self.k, self.v, self.out, self.scale, **options)
        return self.out

    def gathered(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all rows, ``[rows, Hkv, context, D]``, read from the pages by plain indexing; codes as float32."""
        pages = reference_pages(self.arena, self.geometry)
        rows = [pages.read_kv(layer, table.long(), self.context) for table in self.tables]
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def expected(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Torch's attention over the gathered KV, in float64, ``[T, H, Dv]``."""
        q = self.q.view(self.rows, self.count, *self.q.shape[1:]).transpose(1, 2)
        position = torch.arange(self.context - self.count, self.context, device=self.arena.device)
        mask = torch.arange(self.context, device=self.arena.device)[None] <= position[:, None]
        group = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, mask, scale=self.scale)
        return out.transpose(1, 2).flatten(0, 1)


def test_module() -> types.ModuleType:
    """The module ``CASES``, with a stand-in if pytest is not installed."""
    if importlib.util.find_spec("pytest") is None:
        stand_in = types.ModuleType("pytest")
        mark = types.SimpleNamespace(parametrize=lambda *_: lambda f: f)
        stand_in.__dict__.update(fixture=lambda **_: lambda f: f, mark=mark)
        sys.modules["pytest"] = stand_in
    spec = importlib.util.spec_from_file_location("cases", CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels() -> Iterator[Row]:
    """Attention against float64: every test case, compiled or interpreted; then batches of real size."""
    yield from check_cases("auto")
    for dtype in ("float32", "bfloat16", "float16"):
        yield from check_large(KVGeometry(2, 8, 128, 128, dtype), heads=32)


def codes(kind: str) -> Iterator[Row]:
    """The same of KV of a byte or less: against float64 of what the codes say, and beside the bytes of a CPU."""
    yield from check_cases(kind)
    yield from check_large(KVGeometry(2, 8, 128, 128, "bfloat16", kv_dtype=kind), heads=32)


def check_cases(kind: str) -> Iterator[Row]:
    """The test cases with KV of this kind. Raises :class:`NotRun` behind them where there is no device."""
    module, is_cuda = test_module(), has_device()
    for name, case in module.CASES.items():
        if case[-1].get("codes", "auto") == kind:
            error, is_same = module.run_case(name, device="cuda" if is_cuda else "cpu")
            limit = module.TOLERANCE[case[0]]
            ok = error < limit and is_same
            yield {"what": name, "ok": ok, "dtype": case[0], "error": error, "limit": limit, "bytes_as_on_cpu": is_same}
    if not is_cuda:
        raise NotRun(f"{NO_DEVICE}: kernels were interpreted, and batches of real size left out")


def check_large(geometry: KVGeometry, heads: int) -> Iterator[Row]:
    """Compare batches of real size with float64 attention over gathered KV."""
    for count, context in ((1, 1000), (1, 9000), (257, 257), (300, 1500)):
        step = Step(geometry, heads, 3, count, context)
        result = step.run(layer=1)
        want = step.expected(*step.gathered(layer=1))
        error = float((result.double() - want).abs().max() / want.abs().max())
        limit = 1e-5 if geometry.dtype == "float32" else 1e-2
        name = f"3 rows, {count} new of {context}"
        kept = {"dtype": geometry.dtype, "kv": geometry.kv_dtype}
        yield {"what": name, "ok": error < limit, **kept, "error": error, "limit": limit}


def speed() -> Iterator[Row]:
    """Decodes as a share of copy bandwidth, of the bundled model's shape and an 8B's; prefills beside torch's; the same
    of an 8B's shape with KV of a byte or less, beside KV in bfloat16."""
    need_device()
    small, large = KVGeometry(2, 3, 64, 64, "bfloat16"), KVGeometry(2, 8, 128, 128, "bfloat16")
    yield from time_decode(small, 9, "3 KV heads of 64")
    plain = list(time_decode(large, 32, "8 KV heads of 128"))
    yield from plain
    yield from time_prefill(large, 32)
    times_us = {shape: row["us"] for shape, row in zip(DECODE, plain, strict=True)}
    for kind in CODED:
        coded = replace(large, kv_dtype=kind)
        rows = time_decode(coded, 32, f"8 KV heads of 128 as {kind}", CODED_DECODES, CODED[kind])
        for shape, row in zip(CODED_DECODES, rows, strict=True):
            yield row | {"times_bfloat16": times_us[shape] / row["us"]}
        yield from time_prefill(coded, 32, f", KV as {kind}")


def time_decode(
    geometry: KVGeometry,
    heads: int,
    title: str,
    shapes: list[tuple[int, int]] = DECODE,
    target: str = "attention of a decode",
) -> Iterator[Row]:
    """Time decode steps on the device: one query per row. Those that can fill the device are judged."""
    from gpu_bytes import copy_gb_s

    for count, context in shapes:
        kv_gb_s, us = decode_gb_s(Step(geometry, heads, count, 1, context))
        row: Row = {"what": f"{title}: {count} rows of {context} tokens", "us": us, "kv_gb_s": kv_gb_s}
        row["share"] = kv_gb_s / copy_gb_s()
        yield row | ({"target": target} if count * context >= FULL_TOKENS else {})


def decode_gb_s(step: Step) -> tuple[float, float]:
    """Bytes of KV a second, and microseconds of a layer, without the host's part: layers by turns in a graph."""
    from memserve.model.gpu.linears import graph_seconds

    layers = [partial(step.run, layer) for layer in range(step.geometry.num_layers)] * 4
    seconds = graph_seconds(layers) / len(layers)
    kv_bytes = step.rows * step.context * step.geometry.token_bytes // step.geometry.num_layers
    return kv_bytes / seconds / 1e9, seconds * 1e6


def settings() -> Iterator[Row]:
    """Decodes with other sizes of what a program loads at a time, to see whether the usual ones suit this device."""
    need_device()
    from memserve.model.attention import triton_attention

    steps = [Step(KVGeometry(2, 8, 128, 128, "bfloat16"), 32, *shape) for shape in SETTINGS_DECODES]
    usual = triton_attention._DECODE_LOADS
    for tuning in [usual, *itertools.product((1 << 13, 1 << 14, 1 << 15), (3, 4, 5, 6), (4, 8))]:
        triton_attention._DECODE_LOADS = tuning
        row: Row = {"what": f"{tuning[0] // 256} keys, {tuning[1]} stages, {tuning[2]} warps"}
        for step in steps:
            with contextlib.suppress(Exception):  # too much for this device
                row[f"{step.rows} of {step.context}, gb_s"] = decode_gb_s(step)[0]
        yield row


def time_prefill(geometry: KVGeometry, heads: int, title: str = "") -> Iterator[Row]:
    """Time prefill steps and chunks, and torch's flash attention over contiguous KV."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dense = torch.nn.functional.scaled_dot_product_attention
    for count, new, context in PREFILL:
        step = Step(geometry, heads, count, new, context)
        ms = milliseconds(step.run)
        pairs = count * (new * context - new * (new - 1) // 2)
        flops = 2 * pairs * heads * (geometry.head_dim_k + geometry.head_dim_v)
        row: Row = {"what": f"{count} prompts, {new} new of {context}{title}", "ms": ms, "tflops": flops / ms / 1e9}
        if new == context and not geometry.code_depth:
            k, v = step.gathered()
            q = step.q.view(count, new, *step.q.shape[1:]).transpose(1, 2)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                row["torch_flash_ms"] = milliseconds(partial(dense, q, k, v, is_causal=True, enable_gqa=True))
        yield row
