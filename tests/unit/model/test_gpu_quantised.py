"""Quantised weights on a GPU: kernels interpreted beside the dequantised weight, and the models that have them.

A child process runs them: whether kernels are interpreted is decided once, when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from interpreted import SUPPORT, results_of, run_devices

SHARE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 2e-2}
"""How far sums may be from float64, as a share of the largest; interpreted, bfloat16 is cut off, not rounded."""
COMPILES = "compile"
ROWS = (1, 3, 16, 64, 200)


def _on_device(kind: str, n: int, k: int, dtype: Any = None) -> tuple[Any, Any]:
    """A random weight as it lies on a GPU, and its numbers as a CPU has them."""
    import torch

    from memserve.model.gpu.weights import unpack_weight
    from memserve.model.quantised import QuantisedLinear
    from quantised_blocks import random_packed

    packed = random_packed(kind, n, k, seed=n)
    numbers = QuantisedLinear([packed]).dequantised()
    return unpack_weight(packed, torch.device("cpu"), dtype or torch.float32), numbers


def _layer(weight: Any, bias: Any = None, *, wide: bool = False, panel_bytes: int = 1 << 16) -> Any:
    import torch

    from memserve.model.gpu.quantised import DeviceQuantisedLinear

    return DeviceQuantisedLinear(weight, bias, torch.empty(panel_bytes, dtype=torch.uint8), wide=wide)


def numbers_are_those_of_a_cpu() -> bool:
    """To the bit, of every format; rows of an embedding and all; in the file's bits, rounded up to half bytes."""
    import torch

    from memserve import _kernels
    from memserve.model.quantised import FORMATS

    for kind in FORMATS:
        k = 3 * _kernels.quantised_block_inputs(kind)
        for n in (1, 70):
            weight, numbers = _on_device(kind, n, k)
            layer = _layer(weight)
            assert weight.shape == (n, k)
            assert torch.equal(layer.dequantised(), numbers), (kind, n)
            ids = torch.tensor([[n - 1, 0], [n // 2, n - 1]])
            assert torch.equal(layer.rows(ids, torch.float16), numbers[ids].half()), (kind, n)
    for kind, bits in (("Q4_K", 4.625), ("INT4_128", 4.25), ("MXFP4", 4.5), ("Q8_0", 8.5), ("Q6_K", 8.5625)):
        weight, _ = _on_device(kind, 64, 512)
        assert weight.nbytes == 64 * 512 * bits / 8, kind
    return True


def products_are_those_of_the_numbers() -> bool:
    """Few rows by both kernels, many by panels that end in the middle; of every format, and of every dtype."""
    import torch

    from fake_gpu import LARGE_PIECES
    from memserve import _kernels
    from memserve.model.gpu.quantised import few_rows_stored, one_row_stored
    from memserve.model.quantised import FORMATS

    torch.manual_seed(3)
    for place, kind in enumerate(FORMATS):
        block = _kernels.quantised_block_inputs(kind)
        for name in SHARE if kind in ("Q4_K", "FP8_128") else ("float32",):
            dtype, n, k = getattr(torch, name), 33, block * (3 if block == 32 else 2)
            weight, numbers = _on_device(kind, n, k, dtype)
            bias = None if place % 2 else torch.randn(n).to(dtype)
            for rows in ROWS if kind == "Q4_K" and name == "float32" else (1, 20):
                x = torch.randn(rows, 2 * k).to(dtype)[:, k:]  # of a wider row
                want = x.double() @ numbers.double().t() + (0 if bias is None else bias.double())
                layer = _layer(weight, bias, wide=True, panel_bytes=k * dtype.itemsize * 20)
                results = [layer(x)] if rows > 64 else [_layer(weight, bias)(x), layer(x)]
                if rows <= 64:
                    results += [few_rows_stored(x, weight, bias, dtype, LARGE_PIECES)]
                if rows == 1:
                    results += [one_row_stored(x, weight, bias, torch.float32, LARGE_PIECES)]
                assert results[0].dtype == (dtype if rows <= 64 else torch.float32)
                for number, result in enumerate(results):
                    error = float((result.double() - want).abs().max() / want.abs().max())
                    assert error <= SHARE[name] and result.shape == want.shape, (kind, name, rows, number, error)
    assert _layer(weight)(x[:0]).shape == (0, n)
    return True


def the_quickest_right_kernel_is_chosen() -> bool:
    """For weights of one kind together; without a choice, and of float32, torch multiplies panels."""
    import torch

    from fake_gpu import LARGE_PIECES
    from memserve.model.gpu import linears
    from memserve.model.gpu.quantised import few_rows_stored
    from memserve.model.linears import ROW_BUCKETS

    def favouring(name: str) -> Any:
        return lambda calls: 1.0 if calls[0].func.__name__ == name else 2.0

    def uses(layer: Any) -> dict[int, str]:
        return {rows: kernel.func.__name__ for rows, kernel in layer._kernels.items()}

    (first, numbers), (second, _) = (_on_device(kind, 33, 256, torch.float16) for kind in ("INT4_32", "Q4_K"))
    layers = [_layer(first), _layer(second)]
    assert [uses(layer) for layer in layers] == [{}, {}]
    linears.choose_kernels(layers, favouring("few_rows_stored"))
    assert [uses(layer) for layer in layers] == [dict.fromkeys(ROW_BUCKETS, "few_rows_stored")] * 2
    x = torch.randn(5, 256).half()
    want = x.double() @ numbers.double().t()
    assert float((layers[0](x).double() - want).abs().max() / want.abs().max()) <= SHARE["float16"]
    linears.FEW_ROWS_STORED = (LARGE_PIECES,)
    linears.choose_kernels(layers[1:], favouring("one_row_stored"))
    assert uses(layers[1]) == {1: "one_row_stored"}
    linears.few_rows_stored = lambda *arguments, **options: right(*arguments, **options) * 1.1
    right = few_rows_stored
    linears.choose_kernels(layers[1:], favouring("<lambda>"))
    assert uses(layers[1]) == {}, "a wrong one is not taken"
    linears.choose_kernels([exact := _layer(_on_device("Q4_0", 32, 64)[0])], favouring("few_rows_stored"))
    assert uses(exact) == {}
    return True


def _loaded_on_device(path: str, dtype: str, *, takes_all: bool = False) -> Any:
    """As the loader gives it on a GPU, but that its memory is the host's. ``takes_all``: in float32 as well."""
    import torch

    from memserve.model.gpu import stored
    from memserve.model.loading import loader

    before = stored.keep_on_device, loader._choose_device, loader._takes_stored
    stored.keep_on_device = lambda module, place: before[0](module, torch.device("cpu"))
    loader._choose_device = lambda device: torch.device("cuda")
    if takes_all:
        loader._takes_stored = lambda *arguments, **options: True
    try:
        return loader.load_model(path, dtype, quantization="auto")
    finally:
        stored.keep_on_device, loader._choose_device, loader._takes_stored = before


def a_file_is_kept_and_counted() -> bool:
    """A .gguf file with a tied head: in 16 bits, and never in float32 or for workers and adapters."""
    import torch

    from fake_gpu import capture_as_on_gpu
    from gguf_files import convert_here, write_gguf
    from memserve.model.forward import EagerForward
    from memserve.model.loading import loader
    from memserve.model.loading.stored import stored_of
    from memserve.model.quantised import QuantisedEmbedding
    from quantised_formats import error, logits
    from tiny_models import tiny_module

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        convert_here(patch)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        path = str(write_gguf(tiny_module("llama", **sizes), Path(folder) / "tiny.Q8_0.gguf"))
        numbers = loader.load_model(path, "float32", "cpu")
        half = _loaded_on_device(path, "float16")
    gpu = torch.device("cuda")
    asked = (("auto", ""), ("auto", "adapters"), ("float32", ""))
    assert [loader._takes_stored(dtype, gpu, changes=changes) for dtype, changes in asked] == [True, False, False]
    assert (half.quantization, half.activation_bits) == ("auto", 0)
    assert half.fingerprint != numbers.fingerprint
    matrices = [value for value in half.module.parameters() if value.dim() == 2]
    small = sum(value.nbytes for value in half.module.parameters() if value.dim() == 1)
    assert all(stored_of(half.module).has(value.detach()) for value in matrices)
    assert loader.model_sizes(half).weights_bytes == small + sum(value.numel() for value in matrices) * 34 // 32
    assert all(value.untyped_storage().nbytes() <= 2 * len(value) for value in matrices), "no numbers beside them"
    forward = capture_as_on_gpu(half.module)
    assert any(isinstance(value, QuantisedEmbedding) for value in forward._run.__globals__.values())
    assert len(forward._linears) == 2 * 4 + 1, "those of one input are joined"
    attention = half.module.model.layers[0].self_attn
    forms = [stored_of(half.module).of(part.weight.detach()) for part in (attention.q_proj, attention.k_proj)]
    assert len({form.packed().values.untyped_storage().data_ptr() for form in forms}) == 1, "a model is held once"
    want = logits(_eager(numbers), 9, 3)
    assert error(logits(EagerForward(half.module), 9, 3), want) < 1e-2, "the module alone computes with them, too"
    for tokens in (1, 80):
        assert error(logits(forward, tokens, min(tokens, 3)), logits(_eager(numbers), tokens, min(tokens, 3))) < 1e-2
    return True


def folders_are_kept() -> bool:
    """GPTQ with inputs in an order of their own, AWQ, and numbers of 8 bits; experts become numbers."""
    from fake_gpu import capture_as_on_gpu
    from memserve.model.forward import EagerForward
    from memserve.model.loading.stored import stored_of
    from memserve.model.quantised import StoredLinear
    from quantised_formats import error, expected_logits, folders_of, logits

    for kind in ("gptq4_order", "awq4", "fp8_block"):
        with TemporaryDirectory() as folder:
            quantised, plain = folders_of("llama", kind, Path(folder), num_hidden_layers=1)
            model = _loaded_on_device(str(quantised), "float32", takes_all=True)
            want = expected_logits(plain, 9, 3)
        forward = capture_as_on_gpu(model.module)
        assert sum(isinstance(layer, StoredLinear) for layer in forward._linears) >= 4, kind
        assert error(logits(forward, 9, 3), want) < 1e-5, kind
    with TemporaryDirectory() as folder:
        quantised, plain = folders_of("qwen3_moe", "gptq4", Path(folder), num_hidden_layers=1)
        model, want = _loaded_on_device(str(quantised), "float32", takes_all=True), expected_logits(plain, 9, 3)
    assert len(stored_of(model.module)) == 4, "experts are numbers"
    assert error(logits(EagerForward(model.module), 9, 3), want) < 1e-5
    return True


def _eager(model: Any) -> Any:
    from memserve.model.forward import EagerForward

    return EagerForward(model.module, pack=False)


def compile_kernels() -> None:
    """Compile for Q4_K, which needs no device; print tensor core calls and wide loads of each kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memserve.model.gpu import quantised

    fixed = {"HALVES": 2, "KIND": 0, "ZERO": 0, "BLOCK": 256, "GROUP": 32, "LEVELS": 1, "MINIMUM": 2, "BIAS": 1}
    few, one = fixed | quantised.FEW_ROWS_STORED[0], fixed | quantised.ONE_ROW_STORED[0]
    types = {"values": "*u8", "scales": "*fp16", "minima": "*fp16", "levels": "*i8", "minimum_levels": "*i8",
             "table": "*fp32", "ids": "*i64", "x": "*bf16", "y": "*bf16", "bias": "*bf16"}  # fmt: skip
    for name, capability, constants in (
        *(("few_rows_stored_kernel", capability, few | {"ROWS": 16, "WIDE": False}) for capability in (80, 100)),
        ("one_row_stored_kernel", 90, one), ("write_numbers_kernel", 90, fixed | quantised._WRITES | {"PICKS": True}),
    ):  # fmt: skip
        kernel = getattr(quantised, name)
        own = {arg: constants[arg] for arg in kernel.arg_names if arg in constants}
        signature = {arg: "constexpr" if arg in own else types.get(arg, "i32") for arg in kernel.arg_names}
        aligned = {(place,): [["tt.divisibility", 16]] for place, (arg, kind) in enumerate(signature.items())
                   if kind.startswith("*") or arg in ("k", "stride_x")}  # fmt: skip
        options = {key: value for key, value in constants.items() if key.startswith("num_")}
        source = ASTSource(kernel, signature, own, aligned)
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        print(name, ptx.count("mma."), ptx.count("ld.global.v4") + ptx.count("cp.async"), flush=True)


SCENARIOS = {
    "numbers are those of a CPU": numbers_are_those_of_a_cpu,
    "products are those of the numbers": products_are_those_of_the_numbers,
    "the quickest right kernel is chosen": the_quickest_right_kernel_is_chosen,
    "a file is kept and counted": a_file_is_kept_and_counted,
    "folders are kept": folders_are_kept,
}


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Scenario -> "" or what went wrong."""
    return results_of(__file__)


@pytest.mark.parametrize("name", SCENARIOS)
def test_quantised_weights_of_a_gpu(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def test_kernels_compile_with_wide_loads(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the package triton (extra: test) is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, COMPILES], capture_output=True, text=True, timeout=240,
        env=env | {"PYTHONPATH": str(SUPPORT), "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 4
    assert all(int(loads) > 0 for _, _, loads in lines), lines
    assert all(int(products) > 0 for name, products, _ in lines if name.startswith("few")), lines


if __name__ == "__main__" and sys.argv[1:] == [COMPILES]:
    compile_kernels()
elif __name__ == "__main__":
    from fake_gpu import write_large_pieces

    write_large_pieces()
    run_devices(SCENARIOS)
