"""LoRA adapters: every row has the tokens of a model with its adapter merged in, whatever shares its steps."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_files import merged, save_adapter
from memserve import LLM, SamplingParams, UserError
from memserve.base.types import adapter_of, isolation, salt_of
from memserve.model.forward import EagerForward
from memserve.model.loading.lora import read_adapters
from memserve.model.lora import Adapters
from tiny_models import Driver, greedy_answers, greedy_tokens, loaded, prompt, save_folder, sequence, tiny_module

TARGETS = {
    "llama": ["q_proj", "v_proj", "gate_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "o_proj", "up_proj"],
    "gemma2": ["v_proj", "down_proj"],
    "gpt_oss": ["q_proj"],
    "opt": ["q_proj", "fc1", "fc2"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "minicpm3": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"],
    "lfm2": ["in_proj", "w2", "k_proj"],
    "jamba": ["in_proj", "x_proj", "out_proj", "q_proj", "down_proj"],
    "mamba2": ["in_proj", "out_proj"],
    "falcon_h1": ["in_proj", "v_proj", "down_proj"],
}
NEW_TOKENS = 20
PROMPTS = [prompt(40 + 7 * seed, seed=seed).tolist() for seed in range(3)]
GREEDY = SamplingParams(temperature=0.0)


def load(folder: Path, adapters: dict[str, Path], **options: Any) -> LLM:
    settings = {"dtype": "float32", "threads": 1, "max_running": 6, "kv_memory": "8MiB", **options}
    return LLM(str(folder), lora=[f"{name}={place}" for name, place in adapters.items()], **settings)


def at_once(llm: LLM, names: list[str]) -> dict[str, list[list[int]]]:
    """The answers to all prompts of all adapters (empty: none), asked at the same time."""
    answers: dict[str, list[list[int]]] = {}

    def ask(name: str) -> None:
        more = {"adapter": name} if name else {}
        done = llm.generate(PROMPTS, GREEDY, max_tokens=NEW_TOKENS, ignore_eos=True, **more)
        answers[name] = [one.outputs[0].tokens for one in done]

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture(scope="module", params=list(TARGETS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A model's folder, two adapters, and what the model answers without and with each of them."""
    module, place = tiny_module(request.param), tmp_path_factory.mktemp(request.param)
    adapters = {
        "one": save_adapter(place / "one", module, TARGETS[request.param], seed=1),
        "two": save_adapter(place / "two", module, TARGETS[request.param][:1], seed=2, use_rslora=True),
    }
    wholes = {"": module, "one": merged(module, adapters["one"]), "two": merged(module, adapters["two"], 8 / 2)}
    folder = save_folder(module, place / "model")
    expected = {name: greedy_answers(whole, PROMPTS, NEW_TOKENS) for name, whole in wholes.items()}
    return folder, adapters, expected


def test_rows_of_several_adapters_share_steps(world: tuple[Any, ...]) -> None:
    folder, adapters, expected = world
    with load(folder, adapters, prefill_chunk_tokens=16) as llm:
        for _ in range(2):  # the second time with what the first has cached
            assert at_once(llm, ["", "one", "two"]) == expected
    assert expected[""] != expected["one"] != expected["two"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path, Path]:
    module, place = tiny_module("llama"), tmp_path_factory.mktemp("llama")
    one, two = (save_adapter(place / f"{seed}", module, TARGETS["llama"], seed) for seed in (1, 2))
    return module, save_folder(module, place / "model"), one, two


def test_adapters_share_no_kv(llama: tuple[Any, Path, Path, Path]) -> None:
    _, folder, one, two = llama
    tokens = prompt(100, seed=5).tolist()
    with load(folder, {"one": one, "two": two, "same": one}) as llm:
        cached = {}
        for name in ("", "one", "two", "same", "", "one", "two"):
            more = {"adapter": name} if name else {}
            (answer,) = llm.generate(tokens, GREEDY, max_tokens=4, **more)
            cached.setdefault(name, []).append(answer.cached_tokens)
        (salted,) = llm.generate(tokens, GREEDY, max_tokens=4, adapter="one", cache_salt="mine")
    assert cached == {"": [0, 96], "one": [0, 96], "two": [0, 96], "same": [96]}, "two names of one content share"
    assert salted.cached_tokens == 0


def test_sequences_keep_their_adapter_when_memory_is_short(llama: tuple[Any, Path, Path, Path]) -> None:
    module, folder, one, two = llama
    wholes = {"": module, "one": merged(module, one), "two": merged(module, two)}
    with load(folder, {"one": one, "two": two}) as llm:
        block_bytes = llm.model.geometry.block_bytes
    with load(folder, {"one": one, "two": two}, kv_memory=9 * block_bytes, dram_memory=40 * block_bytes) as llm:
        answers = at_once(llm, list(wholes))
        counted = llm.stats().instance
        assert counted.preemptions_swap + counted.preemptions_recompute > 0
    for name, whole in wholes.items():
        assert answers[name] == greedy_answers(whole, PROMPTS, NEW_TOKENS), name


def test_a_module_that_is_not_captured_adapts_as_well(llama: tuple[Any, Path, Path, Path]) -> None:
    module, _, one, _ = llama
    tokens = prompt(50, seed=9)
    expected = greedy_tokens(merged(module, one), tokens, 6), greedy_tokens(module, tokens, 6)
    model = loaded(tiny_module("llama"))
    (adapter,) = read_adapters([f"one={one}"])
    model.adapters = Adapters(model.module, [adapter])
    driver = Driver(model, adapters=model.adapters.digests, forward=EagerForward(model.module))
    opened = [sequence(0, tokens, [0, 1], adapter=adapter.digest), sequence(1, tokens, [2, 3])]
    first = driver.step([(0, 0, 50, (0,)), (1, 0, 50, (1,))], open=opened).tokens
    drawn = [first, *(driver.step([(0, at, 1, (0,)), (1, at, 1, (1,))]).tokens for at in range(50, 55))]
    assert tuple(map(list, zip(*drawn, strict=True))) == expected


def test_row_with_unknown_adapter_fails_and_kv_is_suspect() -> None:
    driver = Driver(loaded(tiny_module("llama")))
    tokens = prompt(20, seed=1)
    done = driver.step([(0, 0, 20, (0,)), (1, 0, 20, (1,))], open=[sequence(0, tokens, [0], adapter="ab"),
                                                                   sequence(1, tokens, [1])])  # fmt: skip
    assert list(done.failed) == [0] and done.failed[0].kv_is_suspect


def test_kv_isolation_includes_the_adapter() -> None:
    assert salt_of("", "") == "" and adapter_of("") == adapter_of("5a17") == ""
    assert adapter_of(salt_of("5a17", "c0de")) == adapter_of(salt_of("", "c0de")) == "c0de"
    names = {isolation("tenant", salt_of(salt, adapter)) for salt in ("", "5a17") for adapter in ("", "c0de", "5a17")}
    assert len(names) == 6


WHOLE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("said", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, "no LoRA adapter"),
        ({"use_dora": True}, {}, "no magnitudes of DoRA"),
        ({"bias": "all"}, {}, "bias"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32),
              "base_model.model.lm_head.lora_B.weight": torch.ones(131, 4)}, "no linear inside of a layer"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 32)}, "no half of a linear's pair"),
        ({}, {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 32),
              "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.ones(32, 4)}, "does not have"),
        ({}, {f"base_model.model.{WHOLE}.lora_A.weight": torch.ones(4, 31)}, "matrices of"),
        ({}, {f"base_model.model.{WHOLE}.lora_B.weight": torch.full((32, 4), torch.nan)}, "not finite"),
        ({}, {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 32)}, "one of two matrices"),
        ({"lora_alpha": "x"}, {}, r"Expected `float`, got `str` - at `\$.lora_alpha`"),
        ({"lora_alpha": None}, {}, r"got `null` - at `\$.lora_alpha`"),
        ({"alpha_pattern": {"q_proj": "x"}}, {}, r"got `str` - at `\$.alpha_pattern"),
        ({"alpha_pattern": {"q_(": 2}}, {}, "no regular expression"),
        ({"alpha_pattern": ["q_proj"]}, {}, r"Expected `object . null`, got `array` - at `\$.alpha_pattern`"),
        ({"use_rslora": "false"}, {}, r"at `\$.use_rslora`"),
        ({"r": 0}, {}, r"Expected `int` >= 1 - at `\$.r`"),
        ({"r": -1}, {}, r"Expected `int` >= 1"),
        ({"r": "x"}, {}, r"got `str` - at `\$.r`"),
        ({"r": 2**40}, {}, "says rank 1099511627776 for .*, and has matrices of rank 4"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "says rank 2 for"),
        ({"layers_to_transform": [99]}, {}, "names layer 99 in layers_to_transform"),
        ({"layers_to_transform": 0}, {}, "has matrices for .*layers.1.*, which its layers_to_transform leaves out"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, {}, "names layer 0"),
        ({"target_modules": ["v_proj"]}, {}, "its target_modules leaves out"),
        ({"exclude_modules": r".*\.0\..*"}, {}, "its exclude_modules leaves out"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights=.pissa."),
    ],
)  # fmt: skip
def test_unservable_adapter_is_refused_with_reason(
    llama: tuple[Any, Path, Path, Path], tmp_path: Path, said: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    module, folder, _, _ = llama
    odd = save_adapter(tmp_path / "odd", module, ["q_proj"], seed=3, tensors=tensors, **said)
    with pytest.raises(UserError, match=message) as raised:
        load(folder, {"odd": odd})
    assert "'odd'" in raised.value.message and raised.value.hint


def test_all_that_a_config_says_of_matrices_is_followed(llama: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    module, folder, _, _ = llama
    said = {
        "r": 64, "rank_pattern": {"q_proj": 4}, "lora_alpha": 5, "alpha_pattern": {r"layers\.\d.self_attn.q_proj": 12},
        "target_modules": r".*\.q_proj", "exclude_modules": ["v_proj"],
        "layers_to_transform": [0, 1, 2], "layers_pattern": "layers",
    }  # fmt: skip
    own = save_adapter(tmp_path / "own", module, ["q_proj"], seed=3, **said)
    whole = merged(module, own, 12 / 4)
    with load(folder, {"own": own}) as llm:
        answers = at_once(llm, ["own"])["own"]
    assert answers == greedy_answers(whole, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b'{"peft_type": "LORA", "lora_alpha": NaN}', b"[" * 5000])
def test_config_that_is_no_object_is_one_clear_error(
    llama: tuple[Any, Path, Path, Path], tmp_path: Path, data: bytes
) -> None:
    odd = save_adapter(tmp_path / "odd", llama[0], ["q_proj"], seed=3)
    (odd / "adapter_config.json").write_bytes(data)
    with pytest.raises(UserError, match="'odd'") as raised:
        read_adapters([f"odd={odd}"])
    assert raised.value.hint


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_fifo_in_the_adapter_folder_does_not_block(
    llama: tuple[Any, Path, Path, Path], tmp_path: Path, name: str
) -> None:
    odd = save_adapter(tmp_path / "odd", llama[0], ["q_proj"], seed=3)
    (odd / name).unlink()
    os.mkfifo(odd / name)
    with pytest.raises(UserError, match="is a pipe, not a file"):
        read_adapters([f"odd={odd}"])


@pytest.mark.parametrize("text", ["", "name", "=folder", "name="])
def test_an_option_without_name_or_folder_says_how_it_is_written(text: str) -> None:
    with pytest.raises(UserError, match="--lora") as raised:
        read_adapters([text])
    assert "NAME=FOLDER" in raised.value.hint


def test_adapter_of_what_expands_latents_is_refused(tmp_path: Path) -> None:
    """What lies in the cache is before it, and of rows with and without the adapter alike."""
    module = tiny_module("minicpm3")
    folder = save_folder(module, tmp_path / "model")
    adapter = save_adapter(tmp_path / "kv", module, ["o_proj", "kv_b_proj"], seed=1)
    with pytest.raises(UserError, match=r"adds to .*kv_b_proj, which makes keys and values of latents"):
        load(folder, {"kv": adapter})


def test_adapter_of_a_linear_that_is_not_called_is_refused(tmp_path: Path) -> None:
    """Mamba multiplies the weight of its time steps itself: nothing would be added."""
    module = tiny_module("jamba")
    folder, adapter = save_folder(module, tmp_path / "model"), save_adapter(tmp_path / "dt", module, ["dt_proj"], 1)
    with pytest.raises(UserError, match=r"adds to .*dt_proj, whose weights the model uses without calling it"):
        load(folder, {"dt": adapter})


def test_missing_folders_and_duplicate_names_are_refused(llama: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    _, folder, one, two = llama
    with pytest.raises(UserError, match="cannot read the adapter 'gone'"):
        read_adapters([f"gone={tmp_path / 'gone'}"])
    with pytest.raises(UserError, match="two adapters"):
        read_adapters([f"one={one}", f"ONE={two}"])
    with load(folder, {"one": one}) as llm, pytest.raises(UserError, match="no adapter is named 'two'"):
        llm.generate("w3", adapter="two")


OWN = {
    "dora": {"targets": ["q_proj", "o_proj", "down_proj"], "dora": True},
    "embedding and head": {"targets": ["q_proj"], "saves": ("model.embed_tokens", "lm_head")},
    "head alone": {"targets": ["v_proj"], "saves": ("lm_head",), "dora": True},
}
"""What adapters have beyond two matrices; all of it was compared with PEFT 0.21 itself as well."""


@pytest.fixture(params=["llama", "qwen3"])
def kinds(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path, dict[str, Path]]:
    module = tiny_module(request.param)
    folders = {name: save_adapter(tmp_path / name, module, seed=5, **fields) for name, fields in OWN.items()}
    return module, save_folder(module, tmp_path / "model"), folders


@pytest.mark.parametrize("while_serving", [False, True], ids=["at the start", "while serving"])
def test_dora_and_weights_of_its_own_are_exact(
    kinds: tuple[Any, Path, dict[str, Path]], tmp_path: Path, while_serving: bool
) -> None:
    module, folder, folders = kinds
    wholes = {"": module} | {name: merged(module, place) for name, place in folders.items()}
    expected = {name: greedy_answers(whole, PROMPTS, NEW_TOKENS) for name, whole in wholes.items()}
    more = {"lora_folder": str(tmp_path)} if while_serving else {}
    with load(folder, {} if while_serving else folders, prefill_chunk_tokens=16, **more) as llm:
        assert while_serving or llm.model.adapters is not None
        for name, place in folders.items() if while_serving else ():
            llm.load_adapter(name, str(place))
        assert at_once(llm, list(expected)) == expected
    assert len({str(answer) for answer in expected.values()}) == len(expected)


@pytest.mark.parametrize("family", ["opt", "gemma2"])
def test_dora_leaves_the_bias_and_scaled_embeddings_alone(family: str, tmp_path: Path) -> None:
    """OPT's linears have biases, and Gemma multiplies what it looks up."""
    module = tiny_module(family)
    for part in module.modules():
        if isinstance(part, torch.nn.Linear) and part.bias is not None:
            part.bias.data.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(len(part.bias)))
    own = {"opt": {"targets": ["q_proj", "fc1", "fc2"], "dora": True},
           "gemma2": {"targets": ["v_proj"], "saves": ("model.embed_tokens",)}}[family]  # fmt: skip
    place = save_adapter(tmp_path / "own", module, seed=5, **own)
    with load(save_folder(module, tmp_path / "model"), {"own": place}) as llm:
        answers = at_once(llm, ["own", ""])
    assert answers["own"] == greedy_answers(merged(module, place), PROMPTS, NEW_TOKENS) != answers[""]


def test_adapters_come_and_go_between_other_requests(llama: tuple[Any, Path, Path, Path]) -> None:
    module, folder, one, two = llama
    wholes = {"": module, "one": merged(module, one), "two": merged(module, two)}
    expected = {name: greedy_answers(whole, PROMPTS, NEW_TOKENS) for name, whole in wholes.items()}
    with load(folder, {"one": one}, lora_folder="/", max_loras=1, max_lora_rank=4) as llm:
        captured = llm._engine._instance._device._forward
        for _ in range(3):
            llm.load_adapter("two", str(two))
            assert at_once(llm, ["", "one", "two"]) == expected
            llm.unload_adapter("two")
            with pytest.raises(UserError, match="no adapter is named 'two'"):
                llm.generate("w3", adapter="two")
        llm.load_adapter("name", str(two))
        llm.load_adapter("name", str(one))  # leads elsewhere now
        assert at_once(llm, ["name"])["name"] == expected["one"]
        assert llm._engine._instance._device._forward is captured, "nothing is captured anew"


def test_old_kv_never_meets_new_files_of_a_name(llama: tuple[Any, Path, Path, Path]) -> None:
    _, folder, one, two = llama
    tokens = prompt(100, seed=5).tolist()
    with load(folder, {}, lora_folder="/") as llm:
        cached = []
        for place in (one, one, two, two, one):
            llm.load_adapter("name", str(place))
            cached.append(llm.generate(tokens, GREEDY, max_tokens=4, adapter="name")[0].cached_tokens)
            llm.unload_adapter("name")
    assert cached == [0, 96, 0, 96, 96], "KV is the files', whatever leads to them"


def test_room_for_adapters_is_bounded_and_stated(llama: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    module, folder, one, two = llama
    wide = save_adapter(tmp_path / "wide", module, ["q_proj"], seed=7, rank=8)
    third, fourth = (save_adapter(tmp_path / f"{seed}", module, ["q_proj"], seed) for seed in (8, 9))
    with load(folder, {}, lora_folder="/", max_loras=2, max_lora_rank=4) as llm:
        adapters = llm.model.adapters
        assert adapters is not None
        sites = [part for part in module.model.modules() if isinstance(part, torch.nn.Linear)]
        assert adapters.room_bytes == 3 * 4 * sum(part.in_features + part.out_features for part in sites) * 4
        with pytest.raises(UserError, match="LoRA rank 8 is greater than max_lora_rank 4"):
            llm.load_adapter("wide", str(wide))
        for name, place in {"one": one, "two": two, "third": third}.items():
            llm.load_adapter(name, str(place))
        with pytest.raises(UserError, match="there is room for 2") as raised:
            llm.load_adapter("fourth", str(fourth))
        assert "no room for another adapter" in raised.value.message
        llm.unload_adapter("two")
        llm.load_adapter("fourth", str(fourth))
        assert at_once(llm, ["fourth"])["fourth"] == greedy_answers(merged(module, fourth), PROMPTS, NEW_TOKENS)


def test_bad_files_change_nothing_while_it_serves(llama: tuple[Any, Path, Path, Path], tmp_path: Path) -> None:
    module, folder, one, _ = llama
    odd = save_adapter(tmp_path / "odd", module, ["q_proj"], seed=3)
    expected = greedy_answers(merged(module, one), PROMPTS, NEW_TOKENS)
    with load(folder, {"one": one}, lora_folder="/") as llm:
        (odd / "adapter_model.safetensors").write_bytes(b"no tensors")
        for place, why in ((odd, "cannot be read"), (tmp_path / "gone", "cannot read the adapter")):
            with pytest.raises(UserError, match=why):
                llm.load_adapter("odd", str(place))
        assert at_once(llm, ["one"])["one"] == expected
        with pytest.raises(UserError, match="a name of the model itself"):
            llm.load_adapter(llm.model.name, str(one))
    with load(folder, {"one": one}) as llm, pytest.raises(UserError, match="at the start alone"):
        llm.load_adapter("two", str(save_adapter(tmp_path / "two", module, ["q_proj"], seed=4)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"saves": ("model.norm",)}, "has weights of its own for model.norm|no half"),
        ({"saves": ("lm_head",), "modules_to_save": ["other"]}, "names other in modules_to_save, and has no weights"),
        ({"saves": ("lm_head",), "tensors": {"base_model.model.lm_head.weight": torch.ones(7, 32)}}, r"of \(7, 32\)"),
        ({"dora": True, "tensors": {f"base_model.model.{WHOLE}.lora_magnitude_vector": torch.ones(3)}}, "magnitudes"),
        ({"dora": True, "tensors": {f"base_model.model.{WHOLE}.lora_magnitude_vector": torch.full((32,), torch.inf)}},
         "not finite"),
        ({"tensors": {f"base_model.model.{WHOLE}.lora_magnitude_vector": torch.ones(32)}}, "no half"),
        ({"saves": ("lm_head",), "ensure_weight_tying": True}, "ensure_weight_tying"),
    ],
)  # fmt: skip
def test_weights_of_its_own_that_do_not_fit_are_refused(
    llama: tuple[Any, Path, Path, Path], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    module, folder, _, _ = llama
    with pytest.raises(UserError, match=message):
        load(folder, {"odd": save_adapter(tmp_path / "odd", module, ["q_proj"], 3, **fields)})
