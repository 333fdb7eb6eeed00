"""Torch without its compiler: less is imported, and what needs the compiler still finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memserve.system import imports as lean_torch

HEAD = f"""
import json
import sys
from {lean_torch.__name__} import leave_compiler_out
leave_compiler_out("cpu")
import torch
"""


EACH = """
import os, traceback
for name, program in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 1)
        try:
            exec(program)
        except BaseException:
            print(traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        print(json.dumps([name, said.read().strip()]), flush=True)
"""
FAMILY = """
import importlib.metadata
from transformers.utils import import_utils
read, fetch = [], import_utils.fetch__all__
import_utils.fetch__all__ = lambda text: read.append(0) or fetch(text)
importlib.metadata.packages_distributions = None
import transformers.models.llama.modeling_llama
from transformers.cache_utils import LinearAttentionLayer
LinearAttentionLayer().lazy_initialization(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 3))  # states of a model
left_out = ("torch._inductor", "torch.distributed.tensor", "sympy", "triton", "scipy")
print([name for name in left_out if sys.modules.get(name)])
print(len(read) < 50, import_utils.is_kernels_available(), transformers.LlamaForCausalLM.__name__)
print([name for name in ("torch._decomp", "torch._prims") if name in sys.modules])
from memserve.model.loading.skeleton import build_skeleton
def build():
    with torch.device("meta"):
        points = torch.empty(3, 2)
        return list(torch.ops.aten._cdist_forward(points, points, 2.0, None).shape), torch.arange(3).tolist()
try:
    build()
except RuntimeError as error:
    print(str(error)[:19])
print(build_skeleton(build), "torch._decomp" in sys.modules)
"""
COMPILING = """
import transformers.models.llama.modeling_llama
double = torch.compile(lambda x: x * 2, backend="eager")
print(double(torch.ones(1)).item(), torch._dynamo.utils.__name__, torch.compiler.is_compiling())
"""
MASKS = """
from transformers import masking_utils
table = torch.arange(4) % 2
with masking_utils.TransformGetItemToIndex() as mode:
    print(torch.vmap(lambda at: table[at])(torch.arange(4)).tolist(), type(mode).__module__)
"""
ON_DEMAND = ("torch._prims.rng_prims", "torch._refs", "torch.utils._content_store")
PROGRAMS = {"family": FAMILY, "compiling": COMPILING, "masks": MASKS} | {
    name: f"""
import importlib
module = importlib.import_module("{name}")
print(module.__spec__.name, "torch._decomp" in sys.modules, torch._refs.__spec__.parent)
"""
    for name in ON_DEMAND
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each program says, in a fork of one process that has imported torch without its compiler."""
    command = [sys.executable, "-c", HEAD + EACH, json.dumps(PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.fixture(scope="module")
def family(said: dict[str, str]) -> list[str]:
    """What a process says that has imported a family of models: a line for each test."""
    return said["family"].splitlines()


def test_model_family_imports_no_compiler_dtensor_or_scipy(family: list[str]) -> None:
    assert family[0] == "[]"


def test_compiling_code_gets_the_compiler(said: dict[str, str]) -> None:
    assert said["compiling"] == "2.0 torch._dynamo.utils False"


def test_model_family_scans_no_other_families_or_packages(family: list[str]) -> None:
    assert family[1] == "True False LlamaForCausalLM"


def test_shapes_that_torch_knows_in_python_come_on_demand(family: list[str]) -> None:
    """What is built is built as ever, with real ranges; only later than without them."""
    assert family[2:] == ["[]", "aten::_cdist_forwar", "([3, 3], [0, 1, 2]) True"]


@pytest.mark.parametrize("name", ON_DEMAND)
def test_what_needs_the_shapes_runs_once(said: dict[str, str], name: str) -> None:
    """Torch itself refuses to define an operation twice."""
    assert said[name] == f"{name} True torch._refs"


NAMES = """
import builtins, marshal, os, sys
opened, really = [], builtins.open
builtins.open = lambda file, *rest, **more: opened.append(str(file)) or really(file, *rest, **more)
if sys.argv[1] == "remembered":
    from memserve.system.imports import remember_model_names
    remember_model_names()
import transformers
from transformers.utils import import_utils
names = import_utils.define_import_structure(os.path.dirname(transformers.__file__) + "/models")
files = [name for name in opened if "/transformers/models/" in name and name.endswith(".py")]
found = sorted((sorted(k), sorted((m, sorted(n)) for m, n in v.items())) for k, v in names.items())
print(len(files), hash(marshal.dumps(found)))
"""


def _names_read(how: str, cache: Path) -> list[str]:
    """How many files of models transformers has opened, and a hash of the names that it found in them."""
    environment = {**os.environ, "MEMSERVE_CACHE_DIR": str(cache), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", NAMES, how]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=True, env=environment
    ).stdout.split()


def test_names_of_models_are_read_once_for_an_installation(tmp_path: Path) -> None:
    plain, first, second = (_names_read(how, tmp_path) for how in ("plain", "remembered", "remembered"))
    assert int(plain[0]) > 500 and int(first[0]) > 500 and second[0] == "0"
    assert plain[1] == first[1] == second[1]


def test_a_damaged_record_of_names_is_written_again(tmp_path: Path) -> None:
    first = _names_read("remembered", tmp_path)
    (record,) = (tmp_path / "imports").iterdir()
    whole = record.read_bytes()
    record.write_bytes(whole[: len(whole) // 2])
    assert _names_read("remembered", tmp_path) == first
    assert record.read_bytes() == whole


def test_names_in_a_folder_that_may_change_are_not_kept(tmp_path: Path) -> None:
    package = tmp_path / "src" / "transformers"
    assert lean_torch._record_of(package) is None
    record = tmp_path / "src" / "transformers-5.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("first")
    first = lean_torch._record_of(package)
    record.write_text("another version")
    assert first is not None and first != lean_torch._record_of(package)


def test_masks_of_transformers_are_made_in_the_real_mode(said: dict[str, str]) -> None:
    assert said["masks"] == "[0, 1, 0, 1] torch._dynamo._trace_wrapped_higher_order_op"


def test_a_process_that_has_the_compiler_keeps_it() -> None:
    program = """
import torch._dynamo
known = torch._dynamo
from memserve.system.imports import leave_compiler_out
leave_compiler_out("cpu")
print(torch._dynamo is known, torch.distributed.is_available())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == ["True", "True"]
