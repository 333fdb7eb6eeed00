"""Loading: every source, the conversion cache, fingerprints, packed linears, and one clear error for each mistake."""

from __future__ import annotations

import json
import shutil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gguf_files import write_gguf
from memserve.base.errors import UserError
from memserve.model.forward import PackedLayer, pack_linears
from memserve.model.loading import sources
from memserve.model.loading.cache import MARKER, cached_folder
from memserve.model.loading.loader import fingerprint, load_model
from memserve.model.loading.probe import DenseAttention, probe_model
from tiny_models import CONTEXT_TOKENS, VOCAB, greedy_tokens, prompt, save_folder, tiny_module


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, and none asks the network."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("tiny") / "tiny-llama")


def test_a_folder_loads_with_all_that_serving_needs(folder: Path) -> None:
    model = load_model(str(folder), "float32", "cpu")
    assert (model.name, model.vocab_size, model.max_model_tokens) == ("tiny-llama", VOCAB, CONTEXT_TOKENS)
    assert model.eos_token_ids == (2,) and not model.has_chat_template
    g = model.geometry
    assert (g.num_layers, g.num_kv_heads, g.head_dim_k, g.head_dim_v, g.dtype) == (3, 2, 8, 8, "float32")
    assert greedy_tokens(model.module, prompt(9, 1), 2) == greedy_tokens(tiny_module("llama"), prompt(9, 1), 2)


def test_end_of_sequence_ids_come_from_everywhere(folder: Path, tmp_path: Path) -> None:
    """A list in the generation config, and the token by which the chat template ends a turn."""
    copy = Path(shutil.copytree(folder, tmp_path / "chatty"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": 130, "content": "<|im_end|>", **flags})
    tokenizer["model"]["vocab"].pop("w130")
    tokenizer["model"]["vocab"]["<|im_end|>"] = 130
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = load_model(str(copy), "float32", "cpu")
    assert model.eos_token_ids == (2, 5, 6, 130) and model.has_chat_template


def test_the_fingerprint_follows_config_and_weights(folder: Path, tmp_path: Path) -> None:
    same = Path(shutil.copytree(folder, tmp_path / "same"))
    assert fingerprint(same) == fingerprint(folder)
    other = save_folder(tiny_module("llama", seed=1), tmp_path / "other")
    config = Path(shutil.copytree(folder, tmp_path / "config"))
    (config / "config.json").write_text((config / "config.json").read_text().replace("10000.0", "20000.0"))
    assert len({fingerprint(folder), fingerprint(other), fingerprint(config)}) == 3


def refuse(source: Any, match: str, **options: str) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        load_model(str(source), **({"dtype": "float32", "device": "cpu"} | options))
    assert "\n" not in str(caught.value) and caught.value.hint
    return caught.value


def test_mistakes_get_one_clear_line(folder: Path, tmp_path: Path) -> None:
    refuse("/nowhere/at/all", "there is no model")
    refuse("nobody/nothing", "neither a local folder nor in the hub cache")
    refuse(folder, "unknown dtype", dtype="int3")
    refuse(folder, "unknown device", device="abacus")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "no config.json")
    refuse(folder / "config.json", "not a .gguf file")
    (tmp_path / "fake.gguf").write_bytes(b"nonsense")
    refuse(tmp_path / "fake.gguf", "is not a GGUF file")
    bare = Path(shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))
    refuse(bare, "cannot load bare as a causal language model")
    mute = Path(shutil.copytree(folder, tmp_path / "mute", ignore=shutil.ignore_patterns("token*")))
    refuse(mute, "no tokenizer")
    if not torch.cuda.is_available():
        refuse(folder, "no usable CUDA device", device="cuda")


def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    import transformers as t

    t.T5Config(d_model=32, num_layers=1).save_pretrained(tmp_path / "t5")
    refuse(tmp_path / "t5", "cannot load t5 as a causal language model")
    shape = {"hidden_size": 32, "vocab_size": VOCAB}
    configs = {
        "falcon": t.FalconConfig(**shape, num_attention_heads=4, num_hidden_layers=2),
        "bloom": t.BloomConfig(**shape, n_head=4, n_layer=2),
        "rwkv": t.RwkvConfig(**shape, attention_hidden_size=32, num_hidden_layers=2, context_length=64),
    }
    for family, config in configs.items():
        t.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        refuse(tmp_path / family, f"a {family} model cannot be served")


def test_the_probe_refuses_what_it_cannot_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers missing, and logits that change with the attention that was described, or with what layers are said to
    keep."""
    inner = DenseAttention.run_attention

    def without_the_last(self: DenseAttention, layer: int, *parts: Any, **options: Any) -> Any:
        out = inner(self, layer, *parts, **options)
        if layer == 2:
            self.layers.pop()
        return out

    def with_other_heads(self: DenseAttention, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return (
            inner(self, layer, q, k[..., : 8 - layer], v, **options)
            if layer == 0
            else inner(self, layer, q[..., :4], k[..., :4], v, **options)
        )

    def with_another_scale(self: DenseAttention, layer: int, *parts: Any, **options: Any) -> Any:
        return inner(self, layer, *parts, **(options | {"scale": 0.0}))

    for broken, message in (
        (without_the_last, r"layers \[2\] have no attention"),
        (with_other_heads, "its logits change by"),
        (with_another_scale, "its logits change by"),
    ):
        monkeypatch.setattr(DenseAttention, "run_attention", broken)
        with pytest.raises(UserError, match=message):
            probe_model(tiny_module("llama"), "float32", 32)


def test_unreported_local_attention_limits_context(folder: Path) -> None:
    from memserve.model.loading.loader import _max_model_tokens
    from memserve.model.loading.probe import ProbedLayer

    module = tiny_module("gemma2")
    layers = [ProbedLayer(layer, 2, 16, 16, window=0) for layer in range(3)]
    assert _max_model_tokens(module.config, layers) == 24
    told = [ProbedLayer(layer, 2, 16, 16, window=24) for layer in range(3)]
    assert _max_model_tokens(module.config, told) == CONTEXT_TOKENS


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_packed_linears_compute_the_same_and_hold_no_original(dtype: str, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 32, bias=False)).to(getattr(torch, dtype))
    packed = torch.nn.Sequential(*plain)
    assert pack_linears(packed) == 2
    assert all(type(layer) is PackedLayer and layer.weight.is_meta for layer in packed)
    for rows in (0, 1, 7, 200):
        x = torch.randn(1, rows, 48).to(plain[0].weight.dtype)
        with torch.inference_mode():
            torch.testing.assert_close(packed(x), plain(x), rtol=tolerance, atol=tolerance)


def test_plain_linears_stay_where_packing_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (lambda x, w, b: torch.zeros(*x.shape[:-1], 64), _raise):
        monkeypatch.setattr("memserve.model.forward._linear", broken)
        module = torch.nn.Sequential(torch.nn.Linear(48, 64))
        assert pack_linears(module) == 0 and type(module[0]) is torch.nn.Linear


def _raise(*_: Any) -> Any:
    raise RuntimeError("no such op")


# -- the conversion cache


def test_an_entry_is_built_once_and_torn_ones_again(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(path: Path) -> None:
        assert not list(path.iterdir())
        (path / "weights").write_text("x")
        built.append(path)

    entry = cached_folder("m", 1, build)
    assert cached_folder("m", 1, build) == entry and len(built) == 1
    assert cached_folder("m", 2, build) == entry and len(built) == 2  # outdated
    (entry / MARKER).unlink()
    (entry.parent / "m.partial").mkdir()
    (entry.parent / "m.partial" / "rest").write_text("of a builder that died")
    assert cached_folder("m", 2, build) == entry and len(built) == 3  # torn
    (entry / MARKER).write_text("{")
    assert cached_folder("m", 2, build) == entry and len(built) == 4


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(path: Path) -> None:
        (path / "half").write_text("x")
        raise UserError("broken file")

    with pytest.raises(UserError, match="broken file"):
        cached_folder("m", 1, build)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["m.lock"]


def test_a_cache_that_cannot_be_written_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the model cache"):
        cached_folder("m", 1, lambda path: None)


def _build_in_process(log: str) -> None:
    def build(path: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")

    cached_folder("shared", 1, build)


def test_two_processes_build_an_entry_once(tmp_path: Path) -> None:
    context = get_context("fork")
    workers = [context.Process(target=_build_in_process, args=(str(tmp_path / "log"),)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "log").read_text() == "built\n" and all(worker.exitcode == 0 for worker in workers)


# -- GGUF


def test_a_gguf_file_keeps_its_exact_values(tmp_path: Path) -> None:
    """Converted once in another process; float32 equals transformers reading the file itself, bfloat16 its rounding."""
    from transformers import AutoModelForCausalLM

    path = write_gguf(tiny_module("llama"), tmp_path / "tiny.Q8_0.gguf")
    exact = load_model(str(path), "float32", "cpu")
    direct: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    weights = exact.module.state_dict()
    assert weights.keys() == direct.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in direct.state_dict().items())
    assert exact.name == "tiny.Q8_0" and exact.max_model_tokens == CONTEXT_TOKENS and 2 in exact.eos_token_ids
    assert greedy_tokens(exact.module, prompt(8, 2), 3) == greedy_tokens(direct, prompt(8, 2), 3)

    rounded = sources.converted_folder(path, "bfloat16")
    assert rounded.name == "bfloat16" and json.loads((rounded / "config.json").read_text())["dtype"] == "bfloat16"
    low = load_model(str(rounded), "bfloat16", "cpu").module.state_dict()
    assert all(torch.equal(value.bfloat16(), low[name]) for name, value in weights.items())


def test_a_broken_gguf_file_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + np.arange(64, dtype=np.uint8).tobytes())
    refuse(tmp_path / "torn.gguf", "cannot convert torn.gguf")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_missing_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BUNDLE", "no_such_package")
    refuse(sources.DEFAULT_MODEL, "is not installed")
