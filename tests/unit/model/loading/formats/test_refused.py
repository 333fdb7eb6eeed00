"""Quantised folders that are damaged, or quantised in a way that is not understood: one line says what and what to do.

What a folder's config and headers tell is refused before a weight is read.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memserve.base.errors import UserError
from memserve.model.loading.checkpoint import text_weights
from memserve.model.loading.formats.checkpoint import quantised_checkpoint
from memserve.model.loading.loader import load_model
from mutations import mutated_json
from quantised_folders import Parts, awq, change_config, change_tensors, compressed, fp8, gptq, mxfp4_folder
from quantised_folders import quantised_folder as made
from tiny_models import tiny_module

SIZES = {"hidden_size": 64, "intermediate_size": 128}
KINDS = {
    "gptq": gptq(order=True),
    "awq": awq(),
    "w4a16": compressed({"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}),
    "w8a8": compressed({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "fp8": fp8(),
    "mxfp4": None,
}
Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
FUZZ_SEEDS = 12


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, parts in KINDS.items():
        place = tmp_path_factory.mktemp(kind)
        if parts is None:
            folders[kind] = mxfp4_folder(tiny_module("gpt_oss", **SIZES), place)[0]
        else:
            folders[kind] = made(tiny_module("llama", **SIZES), place, *parts)[0]
    return folders


def refuse(folder: Path, match: str) -> None:
    for quantization, dtype in (("none", "float32"), ("auto", "bfloat16")):
        with pytest.raises(UserError, match=match) as caught:
            load_model(str(folder), dtype, "cpu", quantization=quantization)
        assert "\n" not in str(caught.value) and caught.value.hint and len(str(caught.value)) < 600


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (
        "gptq",
        {"quant_method": "bitsandbytes"},
        "quant_method 'bitsandbytes', which is not served; served: compr",
    ),
    ("gptq", {"quant_method": ()}, "quant_method 'None'"),
    ("gptq", {"bits": 5}, "bits '5', which is not served; served: 2, 3, 4, 8"),
    ("gptq", {"bits": "4"}, "bits '4'"),
    ("gptq", {"bits": 8}, r"words for \d+ inputs of 8 bits"),
    ("gptq", {"group_size": 64}, r"has \d groups"),
    ("gptq", {"group_size": 0}, "group_size '0'"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ("gptq", {"pack_dtype": "int8"}, "pack_dtype 'int8'"),
    ("gptq", {"quant_method": "awq", "version": "gemm"}, "groups and 64 words for 16 inputs"),
    ("awq", {"version": "gemv"}, "version 'gemv', which is not served; served: gemm"),
    ("awq", {"bits": 3}, "bits '3'"),
    ("awq", {"group_size": 16}, r"has \d groups"),
    ("w4a16", {"format": "marlin-24"}, "format 'marlin-24'"),
    ("w4a16", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ("w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ("w4a16", {"config_groups": ["W4A16"]}, "config_groups"),
    ("fp8", {"weight_block_size": [32]}, "weight_block_size"),
    (
        "fp8",
        {"weight_block_size": [64, 64]},
        "weight_scale_inv is F32, 2 x 4, not F32 or F16 or .*, 1 x 2",
    ),
    ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2'"),
    ("fp8", {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    ("fp8", {"quant_method": "mxfp4"}, "no weight is quantised"),
]


@pytest.mark.parametrize(("kind", "fields", "match"), CONFIGS)
def test_a_config_that_is_not_understood_is_refused(
    originals: dict[str, Path], tmp_path: Path, kind: str, fields: dict[str, Any], match: str
) -> None:
    folder = Path(shutil.copytree(originals[kind], tmp_path / "quantised"))
    change_config(folder, **fields)
    refuse(folder, match)
    with pytest.raises(UserError, match=match):  # before a weight is read
        quantised_checkpoint(folder, "tiny")


GROUPS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "rounds activations alone"),
    ({"num_bits": 6}, "num_bits '6'"),
    ({"num_bits": 8}, "2 words do not hold|do not hold"),
    ({"group_size": 64}, "weight_scale is F16, 64 x 4, not F16 or|weight_scale is F16, 64 x 4, not F32"),
    ({"strategy": "attn_head"}, "strategy 'attn_head'"),
    ({"strategy": "channel"}, "weight_scale is F16, 64 x 4"),
    ({"type": "float"}, "weight_packed is I32"),
]


@pytest.mark.parametrize(("weights", "match"), GROUPS)
def test_a_scheme_that_does_not_fit_is_refused(
    originals: dict[str, Path], tmp_path: Path, weights: dict[str, Any] | None, match: str
) -> None:
    folder = Path(shutil.copytree(originals["w4a16"], tmp_path / "quantised"))
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    group["weights"] = None if weights is None else group["weights"] | weights
    change_config(folder, config_groups={"group_0": group})
    refuse(folder, match)


def edited(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Parts], None]:
    """A change of one tensor; None takes it out."""

    def edit(tensors: Parts) -> None:
        value = change(tensors.pop(name))
        if value is not None:
            tensors[name] = value

    return edit


def put(place: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[place] = value
        return tensor

    return change


def gone(_: torch.Tensor) -> None:
    return None


TENSORS: list[tuple[str, Callable[[Parts], None], str]] = [
    ("gptq", edited(f"{Q}.scales", gone), "q_proj.weight has no scales"),
    ("gptq", edited(f"{Q}.qzeros", gone), "q_proj.weight has no qzeros"),
    ("gptq", edited(f"{Q}.qweight", gone), "tensors are missing|no place"),
    ("gptq", edited(f"{Q}.g_idx", put(5, 2)), r"order of inputs \(g_idx\) names groups beyond the 2"),
    ("gptq", edited(f"{Q}.g_idx", put(5, -1)), "g_idx"),
    ("gptq", edited(f"{Q}.g_idx", lambda value: value[:32]), "words for 32 inputs"),
    ("gptq", edited(f"{Q}.g_idx", lambda value: value.float()), "g_idx is F32"),
    ("gptq", edited(f"{Q}.scales", lambda value: value[:1]), "has 1 groups"),
    ("gptq", edited(f"{Q}.scales", lambda value: value.int()), "scales is I32"),
    ("gptq", edited(f"{Q}.scales", put(3, float("nan"))), "scales that are not finite"),
    ("gptq", edited(f"{Q}.qzeros", lambda value: value[:, :2]), "qzeros is I32, 2 x 2"),
    ("gptq", edited(f"{Q}.qweight", lambda value: value[:, :5]), "qweight is I32, 8 x 5"),
    ("gptq", edited(f"{Q}.qweight", lambda value: value[None]), "no matrix"),
    ("awq", edited(f"{Q}.qzeros", gone), "has no qzeros"),
    ("awq", edited(f"{Q}.scales", put(0, float("inf"))), "not finite"),
    ("awq", edited(f"{Q}.qweight", lambda value: value[:, :3]), "3 words for 64 inputs"),
    ("w4a16", edited(f"{Q}.weight_scale", gone), "has no weight_scale"),
    ("w4a16", edited(f"{Q}.weight_shape", gone), "has no weight_shape"),
    ("w4a16", edited(f"{Q}.weight_shape", put(1, 72)), "64 x 72, which 64 x 8 words do not hold"),
    ("w4a16", edited(f"{Q}.weight_shape", put(0, -1)), "do not hold"),
    ("w4a16", edited(f"{Q}.weight_zero_point", gone), "has no weight_zero_point"),
    ("w4a16", edited(f"{Q}.weight_scale", lambda value: value.flatten()), "weight_scale is F16, 128, not"),
    ("w4a16", lambda tensors: tensors.update({f"{Q}.weight": torch.ones(64, 64)}), "there twice"),
    ("w8a8", edited(f"{Q}.weight_scale", gone), "q_proj.weight is I8, and nothing says what it means"),
    ("w8a8", edited(f"{Q}.weight", lambda value: value.half()), "is not compressed"),
    ("fp8", edited(f"{Q}.weight_scale_inv", gone), "has no weight_scale_inv"),
    ("fp8", edited(f"{Q}.weight_scale_inv", put(0, float("nan"))), "not finite"),
    ("fp8", edited(f"{Q}.weight", lambda value: value.view(torch.int8)), "is I8, and nothing says|no place"),
    ("mxfp4", edited(f"{EXPERTS}_scales", gone), "has no down_proj_scales"),
    ("mxfp4", edited(f"{EXPERTS}_scales", lambda value: value[:, :4]), "down_proj_scales is U8"),
    ("mxfp4", edited(f"{EXPERTS}_blocks", lambda value: value[..., :8]), "no blocks of 16 bytes"),
]


@pytest.mark.parametrize(("kind", "change", "match"), TENSORS, ids=[f"{k}-{m[:24]}" for k, _, m in TENSORS])
def test_tensors_that_do_not_fit_are_refused(
    originals: dict[str, Path], tmp_path: Path, kind: str, change: Callable[[Parts], None], match: str
) -> None:
    folder = Path(shutil.copytree(originals[kind], tmp_path / "quantised"))
    change_tensors(folder, change)
    refuse(folder, match)


def test_a_group_of_another_class_is_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    """Targets that name no module of the folder, by name, pattern and class."""
    folder = Path(shutil.copytree(originals["w8a8"], tmp_path / "quantised"))
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    change_config(folder, config_groups={"group_0": group | {"targets": ["Embedding", "re:.*lm_head", "a.b"]}})
    refuse(folder, "belongs to no group")
    for pattern in ("re:(a+)+$", "re:.*.*.*.*.*x"):  # which a name could keep busy for years
        change_config(folder, config_groups={"group_0": group | {"targets": [pattern]}})
        refuse(folder, "quantization_config has targets")
    change_config(folder, config_groups={"group_0": group | {"targets": ["re:.*(q|k|v|o|gate|up|down)_proj$"]}})
    assert load_model(str(folder), "float32", "cpu").name == "quantised"


@pytest.mark.parametrize("kind", list(KINDS))
def test_odd_configs_and_headers_never_crash(originals: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Odd, missing and renamed values anywhere in them: the folder loads, or is refused in one line."""
    refused = 0
    for seed in range(FUZZ_SEEDS):
        rng, folder = random.Random(f"{kind} {seed}"), Path(shutil.copytree(originals[kind], tmp_path / f"{seed}"))
        if seed % 2:
            config = json.loads((folder / "config.json").read_text())
            described = mutated_json(json.dumps(config["quantization_config"]).encode(), rng)
            config["quantization_config"] = json.loads(described)
            (folder / "config.json").write_text(json.dumps(config))
        else:
            file = folder / "model.safetensors"
            data = file.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            header = mutated_json(data[8:end], rng)
            file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
        try:
            text_weights(folder)
            load_model(str(folder), "float32", "cpu")
        except UserError as error:
            assert "\n" not in str(error) and error.hint
            refused += 1
    assert refused > FUZZ_SEEDS // 4
