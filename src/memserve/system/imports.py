"""What a process of ours leaves out of torch and transformers: torch's compiler, its distributed tensors, scipy, and
kernels from the hub.

transformers imports them with every model: time at each start, and memory in each instance, for nothing that an
instance runs. Only for processes of ours: other code of a library's user may compile.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COMPILER = "torch._dynamo"
_MODES = f"{_COMPILER}._trace_wrapped_higher_order_op"


def leave_compiler_out(device: str) -> None:
    """For a process of ours that computes on a CPU, before it imports transformers.

    ``import triton`` fails from now on: 73 MB resident for kernels of a GPU. torch's compiler is imported when more of
    it is asked for than the marks that transformers puts on its functions. torch says that it was built without
    ``torch.distributed``, and transformers that there is no scipy, which losses of training need, and no package of
    kernels from the hub: to find its version it would look through all that is installed.
    """
    from memserve.system.process import set_thread_environment

    set_thread_environment()
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # None: the import system's word for "absent"
        if _COMPILER not in sys.modules and "transformers.modeling_utils" not in sys.modules:
            _put_off_compiler(torch)
            torch.distributed.is_available = lambda: False
            _leave_packages_out()
            _read_models_once()


def _put_off_compiler(torch: types.ModuleType) -> None:
    compiler, modes = _LaterCompiler(_COMPILER), types.ModuleType(_MODES)
    modes.TransformGetItemToIndex = _LaterMode  # type: ignore[attr-defined]  # a module made here
    compiler.__path__ = []  # a package
    sys.modules |= {_COMPILER: compiler, _MODES: modes}
    sys.meta_path.insert(0, _PARTS)
    torch._dynamo = compiler  # type: ignore[attr-defined]  # torch imports it on demand


def _leave_packages_out() -> None:
    from transformers import utils

    for module in (utils, utils.import_utils):
        setattr(module, "is_scipy_available", lambda: False)  # noqa: B010  # its types hide the name
        setattr(module, "is_kernels_available", lambda *_: False)  # noqa: B010  # its types hide the name


def _read_models_once() -> None:
    """transformers reads the files of all its models for the names in them, a fifth of a second each time: for itself,
    by the name of their folder, and for ``transformers.models``, by the name of a file there."""
    from transformers.utils import import_utils

    read: Any = getattr(import_utils, "create_import_structure_from_path", None)

    def of_folder(path: Any) -> Any:
        return read(Path(path).parent if os.path.isfile(path) else path)

    if read is not None:  # it keeps what it has found by folder
        setattr(import_utils, "create_import_structure_from_path", of_folder)  # noqa: B010  # its types hide the name


def _mark(function: Any = None, *_: object, **__: object) -> Any:
    """A decorator that changes nothing, with or without arguments: what it would tell the compiler, no code asks."""
    return function if callable(function) else lambda marked: marked


class _LaterCompiler(types.ModuleType):
    """Stands for ``torch._dynamo`` until something needs it."""

    allow_in_graph: Callable[..., Any] = staticmethod(_mark)
    assume_constant_result: Callable[..., Any] = staticmethod(_mark)
    disable: Callable[..., Any] = staticmethod(_mark)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_compiler(), name)


class _LaterMode:
    """Stands for the mode of the compiler's that masks are made under: an instance of it is the real one's."""

    def __new__(cls) -> Any:
        _compiler()
        return importlib.import_module(_MODES).TransformGetItemToIndex()


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Is asked for modules of the compiler while its stand-in is there: the compiler comes first, maybe with them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}."):
            return None
        real = _compiler()
        if name in sys.modules:
            return importlib.machinery.ModuleSpec(name, self)
        return importlib.machinery.PathFinder.find_spec(name, real.__path__)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The one that is there."""
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It has run."""


_PARTS = _Parts()


def _compiler() -> types.ModuleType:
    """The real ``torch._dynamo``, in the place of its stand-in."""
    if isinstance(sys.modules.get(_COMPILER), _LaterCompiler):
        del sys.modules[_COMPILER]
        sys.modules.pop(_MODES, None)
        sys.meta_path.remove(_PARTS)
        sys.modules["torch"].__dict__.pop("_dynamo", None)
    return importlib.import_module(_COMPILER)
