"""What options say of single tenants: how it is written on a command line, and read."""

from __future__ import annotations

import re

from memserve.errors import UserError
from memserve.options import Form
from memserve.units import NS_PER_MS


def _read_weights(texts: list[str]) -> tuple[tuple[str, int], ...]:
    """Tenants and weights from texts like ``NAME=2``. Raises :class:`UserError` for anything else."""
    weights = []
    for text in texts:
        name, _, weight = text.rpartition("=")
        if not name or not weight.isdecimal():
            raise UserError(f"cannot read {text!r} as a tenant's weight", hint="for example --tenant-weight team-a=3")
        weights.append((name, int(weight)))
    return tuple(weights)


WEIGHTS = Form(list[str], _read_weights, lambda weights: [f"{name}={weight}" for name, weight in weights] or None)


def _read_objectives(texts: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Tenants and objectives (ns; 0: none) from texts like ``NAME=3000:200``. Raises :class:`UserError`."""
    objectives = []
    for text in texts:
        name, _, times = text.rpartition("=")
        match = re.fullmatch(r"(\d{0,8}):(\d{0,8})", times)
        if not name or match is None or not any(map(int, filter(None, match.groups()))):
            hint = "milliseconds for the first and each further token, for example --tenant-slo team-a=3000:200"
            raise UserError(f"cannot read {text!r} as a tenant's objectives", hint=hint)
        ttft_ms, tpot_ms = (int(group or 0) for group in match.groups())
        objectives.append((name, ttft_ms * NS_PER_MS, tpot_ms * NS_PER_MS))
    return tuple(objectives)


def _tell_objectives(objectives: tuple[tuple[str, int, int], ...]) -> list[str] | None:
    ms = [(name, ttft_ns // NS_PER_MS or "", tpot_ns // NS_PER_MS or "") for name, ttft_ns, tpot_ns in objectives]
    return [f"{name}={ttft}:{tpot}" for name, ttft, tpot in ms] or None


OBJECTIVES = Form(list[str], _read_objectives, _tell_objectives)
