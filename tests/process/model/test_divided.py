"""Models with recurrent states or latents, by several workers: the model's own tokens, alone and in clusters."""

from __future__ import annotations

import functools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine_answers import (
    ANSWER,
    BLOCK,
    ask,
    ask_several,
    best_beam,
    check_cold_and_warm,
    check_drafted,
    own_best_beam,
    resumable,
    serving,
)
from lora_files import merged, save_adapter
from memserve.base.kv_layout import Parallel
from served_cluster import Server, eventually, served, workers_of
from slow_costs import save_slow_costs
from tiny_models import (
    GREEDY,
    LATENT,
    STATEFUL,
    greedy_answers,
    greedy_tokens,
    one_engine,
    prompt,
    save_folder,
    tiny_module,
)
from worker_threads import start_workers_as_threads, worker_threads

PROMPTS = [prompt(length, seed).tolist() for seed, length in enumerate((1, 5, 40, 64, 100))]
TP2, PP2, BOTH = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}
STAGED = ("qwen3_next", "falcon_h1", "mamba", "deepseek_v3")
KINDS = [
    *[(family, TP2) for family in (*STATEFUL, *LATENT, "longcat_flash", "mixtral", "gpt_neox")],
    *[(family, PP2) for family in STAGED],
    ("jamba", BOTH),
]
NAMES = [f"{family}-{' '.join(kind)}" for family, kind in KINDS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("divided")
    return {
        family: save_folder(tiny_module(family), root / family / "tiny") for family in {family for family, _ in KINDS}
    }


def check_answers_as_model(family: str, folder: Path, **options: int) -> None:
    """The cache has each prompt but for what must be computed."""
    with serving(folder, **options) as llm:
        workers = options.get("tensor_parallel", 1) * options.get("pipeline_parallel", 1) - 1
        assert worker_threads() + len(workers_of(os.getpid())) == workers
        lengths = [len(tokens) for tokens in PROMPTS]
        kv_alone = [min(length // BLOCK * BLOCK, length - 1) for length in lengths]  # blocks are copied
        expected_cached = [resumable(length) for length in lengths] if family in STATEFUL else kv_alone
        check_cold_and_warm(llm, tiny_module(family), PROMPTS, expected_cached, count=12)
    assert not worker_threads() and not workers_of(os.getpid())


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 24}], ids=["whole", "chunks"])
@pytest.mark.parametrize(("family", "kind"), KINDS, ids=NAMES)
def test_workers_answer_as_the_model(
    family: str, kind: dict[str, int], options: dict[str, int], folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    start_workers_as_threads(monkeypatch)
    check_answers_as_model(family, folders[family], **kind, **options)


@pytest.mark.parametrize(("family", "kind"), [("qwen3_5", TP2), ("deepseek_v3", PP2), ("jamba", BOTH)])
def test_worker_processes_answer_as_the_model(family: str, kind: dict[str, int], folders: dict[str, Path]) -> None:
    check_answers_as_model(family, folders[family], **kind, max_step_tokens=24)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "deepseek_v3"])
def test_workers_in_16_bits_pass_their_trial(family: str, folders: dict[str, Path]) -> None:
    """Answers may differ in 16 bits, so it is said alone that they come, and the same from the cache."""
    with serving(folders[family], **TP2, dtype="bfloat16") as llm:
        cold, warm = (ask(llm, PROMPTS[2:3], 8)[0] for _ in range(2))
    assert (len(cold[0]), cold[1], warm[1]) == (8, 0, 32)


@pytest.mark.parametrize(("family", "kind"), [("qwen3_5", TP2), ("falcon_h1", PP2), ("jamba", BOTH)])
def test_states_go_back_to_the_last_right_draft(
    family: str, kind: dict[str, int], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_workers_as_threads(monkeypatch)
    check_drafted(monkeypatch, folders[family], tiny_module(family), **kind)


@pytest.mark.parametrize(
    ("family", "targets", "kind"),
    [
        ("qwen3_5", ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"], TP2),
        ("falcon_h1", ["in_proj", "out_proj", "v_proj", "down_proj"], TP2),
        ("jamba", ["in_proj", "x_proj", "out_proj", "down_proj"], PP2),
    ],
)
def test_adapters_beside_states_are_cut_alike(
    family: str, targets: list[str], kind: dict[str, int], folders: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    start_workers_as_threads(monkeypatch)
    module = tiny_module(family)
    adapter = save_adapter(tmp_path / "adapter", module, targets, seed=1)
    wholes = {"": module, "one": merged(module, adapter)}
    with serving(folders[family], **kind, lora=[f"one={adapter}"]) as llm:
        for name, whole in wholes.items():
            more = {"adapter": name} if name else {}
            results = llm.generate(PROMPTS, GREEDY, max_tokens=ANSWER, ignore_eos=True, **more)
            answers = [list(result.outputs[0].tokens) for result in results]
            assert answers == greedy_answers(whole, PROMPTS, ANSWER, answers)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_sequences_and_beams_have_states_of_their_own(family: str, folders: dict[str, Path]) -> None:
    module, tokens = tiny_module(family), prompt(45, 9)
    with serving(folders[family], **TP2) as llm:
        assert ask_several(llm, tokens.tolist(), 3) == [greedy_tokens(module, tokens, ANSWER)] * 3
        assert best_beam(llm, tokens.tolist(), 3, 8) == own_best_beam(module, tokens.tolist(), 3, 8)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "deepseek_v2"])
def test_preempted_sequences_go_on_as_they_were(family: str, folders: dict[str, Path]) -> None:
    """More than memory has room for: snapshots and blocks are given up, taken again, and read by both workers."""
    prompts = [prompt(60 + 7 * place, 20 + place).tolist() for place in range(8)]
    memory = {"qwen3_5": "180KiB", "falcon_h1": "256KiB", "deepseek_v2": "192KiB"}[family]
    with serving(folders[family], **TP2, kv_memory=memory, max_step_tokens=64) as llm, ThreadPoolExecutor(8) as pool:
        answers, again = (
            list(pool.map(lambda tokens, count=count: ask(llm, [tokens], count)[0][0], prompts)) for count in (40, 8)
        )
        stats = llm._engine.stats().instance
    assert answers == greedy_answers(tiny_module(family), prompts, 40, answers)
    assert again == [answer[:8] for answer in answers]
    assert stats.preemptions_recompute > 0


@pytest.mark.parametrize("kind", [TP2, PP2], ids=["tensor", "pipeline"])
def test_preempted_sequences_come_back_from_dram(kind: dict[str, int], folders: dict[str, Path]) -> None:
    """Each worker saves what it has of a state, and takes it back: no token is computed twice."""
    prompts = [prompt(40 + 3 * seed, seed).tolist() for seed in range(8)]
    sizes = {"kv_memory": "224KiB", "dram_memory": "8MiB", "preemption": "swap"}
    with serving(folders["qwen3_5"], **kind, **sizes) as llm:
        answers = [answer for answer, _ in ask(llm, prompts, 48)]
        assert answers == greedy_answers(tiny_module("qwen3_5"), prompts, 48, answers)
        stats = llm.stats().instance
        assert stats.preemptions_swap > 0 and not stats.preemptions_recompute
        assert stats.computed_tokens == sum(map(len, prompts)) + 8 * 47


def test_what_leaves_for_dram_is_gone_on_from(folders: dict[str, Path]) -> None:
    """Snapshots lie in a second tier that both workers map, and each next turn goes on behind its last answer."""
    module = tiny_module("qwen3_5")
    turns = [prompt(60 + 7 * seed, 30 + seed).tolist() for seed in range(6)]
    with serving(folders["qwen3_5"], **TP2, kv_memory="192KiB", dram_memory="8MiB") as llm:
        for turn in range(3):
            for place, tokens in enumerate(turns):
                [(answer, cached)] = ask(llm, [tokens], 8)
                assert answer == greedy_tokens(module, np.array(tokens, np.int32), 8, answer)
                assert cached == ((len(tokens) - 10 - 1) // BLOCK * BLOCK if turn else 0)
                turns[place] = [*tokens, *answer, *prompt(10, 50 + turn).tolist()]
        assert llm.stats().instance.dram_tokens_reused > 6 * 60


@functools.cache
def conversation(family: str, folder: Path) -> tuple[list[list[int]], list[str], list[str]]:
    """Prompts and the turns that follow; their answers, which fill a block each; and how these begin."""
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((5, 40, 70))]
    asked = [*prompts, prompts[2], [*prompts[2], *prompt(50, 11).tolist()]]
    with one_engine(folder) as complete:
        for seed in (2, 3):
            said = [int(word[1:]) for word in complete(asked[-1], 34).split()]
            asked.append([*asked[-1], *said, *prompt(9, seed).tolist()])
        return (asked, *([complete(tokens, count) for tokens in asked] for count in (34, 8)))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "deepseek_v2"])
def test_instances_of_other_degrees_exchange_what_they_keep(
    family: str, prefill: int, decode: int, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over, sent back and taken up again: a block and a snapshot of two workers are those of one."""
    asked, expected, begins = conversation(family, folders[family])
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folders[family], workers=("", Parallel(tensor=2).text))
    flags = ["--prefill-tensor-parallel", str(prefill), "--decode-tensor-parallel", str(decode)]
    with served(folders[family], "--prefill", "1", "--decode", "1", *flags) as server:
        assert len(workers_of(server.children()["d1"])) == decode - 1
        assert len(workers_of(server.children()["p1"])) == prefill - 1
        assert [server.complete(tokens, 34) for tokens in asked] == expected
        eventually(lambda: server.counters("handed_over", "taken_over") == [len(expected)] * 2)
        eventually(lambda: min(server.counters("returned_blocks", "reused_blocks")) > 0)
        cached_tokens = server.counter("cached_tokens")
        assert [server.complete(tokens, 8) for tokens in asked] == begins
        eventually(lambda: server.counter("cached_tokens") >= cached_tokens + 64 + 96)
        assert server.counters("transfers_failed", "checksum_mismatches") == [0, 0]


def test_a_cluster_loses_no_token_when_a_worker_is_killed(folders: dict[str, Path]) -> None:
    asked = [prompt(70, place).tolist() for place in range(4)]
    with one_engine(folders["qwen3_5"]) as complete:
        expected = [complete(tokens, 100) for tokens in asked]
    flags = ("--prefill", "1", "--decode", "1", "--decode-tensor-parallel", "2", "--metadata", "none")
    server = Server(folders["qwen3_5"], *flags)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda tokens: server.complete(tokens, 100), asked)) == expected
            (worker,) = workers_of(server.children()["d1"])
            futures = [pool.submit(server.complete, tokens, 100) for tokens in asked]
            os.kill(worker, signal.SIGKILL)
            assert [future.result() for future in futures] == expected
        eventually(lambda: "d1" in server.members() and workers_of(server.children().get("d1", 0)))
        assert server.complete(asked[0], 100) == expected[0]
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_a_store_lends_what_one_worker_kept_to_two(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is computed by one worker, and the store's disk outlives it; then two workers go on from there."""
    tokens = prompt(100, 1).tolist()
    with one_engine(folders["qwen3_5"]) as complete:
        expected = complete(tokens, 8)
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    save_slow_costs(folders["qwen3_5"], workers=("", Parallel(tensor=2).text))
    store = ("--ssd", f"{tmp_path}/ssd=256MiB", "--store-dram", "64MiB", "--ssd-sync", "none")
    for tensor, cached_tokens in ((1, 0), (2, 96)):
        flags = ("--tensor-parallel", str(tensor), "--metadata", str(tmp_path / "state"))
        with served(folders["qwen3_5"], *store, *flags) as server:
            if cached_tokens:
                eventually(lambda: server.gauge("store_tree_blocks") >= 3)
            assert server.complete(tokens, 8) == expected
            eventually(lambda: server.gauge("store_disk_values") >= 4)
            eventually(lambda least=cached_tokens: server.counter("cached_tokens") >= least)
