"""How OpenMP's threads wait, set before torch is imported (level 3).

Between the dozens of short parallel regions of a step a worker must not fall asleep: waking a halted virtual CPU costs
30 to 60 us, more than many of the regions take. Between steps it must not burn the core that the scheduler and the
HTTP server need. libgomp's default does both: it spins for a bounded time (some hundred thousand turns, below a
millisecond or two), then sleeps. Several engines that share cores must not spin at all: a spinning worker of one then
takes the core from a working one of the other.
"""

from __future__ import annotations

import os


def set_thread_environment(*, engines_sharing_cores: int = 1) -> None:
    """Choose how idle workers wait. Call before the first import of torch; what the user has set stays."""
    if engines_sharing_cores > 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
