"""``--log-requests``: one line a request, with its account, and nothing of what client and model said."""

from __future__ import annotations

import json
import os
import threading

import httpx
import pytest

from api_world import says, serve
from fake_engine import FakeEngine
from memserve.api.http.config import EdgeConfig
from memserve.api.http.middleware import LINES_MAX, LineWriter
from memserve.base.types import RequestLogFormat
from waiting import eventually

KEYS = ["sk-very-secret-key", "ada=sk-adas-secret"]
BODY = {"model": "tiny", "prompt": "hello hush", "max_tokens": 4, "cache_salt": "peppersalt"}


def ask(kind: RequestLogFormat) -> None:
    limits = EdgeConfig(log_requests=kind)
    with serve(FakeEngine(says("word word")), limits=limits, api_keys=KEYS) as world:
        name = world.client("sk-adas-secret").models.list().data[0].id
        headers = {"authorization": "Bearer sk-adas-secret", "x-request-id": "their-own-7"}
        url = f"{world.url}/v1/completions"
        for stream in (False, True):
            answer = httpx.post(url, json={**BODY, "model": name, "stream": stream}, headers=headers, timeout=30)
            assert answer.status_code == 200 and answer.read()
        assert httpx.post(url, json=BODY, headers={"authorization": "Bearer wrong"}, timeout=30).status_code == 401
        assert httpx.post(url, json={"hush": 1}, headers=headers, timeout=30).status_code == 400
        httpx.get(f"{world.url}/health", timeout=30)


def test_request_log_has_accounting_and_no_content(capsys: pytest.CaptureFixture[str]) -> None:
    ask(RequestLogFormat.JSON)
    said = capsys.readouterr().err  # the writer has been closed with the server
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    models, whole, stream, stranger, bad = told
    assert (models["method"], models["route"], models["tenant"]) == ("GET", "/v1/models", "ada")
    for line in (whole, stream):
        assert (line["request_id"], line["tenant"], line["status"]) == ("their-own-7", "ada", 200)
        assert (line["prompt_tokens"], line["output_tokens"], line["finish_reason"]) == (4, 4, "length")
        assert line["cached_tokens"] == 0 and line["instances"] == [] and 0 < line["ttft_ms"] <= line["total_ms"]
    assert (whole["stream"], stream["stream"]) == (False, True)
    assert (stranger["status"], stranger["tenant"]) == (401, "") and stranger["request_id"] not in ("", "their-own-7")
    assert bad["status"] == 400 and "prompt_tokens" not in bad
    for word in ("hello", "hush", "word", "pepper", "sk-"):
        assert word not in said


def test_a_line_of_text_has_the_same_as_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    ask(RequestLogFormat.TEXT)
    line = next(line for line in capsys.readouterr().err.splitlines() if "stream=true" in line)
    pairs = dict(pair.split("=", 1) for pair in line.split(" "))
    assert pairs["request_id"] == "their-own-7" and pairs["output_tokens"] == "4" and pairs["instances"] == "-"


def test_without_the_option_nothing_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    ask(RequestLogFormat.NONE)
    assert "their-own-7" not in capsys.readouterr().err


def test_stalled_log_reader_blocks_nothing_and_gets_drop_count() -> None:
    readable, writable = os.pipe()
    writer = LineWriter(os.fdopen(writable, "w"))
    line = "x" * 1023
    for _ in range(2 * LINES_MAX):  # a pipe holds 64 of them: this must not wait
        writer.write(line)
    with os.fdopen(readable) as reader:
        told: list[str] = []
        first = threading.Thread(target=lambda: told.extend(iter(reader.readline, "the last one\n")))
        first.start()
        eventually(writer._lines.empty, 60)  # before, the last one might be left out, too
        writer.write("the last one")
        first.join(60)
    assert any("lines about requests were left out" in each for each in told)
