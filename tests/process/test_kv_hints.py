"""Hints on KV in real processes: two instances and a store, KV that moves before any request asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from geometries import SHAPES, TINY
from served_cluster import GREEDY, Server, eventually, served
from tiny_models import prompt, save_folder

BLOCKS = 6


class Hinting:
    """A served cluster whose requests have hints."""

    def __init__(self, server: Server, block_tokens: int) -> None:
        self.server, self.block_tokens = server, block_tokens
        self.http = httpx.Client(base_url=str(server.client.base_url), timeout=60)
        self._sent = 0

    def tokens(self, seed: int) -> list[int]:
        return prompt(BLOCKS * self.block_tokens + 3, seed).tolist()

    def hint(self, action: str, **payload: object) -> tuple[str, int, str]:
        """What became of it when its end is known."""
        self._sent += 1
        message_id = f"m{self._sent}"
        one = {"action_id": "a", "action_type": action, "action_version": "1.0", "payload": payload}
        body = {"protocol_version": "0.1", "message_id": message_id, "actions": [one]}
        answer = self.http.post("kv_hints", json=body)
        assert answer.status_code == 200, answer.text

        eventually(lambda: self.result_of(message_id)["outcome"] != "deferred")
        result = self.result_of(message_id)
        return result["outcome"], result["tokens"], result.get("reason", "")

    def result_of(self, message_id: str) -> dict:
        return self.http.get(f"kv_hints/{message_id}").json()["results"][0]

    def ask(self, tokens: list[int], **more: object) -> dict:
        """Where one token was computed, and how much of the prompt was cached there."""
        terms = {"extra_body": {**GREEDY["extra_body"], "explain": True, **more}, "temperature": 0}
        answer = self.server.client.completions.create(prompt=tokens, max_tokens=1, **{**GREEDY, **terms})
        facts = answer.model_extra["memserve"]
        return {"cached": answer.usage.prompt_tokens_details.cached_tokens, "facts": facts}


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def hinting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hinting]:
    shape = SHAPES.get(request.param, TINY)
    folder = save_folder(shape.module(), tmp_path_factory.mktemp("hints") / "tiny")
    kv = shape.kv
    room = 24 * kv.block_tokens
    flags = shape.memory_flags(room, 2 * room)
    with served(folder, "--colocated", "2", "--policy", "least-load", "--metadata", "none", *flags) as server:
        eventually(lambda: server.members() == {"c1", "c2"})
        yield Hinting(server, kv.block_tokens)


def test_a_share_copies_a_prefix_to_another_instance(hinting: Hinting) -> None:
    tokens, whole = hinting.tokens(1), BLOCKS * hinting.block_tokens
    assert hinting.hint("kv.share", tokens=tokens, destination="c2")[0] == "missing"
    hinting.ask(tokens)
    copied = [hinting.hint("kv.share", tokens=tokens, destination=name) for name in ("c1", "c2")]
    assert copied == [("accepted", whole, "")] * 2
    outcome, _, reason = hinting.hint("kv.share", tokens=tokens, destination="c9")
    assert outcome == "rejected" and "c9" in reason
    # both have it: wherever least-load leads, no instance computes or fetches it
    for _ in range(4):
        answer = hinting.ask(tokens)
        assert answer["cached"] == whole and "fetched_from" not in str(answer["facts"])


def test_a_prefix_goes_down_and_is_brought_up(hinting: Hinting) -> None:
    tokens, whole = hinting.tokens(2), BLOCKS * hinting.block_tokens
    hinting.ask(tokens)
    assert hinting.hint("kv.demote", tokens=tokens) == ("accepted", whole, "")
    assert hinting.hint("kv.prefetch", tokens=tokens) == ("accepted", whole, "")
    assert hinting.ask(tokens)["cached"] >= whole


def test_a_retained_prefix_outlives_pressure(hinting: Hinting) -> None:
    """More prompts than both tiers of both instances hold; then it is released, and goes with the next."""
    tokens, whole = hinting.tokens(3), BLOCKS * hinting.block_tokens
    hints = {
        "protocol_version": "0.1",
        "message_id": "with-request",
        "actions": [{"action_id": "a", "action_type": "kv.retain", "payload": {"ttl_s": 300, "priority": 3}}],
    }
    hinting.ask(tokens, kv_hints=hints)
    eventually(lambda: hinting.result_of("with-request")["outcome"] == "accepted")

    def press(first: int) -> None:
        for seed in range(first, first + 36):
            hinting.ask(hinting.tokens(seed))

    press(100)
    assert hinting.hint("kv.prefetch", tokens=tokens)[:2] == ("accepted", whole)
    assert hinting.hint("kv.release", tokens=tokens)[0] == "accepted"
    press(200)
    assert hinting.hint("kv.prefetch", tokens=tokens)[0] == "missing"


def test_no_name_is_left_at_the_end(hinting: Hinting) -> None:
    eventually(lambda: not hinting.server.gauge("router_handles"))
