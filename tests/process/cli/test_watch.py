"""``memserve top``, ``explain`` and ``trees`` against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.cli.main import run
from memserve.cli.watch import overview
from memserve.router.placement.prefix_directory import HeldBlocks, PrefixNode

TREE = PrefixNode("00aa", 8, 3, 0, (HeldBlocks("c1", 6, 2),), (PrefixNode("00bb", 1, 1, 0, (), ()),))


class Mapped(FakeEngine):
    """A fake engine that knows two prefixes of each of two tenants."""

    def prefix_trees(self, tenant: str | None) -> dict[str, tuple[PrefixNode, ...]]:
        return {name: (TREE,) for name in ("ada", "bob") if tenant in (None, name)}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(Mapped(says(SCRIPT_TEXT)), api_keys=["ada=sk-ada", "bob=sk-bob"], metrics_keys=["sk-all"]) as world:
        yield world


@pytest.fixture(scope="module")
def answer(world: World) -> str:
    body = {"model": MODEL, "prompt": "hello hello", "max_tokens": 4}
    headers = {"authorization": "Bearer sk-ada", "x-request-id": "theirs-9"}
    return str(httpx.post(f"{world.url}/v1/completions", json=body, headers=headers, timeout=30).json()["id"])


def said(capsys: pytest.CaptureFixture[str], world: World, key: str, *words: str) -> str:
    assert run([*words, "--url", world.url, "--api-key", key]) == 0
    return capsys.readouterr().out


def test_top_has_the_figures_of_metrics(world: World, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = httpx.get(f"{world.url}/metrics", headers={"authorization": "Bearer sk-all"}, timeout=30).text
    prompts = next(line for line in page.splitlines() if line.startswith("memserve_prompt_tokens_total "))
    shown = said(capsys, world, "sk-all", "top")
    assert f"of {float(prompts.split()[1]):,.0f} prompt tokens" in shown
    assert "10 held, 20 cached of 100 blocks" in shown and answer in shown


def test_top_says_how_fast_it_goes_between_two_looks(world: World, answer: str) -> None:
    headers = {"authorization": "Bearer sk-all"}
    now = httpx.get(f"{world.url}/ui/snapshot", headers=headers, timeout=30).json()
    before = json.loads(json.dumps(now)) | {"time_ms": now["time_ms"] - 500}
    before["metrics"]["memserve_generated_tokens_total"][0][1] -= 7
    assert any("and 14 generated a second" in line for line in overview(now, before))


def test_top_with_a_tenants_key_shows_its_own_alone(
    world: World, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in said(capsys, world, "sk-ada", "top", "--once")
    shown = said(capsys, world, "sk-bob", "top", "--once")
    assert answer not in shown and "need the key of /metrics" in shown and "blocks" not in shown


def test_explain_tells_stages_and_counts(world: World, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (answer, "theirs-9"):
        shown = said(capsys, world, "sk-ada", "explain", name)
        assert shown.startswith(f"{answer}: status 200") and "prefill" in shown and "4 generated" in shown
    assert json.loads(said(capsys, world, "sk-ada", "explain", answer, "--json"))["response_id"] == answer


def test_trees_are_drawn_by_tenant(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, world, "sk-all", "trees")
    assert "tenant ada" in shown and "tenant bob" in shown
    assert "\n00aa  8 blocks, 3 prompts" in shown and "c1 6+2" in shown and "\n  00bb  1 block, 1 prompt" in shown
    assert "bob" not in said(capsys, world, "sk-ada", "trees")
    assert json.loads(said(capsys, world, "sk-ada", "trees", "--json"))["tenants"][0]["tenant"] == "ada"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["explain", "no-such", "--api-key", "sk-ada"], "no-such", None),
        (["explain", "x", "--api-key", "wrong"], "API key", "--api-key"),
        (["top", "--once"], "API key", "--api-key"),
        (["trees"], "API key", "--api-key"),
    ],
)
def test_refusal_of_the_server_is_one_line(
    world: World, capsys: pytest.CaptureFixture[str], words: list[str], error: str, hint: str | None
) -> None:
    assert run([*words, "--url", world.url]) == 1
    first, *rest = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("error: ") and error in first
    assert [hint in line for line in rest] == ([True] if hint else [])


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
