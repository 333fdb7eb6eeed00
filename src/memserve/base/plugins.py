"""Plug-ins: parts that other distributions bring, found by their entry points (docs/guides/PLUGINS.md).

::

    [project.entry-points."memserve.routing_policies"]
    fewest-sequences = "my_package.policies:fewest_sequences"

Each :class:`PluginGroup` is a table of names. The product's own parts stand in the same tables, and are loaded in the
same way. An own name is never taken by another distribution; a name that two distributions bring is an error where it
is used. What a plug-in is called with, and what it must not do, says the protocol that its group names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from memserve.base.errors import UserError

REASON_CHARS_MAX = 500
"""Of what a plug-in says."""


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """An entry point of another distribution."""

    group: str
    name: str
    distribution: str
    version: str
    problem: str
    """Why it cannot be used. Empty: it can."""


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """All parts of one kind, by name."""

    group: str
    """Of the entry points."""
    noun: str
    """One of them, in words."""
    param: str
    """The option that names one."""
    arguments: tuple[str, ...]
    """What is given to it by position, each by its name."""
    protocol: str
    """Where it says what is expected of it."""
    built_in: Mapping[str, str]
    """The product's: name -> ``module:attribute``."""

    def names(self) -> list[str]:
        """All that can be named: the product's own, then those of other distributions, sorted."""
        return [*self.built_in, *sorted({entry.name for entry in _installed(self.group)} - self.built_in.keys())]

    def check_name(self, name: str) -> None:
        """Raise :class:`UserError` where no plug-in is called ``name``. Loads nothing."""
        if name not in self.built_in and name not in (names := self.names()):
            message = f"unknown {self.noun} {name[:200]!r}"
            raise UserError(message, hint=f"use one of {', '.join(names)}", param=self.param)

    def load(self, name: str) -> Any:
        """What is called ``name``, which takes :attr:`arguments`. Raises :class:`UserError` where there is none, where
        two distributions bring one, where it cannot be imported, and where it takes other arguments."""
        self.check_name(name)
        if name in self.built_in:
            return EntryPoint(name, self.built_in[name], self.group).load()
        entries = [entry for entry in _installed(self.group) if entry.name == name]
        if len(entries) > 1:
            brought = ", ".join(_label(entry) for entry in entries)
            raise UserError(
                f"{self.noun} {name!r} is brought by {brought}", hint="uninstall all but one", param=self.param
            )
        return self._load_entry(entries[0])

    def _load_entry(self, entry: EntryPoint) -> Any:
        try:
            plugin = entry.load()
            check_arguments(plugin, self.arguments)
        except (Exception, SystemExit) as error:  # whatever its module does when it is imported
            message = f"{self.noun} {entry.name!r} ({entry.value} of {_label(entry)}) cannot be loaded: {error}"
            hint = f"it is to be as {self.protocol} says"
            raise UserError(message[:REASON_CHARS_MAX], hint=hint, param=self.param) from error
        return plugin

    def installed_plugins(self) -> Iterator[InstalledPlugin]:
        """Those of other distributions, each loaded to see whether it can be used."""
        for entry in _installed(self.group):
            problem = ""
            if entry.name in self.built_in:
                problem = f"memserve's own {self.noun} {entry.name!r} is used"
            else:
                try:
                    self.load(entry.name)
                except UserError as error:
                    problem = error.message
            distribution, version = (entry.dist.name, entry.dist.version) if entry.dist is not None else ("?", "?")
            yield InstalledPlugin(self.group, entry.name, distribution, version, problem)


@functools.cache
def _installed(group: str) -> tuple[EntryPoint, ...]:
    """Entry points of other distributions: reading them takes longer than most commands."""
    return tuple(entry_points(group=group))


def _label(entry: EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def check_arguments(plugin: Any, arguments: tuple[str, ...]) -> None:
    """Raise ``TypeError`` unless ``plugin`` can be called with ``arguments``, by position."""
    wanted = f"({', '.join(arguments)})"
    if not callable(plugin):
        raise TypeError(f"it cannot be called with {wanted}")
    try:
        signature = inspect.signature(plugin)
    except ValueError:
        return  # written in C: the first call shows it
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"it cannot be called with {wanted}: {error}") from None


def check_methods(plugin: Any, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ``TypeError`` unless ``plugin`` has ``methods``, each with these arguments."""
    for name, arguments in methods.items():
        try:
            check_arguments(getattr(plugin, name, None), arguments)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None


def split_settings(text: str, flag: str) -> tuple[str, dict[str, str]]:
    """Name and settings of ``NAME:KEY=VALUE,KEY=VALUE``, or of ``NAME`` alone, which ``flag`` has. Raises
    :class:`UserError`."""
    name, _, rest = text.partition(":")
    settings: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not key or not equals or key in settings:
            hint = f"each setting once: {flag} {name}:KEY=VALUE,KEY=VALUE"
            raise UserError(f"cannot read {part[:200]!r} in {flag} {text[:200]}", hint=hint)
        settings[key] = value
    return name, settings


ROUTING_POLICIES = PluginGroup(
    "memserve.routing_policies",
    "policy",
    "policy",
    ("ask", "first", "decoders"),
    "memserve.router.placement.candidates.Policy",
    {
        "least-load": "memserve.router.placement.routing:least_load",
        "session": "memserve.router.placement.routing:session",
        "prompt-tree": "memserve.router.placement.routing:prompt_tree",
        "cost": "memserve.router.placement.routing:cost",
        "affinity": "memserve.router.placement.routing:affinity",
        "best-fit": "memserve.router.admission.ledger:best_fit_route",
    },
)
ADMISSION_CONTROLLERS = PluginGroup(
    "memserve.admission_controllers",
    "admission controller",
    "admission",
    ("settings",),
    "memserve.router.admission.needs.AdmissionRule",
    dict.fromkeys(("none", "bounded", "memory", "cache"), "memserve.router.admission.needs:admits_all"),
)
KV_EVENT_FORMATS = PluginGroup(
    "memserve.kv_event_formats",
    "format of KV events",
    "engine",
    ("payload",),
    "memserve.fleet.kv_formats.KvEventFormat",
    dict.fromkeys(("vllm", "sglang"), "memserve.fleet.kv_formats:decode_vllm"),
)
STORE_BACKENDS = PluginGroup(
    "memserve.store_backends",
    "store backend",
    "ssd",
    ("location", "nbytes"),
    "memserve.store.host.backends.StoreBackend",
    {"file": "memserve.store.host.backends:FileBackend"},
)
GROUPS = (ROUTING_POLICIES, ADMISSION_CONTROLLERS, KV_EVENT_FORMATS, STORE_BACKENDS)
