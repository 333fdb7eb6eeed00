"""What copying KV by layer adds to vLLM's prefill: copies by layer, copies at the step's end alone, and none.

    PYTHONPATH=src VLLM-PYTHON bench/vllm_prefill.py --model FOLDER [--tokens 1024] [--rounds 12] [--device]

Run by a Python that can import vllm (``docs/guides/VLLM.md``), one engine in this process. Prompts are random tokens
that are found nowhere; in each round all three settings compute one, in an order that is drawn. Printed: medians of the
ratios to the prompt of the same round without the connector in the worker (half of them lie between those in brackets),
and the time that vLLM's own thread spends in the connector's calls, which other programs change less. On a CPU all is
copied at the end, whatever the layers say. The scheduler's
look-up is in all three; ``vllm_connector.py --only calls`` times it. ``--device``: vLLM's own choice of device and
threads; else its CPU build, and float32.
"""

from __future__ import annotations

import os
import random
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engines import ServedStore, recorded, transfer_config
from harness.prompts import random_tokens
from harness.rounds import Samples, seconds, spread
from harness.tables import show

CALLS = ("bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
SETTINGS = ("off", "by layer", "at the end")


class Spent:
    """Seconds of vLLM's thread in the connector's calls."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def engine_of(args: Namespace, store: ServedStore) -> Any:
    for name, value in (
        ("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)
    import vllm

    more: dict[str, Any] = {} if args.device else {"dtype": "float32", "block_size": 32, "enforce_eager": True}
    return vllm.LLM(
        args.model, max_model_len=args.tokens + 32, max_num_batched_tokens=max(2048, args.tokens + 32),
        max_num_seqs=4, enable_prefix_caching=True, skip_tokenizer_init=True,
        kv_transfer_config=transfer_config(store, threads=args.threads), **more,
    )  # fmt: skip


def measure(args: Namespace, folder: Path) -> dict[str, Any]:
    """Ratios, and shares of the prefill, by setting."""
    import vllm
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    beside, shares, rng = Samples(), Samples(), random.Random(7)
    with ServedStore(folder, dram="2GiB") as store:
        llm = engine_of(args, store)
        connector = state._KV_CONNECTOR_AGENT
        save_layer, spent = connector.save_kv_layer, Spent(connector)
        by_layer = connector.save_kv_layer
        first = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)

        def prefill(setting: str) -> tuple[float, float]:
            state._KV_CONNECTOR_AGENT = None if setting == "off" else connector
            connector.save_kv_layer = by_layer if setting == "by layer" else lambda *args, **options: None
            prompt = {"prompt_token_ids": random_tokens(args.tokens, rng)}
            spent.seconds = 0.0
            took_s = seconds(lambda: llm.generate([prompt], first, use_tqdm=False))
            state._KV_CONNECTOR_AGENT = connector
            for worker in connector._workers():  # the store does not compete with the next prompt
                worker._savers.drain()
            return took_s, spent.seconds / took_s

        for number in range(-1, args.rounds):
            results = {name: prefill(name) for name in rng.sample(SETTINGS, len(SETTINGS))}
            for name in SETTINGS[1:] if number >= 0 else ():
                beside[name].append(results[name][0] / results["off"][0])
                shares[name].append(results[name][1])
        connector.save_kv_layer = save_layer
        with store.client() as client:  # what is measured has saved something
            stored = int(client.statistics()["dram_values"])
        llm.llm_engine.engine_core.shutdown()
    print(f"{args.rounds} rounds, prompts of {args.tokens} tokens, {stored} values in the store:")
    show(
        ({"name": name, "ratio": spread(beside[name]), "share": shares.median(name)} for name in SETTINGS[1:]),
        {"copies": "{name}", "prefill beside off": "{ratio}", "vLLM's thread in the connector's calls": "{share:.2%}"},
    )
    return {"ratios": beside, "shares": shares, "stored": stored}


def main() -> None:
    recorded(
        __doc__, measure, tokens=1024, rounds=12, device=False,
        threads=(2, "of the connector's: they copy side by side"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
