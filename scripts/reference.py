"""Writes the pages of ``docs/reference`` from the code: ``python scripts/reference.py [--check]``.

The commands come from the typer app, the options from the config classes and the docstring below each field: an
option is declared and described once. The HTTP page has the same source as ``/openapi.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import typer.main

from memserve.api.batches.batch import BATCH_MOVES
from memserve.api.batches.routes import batch_families
from memserve.api.http.config import ApiConfig, EdgeConfig
from memserve.api.metrics.http import ApiMetrics, Snapshot
from memserve.api.openai import openapi
from memserve.base import config, types
from memserve.base.options import NEGATED, field_docs, options_of
from memserve.base.units import human_bytes
from memserve.cli.main import command_line
from memserve.fleet.app import FleetReading
from memserve.fleet.messages import EngineView
from memserve.host.stats import EngineStats, RouterStats
from memserve.instance.cluster.idempotency import KEPT_ANSWER
from memserve.instance.scheduler.sequence import SEQUENCE
from memserve.instance.stats import InstanceStats
from memserve.kv.transfer.imports import IMPORT
from memserve.kv.transfer.sender import EXPORT
from memserve.router.machine import Cluster
from memserve.router.report import AdmissionStats
from memserve.router.requests.idempotency import ANSWER
from memserve.router.requests.requests import REQUEST_PHASES

_ROWS = importlib.util.spec_from_file_location("openai_rows", Path(__file__).with_name("openai_rows.py"))
assert _ROWS is not None and _ROWS.loader is not None
openai_rows = importlib.util.module_from_spec(_ROWS)
sys.modules["openai_rows"] = openai_rows  # dataclasses look their module up
_ROWS.loader.exec_module(openai_rows)

MACHINES = (REQUEST_PHASES, ANSWER, SEQUENCE, KEPT_ANSWER, IMPORT, EXPORT, BATCH_MOVES)
MACHINES_HEAD = """Each object moves through phases by its own table; a move that is not in the table is a bug, and
raises an error."""

DOCS = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGE, HTTP_PAGE = DOCS / "REFERENCE.md", DOCS / "HTTP.md"
HEAD = """# Reference

Written by `make docs` from the code; do not edit. A test says when it is out of date.
"""


def default_of(field: dataclasses.Field[Any] | msgspec.structs.FieldInfo) -> str:
    """A field's default in readable form."""
    nothing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if field.default not in nothing:
        if field.name.endswith("_bytes") and field.default:
            return human_bytes(field.default)
        return f"`{field.default!r}`"
    if field.default_factory not in nothing:
        return f"`{field.default_factory.__name__}()`" if isinstance(field.default_factory, type) else "computed"
    return "required"


def cells(*values: str) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"


def class_section(cls: Any) -> list[str]:
    """The section of a dataclass or struct: its docstring and its fields."""
    docs, types_of = field_docs(cls), cls.__annotations__
    fields = msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else dataclasses.fields(cls)
    rows = [cells(f"`{f.name}`", f"`{types_of[f.name]}`", default_of(f), docs[f.name]) for f in fields]
    text = inspect.cleandoc(cls.__doc__ or "")
    table = "\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *rows])
    return [f"### {cls.__name__}", text, table]


def option_rows(command: Any) -> list[str]:
    """The arguments and options of one command; vLLM's names for them have no separate rows."""
    rows, hidden = [], {name for p in command.params if getattr(p, "hidden", False) for name in p.opts}
    vllm = {}
    for entry in options_of(config.EngineOptions):
        if entry.vllm_flag in hidden:
            vllm[entry.flag] = f"--no-{entry.vllm_flag[2:]}" if entry.form is NEGATED else entry.vllm_flag
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion") or hidden & {*parameter.opts}:
            continue
        spelling = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            spelling = f"`{parameter.name.upper()}`"
        default = parameter.default() if callable(parameter.default) else parameter.default
        shown = "" if default in (None, "", ()) or "UNSET" in repr(default) else f"`{default}`"
        alias = f" vLLM's name: `{vllm[parameter.opts[0]]}`." if parameter.opts[0] in vllm else ""
        rows.append(cells(spelling, shown, (getattr(parameter, "help", None) or "") + alias))
    return rows


def command_sections(command: Any, name: str) -> list[str]:
    """The sections of a command and its subcommands."""
    text = inspect.cleandoc(command.help or "")
    sections = [f"### `{name}`", text] if name.count(" ") else []
    if rows := option_rows(command):
        sections.append("\n".join(["| option | default | |", "| --- | --- | --- |", *rows]))
    for child, its_command in getattr(command, "commands", {}).items():
        sections += command_sections(its_command, f"{name} {child}")
    return sections


def metric_families() -> list[Any]:
    """All metrics that ``/metrics`` can show: of the edge, one engine, a router with its instances, and a fleet."""
    alone = EngineStats(instance=InstanceStats())
    machine = Cluster(config.ClusterConfig())
    router = RouterStats.from_cluster(machine.stats(), machine.instances(), 0)
    engine = [*Snapshot(alone, True).collect(), *Snapshot(router, True).collect()]
    fleet = FleetReading((EngineView("", "", up=False),), AdmissionStats())
    engine += fleet.collect()
    engine += batch_families(Counter(), 0, 0, 0, Counter())
    edge = ApiMetrics()
    families = {family.name: family for family in [*edge.registry.collect(), *edge.by_tenant.collect(), *engine]}
    return [families[name] for name in sorted(families)]


def metric_rows() -> list[str]:
    """A row for each metric, under the name that Prometheus stores."""
    suffixes = {"counter": "_total"}
    return [
        cells(f"`{family.name}{suffixes.get(family.type, '')}`", family.type, family.documentation)
        for family in metric_families()
    ]


def page() -> str:
    """The whole page."""
    options = [
        config.EngineOptions, config.InstanceConfig, config.PoolConfig, config.SchedulerConfig, config.ExchangeConfig,
        config.ClusterConfig, config.AdmissionConfig, config.MemberConfig, EdgeConfig,
        ApiConfig,
    ]  # fmt: skip
    options += [types.Request, types.SamplingParams, types.StopParams, types.KVGeometry]
    sections = [HEAD.strip(), "## Commands", *command_sections(typer.main.get_command(command_line()), "memserve")]
    sections += ["## Options and words", *(part for cls in options for part in class_section(cls))]
    table = "\n".join(["| metric | kind | |", "| --- | --- | --- |", *metric_rows()])
    sections += ["## State machines", MACHINES_HEAD, *(machine.markdown() for machine in MACHINES)]
    sections += ["## Metrics", "What `GET /metrics` shows, in Prometheus' text form.", table]
    text = "\n\n".join(section for section in sections if section) + "\n"
    return text.replace("``", "`")  # docstrings are written in reStructuredText


LARGE = 1 << 20
"""Larger limits are shown as powers of two."""

HTTP_HEAD = """# The HTTP API

Written by `make docs` from the code; do not edit. The same as an OpenAPI document: `GET /openapi.json`.

Paths and fields are OpenAI's, below `/v1/messages` Anthropic's; further fields (`top_k`, `structured_outputs`,
`session`, ...) are extensions, under vLLM's names where it has them. A field that is malformed or not supported is an
error that names it; so is an unknown one, except where vLLM knows it (and with `--lenient`): then it has no effect, and
`x-memserve-ignored` names it, as it names fields that are accepted and promise nothing. With an API key every path
under `/v1`, and `/invocations`, `/tokenize`, `/detokenize`, `/tokenizer_info`, `/rerank`, `/v2/rerank`, `/score`,
`/pooling` and `/v2/embed`, require `Authorization: Bearer KEY` or `x-api-key: KEY`. Every answer has an
`x-request-id`: the client's own, if it sent one. The examples are for a server at `http://127.0.0.1:8000`; `MODEL`
stands for the `id` that `/v1/models` shows. Tests run them.

Completions, chats and messages take an `Idempotency-Key` (1 to 255 printable characters): the same key with the same
body gets the same answer again, continued where it is not complete. Events of such a stream have an `id`; with
`Last-Event-ID` it goes on behind that event, and ends with an error if the answer has no such event
([how](../concepts/CONTROL_PLANE.md#answers-that-outlive-the-router)).
"""


def http_page() -> str:
    """The page of the HTTP API."""
    sections = [HTTP_HEAD.strip(), "## Operations"]
    for operation in openapi.OPERATIONS:
        sections += [f"### {operation.method} {operation.path}", operation.about, f"Answer: {operation.answers}"]
        if operation.body is not None:
            sections.append(f"Body: [{operation.body.__name__}](#{operation.body.__name__.lower()}).")
        if operation.form:
            sections.append("Form: " + "; ".join(f"`{name}`: {text}" for name, text in operation.form) + ".")
        for example in operation.examples:
            sections.append(f"{example.title}:\n\n    {curl(operation, example)}")
    rows = [cells(row.what, row.works, f"`tests/{row.test}`") for row in openai_rows.ROWS]
    sections += ["## What of OpenAI's reference works", openai_rows.HEAD]
    sections.append("\n".join(["| what | works | test |", "| --- | --- | --- |", *rows]))
    rows = [cells(row.what, row.works, f"`tests/{row.test}`") for row in openai_rows.ANTHROPIC_ROWS]
    sections += ["## What of Anthropic's reference works", openai_rows.ANTHROPIC_HEAD]
    sections.append("\n".join(["| what | works | test |", "| --- | --- | --- |", *rows]))
    sections.append("## Errors")
    sections.append(
        'Every error is `{"error": {"message", "type", "param", "code"}}`, of `/v1/messages` '
        '`{"type": "error", "error": {"type", "message"}, "request_id"}`.'
    )
    rows = [cells(str(e.status), f"`{e.code}`" if e.code else "none", e.when) for e in openapi.ERRORS]
    sections.append("\n".join(["| status | code | when |", "| --- | --- | --- |", *rows]))
    sections.append("## Bodies")
    schemas = openapi.openapi()["components"]["schemas"]
    for body in openapi.BODIES:
        sections += [f"### {body.__name__}", schema_table(schemas[body.__name__])]
    return "\n\n".join(sections) + "\n"


def curl(operation: openapi.Operation, example: openapi.Example) -> str:
    """The example as a command line."""
    words = ["curl", *([] if operation.method == "GET" else ["-X", operation.method])]
    words.append(f"http://127.0.0.1:8000{example.path or operation.path}")
    if example.body is not None:
        words += ["-H", "content-type: application/json", "-d", json.dumps(example.body)]
    return " ".join(shlex.quote(word) if " " in word else word for word in words)


def schema_table(schema: dict[str, Any]) -> str:
    """The table of one body's fields."""
    required = schema.get("required", ())
    rows = [
        cells(f"`{name}`" + (" (required)" if name in required else ""), allowed(field), field.get("description", ""))
        for name, field in schema["properties"].items()
    ]
    return "\n".join(["| field | type | |", "| --- | --- | --- |", *rows])


def allowed(field: dict[str, Any]) -> str:
    """Type and range of a field, in words."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return " or ".join(_kind(kind) for kind in kinds)


def _kind(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        return str(kind["$ref"]).rsplit("/", 1)[1]
    if "enum" in kind:
        return " or ".join(f"`{value}`" for value in kind["enum"])
    name = {"array": "list", "object": "object"}.get(kind.get("type", ""), kind.get("type", "any"))
    if name == "list" and kind.get("items"):
        name = f"list of {_kind(kind['items'])}"
    low = kind.get("minimum", kind.get("exclusiveMinimum"))
    high = kind.get("maximum")
    if low is not None or high is not None:
        opening = "(" if "exclusiveMinimum" in kind else "["
        return f"{name} in {opening}{_number(low)}, {_number(high)}{')' if high is None else ']'}"
    if most := kind.get("maxLength", kind.get("maxItems", kind.get("maxProperties"))):
        return f"{name}, at most {most:,} {'characters' if name == 'string' else 'entries'}"
    return str(name)


def _number(value: float | None) -> str:
    if value is None:
        return "..."
    if isinstance(value, int) and abs(value) > LARGE:
        power = (abs(value) + 1).bit_length() - 1
        rest = abs(value) - (1 << power)
        return f"{'-' if value < 0 else ''}2^{power}{' - 1' if rest else ''}" if rest in (0, -1) else f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Write the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    args = parser.parse_args()
    pages = {PAGE: page(), HTTP_PAGE: http_page()}
    if args.check:
        return int(any(not place.exists() or place.read_text() != text for place, text in pages.items()))
    for place, text in pages.items():
        place.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
