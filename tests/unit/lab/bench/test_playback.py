"""Snapshots of a finished run beside its records, counted one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memserve.base.errors import UserError
from memserve_lab.bench.load.prompts import Outcome, RecordWriter, RequestRecord
from memserve_lab.bench.playback import FIRST_TOKEN_S, MOMENTS, open_runs

S = 1_000_000_000


def records(seed: int, setting: str = "one") -> list[RequestRecord]:
    rng, made = np.random.default_rng(seed), []
    for number in range(60):
        start = int(rng.integers(0, 50 * S))
        marks = start + np.cumsum(rng.integers(1, S, int(rng.integers(1, 9))))
        outcome = Outcome.STOPPED if number % 20 == 3 else Outcome.OK
        made.append(
            RequestRecord(
                session=f"s{number}", turn=0, setting=setting, workload="chat", seed=seed, scheduled_ns=start,
                sent_ns=start, first_ns=int(marks[0]), token_ns=marks.tolist(), output_tokens=2 * len(marks),
                end_ns=int(marks[-1]) if outcome is Outcome.OK else None, prompt_tokens=int(rng.integers(1, 900)),
                cached_tokens=number, instance="p0 to d0", http_status=200, outcome=outcome,
            )
        )  # fmt: skip
    return made


def write(folder: Path, made: list[RequestRecord]) -> Path:
    folder.mkdir(exist_ok=True)
    writer = RecordWriter(folder / "records.jsonl.gz")
    for record in made:
        writer.write_record(record)
    writer.close()
    return folder


def value(snapshot: dict[str, Any], name: str, **labels: str) -> float:
    return sum(amount for has, amount in snapshot["metrics"][name] if labels.items() <= has.items())


@pytest.mark.parametrize("seed", range(3))
def test_each_moment_counts_what_had_happened(tmp_path: Path, seed: int) -> None:
    made = records(seed)
    ((name, run),) = open_runs(write(tmp_path, made)).items()
    assert name == f"chat, one, seed {seed}"
    snapshots = run.make_snapshots()
    assert len(snapshots) == MOMENTS and snapshots[0]["time_ms"] == min(r.scheduled_ns for r in made) / 1e6
    for snapshot in snapshots:
        now = snapshot["time_ms"] * 1e6
        ended = [r for r in made if r.end_ns is not None and r.end_ns <= now]
        live = [r for r in made if r.scheduled_ns <= now and (r.end_ns is None or r.end_ns > now)]
        assert value(snapshot, "memserve_prompt_tokens_total") == sum(r.prompt_tokens or 0 for r in ended)
        assert value(snapshot, "memserve_cached_prompt_tokens_total") == sum(r.cached_tokens or 0 for r in ended)
        assert value(snapshot, "memserve_generated_tokens_total") == 2 * sum(t <= now for r in made for t in r.token_ns)
        assert value(snapshot, "memserve_http_requests_in_progress") == len(live)
        waits = [(r.first_ns or 0) - r.scheduled_ns for r in made if (r.first_ns or 0) <= now]
        for bound in FIRST_TOKEN_S:
            labels = {"le": "+Inf" if np.isinf(bound) else f"{bound:g}"}
            found = value(snapshot, "memserve_time_to_first_token_seconds_bucket", **labels)
            assert found == sum(wait / S <= bound for wait in waits)
        gaps = sum(t <= now for r in made for t in r.token_ns[1:])
        assert value(snapshot, "memserve_inter_token_seconds_count") == gaps
        assert [entry["request_id"] for entry in snapshot["live"]] == [
            f"{r.session}, turn 1" for r in sorted(live, key=lambda r: r.scheduled_ns)
        ]
        assert len(snapshot["recent"]) == min(40, len(ended))
        assert all(entry["stages"][-1]["to_ms"] == entry["total_ms"] for entry in snapshot["recent"])
    json.dumps(snapshots[-1], allow_nan=False)


def test_instances_of_a_simulation_are_those_of_its_last_look(tmp_path: Path) -> None:
    look = {"waiting": [1, 0], "running": [2, 5], "blocks": [[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 9]]}
    looks = [{"at_s": 0.0, **look}, {"at_s": 1e6, **look, "running": [9, 9]}]
    run = [{"setting": "one", "instances": ["p0", "d0"], "timeline": looks}]
    (write(tmp_path, records(1)) / "simulation.json").write_text(json.dumps(run))
    snapshot = next(iter(open_runs(tmp_path).values())).make_snapshots()[-1]
    assert [(member["name"], member["role"]) for member in snapshot["members"]] == [("p0", "prefill"), ("d0", "decode")]
    assert value(snapshot, "memserve_instance_sequences_running", instance="d0") == 5
    assert value(snapshot, "memserve_instance_blocks", instance="d0", tier="dram", state="cached") == 8
    assert value(snapshot, "memserve_instance_blocks", tier="hbm") == 21


def test_runs_are_apart_and_other_folders_are_refused(tmp_path: Path) -> None:
    runs = open_runs(write(tmp_path / "two", [*records(1), *records(2), *records(1, "other")]))
    assert list(runs) == ["chat, one, seed 1", "chat, one, seed 2", "chat, other, seed 1"]
    with pytest.raises(UserError, match="records"):
        open_runs(tmp_path)
    with pytest.raises(UserError, match="holds no request"):
        open_runs(write(tmp_path / "empty", []))
