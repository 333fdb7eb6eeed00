"""Run as a module: one of the processes beside the leader, with what ``gpu_worker_process`` makes up."""

from __future__ import annotations

import sys

from lean_imports import leave_compiler_out

if __name__ == "__main__":
    leave_compiler_out()  # before what else imports transformers
    from gpu_worker_process import gpu_workers, install

    install()
    gpu_workers.main(int(sys.argv[1]))
