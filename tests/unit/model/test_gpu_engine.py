"""An engine on one GPU that is made up, with KV of a byte or less: as one on a CPU.

Whether Triton's kernels are interpreted is decided once: it runs in one child process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from interpreted import results_of, run_devices

KINDS = ("int8", "fp8", "int4")


def _answers(llm: Any) -> list[tuple[int, ...]]:
    """Four prompts one after the other, with room for two; the first one again at the end."""
    from memserve.base.types import SamplingParams
    from tiny_models import prompt

    def answer(seed: int) -> tuple[int, ...]:
        tokens = [int(token) for token in prompt(75, seed)]
        output = llm.generate([tokens], SamplingParams(temperature=0), max_tokens=8, ignore_eos=True)[0]
        return tuple(output.outputs[0].tokens)

    return [answer(seed) for seed in (0, 1, 2, 3, 0)]


def engines() -> bool:
    """Steps in graphs, prefixes out to DRAM and back: the tokens of the CPU. What is refused still, with the reason."""
    import gpu_worker_process
    from memserve import LLM
    from memserve.base.errors import UserError
    from tiny_models import loaded, save_folder, tiny_module

    module = tiny_module("llama")
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_folder(module, Path(folder) / "tiny"))

        def serve(kind: str, **options: Any) -> Any:
            block_bytes = loaded(tiny_module("llama"), kv_dtype=kind).geometry.block_bytes
            return LLM(
                model, dtype="float32", threads=1, kv_dtype=kind, kv_memory=f"{6 * block_bytes}", dram_memory="1MiB",
                **options,
            )  # fmt: skip

        expected = {}
        for kind in KINDS:
            with serve(kind) as llm:
                expected[kind] = _answers(llm)
        gpu_worker_process.install(whole=True)
        for kind in KINDS:
            with serve(kind) as llm:
                assert _answers(llm) == expected[kind], kind
                assert llm._engine._instance._device.graph_sizes
                assert llm._engine.stats().instance.dram_tokens_reused >= 64
        try:
            serve("auto", kv_lower_dtype="int8")
        except UserError as error:
            assert "lower tier with a dtype of its own is for CPUs" in str(error), error
        else:
            raise AssertionError("a lower dtype on a GPU")
    return True


@pytest.mark.timeout(300)
def test_engine_with_codes_on_a_gpu_is_as_on_a_cpu() -> None:
    assert results_of(__file__) == {"engines": ""}


if __name__ == "__main__":
    run_devices({"engines": engines})
