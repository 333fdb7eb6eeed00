"""memserve as an application of Ray Serve, on raylets of Ray's own test cluster."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai

from on_ray import WAIT_S, Raylets
from ports import free_port
from served_cluster import eventually


class Served:
    """``serve run FILE`` on a head without room for instances, and a node with room for four."""

    def __init__(self, model: Path, folder: Path, **more: object) -> None:
        self.ray, port = Raylets(1), free_port()
        arguments = {
            "model": str(model), "dtype": "float32", "kv-memory": "4MiB", "threads": 1, "block_tokens": 8,
            "prefill": 1, "decode": 1, "served_model_name": "tiny", **more,
        }  # fmt: skip
        application = {"name": "chat", "route_prefix": "/", "args": arguments}
        application["import_path"] = "memserve.integrations.ray_serve:app"
        config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
        file = folder / "serve.yaml"
        file.write_text(json.dumps(config))  # which is YAML
        run = "from ray.serve.scripts import cli; cli()"
        self.log = folder / "log"
        with self.log.open("w") as log:
            command = [sys.executable, "-c", run, "run", str(file), "--address", self.ray.address]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        eventually(self.is_ready)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> None:
        """Ctrl-C: Ray Serve ends the application."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(WAIT_S)

    def close(self) -> None:
        """End all of it."""
        try:
            self.end()
        finally:
            self.process.kill()
            self.ray.close()


def replicas() -> set[int]:
    """Processes that are replicas of the application ``chat``."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::ServeReplica:chat:memserve"):
                found.add(int(path.parent.name))
    return found
