"""Instances of several workers: the same answers, alone and in clusters of other degrees; workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_files import merged, save_adapter
from memserve import LLM
from memserve.base.errors import UserError
from memserve.base.types import SamplingParams
from memserve.instance.speculation import speculation
from memserve_lab.sim.fuzz.scenario_features import Always
from served_cluster import Server, eventually, workers_of
from tiny_models import greedy_answers, prompt, save_folder, tiny_module

OPTIONS = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB"}
SMALL = {**OPTIONS, "kv_memory": "400KiB", "dram_memory": "4MiB", "preemption": "swap", "max_step_tokens": 64}
KINDS = {"TP 2": (2, 1), "PP 2": (1, 2), "TP 2 x PP 3": (2, 3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy tokens of twelve prompts, asked side by side, some with common beginnings; then drawn ones."""
    asked = [[int(token) for token in [*prompt(60, at % 3), *prompt(10 + 9 * at, 50 + at)]] for at in range(12)]
    with ThreadPoolExecutor(12) as pool:
        greedy = SamplingParams(temperature=0)
        found = pool.map(lambda one: llm.generate([one], greedy, max_tokens=25)[0], asked)
        drawn = llm.generate(asked[:2], max_tokens=20, temperature=1.0, seed=5, n=2, top_p=0.9, logprobs=2)
        return [tuple(choice.tokens) for one in [*found, *drawn] for choice in one.outputs]


def lay_by_layer(llm: LLM) -> int:
    """Sequences that did: they began so, or came to, which depends on the order in which prompts arrive."""
    layers = llm._engine.stats().instance.layers
    return layers.begun + layers.converted


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """The answers of one worker."""
    with LLM(str(model), **SMALL) as llm:
        return answers(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_give_the_answers_of_one(
    model: Path, expected: list[tuple[int, ...]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "Worth", Always)  # a busy machine decides that drafts do not pay
    tensor, pipeline = KINDS[kind]
    with LLM(str(model), **SMALL, tensor_parallel=tensor, pipeline_parallel=pipeline, draft_tokens=4) as llm:
        assert len(workers_of(os.getpid())) == tensor * pipeline - 1
        assert answers(llm) == expected
        stats = llm._engine.stats().instance
        assert stats.preemptions_swap or stats.dram_tokens_reused
        greedy, asked = SamplingParams(temperature=0), [[int(token) for token in prompt(40, 3)]]
        first, second = (
            llm.generate(asked, greedy, max_tokens=25, ignore_eos=True)[0].outputs[0].tokens for _ in range(2)
        )
        assert first == second and llm._engine.stats().instance.drafts_kept > stats.drafts_kept
    assert not workers_of(os.getpid()), "they end with the engine"


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_workers_share_three_kv_heads_and_answer_as_one(tmp_path: Path, by_layer: bool) -> None:
    """Queries of worker 1 read a KV head that worker 0 writes."""
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96}
    model = str(save_folder(tiny_module("llama", **sizes), tmp_path / "odd"))
    options = {**SMALL, "kv_memory": "600KiB"}
    if by_layer:
        options |= {"kv_memory": "300KiB", "layerwise": "static-1", "enable_prefix_caching": False}
    with LLM(model, **SMALL) as llm:
        expected = answers(llm)
    with LLM(model, **options, tensor_parallel=2) as llm:
        assert llm._engine._instance._device._crew.share.queries == (4, 5)
        assert answers(llm) == expected == answers(llm)
        assert not by_layer or lay_by_layer(llm)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)], ids=["TP 2", "PP 2", "TP 2 x PP 2"])
def test_workers_give_the_answers_of_each_adapter(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """Rows of two adapters and of the base share steps; some prompts begin alike. A stage in the middle is as the last
    one to adapters."""
    module = tiny_module("llama")
    folders = {
        "one": save_adapter(tmp_path / "one", module, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], 1),
        "two": save_adapter(tmp_path / "two", module, ["k_proj", "down_proj"], 2),
    }
    wholes = {"": module, **{name: merged(module, folder) for name, folder in folders.items()}}
    asked = [(name, [*prompt(40, at % 2), *prompt(9 + 7 * at, 60 + at)]) for at in range(4) for name in wholes]
    folder = save_folder(module, tmp_path / "model")
    options = {**OPTIONS, "max_step_tokens": 64, "lora": [f"{name}={place}" for name, place in folders.items()]}
    with LLM(str(folder), **options, tensor_parallel=tensor, pipeline_parallel=pipeline) as llm:

        def answer(one: tuple[str, list[int]]) -> tuple[list[int], int]:
            more = {"adapter": one[0]} if one[0] else {}
            greedy = SamplingParams(temperature=0)
            found = llm.generate([list(map(int, one[1]))], greedy, max_tokens=20, ignore_eos=True, **more)
            return list(found[0].outputs[0].tokens), found[0].cached_tokens

        rights = {
            name: iter(greedy_answers(whole, [tokens for one, tokens in asked if one == name], 20))
            for name, whole in wholes.items()
        }
        expected = [next(rights[name]) for name, _ in asked]
        for _ in range(2):
            with ThreadPoolExecutor(12) as pool:
                found = list(pool.map(answer, asked))
            assert [tokens for tokens, _ in found] == expected
        assert all(cached for _, cached in found), "the second time with what the first has cached"


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (2, 2)], ids=["TP 2", "TP 2 x PP 2"])
def test_workers_load_and_forget_adapters_together(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """One with two matrices, and one of DoRA on columns and rows; a bad one leaves all workers as they were."""
    module = tiny_module("llama")
    linears = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    folders = {
        "plain": save_adapter(tmp_path / "plain", module, linears, 1),
        "dora": save_adapter(tmp_path / "dora", module, linears, 2, dora=True),
    }
    whole = save_adapter(tmp_path / "whole", module, ["q_proj"], 3, saves=("lm_head",))
    asked = [list(map(int, prompt(40, at))) for at in range(3)]
    folder, options = save_folder(module, tmp_path / "model"), {**OPTIONS, "lora_folder": str(tmp_path)}
    with LLM(str(folder), **options, tensor_parallel=tensor, pipeline_parallel=pipeline) as llm:

        def tokens(**more: str) -> list[list[int]]:
            found = llm.generate(asked, SamplingParams(temperature=0), max_tokens=20, ignore_eos=True, **more)
            return [list(one.outputs[0].tokens) for one in found]

        for _ in range(2):
            for name, place in folders.items():
                llm.load_adapter(name, str(place))
            with pytest.raises(UserError, match="several workers do not share"):
                llm.load_adapter("whole", str(whole))
            for name, place in folders.items():
                assert tokens(adapter=name) == greedy_answers(merged(module, place), asked, 20), name
            assert tokens() == greedy_answers(module, asked, 20)
            for name in folders:
                llm.unload_adapter(name)


def test_kv_by_layer_lies_in_the_pages_of_all_workers(model: Path) -> None:
    options = {**OPTIONS, "max_step_tokens": 64, "enable_prefix_caching": False}
    asked = [[int(token) for token in prompt(150, at)] for at in range(8)]
    greedy = SamplingParams(temperature=0)

    def tokens(llm: LLM) -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda one: llm.generate([one], greedy, max_tokens=30)[0], asked)
            return [tuple(one.outputs[0].tokens) for one in found]

    with LLM(str(model), **options) as llm:
        expected = tokens(llm)
    by_layer = {**options, "kv_memory": "200KiB", "dram_memory": "4MiB", "layerwise": "static-1"}
    with LLM(str(model), **by_layer, tensor_parallel=2) as llm:
        assert tokens(llm) == expected
        assert lay_by_layer(llm)


def test_indivisible_model_is_refused_before_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="3 workers cannot share the 2 KV heads"):
        LLM(str(model), **OPTIONS, tensor_parallel=3)
    with pytest.raises(UserError, match="4 stages cannot share the 3 layers"):
        LLM(str(model), **OPTIONS, pipeline_parallel=4)
    with pytest.raises(UserError, match="several stages cannot be placed by layer"):
        LLM(str(model), **OPTIONS, pipeline_parallel=2, dram_memory="4MiB", layerwise="auto")
    with pytest.raises(UserError, match="some heads of a page"):
        LLM(str(model), **OPTIONS, tensor_parallel=2, block_tokens=8)
    other = save_folder(tiny_module("opt"), tmp_path / "opt")
    with pytest.raises(UserError, match="cannot be divided among workers"):
        LLM(str(other), **OPTIONS, tensor_parallel=2)
    assert not workers_of(os.getpid())


def test_common_error_of_leader_and_workers_is_printed_once(tmp_path: Path) -> None:
    """No kernel reads some heads of 8: the leader ends first, and the workers have no process to tell."""
    folder = save_folder(tiny_module("llama"), tmp_path / "narrow")
    flags = ["--dtype", "float32", "--kv-memory", "4MiB", "--tensor-parallel", "2", "--block-tokens", "8"]
    command = [sys.executable, "-m", "memserve", "serve", "--in-process", "--port", "0", "--model", str(folder), *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert [line.partition(" ")[0] for line in run.stderr.splitlines()] == ["loading", "error:", "hint:"]


def test_killed_worker_ends_engine_and_requests(model: Path) -> None:
    with LLM(str(model), **OPTIONS, tensor_parallel=2) as llm:
        llm.generate([[5, 6, 7]], max_tokens=3)
        (worker,) = workers_of(os.getpid())
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: llm._engine.closing)
        with pytest.raises(Exception, match="engine"):
            llm.generate([[5, 6, 7]], max_tokens=3)


def test_cluster_loses_no_token_when_a_worker_is_killed(model: Path) -> None:
    module = tiny_module("llama")
    asked = [[int(token) for token in prompt(70, at)] for at in range(4)]
    right = greedy_answers(module, asked, 100)
    expected = [" ".join(f"w{token}" for token in tokens if token not in (0, 2)) for tokens in right]  # special
    server = Server(model, "--prefill", "1", "--decode", "1", "--decode-tensor-parallel", "2", "--metadata", "none")
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda one: server.complete(one, 100).strip(), asked)) == expected
            (worker,) = workers_of(server.children()["d1"])
            assert not workers_of(server.children()["p1"])
            futures = [pool.submit(server.complete, one, 100) for one in asked]
            os.kill(worker, signal.SIGKILL)
            assert [future.result().strip() for future in futures] == expected
        eventually(lambda: "d1" in server.members() and workers_of(server.children().get("d1", 0)))
        assert server.complete(asked[0], 100).strip() == expected[0]
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0
