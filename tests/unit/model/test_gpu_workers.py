"""Instances of several workers on GPUs that are made up (``fake_gpu``): the tokens of one device, whatever is in
flight, and faults that are found. No access to memory that no event orders, no operation that workers call in another
order.

Whether Triton's kernels are interpreted is decided once: the scenarios run in one child process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interpreted import results_of, run_devices
from memserve.base.kv_layout import Parallel

KINDS = {"TP 2": Parallel(2), "TP 3": Parallel(3), "PP 2": Parallel(1, 2), "TP 2 x PP 2": Parallel(2, 2)}


def _module(parallel: Parallel) -> Any:
    from tiny_models import tiny_module

    if parallel.tensor != 3:
        return tiny_module("llama")
    return tiny_module(
        "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=96, num_hidden_layers=2
    )


@contextmanager
def _together(parallel: Parallel, **options: Any) -> Any:
    from gpu_parts import Together

    instance = Together(_module(parallel), parallel, **options)
    try:
        yield instance
    finally:
        instance.close()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


def chunks_and_decodes(parallel: Parallel, graphs: bool) -> bool:
    """Chunks beside decodes; the tokens of the family's own eager path."""
    from tiny_models import greedy_tokens, prompt, sequence

    first, second, module = prompt(75, 1), prompt(41, 2), _module(parallel)
    expected = greedy_tokens(module, first, 6), greedy_tokens(module, second, 4)
    with _together(parallel, graphs=graphs) as instance:
        driver = instance.driver
        driver.step([(3, 0, 50, ())], open=[sequence(3, first, [9, 2])])
        opened = [sequence(6, second, [7, 40])]
        got = driver.step([(3, 50, 5, ()), (6, 0, 41, (6,))], grow=[(3, [33])], open=opened).tokens
        mixed = driver.step([(6, 41, 1, (6,)), (3, 55, 20, (3,))]).tokens
        got_first, got_second = mixed[1:], [*got, *mixed[:1]]
        for offset in range(2):
            tokens = driver.step([(3, 75 + offset, 1, (3,)), (6, 42 + offset, 1, (6,))]).tokens
            got_first, got_second = [*got_first, tokens[0]], [*got_second, tokens[1]]
        got_first += driver.decode(3, 77, 3)
        assert (got_first, got_second) == expected
        replays = [sum(graph.replays for graph in gpu.graphs) for gpu in instance.gpus]
        assert replays == [5 if graphs else 0] * parallel.worker_count
        if not graphs:
            return True
        assert all(part.graph_sizes == [1, 2, 4, 8] for part in instance.parts.values())
    return True


def codes(parallel: Parallel, kv_dtype: str) -> bool:
    """KV in codes: the tokens of a CPU's device, step by step."""
    from gpu_parts import swapped_steps
    from tiny_models import Driver, loaded

    expected = swapped_steps(Driver(loaded(_module(parallel), kv_dtype=kv_dtype)))
    with _together(parallel, graphs=True, kv_dtype=kv_dtype) as instance:
        assert swapped_steps(instance.driver) == expected
    return True


def plans_in_flight(parallel: Parallel, graphs: bool) -> bool:
    """A plan computes what the one before it draws, and no host has seen it; a slot changes hands; then a plan that
    must know it, on all hosts."""
    from memserve.instance.events import StepPlan
    from tiny_models import greedy_tokens, prompt, sequence

    tokens, other, module = prompt(40, 7), prompt(33, 8), _module(parallel)
    expected, second = greedy_tokens(module, tokens, 4), greedy_tokens(module, other, 6)
    with _together(parallel, graphs=graphs) as instance:
        held = threading.Event()
        for part in instance.parts.values():
            part.finishing = lambda: held.wait(60)

        def plan(number: int, start: int, count: int, **parts: Any) -> StepPlan:
            drawing = {"sample_slots": [(2,)], **parts}
            return StepPlan(number, slots=[2], starts=[start], counts=[count], **drawing)

        begin = instance.device.begin_step
        begun = [begin(plan(0, 0, 40, open=[sequence(2, tokens, [4, 5])]))]
        begun += [begin(plan(number, 39 + number, 1)) for number in (1, 2, 3)]
        assert all(part._slots.tokens[2, 40] == 0 for part in instance.parts.values()), "no host knows anything yet"
        begun.append(begin(plan(4, 0, 33, close=[2], open=[sequence(2, other, [9, 10])])))
        begun.append(begin(plan(5, 33, 3, drafts={0: [*second[1:2], (second[2] + 1) % 131]})))
        begun.append(begin(plan(6, 35, 1)))
        held.set()
        done = [finish() for finish in begun]
        assert [one.tokens[0] for one in done[:5]] == [*expected, second[0]]
        assert [*done[5].tokens, *done[5].accepted_drafts[2]] == second[1:3] and done[6].tokens == second[3:4]
        known = [part._slots.tokens[2, :37].tolist() for part in instance.parts.values()]
        assert known == [[*other.tolist(), *second[:4]]] * parallel.worker_count
    return True


class EvenTokens:
    """In the place of grammars: a slot with one draws even tokens."""

    def __init__(self) -> None:
        self.slots: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return slot in self.slots

    def __bool__(self) -> bool:
        return bool(self.slots)

    def open_slot(self, slot: int, job_id: int, drawn: list[int]) -> None:
        self.slots.add(slot)

    def close_slot(self, slot: int) -> None:
        self.slots.discard(slot)

    def take_token(self, slot: int, token: int) -> None:
        assert slot not in self.slots or token % 2 == 0

    def flush_tokens(self) -> None:
        """Nothing is sent."""

    def next_mask(self, slot: int) -> np.ndarray:
        return np.arange(131) % 2 == 0


def _mixed(driver: Any, device: Any) -> list[Any]:
    """Plans whose tokens the device draws, and plans that wait for the host, by turns."""
    from memserve.base.types import SamplingParams
    from tiny_models import prompt, sequence

    device._slots.grammars = EvenTokens()
    drawing = SamplingParams(temperature=1.2, top_p=0.9, seed=4, logprobs=2)
    ruled = SamplingParams(temperature=0, grammar="even")
    opened = [sequence(0, prompt(40, 7), [4, 5], drawing), sequence(1, prompt(20, 8), [6, 7], ruled)]
    done = [driver.step([(0, 0, 40, (0,)), (1, 0, 20, (1,))], open=opened, prompt_logprob_rows=[0])]
    done.append(driver.step([(0, 40, 1, (0,))]))
    done.append(driver.step([(0, 41, 1, (0,)), (1, 20, 1, (1,))]))
    done += [driver.step([(0, 42, 1, (0,))]), driver.step([(1, 21, 1, (1,))]), driver.step([(0, 43, 1, (0,))])]
    done.append(driver.step([(0, 44, 4, (0,))], drafts={0: [5, 6, 7]}))
    at = 45 + len(done[-1].accepted_drafts[0])
    beams = sequence(2, prompt(20, 9), [8, 9], SamplingParams(temperature=0), beam_candidates=3)
    done.append(driver.step([(0, at, 1, (0,)), (2, 0, 20, (2,))], open=[beams]))
    done.append(driver.step([(0, at + 1, 1, (0,))]))
    return done


def what_the_host_must_know(parallel: Parallel, graphs: bool) -> bool:
    """A grammar, drafts, beams, prompts' logprobs, draws with filters: as on a CPU, and the followers do not ask what
    only the leader knows."""
    from tiny_models import Driver, loaded

    alone = Driver(loaded(_module(parallel)))
    expected = _mixed(alone, alone.device)
    with _together(parallel, graphs=graphs) as instance:
        got = _mixed(instance.driver, instance.parts[0])
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert [one.accepted_drafts for one in got] == [one.accepted_drafts for one in expected] and got[-2].candidates
    assert got[0].tokens[1] % 2 == got[2].tokens[1] % 2 == got[4].tokens[0] % 2 == 0
    assert [entry and entry.top[:0] for entry in got[0].prompt_logprobs[0]] == [()] * 39 + [None]
    for ours, theirs in zip(got, expected, strict=True):
        for row, entry in ours.logprobs.items():
            np.testing.assert_allclose(entry.logprob, theirs.logprobs[row].logprob, atol=1e-4)
    return True


def _swapped(driver: Any, look: Any) -> list[int]:
    """Blocks go down, are given away at once, come back elsewhere; a copy on write."""
    from memserve.base.types import CopyBlocks, SamplingParams, Tier
    from memserve.instance.events import OpenSequence
    from tiny_models import prompt, sequence

    tokens, intruder = prompt(50, 8), prompt(64, 9)
    got = driver.step([(0, 0, 50, (0,))], open=[sequence(0, tokens, [1, 2])]).tokens
    got += driver.decode(0, 50, 1)
    out = CopyBlocks(Tier.HBM, Tier.DRAM, [1, 2], [6, 0])
    driver.step([(0, 0, 64, ())], close=[0], copies=[out], open=[sequence(0, intruder, [2, 1])])
    look()
    moved = CopyBlocks(Tier.DRAM, Tier.DRAM, [6, 0], [3, 6])
    back = CopyBlocks(Tier.DRAM, Tier.HBM, [3, 6], [11, 10])
    known = np.concatenate([tokens, got]).astype(np.int32)
    resumed = OpenSequence(5, known, 50, 0, SamplingParams(temperature=0), [11, 10])
    got += driver.step([(5, 51, 1, (5,))], copies=[moved, back], open=[resumed]).tokens
    chain = [CopyBlocks(Tier.HBM, Tier.HBM, [11, 10], [12, 11])]
    return got + driver.step([(5, 52, 1, (5,))], copies=chain, replace=[(5, 0, 12), (5, 1, 11)]).tokens


def swaps(parallel: Parallel) -> bool:
    """Tokens as before; and what lies in DRAM is what one worker would have put there."""
    import torch

    from tiny_models import Driver, greedy_tokens, loaded, prompt

    module, blocks = _module(parallel), []
    expected = greedy_tokens(module, prompt(50, 8), 4)
    alone = Driver(loaded(_module(parallel)))
    assert _swapped(alone, lambda: blocks.extend(alone.device._arenas.dram[[6, 0]].clone())) == expected
    with _together(parallel) as instance:
        got = _swapped(instance.driver, lambda: blocks.extend(instance.dram_block(at).clone() for at in (6, 0)))
    assert got == expected
    one, other = torch.stack(blocks[:2]).view(torch.float32), torch.stack(blocks[2:]).view(torch.float32)
    assert one[0].count_nonzero() == one[0].numel(), "each byte is some worker's"
    assert torch.allclose(one[0], other[0], atol=1e-4)
    return True


def by_layer() -> bool:
    """Layers of a prompt in DRAM, passing through the HBM of each worker."""
    from memserve.instance.events import PlaceByLayer
    from tiny_models import greedy_tokens, prompt, sequence

    tokens, parallel = prompt(70, 3), Parallel(2)
    with _together(parallel) as instance:
        order = PlaceByLayer(0, 0, [1, 4, 6], {1: [30]}, ([31], [32]))
        opened = sequence(0, tokens, [20, 21, 22])
        driver = instance.driver
        got = driver.step([(0, 0, 40, ())], open=[opened], place=[order]).tokens
        got += driver.step([(0, 40, 30, (0,))]).tokens + driver.decode(0, 70, 3)
        assert got == greedy_tokens(_module(parallel), tokens, 4)
        instance.dram_block(4)
    return True


def _reads_what_went_down(held: threading.Event | None = None) -> None:
    """A block goes down, and the host reads it when the leader says that it has. ``held``: the other worker finishes
    nothing before."""
    from memserve.base.types import CopyBlocks, Tier
    from tiny_models import prompt, sequence

    with _together(Parallel(2)) as instance:
        other = instance.parts[1]
        try:
            if held is not None:
                other.finishing = lambda: held.wait(60)
            instance.driver.step([(0, 0, 32, ())], open=[sequence(0, prompt(40, 7), [4, 5])])
            instance.driver.step([], copies=[CopyBlocks(Tier.HBM, Tier.DRAM, [4], [3])])
            assert all(other.began.acquire(timeout=60) for _ in range(2))
            instance.dram_block(3)
        finally:
            if held is not None:
                held.set()


def a_step_has_finished_on_all() -> bool:
    """A leader that does not wait for the others' reports, or a device that does not wait for what goes down, lets a
    block be read that is still written: both are found."""
    from fake_gpu import RaceError
    from memserve.model.gpu.arena import GpuArenas
    from memserve.model.workers.gpu_steps import Reports

    held, wait = threading.Event(), Reports.wait_finished

    def opens(self: Any, number: int) -> None:
        held.set()
        wait(self, number)

    with _replaced(Reports, "wait_finished", opens):
        _reads_what_went_down(held)
    for owner, name, fault in (
        (Reports, "wait_finished", lambda self, number: None),
        (GpuArenas, "copies_mark", lambda self: None),
    ):
        with _replaced(owner, name, fault):
            try:
                _reads_what_went_down(threading.Event() if owner is Reports else None)
            except RaceError:
                continue
        raise AssertionError(f"what does not wait is not found: {name}")
    return True


def another_order_is_found() -> bool:
    """A worker that decides for itself whether a plan waits for the host, and does not know the grammar."""
    from gpu_parts import Part
    from memserve.base.types import SamplingParams
    from memserve.instance.events import StepPlan
    from memserve.model.workers.processes import WorkersBroken
    from tiny_models import prompt, sequence

    begin, ruled = Part.begin_part, SamplingParams(temperature=0, grammar="even")

    def by_itself(self: Any, drawn: Any, plan: Any, waits_for_host: bool) -> Any:
        return begin(self, drawn, plan, waits_for_host if self._is_leader else self.needs_host(plan))

    with _replaced(Part, "begin_part", by_itself), _together(Parallel(2)) as instance:
        instance.parts[0]._slots.grammars = EvenTokens()
        opened = [sequence(1, prompt(20, 8), [6, 7], ruled)]
        try:
            for number, (start, count) in enumerate(((0, 20), (20, 1), (21, 1))):
                plan = StepPlan(number, slots=[1], starts=[start], counts=[count], sample_slots=[(1,)], open=opened)
                opened = []
                instance.device.begin_step(plan)
        except WorkersBroken:
            assert "the workers (0, 1) do" in instance.world.broken, instance.world.broken
            assert instance.broken
            return True
    raise AssertionError("another order is not found")


def all_have_graphs_or_none() -> bool:
    """One worker whose forward cannot be captured."""
    from tiny_models import greedy_tokens, prompt, sequence

    def prepare(rank: int, gpu: Any) -> None:
        capture = gpu.capture_graph

        def refused(run: Any) -> Any:
            capture(run)
            raise RuntimeError("operation not permitted when stream is capturing")

        if rank == 1:
            gpu.capture_graph = refused

    with _together(Parallel(2), graphs=True, prepare=prepare) as instance:
        assert [part.graph_sizes for part in instance.parts.values()] == [[], []]
        whys = [instance.parts[rank]._graphs.refused for rank in range(2)]
        assert "another worker" in whys[0] and "not permitted" in whys[1]
        opened = [sequence(0, prompt(40, 7), [4, 5])]
        got = instance.driver.step([(0, 0, 40, (0,))], open=opened).tokens + instance.driver.decode(0, 40, 2)
        assert got == greedy_tokens(_module(Parallel(2)), prompt(40, 7), 3)
    return True


def a_worker_that_fails_ends_the_instance() -> bool:
    """While a step is begun, while it is finished, and one that does nothing any more."""
    from memserve.model.workers.processes import WorkersBroken
    from tiny_models import prompt, sequence

    def fails() -> None:
        raise RuntimeError("its device is lost")

    for how in ("begin", "finish", "silence"):
        with _together(Parallel(2), limit_s=1.0 if how == "silence" else 60.0) as instance:
            over = threading.Event()
            if how == "begin":
                instance.parts[1]._apply_plan = lambda plan: fails()
            elif how == "finish":
                instance.parts[1].finishing = fails
            else:
                instance.parts[1].finishing = lambda over=over: over.wait(60)
            began = instance.device
            try:
                instance.driver.step([(0, 0, 40, (0,))], open=[sequence(0, prompt(40, 7), [4, 5])])
            except WorkersBroken as error:
                assert instance.broken == [str(error)], (how, instance.broken, error)
            else:
                raise AssertionError(f"a step has finished without a worker: {how}")
            finally:
                over.set()
            try:
                instance.driver.step([(0, 40, 1, (0,))])
            except WorkersBroken:
                assert began is instance.device
            else:
                raise AssertionError("a step after the end")
    return True


def real_processes() -> bool:
    """The start, with a process for each worker and gloo between them: the least room of all, steps, swaps, the end of
    the lines; with KV in codes; then one that is killed."""
    import dataclasses
    import signal
    import tempfile

    import torch

    import gpu_worker_process
    from fake_gpu import FakeGpu
    from gpu_parts import swapped_steps
    from memserve.base.config import EngineOptions, SchedulerConfig
    from memserve.base.errors import UserError
    from memserve.model.loading.loader import load_model
    from memserve.model.workers.gpu_processes import GpuWorkers
    from memserve.model.workers.processes import WorkersBroken
    from tiny_models import Driver, greedy_tokens, loaded, prompt, save_folder, sequence

    parallel = Parallel(2, 2)
    module = _module(parallel)
    coded = swapped_steps(Driver(loaded(_module(parallel), kv_dtype="int8")))
    gpu_worker_process.install()
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            model=str(save_folder(module, Path(folder) / "tiny")), dtype="float32", threads=1, parallel=parallel,
            dram_memory_bytes=1 << 20, scheduler=SchedulerConfig(max_running=8),
        )  # fmt: skip

        def started(asked: Any = options) -> tuple[Any, Any, Any]:
            model = load_model(asked.model, "float32", "cpu", on_host=True).keep_kv_as(asked.kv_dtype)
            workers = GpuWorkers(asked, model, FakeGpu())
            geometry = model.geometry
            kv_bytes = workers.kv_bytes()
            assert kv_bytes == 20 * geometry.block_bytes, "as much as the smallest has room for"
            config = asked.instance_config(geometry, 256, "tiny", 131, on_gpu=True, kv_bytes=kv_bytes)
            return workers, workers.build_device(model, config), geometry

        workers, device, geometry = started()
        driver = Driver.__new__(Driver)
        driver.steps, driver.device = 0, device

        def look() -> None:
            dram = torch.frombuffer(workers._dram, dtype=torch.uint8).view(-1, geometry.block_bytes)
            values = dram[6].view(torch.float32)
            assert values.count_nonzero() == values.numel(), "each worker has written its part"

        assert _swapped(driver, look) == greedy_tokens(module, prompt(50, 8), 4)
        meeting = workers._meeting
        assert meeting.is_dir()
        device.close()
        assert [process.returncode for process in workers._processes] == [0, 0, 0] and not meeting.exists()

        _, device, _ = started(dataclasses.replace(options, parallel=Parallel(2), kv_dtype="int8"))
        driver.steps, driver.device = 0, device
        assert swapped_steps(driver) == coded
        device.close()

        workers, device, _ = started(dataclasses.replace(options, parallel=Parallel(1, 3)))
        driver.steps, driver.device = 0, device
        broken = threading.Event()
        device.on_broken = broken.set
        tokens = driver.step([(0, 0, 40, (0,))], open=[sequence(0, prompt(40, 7), [4, 5])]).tokens
        assert tokens == greedy_tokens(module, prompt(40, 7), 1)
        workers._processes[1].send_signal(signal.SIGKILL)
        assert broken.wait(60)
        try:
            driver.step([(0, 40, 1, (0,))])
        except WorkersBroken as error:
            assert "worker 2" in str(error), error
        else:
            raise AssertionError("a step without worker 2")
        device.close()
        try:
            started(dataclasses.replace(options, parallel=Parallel(2), lora=("one=nowhere",)))
        except UserError as error:
            assert "worker" in str(error) and "nowhere" in str(error), error
        else:
            raise AssertionError("workers that cannot start do")
    return True


def an_engine() -> bool:
    """Requests side by side, some with common beginnings, in too little KV memory, with drafts and a grammar's place in
    other rows: the answers of the model alone."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    import gpu_worker_process
    from fake_gpu import FakeGpu
    from memserve import LLM
    from memserve.base.errors import UserError
    from memserve.base.types import SamplingParams
    from memserve.instance.speculation import speculation
    from memserve.model.gpu import streams as gpu
    from memserve_lab.sim.fuzz.scenario_features import Always
    from tiny_models import greedy_tokens, prompt, save_folder

    gpu_worker_process.install()
    gpu.open_gpu = lambda device, share: FakeGpu()
    module, greedy = _module(Parallel(2)), SamplingParams(temperature=0)
    asked = [[int(token) for token in [*prompt(40, at % 2), *prompt(20 + 45 * at, 50 + at)]] for at in range(5)]
    expected = [tuple(greedy_tokens(module, np.array(tokens, np.int32), 12)) for tokens in asked]
    options = {"dtype": "float32", "threads": 1, "dram_memory": "4MiB", "preemption": "swap", "max_step_tokens": 64}
    with tempfile.TemporaryDirectory() as folder, _replaced(speculation, "Worth", Always):
        model = str(save_folder(module, Path(folder) / "tiny"))
        with LLM(model, **options, tensor_parallel=2, max_running=4, draft_tokens=3) as llm:

            def answer(tokens: list[int]) -> tuple[int, ...]:
                return tuple(llm.generate([tokens], greedy, max_tokens=12, ignore_eos=True)[0].outputs[0].tokens)

            for _ in range(2):
                with ThreadPoolExecutor(5) as pool:
                    assert list(pool.map(answer, asked)) == expected
            crowd = [0, 1, 0]  # side by side, with drafts from what was cached just before
            assert answer(asked[0]) == expected[0]
            with ThreadPoolExecutor(3) as pool:
                assert list(pool.map(answer, [asked[at] for at in crowd])) == [expected[at] for at in crowd]
            stats = llm._engine.stats().instance
            assert llm._engine._instance._device._leader.graph_sizes == [1, 2, 4]
            assert stats.drafts_kept and stats.cached_tokens, stats
            assert stats.preemptions_swap or stats.dram_tokens_reused, stats
            processes = llm._engine._instance._device._workers._processes
        assert [process.returncode for process in processes] == [0]
        try:
            LLM(model, **options, tensor_parallel=2, kv_lower_dtype="int8")
        except UserError as error:
            assert "kv-lower-dtype" in str(error.hint), error
        else:
            raise AssertionError("a lower dtype on GPUs")
    return True


THREADS = {
    **{f"{name}, graphs": (chunks_and_decodes, kind, True) for name, kind in KINDS.items()},
    "TP 2, kernel by kernel": (chunks_and_decodes, KINDS["TP 2"], False),
    "TP 2, in flight": (plans_in_flight, KINDS["TP 2"], True),
    "TP 2 x PP 2, in flight": (plans_in_flight, KINDS["TP 2 x PP 2"], False),
    "TP 2, waiting for the host": (what_the_host_must_know, KINDS["TP 2"], True),
    "TP 2 x PP 2, waiting for the host": (what_the_host_must_know, KINDS["TP 2 x PP 2"], False),
    "TP 3, codes of int4": (codes, KINDS["TP 3"], "int4"),
    "TP 2 x PP 2, codes of fp8": (codes, KINDS["TP 2 x PP 2"], "fp8"),
    "TP 3, swaps": (swaps, KINDS["TP 3"]),
    "TP 2 x PP 2, swaps": (swaps, KINDS["TP 2 x PP 2"]),
    "by layer": (by_layer,),
    "a step has finished on all": (a_step_has_finished_on_all,),
    "another order is found": (another_order_is_found,),
    "all have graphs or none": (all_have_graphs_or_none,),
    "a worker that fails ends the instance": (a_worker_that_fails_ends_the_instance,),
}
PROCESSES = {"real processes": (real_processes,), "an engine": (an_engine,)}
SCENARIOS: dict[str, Any] = THREADS | PROCESSES
INTERPRETED = ("TP 2, graphs", "TP 3, graphs")
"""With Triton's kernels, on the heads of one worker; the others have attention by their oracle."""


@pytest.fixture(scope="module")
def of_threads() -> dict[str, str]:
    return results_of(__file__, THREADS, 580)


@pytest.fixture(scope="module")
def of_processes() -> dict[str, str]:
    return results_of(__file__, PROCESSES, 580)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", THREADS)
def test_several_workers_on_gpus(of_threads: dict[str, str], name: str) -> None:
    assert of_threads[name] == ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROCESSES)
def test_workers_on_gpus_that_are_processes(of_processes: dict[str, str], name: str) -> None:
    assert of_processes[name] == ""


if __name__ == "__main__":
    from forked_processes import fork_processes

    fork_processes()
    run_devices(SCENARIOS, INTERPRETED)
