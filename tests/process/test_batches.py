"""Batches through ``memserve serve``: killed with -9 in the middle; with several routers, and with none."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from router_kills import Killed, long_model
from served_cluster import Server, eventually

TENANT_FILES = "batches/files"


def line(number: int, **body: object) -> str:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 8 + [10 + number % 50, 10 + number // 50]
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | body
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": fields})


def start(server: Server, lines: list[str]) -> str:
    files = server.client.files
    file = files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = server.client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
    return batch.id


def completed(server: Server, batch_id: str) -> int:
    return server.client.batches.retrieve(batch_id).request_counts.completed


@pytest.mark.parametrize("kills", [2])
def test_killed_server_answers_each_request_of_a_batch_once(tmp_path: Path, kills: int) -> None:
    killed = Killed(long_model(tmp_path / "tiny"), tmp_path / "state", "--colocated", "1")
    try:
        batch_id = start(killed.server, [line(number) for number in range(400)])
        for kill in range(1, kills + 1):
            eventually(lambda kill=kill: completed(killed.server, batch_id) >= 60 * kill)
            killed.kill()
            answers = [path for path in (tmp_path / "state" / TENANT_FILES).iterdir() if not path.suffix]
            with max(answers, key=lambda path: path.stat().st_mtime_ns).open("ab") as file:
                file.write(b'{"id":"batch_req_torn')  # as if it had been killed in the middle of a line
            killed.restart()
        eventually(lambda: killed.server.client.batches.retrieve(batch_id).status == "completed")
        batch = killed.server.client.batches.retrieve(batch_id)
        assert dict(batch.request_counts) == {"total": 400, "completed": 400, "failed": 0}
        text = killed.server.client.files.content(batch.output_file_id).text
        answers = [json.loads(line) for line in text.splitlines()]
        assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{number}" for number in range(400))
        by_id = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
        for number in (0, 77, 399):
            body = json.loads(line(number))["body"]
            assert (
                httpx.post(f"{killed.url}/completions", json=body).json()["choices"][0]["text"] == by_id[f"r{number}"]
            )
        assert killed.server.counter("cached_tokens") > 300 * 32, "their common prefix is computed once"
    finally:
        killed.end()


def test_owner_of_several_routers_runs_batches(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    server = Server(long_model(tmp_path / "tiny"), "--colocated", "1", "--routers", "2", "--metadata", state)
    try:
        eventually(lambda: "router-2" in server.children())
        for _ in range(6):  # connections of their own: the kernel chooses the router
            server.client._client.close()
            server.client = type(server.client)(base_url=server.url, api_key="none", max_retries=0, timeout=60)
            batch_id = start(server, [line(number) for number in range(5)])
            eventually(lambda batch_id=batch_id: server.client.batches.retrieve(batch_id).status == "completed")
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_cluster_embeds_alike_with_a_batch_and_without(tmp_path: Path) -> None:
    state, shape = str(tmp_path / "state"), ("--prefill", "1", "--decode", "1")
    server = Server(long_model(tmp_path / "tiny"), *shape, "--pooling", "mean", "--metadata", state)
    try:
        texts = [[1 + number % 90, *range(3, 100), 5 + number % 7] for number in range(20)]
        embed = server.client.embeddings
        asked = [embed.create(model="tiny", input=text, encoding_format="float").data[0].embedding for text in texts]
        assert all(abs(sum(value * value for value in embedding) - 1) < 1e-5 for embedding in asked)
        lines = [
            json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}})
            for at, text in enumerate(texts)
        ]
        file = server.client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = server.client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="1h")
        eventually(lambda: server.client.batches.retrieve(batch.id).status == "completed")
        output = server.client.batches.retrieve(batch.id).output_file_id
        for entry in map(json.loads, server.client.files.content(output).text.splitlines()):
            (got,) = entry["response"]["body"]["data"]
            assert got["embedding"] == pytest.approx(asked[int(entry["custom_id"])], abs=1e-5)
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_engine_in_process_says_where_batches_are(tmp_path: Path) -> None:
    server = Server(long_model(tmp_path / "tiny"), "--in-process")
    try:
        answer = httpx.get(f"{server.url}/batches")
        assert answer.status_code == 404 and "--metadata FOLDER" in answer.json()["error"]["message"]
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0
