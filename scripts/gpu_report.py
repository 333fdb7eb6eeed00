"""What ``scripts/gpu_check.py`` has found: one record, written as JSON and, made from the same record, as Markdown.

A record is ``{"device", "versions", "commit", "began", "seconds", "parts"}``, a part ``{"status", "why", "seconds",
"rows"}``. A row is a flat dictionary that names ``what``. ``ok``: a check that passed or failed. ``target`` with
``share``: a figure that :data:`TARGETS` judges. Neither: a figure alone.

    python scripts/gpu_report.py FILE.json [FILE.json ...] > FILE.md    # several runs on one machine as one record
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Record = dict[str, Any]

RUNNING, DONE, BROKE, NOT_RUN = "running", "done", "broke", "not run"


NO_DEVICE = "no CUDA device"


KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "mqa": ("llama", {"num_key_value_heads": 1}), "qwen3": ("qwen3", {}), "gemma2": ("gemma2", {}),
    "gpt_oss": ("gpt_oss", {}), "mixtral": ("mixtral", {}), "phi3": ("phi3", {}), "opt": ("opt", {}),
    "gpt_neox": ("gpt_neox", {}), "gemma4": ("gemma4", {}), "llama4": ("llama4", {}), "qwen3_5": ("qwen3_5", {}),
}  # fmt: skip
"""Kinds of models beside Llama's: the family, and sizes that differ from its tiny model's."""


CODED = {
    "int8": "attention of a decode, a byte a value",
    "fp8": "attention of a decode, a byte a value",
    "int4": "attention of a decode, half a byte a value",
}
"""Kinds of KV in codes, and the target that decodes with them have."""


class NotRun(Exception):
    """A part, or the rest of it, cannot run here: its message says why."""


def has_device() -> bool:
    """Whether torch can use one."""
    import torch

    return torch.cuda.is_available()


def need_device() -> None:
    """Raise :class:`NotRun` without one."""
    if not has_device():
        raise NotRun(NO_DEVICE)


@dataclass(frozen=True, slots=True)
class Target:
    """A share of one of the device's own limits that is to be reached."""

    part: str
    least: float
    of: str


TARGETS = {
    "decode of an 8B, 1 sequence": Target("8b", 0.8, "what copy bandwidth allows"),
    "decode of an 8B, 8 sequences": Target("8b", 0.7, "what copy bandwidth allows"),
    "decode of an 8B, 32 sequences": Target("8b", 0.65, "what copy bandwidth allows"),
    "decode of an 8B, 128 sequences": Target("8b", 0.5, "what copy bandwidth allows"),
    "prefill of an 8B": Target("8b", 0.5, "the matrix product that torch reaches in bfloat16"),
    "decode of an 8B in 4 bits, 1 sequence": Target("4bit", 0.5, "what copy bandwidth allows"),
    "decode of an 8B in 4 bits, 8 sequences": Target("4bit", 0.45, "what copy bandwidth allows"),
    "decode of an 8B in 4 bits, 32 sequences": Target("4bit", 0.4, "what copy bandwidth allows"),
    "attention of a decode": Target("attention", 0.8, "copy bandwidth"),
    "attention of a decode, a byte a value": Target("attention", 0.6, "copy bandwidth"),
    "attention of a decode, half a byte a value": Target("attention", 0.4, "copy bandwidth"),
    "copies between HBM and DRAM": Target("copies", 0.8, "one large copy in that direction"),
    "pull between two processes": Target("pull", 0.5, "copy bandwidth"),
}


def verdict(row: Row) -> str:
    """One word for a row; empty: it is a figure alone."""
    if "target" in row:
        return "met" if row["share"] >= TARGETS[row["target"]].least else "missed"
    return "" if "ok" not in row else "passed" if row["ok"] else "failed"


def judged(record: Record, name: str) -> tuple[str, str]:
    """What was measured for a target, and the verdict: the worst of its rows; "not run: WHY" without any."""
    part = record["parts"].get(TARGETS[name].part)
    rows = [row for row in (part or {}).get("rows", []) if row.get("target") == name]
    if not rows:
        why = "" if part is None else part["why"].strip().splitlines()[-1:]
        return "", f"not run: {why[0] if why else 'its part ended before it' if part else 'its part was not asked for'}"
    worst = min(rows, key=lambda row: float(row["share"]))
    return f"{worst['share']:.0%}", verdict(worst)


def counts(record: Record) -> dict[str, int]:
    """How many checks and targets have each verdict, and how many parts broke."""
    words = [verdict(row) for part in record["parts"].values() for row in part["rows"]]
    words = [word for word in words if word in ("passed", "failed")] + [
        judged(record, name)[1].split(":")[0] for name in TARGETS
    ]
    verdict_counts = {word: words.count(word) for word in ("passed", "failed", "met", "missed", "not run")}
    return verdict_counts | {"broke": sum(part["status"] == BROKE for part in record["parts"].values())}


def joined(records: list[Record]) -> Record:
    """Several runs on one kind of device, in their order, as one: of a part the last that was done, else the last."""
    first, *later_records = records
    parts = dict(first["parts"])
    for record in later_records:
        if (record["device"], record["versions"]) != (first["device"], first["versions"]):
            raise SystemExit(f"{record['device']} {record['versions']} is not {first['device']} {first['versions']}")
        ran = {name: part for name, part in record["parts"].items() if part["rows"] or part["status"] != NOT_RUN}
        parts |= {name: part for name, part in ran.items() if part["status"] == DONE or name not in parts
                  or parts[name]["status"] != DONE}  # fmt: skip
    seconds = sum(record["seconds"] for record in records)
    return first | {"parts": parts, "seconds": seconds}


def markdown(record: Record) -> str:
    """The whole record for people; nothing in it comes from elsewhere."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    number = counts(record)
    lines = [
        f"# memserve on {record['device']}", "",
        f"Commit {record['commit']}; {versions}. Began {record['began']}, took {record['seconds']:.0f} s.", "",
        f"Checks: {number['passed']} passed, {number['failed']} failed. Targets: {number['met']} met, "
        f"{number['missed']} missed, {number['not run']} not run. Parts that broke: {number['broke']}.", "",
        "| Target | at least | measured | |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, target in TARGETS.items():
        measured, word = judged(record, name)
        lines.append(f"| {name} | {target.least:.0%} of {target.of} | {measured} | {_cell(word)} |")
    for name, part in record["parts"].items():
        took = f" ({part['seconds']:.1f} s)" if part["seconds"] else ""
        lines += ["", f"## {name}: {part['status']}{took}", *_why(part), *_table(part["rows"])]
    return "\n".join(lines).rstrip() + "\n"


def _why(part: Record) -> list[str]:
    if part["status"] == BROKE:
        return ["", "```", *part["why"].rstrip().splitlines(), "```"]
    return ["", _cell(part["why"])] if part["why"] else []


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["", "| What | | Figures |", "| --- | --- | --- |"]
    for row in rows:
        figures = {key: value for key, value in row.items() if key not in ("what", "ok", "target")}
        figures_text = ", ".join(f"{key} {figure(value)}" for key, value in figures.items())
        lines.append(f"| {_cell(row['what'])} | {verdict(row)} | {_cell(figures_text)} |")
    return lines


def figure(value: object) -> str:
    """A value of a row, for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


class Report:
    """A record that is written to both files whenever it changes, so that an end at any moment loses nothing."""

    def __init__(self, parts: list[str], commit: str, began: str, file: Path | None) -> None:
        """``file``: the JSON; the Markdown lies beside it as ``.md``. None: the record is only held."""
        waiting = {name: {"status": NOT_RUN, "why": "it was not reached", "seconds": 0.0, "rows": []} for name in parts}
        self.record: Record = {
            "device": "an unknown device", "versions": {}, "commit": commit, "began": began, "seconds": 0.0,
            "parts": waiting,
        }  # fmt: skip
        self._file = file
        self._lock = threading.RLock()  # parts run side by side

    def add(self, part: str, row: Row) -> None:
        """A row of a part. One that has ``device`` and ``versions`` says where this runs."""
        with self._lock:
            if "versions" in row:
                self.record |= {"device": row["device"], "versions": row["versions"]}
            else:
                self.record["parts"][part]["rows"].append(row)
            self.write()

    def turn(self, part: str, status: str, why: str = "", seconds: float = 0.0) -> None:
        """What has become of a part."""
        with self._lock:
            self.record["parts"][part] |= {"status": status, "why": why, "seconds": seconds}
            self.write()

    def write(self) -> None:
        """Both files, each replaced at once."""
        if self._file is None:
            return
        texts = {".json": json.dumps(self.record, indent=1, default=str) + "\n", ".md": markdown(self.record)}
        for suffix, text in texts.items():
            fresh = self._file.with_suffix(suffix + ".new")
            fresh.write_text(text)
            os.replace(fresh, self._file.with_suffix(suffix))


if __name__ == "__main__":
    print(markdown(joined([json.loads(Path(name).read_text()) for name in sys.argv[1:]])), end="")
