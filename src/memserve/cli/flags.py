"""Flags of commands, made from the configs that declare them.

Typer makes a flag of each parameter. A ``grouped`` command may also take a config::

    @grouped
    def serve(engine: EngineOptions, port: Annotated[int, typer.Option()] = 8000) -> None: ...

This command has the flags of all options of ``EngineOptions`` (:mod:`memserve.base.options`) and gets them as one
value. ``Annotated[EngineOptions, Only("model", "threads")]`` keeps two of them; the parameter's default replaces
theirs. vLLM's names are hidden flags.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from memserve.api.http.config import ApiConfig, EdgeConfig, ServerConfig
from memserve.base.config import ClusterConfig, EngineOptions
from memserve.base.errors import UserError
from memserve.base.options import Option, contradiction, options_of, with_values
from memserve.base.types import LINKS
from memserve.fleet.messages import FleetOptions
from memserve.system.secrets import GivenKeys

if TYPE_CHECKING:
    from memserve.api.http.tls import Tls

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
DEFAULT_LINK = "auto"
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LOG_LEVEL = "warning"

DrainS = Annotated[float, typer.Option(min=0, help="Seconds that streams may go on after SIGTERM or SIGHUP.")]
HealthFile = Annotated[
    Path | None,
    typer.Option(
        help="File that says once a second what this process is: member, outside (it works without a router) or drains."
        " For probes of containers; a file that is older than a minute is of a process that hangs."
    ),
]
Link = Annotated[str, typer.Option(help=f"How KV moves. {'; '.join(f'{name}: {how}' for name, how in LINKS.items())}.")]
LogLevel = Annotated[str, typer.Option(help=f"Lowest level that is logged: {', '.join(LOG_LEVELS)}.")]


@dataclass(frozen=True, slots=True)
class EnginesBeside:
    """Servers of other projects beside own models, behind one HTTP server."""

    fleet: FleetOptions
    config: ClusterConfig
    """Of the own models' routers; its admission is theirs alone."""
    file: Path | None = None
    """Which engines there are: the owner of several routers writes it, and the others read it. None: there is one
    router."""
    router: str = ""
    """The name of a router beside the owner. Empty: it is the owner."""
    owner_url: str = ""
    """Where the owner answers, at which engines join and leave."""


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The HTTP server: where it listens and how it answers, its keys, and its limits."""

    server: ServerConfig
    api_keys: GivenKeys
    metrics_keys: GivenKeys
    tls: Tls | None
    """None: plain HTTP."""
    limits: EdgeConfig
    api: ApiConfig = field(default_factory=ApiConfig)
    beside: EnginesBeside | None = None
    """None: it answers for own models alone."""

    def api_url(self, port: int) -> str:
        """Where clients of this host find the API; ``port`` is the one that listens."""
        host, local = self.server.host, {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        shown = local.get(host, f"[{host}]" if ":" in host else host)
        return f"http{'' if self.tls is None else 's'}://{shown}:{port}/v1"


class Only:
    """Keeps these options of a config, and no others."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def choose_options(self, options: list[Option]) -> list[Option]:
        """The options that stay. Raises :class:`KeyError` for an unknown name."""
        by_name = {option.name: option for option in options}
        return [by_name[name] for name in self._names]


class Without(Only):
    """Keeps all options of a config but these."""

    def choose_options(self, options: list[Option]) -> list[Option]:
        """The options that stay."""
        dropped = super().choose_options(options)
        return [option for option in options if option not in dropped]


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter that is a config: its options, each with the name of its own parameter."""

    default: Any
    options: dict[str, Option]
    vllm: dict[str, Option]

    @classmethod
    def from_parameter(cls, parameter: inspect.Parameter) -> _Group | None:
        """The group of ``parameter``; ``None``: the parameter is not a config."""
        annotation, only = parameter.annotation, None
        if get_origin(annotation) is Annotated:
            annotation, *marks = get_args(annotation)
            only = next((mark for mark in marks if isinstance(mark, Only)), None)
        if not is_dataclass(annotation):
            return None
        default = annotation() if parameter.default is inspect.Parameter.empty else parameter.default  # type: ignore[operator]  # a class
        options = options_of(default) if only is None else only.choose_options(options_of(default))
        return cls(
            default,
            {f"{parameter.name}_{option.name}": option for option in options},
            {f"vllm_{option.vllm}": option for option in options if option.vllm},
        )

    def flag_parameters(self) -> Iterator[inspect.Parameter]:
        """One for each flag."""
        for name, option in self.options.items():
            yield _parameter(
                name, option.kind, _typer_option(option, _spelling(option.flag, option)), option.flag_default
            )
        for name, option in self.vllm.items():
            kind = (option.vllm_form.kind if option.vllm_form else bool if option.kind is bool else option.kind) | None
            least = option.least if option.vllm_form is None else None
            yield _parameter(name, kind, _hidden(_spelling(option.vllm_flag, option, with_negation=True), least), None)

    def take_values(self, arguments: dict[str, Any], is_default: Callable[[str], bool]) -> Any:
        """The config that the flags describe; removes them from ``arguments``."""
        values = {}
        for name, option in self.options.items():
            raw = arguments.pop(name)
            if not is_default(name):
                values[option.path] = option.parse_value(raw)
        for name, option in self.vllm.items():
            raw = arguments.pop(name)
            if raw is None:
                continue
            value = option.read_vllm(raw)
            if values.setdefault(option.path, value) != value:
                raise contradiction(option.flag, option.vllm_flag)
        return with_values(self.default, values)


def _parameter(name: str, kind: Any, flag: Any, default: Any) -> inspect.Parameter:
    annotation = Annotated[kind, flag]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typer_option(option: Option, spelling: str) -> Any:
    return typer.Option(spelling, min=option.least, max=option.most, help=option.help)


def _hidden(spelling: str, least: float | None = None) -> Any:
    return typer.Option(spelling, hidden=True, min=least, help="vLLM's name of an option.")


def _spelling(flag: str, option: Option, *, with_negation: bool = False) -> str:
    """The flag; for a switch also its ``--no-`` form, unless the option is declared with one form only."""
    return f"{flag}/--no-{flag[2:]}" if option.kind is bool and (with_negation or option.form is None) else flag


def flag(config: type, name: str) -> Any:
    """One option of ``config``, to annotate a separate parameter with."""
    (option,) = Only(name).choose_options(options_of(config))
    return _typer_option(option, option.flag)


Model = Annotated[str, flag(EngineOptions, "model")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as Typer sees it: a parameter that is a config is replaced by the flags of its options."""
    signature = inspect.signature(command, eval_str=True)
    parameter_groups = {name: _Group.from_parameter(parameter) for name, parameter in signature.parameters.items()}
    groups = {name: group for name, group in parameter_groups.items() if group is not None}

    @functools.wraps(command)
    def spread(typer_context: typer.Context, **arguments: Any) -> None:
        def is_default(name: str) -> bool:
            source = typer_context.get_parameter_source(name)
            return source is None or source.name == "DEFAULT"

        together = {name: group.take_values(arguments, is_default) for name, group in groups.items()}
        command(**arguments, **together)

    parameters = [inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in signature.parameters.items():
        plain = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += groups[name].flag_parameters() if name in groups else plain
    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect reads it
    return spread


def set_up_logging(level: str, process: str = "") -> None:
    """Log to stderr from ``level`` on, each line with the name of the ``process`` where there are several.

    Raises :class:`UserError` for an unknown level.
    """
    if level not in LOG_LEVELS:
        raise UserError(f"unknown log level {level!r}", hint=f"use one of {', '.join(LOG_LEVELS)}", param="log_level")
    name = f"{process} " if process else ""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format=f"%(asctime)s {name}%(levelname)s %(name)s: %(message)s"
    )


def check_name(name: str) -> None:
    """Raise :class:`UserError` for a name that stands for an address, whichever process listens there."""
    if name in ("router", "store"):
        raise UserError(f"no member can be called {name!r}", hint="take another --name", param="name")
