"""Memory of the machine and of the interpreter: too much is refused at once, what stays is not looked through again."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys

import pytest

from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.base.units import GIB, MIB
from memserve.system import memory
from memserve.system.process import PRIMITIVES_MAX


def test_more_kv_memory_than_the_machine_has_is_a_user_error() -> None:
    memory.check_host_memory(1)
    with pytest.raises(UserError) as caught:
        memory.check_host_memory(1_000_000 * GIB)
    assert "--kv-memory" in (caught.value.hint or "")


def test_the_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = memory.available_memory_bytes()
    assert free is not None and free > 1 << 20, "no files: the kernel's own figure"
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.available_memory_bytes() == 3000
    with pytest.raises(UserError):
        memory.check_host_memory(GIB)


def test_caches_of_a_control_group_are_free(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Files that were read count as used; the kernel drops them before it kills. Both versions of control groups."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("8000\n")
    assert memory.available_memory_bytes() == 1000
    (tmp_path / "memory" / "memory.stat").write_text("cache 3000\ntotal_inactive_file 2000\ntotal_active_file 500\n")
    assert memory.available_memory_bytes() == 3500
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 1500\n")
    assert memory.available_memory_bytes() == 2500


def test_a_model_that_cannot_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 10 * GIB)
    memory.check_model_memory("m", 8 * GIB, GIB // 2, GIB)
    with pytest.raises(UserError, match=r"m does not fit into memory.*weights 9") as caught:
        memory.check_model_memory("m", 9 * GIB, GIB // 2, GIB)
    assert "smaller model" in (caught.value.hint or "")


def test_startup_objects_are_frozen_for_gc() -> None:
    """The collector rests while a process starts, and leaves alone what was made then; later garbage is collected."""
    frozen = gc.get_freeze_count()
    try:
        with memory.objects_that_stay():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
        with pytest.raises(ZeroDivisionError), memory.objects_that_stay():
            raise ZeroDivisionError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_command_ends_with_its_objects_frozen() -> None:
    """Else the interpreter takes half a million objects of torch apart before the process ends."""
    program = """
import atexit, gc, sys
from memserve.cli.main import main
atexit.register(lambda: print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 100))
main(["version"])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split()[1:] == ["True", "True"]


GEOMETRY = KVGeometry(30, 3, 64, 64, "bfloat16", 32)


def bound(sizes: memory.ModelSizes, **options: int) -> memory.MemoryBound:
    scheduler = SchedulerConfig(**options)
    config = EngineOptions(kv_memory_bytes=64 * MIB, dram_memory_bytes=128 * MIB, scheduler=scheduler)
    return memory.memory_bound(sizes, GEOMETRY, config.instance_config(GEOMETRY, 8192, ""), in_cluster=True)


def test_the_bound_is_the_sum_of_its_terms() -> None:
    sizes = memory.sizes_from_config({"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}, 269 * 10**6)
    found = bound(sizes)
    assert found.arenas_bytes <= 192 * MIB < found.arenas_bytes + 2 * GEOMETRY.block_bytes
    assert found.weights_bytes == 269 * 10**6
    assert found.primitives_bytes == PRIMITIVES_MAX * memory.PRIMITIVE_BYTES
    assert found.total_bytes == sum(getattr(found, part.name) for part in dataclasses.fields(found))
    assert all(part.name.removesuffix("_bytes") in str(found) for part in dataclasses.fields(found))


def test_index_of_contents_is_in_the_bound() -> None:
    usual, found = bound(memory.ModelSizes(1, 1, 1, 2)), bound(memory.ModelSizes(1, 1, 1, 2), nonprefix_reuse=True)
    blocks = found.arenas_bytes // GEOMETRY.block_bytes
    assert found.requests_bytes - usual.requests_bytes == 4 * blocks * GEOMETRY.block_tokens * 32


def test_kv_of_a_configuration_is_what_layers_keep() -> None:
    """Of DeepSeek V3 latents and rotary keys, of others K and V of their KV heads."""
    import transformers

    latents = memory.geometry_from_config(transformers.DeepseekV3Config().to_dict(), 32)
    assert latents == KVGeometry(61, 1, 576, 512, "bfloat16", 32, latent=True)
    config = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    assert memory.geometry_from_config(config, 32) == GEOMETRY
    del config["num_key_value_heads"]
    assert memory.geometry_from_config(config, 16) == KVGeometry(30, 9, 64, 64, "bfloat16", 16)
    with pytest.raises(KeyError):
        memory.geometry_from_config({"hidden_size": 576}, 32)


def test_what_is_made_of_latents_is_in_the_bound() -> None:
    sizes, latents = memory.ModelSizes(1, 3072, 49152, 2), KVGeometry(61, 1, 576, 512, "bfloat16", 32, latent=True)
    config = EngineOptions(kv_memory_bytes=64 * MIB).instance_config(latents, 8192, "")
    plain = EngineOptions(kv_memory_bytes=64 * MIB).instance_config(GEOMETRY, 8192, "")
    assert config.namespace != plain.namespace, "expanded KV is not taken for latents"
    found = memory.memory_bound(sizes, latents, config, in_cluster=False)
    usual = memory.memory_bound(sizes, GEOMETRY, plain, in_cluster=False)
    assert found.activations_bytes - usual.activations_bytes == memory.LATENT_SCRATCH_BYTES


def test_each_option_that_costs_memory_is_in_the_bound() -> None:
    sizes = memory.ModelSizes(1, 3072, 49152, 2)
    least = bound(sizes, max_running=8, max_step_tokens=512, max_waiting=16)
    assert bound(sizes, max_running=16, max_step_tokens=512, max_waiting=16).logits_bytes > least.logits_bytes
    assert bound(sizes, max_running=8, max_step_tokens=1024, max_waiting=16).activations_bytes > least.activations_bytes
    assert bound(sizes, max_running=8, max_step_tokens=512, max_waiting=32).requests_bytes > least.requests_bytes


def test_resident_bytes_grow_with_touched_memory() -> None:
    before = memory.resident_bytes()
    touched = bytearray(64 * MIB)
    assert memory.resident_bytes() - before > 48 * MIB
    del touched


def test_cpu_process_loads_no_gpu_kernels() -> None:
    """The compiler that transformers brings along would import triton: 73 MB in each instance."""
    program = """
from memserve.system.imports import leave_compiler_out
leave_compiler_out("cpu")
import sys
import torch._dynamo
import torch.nn.attention.flex_attention
maps = open("/proc/self/maps").read()
print([name for name, found in sys.modules.items() if name.startswith("triton") and found], "libtriton" in maps)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["[]", "False"], done.stdout


@pytest.mark.parametrize(
    "imported",
    [
        "memserve.cli.cluster.members, memserve.host.router, memserve.host.member, memserve.host.supervisor",
        "memserve.api.app, memserve.model.loading.card; memserve.model.loading.card.import_tokenizers()",
        "memserve.cli.cluster.router, memserve.cli.cluster.store, memserve.store.host.process",
        "memserve.cli.cluster.instance, memserve.host.instance",  # OpenMP and oneDNN are set up before it
    ],
)
def test_processes_without_compute_import_no_torch(imported: str) -> None:
    """A second of a core at each start, and 200 MB."""
    program = f"import sys, {imported}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


FROZEN = """
from memserve import _core
from memserve.system.memory import objects_that_stay

class Holder:
    pass

with objects_that_stay():
    holder = Holder()
    holder.itself, holder.native = holder, _core.BlockAllocator({arguments})
del holder
"""


def test_frozen_objects_end_without_a_word() -> None:
    """A cycle that is frozen and given up holds a native object: it ends with the process, which says nothing of it."""
    code = FROZEN.format(arguments="8")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")


def test_free_heap_is_returned_to_the_system_while_idle() -> None:
    """Small pieces below one that stays: glibc gives nothing of them back by itself."""
    program = """
import ctypes, sys, time
from memserve.system.memory import keep_heap_small, resident_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
pieces = [libc.malloc(1000) for _ in range(100_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 1000)
last, filled = libc.malloc(1000), resident_bytes()
for piece in pieces:
    libc.free(ctypes.c_void_p(piece))
assert resident_bytes() > filled - 20_000_000
keep_heap_small(every_s=0.01)
deadline = time.monotonic() + 60
while resident_bytes() > filled - 80_000_000 and time.monotonic() < deadline:
    time.sleep(0.01)
print(resident_bytes() <= filled - 80_000_000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "True"
