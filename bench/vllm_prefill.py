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

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_servers import ServedStore, recorded

CALLS = ("bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
SETTINGS = ("off", "by layer", "at the end")


class Spent:
    """Seconds of vLLM's thread in the connector's calls."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def engine_of(options: Namespace, store: ServedStore) -> Any:
    """vLLM in this process."""
    for name, value in (
        ("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)
    import vllm

    transfer = {
        "kv_connector": "MemserveConnector", "kv_connector_module_path": "memserve.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": store.address, "secret_file": str(store.secret_file),
                                      "threads": options.threads},
    }  # fmt: skip
    more: dict[str, Any] = {} if options.device else {"dtype": "float32", "block_size": 32, "enforce_eager": True}
    return vllm.LLM(
        options.model, max_model_len=options.tokens + 32, max_num_batched_tokens=max(2048, options.tokens + 32),
        max_num_seqs=4, enable_prefix_caching=True, skip_tokenizer_init=True, kv_transfer_config=transfer, **more,
    )  # fmt: skip


def measured(options: Namespace, folder: Path) -> dict[str, Any]:
    """Ratios, and shares of the prefill, by setting."""
    import vllm
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    ratios: dict[str, list[float]] = {name: [] for name in SETTINGS[1:]}
    shares: dict[str, list[float]] = {name: [] for name in SETTINGS[1:]}
    rng = random.Random(7)
    with ServedStore(folder, dram="2GiB") as store:
        llm = engine_of(options, store)
        connector = state._KV_CONNECTOR_AGENT
        save_layer, spent = connector.save_kv_layer, Spent(connector)
        by_layer = connector.save_kv_layer
        first = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)

        def prefill(setting: str) -> tuple[float, float]:
            state._KV_CONNECTOR_AGENT = None if setting == "off" else connector
            connector.save_kv_layer = by_layer if setting == "by layer" else lambda *given, **named: None
            prompt = [rng.randrange(5, 40_000) for _ in range(options.tokens)]
            spent.seconds, begin = 0.0, time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt}], first, use_tqdm=False)
            took_s = time.perf_counter() - begin
            state._KV_CONNECTOR_AGENT = connector
            settled(connector)
            return took_s, spent.seconds / took_s

        for number in range(-1, options.rounds):
            order = list(SETTINGS)
            rng.shuffle(order)
            found = {name: prefill(name) for name in order}
            for name in SETTINGS[1:] if number >= 0 else ():
                ratios[name].append(found[name][0] / found["off"][0])
                shares[name].append(found[name][1])
        connector.save_kv_layer = save_layer
        stored = store_values(store)
        llm.llm_engine.engine_core.shutdown()
    print(f"{options.rounds} rounds, prompts of {options.tokens} tokens, {stored} values in the store:")
    for name, found_ratios in ratios.items():
        low, high = (sorted(found_ratios)[at] for at in (len(found_ratios) // 4, -1 - len(found_ratios) // 4))
        print(f"  {name:<12} prefill beside off {median(found_ratios):.3f} ({low:.3f} to {high:.3f}); "
              f"vLLM's thread in the connector's calls: {median(shares[name]):.2%} of the prefill")  # fmt: skip
    return {"ratios": ratios, "shares": shares, "stored": stored}


def settled(connector: Any) -> None:
    """The store has what the last prompt has filled: it does not compete with the next one."""
    for worker in connector._workers():
        worker._savers.drain()


def store_values(store: ServedStore) -> int:
    """How many there are: what is measured has saved something."""
    with store.client() as client:
        return int(client.statistics()["dram_values"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2, help="of the connector's: they copy side by side")
    parser.add_argument("--device", action="store_true")
    recorded(parser, measured)


if __name__ == "__main__":
    main()
