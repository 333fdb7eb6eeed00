"""Layers that wait until the KV before some rows has come: real devices, and KV that another one has computed."""

from __future__ import annotations

import threading

import pytest

from memserve.model.attention.sequence_parallel import LayerGates, SegmentLostError
from tiny_models import Driver, greedy_tokens, loaded, prompt, sequence, tiny_module
from waiting import eventually

FIRST, TOKENS = 64, 100
"""Of the stripe that comes, two blocks, and of the prompt."""


def test_gate_opens_layer_by_layer() -> None:
    gates = LayerGates(0.0)
    gates.move_gate(1, 2)
    gates.wait_for_layer(1, 0)
    gates.wait_for_layer(1, 1)
    with pytest.raises(SegmentLostError, match="layer 2 has not come in time"):
        gates.wait_for_layer(1, 2)
    gates.move_gate(1, None)
    with pytest.raises(SegmentLostError, match="layer 0 will not come"):
        gates.wait_for_layer(1, 0)


def test_wait_ends_when_the_gate_moves() -> None:
    gates, order = LayerGates(60.0), []

    def wait() -> None:
        gates.wait_for_layer(3, 0)
        order.append("came")
        with pytest.raises(SegmentLostError, match="will not come"):
            gates.wait_for_layer(3, 1)
        order.append("lost")

    waiting = threading.Thread(target=wait)
    waiting.start()
    gates.move_gate(3, 1)
    eventually(lambda: order == ["came"])
    gates.move_gate(3, None)
    waiting.join(30)
    assert order == ["came", "lost"]


def test_gates_of_ended_plans_are_forgotten() -> None:
    gates = LayerGates(0.0)
    gates.move_gate(1, 1)
    gates.end_gates([1])
    gates.move_gate(1, None)
    gates.move_gate(2, 1)
    assert gates._layers == {2: 1}, "what is late is of no use, and is not kept"


def pair(family: str, **sizes: int) -> tuple[Driver, Driver]:
    return Driver(loaded(tiny_module(family, **sizes))), Driver(loaded(tiny_module(family, **sizes)))


def move_layer(source: Driver, target: Driver, layer: int) -> None:
    """Of blocks 0 and 1, into blocks 5 and 6 there."""
    size = source.geometry.page_bytes
    for block in (0, 1):
        page = source.device._arenas.hbm[block, layer * size : (layer + 1) * size]
        target.device._arenas.hbm[5 + block, layer * size : (layer + 1) * size] = page


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}), ("llama", {"num_key_value_heads": 1}), ("qwen3", {}), ("gemma2", {}), ("gpt_oss", {}),
        ("deepseek_v3", {}), ("minicpm3", {}),
    ],
)  # fmt: skip
def test_row_behind_a_gate_gives_the_families_own_tokens(family: str, sizes: dict[str, int]) -> None:
    """The first stripe is computed by another device meanwhile; each of its layers comes as soon as it is written."""
    tokens = prompt(TOKENS, 5)
    source, target = pair(family, **sizes)
    reported: list[int] = []

    def move(_: int, layer: int) -> None:
        move_layer(source, target, layer)
        reported.append(layer)
        target.device.move_gate(1, layer + 1)

    source.device.on_layer = move
    first = threading.Thread(
        target=lambda: source.step(
            [(0, 0, FIRST, ())], open=[sequence(0, tokens[:FIRST], [0, 1], prompt_tokens=TOKENS)], report_layers=1
        )
    )
    opened = sequence(0, tokens, [5, 6, 2, 3])
    first.start()
    drawn = target.step([(0, FIRST, TOKENS - FIRST, (0,))], open=[opened], gates={0: 1}).tokens
    first.join()
    assert reported == list(range(source.geometry.num_layers))
    drawn += target.decode(0, TOKENS, 4)
    assert drawn == greedy_tokens(tiny_module(family, **sizes), tokens, 5)


def test_row_whose_layers_do_not_come_fails_alone() -> None:
    tokens, other = prompt(TOKENS, 7), prompt(20, 8)
    _, target = pair("llama")
    target.device.gates = LayerGates(0.0)
    rows = [(0, FIRST, TOKENS - FIRST, (0,)), (1, 0, 20, (1,))]
    opened = [sequence(0, tokens, [5, 6, 2, 3]), sequence(1, other, [4])]
    finished = target.step(rows, open=opened, gates={0: 1})
    assert list(finished.failed) == [0] and finished.failed[0].reason == "", "the instance failed, not the request"
    assert finished.tokens[1] == greedy_tokens(tiny_module("llama"), other, 1)[0]
