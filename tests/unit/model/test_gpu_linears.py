"""Linears of few rows on a GPU: kernels interpreted beside float64, and the choice among them.

A child process runs them: whether kernels are interpreted is decided once, when triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-3}  # interpreted, bfloat16 is cut off, not rounded


def kernels() -> dict[str, float]:
    """The largest difference from float64 of each dtype, relative to the largest result."""
    import torch

    from memserve.model.gpu.linears import FEW_ROWS, ONE_ROW, few_rows, one_row

    found: dict[str, float] = {}
    torch.manual_seed(3)
    for name in TOLERANCE:
        dtype = getattr(torch, name)
        for n, k, is_biased in ((50, 96, False), (64, 1024, True), (33, 1000, True)):
            weight = (torch.randn(n, k) / k**0.5).to(dtype)
            bias = torch.randn(n).to(dtype) if is_biased else None
            for rows in (1, 3, 20):
                x = torch.randn(rows, 2 * k).to(dtype)[:, k:]  # of a wider row
                want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
                calls = [(few_rows, FEW_ROWS[0]), *([(one_row, ONE_ROW[0])] if rows == 1 else [])]
                for kernel, options in calls:
                    for result in (dtype, torch.float32):
                        got = kernel(x[None], weight, bias, result, options)
                        assert got.dtype == result and got.shape == (1, rows, n)
                        error = float((got[0].double() - want).abs().max() / want.abs().max())
                        found[name] = max(found.get(name, 0.0), error)
    return found


def choice() -> dict[str, Any]:
    """What is chosen where the library is quickest, where a kernel is, where that one is wrong, or breaks."""
    import torch

    from memserve.model.gpu import linears as gpu_linears
    from memserve.model.linears import JoinedLinear

    def layer(dtype: torch.dtype = torch.bfloat16) -> JoinedLinear:
        return JoinedLinear([torch.randn(24, 64).to(dtype), torch.randn(8, 64).to(dtype)], None)

    def favouring(kernel: Any) -> Any:
        return lambda calls: 1.0 if calls[0].func is kernel else 2.0

    def uses(one: JoinedLinear) -> dict[int, str]:
        return {rows: kernel.func.__name__ for rows, kernel in one._kernels.items()}

    found: dict[str, Any] = {}
    pair = [layer(), layer()]
    gpu_linears.choose_kernels(pair, favouring(gpu_linears.few_rows))
    found["few"] = [uses(one) for one in pair]
    x = torch.randn(5, 64).to(torch.bfloat16)
    want, got = pair[0].compute_plain(x).float(), pair[0](x).float()
    found["same"] = float((want - got).abs().max() / want.abs().max())
    found["many"] = bool(torch.equal(pair[0](x.repeat(20, 1)), pair[0].compute_plain(x.repeat(20, 1))))
    found["none at all"] = pair[0](x[:0]).shape == (0, 32)
    gpu_linears.choose_kernels(pair, favouring(gpu_linears.one_row))
    found["one"] = [uses(one) for one in pair]
    gpu_linears.choose_kernels(pair, favouring(None))
    found["library"] = [uses(one) for one in pair]
    exact = layer(torch.float32)
    gpu_linears.choose_kernels([exact], favouring(gpu_linears.few_rows))
    found["float32"] = uses(exact)
    right = gpu_linears.few_rows

    def wrong(*arguments: Any, **options: Any) -> Any:
        return right(*arguments, **options) * 1.1

    def breaks(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    for odd in (wrong, breaks):
        gpu_linears.few_rows = odd
        gpu_linears.choose_kernels(pair, favouring(odd))
        found[odd.__name__] = uses(pair[0])
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    pytest.importorskip("triton", reason="the package triton (extra: test) is not installed")
    run = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_kernels_of_few_rows_equal_float64(results: dict[str, Any]) -> None:
    errors = results["kernels"]
    assert errors.keys() == TOLERANCE.keys()
    assert all(errors[name] < TOLERANCE[name] for name in TOLERANCE), errors


def test_the_quickest_right_kernel_is_chosen(results: dict[str, Any]) -> None:
    found = results["choice"]
    assert found["few"] == [dict.fromkeys(("1", "16", "32", "64"), "few_rows")] * 2
    assert found["same"] < 1e-2 and found["many"] and found["none at all"]
    assert found["one"] == [{"1": "one_row"}] * 2 and found["library"] == [{}, {}], "an earlier choice is forgotten"
    assert found["float32"] == found["wrong"] == found["breaks"] == {}


if __name__ == "__main__":
    print(json.dumps({"kernels": kernels(), "choice": choice()}))
