"""The device of a GPU on a CPU: its streams are those of ``fake_gpu``, its kernels are interpreted.

Whether kernels are interpreted is decided once, when triton is imported: so the scenarios run in one child process."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import numpy as np
import pytest

from gpu_states import states_and_their_snapshots, states_on_two_tiers
from interpreted import results_of, run_devices

SHORT = 12
"""Tokens of a prompt where its length shows nothing: the interpreter takes milliseconds for each."""


def _driver(family: str = "llama", **options: Any) -> Any:
    """A driver of a GPU's device, which tells the fake what attention reads and writes."""
    from functools import partial

    from fake_gpu import FakeGpu
    from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
    from memserve.model.attention.backends import TritonAttention
    from memserve.model.gpu.device import GpuDevice
    from tiny_models import CONTEXT_TOKENS, Driver, loaded, tiny_module

    gpu = options.pop("gpu", None) or FakeGpu()
    kv_dtype, sizes = options.pop("kv_dtype", "auto"), options.pop("sizes", {})
    model = options.pop("model", None) or loaded(tiny_module(family, **sizes), kv_dtype=kv_dtype)
    layers = model.geometry.num_layers

    class Watched(TritonAttention):
        def run_attention(self, layer: int, q: Any, k: Any, v: Any, **more: Any) -> Any:
            batch, bytes_of = self.batch, self.batch.arena.view(__import__("torch").uint8)
            block_bytes = batch.shape_constants()["STRIDE"] * batch.arena.element_size()
            page_bytes = batch.geometry.page_bytes
            contexts, starts = batch.contexts.tolist(), batch.q_starts.tolist()
            for row, context in enumerate(contexts):
                count = starts[row + 1] - starts[row]
                for entry in range(-(-context // batch.geometry.block_tokens)):
                    block = int(batch.tables[int(batch.table_rows[row]), entry])
                    written = (entry + 1) * batch.geometry.block_tokens > context - count
                    begin = block * block_bytes + layer * page_bytes
                    memory = bytes_of[begin : begin + page_bytes]
                    gpu.access(gpu.compute, memory, writes=written)
            return super().run_attention(layer, q, k, v, **more)

    def choose(arena: Any, geometry: Any, share: Any = None, span: Any = None) -> Any:
        return partial(Watched, arena.view(-1), geometry, span=span)

    class OnGpu(GpuDevice):
        @property
        def _is_triton(self) -> bool:
            return True

    module, layouts = (sys.modules[f"memserve.model.{name}"] for name in ("device", "attention.layouts"))
    device_choose, layouts_choose = module.choose_attention, layouts.choose_backend
    module.choose_attention = layouts.choose_backend = choose
    try:
        driver = Driver.__new__(Driver)
        states = options.pop("states", None)
        dram = options.pop("dram", 0 if states is not None else 8)
        scheduler, pool = SchedulerConfig(max_running=8), PoolConfig(options.pop("blocks", 64), dram, states=states)
        config = InstanceConfig(CONTEXT_TOKENS, pool=pool, scheduler=scheduler)
        driver.device, driver.steps = OnGpu(model, config, gpu, **options), 0
        driver.device._page_attention = lambda: choose(
            driver.device._arenas.hbm, __import__("dataclasses").replace(model.geometry, num_layers=1)
        )
    finally:
        module.choose_attention, layouts.choose_backend = device_choose, layouts_choose
    driver.gpu, driver.layers = gpu, layers
    return driver


def chunks_and_decodes(graphs: bool = False, family: str = "llama") -> bool:
    """Chunks beside decodes; the tokens of the family's own eager path."""
    from tiny_models import greedy_tokens, prompt, sequence, tiny_module

    first, second = prompt(75, 1), prompt(41, 2)
    module = tiny_module(family)
    expected = greedy_tokens(module, first, 6), greedy_tokens(module, second, 4)
    driver = _driver(family)
    if graphs:
        driver.device.capture_graphs()
        assert driver.device.graph_sizes == [1, 2, 4, 8], driver.device._graphs.refused
    driver.step([(3, 0, 50, ())], open=[sequence(3, first, [9, 2])])
    got = driver.step([(3, 50, 5, ()), (6, 0, 41, (6,))], grow=[(3, [33])], open=[sequence(6, second, [7, 40])]).tokens
    mixed = driver.step([(6, 41, 1, (6,)), (3, 55, 20, (3,))]).tokens
    got_first, got_second = mixed[1:], [*got, *mixed[:1]]
    for offset in range(2):
        tokens = driver.step([(3, 75 + offset, 1, (3,)), (6, 42 + offset, 1, (6,))]).tokens
        got_first, got_second = [*got_first, tokens[0]], [*got_second, tokens[1]]
    got_first += driver.decode(3, 77, 3)
    assert (got_first, got_second) == expected
    if graphs:
        assert sum(graph.replays for graph in driver.gpu.graphs) == 5
    return True


def codes(kv_dtype: str) -> bool:
    """KV of a byte or less: the tokens of a CPU's device, step by step, and in DRAM its bytes."""
    from gpu_parts import swapped_steps
    from tiny_models import Driver, loaded, tiny_module

    sizes = {"num_hidden_layers": 1}  # interpreting takes long
    on_cpu = Driver(loaded(tiny_module("llama", **sizes), kv_dtype=kv_dtype))
    on_gpu = _driver(kv_dtype=kv_dtype, sizes=sizes)
    assert swapped_steps(on_gpu) == swapped_steps(on_cpu)
    pages = [driver.device._arenas.dram[[6, 0], : on_cpu.geometry.page_bytes] for driver in (on_gpu, on_cpu)]
    assert (pages[0] == pages[1]).all() and pages[0].any()
    return True


def graphs_of_codes() -> bool:
    """Decodes in graphs, side by side, rows of padding beside them: the tokens of a CPU's device."""
    from tiny_models import Driver, loaded, prompt, sequence, tiny_module

    def tokens_of(driver: Any) -> list[int]:
        opened = [sequence(slot, prompt(31 + slot, slot), [2 * slot, 2 * slot + 1]) for slot in range(3)]
        got = driver.step([(slot, 0, 31 + slot, (slot,)) for slot in range(3)], open=opened).tokens
        for step in range(3):
            got += driver.step([(slot, 31 + slot + step, 1, (slot,)) for slot in range(3)]).tokens
        return got

    driver = _driver(kv_dtype="int4")
    driver.device.capture_graphs()
    assert tokens_of(driver) == tokens_of(Driver(loaded(tiny_module("llama"), kv_dtype="int4")))
    assert sum(graph.replays for graph in driver.gpu.graphs) == 3
    return True


def two_plans_in_flight() -> bool:
    """A plan computes what the one before it draws, and the host has seen none of it yet; a slot changes hands."""
    from memserve.instance.events import StepPlan
    from tiny_models import greedy_tokens, prompt, sequence, tiny_module

    tokens, other, module = prompt(40, 7), prompt(33, 8), tiny_module("llama")
    driver = _driver()
    driver.device.capture_graphs()

    def plan(number: int, start: int, count: int, **parts: Any) -> StepPlan:
        return StepPlan(number, slots=[2], starts=[start], counts=[count], sample_slots=[(2,)], **parts)

    begun = [driver.device.begin_step(plan(0, 0, 40, open=[sequence(2, tokens, [4, 5])]))]
    begun += [driver.device.begin_step(plan(number, 39 + number, 1)) for number in (1, 2, 3)]
    begun.append(driver.device.begin_step(plan(4, 0, 33, close=[2], open=[sequence(2, other, [9, 10])])))
    assert driver.device._slots.tokens[2, 40] == 0, "the host knows nothing yet"
    got = [finish().tokens[0] for finish in begun]
    assert got == [*greedy_tokens(module, tokens, 4), greedy_tokens(module, other, 1)[0]]
    assert driver.device._slots.tokens[2, 33] == got[-1], "what is learnt late is not another sequence's"
    assert (driver.device._slots.tokens[2, :33] == other).all()
    return True


def _cpu_twin(options: Any, count: int, **parts: Any) -> list[Any]:
    from tiny_models import Driver, loaded, prompt, sequence, tiny_module

    driver = Driver(loaded(tiny_module("llama")))
    return _sampled(driver, prompt(SHORT, 7), options, count, sequence)


def _sampled(driver: Any, tokens: Any, options: Any, count: int, sequence: Any) -> list[Any]:
    found = [driver.step([(0, 0, SHORT, (0,))], open=[sequence(0, tokens, [4, 5], options)])]
    found += [driver.step([(0, SHORT + number, 1, (0,))]) for number in range(count)]
    return found


def draws_like_a_cpu() -> bool:
    """Temperatures, filters, penalties, bias, logprobs: token by token those of the CPU's device."""
    from memserve.base.types import SamplingParams
    from tiny_models import prompt, sequence

    for sampling in (
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=1.3, top_k=5, seed=4),
        SamplingParams(temperature=1.3, top_p=0.7, min_p=0.01, seed=5, logprobs=3),
        SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, logprobs=0),
        SamplingParams(temperature=0, logit_bias=((7, 4.0),), logprobs=2),
        SamplingParams(temperature=0, logprobs=2, logprob_token_ids=(5, 9)),
    ):
        on_gpu = _sampled(_driver(), prompt(SHORT, 7), sampling, 3, sequence)
        on_cpu = _cpu_twin(sampling, 3)
        assert [one.tokens for one in on_gpu] == [one.tokens for one in on_cpu], sampling
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert ours.failed == theirs.failed == {} and ours.logprobs.keys() == theirs.logprobs.keys()
            for row, entry in ours.logprobs.items():
                assert [t for t, _ in entry.top] == [t for t, _ in theirs.logprobs[row].top]
                np.testing.assert_allclose(entry.logprob, theirs.logprobs[row].logprob, atol=1e-4)
    return True


def rows_fail_alone() -> bool:
    """A request that forbids every token, beside one that does not."""
    from memserve.base.types import SamplingParams
    from tiny_models import VOCAB, greedy_tokens, prompt, sequence, tiny_module

    nothing = SamplingParams(temperature=0, logit_bias=tuple((token, -np.inf) for token in range(VOCAB)))
    driver, tokens = _driver(), prompt(40, 7)
    opened = [sequence(0, tokens, [4, 5], nothing), sequence(1, tokens, [6, 7])]
    done = driver.step([(0, 0, 40, (0,)), (1, 0, 40, (1,))], open=opened)
    assert done.failed.keys() == {0} and done.tokens[1:] == greedy_tokens(tiny_module("llama"), tokens, 1)
    return True


def swaps_beside_steps() -> bool:
    """Blocks go down while the next steps run, are given away at once, and come back elsewhere."""
    from memserve.base.types import CopyBlocks, SamplingParams, Tier
    from memserve.instance.events import OpenSequence
    from tiny_models import greedy_tokens, prompt, sequence, tiny_module

    module, tokens, intruder = tiny_module("llama"), prompt(40, 8), prompt(40, 9)
    expected, driver = greedy_tokens(module, tokens, 4), _driver()
    got = driver.step([(0, 0, 40, (0,))], open=[sequence(0, tokens, [1, 2])]).tokens
    got += driver.decode(0, 40, 1)
    out = CopyBlocks(Tier.HBM, Tier.DRAM, [1, 2], [6, 0])
    driver.step([(0, 0, 40, ())], close=[0], copies=[out], open=[sequence(0, intruder, [2, 1])])
    back = CopyBlocks(Tier.DRAM, Tier.HBM, [6, 0], [11, 10])
    known = np.concatenate([tokens, got]).astype(np.int32)
    resumed = OpenSequence(5, known, 40, 0, SamplingParams(temperature=0), [11, 10])
    got += driver.step([(5, 41, 1, (5,))], copies=[back], open=[resumed]).tokens
    chain = [CopyBlocks(Tier.HBM, Tier.HBM, [11, 10], [12, 11])]
    got += driver.step([(5, 42, 1, (5,))], copies=chain, replace=[(5, 0, 12), (5, 1, 11)]).tokens
    assert got == expected
    return True


def the_checker_sees_a_missing_event() -> bool:
    """With waits of the arenas left out, the fake finds the access that nothing orders: those before what goes down,
    before blocks that are given away, before what comes up, and behind it."""
    from fake_gpu import FakeStream, RaceError

    def seen(left_out: set[int]) -> bool:
        after, calls = FakeStream.wait_for, [0]

        def skip(self: Any, mark: Any) -> None:
            calls[0] += 1
            if calls[0] - 1 not in left_out:
                after(self, mark)

        FakeStream.wait_for = skip
        try:
            swaps_beside_steps()
        except RaceError:
            return True
        finally:
            FakeStream.wait_for = after
        return False

    found = [seen(left_out) for left_out in ({0}, {1, 2}, {3, 4}, {5})]
    assert all(found), found
    return True


def by_layer(kv_dtype: str = "auto") -> bool:
    """Layers of a prompt in DRAM, passing through HBM in each step: tokens of all-resident, and no race."""
    from memserve.instance.events import PlaceByLayer
    from tiny_models import Driver, greedy_tokens, loaded, prompt, sequence, tiny_module

    def computed(driver: Any, **parts: Any) -> tuple[list[int], Any]:
        got = driver.step([(0, 0, 40, ())], open=[sequence(0, tokens, [20, 21, 22])], **parts).tokens
        done = driver.step([(0, 40, 30, (0,))])
        return got + done.tokens + driver.decode(0, 70, 3), done

    tokens, driver = prompt(70, 3), _driver(kv_dtype=kv_dtype)
    order = PlaceByLayer(0, 0, [1, 4, 6], {1: [30]}, ([31], [32]))
    got, done = computed(driver, place=[order])
    resident = greedy_tokens(tiny_module("llama"), tokens, 4)
    if kv_dtype != "auto":
        resident, _ = computed(Driver(loaded(tiny_module("llama"), kv_dtype=kv_dtype)))
    assert got == resident
    page_bytes = driver.device._page_bytes
    assert done.link.down_bytes >= 3 * page_bytes and done.link.up_bytes >= 2 * page_bytes
    assert done.link.busy_ns > 0 and done.link.waited_ns > 0
    return True


def layers_are_told_when_they_are_written() -> bool:
    """Each layer once, in order, before the step's end."""
    from tiny_models import prompt, sequence

    driver, told = _driver(), []
    driver.device.on_layer = lambda step_id, layer: told.append((step_id, layer))
    driver.step([(0, 0, 40, (0,))], open=[sequence(0, prompt(40, 7), [4, 5])], report_layers=1)
    assert told == [(0, layer) for layer in range(driver.layers)]
    return True


def what_the_host_must_know_waits() -> bool:
    """Drafts, beams and prompts' logprobs in the middle of other plans: as on a CPU."""
    from tiny_models import greedy_tokens, prompt, sequence, tiny_module

    tokens, driver = prompt(40, 7), _driver()
    expected = greedy_tokens(tiny_module("llama"), tokens, 6)
    done = driver.step([(0, 0, 40, (0,))], open=[sequence(0, tokens, [4, 5, 6])], prompt_logprob_rows=[0])
    assert done.tokens == expected[:1] and len(done.prompt_logprobs[0]) == 40
    drafted = driver.step([(0, 40, 3, (0,))], drafts={0: expected[1:3]})
    assert [*drafted.tokens, *drafted.accepted_drafts[0]] == expected[1:4]
    assert driver.step([(0, 43, 1, (0,))]).tokens == expected[4:5]
    assert driver.step([(0, 44, 1, (0,))]).tokens == expected[5:6]
    return True


def seals() -> bool:
    """The seal of the device is the CPU's, for every length of words, with and without a copy."""
    import torch

    from memserve import _core
    from memserve.transport.links.gpu_memory import GpuMemory

    rng = np.random.default_rng(1)
    memory = torch.from_numpy(rng.integers(0, 256, 1 << 17, dtype=np.uint8))
    arena = GpuMemory(memory)
    for range_bytes in (8, 56, 64, 72, 4096, 65_536 + 24):
        offsets = rng.integers(0, (len(memory) - range_bytes) // 8, 3).astype(np.int64) * 8
        expected = _core.seal_ranges(memory.data_ptr(), offsets, range_bytes)
        assert (arena.seal(offsets, range_bytes) == expected).all(), range_bytes
        count = 2 if range_bytes > 60_000 else 3
        target = GpuMemory(torch.zeros(3 * range_bytes + 64, dtype=torch.uint8))
        places = np.arange(count, dtype=np.int64) * range_bytes
        assert (target.land_pinned(places, arena.arena_parts, offsets[:count], range_bytes) == expected[:count]).all()
        for place, offset in zip(places, offsets, strict=False):
            assert (target.tensor[place : place + range_bytes] == memory[offset : offset + range_bytes]).all()
        host = GpuMemory(torch.zeros(3 * range_bytes + 64, dtype=torch.uint8))
        got = host.land_host(places, memory.data_ptr(), offsets[:count], range_bytes)
        assert (got == expected[:count]).all() and (host.tensor == target.tensor).all()
    ones = torch.full((64,), 0xFF, dtype=torch.uint8)
    first = np.zeros(1, np.int64)
    assert GpuMemory(ones).seal(first, 64)[0] == _core.seal_ranges(ones.data_ptr(), first, 64)[0]
    return True


def pages() -> bool:
    """Rows of bytes to other places, whatever their length."""
    import torch

    from memserve.system.gpu_kernels import copy_rows

    source = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (9, 8200), dtype=np.uint8))
    target = torch.zeros_like(source)
    src, dst = torch.tensor([8, 0, 3], dtype=torch.int32), torch.tensor([1, 2, 7], dtype=torch.int32)
    copy_rows(target, source, dst, src)
    assert (target[[1, 2, 7]] == source[[8, 0, 3]]).all() and not target[[0, 3, 4, 5, 6, 8]].any()
    return True


def pulls_on_one_host() -> bool:
    """Out of another process's GPU, and out of host memory, into both tiers; a generation that is over; unmapping."""

    import torch

    from links_owner import GEOMETRY
    from memserve import _core
    from memserve.base.types import Role, Tier
    from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
    from memserve.transport.links.cuda_ipc import IpcLink
    from memserve.transport.links.gpu_memory import GpuMemory
    from memserve.transport.links.shared_memory import ShmLink, this_host
    from memserve.transport.ports import LinkError
    from memserve.transport.ranges import Ranges

    size, count = GEOMETRY.block_bytes, 4
    theirs = torch.from_numpy(np.random.default_rng(3).integers(0, 256, count * size, dtype=np.uint8))
    hbm, dram = GpuMemory(theirs), _core.SharedArena(count * size)
    torch.frombuffer(dram, dtype=torch.uint8).copy_(theirs.flip(0))
    hbm.generation = dram.generation = 1

    class Driver:
        """Maps what is exported, which is the address itself."""

        mapped = 0

        def map(self, exported: bytes) -> tuple[int, int]:
            self.mapped += 1
            return int.from_bytes(exported, "little"), 1

        def unmap(self, base: int) -> None:
            self.mapped -= 1

    peer, exported = Peer("a", 1), theirs.data_ptr().to_bytes(8, "little")
    places = (
        ArenaPlace(Tier.HBM, hbm.address, hbm.nbytes, hbm.fd, True, exported),
        ArenaPlace(Tier.DRAM, dram.address, dram.nbytes, dram.fd),
    )
    here = (this_host(), os.getpid())
    info = PeerInfo(peer, Role.PREFILL, "tcp://127.0.0.1:1", "ns", GEOMETRY, count, count, 9, True, *here, places)
    empty = GpuMemory(torch.zeros(count * size, dtype=torch.uint8))
    own = {Tier.HBM: empty, Tier.DRAM: _core.SharedArena(count * size)}
    driver = Driver()
    link = IpcLink(own, driver)
    assert link.reaches(info) and not ShmLink(own).reaches(info), "host memory alone cannot be read so"
    link.add_peer(info)
    order = np.array([2, 0, 3], np.int64) * size, np.array([1, 3, 0], np.int64) * size
    for src_tier, source in ((Tier.HBM, theirs), (Tier.DRAM, theirs.flip(0))):
        want = _core.seal_ranges(source.contiguous().data_ptr(), order[0], size)
        for dst_tier in (Tier.HBM, Tier.DRAM):
            assert (link.read(peer, src_tier, dst_tier, Ranges(*order, size)) == want).all()
            target = own[dst_tier]
            landed = target.tensor if dst_tier is Tier.HBM else torch.frombuffer(target, dtype=torch.uint8)
            for came_from, to in zip(*order, strict=True):
                assert torch.equal(landed[to : to + size], source[came_from : came_from + size])
    hbm.generation = 2
    try:
        link.read(peer, Tier.HBM, Tier.HBM, Ranges(*order, size))
    except LinkError as error:
        assert "generation 2" in str(error)
    else:
        raise AssertionError("another life of the process was taken for the peer")
    assert driver.mapped == 1
    link.remove_peer(peer)
    assert driver.mapped == 0
    link.close()
    return True


def graphs_keep_what_they_read() -> bool:
    """A graph reads its inputs by address: what only the function had that was captured must outlive it."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from fake_gpu import FakeGpu

    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[Any] = []
            self.outside: list[StorageWeakRef] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            own = {id(one) for one in self.made}
            found = (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
            tensors = [one for one in found if torch._C._has_storage(one) and id(one) not in own]
            self.outside += [StorageWeakRef(one.untyped_storage()) for one in tensors]
            made = function(*args, **(kwargs or {}))
            self.made += [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
            return made

    class OnlyReplays:
        """As CUDA's: it holds neither the function nor any tensor."""

        def replay(self) -> None: ...

    class Strict(FakeGpu):
        def __init__(self) -> None:
            super().__init__()
            self.outside: list[StorageWeakRef] = []

        def capture_graph(self, run: Any) -> Any:
            with Reads() as reads:
                logits = run()
            inner = {one.untyped_storage()._cdata for one in reads.made if torch._C._has_storage(one)}
            outer = [one for one in reads.outside if one.cdata not in inner]
            self.outside += outer
            return OnlyReplays(), logits

    driver = _driver(gpu=Strict())
    driver.device.capture_graphs()
    gc.collect()
    lost = sum(one.expired() for one in driver.gpu.outside)
    assert driver.device.graph_sizes and driver.gpu.outside
    assert not lost, f"{lost} tensors that graphs read are gone"
    return True


def quantised_weights() -> bool:
    """A mix of formats as in Q4_K_M, prompts and decodes in graphs: the tokens of the numbers."""
    from torch import device as place

    from fake_gpu import capture_as_on_gpu, write_large_pieces
    from memserve.model.gpu.stored import keep_on_device
    from memserve.model.loading.stored import remember_stored
    from quantised_blocks import quantise_matrices
    from tiny_models import greedy_tokens, loaded, prompt, sequence, tiny_module

    write_large_pieces()
    module = tiny_module("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    fine = ("v_proj", "down_proj", "embed_tokens")
    stored = quantise_matrices(module, lambda name: "Q6_K" if any(part in name for part in fine) else "Q4_K")
    first = prompt(SHORT, 1)
    expected = greedy_tokens(module, first, 4)
    remember_stored(module, stored)
    keep_on_device(module, place("cpu"))
    model = loaded(module)
    driver = _driver(model=model, forward=capture_as_on_gpu(module))
    with driver.gpu.compute.use():
        driver.device._graphs.capture_all(1)
    tokens = driver.step([(3, 0, SHORT, (3,))], open=[sequence(3, first, [9, 2])]).tokens
    assert [*tokens, *driver.decode(3, SHORT, 3)] == expected
    assert sum(graph.replays for graph in driver.gpu.graphs) == 3
    return True


def late_draws() -> bool:
    """A mask that is late, beside a slot that the host is ahead of."""
    from late_grammar import check_late_draws

    return check_late_draws(_driver())


SCENARIOS = {
    "graphs keep what they read": graphs_keep_what_they_read,
    "chunks and decodes": chunks_and_decodes,
    "graphs": lambda: chunks_and_decodes(graphs=True),
    "graphs with windows and caps": lambda: chunks_and_decodes(graphs=True, family="gemma2"),
    "graphs with layers of two shapes": lambda: chunks_and_decodes(graphs=True, family="gemma4"),
    "chunks of layers that share KV": lambda: chunks_and_decodes(family="gemma3n"),
    **{f"codes of {kind}": (codes, kind) for kind in ("int8", "fp8", "int4")},
    "states and their snapshots": lambda: states_and_their_snapshots(_driver),
    "states on two tiers": lambda: states_on_two_tiers(_driver),
    "states of scans": lambda: states_and_their_snapshots(_driver, "falcon_h1"),
    "two plans in flight": two_plans_in_flight,
    "draws like a CPU": draws_like_a_cpu,
    "rows fail alone": rows_fail_alone,
    "swaps beside steps": swaps_beside_steps,
    "the checker sees a missing event": the_checker_sees_a_missing_event,
    "by layer": by_layer,
    "by layer, codes": lambda: by_layer("int8"),
    "graphs, codes": (graphs_of_codes,),
    "layers are told when they are written": layers_are_told_when_they_are_written,
    "what the host must know waits": what_the_host_must_know_waits,
    "late draws": late_draws,
    "quantised weights": quantised_weights,
    "seals": seals,
    "pages": pages,
    "pulls on one host": pulls_on_one_host,
}

INTERPRETED = ("chunks and decodes", "graphs with windows and caps", "codes of int8", "codes of fp8", "codes of int4")
"""With Triton's kernels of attention; the others have attention by their oracle."""


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Scenario -> "" or what went wrong."""
    return results_of(__file__)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_device_of_a_gpu(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


if __name__ == "__main__":
    run_devices(SCENARIOS, INTERPRETED)
