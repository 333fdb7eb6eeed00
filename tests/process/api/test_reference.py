"""docs/reference/HTTP.md and /openapi.json: complete, and their examples run as they stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from api_world import MODEL, SCRIPT_TEXT, TinyModel, running_server, says
from fake_engine import FakeEngine
from memserve.api.app import create_app
from memserve.api.http import errors
from memserve.api.openai.openapi import ERRORS, OPERATIONS, openapi
from memserve.api.openai.openapi import MODEL as PLACEHOLDER


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("batches")
    engine, model = FakeEngine(says(SCRIPT_TEXT)), TinyModel(max_model_tokens=1024)
    with (
        running_server(engine, model, batches_folder=folder) as world,
        httpx.Client(base_url=world.url, timeout=30) as client,
    ):
        yield client


def _filled(body: Any) -> Any:
    return json.loads(json.dumps(body).replace(f'"{PLACEHOLDER}"', json.dumps(MODEL)))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: f"{operation.method} {operation.path}")
def test_the_examples_run(client: httpx.Client, operation: Any) -> None:
    for example in operation.examples:
        if operation.method != "PUT" and operation.path.startswith("/v1/documents"):
            put = next(o for o in OPERATIONS if o.method == "PUT").examples[0]
            client.put(put.path, json=put.body)
        body = None if example.body is None else _filled(example.body)
        answer = client.request(operation.method, example.path or operation.path, json=body)
        assert answer.status_code in operation.successes, f"{example.title}: {answer.text}"


def test_every_route_is_described_and_exists(tmp_path: Path) -> None:
    app = create_app(FakeEngine(says("x")), TinyModel(), batches_folder=tmp_path)
    routes = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}


def test_every_error_code_is_described() -> None:
    folder = Path(errors.__file__).parent
    codes = {code for file in folder.rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text())}
    codes |= {"invalid_value", "unknown_field", "missing_required_parameter"}  # given by position
    assert codes <= {error.code for error in ERRORS}, "api/openai/openapi.py lists them"


def test_every_refusal_of_a_body_is_described(client: httpx.Client) -> None:
    for operation in OPERATIONS:
        if operation.body is not None:
            path = re.sub(r"\{.*\}", "x", operation.path)
            for headers, content in (({}, b"{}"), ({"content-type": "application/json"}, b"")):
                answer = client.request(operation.method, path, content=content, headers=headers)
                assert answer.status_code in operation.errors, f"{operation.method} {path}: {answer.text}"


def test_every_field_is_described() -> None:
    for name, schema in openapi()["components"]["schemas"].items():
        if name != "Error":
            bare = [field for field, described in schema["properties"].items() if not described.get("description")]
            assert not bare, f"{name}: say what these mean in a string below each"


def test_the_server_serves_it(client: httpx.Client) -> None:
    served = client.get("/openapi.json").json()
    assert served == json.loads(json.dumps(openapi()))
    assert served["components"]["schemas"]["ChatBody"]["required"] == ["messages"]
