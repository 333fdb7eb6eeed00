"""Models that are damaged, incomplete or odd: refused in one line with a hint, or they load and serve. Fingerprints."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from api_world import CONTEXT_TOKENS, EOS, running_server, tiny_tokenizer
from gguf_files import convert_here, write_gguf
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.units import KIB
from memserve.cli.doctor import check_model
from memserve.cli.output import Status
from memserve.host.build import build_engine
from memserve.model.loading import cache, sources
from memserve.model.loading.loader import LoadedModel, fingerprint, load_model
from mutations import mutated
from tiny_models import tiny_module

WEIGHTS = "model.safetensors"
FUZZ_SEEDS = 24


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, and none asks the network."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save_model(folder: Path, *, tied: bool = True, shards: bool = False) -> Path:
    """A tiny random Llama that speaks the tests' tokenizer, with a chat template."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_tokenizer().backend_tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=EOS, bos_token_id=None, pad_token_id=EOS, tie_word_embeddings=tied,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config)
    module.generation_config.temperature, module.generation_config.do_sample = 0.5, True
    module.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(healthy, tmp_path / "tiny"))


def load(source: Path) -> LoadedModel:
    return load_model(str(source), "float32", "cpu")


def refuse(source: Path, match: str) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        load(source)
    assert "\n" not in str(caught.value) and caught.value.hint and len(str(caught.value)) < 900
    return caught.value


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Other tensors in the checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def configure(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps(config))


# -- tensors


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


def test_tensors_that_are_missing_are_named(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(NORM), tensors.pop(GATE)])
    error = refuse(folder, "2 tensors are missing")
    assert NORM in error.message and GATE in error.message and "again" in error.hint


def test_of_many_that_are_missing_three_are_named(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    assert "9 tensors are missing" in refuse(folder, "and 6 more").message


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({GATE: torch.zeros(40, 32)}))
    assert f"{GATE} (40x32, the model has 48x32)" in refuse(folder, "1 tensors have another shape").message


SURPLUS = ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight", "w"]


@pytest.mark.parametrize("name", SURPLUS)
def test_surplus_tensor_is_refused_by_name(name: str, folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({name: torch.zeros(32)}))
    assert name in refuse(folder, "1 tensors have no place in the model").message


def test_fewer_layers_than_the_checkpoint_has_are_refused(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)
    refuse(folder, "9 tensors have no place")


def test_non_text_tensors_and_absent_tied_head_are_accepted(folder: Path) -> None:
    beside = [
        "vision_tower.layers.0.weight", "model.visual.blocks.0.attn.bias", "multi_modal_projector.linear.weight",
        "audio_tower.conv.weight", "mtp.layers.0.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]  # fmt: skip
    before = load(folder)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    change(folder, lambda tensors: tensors.update({name: torch.zeros(4) for name in beside}))
    after = load(folder)
    weights = after.module.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in before.module.state_dict().items())


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "untied", tied=False)
    assert load(folder).vocab_size
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refuse(folder, "tensors are missing: lm_head.weight")


def test_shards_must_all_be_there_and_whole(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "sharded", shards=True)
    shards, index = sorted(folder.glob("model-*.safetensors")), folder / "model.safetensors.index.json"
    assert len(shards) > 1 and load(folder).vocab_size
    whole, names = shards[1].read_bytes(), json.loads(index.read_text())
    shards[1].unlink()
    refuse(folder, "cannot load|missing|is no file")
    shards[1].write_bytes(whole[:-4])
    refuse(folder, "is damaged")
    shards[1].write_bytes(whole)
    lost = next(name for name, shard in names["weight_map"].items() if shard == shards[0].name)
    index.write_text(json.dumps({**names, "weight_map": {k: v for k, v in names["weight_map"].items() if k != lost}}))
    load_or_refuse(folder)
    for text in ("", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {}}'):
        index.write_text(text)
        load_or_refuse(folder)


def load_or_refuse(folder: Path) -> None:
    """One line and a hint; or every weight is what the checkpoint holds."""
    try:
        model = load(folder)
    except UserError as error:
        assert "\n" not in str(error) and error.hint
        return
    held = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert all(torch.equal(held[name], value) for name, value in model.module.state_dict().items() if name in held)
    assert held.keys() >= set(model.module.state_dict()) - {"lm_head.weight"}


def test_weights_that_are_no_numbers_are_refused(folder: Path) -> None:
    change(folder, lambda tensors: tensors[NORM].fill_(float("nan")))
    refuse(folder, "NaN")


# -- files


def header(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


DAMAGED = {
    "empty": lambda data: b"",
    "seven bytes": lambda data: data[:7],
    "the header is cut off": lambda data: data[:40],
    "the header is huge": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "the header is no JSON": lambda data: data[:8] + b"{" * header(data) + data[8 + header(data) :],
    "the header is a list": lambda data: (2).to_bytes(8, "little") + b"[]",
    "offsets are outside": lambda data: data[: len(data) // 2],
    "more data than tensors": lambda data: data + bytes(64),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_safetensors_file_is_named(kind: str, folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(DAMAGED[kind](file.read_bytes()))
    assert str(file) in refuse(folder, "is damaged").message


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json", "generation_config.json", "model.gguf"])
def test_fifo_in_the_model_folder_does_not_block(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refuse(folder, "is a pipe, not a file").message.startswith(str(folder / name))


def test_doctor_refuses_a_model_folder_with_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "more.safetensors")
    [finding] = [finding for finding in check_model(str(folder)) if finding.name == "model"]
    assert finding.status is Status.FAIL and "is a pipe, not a file" in finding.detail


def test_devices_and_sockets_in_a_model_s_folder_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")
    refuse(folder, "is a device, not a file")
    (folder / WEIGHTS).unlink()
    (folder / "nowhere.json").symlink_to(folder / "absent")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s"))
        refuse(folder, "is a socket, not a file")


class Planted:
    """What unpickling would run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_read(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"x": Planted(tmp_path / "planted")}, folder / name)
    assert name in refuse(folder, "pickle").message
    assert not (tmp_path / "planted").exists()


def test_code_that_comes_with_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    for name in ("modeling_x.py", "tokenization_x.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    own = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    configure(folder, auto_map=own, model_type="strange")
    refuse(folder, "cannot load")
    configure(folder, auto_map={}, model_type="llama")
    configure(
        folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.T", None]}, tokenizer_class="T"
    )
    load_or_refuse(folder)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is '0'"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four'"),
        ({"hidden_size": -32}, "hidden_size is '-32'"),
        ({"vocab_size": True}, "vocab_size is 'True'"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, more than"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is '0'"),
        ({"hidden_size": 10**6, "head_dim": 8}, "describes [0-9]+ weights, and its files hold"),
        ({"num_hidden_layers": 5000}, "describes [0-9]+ weights, and its files hold"),
        ({"num_attention_heads": 7}, "cannot load|another shape"),
        ({"model_type": "no-such-family"}, "cannot load"),
        ({"rope_parameters": "x"}, "cannot load .* for field 'rope_parameters'"),
        ({"hidden_act": "no-such"}, "cannot load .* KeyError: 'no-such'"),
    ],
)  # fmt: skip
def test_numbers_that_no_model_has_are_named(values: dict[str, Any], words: str, folder: Path) -> None:
    configure(folder, **values)
    refuse(folder, words)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_files_that_are_no_json_are_named(name: str, data: bytes, folder: Path) -> None:
    (folder / name).write_bytes(data)
    refuse(folder, name if name == "config.json" else "has no tokenizer that transformers can load")


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({"temperature": float("nan"), "top_p": 0.5}, {"top_p": 0.5}),
        ({"temperature": "warm", "top_k": True, "min_p": [1], "repetition_penalty": 0}, {}),
        ({"temperature": -1, "top_p": 7, "top_k": 2.5, "min_p": float("inf"), "repetition_penalty": 1.1},
         {"repetition_penalty": 1.1}),
        ({"temperature": 10**400, "top_k": 20}, {"top_k": 20}),
    ],
)  # fmt: skip
def test_odd_recommendations_are_warned_of_and_not_used(written, wanted, folder: Path, caplog) -> None:
    (folder / "generation_config.json").write_text(json.dumps(written))
    assert load(folder).generation_defaults == wanted
    assert len([record for record in caplog.records if "and is not used" in record.message]) == len(written) - len(
        wanted
    )


@pytest.mark.parametrize("data", [b"", b"{", b"[3]", b"\xff"])
def test_damaged_generation_config_is_ignored_with_a_warning(data: bytes, folder: Path, caplog) -> None:
    (folder / "generation_config.json").write_bytes(data)
    assert load(folder).generation_defaults == {} and "is not used" in caplog.text


def test_ends_of_sequence_that_are_no_tokens_are_warned_of(folder: Path, caplog) -> None:
    configure(folder, "generation_config.json", eos_token_id=[EOS, -7, 10**9, 5, True])
    assert set(load(folder).eos_token_ids) == {EOS, 5} and "-7, 1000000000, True" in caplog.text


# -- fingerprints


def big_folder(folder: Path) -> tuple[Path, int]:
    """With weights of 4 MB with a middle that no sample of some KiB would meet."""
    change(folder, lambda tensors: tensors.update({"vision_tower.big.weight": torch.zeros(1 << 20)}))
    return folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2 + 12345


def edit_in_place(file: Path, at: int, count: int) -> None:
    """Other bytes, and the same size, inode and modification time."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\x3f" * count)
    os.utime(file, ns=times)


@pytest.mark.parametrize("count", [1, 1_500_000])
def test_any_byte_of_the_weights_is_in_the_fingerprint(count: int, folder: Path) -> None:
    file, at = big_folder(folder)
    before = fingerprint(folder)
    edit_in_place(file, at, count)
    assert fingerprint(folder) != before


def test_gguf_file_changed_in_the_middle_is_reconverted(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(6_000_000))
    keys: list[str] = []

    def seen(key: str, version: int, build: Any) -> Path:
        keys.append(key)
        return tmp_path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "cached_folder", seen)
        sources.converted_folder(file, "float32")
        edit_in_place(file, 2_000_000, 1_500_000)
        sources.converted_folder(file, "float32")
    assert len(set(keys)) == 2


def test_files_are_read_once_and_again_when_they_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, at = big_folder(folder)
    reads: list[int] = []
    whole = cache.hashlib.file_digest

    def counted(opened: Any, name: str) -> Any:
        reads.append(1)
        return whole(opened, name)

    monkeypatch.setattr(cache.hashlib, "file_digest", counted)
    first = cache.whole_digest(file)
    assert cache.whole_digest(file) == first and len(reads) == 2  # it was written a moment ago
    monkeypatch.setattr(cache, "_RECENT_NS", -(10**18))
    assert [cache.whole_digest(file) for _ in range(3)] == [first] * 3 and len(reads) == 3
    edit_in_place(file, at, 7)
    assert cache.whole_digest(file) != first and len(reads) == 4
    kept = next((cache.cache_root() / "digests").iterdir())
    for damage in ("", "{", "[]", '{"sha256": "zz"}', kept.read_text().replace('"sha256": "', '"sha256": "00')):
        kept.write_text(damage)
        assert cache.whole_digest(file) != first
    assert len(reads) == 9


def test_a_cache_that_cannot_be_written_costs_time_only(folder: Path, monkeypatch, tmp_path: Path) -> None:
    before = fingerprint(folder)
    monkeypatch.setattr(cache, "_RECENT_NS", -(10**18))
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "file"))
    assert fingerprint(folder) == before


# -- GGUF


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    module = tiny_module("llama")
    whole = module.state_dict()
    module.state_dict = lambda: {name: value for name, value in whole.items() if "layers.1.mlp.up_proj" not in name}
    path = write_gguf(module, tmp_path / "lacks.gguf")
    assert "model.layers.1.mlp.up_proj.weight" in refuse(path, "1 tensors are missing").message


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_gguf_file_is_refused_in_one_line(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed:  # a process of its own says it as one line as well
        convert_here(monkeypatch)
    path = write_gguf(tiny_module("llama"), tmp_path / "torn.gguf")
    data = path.read_bytes()
    rng = random.Random(seed)
    if seed % 2:
        path.write_bytes(data[: rng.randrange(4, len(data) // 2)])
    else:  # counts and lengths at the beginning
        path.write_bytes(data[:8] + rng.randbytes(40) + data[48:])
    refuse(path, "cannot convert torn.gguf")


# -- at random


def serves(folder: Path) -> None:
    """Two questions are answered, or refused with a reason."""
    options = EngineOptions(
        model=str(folder),
        dtype="float32",
        kv_memory_bytes=160 * KIB,
        threads=1,
        scheduler=SchedulerConfig(max_running=4),
    )
    engine, model = build_engine(options)
    try:
        with running_server(engine, model) as world, httpx.Client(base_url=world.url, timeout=60) as http:
            messages = [{"role": "user", "content": "hello"}]
            for path, question in (("chat/completions", {"messages": messages}), ("completions", {"prompt": "hello"})):
                answer = http.post(f"/v1/{path}", json={"model": model.name, "max_tokens": 3, **question})
                assert answer.status_code in (200, 400), answer.text
    finally:
        engine.close(10)


def damage(folder: Path, rng: random.Random) -> str:
    """One file of the folder is mutated, or gone."""
    names = ["config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS]
    names += [name for name in ("chat_template.jinja", "special_tokens_map.json") if (folder / name).exists()]
    path = folder / rng.choice(names)
    if rng.random() < 0.05:
        path.unlink()
    else:
        path.write_bytes(mutated(path.read_bytes(), rng))
    return path.name


@pytest.mark.parametrize("seed", range(FUZZ_SEEDS))
def test_a_mutated_model_is_refused_in_one_line_or_serves(seed: int, folder: Path) -> None:
    damage(folder, random.Random(seed))
    try:
        serves(folder)
    except UserError as error:
        assert error.hint and "\n" not in str(error) and len(str(error)) < 900
