"""Files and batches over HTTP, with the official client, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.api.batches.answers import encode_missed
from memserve.api.http.config import EdgeConfig
from memserve.base.types import DEFERRABLE_PRIORITY
from waiting import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


def chat_line(custom_id: str, content: str = "hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": fields}


def upload(client: openai.OpenAI, lines: list[dict[str, Any]], name: str = "in.jsonl") -> str:
    data = "\n".join(json.dumps(line) for line in lines).encode()
    return client.files.create(file=(name, data), purpose="batch").id


def start(client: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> str:
    fields = {"endpoint": CHAT, "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=upload(client, lines), **fields).id


def end_of(client: openai.OpenAI, batch_id: str) -> Any:
    eventually(lambda: client.batches.retrieve(batch_id).status in ENDED, 30)
    return client.batches.retrieve(batch_id)


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id or "").text.splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT)), batches_folder=tmp_path) as world:
        yield world


def test_batch_answers_each_request_once(world: World) -> None:
    client = world.client()
    lines = [chat_line(f"r{number}", f"hello {number % 3}") for number in range(40)]
    lines[7]["body"]["temperature"] = 17
    batch_id = start(client, lines, metadata={"for": "test"})
    batch = end_of(client, batch_id)
    assert (batch.status, batch.metadata, batch.endpoint) == ("completed", {"for": "test"}, CHAT)
    assert dict(batch.request_counts) == {"total": 40, "completed": 39, "failed": 1}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{n}" for n in range(40) if n != 7)
    assert len({answer["id"] for answer in answers}) == 39
    for answer in answers:
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "The capit"
    (error,) = errors
    assert (error["custom_id"], error["response"]["status_code"]) == ("r7", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert {request.priority for request in world.engine.submitted} == {DEFERRABLE_PRIORITY}
    page = httpx.get(f"{world.url}/metrics").text
    assert 'memserve_batches{status="completed"} 1.0' in page
    assert 'memserve_batch_requests_total{result="completed"} 39.0' in page
    assert "memserve_time_to_first_token_seconds_count 0.0" in page, "batches are no part of what clients wait for"


def test_batches_ask_completions_and_responses(world: World) -> None:
    client = world.client()
    for url, body in (
        (COMPLETIONS, {"model": MODEL, "prompt": ["hello", "The"], "max_tokens": 4}),
        ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 4}),
    ):
        line = {"custom_id": "one", "method": "POST", "url": url, "body": body}
        batch = end_of(client, start(client, [line], endpoint=url))
        (answer,) = content(client, batch.output_file_id)
        response = answer["response"]["body"]
        assert len(response["choices"] if url == COMPLETIONS else response["output"]) == (
            2 if url == COMPLETIONS else 1
        )
        if url == "/v1/responses":
            assert response["store"] is False
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        start(client, [chat_line("x")], endpoint="/v1/models")


def test_files_are_listed_read_and_deleted(world: World) -> None:
    client = world.client()
    ids = [upload(client, [chat_line(f"r{number}")], f"{number}.jsonl") for number in range(5)]
    files = client.files.list(limit=2)
    assert [file.id for file in files.data] == [file.id for file in client.files.list().data][:2]
    assert {file.id for file in client.files.list(limit=2)} == set(ids), "pages follow each other"
    assert not client.files.list(purpose="fine-tune").data
    file = client.files.retrieve(ids[3])
    assert (file.filename, file.purpose, file.status) == ("3.jsonl", "batch", "processed")
    assert file.bytes == len(client.files.content(ids[3]).content)
    assert client.files.delete(ids[3]).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File"):
            call(ids[3])


def test_input_that_is_wrong_fails_with_its_lines(world: World) -> None:
    client = world.client()
    lines = [chat_line("a"), chat_line("a"), {**chat_line("b"), "url": COMPLETIONS}]
    batch = end_of(client, start(client, lines))
    assert batch.status == "failed" and batch.output_file_id is None
    assert [(error.code, error.line) for error in batch.errors.data] == [
        ("duplicate_custom_id", 2), ("mismatched_url", 3),
    ]  # fmt: skip
    assert not world.engine.submitted


def test_tenants_see_their_own_files_and_batches_alone(tmp_path: Path) -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), batches_folder=tmp_path, api_keys=["a=KEY-A", "b=KEY-B"]) as world:
        mine, other = world.client("KEY-A"), world.client("KEY-B")
        batch = end_of(mine, start(mine, [chat_line("x")]))
        for file_id in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.NotFoundError):
                other.files.content(file_id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        assert not other.files.list().data and not other.batches.list().data
        assert [entry.id for entry in mine.batches.list()] == [batch.id]
        assert {request.tenant for request in world.engine.submitted} == {"a"}
        assert httpx.get(f"{world.url}/v1/batches").status_code == 401


def test_cancelled_batch_keeps_the_answers_that_it_has(tmp_path: Path) -> None:
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    with serve(engine, batches_folder=tmp_path) as world:
        client = world.client()
        lines = [chat_line(f"r{number}", max_tokens=1 + 100 * (number > 1)) for number in range(8)]
        batch_id = start(client, lines)
        assert engine.wait_until(lambda: len(engine.submitted) == 4)
        engine.step()
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed, 10)
        with pytest.raises(openai.BadRequestError, match="cancel the batch"):
            client.files.delete(client.batches.retrieve(batch_id).input_file_id)
        assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
        batch = end_of(client, batch_id)
        assert batch.status == "cancelled" and batch.request_counts.completed >= 1
        assert len(content(client, batch.output_file_id)) == batch.request_counts.completed
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch_id)


def test_requests_that_come_too_late_are_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memserve.api.batches.routes.window_s", lambda text: 1)
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    with serve(engine, batches_folder=tmp_path) as world:
        client = world.client()
        batch = end_of(client, start(client, [chat_line(f"r{number}") for number in range(9)]))
        assert batch.status == "expired" and dict(batch.request_counts) == {"total": 9, "completed": 0, "failed": 9}
        errors = content(client, batch.error_file_id)
        assert {error["error"]["code"] for error in errors} == {"batch_expired"}
        assert sorted(error["custom_id"] for error in errors) == [f"r{number}" for number in range(9)]


def test_expired_lines_are_written_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside_loop: list[bool] = []

    def encode(*fields: str) -> bytes:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            beside_loop.append(True)
        else:
            beside_loop.append(False)
        return encode_missed(*fields)

    monkeypatch.setattr("memserve.api.batches.routes.window_s", lambda text: 1)
    monkeypatch.setattr("memserve.api.batches.runner.encode_missed", encode)
    with serve(FakeEngine(says(SCRIPT_TEXT), step_s=None), batches_folder=tmp_path) as world:
        client = world.client()
        end_of(client, start(client, [chat_line(f"r{number}") for number in range(3)]))
    assert beside_loop == [True] * 3


def test_server_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    lines = [chat_line(f"r{number}") for number in range(60)]
    with serve(FakeEngine(says(SCRIPT_TEXT), step_s=0.01), batches_folder=tmp_path) as world:
        client = world.client()
        batch_id = start(client, lines)
        later = start(client, lines[:3])  # it waits for the other one
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 8, 10)
        assert client.batches.retrieve(later).status == "validating"
    engine = FakeEngine(says(SCRIPT_TEXT))
    with serve(engine, batches_folder=tmp_path) as world:
        client = world.client()
        batch = end_of(client, batch_id)
        assert batch.request_counts.completed == 60
        assert sorted(answer["custom_id"] for answer in content(client, batch.output_file_id)) == sorted(
            line["custom_id"] for line in lines
        )
        assert end_of(client, later).request_counts.completed == 3
        assert len(engine.submitted) <= 63 - 9, "what had an answer is not asked again"


def test_requests_wait_where_the_engine_is_full(tmp_path: Path) -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT), max_requests=2), batches_folder=tmp_path) as world:
        client = world.client()
        batch = end_of(client, start(client, [chat_line(f"r{number}") for number in range(30)]))
        assert dict(batch.request_counts) == {"total": 30, "completed": 30, "failed": 0}


def test_files_are_bounded_each_and_together(tmp_path: Path) -> None:
    limits = EdgeConfig(file_bytes_max=2000, file_storage_bytes=5000)
    with serve(FakeEngine(says(SCRIPT_TEXT)), batches_folder=tmp_path, limits=limits) as world:
        client = world.client()
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=b"x" * 2001, purpose="batch")
        assert refused.value.status_code == 413
        ids = [client.files.create(file=b"x" * 2000, purpose="batch").id for _ in range(2)]
        with pytest.raises(openai.BadRequestError, match="--file-storage"):
            client.files.create(file=b"x" * 1500, purpose="batch")
        client.files.delete(ids[0])
        client.files.create(file=b"x" * 1500, purpose="batch")
        assert len(list((tmp_path / "files").iterdir())) == 4, "two files, each with its record"


def test_batch_fails_where_its_answers_have_no_room(tmp_path: Path) -> None:
    limits = EdgeConfig(file_storage_bytes=12_000)
    with serve(FakeEngine(says(SCRIPT_TEXT)), batches_folder=tmp_path, limits=limits) as world:
        client = world.client()
        batch = end_of(client, start(client, [chat_line(f"r{number}") for number in range(40)]))
        assert batch.status == "failed" and "--file-storage" in batch.errors.data[0].message
        assert len(content(client, batch.output_file_id)) == batch.request_counts.completed > 0


def test_uploads_that_break_off_leave_nothing(world: World, tmp_path: Path) -> None:
    address = world.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as sock:
        sock.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 100_000
        )
        eventually(lambda: list((tmp_path / "files").iterdir()), 10)
    eventually(lambda: not list((tmp_path / "files").iterdir()), 10)
    for body in (b"", b"--b--\r\n", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--'):
        head = {"content-type": "multipart/form-data; boundary=b"}
        assert httpx.post(f"{world.url}/v1/files", content=body, headers=head).status_code == 400
    with pytest.raises(openai.BadRequestError, match="purpose"):
        world.client().files.create(file=b"x", purpose="fine-tune")
    assert not list((tmp_path / "files").iterdir())


def test_upload_to_a_full_disk_is_503_and_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("memserve.api.batches.files.os.fsync", full)
    with pytest.raises(openai.InternalServerError, match="No space left") as refused:
        world.client().files.create(file=b"x", purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (503, "not_durable")
    assert not list((tmp_path / "files").iterdir()) and not world.client().files.list().data


def test_files_expire_when_their_time_has_passed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=b"x", purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    batch = end_of(client, start(client, [chat_line("x")], extra_body={"output_expires_after": expiry}))
    assert client.files.retrieve(batch.output_file_id).expires_at
    real = time.time
    monkeypatch.setattr("memserve.api.batches.files.time.time", lambda: real() + 3601)
    assert [entry.id for entry in client.files.list()] == [batch.input_file_id]


def test_file_that_a_batch_needs_does_not_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    with serve(engine, batches_folder=tmp_path) as world:
        client = world.client()
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        data = json.dumps(chat_line("x")).encode()
        file = client.files.create(file=data, purpose="batch", expires_after=expiry)
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        real = time.time
        monkeypatch.setattr("memserve.api.batches.files.time.time", lambda: real() + 3601)
        assert client.files.content(file.id).content == data
        client.batches.cancel(batch.id)
        end_of(client, batch.id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def test_server_without_a_folder_says_which_option_it_lacks() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        client = world.client()
        with pytest.raises(openai.NotFoundError, match="--metadata FOLDER"):
            client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.NotFoundError, match="--metadata FOLDER"):
            client.batches.list()
