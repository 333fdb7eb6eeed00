"""A model that sleeps and wakes: seconds, memory before, asleep and after, and whether its prefixes are hit again.

    python bench/model_sleep.py                       # the bundled model, and a random one of 1.2B weights in bfloat16
    python bench/model_sleep.py --model FOLDER --rounds 5

``memserve serve --model small=bundled --model large=FOLDER --store-dram 2GiB``. For each model and round: a prompt of
``--tokens`` is asked twice (computed, then from KV), the model is put to sleep, its processes are measured, and the
same prompt is asked again, which wakes it. Memory is what all processes of the model have resident together, the store
with its memory apart; a page that several of them map counts once for each (files of weights among them).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx
from harness.flags import options, save
from harness.processes import resident_bytes
from harness.rounds import median
from harness.served import Served, serving
from harness.tables import show
from load_memory import SIZES, write_random_model

from memserve.base.config import DEFAULT_MODEL
from memserve.base.units import MIB

COLUMNS = {
    "model": "{model}", "before": "{before_mb:.0f} MB", "asleep": "{asleep_mb:.0f} MB", "after": "{after_mb:.0f} MB",
    "its store": "{store_mb:.0f} MB", "falls asleep [s]": "{sleep_s:.2f}", "wakes [s]": "{wake_s:.2f}",
    "prompt, computed [s]": "{cold_s:.2f}", "cached [s]": "{warm_s:.2f}", "waking [s]": "{woken_s:.2f}",
    "cached tokens after": "{cached_tokens:.0f} of {tokens:.0f}",
}  # fmt: skip
KEY = "bench"


class Model:
    """One of the server's."""

    def __init__(self, server: Served, name: str) -> None:
        self._server, self.name = server, name
        self._operator = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=600)

    def memory_mb(self, *, is_store: bool = False) -> float:
        """Resident now, of its instances or of its store."""
        pids = [
            pid for name, pid in self._server.children().items()
            if name.startswith(f"{self.name}-") and name.endswith("-s1") == is_store
        ]  # fmt: skip
        return sum(map(resident_bytes, pids)) / 1e6

    def ask(self, tokens: list[int]) -> tuple[float, int, list[int]]:
        """Seconds, cached tokens, and the answer's token ids."""
        body = {
            "model": self.name, "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        began = time.perf_counter()
        answer = httpx.post(f"{self._server.url}/v1/completions", json=body, timeout=600).raise_for_status().json()
        seconds = time.perf_counter() - began
        return seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]

    def sleep(self) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        self._operator.post(f"/models/{self.name}/sleep").raise_for_status()
        return time.perf_counter() - began

    def wake_s(self) -> float:
        """That it took to wake, the last time."""
        states = self._operator.get("/models").raise_for_status().json()["models"]
        return float(next(state["wake_s"] for state in states if state["name"] == self.name))


def measure_round(model: Model, tokens: list[int]) -> dict[str, float]:
    """One sleep."""
    cold_s, _, _ = model.ask(tokens)
    warm_s, _, again = model.ask(tokens)
    before_mb, sleep_s = model.memory_mb(), model.sleep()
    asleep_mb = model.memory_mb()
    woken_s, cached_tokens, after = model.ask(tokens)
    assert again == after, "another answer after the sleep"
    return {
        "before_mb": before_mb, "asleep_mb": asleep_mb, "after_mb": model.memory_mb(), "sleep_s": sleep_s,
        "store_mb": model.memory_mb(is_store=True), "wake_s": model.wake_s(), "cold_s": cold_s, "warm_s": warm_s,
        "woken_s": woken_s, "cached_tokens": cached_tokens, "tokens": len(tokens),
    }  # fmt: skip


def main() -> None:
    args = options(
        __doc__, model=("", "a model folder in the place of the random one"), rounds=3, tokens=1024,
        work=(Path, "where the random model is made and kept; else it is temporary"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="model-sleep-") as temporary:
        work = args.work or Path(temporary)
        large = args.model or str(work / "random-1.2b-bfloat16")
        if not args.model and not Path(large, "model.safetensors").exists():
            write_random_model(Path(large), SIZES)
        key = Path(temporary) / "key"
        key.touch(0o600)
        key.write_text(KEY)
        models = ("--model", f"large={large},colocated=1,kv-memory=256MiB")
        flags = (*models, "--store-dram", str(1024 * MIB), "--metadata", "none", "--admin-key-file", str(key))
        with serving(*flags, model=f"small={DEFAULT_MODEL},colocated=1,kv-memory=256MiB") as server:
            rows = []
            for model in (Model(server, "small"), Model(server, "large")):
                rounds = [
                    measure_round(model, [5 + (7 * place + 31 * number) % 900 for place in range(args.tokens)])
                    for number in range(args.rounds)
                ]
                rows.append({"model": model.name} | {key: median(r[key] for r in rounds) for key in rounds[0]})
            server.stop()
    show(rows, COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    main()
