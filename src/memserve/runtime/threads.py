"""What is said to thread pools before torch is imported, and why OpenMP's is left alone (level 3).

Between the dozens of short parallel regions of a step a worker must not fall asleep: waking a halted virtual CPU costs
30 to 60 us, more than many of the regions take. Between steps it must not burn the core that the scheduler and the
HTTP server need. libgomp's default does both: it spins for a bounded time (some hundred thousand turns, below a
millisecond or two), then sleeps. Where several engines share cores, their user sets ``OMP_WAIT_POLICY=PASSIVE``: a
spinning worker of one would take the core from a working one of the other.
"""

from __future__ import annotations

import os


def set_thread_environment() -> None:
    """Let tokenizers use threads. Call before the first import of torch; what the user has set stays."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
