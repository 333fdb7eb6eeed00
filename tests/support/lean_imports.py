"""What processes of tests leave out of torch and transformers, as those of the product do: 2 s of CPU in each; and
what Triton's interpreter looks up once."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


def leave_compiler_out() -> None:
    """Before anything else imports transformers. Triton, and gloo in the place of NCCL, stay: tests ask for them."""
    from memserve.system import imports

    imports.leave_compiler_out("cpu")
    import torch
    import transformers.modeling_utils as models  # reads what there is
    from huggingface_hub.serialization import _torch as shards

    models.unwrap_model = lambda model: model  # tests save plain modules; to see that, it would import the compiler
    shards._get_unique_id = shards.storage_ptr  # and these two distributed tensors
    shards.get_torch_storage_size = lambda tensor: tensor.untyped_storage().nbytes()
    torch.distributed.is_available = lambda: hasattr(torch._C, "_c10d_init")  # what torch says itself
    if sys.modules["triton"] is None:
        del sys.modules["triton"]


def interpret_quickly() -> None:
    """At each call of a function of a kernel Triton's interpreter looks through its whole language for what it has to
    replace there: here only the first time. And it computes whether an integer overflows, which without ``debug`` it
    does not tell: a quarter of its time."""
    import inspect
    from dataclasses import replace

    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
