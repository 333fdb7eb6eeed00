"""Peak memory of starts: ``LLM(model)`` in a fresh process, first with an empty cache folder, then again.

    python bench/load_memory.py                        # makes a random model of 1.2B weights in bfloat16 (2.5 GB)
    python bench/load_memory.py --gguf                 # the same weights as a GGUF file, which is converted once
    python bench/load_memory.py --source-dtype float32 # files of another dtype than that in which it is computed
    python bench/load_memory.py --model FOLDER_OR_GGUF

For each start: seconds to the built engine, the most that the process had resident (``VmHWM``: pages of mapped files
and of shared memory included), the most of it that was anonymous and that was mapped from files, and the most of its
child processes (a conversion runs in one), beside the weights and the bound: 1.15 times the weights and 0.7 GB. An
answer of a few tokens is computed, so that what was loaded is known to work; its memory counts. Peaks of parts are
sampled every 5 ms; ``VmHWM`` is the kernel's own.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness.flags import options, save
from harness.tables import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gguf_files import write_tensors
from memserve.model.loading.conversion import SafetensorsWriter
from process_tree import children_of

SAMPLE_S = 0.005
WEIGHTS_FACTOR, PROGRAM_BYTES = 1.15, 700_000_000
"""The bound: so many times the weights, and so much beside."""
SIZES = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256,
}  # fmt: skip
"""Of the random model: Llama 3.2's 1B."""
NUMBERS = 1_000_003
"""So many random numbers are drawn, which takes long, and used again and again. Prime: no two rows are alike."""
FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")

START = """
import json, sys, time
began_s = time.monotonic()
from memserve import LLM
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
print(f"ready {time.monotonic() - began_s:.2f}", flush=True)
print("answer", repr(llm.generate([[5, 6, 7, 8]], temperature=0, max_tokens=8, ignore_eos=True)[0].text), flush=True)
status = open("/proc/self/status").read()
print("steady", next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1], flush=True)
llm.close()
"""


@dataclass
class Start:
    """What one start took: seconds, and bytes by field of ``/proc/PID/status``."""

    ready_s: float = 0.0
    answer: str = ""
    steady_bytes: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    children_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that was resident."""
        return self.peak["VmHWM"]


def write_random_model(folder: Path, sizes: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Llama of random weights, with a head tied to its embedding and a word-level tokenizer; written tensor by
    tensor."""
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**sizes, tie_word_embeddings=True, max_position_embeddings=8192, eos_token_id=2)
    config.architectures, config.dtype = ["LlamaForCausalLM"], str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    names = {f"w{index}": index for index in range(min(sizes["vocab_size"], 1000))}
    words = Tokenizer(WordLevel(names, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0").save_pretrained(folder)
    torch.manual_seed(0)
    numbers = (torch.randn(NUMBERS) * 0.02).to(dtype)
    shapes = list(_shapes(sizes))
    with SafetensorsWriter(folder / "model.safetensors", len(shapes)) as writer:
        for name, shape in shapes:
            count = math.prod(shape)
            again = numbers.repeat(count // NUMBERS + 1)[:count].view(shape)
            writer.write(name, torch.ones(shape, dtype=dtype) if len(shape) == 1 else again)
    return folder


def write_gguf(folder: Path, sizes: dict[str, int], path: Path) -> Path:
    """The weights of :func:`write_random_model` as a GGUF file in bfloat16."""
    from gguf import GGMLQuantizationType
    from safetensors import safe_open
    from transformers import LlamaConfig

    def tensors() -> Iterator[tuple[str, object, object]]:
        weights = safe_open(folder / "model.safetensors", "pt")
        for name in weights.keys():  # noqa: SIM118  # no mapping
            value = weights.get_tensor(name)
            if value.dim() == 1:
                yield name, value.float().numpy(), None
            else:
                yield name, value.view(torch.uint8).numpy(), GGMLQuantizationType.BF16

    return write_tensors(LlamaConfig(**sizes, max_position_embeddings=8192), tensors(), path)


def _shapes(sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def measure_start(model: str, cache: Path, **options: object) -> Start:
    """``LLM(model, **options)`` in a process of its own, with ``cache`` as its cache folder."""
    environment = dict(os.environ, MEMSERVE_CACHE_DIR=str(cache))
    command = [sys.executable, "-c", START, model, json.dumps(options)]
    start = Start()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output)
        while process.poll() is None:
            _sample(process.pid, start)
            time.sleep(SAMPLE_S)
        output.seek(0)
        values_said = dict(line.split(maxsplit=1) for line in output.read().splitlines() if " " in line)
    if process.returncode != 0:
        raise SystemExit(f"the start of {model} ended with {process.returncode}")
    start.ready_s, start.answer = float(values_said["ready"]), values_said["answer"]
    start.steady_bytes = 1024 * int(values_said["steady"])
    return start


def _sample(pid: int, start: Start) -> None:
    for name, size in _status(pid).items():
        start.peak[name] = max(start.peak.get(name, 0), size)
    for child in children_of(pid):
        start.children_bytes = max(start.children_bytes, _status(child).get("VmHWM", 0))


def _status(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M) if name in FIELDS}


def weights_bytes(model: str) -> int:
    """Bytes of the weights' files."""
    path = Path(model)
    return sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path]))


def bound_bytes(weights: int) -> int:
    """The most that a start of a model with ``weights`` bytes may have resident."""
    return int(WEIGHTS_FACTOR * weights) + PROGRAM_BYTES


def _random_model(work: Path, dtype: str, *, gguf: bool) -> str:
    folder = work / f"random-1.2b-{dtype}"
    if not (folder / "model.safetensors").exists():
        write_random_model(folder, SIZES, getattr(torch, dtype))
    if not gguf:
        return str(folder)
    path = work / f"{folder.name}.gguf"
    return str(path if path.exists() else write_gguf(folder, SIZES, path))


COLUMNS = {
    "start": "{start}", "ready [s]": "{ready_s:.1f}", "peak resident (VmHWM)": "{VmHWM:.2f} GB",
    **{name: f"{{{name}:.2f}} GB" for name in FIELDS[1:]}, "children": "{children:.2f} GB",
    "steady": "{steady:.2f} GB", "of the bound": "{share:.0%}",
}  # fmt: skip


def main() -> None:
    args = options(
        __doc__, model=(str, "a model folder or a .gguf file; else a random one is made"), dtype="bfloat16",
        weights_gb=(float, "of the model as it is computed, where its files are others"), kv_memory="64MiB",
        gguf=(False, "the random model as a GGUF file"), source_dtype=("bfloat16", "of the random model's files"),
        work=(Path, "where the random model is made and kept; else it is temporary"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="load-memory-") as temporary:
        model = args.model or _random_model(args.work or Path(temporary), args.source_dtype, gguf=args.gguf)
        weights = weights_bytes(model) if args.model else 2 * sum(math.prod(shape) for _, shape in _shapes(SIZES))
        weights = int(args.weights_gb * 1e9) if args.weights_gb else weights
        bound = bound_bytes(weights)
        print(f"{model}: weights {weights / 1e9:.2f} GB, bound {bound / 1e9:.2f} GB")
        table, rows = Table(COLUMNS), []
        for name in ("first", "second"):
            start = measure_start(model, Path(temporary) / "cache", dtype=args.dtype, kv_memory=args.kv_memory)
            sizes = {**start.peak, "children": start.children_bytes, "steady": start.steady_bytes}
            gb = {key: size / 1e9 for key, size in sizes.items()}
            rows.append({"start": name, "ready_s": start.ready_s, "share": start.peak_bytes / bound, **gb})
            table.show(rows[-1])
    save(args, rows)


if __name__ == "__main__":
    main()
