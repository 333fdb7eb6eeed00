"""Weights whose pages are given back: nothing is lost, and a conversion holds one weight at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_files import write_gguf
from memserve.base.errors import UserError
from memserve.base.units import GIB
from memserve.model.attention.context import step_attention
from memserve.model.capture import forward as capture
from memserve.model.forward import EagerForward
from memserve.model.loading import conversion, loader, sources
from memserve.model.loading import pages as pages_module
from memserve.model.loading.checkpoint import load_module
from memserve.model.loading.conversion import SafetensorsWriter
from memserve.model.loading.pages import NO_PAGES, pages_of
from memserve.model.loading.probe import DenseAttention, probe_model
from memserve.system import memory
from tiny_models import VOCAB, save_folder, tiny_module

SIZES = {"hidden_size": 256, "intermediate_size": 512}
"""Weights of many pages."""


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32."""
    return save_folder(tiny_module("llama", **SIZES), tmp_path_factory.mktemp("pages") / "tiny")


def logits_of(forward: Any, tokens: int = 9) -> torch.Tensor:
    places = torch.arange(tokens)
    with step_attention(DenseAttention()):
        return forward((places + 1) * 7919 % VOCAB, places, places.clone())


def probed(folder: Path, dtype: torch.dtype) -> Any:
    module = load_module(folder, "tiny", dtype)
    probe_model(module, str(dtype).removeprefix("torch."), 32)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_weights_come_back_when_they_are_read(folder: Path, dtype: torch.dtype) -> None:
    """In the dtype of their file they are mapped; of another one they come back when they are restored."""
    module, expected = load_module(folder, "tiny", dtype), load_module(folder, "tiny", dtype).state_dict()
    pages, linear = pages_of(module), module.model.layers[0].mlp.up_proj.weight
    assert pages.is_mapped(linear) == (dtype == torch.float32)
    pages.release_values(*module.parameters())
    if dtype == torch.bfloat16:
        assert not linear.view(torch.uint8).reshape(-1)[4096:-4096].any(), "its pages are not in memory"
        pages.restore_dropped()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_weights_that_were_written_to_are_left_alone(folder: Path, tmp_path: Path) -> None:
    copy = save_folder(tiny_module("llama", **SIZES), tmp_path / "written")
    module = load_module(copy, "tiny", torch.float32)
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight.add_(1.0)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    pages = pages_module.WeightPages(module, sorted(copy.glob("*.safetensors")))
    pages.release_values(*module.parameters())
    pages.release_maps()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_forward_needs_none_of_its_sources(folder: Path, dtype: torch.dtype) -> None:
    expected = logits_of(EagerForward(probed(folder, dtype), pack=False))
    module = probed(folder, dtype)
    captured = capture.best_forward(module)
    assert isinstance(captured, capture.CapturedForward)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (logits_of(captured) - expected).square().mean().sqrt() <= tolerance * expected.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_not_captured_has_its_weights_again(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the module comes last, when all weights are packed and their sources are dropped."""

    def differs(*_: object) -> None:
        raise capture.CaptureRefused("it differs")

    expected = logits_of(EagerForward(probed(folder, dtype)))
    module = probed(folder, dtype)
    monkeypatch.setattr(capture, "_compare", differs)
    forward = capture.best_forward(module)
    assert isinstance(forward, EagerForward) and forward.packed_linears > 0
    assert torch.equal(logits_of(forward), expected)


def test_a_forward_of_a_large_model_computes_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_of(EagerForward(probed(folder, torch.float32), pack=False))
    monkeypatch.setattr(pages_module, "LARGE_BYTES", 0)
    module = probed(folder, torch.float32)
    with pages_of(module).one_layer_at_a_time(module):
        assert torch.equal(logits_of(EagerForward(module, pack=False)), expected)
    assert not any(part._forward_hooks for part in module.modules())


def test_pages_of_a_module_without_files_stay() -> None:
    module = tiny_module("llama")
    assert pages_of(module) is NO_PAGES
    before = {name: value.clone() for name, value in module.state_dict().items()}
    NO_PAGES.release_values(*module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_file_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    tensors = {f"t.{kind}": torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"turned": torch.arange(6.0).reshape(2, 3).t(), "number": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    with SafetensorsWriter(tmp_path / "m.safetensors", len(tensors)) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    read = load_file(tmp_path / "m.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in tensors.items())


def test_a_file_that_was_not_finished_cannot_be_read(tmp_path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with pytest.raises(ZeroDivisionError), SafetensorsWriter(tmp_path / "m.safetensors", 1) as writer:
        writer.write("t", torch.ones(3))
        raise ZeroDivisionError
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "m.safetensors")


def test_a_conversion_holds_one_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_module("llama"), tmp_path / "tiny.gguf")
    held: list[tuple[int, int]] = []
    take = conversion._Folders.take_weight

    def spy(self: Any, module: Any, name: str) -> None:
        own = module.get_parameter(name)
        others = [value for value in module.parameters() if value is not own and not value.is_meta]
        held.append((sum(value.untyped_storage().nbytes() for value in others), len(others)))
        take(self, module, name)

    monkeypatch.setattr(conversion._Folders, "take_weight", spy)
    (tmp_path / "out").mkdir()
    conversion.convert(path, tmp_path / "out")
    assert len(held) > 20 and max(bytes_ for bytes_, _ in held) <= 4 * max(count for _, count in held)


def test_a_gguf_file_with_numbers_that_are_none_is_refused(tmp_path: Path) -> None:
    module = tiny_module("llama")
    module.model.norm.weight[3] = float("nan")
    path = write_gguf(module, tmp_path / "nan.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"not finite .*model\.norm\.weight"):
        conversion.convert(path, tmp_path / "out")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_model_that_does_not_fit_is_refused_unread(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder if kind == "folder" else write_gguf(tiny_module("llama"), tmp_path / "tiny.gguf")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(loader, "load_module", never)
    monkeypatch.setattr(sources, "_convert_in_child", never)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: GIB)
    with pytest.raises(UserError, match="does not fit into memory") as caught:
        loader.load_model(str(source), "bfloat16", "cpu", kv_bytes=2 * GIB)
    assert "--kv-memory" in (caught.value.hint or "") and caught.value.param == "model"
    with pytest.raises(AssertionError):
        loader.load_model(str(source), "bfloat16", "cpu", kv_bytes=0)
