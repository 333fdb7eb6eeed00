"""The Triton kernels: interpreted on the CPU and compared with attention in float64, and what they write with the
bytes that a CPU writes; and compiled for a CUDA device.

Both run in child processes: whether kernels are interpreted is decided once, when triton is imported.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SUPPORT = Path(__file__).parents[3] / "support"
CASES = {
    # name: dtype, layers, heads, kv heads, dk, dv, block, counts, contexts, options
    "decode": ("float32", 2, 3, 1, 16, 16, 16, [1, 1, 1], [1, 17, 40], {}),
    "prefill and decode mixed": ("float32", 2, 4, 2, 16, 16, 32, [33, 1, 5], [33, 40, 70], {}),
    "window": ("float32", 1, 2, 1, 16, 16, 16, [1, 20], [50, 60], {"window": 9}),
    "chunk": ("float32", 1, 2, 1, 16, 16, 16, [1, 20, 5], [50, 60, 49], {"chunk": 24}),
    "split rows in a chunk": ("float32", 1, 2, 1, 16, 16, 16, [1], [100], {"splits": 3, "chunk": 72}),
    "softcap": ("float32", 1, 2, 2, 16, 16, 16, [3], [20], {"softcap": 2.5}),
    "sinks": ("float32", 1, 4, 2, 16, 16, 16, [1, 3], [20, 3], {"sinks": True}),
    "values narrower than keys": ("float32", 1, 2, 1, 24, 12, 16, [2], [19], {}),
    "split rows": ("float32", 1, 3, 1, 16, 16, 16, [1, 1], [100, 5], {"splits": 3, "sinks": True}),
    "split rows in a window": ("float32", 1, 2, 1, 16, 16, 16, [1], [100], {"splits": 4, "window": 40}),
    "block of 48": ("float32", 1, 2, 1, 16, 16, 48, [2], [60], {}),
    "pages within larger blocks": ("float32", 2, 2, 1, 16, 16, 16, [1, 6], [40, 6], {"span": (640, 6400)}),
    "bfloat16": ("bfloat16", 1, 4, 2, 16, 16, 32, [1, 6], [40, 6], {}),
    "float16": ("float16", 1, 4, 2, 16, 16, 32, [1, 6], [40, 6], {}),
    "int8, prefill and decode mixed": ("float32", 2, 4, 2, 64, 64, 32, [9, 1, 5], [33, 40, 5], {"codes": "int8"}),
    "fp8, prefill and decode mixed": ("float32", 1, 3, 1, 64, 64, 16, [1, 18], [34, 18], {"codes": "fp8"}),
    "int4, prefill and decode mixed": ("float32", 2, 2, 1, 64, 64, 32, [9, 1], [35, 45], {"codes": "int4"}),
    "int8 of 8 KV heads": ("bfloat16", 1, 16, 8, 64, 64, 32, [1, 1], [9, 33], {"codes": "int8"}),
    "fp8 of 4 KV heads": ("float16", 1, 4, 4, 64, 64, 16, [1, 3], [17, 6], {"codes": "fp8"}),
    "int4 of 128": ("bfloat16", 1, 4, 2, 128, 128, 32, [1, 3], [40, 6], {"codes": "int4"}),
    "int8 of 128, split": ("float32", 1, 2, 1, 128, 128, 16, [1], [90], {"codes": "int8", "splits": 3, "sinks": True}),
    "fp8, split in a window": ("float32", 1, 2, 1, 16, 16, 16, [1], [100], {"codes": "fp8", "splits": 4, "window": 40}),
    "int4, split in a chunk": ("float32", 1, 2, 1, 64, 64, 16, [1], [100], {"codes": "int4", "splits": 3, "chunk": 72}),
    "int8, window": ("float32", 1, 2, 1, 64, 64, 16, [1, 7], [50, 43], {"codes": "int8", "window": 9}),
    "fp8, softcap, block of 48": ("float32", 1, 2, 1, 24, 40, 48, [2], [60], {"codes": "fp8", "softcap": 2.5}),
    "int4, values narrower than keys": ("float32", 1, 2, 1, 40, 24, 16, [2], [19], {"codes": "int4"}),
    "int8, odd sizes": ("float32", 1, 2, 1, 18, 13, 16, [2], [32], {"codes": "int8"}),
    "int4 within larger blocks": ("float32", 2, 2, 1, 16, 16, 16, [1], [40], {"codes": "int4", "span": (640, 6400)}),
    **{f"{codes} of any number": ("float32", 1, 2, 2, 64, 40, 16, [13], [29], {"codes": codes, "odd": True})
       for codes in ("int8", "fp8", "int4")},
}  # fmt: skip
"""``codes``: what KV is kept as; ``odd``: KV has ties, infinities and no numbers, and bytes alone are compared."""
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def reference(q, keys, values, scale, window, softcap, chunk, sinks):
    """Causal attention of one row in float64: q ``[n, H, Dk]``, keys ``[c, Hkv, Dk]``, values ``[c, Hkv, Dv]``."""
    n, heads, _ = q.shape
    context, kv_heads, _ = keys.shape
    out = np.zeros((n, heads, values.shape[2]))
    for i in range(n):
        position = context - n + i
        first = max(0, position - window + 1) if window else 0
        first = max(first, position // chunk * chunk) if chunk else first
        for h in range(heads):
            kv = h // (heads // kv_heads)
            s = keys[first : position + 1, kv] @ q[i, h] * scale
            if softcap:
                s = softcap * np.tanh(s / softcap)
            top = max(s.max(), sinks[h]) if sinks is not None else s.max()
            e = np.exp(s - top)
            below = e.sum() + (np.exp(sinks[h] - top) if sinks is not None else 0.0)
            out[i, h] = e @ values[first : position + 1, kv] / below
    return out


def odd_numbers(rng, codes: str, *shape: int) -> np.ndarray:
    """By rows, in turn: any bits of a float32; half-way between two codes, with the largest one; half-way between two
    maxima; so small that all of it is zero, or nearly so."""
    largest = {"int8": 127, "fp8": 448, "int4": 7}[codes]
    any_bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    codes_between = rng.integers(-2 * largest, 2 * largest + 1, shape) / 2.0
    codes_between[..., ::32] = largest
    normal = rng.standard_normal(shape).astype(np.float32)
    maxima_between = ((normal.view(np.uint32) & 0xFFFF0000) | 0x8000).view(np.float32)
    kinds = any_bits, codes_between, maxima_between, normal * 2.0 ** rng.integers(-112, -97, (shape[0], 1, 1))
    return np.stack(kinds).astype(np.float32)[np.arange(shape[0]) % 4, np.arange(shape[0])]


def run_case(name: str, device: str = "cpu", scale: float = 0.3) -> tuple[float, bool]:
    """The largest difference between kernel and reference, relative to the largest output; and whether the arena has
    the bytes that a CPU writes."""
    import torch

    from memserve.base.types import KVGeometry
    from memserve.model.attention.backends import choose_backend
    from memserve.model.attention.context import BlockSpan, StepRows
    from memserve.model.attention.reference import round_kv, values_of
    from memserve.model.attention.triton_attention import TritonBatch, attend

    dtype_name, layers, heads, kv_heads, dk, dv, block, counts, contexts, options = CASES[name]
    dtype = getattr(torch, dtype_name)
    rng = np.random.default_rng(list(name.encode()))

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    codes = options.get("codes", "auto")
    geometry = KVGeometry(layers, kv_heads, dk, dv, dtype_name, block, codes)
    needed = [-(-c // block) for c in contexts]
    order = rng.permutation(sum(needed) + 3).astype(np.int32)
    span = BlockSpan(*options.get("span", (0, geometry.block_bytes)))
    arena = torch.full(((sum(needed) + 3) * span.block_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaN
    of_cpu = arena.cpu().clone()
    attention_of_cpu = choose_backend(of_cpu, geometry, span=span)
    tables = np.full((len(counts) + 2, max(needed) + 1), -1, np.int32)
    table_rows = rng.permutation(len(counts) + 2)[: len(counts)].astype(np.int32)
    taken = 0
    for row, blocks in zip(table_rows, needed, strict=True):
        tables[row, :blocks] = order[taken : taken + blocks]
        taken += blocks

    def draw_kv(*shape: int) -> torch.Tensor:
        return torch.from_numpy(odd_numbers(rng, codes, *shape)) if options.get("odd") else draw(*shape)

    context_kv = [(draw_kv(c, kv_heads, dk), draw_kv(c, kv_heads, dv)) for c in contexts]
    q_rows = [draw(n, heads, dk) for n in counts]
    sinks = rng.standard_normal(heads) if options.get("sinks") else None
    layer = layers - 1
    on = {"layer": layer, "scale": scale}
    extra = {"window": options.get("window", 0), "softcap": options.get("softcap", 0.0)}
    extra["chunk"] = options.get("chunk", 0)

    def step(
        pieces: list[tuple[int, int, int]], queries: list[torch.Tensor], splits: int | None = None
    ) -> torch.Tensor:
        """Compute tokens ``[start, stop)`` of each ``(row, start, stop)``."""
        rows = [r for r, _, _ in pieces]
        starts = np.cumsum([0] + [stop - start for _, start, stop in pieces]).astype(np.int32)
        ends = np.array([stop for _, _, stop in pieces], np.int32)
        step_rows = StepRows(tables, table_rows[rows], starts, ends)
        batch = TritonBatch(arena, geometry, step_rows, splits, span=span)
        # Storage is [H, T, D], handed over as [T, H, D]: the strides that a model's attention layer gives.
        k, v = (
            torch.cat([context_kv[r][part][a:b] for r, a, b in pieces]).transpose(0, 1).contiguous() for part in (0, 1)
        )
        q = torch.cat(queries)
        attention_of_cpu(step_rows).run_attention(layer, q.transpose(0, 1)[None], k[None], v[None], scale=scale)
        q, k, v = q.to(device), k.to(device), v.to(device)
        out = torch.zeros(len(q), heads, dv, dtype=dtype, device=device)
        sink_logits = None if sinks is None else torch.tensor(sinks, dtype=torch.float32, device=device)
        attend(batch, q=q, k=k.transpose(0, 1), v=v.transpose(0, 1), out=out, sinks=sink_logits, **on, **extra)
        return out

    before = [(r, 0, c - n) for r, (c, n) in enumerate(zip(contexts, counts, strict=True)) if c > n]
    if before:  # in one piece: what counts is the KV that is written
        step(before, [draw(stop, heads, dk) for _, _, stop in before], 1 if "splits" in options else None)
    asked = [(r, c - n, c) for r, (c, n) in enumerate(zip(contexts, counts, strict=True))]
    got = step(asked, q_rows, options.get("splits"))
    is_same = torch.equal(arena.cpu(), of_cpu)
    if options.get("odd"):
        return 0.0, is_same

    def kept(x: torch.Tensor) -> np.ndarray:
        return (x if codes == "auto" else values_of(*round_kv(x, geometry), geometry)).double().numpy()

    want = np.concatenate([
        reference(q.double().numpy(), kept(k), kept(v), scale, *extra.values(), sinks)
        for q, (k, v) in zip(q_rows, context_kv, strict=True)
    ])  # fmt: skip
    return float(np.abs(got.double().cpu().numpy() - want).max() / np.abs(want).max()), is_same


def compile_kernels(mode: str) -> None:
    """Compile for compute capabilities 8.0, 9.0 and 10.0, or kernels of codes for two (needs no device); print of
    each tensor core calls, wide loads, and products that are fused with a sum, or take what is small for zero."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memserve.base.types import KVGeometry
    from memserve.model.attention import triton_kernels
    from memserve.model.attention.triton_attention import TritonBatch
    from memserve.system import triton_bytes

    def constants_of(codes: str) -> tuple[dict[str, int], dict[str, int | str]]:
        geometry = KVGeometry(30, 3, 64, 64, "bfloat16", 32, codes)
        arena, one = torch.empty(geometry.block_bytes, dtype=torch.uint8), torch.ones(1, dtype=torch.int32)
        batch = TritonBatch.of_decodes(arena, geometry, one[None], one, one, 1)
        return batch.shape_constants(), batch.code_constants()

    shape, _ = constants_of("auto")
    tile = {"BLOCK_PAD": 32, "BLOCKS": 4, "GROUP": 3, "M": 64, "WIDE": False}
    tile |= dict.fromkeys(("WINDOW", "CHUNK", "SOFTCAP", "SINKS"), True)
    plain = {"CODES": "", "DEPTH": 1, "VALUES": 0, "DK_MAXIMA": 0, "DV_MAXIMA": 0, "DK_WIDTH": 1, "DV_WIDTH": 1}
    merge = {"HEADS": 9, "DV": 64, "DV_PAD": 64, "SPLITS": 3, "SPLITS_PAD": 4}
    seals = {"STRIPES": 128, "TURNS": 8, "COPIES": True}
    bf16, fp32, scalars = {"arena", "k", "v", "q", "out"}, {"pieces", "piece_stats", "sinks"}, {"scale", "softcap"}
    wide = {"source", "target", "src_at", "dst_at", "begins", "keys", "sums"}
    kernels = [
        ("write_kv", shape), ("attend_tile", shape | tile | plain | {"SPLITS": 1}),
        ("attend_tile", shape | tile | plain | {"SPLITS": 3}), ("combine_splits", merge),
        ("seal_kernel", seals), ("seal_kernel", seals | {"COPIES": False}), ("copy_rows_kernel", {"WORDS": 1024}),
    ]  # fmt: skip
    cases = list(itertools.product((80, 90, 100), kernels))
    if mode == "compile codes":
        cases = []
        for capability, codes in ((80, "fp8"), (90, "int4")):
            constants = {key: value for part in constants_of(codes) for key, value in part.items()}
            cases.append((capability, ("write_codes", constants)))
            cases.append((capability, ("attend_tile", constants | tile | {"BLOCKS": 2, "SPLITS": 1})))
    for capability, (name, constants) in cases:
        kernel, signature = getattr(triton_kernels, name, None) or getattr(triton_bytes, name), {}
        for arg in kernel.arg_names:
            is_word = arg == "arena" and constants.get("CODES")
            pointer = (
                "*i32"
                if is_word
                else "*bf16"
                if arg in bf16
                else "*fp32"
                if arg in fp32
                else "*i64"
                if arg in wide
                else "*i32"
            )
            plain = arg in ("layer", "window", "chunk", "table_stride", "words") or arg.endswith(("_token", "_head"))
            number = "fp32" if arg in scalars else "i64" if arg == "golden" else "i32" if plain else pointer
            signature[arg] = "constexpr" if arg in constants else number
        aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
        source = ASTSource(kernel, signature, constants, aligned)
        options = {"enable_fp_fusion": False} if name == "write_codes" else {}
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        inexact = ptx.count("fma.") * (name == "write_codes") + ptx.count("mul.ftz") + ptx.count("mul.rn.ftz")
        print(name, ptx.count("mma."), ptx.count("ld.global.v4") + ptx.count("cp.async"), inexact, flush=True)


def child(mode: str, **env: str) -> list[str]:
    """What this file prints when run as a program in ``mode``."""
    pytest.importorskip("triton", reason="the package triton (extra: test) is not installed")
    run = subprocess.run(
        [sys.executable, __file__, mode], env={**os.environ, "PYTHONPATH": str(SUPPORT), **env},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[float, bool]]:
    """:func:`run_case` of every case, from one child process."""
    lines = [line.rsplit(" ", 2) for line in child("interpret", TRITON_INTERPRET="1")]
    return {name: (float(error), same == "True") for name, error, same in lines}


def test_cuda_kernels_use_tensor_cores_and_wide_loads(tmp_path) -> None:
    lines = [line.split() for line in child("compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))]
    kernels = ["write_kv", "attend_tile", "attend_tile", "combine_splits", *["seal_kernel"] * 2, "copy_rows_kernel"]
    assert [line[0] for line in lines] == kernels * 3
    for _, tensor_core_calls, wide_loads, _ in (line for line in lines if line[0] == "attend_tile"):
        assert int(tensor_core_calls) > 0 and int(wide_loads) > 0, "a page is contiguous: 16 bytes a load"


def test_cuda_kernels_of_codes_are_exact(tmp_path) -> None:
    lines = [line.split() for line in child("compile codes", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))]
    assert [line[0] for line in lines] == ["write_codes", "attend_tile"] * 2
    assert all(int(line[1]) > 0 and int(line[2]) > 0 for line in lines if line[0] == "attend_tile")
    assert [line[3] for line in lines] == ["0"] * 4, "the bytes of a CPU, and the least numbers of e4m3"


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_float64_reference(results: dict[str, tuple[float, bool]], name: str) -> None:
    error, is_same = results[name]
    assert error < TOLERANCE[CASES[name][0]] and is_same


def test_missing_triton_is_an_error_with_install_hint(monkeypatch) -> None:
    from memserve.base.errors import UserError
    from memserve.model.attention import triton_attention

    monkeypatch.setattr(triton_attention, "available", lambda: False)
    with pytest.raises(UserError, match="pip install triton"):
        triton_attention._kernels()


if __name__ == "__main__" and sys.argv[1].startswith("compile"):
    compile_kernels(sys.argv[1])
elif __name__ == "__main__":
    from lean_imports import interpret_quickly

    interpret_quickly()
    for case in CASES:
        print(case, *run_case(case), flush=True)
