"""KV that goes from one instance on several made-up GPUs to another of other degrees, and by a store: the tokens of one
device. Nothing is read or written that a device may still touch.

Whether Triton's kernels are interpreted is decided once: the scenarios run in one child process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from interpreted import results_of, run_devices
from memserve.base.kv_layout import Parallel

PAIRS = {
    "TP 1 to TP 2": (Parallel(1), Parallel(2)),
    "TP 2 to TP 1": (Parallel(2), Parallel(1)),
    "TP 2 to TP 2": (Parallel(2), Parallel(2)),
    "TP 2 to PP 3": (Parallel(2), Parallel(1, 3)),
    "PP 2 to TP 2 x PP 3": (Parallel(1, 2), Parallel(2, 3)),
}
FROM, TO, BY = [9, 2, 33], [4, 20, 11], [1, 5, 0]
"""Blocks of the sequence: here, there, and in a store."""


class Member:
    """Arenas, a port that reads others' on this host, and its answers."""

    def __init__(self, name: str, geometry: Any, arenas: Any) -> None:
        from fake_driver import FakeDriver
        from links_owner import info_of
        from memserve.protocol.peers import Peer
        from memserve.transport.data_port import PagePort
        from memserve.transport.links.cuda_ipc import IpcLink
        from memserve.transport.links.gpu_memory import GpuMemory
        from memserve.transport.links.shared_memory import ShmLink

        on_gpu = any(isinstance(arena, GpuMemory) for arena in arenas.values())
        link = IpcLink(arenas, FakeDriver()) if on_gpu else ShmLink(arenas)
        self._answers: dict[int, Any] = {}
        self._news = threading.Condition()
        self.port = PagePort(geometry, arenas, [link], self._on_pages)
        self.info = self.port.describe(msgspec.structs.replace(info_of(Peer(name, 1)), geometry=geometry))
        self._geometry, self._jobs = geometry, 0

    def _on_pages(self, answer: Any) -> None:
        with self._news:
            self._answers[answer.job_id] = answer
            self._news.notify_all()

    def _do(self, job: Any) -> Any:
        self.port.start(job)
        with self._news:
            assert self._news.wait_for(lambda: job.job_id in self._answers, 60), "no answer"
            return self._answers[job.job_id]

    def seals(self, tier: Any, blocks: list[int]) -> tuple[int, ...]:
        from memserve.kv.transfer.events import SealPages

        self._jobs += 1
        found: tuple[int, ...] = self._do(
            SealPages(self._jobs, tier, tuple(blocks), 0, self._geometry.num_layers)
        ).checksums
        return found

    def pull(self, owner: Member, tiers: tuple[Any, Any], src: list[int], dst: list[int], seals: Any) -> str:
        """The error; empty: it came."""
        from memserve.kv.transfer.events import PullPages

        self.port.add_peer(owner.info)
        self._jobs += 1
        layers = 0, self._geometry.num_layers
        job = PullPages(
            self._jobs, owner.info.peer, tiers[0], tuple(src), tiers[1], tuple(dst), *layers, seals,
            by_page=bool(self._jobs % 2),
        )  # fmt: skip
        error: str = self._do(job).error
        return error


@contextmanager
def _instances(*parallels: Parallel) -> Any:
    """Instances of one model, as members."""
    from gpu_parts import Alone, Together
    from memserve.base.types import Tier
    from tiny_models import tiny_module

    module, together = tiny_module("llama"), []
    try:
        for parallel in parallels:
            together.append(Together(module, parallel) if parallel.worker_count > 1 else Alone(module))
        members = [
            Member(f"m{number}", one.geometry, {Tier.HBM: one.memory(), Tier.DRAM: one.dram})
            for number, one in enumerate(together)
        ]
        yield module, together, members
        for member in members:
            member.port.close()
    finally:
        for one in together:
            one.close()


def _goes_on(there: Any, tokens: Any, drawn: list[int], count: int) -> list[int]:
    """What the second instance draws behind ``drawn``, with the KV of all tokens but the last one in ``TO``."""
    from tiny_models import sequence

    known = np.concatenate([tokens, drawn]).astype(np.int32)
    start = len(known) - 1
    opened = [sequence(1, known, TO, prompt_tokens=len(tokens))]
    got = there.driver.step([(1, start, 1, (1,))], open=opened).tokens
    return [*drawn, *got, *there.driver.decode(1, start + 1, count)]


def handed_over(prefill: Parallel, decode: Parallel) -> bool:
    """A prompt is computed here, and goes on there: with KV out of HBM, and out of what both tiers have of it."""
    from memserve.base.types import CopyBlocks, Tier
    from tiny_models import greedy_tokens, prompt, sequence

    tokens = prompt(75, 1)
    with _instances(prefill, decode) as (module, (here, there), (sender, receiver)):
        expected = greedy_tokens(module, tokens, 6)
        drawn = here.driver.step([(3, 0, 75, (3,))], open=[sequence(3, tokens, FROM)]).tokens
        seals = sender.seals(Tier.HBM, FROM)
        assert receiver.pull(sender, (Tier.HBM, Tier.HBM), FROM, TO, seals) == ""
        assert receiver.pull(sender, (Tier.HBM, Tier.HBM), FROM, TO, seals) == "", "by page, and whole"
        assert receiver.seals(Tier.HBM, TO) == seals
        assert _goes_on(there, tokens, drawn, 4) == expected
        here.driver.step([], copies=[CopyBlocks(Tier.HBM, Tier.DRAM, FROM, BY)])
        there.driver.step([], close=[1])
        assert sender.seals(Tier.DRAM, BY) == seals, "DRAM has whole blocks"
        assert receiver.pull(sender, (Tier.DRAM, Tier.HBM), BY, TO, seals) == ""
        assert _goes_on(there, tokens, drawn, 4) == expected
    return True


def by_a_store(writer: Parallel, reader: Parallel) -> bool:
    """KV goes to host memory of another process, and from there to an instance of another degree."""
    from memserve import _core
    from memserve.base.types import Tier
    from tiny_models import greedy_tokens, prompt, sequence

    tokens = prompt(75, 1)
    with _instances(writer, reader) as (module, (here, there), (sender, receiver)):
        kept = _core.SharedArena(8 * here.geometry.block_bytes)
        store = Member("store", here.geometry, {Tier.DRAM: kept})
        drawn = here.driver.step([(3, 0, 75, (3,))], open=[sequence(3, tokens, FROM)]).tokens
        seals = sender.seals(Tier.HBM, FROM)
        sender.port.add_peer(store.info)
        taken = here.memory().copied_ranges(np.array(FROM) * here.geometry.block_bytes, here.geometry.block_bytes)
        np.frombuffer(kept, np.uint8).reshape(8, -1)[BY] = taken.reshape(3, -1)
        assert store.seals(Tier.DRAM, BY) == seals
        assert receiver.pull(store, (Tier.DRAM, Tier.HBM), BY, TO, seals) == ""
        assert _goes_on(there, tokens, drawn, 4) == greedy_tokens(module, tokens, 6)
        store.port.close()
    return True


def damage_is_noticed() -> bool:
    """One byte of one worker's heads is another one: the pull fails, by the checksum of the whole block."""
    from memserve.base.types import Tier
    from tiny_models import prompt, sequence

    with _instances(Parallel(2), Parallel(1)) as (_, (here, _there), (sender, receiver)):
        here.driver.step([(3, 0, 75, (3,))], open=[sequence(3, prompt(75, 1), FROM)])
        seals = sender.seals(Tier.HBM, FROM)
        here.parts[1].hbm[FROM[1], 77] ^= 1
        error = receiver.pull(sender, (Tier.HBM, Tier.HBM), FROM, TO, seals)
        assert "1 of 3 blocks have another checksum" in error, error
        here.parts[1].hbm[FROM[1], 77] ^= 1
        assert receiver.pull(sender, (Tier.HBM, Tier.HBM), FROM, TO, seals) == ""
    return True


def what_waits_for_no_plan_is_found() -> bool:
    """Pages are sealed, and landed on, while a worker has not reported the plan that touches them: the checker sees it.
    The machine waits for that report (``kv/transfer/barriers.py``)."""
    from fake_gpu import RaceError
    from memserve.transport.ranges import block_ranges
    from tiny_models import prompt, sequence

    with _instances(Parallel(2), Parallel(2)) as (_, (here, there), _members):
        for instance, access in ((here, "seal"), (there, "land_host")):
            memory, held = instance.memory(), threading.Event()
            instance.parts[1].finishing = lambda held=held: held.wait(60)
            finish = _begun(instance, sequence(3, prompt(75, 1), FROM))
            ranges = block_ranges(instance.geometry, FROM, FROM, 0, instance.geometry.num_layers)
            host = np.zeros(64 * instance.geometry.block_bytes, np.uint8)
            arguments = (
                (ranges.src_offsets, ranges.range_bytes)
                if access == "seal"
                else (ranges.dst_offsets, host.ctypes.data, ranges.src_offsets, ranges.range_bytes)
            )
            try:
                getattr(memory, access)(*arguments)
            except RaceError:
                held.set()
                finish()
                getattr(memory, access)(*arguments)
                continue
            raise AssertionError(f"{access} beside a plan is not found")
    return True


def _begun(instance: Any, opened: Any) -> Any:
    from memserve.instance.events import StepPlan

    plan = StepPlan(0, slots=[3], starts=[0], counts=[75], sample_slots=[(3,)], open=[opened])
    finish = instance.device.begin_step(plan)
    assert all(part.began.acquire(timeout=60) for part in instance.parts.values())
    return finish


SCENARIOS: dict[str, Any] = {
    **{name: (handed_over, *pair) for name, pair in PAIRS.items()},
    "by a store, TP 2 to TP 1": (by_a_store, Parallel(2), Parallel(1)),
    "by a store, PP 2 to TP 2": (by_a_store, Parallel(1, 2), Parallel(2)),
    "damage is noticed": (damage_is_noticed,),
    "what waits for no plan is found": (what_waits_for_no_plan_is_found,),
}


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Scenario -> "" or what went wrong."""
    return results_of(__file__)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_kv_between_instances_on_several_gpus(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


if __name__ == "__main__":
    run_devices(SCENARIOS)
