"""Checks everything of memserve that needs a CUDA device, and times it: ``python scripts/gpu_check.py [--json FILE]
[--only PART]``.

Every part stands alone: what breaks in one is written down with its traceback, and the next one runs. The parts
``kernels`` and ``attention`` need torch with CUDA, triton and numpy; the others need memserve's native modules as well.
Targets are printed beside what was measured, as a share of the device's own limit: its copy bandwidth, or the matrix
product that torch reaches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_attention import CASES, ROOT, check_cases, check_large, milliseconds, time_decode, time_prefill

from memserve.types import KVGeometry

Rows = list[dict[str, object]]


@cache
def copy_gb_s() -> float:
    """Bytes read and written a second by a copy inside the device."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return (1 << 30) / milliseconds(lambda: big[: 1 << 29].copy_(big[1 << 29 :])) / 1e6


def judged(what: str, share: float, target: float, **more: object) -> dict[str, object]:
    """A row with a target: a share of the device's limit."""
    return {"what": what, "share_of_limit": share, "target": target, "ok": share >= target, **more}


# -- parts


def part_device() -> Rows:
    """What was found, and whether processes may share its memory."""
    import triton

    from memserve.runtime.gpus import device_here
    from memserve.runtime.links.gpu_memory import export_problem

    row: dict[str, object] = {"torch": torch.__version__, "triton": triton.__version__, "copy_gb_s": copy_gb_s()}
    return [row, {"said": device_here("auto").why, "exports": export_problem() or "yes"}]


def part_kernels() -> Rows:
    """Attention against float64."""
    checks = check_cases()
    for dtype in ("float32", "bfloat16", "float16"):
        checks += check_large(KVGeometry(2, 8, 128, 128, dtype), heads=32)
    return checks


def part_attention() -> Rows:
    """Attention's speed; decodes as a share of copy bandwidth."""
    small, large = KVGeometry(2, 3, 64, 64, "bfloat16"), KVGeometry(2, 8, 128, 128, "bfloat16")
    rows = time_decode(small, 9) + time_decode(large, 32)
    for row in rows:
        share = float(str(row["kv_gb_s"])) / copy_gb_s()
        full = int(str(row["rows"])) * int(str(row["context"])) >= 32 * 2048
        row |= judged("attention of a decode", share, 0.8) if full else {"share_of_limit": share}
    return rows + time_prefill(large, 32)


def part_seals() -> Rows:
    """Seals computed on the device: those of the CPU, and how fast."""
    from memserve import _core
    from memserve.runtime.links.gpu_memory import GpuMemory

    rows: Rows = []
    for range_bytes in (64, 4096, 737_280, 4 << 20):
        host = torch.randint(0, 256, (8 * range_bytes,), dtype=torch.uint8)
        offsets = np.arange(8, dtype=np.int64) * range_bytes
        want = _core.seal_ranges(host.data_ptr(), offsets, range_bytes)
        memory, target = GpuMemory(host.cuda()), GpuMemory(torch.zeros(8 * range_bytes, dtype=torch.uint8).cuda())
        right = (memory.seal(offsets, range_bytes) == want).all()
        landed = (target.land(offsets, memory.tensor, offsets, range_bytes) == want).all()
        same = torch.equal(memory.tensor, target.tensor)
        hosted = (target.land_host(offsets, host.data_ptr(), offsets, range_bytes) == want).all()
        rows.append({"range_bytes": range_bytes, "ok": bool(right and landed and same and hosted)})
    big = GpuMemory(torch.zeros(1 << 30, dtype=torch.uint8, device="cuda"))
    offsets = np.arange(1 << 8, dtype=np.int64) << 22
    ms = milliseconds(lambda: big.seal(offsets, 1 << 22))
    return [*rows, {"seal_gb_s": (1 << 30) / ms / 1e6}]


def part_copies() -> Rows:
    """Between pinned host memory and the device: by copy engines, whole blocks; by a kernel, pages."""
    from memserve.model.gpu import Cuda

    gpu, rows = Cuda(torch.device("cuda")), []
    for size in (1 << 17, 1 << 20, 1 << 22):
        count = (1 << 28) // size
        device = gpu.zeros(count, size, dtype=torch.uint8)
        host = torch.randint(0, 256, (count, size), dtype=torch.uint8)
        gpu.pin(host)
        order = torch.randperm(count).int()
        places = torch.arange(count, dtype=torch.int32)
        for name in ("blocks up", "blocks down", "pages up", "pages down"):
            target, source = (device, host) if name.endswith("up") else (host, device)
            source.copy_(torch.randint(0, 256, source.shape, dtype=torch.uint8))
            stream, seconds = gpu.stream(), []
            for _ in range(4):
                began = time.perf_counter()
                if name.startswith("blocks"):
                    stream.copy_blocks(target, source, places.tolist(), order.tolist())
                else:
                    stream.copy_pages(target, source, places, order)
                stream.wait()
                seconds.append(time.perf_counter() - began)
            same = torch.equal(target.cpu(), source.cpu()[order.long()])
            rows.append({"what": name, "bytes": size, "gb_s": (1 << 28) / min(seconds) / 1e9, "ok": same})
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return rows


def part_engine() -> Rows:
    """Greedy tokens of a whole engine, by chunks, graphs and plans in flight: those of transformers' generate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from memserve import LLM
    from memserve.errors import UserError
    from memserve.model.loading.sources import resolve_source

    rows: Rows = []
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    for dtype in ("float32", "bfloat16"):
        try:
            folder = resolve_source("default", dtype).path
        except UserError:  # its weights are not here: random ones
            folder, prompts = random_folder(), ["w5 w9 w7", "w20 w3", " ".join(f"w{n}" for n in range(3, 70))]
        with LLM(str(folder), dtype=dtype, device="cuda", kv_memory="256MiB") as llm:
            answers = [llm.generate(prompt, temperature=0, max_tokens=48)[0].text for prompt in prompts]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda()
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids.cuda()
            out = model.generate(ids, do_sample=False, max_new_tokens=48)[0, ids.shape[1] :]
            want = tokenizer.decode(out, skip_special_tokens=True)
            row: dict[str, object] = {"dtype": dtype, "prompt": prompt, "equal": want == answer}
            rows.append(row | ({"ok": want == answer} if dtype == "float32" else {}))  # bfloat16 rounds otherwise
    return rows


def random_folder() -> Path:
    """A tiny model with random weights, as a folder."""
    import tempfile

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_models import save_folder, tiny_module

    folder: Path = save_folder(tiny_module("llama"), Path(tempfile.mkdtemp()) / "tiny")
    return folder


def random_8b() -> Any:
    """An 8B of Llama's shape with random weights, as the loader would give it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from memserve.model.attention.context import ATTENTION_NAME, register_attention
    from memserve.model.loading.loader import LoadedModel
    from memserve.model.loading.probe import probe_model

    register_attention()
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    torch.set_default_dtype(torch.float32)
    module.requires_grad_(False)
    geometry, _ = probe_model(module, "bfloat16", 32)
    return LoadedModel(
        module, None, geometry, "random", "random-8b", 8192, 128_256, (2,), False, torch.device("cuda"), torch.bfloat16
    )  # fmt: skip


def decode_ms(device: Any, context: int, rows: int, steps: int = 44) -> float:
    """Milliseconds of a decode step behind ``context`` tokens, two plans in flight."""
    from memserve.instance.events import StepPlan

    begun, began = [], 0.0
    for step in range(steps):
        if step == 4:
            began = time.perf_counter()
        plan = StepPlan(
            1000 + step, slots=list(range(rows)), starts=[context + step] * rows, counts=[1] * rows,
            sample_slots=[(slot,) for slot in range(rows)], decodes=rows,
        )  # fmt: skip
        begun.append(device.begin_step(plan))
        if len(begun) > 1:
            begun.pop(0)()
    begun.pop()()
    return (time.perf_counter() - began) * 1e3 / (steps - 4)


def part_steps() -> Rows:
    """Steps of an 8B: decodes as a share of bandwidth, with and without graphs; prefill as one of torch's products."""
    from memserve.config import InstanceConfig, PoolConfig, SchedulerConfig
    from memserve.instance.events import OpenSequence, StepPlan
    from memserve.model.forward import EagerForward
    from memserve.model.gpu import Cuda
    from memserve.model.gpu_device import GpuDevice
    from memserve.types import SamplingParams, StopParams

    model, context = random_8b(), 1024
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters()) - 128_256 * 4096 * 2  # embedding
    config = InstanceConfig(8192, pool=PoolConfig(2048), scheduler=SchedulerConfig(max_running=32))
    device = GpuDevice(model, config, Cuda(model.device), EagerForward(model.module))
    blocks = context // 32 + 8

    def fill(rows: int, number: int) -> float:
        """Milliseconds of one prompt's prefill."""
        took = []
        for slot in range(rows):
            own = list(range(slot * blocks, (slot + 1) * blocks))
            tokens = np.full(context, 7, np.int32)
            opened = OpenSequence(slot, tokens, context, 0, SamplingParams(temperature=0), own, stop=StopParams())
            rows_of = {"slots": [slot], "starts": [0], "counts": [context], "sample_slots": [(slot,)]}
            plan = StepPlan(number + slot, open=[opened], **rows_of)
            took.append(device.execute(plan).device_ns / 1e6)
        return float(np.median(took))

    x, w = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    peak_tflops = 2 * 8192**3 / milliseconds(lambda: x @ w) / 1e9
    prefill_ms = fill(32, 0)
    flops = context * weights  # two operations for each weight, of two bytes
    found: Rows = [judged("prefill of 1,024 tokens", flops / prefill_ms / 1e9 / peak_tflops, 0.5, ms=prefill_ms)]
    for graphs in (False, True):
        if graphs:
            device.capture()
            found.append({"graphs": str(device.graph_sizes), "ok": bool(device.graph_sizes)})
        for rows, target in ((1, 0.8), (32, 0.65)):
            ms = decode_ms(device, context, rows)
            device._slots.lengths[:rows] = context + 1
            moved = weights + rows * context * model.geometry.token_bytes
            share = moved / ms / 1e6 / copy_gb_s()
            named = f"decode of {rows}, {'graphs' if graphs else 'kernel by kernel'}"
            plain: dict[str, object] = {"what": named, "share_of_limit": share, "ms": ms}
            found.append(judged(named, share, target, ms=ms) if graphs else plain)
    return found


def part_ipc() -> Rows:
    """KV pulled out of another process's memory on this card; and what a reader sees when the owner is killed."""
    command = [sys.executable, __file__, "--owner"]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        said = json.loads(owner.stdout.readline())
        from memserve.messages import ArenaPlace, Peer, PeerInfo
        from memserve.runtime.links.gpu_memory import GpuMemory
        from memserve.runtime.links.ipc import IpcLink
        from memserve.runtime.links.link import LinkError
        from memserve.runtime.links.ranges import Ranges
        from memserve.runtime.links.shm import this_host
        from memserve.types import Role, Tier

        peer, geometry, count = Peer("owner", 1), KVGeometry(32, 8, 128, 128, "bfloat16"), 128
        size = geometry.block_bytes
        place = ArenaPlace(Tier.HBM, said["address"], count * size, said["fd"], True, bytes.fromhex(said["exported"]))
        info = PeerInfo(
            peer, Role.PREFILL, "tcp://127.0.0.1:1", "ns", geometry, count, 0, 100, True, this_host(), said["pid"],
            (place,),
        )  # fmt: skip
        link = IpcLink({Tier.HBM: GpuMemory(torch.zeros(count * size, dtype=torch.uint8, device="cuda"))})
        link.add_peer(info)
        offsets = np.arange(count, dtype=np.int64) * size
        ranges = Ranges(offsets, offsets[::-1].copy(), size)
        seals = link.read(peer, Tier.HBM, Tier.HBM, ranges)
        rows: Rows = [{"check": "seals of what was pulled", "ok": [str(one) for one in seals] == said["seals"]}]
        ms = milliseconds(lambda: link.read(peer, Tier.HBM, Tier.HBM, ranges))
        rows.append(judged("pull", 2 * count * size / ms / 1e6 / copy_gb_s(), 0.5, gb_s=count * size / ms / 1e6))
        os.kill(said["pid"], signal.SIGKILL)
        owner.wait()
        try:
            link.read(peer, Tier.HBM, Tier.HBM, ranges)
            rows.append({"check": "a read after the owner was killed", "said": "reads what was there"})
        except LinkError as error:
            rows.append({"check": "a read after the owner was killed", "said": str(error)})
        torch.zeros(1, device="cuda").item()
        return [*rows, {"check": "the reader's context lives", "ok": True}]
    finally:
        owner.kill()


def own_pages() -> int:
    """The owner of :func:`part_ipc`: exports an arena, says its seals, waits for its end."""
    from memserve.runtime.links.gpu_memory import GpuMemory

    size = KVGeometry(32, 8, 128, 128, "bfloat16").block_bytes
    arena = GpuMemory(torch.randint(0, 256, (128 * size,), dtype=torch.uint8, device="cuda"))
    arena.generation = 1
    torch.cuda.synchronize()
    seals = [str(one) for one in arena.seal(np.arange(128, dtype=np.int64) * size, size)]
    said = {"address": arena.address, "fd": arena.fd, "pid": os.getpid(), "exported": arena.export().hex()}
    print(json.dumps(said | {"seals": seals}), flush=True)
    sys.stdin.read()
    return 0


PARTS: dict[str, Callable[[], Rows]] = {
    "device": part_device, "kernels": part_kernels, "attention": part_attention, "seals": part_seals,
    "copies": part_copies, "engine": part_engine, "steps": part_steps, "ipc": part_ipc,
}  # fmt: skip


def main() -> int:
    """Run the parts; the exit status is 1 if one broke or a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no CUDA device: nothing to check here ({CASES.name} runs the kernels interpreted)")
        return 0
    if args.owner:
        return own_pages()
    report: dict[str, object] = {"device": torch.cuda.get_device_name()}
    broken, failed, passed = [], [], 0
    for name in args.only or PARTS:
        print(f"{name} ...", flush=True)
        try:
            rows = PARTS[name]()
        except Exception:
            traceback.print_exc()
            report[name] = traceback.format_exc()
            broken.append(name)
            continue
        report[name] = rows
        for row in rows:
            print("   ", "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
            passed += row.get("ok") is True
            failed += [f"{name}: {row.get('check', row.get('what', row))}"] if row.get("ok") is False else []
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(report, indent=1, default=str))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=str))
    print(f"{passed} checks and targets reached; not: {failed or 'none'}; parts that broke: {broken or 'none'}")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
