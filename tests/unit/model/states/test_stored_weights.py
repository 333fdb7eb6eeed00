"""Models with recurrent states whose weights stay quantised: captured, module by module, and served."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_answers import check_cold_and_warm, resumable, serving
from gguf_files import convert_here, write_gguf
from memserve.base.types import FINE_BITS
from memserve.model.capture.forward import best_forward
from memserve.model.forward import EagerForward, linears_alone
from memserve.model.loading import precision
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.loading.stored import stored_of
from memserve.model.quantised import QuantisedLinear
from quantised_formats import captured, error, expected_logits, folders_of, load, logits
from tiny_models import STATEFUL, prompt, tiny_module

AS_MODULES = ("jamba", "mamba")
"""Families whose layers run as transformers' modules."""
KINDS = [
    *((family, "w8a16") for family in STATEFUL),
    *((family, "gptq4_order") for family in ("qwen3_5", "jamba", "mamba", "lfm2")),
    *((family, "mxfp4") for family in ("qwen3_next", "falcon_h1")),
]
"""Also with few bits and inputs in an order of their own, where the sizes are whole words."""
PROMPTS = [prompt(length, seed).tolist() for seed, length in enumerate((1, 40, 64, 100))]


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stored weights in float32, with activations of 15 bits: what is left is nearly exact."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(precision, "DIVERGENCE_MAX", 0.0)


def stored_linears(model: LoadedModel) -> list[str]:
    """Names of the linears whose weights have no numbers."""
    stored = stored_of(model.module)
    linears = ((name, part) for name, part in model.module.named_modules() if isinstance(part, torch.nn.Linear))
    return [name for name, part in linears if stored.of(part.weight.detach()) is not None]


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_logits_are_those_of_the_dequantised_values(
    family: str, kind: str, tmp_path: Path, in_float32: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Of transformers in float32; captured where layers are recognised, and as modules."""
    quantised, plain = folders_of(family, kind, tmp_path)
    want = expected_logits(plain)
    with caplog.at_level(logging.WARNING, "memserve.model.capture"):
        models = [load(quantised, "auto", "auto") for _ in range(2)]
        names = stored_linears(models[0])
        forwards = [best_forward(models[0].module), EagerForward(models[1].module)]
    assert ("not captured" in caplog.text) == (family in AS_MODULES)
    assert any("mamba" in name or "mixer" in name or "linear_attn" in name or ".conv." in name for name in names)
    for model, forward in zip(models, forwards, strict=True):
        assert model.dtype == torch.float32 and model.activation_bits == FINE_BITS and model.states
        assert 0 < error(logits(forward, model=model), want) < 2e-3


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba", "lfm2", "mamba"])
def test_answers_are_those_of_the_numbers(family: str, tmp_path: Path, in_float32: None) -> None:
    """Cold, and behind snapshots."""
    from transformers import AutoModelForCausalLM

    quantised, plain = folders_of(family, "w8a16", tmp_path)
    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with serving(quantised, dtype="auto") as llm:
        check_cold_and_warm(llm, module, PROMPTS, [resumable(len(tokens)) for tokens in PROMPTS])


@pytest.mark.parametrize("family", AS_MODULES)
def test_weights_that_layers_multiply_themselves_are_numbers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mamba's first version turns its time steps' weight: it would be dequantised in each step."""
    quantised, plain = folders_of(family, "w8a16", tmp_path)
    with caplog.at_level(logging.INFO, "memserve"):
        model, numbers = load(quantised, "bfloat16", "auto"), load(plain, "bfloat16")
    assert "2 weights are computed with as numbers, which their layers need" in caplog.text
    alone, values = linears_alone(model.module), dict(numbers.module.named_parameters())
    parts = {name: part for name, part in model.module.named_modules() if id(part) in alone}
    assert len(parts) == 2 and not set(parts) & set(stored_linears(model))
    assert all(torch.equal(part.weight, values[f"{name}.weight"]) for name, part in parts.items())


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_a_file_keeps_its_weights(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GGUF; its convolutions are numbers in any case."""
    convert_here(monkeypatch)
    sizes = (
        {"time_step_rank": 32} if family == "mamba" else {"intermediate_size": 96, "block_auto_adjust_ff_dim": False}
    )
    path = write_gguf(tiny_module(family, hidden_size=64, **sizes), tmp_path / "tiny.gguf")
    numbers, model = (load_model(str(path), "bfloat16", "cpu", quantization=kind) for kind in ("none", "auto"))
    values, stored = dict(numbers.module.named_parameters()), stored_of(model.module)
    assert len(stored) == {"lfm2": 18, "mamba": 7}[family]
    for name, value in model.module.named_parameters():
        form = stored.of(value.detach())
        held = value if form is None else QuantisedLinear([form.packed()]).dequantised(torch.bfloat16)
        assert torch.equal(held, values[name]), name
    exact = load_model(str(path), "float32", "cpu")
    want = logits(EagerForward(exact.module), model=exact)
    forward: Any = captured(model) if family == "lfm2" else EagerForward(model.module)
    assert 0 < error(logits(forward, model=model), want) < 0.1
