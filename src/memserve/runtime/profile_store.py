"""Where profiles are kept: one file for a machine, a model and how it is run (level 3). Imports no torch.

A profile of another machine, model, dtype, device, block size or number of threads says nothing, so all of them are
part of the file's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

from memserve.errors import UserError
from memserve.model.loading.cache import cache_root
from memserve.policy.costs import CostModel
from memserve.types import KVGeometry

log = logging.getLogger(__name__)


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
    said = (machine_name(device), model_name(fingerprint, geometry, device, threads))
    digest = hashlib.blake2b("\n".join(said).encode(), digest_size=8).hexdigest()
    return cache_root() / f"profile-{digest}.json"


def model_name(fingerprint: str, geometry: KVGeometry, device: str, threads: int | None) -> str:
    """What was measured, in one line."""
    run_by = f"{threads or 'all'} threads"
    return f"{fingerprint} {geometry.dtype} on {device}, {run_by}, {geometry.block_tokens} tokens a block"


def load_profile(fingerprint: str, geometry: KVGeometry, device: str, threads: int | None) -> CostModel:
    """The costs that ``memserve profile`` has measured here, or the conservative defaults; the log says which."""
    path = profile_path(fingerprint, geometry, device, threads)
    try:
        costs = CostModel.from_dict(json.loads(path.read_text())["costs"])
    except FileNotFoundError:
        log.info("no cost profile of this model on this machine: conservative defaults (run: memserve profile)")
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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
