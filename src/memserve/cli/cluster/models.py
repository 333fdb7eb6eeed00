"""The models of a command line: ``--model PATH``, or ``--model NAME=PATH,option=value,...`` for each of several.

Options behind a name are those of the instances, of the store and their counts, and are this model's alone; options
beside ``--model`` are those of all models.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from memserve.base.config import EngineOptions
from memserve.base.deployment import INSTANCES_MAX, StoreOptions
from memserve.base.errors import UserError
from memserve.base.options import Option, options_of, unknown_name, with_values

T = TypeVar("T")
Counts = tuple[int | None, int | None, int | None]
"""Instances that prefill, that decode, and that do both. None: not said."""

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]{0,99})=(.+)", re.DOTALL)
_COUNTS = ("prefill", "decode", "colocated")
_STORE_OF_ONE = "a store at an address keeps the KV of one model"
_HINT = "--model NAME=PATH[,option=value...], for example --model big=/models/big,tensor-parallel=2"


Models = Annotated[
    list[str] | None,
    typer.Option(
        help="A model folder, a .gguf file, a hub id, or the bundled default. Several models, repeated:"
        " NAME=PATH[,option=value...], with options of this model alone (tensor-parallel=2,decode=1); the first is the"
        " default."
    ),
]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One model, and what is its own."""

    name: str
    """By which clients ask for it, and its instances join. Empty: it has been given none."""
    engine: EngineOptions
    counts: Counts = (None, None, None)
    store: StoreOptions = dataclasses.field(default_factory=StoreOptions)
    """The store of its own."""
    sleep_after_s: float | None = None
    """It sleeps when nothing was asked of it for so long. None: it does not, unless it is told to."""
    text: str = ""
    """As it was written."""


def has_store(model: NamedModel) -> bool:
    """Whether its KV goes to a store that runs already."""
    return model.store.at is not None


def split_model(text: str) -> tuple[str, str]:
    """Name and the rest of ``NAME=PATH...``; the name is empty where ``text`` is a path alone."""
    match = _NAMED.fullmatch(text)
    if match is None or Path(text).expanduser().exists():
        return "", text
    return match[1], match[2]


def slug_of(name: str) -> str:
    """The name of a model as a part of file names and of names of members."""
    return name.replace("/", "-")


def read_models(texts: Sequence[str], engine: EngineOptions, counts: Counts, store: StoreOptions) -> list[NamedModel]:
    """What ``--model`` says, each time; the first one is the default. ``engine``, ``counts``, ``store``: what holds for
    all; several models share the store's memory and disks in equal parts, unless they have stores of their own.

    Raises :class:`UserError` for what cannot be read, and for names that are not unique."""
    if len(texts) < 2 and not split_model(texts[0] if texts else "")[0]:
        return [NamedModel("", dataclasses.replace(engine, model=texts[0]) if texts else engine, counts, store)]
    models = [read_model(text, engine, counts) for text in texts]
    slugs = [slug_of(model.name).casefold() for model in models]
    for slug, model in zip(slugs, models, strict=True):
        if slugs.count(slug) > 1:
            raise UserError(f"two models are called {model.name!r}", hint="each needs a name", param="model")
    if store.is_used and any(model.store.is_used for model in models):
        hint = "name a folder for each model, or one for all"
        raise UserError("a store for all models, and stores of single ones", hint=hint, param="ssd")
    if not store.is_used:
        return models
    return [
        dataclasses.replace(model, store=_share_of(store, slug, len(models)))
        for slug, model in zip(slugs, models, strict=True)
    ]


def read_model(text: str, engine: EngineOptions, counts: Counts) -> NamedModel:
    """What one ``NAME=PATH[,option=value...]`` says, beside what holds for all. Raises :class:`UserError`."""
    name, rest = split_model(text)
    if not name:
        raise UserError(f"--model {text}: each of several models needs a name", hint=_HINT, param="model")
    path, *pairs = rest.split(",")
    keywords: dict[str, list[str]] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or not value:
            raise UserError(f"--model {name}: cannot read {pair!r}", hint=_HINT, param="model")
        keywords.setdefault(key.strip().lstrip("-").replace("-", "_"), []).append(value)
    model_counts = [_read_count(name, role, keywords.pop(role, None)) for role in _COUNTS]
    prefill, decode, colocated = model_counts if model_counts != [None, None, None] else counts
    sleep_after_s = _read_seconds(name, keywords.pop("sleep_after", None))
    of_store = keywords.keys() & {_keyword(entry) for entry in options_of(StoreOptions)}
    try:
        store = _with_texts(StoreOptions(), {key: keywords.pop(key) for key in of_store})
        built = _with_texts(dataclasses.replace(engine, model=path), keywords)
    except UserError as error:
        raise UserError(f"--model {name}: {error.message}", hint=error.hint, param=error.param) from None
    return NamedModel(name, built, (prefill, decode, colocated), store, sleep_after_s, text)


def _read_seconds(name: str, texts: list[str] | None) -> float | None:
    if texts is None:
        return None
    try:
        (seconds,) = map(float, texts)
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds < float("inf"):
        hint = "seconds without a request, for example sleep-after=600"
        raise UserError(f"--model {name}: cannot read sleep-after={','.join(texts)}", hint=hint, param="sleep_after")
    return seconds


def _read_count(name: str, role: str, texts: list[str] | None) -> int | None:
    if texts is None:
        return None
    if len(texts) != 1 or not texts[0].isdecimal() or len(texts[0]) > 2 or int(texts[0]) > INSTANCES_MAX:
        hint = f"a number up to {INSTANCES_MAX}, for example {role}=2"
        raise UserError(f"--model {name}: cannot read {role}={','.join(texts)}", hint=hint, param=role)
    return int(texts[0])


def _keyword(entry: Option) -> str:
    return entry.flag.removeprefix("--").replace("-", "_")


def _with_texts(config: T, texts_by_key: dict[str, list[str]]) -> T:
    """``config`` with options that are named by their flags, or by vLLM's names, as they would be on a command line."""
    entries = [entry for entry in options_of(config) if entry.name != "model"]
    readers = {entry.vllm: (entry, entry.vllm_form, entry.read_vllm) for entry in entries if entry.vllm}
    readers |= {_keyword(entry): (entry, entry.form, entry.parse_value) for entry in entries}
    values = {}
    for key, texts in texts_by_key.items():
        if key not in readers:
            raise unknown_name(key, [*readers, *_COUNTS, "sleep_after"])
        entry, form, read = readers[key]
        values[entry.path] = read(_convert(key, texts, entry, entry.kind if form is None else form.kind))
    return with_values(config, values)


def _convert(key: str, texts: list[str], entry: Option, kind: Any) -> Any:
    """What is written behind ``key=``, as a value of the flag."""
    if kind == list[str]:
        return texts
    if len(texts) > 1:
        raise UserError(f"{key} is there twice", hint="leave one out", param=entry.name)
    try:
        return msgspec.convert(texts[0], kind, strict=False)
    except msgspec.ValidationError:
        raise UserError(f"cannot read {key}={texts[0]}", hint=entry.help, param=entry.name) from None


def _share_of(store: StoreOptions, slug: str, count: int) -> StoreOptions:
    """The store of one of ``count`` models, where one was asked for."""
    if store.at is not None or store.address is not None:
        hint = "name one for each model: --model NAME=PATH,store=HOST:PORT"
        raise UserError(_STORE_OF_ONE, hint=hint, param="store")
    folders = tuple((str(Path(folder) / slug), nbytes // count) for folder, nbytes in store.folders)
    writes_bytes = store.writes_per_day_bytes // count
    return dataclasses.replace(
        store, folders=folders, dram_bytes=store.memory_bytes // count, writes_per_day_bytes=writes_bytes
    )
