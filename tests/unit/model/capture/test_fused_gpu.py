"""Fused operations of a GPU: interpreted on a CPU, beside those of the CPU, and in a captured forward.

A child process runs them: whether kernels are interpreted is decided once, when triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[3] / "support"
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_neox")


def operations() -> None:
    """Print each operation's largest difference, relative to the largest result."""
    import torch

    from memserve.model.capture import operations as fused
    from memserve.model.gpu import linears as fused_gpu

    for name in TOLERANCE:
        torch.manual_seed(len(name))
        dtype = getattr(torch, name)

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape).to(dtype)

        gain, wide = draw(48, dtype=torch.float32), draw(5, 7 * 96)
        dense = draw(5, 48)
        heads = wide.view(1, 5, 7, 96)[..., 16:64]  # of a wider row: strides on three levels
        tables = draw(1, 1, 5, 48), draw(1, 1, 5, 48)
        calls = {
            "rms_norm": [(heads, gain, 1e-5, first) for first in (True, False)],
            "add_rms_norm": [(x, draw(5, 48), gain, 1e-5, x is dense) for x in (dense, wide[:, 48:96])],
            "gated": [(wide[:, :300], wide[:, 300:600], kind) for kind in fused.GATE_CODES],
            "rotary": [
                (heads.transpose(1, 2), *tables, 2),
                (heads, *(table.transpose(1, 2) for table in tables), 1),
            ],
        }  # fmt: skip
        for operation, arguments in calls.items():
            for these in arguments:
                want, got = (getattr(module, operation)(*these) for module in (fused, fused_gpu))
                pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
                for one, other in pairs:
                    assert one.shape == other.shape and one.dtype == other.dtype
                    error = float((one.float() - other.float()).abs().max() / one.float().abs().max())
                    print(name, operation, error)
        gate, up = draw(3, 50), draw(3, 50)
        want = torch.nn.functional.gelu(gate) * up
        error = float((fused_gpu.gated(gate, up, "gelu").float() - want.float()).abs().max() / want.float().abs().max())
        print(name, "gelu", error)


def forwards() -> None:
    """Print how far the logits of forwards captured as on a GPU are from the modules'."""
    import torch

    from lean_imports import interpret_quickly, leave_compiler_out

    leave_compiler_out()
    interpret_quickly()
    from memserve.model.attention.context import step_attention
    from memserve.model.capture import forward as capture
    from memserve.model.forward import EagerForward
    from memserve.model.gpu import linears as fused_gpu
    from memserve.model.linears import JoinedLinear
    from memserve.model.loading.probe import DenseAttention
    from tiny_models import loaded, tiny_module

    torch.Tensor.is_cuda = property(lambda _: True)  # what the passes ask
    capture._TRIALS = ((1, 1), (5, 2))  # a program computes a row, and rows are interpreted one after the other
    for family in FAMILIES:
        module = loaded(tiny_module(family)).module
        captured = capture.capture_forward(module)
        assert captured is not None and captured.native is None, family
        seen = [id(value) for value in captured._run.__globals__.values()]
        used = {name for name, operation in fused_gpu.OPERATIONS.items() if id(operation) in seen}
        assert len(used) == {"gpt_neox": 1}.get(family, 4), (family, used)
        inputs = capture._inputs(9, 3, 131, None, 5)
        with step_attention(DenseAttention()):
            want, got = EagerForward(module, pack=False)(**inputs), captured(**inputs)
        print(family, float((want - got).abs().max() / want.abs().max()))
        joined = [value for value in captured._run.__globals__.values() if isinstance(value, JoinedLinear)]
        assert joined, "linears are joined"
        if family == "llama":
            layer = module.model.layers[0].self_attn
            stored = {projection.weight.untyped_storage().data_ptr() for projection in (layer.q_proj, layer.k_proj)}
            assert len(stored) == 1, "the module's weights are parts of the joined one: the model is held once"


def child(name: str) -> list[list[str]]:
    paths = os.pathsep.join(path for path in (str(SUPPORT), os.environ.get("PYTHONPATH", "")) if path)
    done = subprocess.run(
        [sys.executable, __file__, name], capture_output=True, text=True, timeout=200,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_operations_are_those_of_the_cpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    lines = child("operations")
    assert {operation for _, operation, _ in lines} == {"rms_norm", "add_rms_norm", "gated", "rotary", "gelu"}
    wrong = [line for line in lines if not float(line[2]) <= TOLERANCE[line[0]]]
    assert not wrong, wrong


def test_forwards_with_them_are_those_of_the_modules() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    lines = child("forwards")
    assert [family for family, _ in lines] == list(FAMILIES)
    assert all(float(error) < 1e-5 for _, error in lines), lines


if __name__ == "__main__":
    {"operations": operations, "forwards": forwards}[sys.argv[1]]()
