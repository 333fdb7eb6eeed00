"""Weights that stay quantised, cut for several workers: together they compute what the dequantised values do."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gguf_files import convert_here, write_gguf
from memserve import LLM
from memserve.base.config import EngineOptions
from memserve.base.kv_layout import Parallel
from memserve.base.types import FINE_BITS
from memserve.host.build import build_parts
from memserve.model.attention.context import OrderedAttention, step_attention
from memserve.model.capture.forward import CapturedForward, best_forward
from memserve.model.forward import EagerForward
from memserve.model.loading import precision
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.loading.probe import DenseAttention
from memserve.model.loading.stored import stored_of
from memserve.model.quantised import QuantisedLinear
from memserve.model.states.layers import LoneStates, states_of, step_states
from memserve.model.workers.cuts import CutWeight
from memserve.model.workers.group import WorkerGroup, collectives
from memserve.model.workers.plans import plan_division
from memserve.model.workers.processes import shares_of
from memserve.model.workers.sharding import shard
from quantised_folders import mxfp4_folder
from quantised_formats import SIZES, error, expected_logits, folders_of, load
from tiny_models import VOCAB, save_folder, tiny_module
from worker_threads import crews, run_workers

TOKENS, ROWS = 40, 8
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
"""So that each of two workers has whole blocks of inputs."""


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stored weights in float32, with activations of 15 bits: what is left is nearly exact."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(precision, "DIVERGENCE_MAX", 0.0)


def divided(folder: Path, parallel: Parallel) -> tuple[LoadedModel, list[Any], list[WorkerGroup], list[Any]]:
    """A model, its parts, and those that meet; the last are kept alive for them."""
    whole = load(folder, "auto", "auto")
    division = plan_division(whole.module, whole.geometry, only_stages=parallel.tensor == 1)
    found = shares_of(parallel, whole, division)
    modules = [load(folder, "auto", "auto").module for _ in found]
    vocabularies = {shard(module, share, whole.geometry) for module, share in zip(modules, found, strict=True)}
    return whole, modules, *crews(found, vocabularies.pop())


def together(parts: tuple[LoadedModel, list[Any], list[WorkerGroup], list[Any]], *, capture: bool) -> Tensor:
    """Logits of the last rows of a prompt."""
    whole, modules, members, _regions = parts

    def work(crew: WorkerGroup, module: Any) -> Tensor:
        forward = best_forward(module, crew) if capture else EagerForward(module)
        assert not capture or isinstance(forward, CapturedForward) or whole.states
        ids, places = (torch.arange(TOKENS) + 1) * 7919 % VOCAB, torch.arange(TOKENS)
        states = LoneStates(states_of(module).geometry, torch.float32) if states_of(module) else None
        with step_attention(OrderedAttention(DenseAttention())), step_states(states), collectives(crew):
            return crew.gather_logits(forward(ids, places, places[-ROWS:]))

    works = [(crew, partial(work, crew, module)) for crew, module in zip(members, modules, strict=True)]
    logits: Tensor = run_workers(works)[0]
    return logits


@pytest.mark.parametrize("capture", [False, True], ids=["as it is", "captured"])
@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(1, 3), Parallel(2, 2)], ids=lambda found: found.text)
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "w4a16"), ("llama", "gptq4_order"), ("qwen3", "awq4"), ("qwen3_moe", "w8a8"), ("qwen3_5", "w8a16"),
     ("falcon_h1", "w8a16"), ("lfm2", "mxfp4"), ("jamba", "w8a16")],
)  # fmt: skip
def test_workers_compute_what_the_dequantised_values_do(
    family: str, kind: str, parallel: Parallel, capture: bool, tmp_path: Path
) -> None:
    sizes = WIDE if family == "llama" else {}
    quantised, plain = folders_of(family, kind, tmp_path, **sizes)
    parts = divided(quantised, parallel)
    assert all(len(stored_of(module)) for module in parts[1])
    assert 0 < error(together(parts, capture=capture), expected_logits(plain, TOKENS, ROWS)) < 2e-3


def test_each_worker_keeps_its_part_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All linears of layers are cut as they are stored, and what workers have of them is the whole."""
    quantised, _ = folders_of("llama", "w4a16", tmp_path, **WIDE)
    with caplog.at_level(logging.INFO, "memserve"):
        whole, modules, *_ = divided(quantised, Parallel(2))
    assert "by this worker" not in caplog.text
    linears = {name: part for name, part in whole.module.named_modules() if isinstance(part, torch.nn.Linear)}
    values = {name: numbers(whole.module, part) for name, part in linears.items() if name != "lm_head"}
    for name, value in values.items():
        cut = [part for module in modules for other, part in module.named_modules()
               if other.removesuffix(".linear") == name and isinstance(part, torch.nn.Linear)]  # fmt: skip
        forms = [stored_of(module).of(part.weight.detach()) for module, part in zip(modules, cut, strict=True)]
        assert all(isinstance(form, CutWeight) for form in forms)
        dim = 0 if cut[0].weight.shape[1] == value.shape[1] else 1
        assert torch.equal(torch.cat([numbers(*pair) for pair in zip(modules, cut, strict=True)], dim), value)
        assert not any(part.weight.any() for part in cut)
    forms = sum(1 for module in modules for _ in stored_of(module).forms())
    assert forms == 2 * len(values)


def numbers(module: Any, linear: torch.nn.Linear) -> Tensor:
    form = stored_of(module).of(linear.weight.detach())
    assert form is not None
    return QuantisedLinear([form.packed()]).dequantised()


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [("gptq4_order", WIDE, "inputs in an order of their own .g_idx. are not cut"),
     ("w4a16", SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
      "the worker's inputs are no whole blocks of 32")],
)  # fmt: skip
def test_inputs_that_cannot_be_cut_become_numbers(
    kind: str, sizes: dict[str, int], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, plain = folders_of("llama", kind, tmp_path, **sizes)
    with caplog.at_level(logging.INFO, "memserve"):
        parts = divided(quantised, Parallel(2))
    assert "weights are computed with as numbers by this worker" in caplog.text
    assert re.search(why, caplog.text)
    assert error(together(parts, capture=True), expected_logits(plain, TOKENS, ROWS)) < 2e-3


def test_stacks_of_experts_are_cut(tmp_path: Path) -> None:
    """Those that the module has turned, as of gpt-oss, and with gates and ups by turns."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    quantised, plain = mxfp4_folder(tiny_module("gpt_oss", **sizes), tmp_path)
    parts = divided(quantised, Parallel(2))
    formats = {form.format for module in parts[1] for form in stored_of(module).forms()}
    assert formats == {"MXFP4"} and all(form.k in (64,) for module in parts[1] for form in stored_of(module).forms())
    assert error(together(parts, capture=True), expected_logits(plain, TOKENS, ROWS)) < 2e-3


@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_workers_answer_as_one_does(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes beside the leader keep what the leader keeps: of a file, and of a folder that is rounded."""
    convert_here(monkeypatch)
    module, answers = tiny_module("llama", **WIDE), []
    source = write_gguf(module, tmp_path / "tiny.gguf") if quantization == "auto" else save_folder(module, tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "kv_memory": "4MiB", "quantization": quantization}
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}  # rounding changes later ones
    for parallel in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        with LLM(str(source), **options, **parallel) as llm:
            results = llm.generate([[5, 6, 7], list(range(3, 60)), [9] * 5], **asked)
            answers.append([list(result.outputs[0].tokens) for result in results])
    assert answers[1] == answers[0] == answers[2]


def test_parts_of_an_instance_say_what_they_compute_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_here(monkeypatch)
    path = write_gguf(tiny_module("llama", **WIDE), tmp_path / "tiny.gguf")
    parts = build_parts(EngineOptions(str(path), "bfloat16", parallel=Parallel(2), kv_memory_bytes=4 << 20))
    parts.device.close()
    assert parts.model.quantization == "auto" and parts.model.activation_bits == FINE_BITS
    assert parts.model.fingerprint == load_model(str(path), "bfloat16", "cpu", quantization="auto").fingerprint
