"""Weights that packages have quantised and packed, as the packages dequantise them, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from memserve.model.loading.formats.checkpoint import QuantisedCheckpoint
from memserve.model.quantised import QuantisedLinear
from packages_weights import FILE, decoded, digest

CASES = json.loads(FILE.read_text())["cases"]


def checkpoint_of(case: dict[str, Any], folder: Path) -> QuantisedCheckpoint:
    tensors = {name: value.clone() for name, value in decoded(case["tensors"]).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"} | case["metadata"])
    return QuantisedCheckpoint(folder, "tiny", case["config"])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_numbers_are_those_of_the_package(case: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(case, tmp_path)
    assert list(checkpoint.tensors) == ["layer.weight"] == checkpoint.names_in(tmp_path / "model.safetensors")
    assert digest(checkpoint.numbers("layer.weight", getattr(torch, case["dtype"]))) == case["sha256"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_kernels_have_the_same_numbers(case: dict[str, Any], tmp_path: Path) -> None:
    tensor = checkpoint_of(case, tmp_path).tensors["layer.weight"]
    form, numbers = tensor.form(), tensor.numbers(torch.float32)
    assert not isinstance(form, str), form
    outputs = torch.tensor([3, 31, 0])
    assert torch.equal(QuantisedLinear([form.packed()]).dequantised(), numbers)
    assert torch.equal(form.sampled(outputs, torch.float32), numbers[outputs])
