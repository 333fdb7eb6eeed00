"""Quantised folders of tiny models: served as numbers they are transformers' models of the dequantised values."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_files import save_adapter
from memserve import LLM
from memserve.model.experts import experts_of
from memserve.model.forward import EagerForward
from memserve.model.loading.checkpoint import text_weights
from memserve.model.loading.formats.checkpoint import QuantisedCheckpoint, quantised_checkpoint
from memserve.model.loading.formats.weights import GroupedTensor, Mxfp4Tensor, ScaledTensor
from memserve.model.loading.loader import load_model
from memserve.model.loading.sources import weight_bytes
from memserve.model.loading.stored import stored_of
from memserve.model.quantised import QuantisedLinear
from packages_weights import FILE, decoded
from quantised_folders import awq_parts, gptq_parts, mxfp4_folder, quantised_folder
from quantised_formats import (
    FAMILIES,
    FORMATS,
    NO_INTEGERS,
    SIZES,
    captured,
    error,
    expected_logits,
    folders_of,
    load,
    logits,
)
from tiny_models import VOCAB, tiny_module


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_those_of_the_dequantised_values(kind: str, tmp_path: Path) -> None:
    quantised, plain = folders_of("llama", kind, tmp_path)
    assert not hasattr(load(quantised).module.config, "quantization_config")
    assert error(logits(captured(load(quantised))), expected_logits(plain)) < 1e-5


@pytest.mark.parametrize("kind", ["gptq4_order", "awq4", "w8a8", "fp8_scale_inv"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_are_those_of_the_dequantised_values(family: str, kind: str, tmp_path: Path) -> None:
    """Experts that transformers joins, q, k and v in one linear, biases of norms, soft caps."""
    quantised, plain = folders_of(family, kind, tmp_path)
    assert error(logits(captured(load(quantised))), expected_logits(plain)) < 1e-5


@pytest.mark.parametrize("kind", FORMATS)
def test_auto_computes_with_weights_as_stored(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised, plain = folders_of("llama", kind, tmp_path)
    with caplog.at_level(logging.INFO, "memserve"):
        model, numbers = load(quantised, "bfloat16", "auto"), load(quantised, "bfloat16")
    stored = stored_of(model.module)
    assert len(stored) == 21 and "21 weights stay quantised" in caplog.text
    assert model.fingerprint != numbers.fingerprint and model.quantization == "auto"
    assert (model.activation_bits == 0) == (kind in NO_INTEGERS)
    values = dict(numbers.module.named_parameters())
    for name, value in model.module.named_parameters():
        weight = stored.of(value)
        held = value if weight is None else QuantisedLinear([weight.packed()]).dequantised(torch.bfloat16)
        assert torch.equal(held, values[name]), name
        assert weight is None or not value.any(), "its numbers were made, or a sample of them takes memory"
    forward, want = captured(model), expected_logits(plain)
    assert sum(isinstance(layer, QuantisedLinear) for layer in forward._linears) >= 12
    assert 0 < error(logits(forward), want) < 0.2 and error(logits(captured(numbers)), want) < 0.2


def test_weights_of_one_input_are_stacked_in_auto(tmp_path: Path) -> None:
    """Queries, keys and values; gates and ups: as far as they fill whole strips, in an order of inputs as well."""
    for kind in ("w4a16", "gptq4_order"):
        quantised, _ = folders_of("llama", kind, tmp_path / kind, num_key_value_heads=4)
        layers = [layer for layer in captured(load(quantised, "bfloat16", "auto"))._linears if layer.n != VOCAB]
        assert sorted({layer.n for layer in layers}) == [64, 192, 256] and len(layers) == 12


@pytest.mark.parametrize("kind", ["w4a16", "gptq4_order", "awq4", "fp8_scale_inv"])
def test_experts_stay_as_stored_in_auto(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each expert's gate and up are one layer. No expert is ever made numbers, and stacks of them take no memory."""
    quantised, plain = folders_of("qwen3_moe", kind, tmp_path)
    with caplog.at_level(logging.INFO, "memserve"):
        model = load(quantised, "bfloat16", "auto")
    assert len(stored_of(model.module)) == 12 + 3 * 4 * 2
    experts = experts_of(model.module)
    assert len(experts) == 3 and not any(part.gate_up_proj.any() or part.down_proj.any() for part in experts)
    forward = captured(model)
    assert {type(layer) for layer in forward._experts} == {QuantisedLinear}
    assert "computed with as numbers" not in caplog.text
    assert error(logits(forward), expected_logits(plain)) < 0.2


@pytest.mark.parametrize("kind", ["gptq4_order", "w8a8", "fp8_scale_inv"])
def test_latents_are_expanded_by_dequantised_weights(kind: str, tmp_path: Path) -> None:
    """Whatever else stays quantised: captured, and module by module."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32, "num_key_value_heads": 4}
    sizes |= {"qk_nope_head_dim": 32, "v_head_dim": 32}
    quantised, plain = folders_of("minicpm3", kind, tmp_path, **sizes)
    want = expected_logits(plain)
    assert load(quantised).geometry.latent
    assert error(logits(captured(load(quantised))), want) < 1e-5
    for make in (captured, lambda model: EagerForward(model.module)):
        model = load(quantised, "bfloat16", "auto")
        assert len(stored_of(model.module))
        assert 0 < error(logits(make(model)), want) < 0.2


def test_biases_stay_beside_quantised_weights(tmp_path: Path) -> None:
    for kind in ("gptq4", "awq4", "w8a8"):
        module = tiny_module("llama", attention_bias=True, **SIZES)
        for name, value in module.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(value)
        quantised, plain = quantised_folder(module, tmp_path / kind, *FORMATS[kind])
        want = expected_logits(plain)
        assert error(logits(captured(load(quantised))), want) < 1e-5
        assert error(logits(captured(load(quantised, "bfloat16", "auto"))), want) < 0.2


@pytest.mark.parametrize("inner", [128, 32], ids=["oblong", "square"])
def test_experts_in_one_tensor_of_mxfp4(inner: int, tmp_path: Path) -> None:
    """As of gpt-oss, dequantised by transformers. The module has them turned, which sizes do not tell of a square."""
    quantised, plain = mxfp4_folder(tiny_module("gpt_oss", hidden_size=64, intermediate_size=inner), tmp_path)
    want = expected_logits(plain)
    assert error(logits(captured(load(quantised))), want) < 1e-5
    model = load(quantised, "bfloat16", "auto")
    experts = model.module.config.num_local_experts
    assert len(stored_of(model.module)) == 2 * experts * model.module.config.num_hidden_layers
    forward = captured(model)
    assert {type(layer) for layer in forward._experts} == {QuantisedLinear}
    assert error(logits(forward), want) < 0.2


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "gptq4_order"), ("llama", "w8a8"), ("llama", "mxfp4"), ("llama", "fp8_block"), ("qwen3_moe", "w4a16"),
     ("qwen3_moe", "fp8_scale_inv")],
)  # fmt: skip
def test_no_weight_becomes_numbers_that_stays_quantised(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, plain = folders_of(family, kind, tmp_path)

    def numbers(*_: object) -> Tensor:
        raise AssertionError("a weight was made numbers")

    for tensor in (GroupedTensor, Mxfp4Tensor, ScaledTensor):
        monkeypatch.setattr(tensor, "numbers", numbers)
    assert error(logits(captured(load(quantised, "bfloat16", "auto"))), expected_logits(plain)) < 0.2


def test_scales_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To know what fits into memory, and to load it."""
    quantised, _ = folders_of("llama", "gptq4", tmp_path)
    looks, form = Counter[str](), GroupedTensor.form
    monkeypatch.setattr(GroupedTensor, "form", lambda tensor: looks.update([tensor.name]) or form(tensor))
    model = load_model(str(quantised), "bfloat16", "cpu", kv_bytes=1 << 20, quantization="auto")
    assert len(stored_of(model.module)) == 21 == len(looks) and set(looks.values()) == {1}


def test_one_layer_has_memory_for_zeros_of_experts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers joins what was put off; the module gets stacks without memory, one by one."""
    quantised, plain = folders_of("qwen3_moe", "w4a16", tmp_path)
    stacks: list[Tensor] = []
    take = QuantisedCheckpoint.without_zeros

    def watch(checkpoint: QuantisedCheckpoint, value: Tensor) -> Tensor | None:
        sparse = take(checkpoint, value)
        if sparse is not None:
            assert torch.equal(sparse, value) and 0 < int(value.any(-1).sum()) < value[..., 0].numel()
            stacks.append(sparse)
        return sparse

    monkeypatch.setattr(QuantisedCheckpoint, "without_zeros", watch)
    model = load(quantised, "bfloat16", "auto")
    assert len(stacks) == 2 * 3 and error(logits(captured(model)), expected_logits(plain)) < 0.2


def test_experts_that_cannot_be_joined_are_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gates that end within a strip of the kernels."""
    quantised, plain = folders_of("qwen3_moe", "w8a16", tmp_path, moe_intermediate_size=48)
    with caplog.at_level(logging.INFO, "memserve"):
        model = load(quantised, "bfloat16", "auto")
    assert len(stored_of(model.module)) == 12 and "weights are computed with as numbers" in caplog.text
    assert error(logits(captured(model)), expected_logits(plain)) < 0.2


@pytest.mark.parametrize("which", ["weights", "stacks"])
def test_weights_in_another_order_become_numbers(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sample of them was read: the module is loaded again, with all of them."""
    if which == "weights":
        quantised, plain = folders_of("llama", "gptq4", tmp_path)
    else:
        quantised, plain = mxfp4_folder(tiny_module("gpt_oss", **SIZES), tmp_path)
    monkeypatch.setattr(QuantisedCheckpoint, "is_the_same", lambda *_: False)
    model = load(quantised, "bfloat16", "auto")
    assert not len(stored_of(model.module)) and model.quantization == "none"
    assert error(logits(captured(model)), expected_logits(plain)) < 0.2


@pytest.mark.parametrize(("kind", "share"), [("gptq4", 0.4), ("fp8_block", 0.6), ("w8a16", 0.6)])
def test_memory_is_asked_for_as_the_weights_are_stored(
    kind: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = folders_of("llama", kind, tmp_path, vocab_size=256, hidden_size=256, intermediate_size=1024)
    checkpoint = quantised_checkpoint(quantised, "tiny")
    assert checkpoint is not None
    stored, largest = checkpoint.resident_bytes(2)
    numbers, _ = text_weights(quantised)
    assert (share - 0.1) * 2 * numbers < stored < (share + 0.1) * 2 * numbers and largest == 2 * 256 * 256
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "memserve.model.loading.loader.check_model_memory", lambda name, total, most, kv: asked.append((total, most))
    )
    for quantization in ("auto", "none"):
        load_model(str(quantised), "bfloat16", "cpu", kv_bytes=1 << 20, quantization=quantization)
    assert asked == [(stored, largest), (2 * numbers, 2 * 1024 * 256)]


def test_adapters_beside_quantised_weights(tmp_path: Path) -> None:
    module = tiny_module("llama", **SIZES)
    adapter = save_adapter(tmp_path / "adapter", module, ["q_proj", "v_proj", "down_proj"], seed=1)
    quantised, plain = quantised_folder(module, tmp_path / "model", *FORMATS["gptq4_order"])
    answers = {}
    for name, folder, more in (
        ("numbers", plain, {"dtype": "float32"}), ("quantised", quantised, {"dtype": "float32"}),
        ("integers", quantised, {"dtype": "bfloat16", "quantization": "auto"}),
    ):  # fmt: skip
        with LLM(str(folder), lora=[f"one={adapter}"], threads=1, kv_memory="4MiB", **more) as llm:
            asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
            adapted, bare = (
                llm.generate([[5, 6, 7]], adapter="one", **asked), llm.generate([[5, 6, 7]], **asked)
            )  # fmt: skip
            answers[name] = adapted[0].outputs[0].tokens, bare[0].outputs[0].tokens
    assert answers["quantised"] == answers["numbers"] and answers["quantised"][0] != answers["quantised"][1]
    assert answers["integers"][0] != answers["integers"][1]


def test_an_embedding_may_be_quantised_and_tied(tmp_path: Path) -> None:
    """The output head reads it as stored; as a table it gives the same numbers."""
    config, quantise = FORMATS["w8a16"]
    group = config["config_groups"]["group_0"] | {"targets": ["Linear", "re:.*embed_tokens"]}
    config = config | {"config_groups": {"group_0": group}, "ignore": []}
    quantised, plain = quantised_folder(
        tiny_module("llama", **SIZES), tmp_path, config, quantise, which=lambda name: "norm" not in name
    )
    want, model = expected_logits(plain), load(quantised, "bfloat16", "auto")
    assert error(logits(captured(load(quantised))), want) < 1e-5
    assert len(stored_of(model.module)) == 22
    assert error(logits(captured(model)), want) < 0.2


def test_an_engine_serves_the_answers_of_the_numbers(tmp_path: Path) -> None:
    quantised, plain = folders_of("llama", "gptq4_order", tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB"}
    answers = []
    for folder in (quantised, plain):
        with LLM(str(folder), **options) as llm:
            answer = llm.generate([[5, 6, 7]], temperature=0, max_tokens=12, ignore_eos=True)
            answers.append(answer[0].outputs[0].tokens)
    assert answers[0] == answers[1]


def test_sizes_are_those_of_the_numbers(tmp_path: Path) -> None:
    quantised, plain = folders_of("llama", "gptq4_order", tmp_path)
    checkpoint, numbers = (quantised_checkpoint(folder, "tiny") for folder in (quantised, plain))
    assert numbers is None and checkpoint is not None
    sizes = {name: value.numel() for name, value in load(plain).module.named_parameters()}
    assert {name: checkpoint.sizes[name] for name in sizes} == sizes
    file = quantised / "model.safetensors"
    assert weight_bytes(str(quantised)) == 4 * file.stat().st_size


def test_packers_of_the_tests_are_those_of_the_packages(tmp_path: Path) -> None:
    """The words that :mod:`quantised_folders` makes of a case's integers are the words of the package."""
    for case in json.loads(FILE.read_text())["cases"]:
        tensors, config = decoded(case["tensors"]), case["config"]
        if config["quant_method"] == "torchao":
            continue
        save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "model.safetensors")
        tensor: Any = QuantisedCheckpoint(tmp_path, "tiny", config).tensors["layer.weight"]
        integers, zeros = tensor.unpack(tensor.words(), slice(0, 32)).int(), tensor.zeros().int()
        if config["quant_method"] == "gptq":
            first = config["checkpoint_format"] == "gptq"
            groups = tensors["layer.g_idx"]
            parts = gptq_parts(integers, tensor.scales(), zeros, groups, config["bits"], first=first)
        else:
            parts = awq_parts(integers, tensor.scales(), zeros, config["bits"])
        for end, part in parts.items():
            assert torch.equal(part, tensors[f"layer.{end}"]), (case["name"], end)
