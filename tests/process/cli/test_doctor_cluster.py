"""``memserve doctor --cluster``: each thing that can be wrong, as a router tells it, and what the doctor says."""

from __future__ import annotations

import copy
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memserve import __version__
from memserve.cli import doctor_cluster
from memserve.cli.main import run
from memserve.protocol.peers import Peer
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress

KEY = "sk-metrics"
SECRET = "a secret of the tests, long enough"
Change = Callable[[dict[str, Any]], object]


def healthy() -> dict[str, Any]:
    """What a router of a prefill, a decode instance and a store says, all of them on one host."""
    of = {name: {"instance": name, "role": role} for name, role in (("p1", "prefill"), ("d1", "decode"))}
    return {
        "time_ms": 0,
        "version": __version__,
        "viewer": {"tenant": None, "sees_cluster": True},
        "members": [
            {"name": name, "role": role, "state": "live", "host": "h1"}
            for name, role in (("p1", "prefill"), ("d1", "decode"), ("s1", "store"))
        ],
        "metrics": {
            "memserve_engine_up": [({}, 1.0)],
            "memserve_router_instances": [({}, 2.0)],
            "memserve_router_metadata_durable": [({}, 1.0)],
            "memserve_instance_process_up": [({"instance": name}, 1.0) for name in of],
            "memserve_instance_handed_over_total": [(of["p1"], 9.0)],
            "memserve_instance_received_bytes_total": [(of["d1"], 9e6)],
            "memserve_store_up": [({"store": "s1"}, 1.0)],
            "memserve_store_kv_blocks": [({"store": "s1"}, 40.0)],
        },
    }


class Router(http.server.ThreadingHTTPServer):
    """Says what a test wants of it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.health: tuple[int, dict[str, Any]] = (200, {"status": "ok", "model": "tiny"})
        self.snapshot = healthy()
        self.clock_off_s = 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        status, body = self.server.health
        if self.path == "/ui/snapshot":
            knows = self.headers["authorization"] == f"Bearer {KEY}"
            now_ms = int((time.time() + self.server.clock_off_s) * 1000)
            wrong = {"error": {"message": "this key is not known"}}
            status, body = (200, self.server.snapshot | {"time_ms": now_ms}) if knows else (401, wrong)
        page = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *words: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    thread = threading.Thread(target=router.serve_forever)
    thread.start()
    yield router
    router.shutdown()
    thread.join()
    router.server_close()


def said(capsys: pytest.CaptureFixture[str], router: Router, *words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and name -> status and detail of each finding."""
    code = run(["doctor", "--cluster", router.url, "--json", "--api-key", KEY, *words])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    return code, {one["name"]: (one["status"], one["detail"]) for one in told["checks"]}


def test_doctor_on_a_healthy_cluster(capsys: pytest.CaptureFixture[str], router: Router) -> None:
    code, found = said(capsys, router, "--expect", "prefill=1,decode=1,store=1")
    assert code == 0
    assert {status for status, _ in found.values()} == {"ok"}, found
    assert found["members"][1] == "1 decode, 1 prefill, 1 store"
    assert found["s1"][1] == "keeps 40 blocks of KV"


def put(name: str, value: float, **labels: str) -> Change:
    return lambda told: told["metrics"].update({f"memserve_{name}": [(labels, value)]})


def member(at: int, **what: str) -> Change:
    return lambda told: told["members"][at].update(what)


@pytest.mark.parametrize(
    ("name", "status", "change"),
    [
        ("decode missing", "fail", lambda told: told["members"].pop(1)),
        ("store missing", "fail", lambda told: told["members"].pop(2)),
        ("members", "fail", lambda told: told["members"].__delitem__(slice(0, 2))),
        ("d1", "warn", member(1, state="rejoining")),
        ("d1", "fail", put("instance_process_up", 0.0, instance="d1")),
        ("d9", "fail", put("instance_process_up", 1.0, instance="d9")),
        ("version", "warn", lambda told: told.update(version="0.0.9")),
        ("metadata", "warn", put("router_metadata_durable", 0.0)),
        ("joins refused", "warn", put("router_members_refused_total", 3.0)),
        ("messages refused", "warn", put("router_messages_malformed_total", 3.0)),
        ("failed handshakes", "warn", put("router_handshakes_failed_total", 2.0)),
        ("members lost", "warn", put("router_members_died_total", 1.0)),
        ("damaged KV", "warn", put("instance_checksum_mismatches_total", 1.0)),
        ("failed reads of KV", "warn", put("instance_pulls_failed_total", 1.0)),
        ("failed transfers", "warn", put("instance_transfers_failed_total", 1.0)),
        ("lost store reads", "warn", put("instance_store_fetches_failed_total", 1.0)),
        ("disk errors", "warn", put("store_disk_errors_total", 1.0)),
        ("s1", "warn", put("store_up", 0.0, store="s1")),
        ("s1", "warn", put("store_disks_full", 1.0, store="s1")),
        ("router", "fail", put("engine_up", 0.0)),
        ("figures", "fail", lambda told: told["viewer"].update(sees_cluster=False)),
    ],
)
def test_cluster_problems_are_named(
    capsys: pytest.CaptureFixture[str], router: Router, name: str, status: str, change: Change
) -> None:
    router.snapshot = copy.deepcopy(healthy())
    change(router.snapshot)
    code, found = said(capsys, router, "--expect", "prefill=1,decode=1,store=1")
    assert found[name][0] == status, found
    assert code == int("fail" in {one for one, _ in found.values()})


def test_hosts_that_share_no_kv(
    capsys: pytest.CaptureFixture[str], router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.snapshot["members"][1]["host"] = "h2"
    router.snapshot["metrics"]["memserve_instance_received_bytes_total"] = []
    monkeypatch.setattr(doctor_cluster, "nixl_is_installed", lambda: False)
    _, found = said(capsys, router)
    assert found["hosts"][1] == "2 with members"
    assert found["KV transfer"][0] == "warn"
    assert found["NIXL"][0] == "ok" and "--link trusted" in found["NIXL"][1]


def test_clocks_that_differ(capsys: pytest.CaptureFixture[str], router: Router) -> None:
    router.clock_off_s = -30.0
    assert said(capsys, router)[1]["clock"][0] == "warn"


def test_doctor_on_unresponsive_or_absent_router(capsys: pytest.CaptureFixture[str], router: Router) -> None:
    router.health = (503, {"status": "no instance takes requests"})
    code, found = said(capsys, router)
    assert code == 1 and "no instance takes requests" in found["router"][1]
    code, found = said(capsys, router, "--api-key", "sk-wrong")
    assert code == 1 and found["figures"] == ("fail", f"no snapshot from {router.url}: this key is not known")
    assert run(["doctor", "--cluster", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("secret", "code", "text"),
    [
        (SECRET, 0, "takes the secret"),
        (SECRET + "x", 1, "refuses"),
        (f"{SECRET}x\n{SECRET}\nkv={SECRET}", 0, "takes line 2 of the secrets"),
        (f"{SECRET}\n{SECRET}x", 0, "takes line 1 of the secrets"),
    ],
)
def test_doctor_probes_the_cluster_port(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, secret: str, code: int, text: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(secret)
    file.chmod(0o600)
    mailbox = ZmqMailbox(Peer("router", 1), ListenAddress(SECRET), lambda *heard: None)
    try:
        words = ["doctor", "--join", mailbox.address.removeprefix("tcp://"), "--cluster-secret-file", str(file)]
        assert run(words) == code
        assert text in capsys.readouterr().out
    finally:
        mailbox.close()
    assert run(words) == 1
    assert "nothing answers" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--expect", "prefill"], ["--expect", "baker=1"]])
def test_expectations_that_mean_nothing(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(["doctor", "--cluster", "http://127.0.0.1:9", *words]) == 1
    assert "--expect has ROLE=COUNT" in capsys.readouterr().err
