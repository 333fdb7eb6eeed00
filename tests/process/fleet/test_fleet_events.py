"""KV events over real sockets: followed, repeated behind a gap, gone silent, garbage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_server import FleetServer, fleet_server, spec_of
from kv_event_words import BLOCK, batch, stored
from kv_publisher import Publisher
from memserve.base.config import ClusterConfig
from memserve.fleet.engine_client import report_of
from memserve.fleet.messages import EngineKind, EngineView
from scripted_engine import ScriptedEngine, scripted_engines
from waiting import eventually

PROMPT = list(range(1, 1 + 8 * BLOCK))


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.close()


@pytest.fixture
def server(engines: list[ScriptedEngine], publisher: Publisher) -> Iterator[FleetServer]:
    specs = [spec_of(engines[0]), spec_of(engines[1], events=publisher.events, replay=publisher.replay)]
    with fleet_server(specs, ClusterConfig(policy="prompt-tree")) as started:
        subscribed(started, publisher)
        yield started


def subscribed(server: FleetServer, publisher: Publisher) -> None:
    """Until what is published arrives."""

    def heard() -> bool:
        publisher.publish(batch())
        return view(server).kv_batches > 0 and bool(publisher.asked)

    eventually(heard)


def view(server: FleetServer) -> EngineView:
    return server.host.machine.engine_views()[1]


def blocks(first: int, last: int) -> bytes:
    """A batch that stores these blocks of the prompt."""
    parent = 100 + first - 1 if first else None
    return batch(stored([100 + at for at in range(first, last)], parent, PROMPT[first * BLOCK : last * BLOCK]))


def test_requests_go_where_their_prefix_lies(
    engines: list[ScriptedEngine], server: FleetServer, publisher: Publisher
) -> None:
    engines[0].tokens = engines[1].tokens = lambda fields: PROMPT
    publisher.publish(blocks(0, 8))
    eventually(lambda: view(server).cached_blocks == 8)
    assert server.post(prompt="whatever").status_code == 200
    assert (len(engines[0].asked), len(engines[1].asked)) == (0, 1)
    assert view(server).matched_tokens == 8 * BLOCK


def test_a_chat_is_tokenized_as_it_is_rendered(
    engines: list[ScriptedEngine], server: FleetServer, publisher: Publisher
) -> None:
    """With the template's fields that a chat has beside its messages: they change the prompt."""
    seen: list[dict[str, object]] = []
    engines[0].tokens = engines[1].tokens = lambda fields: seen.append(fields) or PROMPT
    asked = {"messages": [{"role": "user", "content": "hi"}], "documents": [{"text": "d"}], "reasoning_effort": "low"}
    more = {"chat_template_kwargs": {"a": 1}, "tool_choice": "none", "temperature": 0}
    assert server.post("/v1/chat/completions", prompt=None, **asked, **more).status_code == 200
    (fields,) = seen
    assert fields["chat_template_kwargs"] == {"a": 1, "documents": [{"text": "d"}], "reasoning_effort": "low"}
    assert fields["tool_choice"] == "none" and "temperature" not in fields


def test_lost_events_are_asked_for(server: FleetServer, publisher: Publisher) -> None:
    publisher.publish(blocks(0, 2))
    publisher.publish(blocks(2, 4), lost=True)
    publisher.publish(blocks(4, 6))
    eventually(lambda: view(server).cached_blocks == 6)
    assert view(server).kv_gaps >= 1 and view(server).kv_forgotten == 0


def test_events_lost_by_a_replay_are_requested_again(server: FleetServer, publisher: Publisher) -> None:
    publisher.publish(blocks(0, 2))
    eventually(lambda: view(server).cached_blocks == 2)
    for at in range(2, 6):
        publisher.publish(blocks(at, at + 1), lost=True)
    second = publisher.kept[-3][0]
    publisher.drops = {second}
    publisher.publish(batch())
    eventually(lambda: view(server).cached_blocks == 6)
    assert publisher.asked[-2:] == [second - 1, second] and view(server).kv_forgotten == 0


def test_events_that_are_gone_are_forgotten(server: FleetServer, publisher: Publisher) -> None:
    publisher.publish(blocks(0, 4))
    eventually(lambda: view(server).cached_blocks == 4)
    publisher.publish(blocks(4, 6), lost=True, kept=False)
    publisher.publish(batch(stored([900], None, [9] * BLOCK)))
    eventually(lambda: view(server).kv_forgotten == 1)
    assert view(server).cached_blocks == 1


def test_events_that_stop_leave_requests_alone(
    engines: list[ScriptedEngine], server: FleetServer, publisher: Publisher
) -> None:
    publisher.close()
    for _ in range(3):
        assert server.post(prompt="x" * 400).status_code == 200


def test_garbage_on_the_socket_is_no_event(server: FleetServer, publisher: Publisher) -> None:
    publisher.publish(blocks(0, 4))
    eventually(lambda: view(server).cached_blocks == 4)
    publisher.send_raw(b"one frame")
    publisher.send_raw(b"kv", b"short", b"x")
    publisher.send_raw(b"kv", (1 << 40).to_bytes(8, "big"), b"\xc1garbage")
    eventually(lambda: view(server).cached_blocks == 0)
    assert server.post().status_code == 200


@pytest.mark.parametrize("page", ["", "nonsense", "vllm:num_requests_running NaN\n", "vllm:num_requests_running -1\n"])
def test_metrics_that_make_no_sense_are_no_load(page: str) -> None:
    assert report_of(EngineKind.VLLM, {}, page).running is None


def test_metrics_of_sglang() -> None:
    page = 'sglang:num_running_reqs{model_name="x"} 3.0\nsglang:num_queue_reqs 2\nsglang:token_usage 0.25\n'
    report = report_of(EngineKind.SGLANG, {}, page + "sglang:max_total_num_tokens 4096\n")
    assert (report.running, report.waiting, report.kv_usage, report.kv_tokens) == (3, 2, 0.25, 4096)
