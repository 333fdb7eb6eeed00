"""Options that belong together, as one parameter of several commands (level 4).

Typer makes a flag of each parameter. A command that is ``grouped`` may also take a dataclass whose fields are options::

    @grouped
    def serve(engine: EngineFlags, port: Annotated[int, typer.Option()] = 8000) -> None: ...

has the flags of all fields of ``EngineFlags``, in order and with their defaults, and gets them as one value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as Typer shall see it: a parameter whose type is a dataclass is replaced by its fields."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {  # dataclasses
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        together = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **together)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        plain = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += _flags_of(groups[name]) if name in groups else plain
    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect reads it
    return spread


def _flags_of(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
