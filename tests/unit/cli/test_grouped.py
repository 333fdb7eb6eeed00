"""Options that several commands share: one dataclass, the same flags everywhere."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from typer.testing import CliRunner

from memserve.cli.grouped import grouped
from memserve.cli.options import DEFAULTS, EngineFlags, GateFlags
from memserve.config import AdmissionConfig
from memserve.types import Admission


@dataclasses.dataclass(frozen=True)
class Size:
    """Two flags."""

    width: Annotated[int, typer.Option("--wide", min=1, help="How wide.")] = 3
    flat: Annotated[bool, typer.Option("--flat")] = False


def said(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()

    @app.command()
    @grouped
    def draw(name: Annotated[str, typer.Argument()], *, again: Annotated[int, typer.Option()] = 1, size: Size) -> None:
        """Draw it."""
        typer.echo(f"{name} {size.width} {size.flat} {again}")

    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output.strip()


def test_fields_are_flags_with_their_defaults_and_limits() -> None:
    assert said("box") == (0, "box 3 False 1")
    assert said("box", "--wide", "7", "--flat", "--again", "2") == (0, "box 7 True 2")
    assert said("box", "--wide", "0")[0] == 2
    code, text = said("--help")
    assert code == 0 and "Draw it." in text and "How wide." in text and "--size" not in text


def test_flags_of_an_engine_that_nobody_gives_are_its_defaults() -> None:
    """A default that was written twice would have two values some day."""
    assert EngineFlags().options() == DEFAULTS
    assert {field.name.removesuffix("_bytes") for field in dataclasses.fields(DEFAULTS)} - {"caching"} == (
        {field.name for field in dataclasses.fields(EngineFlags)} - {"no_cache"}
    )
    assert not EngineFlags(no_cache=True).options().caching
    assert GateFlags().config() == AdmissionConfig()
    assert GateFlags(Admission.BOUNDED, 4).config(["a=3"]).weights == (("a", 3),)
