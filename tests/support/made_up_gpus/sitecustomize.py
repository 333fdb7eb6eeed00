"""Processes of ``memserve`` that find four GPUs, which are made up: for tests that start it with this folder, and the
one above, on ``PYTHONPATH``. Routers and stores compute nothing; instances take what ``gpu_worker_process`` puts in the
place of a device."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fake_driver import FakeDriver
from memserve.base.units import GIB
from memserve.system import gpus

_FOUND = gpus.FoundGpu("made up", 80 * GIB, (9, 0))
gpus.find_gpus = lambda driver=None: ((_FOUND,) * 4, (13, 0), "")
gpus.torch_cuda = lambda: "13.0"
gpus.Driver = FakeDriver  # before others take it by its name

if "instance" in sys.orig_argv:
    from lean_imports import leave_compiler_out

    leave_compiler_out()  # before what else imports transformers
    import gpu_worker_process

    gpu_worker_process.install(whole=True)
