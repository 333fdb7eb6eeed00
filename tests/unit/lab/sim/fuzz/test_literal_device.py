"""The fuzzer's device: layers that do not belong together, pages under way and misplaced ones are noticed."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.types import CopyBlocks, SamplingParams, Tier
from memserve.instance.events import MovePages, OpenSequence, PlaceByLayer, StepFinished, StepPlan
from memserve.kv.transfer.events import SealPages
from memserve_lab.sim.fuzz.scenario_features import Workers, workers_of
from memserve_lab.sim.reference.device import OracleDevice
from memserve_lab.sim.reference.oracle import Violation, lone_tokens

LAYERS, BLOCK, VOCAB = 5, 4, 12
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def pages(block: int) -> list[int]:
    return [block * LAYERS + layer for layer in range(LAYERS)]


def down(src: int, dst: int) -> MovePages:
    """A whole block goes to DRAM."""
    return MovePages(Tier.HBM, Tier.DRAM, pages(src), pages(dst))


def begun() -> OracleDevice:
    """The prompt in blocks 0 and 1 of slot 0, which draws into block 2."""
    device = OracleDevice(BLOCK, 8, 4, VOCAB, layers=LAYERS)
    opened = OpenSequence(0, np.asarray(PROMPT, np.int32), len(PROMPT), 0, SamplingParams(seed=3), [0, 1, 2])
    plan = StepPlan(1, open=[opened], slots=[0], starts=[0], counts=[8], sample_slots=[(0,)])
    assert tokens(device, plan) == lone_tokens(PROMPT, 1, 3, 0, VOCAB)
    return device


def decode(step_id: int, at: int, **more: object) -> StepPlan:
    return StepPlan(step_id, slots=[0], starts=[at], counts=[1], sample_slots=[(0,)], **more)


def tokens(device: OracleDevice, plan: StepPlan) -> list[int]:
    event = device.run_plan(plan)
    assert isinstance(event, StepFinished)
    return event.tokens


def test_layers_lie_where_a_plan_says() -> None:
    """Block 0 goes down while it is read; then it is read from there, at last with layer 2 in a frame."""
    device, expected = begun(), lone_tokens(PROMPT, 4, 3, 0, VOCAB)
    assert tokens(device, decode(2, 8, moves=[down(0, 3)])) == expected[1:2]
    up = MovePages(Tier.DRAM, Tier.HBM, [3 * LAYERS + 2], [5 * LAYERS])
    nothing_kept = PlaceByLayer(0, 0, [3], {}, ([6], [7]))
    assert tokens(device, decode(3, 9, place=[nothing_kept], moves=[up])) == expected[2:3]
    assert tokens(device, decode(4, 10, place=[PlaceByLayer(0, 0, [3], {2: [5]}, ([6], [7]))])) == expected[3:]
    assert device.kv.moved_pages == LAYERS + 1 and device.kv.read_by_layer == 2 * LAYERS


def test_a_layer_that_is_read_before_it_arrived_is_noticed() -> None:
    device = begun()
    early = PlaceByLayer(0, 0, [3], {}, ([6], [7]))
    with pytest.raises(Violation, match="positions 0 to 3, layer 0: never written, or not there yet"):
        device.run_plan(decode(2, 8, moves=[down(0, 3)], place=[early]))


def test_a_layer_of_another_block_is_noticed() -> None:
    device = begun()
    swapped = MovePages(Tier.HBM, Tier.DRAM, [*pages(0)[:4], pages(1)[4]], pages(3))
    device.run_plan(decode(2, 8, moves=[swapped]))
    with pytest.raises(Violation, match="positions 0 to 3: the layers do not belong together"):
        device.run_plan(decode(3, 9, place=[PlaceByLayer(0, 0, [3], {}, ([6], [7]))]))


def test_moved_pages_must_be_written_before_and_not_during() -> None:
    for wrong, said in ((2, "was written to while it was moved"), (6, "was moved, and never written")):
        with pytest.raises(Violation, match=said):
            begun().run_plan(decode(2, 8, moves=[down(wrong, 3)]))


def test_offloaded_rows_are_in_dram_and_resident_frames() -> None:
    device, expected = OracleDevice(BLOCK, 8, 4, VOCAB, layers=LAYERS), lone_tokens(PROMPT, 2, 3, 0, VOCAB)
    opened = OpenSequence(0, np.asarray(PROMPT, np.int32), len(PROMPT), 0, SamplingParams(seed=3), [0, 0, 1])
    place = PlaceByLayer(0, 0, [3, 2], {1: [5]}, ([6], [7]))
    plan = StepPlan(1, open=[opened], place=[place], slots=[0], starts=[0], counts=[3], sample_slots=[()])
    device.begin_plan(plan)
    device.finish_layer(plan, 0)
    assert device.page_cells(Tier.DRAM, 3, 0) == [None] * BLOCK, "it is there when the plan is over"
    assert tokens(device, plan) == []
    assert tokens(device, StepPlan(2, slots=[0], starts=[3], counts=[5], sample_slots=[(0,)])) == expected[:1]
    assert tokens(device, decode(3, 8)) == expected[1:]
    for layer in range(LAYERS):
        assert None not in device.page_cells(Tier.DRAM, 3, layer) + device.page_cells(Tier.DRAM, 2, layer)
    assert device.kv.tiers[Tier.HBM][5 * LAYERS + 1] == device.page_cells(Tier.DRAM, 2, 1)


def test_no_two_rows_write_to_a_block_of_dram() -> None:
    device = OracleDevice(BLOCK, 8, 4, VOCAB, layers=LAYERS)
    opened = [OpenSequence(n, np.asarray(PROMPT, np.int32), 8, 0, SamplingParams(), [0, 0, 1 + n]) for n in (0, 1)]
    place = [PlaceByLayer(n, 0, [3 - n, 0], {}, ([4 + 2 * n], [5 + 2 * n])) for n in (0, 1)]
    plan = StepPlan(1, open=opened, place=place, slots=[0, 1], starts=[0, 0], counts=[8, 8], sample_slots=[(), ()])
    with pytest.raises(Violation, match="two rows write the same cell"):
        device.run_plan(plan)


def test_frames_are_not_used_twice() -> None:
    with pytest.raises(Violation, match="a frame is used twice"):
        begun().run_plan(decode(2, 8, place=[PlaceByLayer(0, 0, [3], {1: [6]}, ([6], [7]))]))


def test_others_see_what_a_plan_has_begun() -> None:
    """Copies are made when the plan begins, pages that move have no bytes until it is over, and layers come one by
    one: so has each a checksum of its own."""
    device = begun()
    whole = device.seal_pages(SealPages(1, Tier.HBM, (0,), 0, LAYERS)).checksums
    plan = decode(2, 8, moves=[down(0, 3)], copies=[CopyBlocks(Tier.HBM, Tier.DRAM, [0], [1])], report_layers=1)
    device.begin_plan(plan)
    assert device.seal_pages(SealPages(2, Tier.DRAM, (1,), 0, LAYERS)).checksums == whole
    assert device.page_cells(Tier.DRAM, 3, 4) == [None] * BLOCK
    for layer in range(LAYERS):
        assert device.page_cells(Tier.HBM, 2, layer)[0] is None
        device.finish_layer(plan, layer)
        assert (
            device.page_cells(Tier.HBM, 2, layer)[0] is not None
            and device.page_cells(Tier.DRAM, 3, layer) == [None] * BLOCK
        )
    assert tokens(device, plan) == lone_tokens(PROMPT, 2, 3, 0, VOCAB)[1:]
    assert device.seal_pages(SealPages(3, Tier.DRAM, (3,), 0, LAYERS)).checksums == whole


def test_writes_of_lagging_worker_are_missing_to_other_readers() -> None:
    """Until it is through, or other bytes come there."""
    device, expected = begun(), lone_tokens(PROMPT, 2, 3, 0, VOCAB)
    assert device.written == {(block, inside) for block in (0, 1) for inside in range(BLOCK)}
    whole = [device.checksum_of(Tier.HBM, block, 0, LAYERS) for block in (0, 1)]
    device.behind |= device.written
    early = device.seal_pages(SealPages(1, Tier.HBM, (0, 1), 0, LAYERS)).checksums
    assert early[0] != whole[0] and early[1] != whole[1]
    assert tokens(device, decode(2, 8)) == expected[1:], "own rows come behind the worker's own writes"
    device.set_page(Tier.HBM, 0, 0, [1, 2, 3, 4])
    assert device.page_cells(Tier.HBM, 0, 0) == [1, 2, 3, 4]
    device.behind.clear()
    assert device.checksum_of(Tier.HBM, 1, 0, LAYERS) == whole[1]


def test_workers_meet_before_a_plans_end_is_told() -> None:
    """Whatever their own pace; as many as the seed says, and one waits for no other."""
    counts = [workers_of(seed) for seed in range(300)]
    assert set(counts) == {1, 2, 3, 4} and counts == [workers_of(seed) for seed in range(300)]
    assert all(Workers(count, "w").told_ns(1000) == 1000 for count in (1, 2, 4))
