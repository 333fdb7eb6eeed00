"""What a profile says, and where it is kept: one file for a machine, a model and how it is run. Imports no torch.

A profile of another machine, model, dtype, device, block size or number of threads says nothing, so all of them are
part of the file's name.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memserve.base.errors import UserError
from memserve.base.types import AS_COMPUTED, KVGeometry
from memserve.instance.scheduler.slo import Answer
from memserve.kv.costs import LEARNT, CopyCurve, CostModel, Quality, Sample
from memserve.kv.reuse import Prefix, Way, decide_batch
from memserve.system.process import cache_root

log = logging.getLogger(__name__)

SAVES_EVERY_S = 60.0
_ANSWERS_KEPT = 4096
EXAMPLE_TOKENS = 2048
EXAMPLE_CROWD = 32
PREFIX_TOKENS_MAX = 8192
"""Where moving pays is looked for up to here."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples by curve: ``prefill``, ``decode``, ``swap_in``, ``swap_out``, ``same_host``, ``network``."""

    samples: Mapping[str, Sequence[Sample]]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Curves that could not be measured, and why."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The fitted model, and how well its curves predict samples that they were not fitted to."""

    costs: CostModel
    quality: Mapping[str, Quality]
    measured: Measured


def machine_name(device: str) -> str:
    """The processor and the cores that this process may use; on CUDA the accelerator as well."""
    cores = len(os.sched_getaffinity(0))
    name = f"{_processor()}, {cores} core{'s' if cores > 1 else ''}"
    if device.startswith("cuda"):
        import torch

        name += f", {torch.cuda.get_device_name()}"
    return name


def profile_path(fingerprint: str, geometry: KVGeometry, device: str, threads: int | None) -> Path:
    """Where the profile of this model on this machine is kept, whether it exists or not.

    ``device`` is ``cpu`` or ``cuda``, ``threads`` as the option says (``None``: every core).
    """
    key_parts = (machine_name(device), model_name(fingerprint, geometry, device, threads))
    digest = hashlib.blake2b("\n".join(key_parts).encode(), digest_size=8).hexdigest()
    return cache_root() / f"profile-{digest}.json"


def model_name(fingerprint: str, geometry: KVGeometry, device: str, threads: int | None) -> str:
    """What was measured, in one line."""
    run_by = f"{threads or 'all'} threads"
    dtype = geometry.dtype + f" with KV as {geometry.kv_dtype}" * (geometry.kv_dtype != AS_COMPUTED)
    return f"{fingerprint} {dtype} on {device}, {run_by}, {geometry.block_tokens} tokens a block"


def load_profile(fingerprint: str, geometry: KVGeometry, device: str, threads: int | None) -> CostModel:
    """The costs that ``memserve profile`` has measured here, or the conservative defaults; the log says which."""
    path = profile_path(fingerprint, geometry, device, threads)
    try:
        costs = CostModel.from_dict(json.loads(path.read_text())["costs"])
    except FileNotFoundError:
        log.info("no cost profile of this model on this machine: assumed costs (run: memserve profile)")
        return CostModel()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        log.warning("the cost profile %s cannot be used (%s): conservative defaults", path, error)
        return CostModel()
    log.info("costs are those measured on %s (%s)", costs.machine, path)
    return costs


def save_profile(path: Path, values: dict[str, Any]) -> None:
    """Write a profile; it appears whole or not at all. Raises :class:`UserError` when the folder cannot be written."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(values, indent=1))
        partial.replace(path)
    except OSError as error:
        hint = "point MEMSERVE_CACHE_DIR at a folder that you may write to"
        raise UserError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error


class LearntProfile:
    """Keeps what an instance learns of its costs for its next start; one of ``memserve profile`` is left alone."""

    def __init__(self, path: Path, initial_costs: CostModel) -> None:
        """``initial_costs``: the costs that it began with."""
        self._path, self._saved_costs = path, b""
        self._is_done = initial_costs.is_measured and initial_costs.machine != LEARNT
        self._next_s = 0.0

    def save_costs(self, costs: bytes, now_s: float) -> None:
        """Save ``costs`` (``CostModel.to_json``) if they are new, once a minute at most; ``now_s``: any clock."""
        if self._is_done or not costs or costs == self._saved_costs or now_s < self._next_s:
            return
        is_first, self._saved_costs, self._next_s = not self._saved_costs, costs, now_s + SAVES_EVERY_S
        try:
            save_profile(self._path, {"costs": json.loads(costs)})
        except UserError as error:
            self._is_done = True
            log.warning("costs that were learnt are not kept for the next start: %s", error)
            return
        if is_first:
            log.info("costs are those of this machine now, as its requests have shown them (%s)", self._path)


class SharedLengths:
    """Lengths of answers beside the profile: instances of this host learn from each other's, and from those of before
    their start."""

    def __init__(self, path: Path) -> None:
        """``path``: of the profile."""
        self._path = path.with_name(f"lengths-{path.name}")
        self._seen = 0  # answers that this instance has learnt, or told
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether it is time, once a minute; ``now_s``: any clock."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + SAVES_EVERY_S
        return True

    def exchange_answers(self, new_answers: Sequence[Answer]) -> list[Answer]:
        """Tell others of ``new_answers``; returns theirs that are new here. The newest are kept, and none where the
        folder cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                first, answers = self._read_answers()
                news = answers[max(0, self._seen - first) :]
                answers += new_answers
                dropped = max(0, len(answers) - _ANSWERS_KEPT)
                self._seen = first + len(answers)
                if new_answers:
                    save_profile(self._path, {"first": first + dropped, "answers": answers[dropped:]})
        except (OSError, UserError) as error:
            log.debug("lengths of answers are not shared: %s", error)
            return []
        return news

    def _read_answers(self) -> tuple[int, list[Answer]]:
        """Number of the first answer that is kept, and all of them; none where the file is damaged."""
        try:
            record = json.loads(self._path.read_text())
            answers = [(str(tenant), int(prompt), int(tokens)) for tenant, prompt, tokens in record["answers"]]
            return int(record["first"]), [answer for answer in answers if answer[1] >= 0 and answer[2] > 0]
        except FileNotFoundError:
            return 0, []
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the lengths of answers in %s cannot be used: %s", self._path, error)
            return self._seen, []


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# -- what it says


def profile_values(profile: Profile, geometry: KVGeometry) -> dict[str, Any]:
    """Everything that was measured and fitted, and what follows from that: for the file, ``--json`` and reports."""
    return {
        "machine": profile.costs.machine,
        "model": profile.costs.model,
        "costs": profile.costs.to_dict(),
        "quality": {name: dataclasses.asdict(quality) for name, quality in profile.quality.items()},
        "missing": dict(profile.measured.failures),
        "pays_from_tokens": pays_from(profile.costs, geometry),
        "decisions": _decisions(profile.costs, geometry),
        "samples": {
            name: [[sample.first, sample.second, sample.ns] for sample in samples]
            for name, samples in profile.measured.samples.items()
        },
    }


def pays_from(costs: CostModel, geometry: KVGeometry) -> dict[str, int | None]:
    """From how many cached tokens on each way of moving them is quicker than computing them again."""
    ways = {"swap-in": costs.swap_in, "fetch, same host": costs.same_host, "fetch, network": costs.network}
    return {way: crossover_tokens(costs, geometry, curve, PREFIX_TOKENS_MAX) for way, curve in ways.items()}


def crossover_tokens(costs: CostModel, geometry: KVGeometry, curve: CopyCurve, limit: int) -> int | None:
    """The shortest cached prefix, in whole blocks, that is quicker moved over ``curve`` than computed again; ``None``:
    there is none up to ``limit`` tokens."""
    for tokens in range(geometry.block_tokens, limit + 1, geometry.block_tokens):
        saved_ns = costs.prefill_ns(tokens + 1, 0) - costs.prefill_ns(1, tokens)
        if curve.kv_ns(tokens, geometry.block_tokens, geometry.token_bytes) < saved_ns:
            return tokens
    return None


def _decisions(costs: CostModel, geometry: KVGeometry) -> dict[str, str]:
    """What is decided for a prompt with a first half that was computed before, by where that lies."""
    prompt, cached = EXAMPLE_TOKENS, EXAMPLE_TOKENS // 2
    far = Prefix(prompt, remote_tokens=cached, same_host=False)
    alone = {
        "in HBM": Prefix(prompt, hbm_tokens=cached),
        "in DRAM": Prefix(prompt, dram_tokens=cached),
        "on this host": Prefix(prompt, remote_tokens=cached),
        "on another host": far,
    }
    reasons = {place: decide_batch(costs, geometry, [prefix])[0].reason for place, prefix in alone.items()}
    crowd = decide_batch(costs, geometry, [far] * EXAMPLE_CROWD)
    fetched = sum(decision.tokens_of(Way.FETCH) > 0 for decision in crowd)
    reasons[f"there, {EXAMPLE_CROWD} at once"] = (
        f"{fetched} fetch, {EXAMPLE_CROWD - fetched} recompute: they share link and device"
    )
    return reasons
