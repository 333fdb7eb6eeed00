"""Models built without their weights: no Python arithmetic, and nothing else than transformers alone would build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memserve.model.loading.checkpoint import load_module
from memserve.model.loading.skeleton import build_skeleton, described_weights
from tiny_models import save_folder, tiny_module


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "opt", "gpt_neox"])
def test_loaded_tensors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Buffers, too, which no file has: frequencies of rotary positions."""
    from transformers import AutoModelForCausalLM

    folder = save_folder(tiny_module(family), tmp_path / family)
    loaded = load_module(folder, family, torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for named in ("named_parameters", "named_buffers"):
        own, theirs = dict(getattr(loaded, named)()), dict(getattr(expected, named)())
        assert own.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) and not tensor.is_meta for name, tensor in own.items())
    assert described_weights(folder) >= sum(parameter.numel() for parameter in loaded.parameters())


def test_model_that_mixes_numbers_and_shapes_is_built() -> None:
    """gemma4 joins such ranges with tensors that have no bytes."""

    def build() -> torch.Tensor:
        with torch.device("meta"):
            return torch.arange(4) + torch.ones(4, dtype=torch.int64)

    assert build_skeleton(build).is_meta


def test_ranges_are_numbers_and_nothing_is_initialised() -> None:
    def build() -> tuple[torch.Tensor, torch.nn.Linear]:
        with torch.device("meta"):
            return 1.0 / 2.0 ** torch.arange(0, 4, dtype=torch.float32), torch.nn.Linear(3, 5)

    frequencies, linear = build_skeleton(build)
    assert frequencies.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert linear.weight.is_meta and linear.weight.shape == (5, 3)


def test_error_of_the_model_is_its_own() -> None:
    def build() -> None:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        build_skeleton(build)


def test_load_imports_no_sympy(tmp_path: Path) -> None:
    folder = save_folder(tiny_module("llama"), tmp_path / "llama")
    program = f"""
import sys
from pathlib import Path
from memserve.system.imports import leave_compiler_out
leave_compiler_out("cpu")
import torch
from memserve.model.loading.checkpoint import load_module
load_module(Path({str(folder)!r}), "llama", torch.float32)
print("sympy" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert run.stdout.strip() == "False", run.stderr[-2000:]
