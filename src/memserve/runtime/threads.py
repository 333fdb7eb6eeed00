"""How OpenMP's threads wait, and how much oneDNN keeps, said before torch is imported (level 3).

Between the dozens of short parallel regions of a step a worker must not fall asleep: waking a halted virtual CPU costs
30 to 60 us, more than many of the regions take. Between steps it must not burn the core that the scheduler and the
HTTP server need. libgomp's default does both: it spins for a bounded time (some hundred thousand turns, below a
millisecond or two), then sleeps. A part of that still covers the gaps inside a step and is as fast on quiet cores;
where something else wants the core, a worker that gives it up sooner shortens the step. Where several engines share
cores, their user sets ``OMP_WAIT_POLICY=PASSIVE``: no worker spins.
"""

from __future__ import annotations

import os
import sys

_SPIN_TURNS = 20_000
"""How long a worker spins before it sleeps: some hundred microseconds."""

PRIMITIVES_MAX = 320
"""Primitives that oneDNN keeps, 0.8 MB each at most; its own default of 1,024 grows by 0.7 GB. A captured forward
needs 55 row counts of each shape of linear up to a step of 2,048 tokens: 220 for a model with four of them."""


def set_thread_environment() -> None:
    """Choose how idle workers wait, and bound oneDNN's cache; what the user has set stays.

    Does nothing once torch is imported: its libraries have read the environment by then, and have no call for it.
    """
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_TURNS))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES_MAX))
