"""Import paths of earlier releases: they keep working for one more release, with a ``DeprecationWarning``.

A finder before all others, because the packages behind old names would find their modules a second time; any other
import pays one look into a dictionary.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # takes longer to import than all of memserve/__init__.py

MOVED = {
    "memserve.client": "memserve.store.client",
    "memserve.client.async_client": "memserve.store.client.async_client",
    "memserve.client.store_client": "memserve.store.client.client",
    "memserve.config": "memserve.base.config",
    "memserve.errors": "memserve.base.errors",
    "memserve.llm": "memserve.api.llm",
    "memserve.mempool": "memserve.kv",
    "memserve.mempool.mempool": "memserve.kv.mempool",
    "memserve.runtime": "memserve.host",
    "memserve.runtime.pool_peer": "memserve.host.pool_peer",
    "memserve.types": "memserve.base.types",
}
"""Module of an earlier release -> where its names are now."""


class MovedModules:
    """Imports the new module under the old name: a finder, and the loader of what it finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: no module of that name was ever public."""
        return ModuleSpec(fullname, cast("Loader", self), is_package=True) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The new module itself, so that classes are the same under both names."""
        moved_to = MOVED[spec.name]
        text = f"{spec.name} is {moved_to} now; the old path goes with the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        self._own_spec = import_module(moved_to).__spec__
        return sys.modules[moved_to]

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name; the import system has given it the old one's spec."""
        module.__spec__ = self._own_spec


def install() -> None:
    """Once a process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
