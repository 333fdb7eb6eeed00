"""What a process of ours leaves out of torch and transformers: torch's compiler, its distributed tensors, shapes of
operations on tensors without bytes, scipy, and kernels from the hub.

transformers imports them with every model: time at each start, and memory in each instance, for nothing that an
instance runs. Only for processes of ours: other code of a library's user may compile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import marshal
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memserve.system.process import cache_root, set_thread_environment

_COMPILER = "torch._dynamo"
_SHAPES = "torch._meta_registrations"
_NEED_SHAPES = ("torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store")
_MODES = f"{_COMPILER}._trace_wrapped_higher_order_op"


def leave_compiler_out(device: str) -> None:
    """For a process of ours that computes on a CPU, before it imports transformers.

    ``import triton`` fails from now on: 73 MB resident for kernels of a GPU. torch's compiler is imported when more of
    it is asked for than the marks that transformers puts on its functions. torch says that it was built without
    ``torch.distributed``, and transformers that there is no scipy, which losses of training need, and no package of
    kernels from the hub: to find its version it would look through all that is installed. Shapes of operations that
    torch knows in Python alone come with :func:`load_meta_shapes`.
    """
    set_thread_environment()
    remember_model_names()
    if "torch" not in sys.modules:
        _put_off_meta_shapes()
    import torch

    if device != "cpu" and torch.cuda.is_available():
        load_meta_shapes()
    else:
        _complete_generators(torch)
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # None: the import system's word for "absent"
        if _COMPILER not in sys.modules and "transformers.modeling_utils" not in sys.modules:
            _put_off_compiler(torch)
            torch.distributed.is_available = lambda: False
            _leave_packages_out()


def _put_off_meta_shapes() -> None:
    shapes = _LaterShapes(_SHAPES)
    sys.modules[_SHAPES] = shapes
    sys.meta_path.insert(0, _SHAPES_FIRST)


def _complete_generators(torch: types.ModuleType) -> None:
    """Among what is put off, torch gives its random generators their metaclass, without which it makes none."""
    if not isinstance(sys.modules.get(_SHAPES), _LaterShapes):
        return
    with contextlib.suppress(ImportError, AttributeError):  # of another version
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
    try:
        torch.Generator()
    except RuntimeError:
        load_meta_shapes()


def load_meta_shapes() -> bool:
    """Let operations on tensors without bytes have the shapes that torch knows in Python alone: few models use any of
    them before they have their weights, and 0.2 s of each start went into them. False: they were there already."""
    if not isinstance(sys.modules.get(_SHAPES), _LaterShapes):
        return False
    del sys.modules[_SHAPES]
    sys.meta_path.remove(_SHAPES_FIRST)
    importlib.import_module(_SHAPES)
    return True


class _LaterLoader(importlib.abc.Loader):
    """Of modules that need what was put off. That mostly imports them in turn: the inner import is the one that runs
    them."""

    def __init__(self, load: Callable[[], object]) -> None:
        """``load``: what was put off."""
        self._load = load
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Not in ``find_spec``: a module that is there when that returns would be run once more."""
        self._load()
        module = importlib.import_module(spec.name)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has run, under a specification of its own."""
        module.__spec__ = self._specs.pop(module.__name__)


_SHAPES_LOADER = _LaterLoader(load_meta_shapes)


class _LaterShapes(types.ModuleType):
    """Stands for the module with those shapes until something asks for one of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        load_meta_shapes()
        return getattr(sys.modules[_SHAPES], name)


class _ShapesFirst(importlib.abc.MetaPathFinder):
    """Is asked for what the compiler and its like take, and which needs those shapes."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, _SHAPES_LOADER) if name in _NEED_SHAPES else None


_SHAPES_FIRST = _ShapesFirst()


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


def remember_model_names() -> None:
    """Before transformers is imported: it reads the files of all its models for the names in them, a fifth of a second
    at each start. Here that is done once for an installation, and kept in the cache."""
    if "transformers" not in sys.modules and _NAMES not in sys.meta_path:
        sys.meta_path.insert(0, _NAMES)


class _RememberedNames(importlib.abc.MetaPathFinder):
    """Waits for the module of transformers that reads names, and changes how it does it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: types.ModuleType) -> None:
                run(module)
                _change_reader(module)

            setattr(spec.loader, "exec_module", run_and_change)  # noqa: B010  # mypy: methods are not assigned to
        return spec


_NAMES = _RememberedNames()


def _change_reader(module: types.ModuleType) -> None:
    read: Any = getattr(module, "create_import_structure_from_path", None)
    package = Path(str(module.__file__)).parents[1]

    @functools.cache
    def names_of_models() -> Any:
        record = _record_of(package)
        return _remembered(record, lambda: read(package / "models")) if record is not None else read(package / "models")

    def of_path(path: Any) -> Any:  # it asks twice: for the folder, and for a file in it
        folder = Path(path).parent if os.path.isfile(path) else Path(path)
        return names_of_models() if folder == package / "models" else read(path)

    if read is not None:
        setattr(module, "create_import_structure_from_path", of_path)  # noqa: B010  # its types hide the name


def _record_of(package: Path) -> Path | None:
    """The file in the cache that is of this installation of ``package``. None: it is a checkout,
    whose files may change at any time."""
    installed = [file.stat() for file in package.parent.glob(f"{package.name}-*.dist-info/RECORD")]
    if len(installed) != 1:
        return None
    words = f"{package} {installed[0].st_size} {installed[0].st_mtime_ns} {sys.implementation.cache_tag}"
    digest = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
    return cache_root() / "imports" / f"{package.name}-{digest}"


def _remembered(record: Path, read: Callable[[], Any]) -> Any:
    """What ``record`` has; else what ``read`` finds, for the next process."""
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        names = marshal.loads(record.read_bytes())  # as trusted as the converted models beside it
        if isinstance(names, dict) and names:
            return names
    names = read()
    with contextlib.suppress(OSError, ValueError):  # a full disk, or something that marshal does not know
        record.parent.mkdir(parents=True, exist_ok=True)
        fresh = record.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(marshal.dumps(names))
        fresh.rename(record)
    return names


def _mark(function: Any = None, *_: object, **__: object) -> Any:
    """A decorator that changes nothing, with or without arguments: what it would tell the compiler, no code asks."""
    return function if callable(function) else lambda marked: marked


class _LaterCompiler(types.ModuleType):
    """Stands for ``torch._dynamo`` until something needs it."""

    allow_in_graph: Callable[..., Any] = staticmethod(_mark)
    assume_constant_result: Callable[..., Any] = staticmethod(_mark)
    disable: Callable[..., Any] = staticmethod(_mark)
    mark_static_address: Callable[..., Any] = staticmethod(_mark)  # of each cache with states that transformers makes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_compiler(), name)


class _LaterMode:
    """Stands for the mode of the compiler's that masks are made under: an instance of it is the real one's."""

    def __new__(cls) -> Any:
        _compiler()
        return importlib.import_module(_MODES).TransformGetItemToIndex()


class _Parts(importlib.abc.MetaPathFinder):
    """Is asked for modules of the compiler while its stand-in is there: the compiler comes first, mostly with them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, _PARTS_LOADER) if name.startswith(f"{_COMPILER}.") else None


_PARTS = _Parts()


def _compiler() -> types.ModuleType:
    """The real ``torch._dynamo``, in the place of its stand-in."""
    load_meta_shapes()
    if isinstance(sys.modules.get(_COMPILER), _LaterCompiler):
        del sys.modules[_COMPILER]
        sys.modules.pop(_MODES, None)
        sys.meta_path.remove(_PARTS)
        sys.modules["torch"].__dict__.pop("_dynamo", None)
    return importlib.import_module(_COMPILER)


_PARTS_LOADER = _LaterLoader(_compiler)
