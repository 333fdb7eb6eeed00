"""``--quantization int8`` and ``int4``: a checkpoint of numbers becomes integers once, and is served as they are."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gguf_files import write_gguf
from memserve import LLM
from memserve.base.errors import UserError
from memserve.base.types import COARSE_BITS
from memserve.model.capture.forward import capture_forward
from memserve.model.loading.cache import MARKER
from memserve.model.loading.formats import rounding
from memserve.model.loading.formats.checkpoint import quantised_checkpoint
from memserve.model.loading.formats.rounding import SETTINGS, Rounding, rounded_folder, rounded_parts
from memserve.model.loading.loader import LoadedModel, load_model
from memserve.model.loading.sources import ModelFolder
from memserve.model.loading.stored import stored_of
from memserve.model.quantised import QuantisedLinear
from memserve.system.process import cache_root
from quantised_folders import gptq, quantised_folder
from tiny_models import save_folder, tiny_module

SIZES = {"hidden_size": 64, "intermediate_size": 128}
WAYS = [*SETTINGS.values(), Rounding(8), Rounding(8, (64,), symmetric=False), Rounding(4, (32,)), Rounding(4, (64,))]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama", **SIZES), tmp_path_factory.mktemp("tiny") / "tiny")


def load(folder: Path, quantization: str, dtype: str = "bfloat16") -> LoadedModel:
    return load_model(str(folder), dtype, "cpu", quantization=quantization)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The numbers of a rounded folder."""
    checkpoint = quantised_checkpoint(folder, "tiny")
    assert checkpoint is not None
    return {name: tensor.numbers(torch.float32) for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("setting", WAYS, ids=str)
def test_each_value_is_its_nearest_integer(folder: Path, setting: Rounding) -> None:
    """Within half a step where nothing is cut off, and never beyond the range of its group by more than was cut."""
    rounded = rounded_folder(ModelFolder(folder, "tiny"), "way", setting)
    original = load_file(folder / "model.safetensors")
    weights = weights_of(rounded.path)
    assert len(weights) == 22
    is_head = {name: name == "model.embed_tokens.weight" for name in weights}
    for name, value in weights.items():
        way = SETTINGS["int8"] if is_head[name] and setting.head_bits else setting
        size = way.size_for(value.shape[1])
        groups, rounded_groups = (part.view(-1, size) for part in (original[name].float(), value))
        reach = groups.abs().amax(-1) if way.symmetric else (groups.amax(-1) - groups.amin(-1)) / 2
        step = reach / ((1 << way.bits - 1) - 1)
        error = (rounded_groups - groups).abs()
        if way.symmetric:
            assert bool((error <= step[:, None] * 0.51).all())
        assert float((error.square().mean(-1).sqrt() / step).mean()) < 0.32  # of numbers spread evenly: 0.29


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_package_reads_the_same_numbers(way: Rounding) -> None:
    """compressed-tensors decompresses the parts of a weight."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    weight[3], weight[5, :64] = 0.0, 1e-9  # rows without a size of their own
    parts, size = rounded_parts(weight, way), way.size_for(128)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**way.scheme(size)))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized" if way.bits < 8 else "int-quantized")
    wide = {name: part.float() if part.dtype == torch.float16 else part for name, part in parts.items()}
    numbers = compressor.decompress(wide, scheme)["weight"]
    assert bool((numbers[3] == 0).all()) and float((numbers[5, :64]).abs().max()) < 1e-6
    step = weight.view(48, -1, size).abs().amax(-1) / ((1 << way.bits - 1) - 1)
    assert float(((numbers - weight).view(48, -1, size) / step[..., None].clamp(min=1e-6)).square().mean()) < 0.1


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_folder_is_served_with_its_linears_rounded(folder: Path, kind: str) -> None:
    model, plain = load(folder, kind), load(folder, "none")
    stored = stored_of(model.module)
    assert model.quantization == kind and model.name == plain.name == "tiny"
    assert len(stored) == 22
    forward: Any = capture_forward(model.module)
    assert sum(isinstance(layer, QuantisedLinear) for layer in forward._linears) >= 12
    exact = load(folder, kind, "float32")
    assert exact.quantization == "none" and not len(stored_of(exact.module))  # the numbers that the integers stand for
    assert len({model.fingerprint, plain.fingerprint, exact.fingerprint}) == 3
    with LLM(str(folder), quantization=kind, dtype="float32", threads=1, kv_memory="4MiB") as llm:
        assert llm.generate([[5, 6, 7]], exact=True, temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(folder), quantization=kind, dtype="bfloat16", threads=1, kv_memory="4MiB") as llm:
        rounds = pytest.raises(UserError, match="activations are rounded to 8 bits here")
        with rounds if model.activation_bits == COARSE_BITS else nullcontext():
            llm.generate([[5, 6, 7]], exact=True, temperature=0, max_tokens=4)
        assert len(llm.generate([[5, 6, 7]], temperature=0, max_tokens=4, ignore_eos=True)[0].outputs[0].tokens) == 4


def test_experts_and_odd_sizes_stay_numbers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 32}
    moe = save_folder(tiny_module("qwen3_moe", **sizes), tmp_path / "moe")
    assert all("experts" not in name for name in weights_of(rounded_folder(ModelFolder(moe, "moe"), "int4").path))
    assert load(moe, "int4").quantization == "int4"
    odd = save_folder(tiny_module("llama", hidden_size=64, intermediate_size=80), tmp_path / "odd")
    assert all("down_proj" not in name for name in weights_of(rounded_folder(ModelFolder(odd, "odd"), "int4").path))


def test_a_copy_is_made_once_and_again_where_it_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    inner = rounding._round_into
    monkeypatch.setattr(rounding, "_round_into", lambda *args: (builds.append(1), inner(*args)))
    source = ModelFolder(folder, "tiny")
    path = rounded_folder(source, "int4").path
    file, want = path / "model.safetensors", (path / "model.safetensors").read_bytes()
    assert path.is_relative_to(cache_root()) and (path / "tokenizer.json").is_file()
    assert rounded_folder(source, "int4").path == path and len(builds) == 1
    assert rounded_folder(source, "int8").path != path and len(builds) == 2
    file.write_bytes(want[:-7])  # cut off
    assert rounded_folder(source, "int4").path == path and file.read_bytes() == want and len(builds) == 3
    file.unlink()
    rounded_folder(source, "int4")
    assert file.read_bytes() == want and len(builds) == 4
    (path / MARKER).unlink()  # its maker died
    shutil.copytree(path, path.with_name(f"{path.name}.partial"))
    rounded_folder(source, "int4")
    assert file.read_bytes() == want and len(builds) == 5
    assert not path.with_name(f"{path.name}.partial").exists()


def test_another_checkpoint_has_another_copy(folder: Path, tmp_path: Path) -> None:
    other = save_folder(tiny_module("llama", seed=1, **SIZES), tmp_path / "elsewhere" / "tiny")
    paths = {rounded_folder(ModelFolder(path, "tiny"), "int8").path for path in (folder, other)}
    assert len(paths) == 2


def test_what_is_quantised_already_is_refused(folder: Path, tmp_path: Path) -> None:
    quantised, _ = quantised_folder(tiny_module("llama", **SIZES), tmp_path, *gptq())
    gguf = write_gguf(tiny_module("llama"), tmp_path / "tiny.Q8_0.gguf")
    for source in (quantised, gguf):
        with pytest.raises(UserError, match="is quantised already") as caught:
            load(source, "int4")
        assert caught.value.hint and "leave out --quantization int4" in caught.value.hint


def test_the_copy_says_how_it_was_made(folder: Path) -> None:
    """By groups of one size: of 128 inputs where they divide a weight's, else of 32."""
    eight = json.loads((rounded_folder(ModelFolder(folder, "tiny"), "int8").path / "config.json").read_text())
    groups = eight["quantization_config"]["config_groups"].values()
    sizes = {group["weights"]["group_size"]: group["targets"] for group in groups}
    assert set(sizes) == {32, 128} and all(name.endswith("down_proj") for name in sizes[128])
    described = json.loads((rounded_folder(ModelFolder(folder, "tiny"), "int4").path / "config.json").read_text())
    config = described["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "mixed-precision"
    head, group = config["config_groups"].values()
    assert head["weights"]["num_bits"] == 8 and head["targets"] == ["model.embed_tokens"]  # it is tied
    assert group["weights"] == SETTINGS["int4"].scheme(32) and "model.layers.0.mlp.up_proj" in group["targets"]
