"""Options: each is declared once, as a field of a config dataclass.

::

    max_running: int = option(64, least=1, vllm="max_num_seqs")
    \"\"\"Sequences computed together.\"\"\"

is the flag ``--max-running`` of every command that takes the config, a keyword of :class:`memserve.LLM`, a word in the
command lines that :func:`command_line_of` writes, and a row of the reference. The string below the field is the help
text. What vLLM calls the option is understood everywhere too.

What options say of single tenants: how it is written on a command line, and read.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from memserve.base.errors import UserError
from memserve.base.units import GIB, MIB, NS_PER_MS, NS_PER_S, flag_bytes, ns_from_s, parse_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form:
    """How a value is written on a command line, where that differs from the field's own type."""

    kind: Any
    read: Callable[[Any], Any]
    show: Callable[[Any], Any]
    """The field's value as a default of the flag; a value of ``kind``, or None."""


FOLDER_BYTES_MIN = 64 * MIB


def read_folder(text: str, flag: str) -> tuple[str, int]:
    """Folder and bytes of a text ``DIR=20GiB``, which ``flag`` has. Raises :class:`UserError` for anything else."""
    folder, _, size = text.rpartition("=")
    param = flag.lstrip("-").replace("-", "_")
    if not folder or not size:
        hint = f"a folder of that disk and a size, for example {flag} /mnt/nvme0/memserve=20GiB"
        raise UserError(f"cannot read {flag} {text!r}", hint=hint, param=param)
    nbytes = parse_bytes(size)
    if nbytes < FOLDER_BYTES_MIN:
        hint = f"at least {flag_bytes(FOLDER_BYTES_MIN)}: {flag} {folder}={flag_bytes(FOLDER_BYTES_MIN)}"
        raise UserError(f"{flag} {text} is too small to keep anything", hint=hint, param=param)
    return folder, nbytes


SIZE = Form(str, parse_bytes, flag_bytes)
KV_FOLDER = Form(str, lambda text: read_folder(text, "--kv-ssd"), lambda folder: f"{folder[0]}={flag_bytes(folder[1])}")
SECONDS = Form(float, ns_from_s, lambda ns: ns / NS_PER_S)
MILLISECONDS = Form(float, lambda ms: ns_from_s(ms / 1000), lambda ns: ns / NS_PER_MS)
GBIT_S = Form(float, lambda gigabits: gigabits * 1e9 / 8, lambda rate: rate * 8 / 1e9)
MEBIBYTES = Form(int, lambda count: count * MIB, lambda size: size // MIB)
GIBIBYTES = Form(float, lambda count: round(count * GIB), lambda size: size / GIB)
NEGATED = Form(bool, lambda flag_value: not flag_value, lambda value: not value)
"""A flag that switches the field off; its help text is what follows ``False:`` in the field's text."""
MANY = Form(
    list[str],
    lambda flag_value: (flag_value,) if isinstance(flag_value, str) else tuple(flag_value),
    lambda value: list(value) or None,
)


@dataclass(frozen=True, slots=True)
class _Marks:
    """What :func:`option` says about a field."""

    flag: str
    form: Form | None
    least: float | None
    most: float | None
    vllm: str
    vllm_form: Form | None


def option(
    default: Any,
    flag: str = "",
    *,
    form: Form | None = None,
    least: float | None = None,
    most: float | None = None,
    vllm: str = "",
    vllm_form: Form | None = None,
) -> Any:
    """A field that people set. ``flag``: its spelling, where it is not the field's name.

    ``least`` and ``most`` bound the flag's value. ``vllm``: vLLM's name for the option, as a keyword; ``vllm_form``:
    how vLLM writes its value, where that differs.
    """
    marks = _Marks(flag, form, least, most, vllm, vllm_form)
    return dataclasses.field(default=default, metadata={"option": marks})


def option_of(config: type, name: str) -> Any:
    """A field that people set, declared as field ``name`` of another config: with its flag, default and text."""
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    metadata = {"option": field.metadata["option"], "doc": field_docs(config)[name]}
    return dataclasses.field(default=field.default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a config."""

    path: tuple[str, ...]
    """Names of fields, from the config down to the option."""
    flag: str
    kind: Any
    """Type of the flag's value."""
    form: Form | None
    default: Any
    """The field's default."""
    least: float | None
    most: float | None
    vllm: str
    vllm_form: Form | None
    doc: str

    @property
    def name(self) -> str:
        """Name of the field."""
        return self.path[-1]

    @property
    def flag_default(self) -> Any:
        """The default as the flag shows it."""
        return self.default if self.form is None or self.default is None else self.form.show(self.default)

    @property
    def help(self) -> str:
        """One text for ``--help``."""
        text = self.doc.replace("``", "")
        if self.form is NEGATED:
            return text.partition("False: ")[2]
        return text.replace("None: ", "Default: ", 1) if self.default is None else text

    @property
    def vllm_flag(self) -> str:
        """vLLM's flag; empty: vLLM has no such option."""
        return "--" + self.vllm.replace("_", "-") if self.vllm else ""

    def parse_value(self, raw_value: Any) -> Any:
        """The field's value for ``raw_value``, the flag's value. Raises :class:`UserError` for one that cannot be
        read."""
        return _read(self.form, raw_value)

    def read_vllm(self, raw_value: Any) -> Any:
        """The field's value for ``raw_value``, the value of vLLM's flag."""
        return _read(self.vllm_form, raw_value)


def _read(form: Form | None, raw_value: Any) -> Any:
    return raw_value if form is None or raw_value is None else form.read(raw_value)


def options_of(config: Any) -> list[Option]:
    """The options of ``config`` with their values as defaults, in order, those of nested configs included.

    A class stands for an object with its defaults.
    """
    return list(_walk(config() if isinstance(config, type) else config, ()))


def _walk(config: Any, path: tuple[str, ...]) -> Iterator[Option]:
    cls = type(config)
    docs, hints = field_docs(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value, marks, option_path = getattr(config, field.name), field.metadata.get("option"), (*path, field.name)
        if marks is None:
            if dataclasses.is_dataclass(value):
                yield from _walk(value, option_path)
            continue
        kind = hints[field.name] if marks.form is None else marks.form.kind
        if marks.form is not None and value is None:
            kind = kind | None
        flag = marks.flag or "--" + field.name.replace("_", "-")
        doc = docs[field.name] or field.metadata.get("doc", "")
        yield Option(
            option_path, flag, kind, marks.form, value, marks.least, marks.most, marks.vllm, marks.vllm_form, doc
        )


def with_values(config: T, values: Mapping[tuple[str, ...], Any]) -> T:
    """``config`` with other values of fields, each named by its path."""
    direct = {path[0]: value for path, value in values.items() if len(path) == 1}
    nested: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in values.items():
        if len(path) > 1:
            nested.setdefault(path[0], {})[path[1:]] = value
    direct |= {name: with_values(getattr(config, name), below) for name, below in nested.items()}
    return dataclasses.replace(config, **direct)  # type: ignore[type-var]  # every T here is a config, a dataclass


def from_keywords(config: T, keywords: Mapping[str, Any]) -> T:
    """``config`` with the options that keywords name: by field, by flag, or by vLLM's name.

    None leaves an option as it is. Raises :class:`UserError` for an unknown name, and for two names of one option with
    different values.
    """
    readers: dict[str, tuple[Option, Callable[[Any], Any]]] = {}
    for entry in options_of(config):
        if entry.vllm:
            readers[entry.vllm] = (entry, entry.read_vllm)
        readers[entry.flag.removeprefix("--").replace("-", "_")] = (entry, entry.parse_value)
        readers[entry.name] = (entry, entry.parse_value if entry.form is MANY else lambda value: value)
    values: dict[tuple[str, ...], Any] = {}
    names: dict[tuple[str, ...], str] = {}
    for name, value in keywords.items():
        if name not in readers:
            raise unknown_name(name, readers)
        if value is None:
            continue
        entry, read = readers[name]
        new_value = read(value)
        if entry.path in values and values[entry.path] != new_value:
            raise contradiction(names[entry.path], name)
        values[entry.path], names[entry.path] = new_value, name
    return with_values(config, values)


def contradiction(first_name: str, second_name: str) -> UserError:
    """Two names of one option have different values."""
    return UserError(
        f"{first_name} and {second_name} name one option and have different values", hint="leave one of them out"
    )


def unknown_name(name: str, names: Iterable[str]) -> UserError:
    """No option has this name; the hint suggests the nearest."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(sorted(names))}"
    return UserError(f"unknown option {name!r}", hint=hint, param=name)


def command_line_of(config: Any) -> tuple[str, ...]:
    """Flags that pass ``config`` to another process: all options whose values are not the defaults."""
    words: list[str] = []
    for entry, default in zip(options_of(config), options_of(type(config)), strict=True):
        if entry.default == default.default:
            continue
        if entry.form is MANY:
            words += [word for value in entry.default for word in (entry.flag, value)]
            continue
        if entry.form is None and isinstance(entry.default, bool):  # a switch takes no value
            words.append(entry.flag if entry.default else f"--no-{entry.flag[2:]}")
            continue
        words.append(entry.flag)
        if entry.form is not NEGATED:
            words.append(str(entry.default if entry.form is SIZE else entry.flag_default))  # a size is written exactly
    return tuple(words)


def check_ranges(config: Any) -> None:
    """Raise :class:`UserError` for an option of ``config`` itself that is out of its range."""
    for field in dataclasses.fields(config):
        marks, value = field.metadata.get("option"), getattr(config, field.name)
        if marks is None or value is None or (marks.least is None and marks.most is None):
            continue
        shown = value if marks.form is None else marks.form.show(value)
        flag = marks.flag or "--" + field.name.replace("_", "-")
        if marks.least is not None and shown < marks.least:
            raise UserError(
                f"{field.name} must be at least {marks.least:g}, got {shown}",
                hint=f"for example {flag} {max(marks.least, 1):g}",
                param=field.name,
            )
        if marks.most is not None and shown > marks.most:
            raise UserError(f"{field.name} must be at most {marks.most:g}, got {shown}", param=field.name)


def field_docs(cls: type) -> dict[str, str]:
    """The text of each field: the string below it, or the comment beside it; empty where there is none."""
    module = sys.modules.get(cls.__module__)
    definitions = _class_definitions(module) if module is not None and "." not in cls.__qualname__ else {}
    if cls.__name__ in definitions:
        definition, lines = definitions[cls.__name__]
    else:
        source = textwrap.dedent(inspect.getsource(cls))
        (node,), lines = ast.parse(source).body, source.splitlines()
        if not isinstance(node, ast.ClassDef):
            return {}
        definition = node
    docs = {}
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comment = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
        docs[node.target.id] = comment.group(1) if comment else ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[node.target.id] = " ".join(after.value.value.split())
    return docs


@functools.cache
def _class_definitions(module: Any) -> dict[str, tuple[ast.ClassDef, list[str]]]:
    """Classes of a module by name: its source is parsed once, not once per class."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    return {node.name: (node, lines) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _read_weights(texts: list[str]) -> tuple[tuple[str, int], ...]:
    """Tenants and weights from texts like ``NAME=2``. Raises :class:`UserError` for anything else."""
    weights = []
    for text in texts:
        name, _, weight = text.rpartition("=")
        if not name or not weight.isdecimal():
            raise UserError(f"cannot read {text!r} as a tenant's weight", hint="for example --tenant-weight team-a=3")
        weights.append((name, int(weight)))
    return tuple(weights)


WEIGHTS = Form(list[str], _read_weights, lambda weights: [f"{name}={weight}" for name, weight in weights] or None)


def _read_objectives(texts: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Tenants and objectives (ns; 0: none) from texts like ``NAME=3000:200``. Raises :class:`UserError`."""
    objectives = []
    for text in texts:
        name, _, times = text.rpartition("=")
        match = re.fullmatch(r"(\d{0,8}):(\d{0,8})", times)
        if not name or match is None or not any(map(int, filter(None, match.groups()))):
            hint = "milliseconds for the first and each further token, for example --tenant-slo team-a=3000:200"
            raise UserError(f"cannot read {text!r} as a tenant's objectives", hint=hint)
        ttft_ms, tpot_ms = (int(group or 0) for group in match.groups())
        objectives.append((name, ttft_ms * NS_PER_MS, tpot_ms * NS_PER_MS))
    return tuple(objectives)


def _tell_objectives(objectives: tuple[tuple[str, int, int], ...]) -> list[str] | None:
    ms = [(name, ttft_ns // NS_PER_MS or "", tpot_ns // NS_PER_MS or "") for name, ttft_ns, tpot_ns in objectives]
    return [f"{name}={ttft}:{tpot}" for name, ttft, tpot in ms] or None


OBJECTIVES = Form(list[str], _read_objectives, _tell_objectives)
