"""A GGUF file's weights stay quantised: which they are, what becomes one layer, and what a model computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gguf_files import convert_here, write_gguf
from memserve import LLM
from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.types import COARSE_BITS, FINE_BITS
from memserve.model.attention.context import step_attention
from memserve.model.capture import forward as capture
from memserve.model.capture.forward import CapturedForward, capture_forward
from memserve.model.experts import experts_of
from memserve.model.forward import EagerForward
from memserve.model.linears import PackedLinear
from memserve.model.loading import cache, comparison, precision, probe
from memserve.model.loading.formats.headers import gguf_reader
from memserve.model.loading.loader import LoadedModel, load_model, model_sizes
from memserve.model.loading.probe import DenseAttention
from memserve.model.loading.stored import StoredWeight, StoredWeights, reserve_stored, stored_in_file, stored_of
from memserve.model.quantised import QuantisedLinear, QuantisedWeight
from quantised_blocks import random_blocks
from tiny_models import VOCAB, tiny_module


@pytest.fixture(autouse=True)
def converted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_here(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_module("llama"), tmp_path_factory.mktemp("model") / "tiny.Q8_0.gguf")


def load(path: Path, quantization: str, dtype: str = "bfloat16") -> LoadedModel:
    return load_model(str(path), dtype, "cpu", quantization=quantization)


def captured(model: LoadedModel) -> CapturedForward:
    forward = capture_forward(model.module)
    assert forward is not None
    return forward


def logits(forward: Any, tokens: int, rows: int) -> Tensor:
    ids = (torch.arange(tokens) + 1) * 7919 % VOCAB
    with step_attention(DenseAttention()):
        return torch.as_tensor(forward(ids, torch.arange(tokens), torch.arange(tokens - rows, tokens)))


def linears_of(forward: CapturedForward) -> list[Any]:
    return forward._linears


def test_every_matrix_of_the_file_is_known_to_the_bit(path: Path) -> None:
    """Those of queries and keys as well, whose rows llama.cpp orders otherwise."""
    model = load(path, "auto")
    numbers = dict(load(path, "none").module.named_parameters())
    stored, layers = stored_of(model.module), model.module.config.get_text_config().num_hidden_layers
    matrices = {name: value for name, value in model.module.named_parameters()
                if value.dim() == 2 and value.shape[1] % 32 == 0}  # fmt: skip
    assert len(stored) == len(matrices) == 6 * layers + 1  # the inputs of the seventh are no whole blocks
    rest = sum(value.nbytes for name, value in model.module.named_parameters() if name not in matrices)
    in_file = sum(value.numel() for value in matrices.values()) * 34 // 32  # a byte each, and a scale for 32 of them
    assert in_file + rest <= model_sizes(model).weights_bytes <= 1.5 * in_file + rest  # strips may not be full
    for name, value in matrices.items():
        weight = stored.of(value)
        assert weight is not None and weight.format == "Q8_0"
        assert torch.equal(QuantisedLinear([weight.packed()]).dequantised(torch.bfloat16), numbers[name])
        assert stored.of(value[1:]) is None


def test_only_bfloat16_keeps_weights_and_only_where_asked(path: Path) -> None:
    kept, plain, exact = load(path, "auto"), load(path, "none"), load(path, "auto", "float32")
    assert len(stored_of(kept.module)) and not len(stored_of(plain.module)) and not len(stored_of(exact.module))
    assert kept.fingerprint != plain.fingerprint  # their keys and values are no longer the same


def test_engine_with_activations_of_8_bits_refuses_exact(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precision, "DIVERGENCE_MAX", 1e9)
    options: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "kv_memory": "4MiB"}
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with LLM(str(path), quantization="auto", **options) as llm:
        assert len(llm.generate([[5, 6, 7]], **asked)[0].outputs[0].tokens) == 8
        with pytest.raises(UserError, match=r"rounded to 8 bits here .not with --quantization none.*leave out exact"):
            llm.generate([[5, 6, 7]], exact=True, **asked)
    with LLM(str(path), quantization="none", **options) as llm:
        assert llm.generate([[5, 6, 7]], exact=True, **asked)


def test_processor_without_bfloat16_keeps_weights_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    model, numbers = load(path, "auto", "auto"), load(path, "none", "float32")
    assert model.dtype == torch.float32 and len(stored_of(model.module))
    expected, got = (logits(captured(each), 37, 37) for each in (numbers, model))
    bound = 1e-3 if model.activation_bits == FINE_BITS else 0.1
    assert float((got - expected).square().mean().sqrt() / expected.std()) < bound


def test_quantization_that_is_not_served_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match="unknown quantization 'int3'"):
        EngineOptions(quantization="int3")


def test_another_files_weights_are_not_taken(path: Path, tmp_path: Path) -> None:
    other = write_gguf(tiny_module("llama", seed=1), tmp_path / "other.gguf")
    assert len(stored_in_file(load(path, "none").module, other)) == 0


def test_a_captured_forward_computes_with_them(path: Path) -> None:
    """Natively and operation by operation, few rows and many; close to the forward of the numbers."""
    plain, kept = captured(load(path, "none")), captured(load(path, "auto"))
    assert all(isinstance(layer, PackedLinear) for layer in linears_of(plain))
    kinds = [(type(layer), layer.k % 32) for layer in linears_of(kept)]
    assert set(kinds) == {(QuantisedLinear, 0), (PackedLinear, 16)}
    assert kept.native is not None and plain.native is not None
    assert kept.native.operations >= plain.native.operations  # small ones end within a strip, and are not joined
    for tokens, rows in ((1, 1), (3, 2), (70, 5), (150, 3)):
        want, got = logits(plain, tokens, rows), logits(kept, tokens, rows)
        assert got.shape == want.shape and got.isfinite().all()
        assert float((got - want).square().mean().sqrt()) < 0.15 * float(want.std())
        if tokens <= kept.native.rows_max:
            assert torch.equal(got, logits(kept._run, tokens, rows))


def test_nothing_is_converted_where_weights_stay(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    load(path, "auto")
    written = list(tmp_path.rglob("*.safetensors"))
    assert [file.parent.name.endswith("-stored") for file in written] == [True]
    load(path, "none")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3


@pytest.mark.parametrize("with_head", [False, True])
def test_a_module_without_numbers_computes_as_with(tmp_path: Path, *, with_head: bool) -> None:
    """Captured and module by module; whatever is done with a weight, it is never taken for zeros."""
    file = write_gguf(tiny_module("llama"), tmp_path / "tiny.gguf", with_head=with_head)
    plain, kept = load(file, "none"), load(file, "auto")
    with stored_of(kept.module).computing_as_stored():
        assert torch.equal(logits(EagerForward(kept.module, pack=False), 40, 5),
                           logits(EagerForward(plain.module, pack=False), 40, 5))  # fmt: skip
        value, number = kept.module.get_input_embeddings().weight, plain.module.get_input_embeddings().weight
        assert torch.equal(value.t() @ value, number.t() @ number)
        assert torch.equal(value.T @ value.data, number.T @ number.data)
        assert torch.equal(torch.cat([value, value]), torch.cat([number, number]))
        assert torch.equal(torch.nn.functional.linear(value, weight=value), torch.nn.functional.linear(number, number))
    want, eager = logits(captured(load(file, "auto")), 40, 5), logits(EagerForward(kept.module), 40, 5)
    assert eager.dtype == torch.float32
    assert float((eager - want).square().mean().sqrt()) < 0.15 * float(want.std())  # activations are rounded
    assert not any(value.any() for name, value in kept.module.named_parameters() if value.shape == (VOCAB, 32))


def test_a_file_cut_short_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"cannot convert short\.gguf"):
        load(short, "auto")
    model = load(path, "none")
    load(path, "auto")
    described = next((tmp_path / "cache").glob("*-stored"))
    short.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(UserError, match=r"short\.gguf ends before its weights do"):
        reserve_stored(model.module, described, short)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    module = tiny_module("llama")
    module.model.layers[1].mlp.gate_proj.weight.data[3, 5] = float("inf")
    file = write_gguf(module, tmp_path / "odd.gguf")
    with pytest.raises(UserError, match="not finite"):
        load(file, "auto")


def stored_weight(kind: str, n: int, seed: int = 0) -> StoredWeight:
    return StoredWeight(kind, 256, random_blocks(kind, n, 256, seed))


def test_weights_of_one_input_are_joined_as_far_as_formats_go() -> None:
    """As in files named Q4_K_M: values in Q6_K beside queries and keys in Q4_K."""
    kinds = ("Q4_K", "Q4_K", "Q6_K", None, None, "Q6_K")
    values = [torch.zeros(64, 256) for _ in kinds]
    known = [(value, stored_weight(kind, 64)) for value, kind in zip(values, kinds, strict=True) if kind is not None]
    stored = StoredWeights(known)
    assert stored.parts(values) == [2, 1, 2, 1]
    layer = stored.layer(values[:2], None, wide=True)
    assert layer is not None and layer.n == 128 and layer.wide and not layer.source
    alone = stored.layer(values[2:3], [torch.ones(64)], wide=False)
    assert alone is not None and alone.source == values[2].data_ptr() and alone.bias is not None
    assert stored.layer(values[3:5], None, wide=False) is None
    short = [torch.zeros(40, 256), torch.ones(40, 256)]  # their outputs end within a strip
    assert StoredWeights([(value, stored_weight("Q4_K", 40)) for value in short]).parts(short) == [1, 1]


def test_an_order_of_rows_is_kept() -> None:
    blocks, order = random_blocks("Q4_K", 64, 256), torch.arange(64).flip(0)
    turned = StoredWeight("Q4_K", 256, blocks, order)
    plain = QuantisedLinear([QuantisedWeight.of_blocks("Q4_K", blocks, 256)]).dequantised()
    assert torch.equal(QuantisedLinear([turned.packed()]).dequantised(), plain.flip(0))
    assert torch.equal(turned.sampled(torch.tensor([3, 5]), torch.float32), plain[[60, 58]])


def test_bits_of_activations_are_measured_once(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model whose distributions hardly change has 8, another 15; KV of one is not the other's."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    forwards: list[int] = []
    measure = precision._measure
    monkeypatch.setattr(precision, "_measure", lambda *args: forwards.append(1) or measure(*args))
    models = {}
    for bits, limit in ((COARSE_BITS, 1e9), (FINE_BITS, 0.0)):
        monkeypatch.setattr(precision, "DIVERGENCE_MAX", limit)
        for file in (tmp_path / "verdicts").glob("*activations*"):
            file.unlink()
        models[bits] = load(path, "auto")
        assert models[bits].activation_bits == bits == load(path, "auto").activation_bits
        layers = [layer for layer in linears_of(captured(models[bits])) if isinstance(layer, QuantisedLinear)]
        assert layers and {layer.activation_bits for layer in layers} == {bits}
    assert len(forwards) == 2
    assert models[COARSE_BITS].fingerprint != models[FINE_BITS].fingerprint


def test_exact_is_served_with_15_bits(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precision, "DIVERGENCE_MAX", 0.0)
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with LLM(str(path), dtype="bfloat16", threads=1, kv_memory="4MiB") as llm:
        assert llm.generate([[5, 6, 7]], exact=True, **asked)


def test_later_start_does_not_probe_or_compare_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And is the same model; other code finds everything out again."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    calls: list[str] = []
    for module, name in ((probe, "probe_model"), (capture, "_compare"), (comparison, "compare_in_pieces")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=function, n=name, **more: calls.append(n) or f(*args, **more))

    def start() -> tuple[LoadedModel, Tensor]:
        model = load(path, "auto")
        forward = capture_forward(model.module, model.fingerprint)
        return model, logits(forward, 40, 40)

    first, expected = start()
    assert set(calls) == {"probe_model", "_compare", "compare_in_pieces"}
    calls.clear()
    second, got = start()
    assert not calls and torch.equal(got, expected)
    assert (second.geometry, second.query_heads, second.attends_plainly) == (
        first.geometry, first.query_heads, first.attends_plainly,
    )  # fmt: skip
    monkeypatch.setattr(cache, "_code_digest", lambda: "other")
    start()
    assert set(calls) == {"probe_model", "_compare", "compare_in_pieces"}


@pytest.mark.parametrize("inner", [64, 48])
def test_experts_stay_quantised(inner: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gates and ups lie apart in the file; what does not fit blocks or strips becomes numbers."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    module = tiny_module("qwen3_moe", hidden_size=64, moe_intermediate_size=inner, num_experts=8, head_dim=32)
    file = write_gguf(module, tmp_path / "experts.gguf", with_head=True)
    kept = load(file, "auto")
    stored, experts = stored_of(kept.module), experts_of(kept.module)[0]
    assert len(stored.stack(experts.gate_up_proj.detach())) == (8 if inner == 64 else 0)
    forward = captured(kept)
    layers = {type(layer) for layer in forward._experts}
    assert layers == ({QuantisedLinear} if inner == 64 else {PackedLinear})
    numbers = EagerForward(load(file, "none").module, pack=False)
    for layer in (*linears_of(forward), *forward._experts):
        if isinstance(layer, QuantisedLinear):
            layer.exact = True
    got, expected = (logits(each, 50, 50) for each in (forward._run_operations, numbers))
    errors = (got - expected).square().mean(-1).sqrt() / expected.std()  # bfloat16: it sends a few to other experts
    assert float(errors.median()) < 0.02 and float((errors < 0.1).float().mean()) > 0.9


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_mapped_reader_reads_what_gguf_s_own_does(tmp_path: Path, order: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama", endianess=gguf.GGUFEndian[order])
    writer.add_array("tokens", ["", "a", "\u00e9t\u00e9", "x" * 300])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_uint64("wide", 1 << 40)
    writer.add_bool("yes", True)
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    blocks = gguf.quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    own, mapped = (reader(tmp_path / "odd.gguf") for reader in (gguf.GGUFReader, gguf_reader()))
    assert list(own.fields) == list(mapped.fields) and len(own.fields) == 8
    for name, field in own.fields.items():
        other = mapped.fields[name]
        assert (field.offset, field.data, field.types) == (other.offset, other.data, other.types)
        assert [(part.dtype, part.tobytes()) for part in field.parts] == [
            (part.dtype, part.tobytes()) for part in other.parts
        ]
        assert field.contents() == other.contents()
    assert mapped.fields["tokens"].contents() == ["", "a", "\u00e9t\u00e9", "x" * 300]
    for tensor, other in zip(own.tensors, mapped.tensors, strict=True):
        assert (tensor.name, tensor.data_offset, tensor.tensor_type) == (
            other.name, other.data_offset, other.tensor_type,
        )  # fmt: skip
        assert np.array_equal(tensor.data, other.data) and tensor.data.dtype == other.data.dtype
