"""Torch without its compiler: less is imported, and what needs the compiler still finds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memserve.system import imports as lean_torch

HEAD = f"""
import sys
from {lean_torch.__name__} import leave_compiler_out
leave_compiler_out("cpu")
import torch
"""


def said_by(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", HEAD + program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def family() -> list[str]:
    """What a process says that has imported a family of models: a line for each test."""
    return said_by("""
import importlib.metadata
from transformers.utils import import_utils
read, fetch = [], import_utils.fetch__all__
import_utils.fetch__all__ = lambda text: read.append(0) or fetch(text)
importlib.metadata.packages_distributions = None
import transformers.models.llama.modeling_llama
left_out = ("torch._inductor", "torch.distributed.tensor", "sympy", "triton", "scipy")
print([name for name in left_out if sys.modules.get(name)])
print(len(read) < 50, import_utils.is_kernels_available(), transformers.LlamaForCausalLM.__name__)
""").splitlines()


def test_model_family_imports_no_compiler_dtensor_or_scipy(family: list[str]) -> None:
    assert family[0] == "[]"


def test_compiling_code_gets_the_compiler() -> None:
    said = said_by("""
import transformers.models.llama.modeling_llama
double = torch.compile(lambda x: x * 2, backend="eager")
print(double(torch.ones(1)).item(), torch._dynamo.utils.__name__, torch.compiler.is_compiling())
""")
    assert said == "2.0 torch._dynamo.utils False"


def test_model_family_scans_no_other_families_or_packages(family: list[str]) -> None:
    assert family[1] == "True False LlamaForCausalLM"


def test_masks_of_transformers_are_made_in_the_real_mode() -> None:
    said = said_by("""
from transformers import masking_utils
table = torch.arange(4) % 2
with masking_utils.TransformGetItemToIndex() as mode:
    print(torch.vmap(lambda at: table[at])(torch.arange(4)).tolist(), type(mode).__module__)
""")
    assert said == "[0, 1, 0, 1] torch._dynamo._trace_wrapped_higher_order_op"


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
