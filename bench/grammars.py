"""Grammar engines for structured output: llguidance, xgrammar and outlines-core, by speed, coverage and size.

    .venv/bin/python bench/grammars.py [--path FOLDER] [--rounds N]

``--path``: a folder with the packages that are not installed (``pip install --target FOLDER --no-deps xgrammar
outlines-core apache-tvm-ffi``); engines that are missing are skipped. Each engine gets the bundled model's vocabulary
and the same list of schemas, each with texts that it admits and texts that it does not. For each engine:

* build: from a schema to the first mask, milliseconds, median and worst. The engine is warm; no schema comes twice.
* mask: from a drawn token to the next mask, microseconds, over all tokens of all admitted texts, median and worst.
* right: schemas of which each admitted text is accepted to its end, and each other one refused or left unfinished.
* size of the installed package, and of what it brings along that memserve does not need anyway.

One process, one thread. Engines take turns within each round.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from harness.flags import options, save
from harness.rounds import median
from harness.tables import show

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


Case = tuple[str, dict[str, Any], list[Any], list[Any]]
TREE = closed({"name": STRING, "children": {"type": "array", "items": {"$ref": "#"}}})
CASES: list[Case] = [
    ("flat object", closed({"name": STRING, "age": INTEGER}), [{"name": "Ada", "age": 36}], [{"name": 1, "age": 2}]),
    ("enum", {"enum": ["red", "green", 3]}, ["red", 3], ["blue"]),
    ("const", closed({"kind": {"const": "car"}}), [{"kind": "car"}], [{"kind": "bus"}]),
    ("number", {"type": "number"}, [1.5, -2, 1e9], ["1"]),
    ("boolean and null", {"type": ["boolean", "null"]}, [True, None], [0]),
    ("minimum, maximum", {"type": "integer", "minimum": 3, "maximum": 120}, [3, 99, 120], [2, 121]),
    ("string lengths", {"type": "string", "minLength": 2, "maxLength": 5}, ["ab", "abcde"], ["a", "abcdef"]),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, ["AB-123"], ["ab-123"]),
    ("date", {"type": "string", "format": "date"}, ["2024-02-29"], ["yesterday"]),
    ("date-time", {"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024"]),
    ("email", {"type": "string", "format": "email"}, ["a@b.org"], ["nobody"]),
    ("uuid", {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ("array", {"type": "array", "items": INTEGER}, [[], [1, 2, 3]], [["a"]]),
    (
        "array lengths", {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
        [[1], [1, 2, 3]], [[], [1] * 4],
    ),
    ("prefixItems", {"type": "array", "prefixItems": [STRING, INTEGER], "items": False}, [["a", 1]], [[1, "a"]]),
    ("nested", closed({"a": closed({"b": closed({"c": INTEGER})})}), [{"a": {"b": {"c": 1}}}], [{"a": {"b": 1}}]),
    (
        "optional", {**closed({"a": INTEGER, "b": STRING}), "required": ["b"]},
        [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}],
    ),
    ("anyOf", {"anyOf": [STRING, closed({"x": INTEGER})]}, ["a", {"x": 1}], [[1]]),
    ("oneOf", {"oneOf": [closed({"x": INTEGER}), closed({"y": INTEGER})]}, [{"x": 1}, {"y": 2}], [{"z": 1}]),
    ("allOf", {"allOf": [closed({"x": INTEGER})]}, [{"x": 1}], [{"x": "a"}]),
    (
        "$ref",
        closed({"a": {"$ref": "#/$defs/p"}, "b": {"$ref": "#/$defs/p"}}, **{"$defs": {"p": closed({"x": INTEGER})}}),
        [{"a": {"x": 1}, "b": {"x": 2}}],
        [{"a": {"x": 1}, "b": 2}],
    ),
    ("recursion", TREE, [{"name": "r", "children": [{"name": "c", "children": []}]}], [{"name": "r", "children": [1]}]),
    ("additionalProperties", {"type": "object", "additionalProperties": INTEGER}, [{"any": 1, "b": 2}], [{"any": "x"}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^s_": STRING}, "additionalProperties": False},
     [{"s_a": "x"}], [{"s_a": 1}]),
    ("any object", {"type": "object"}, [{"a": [1, {"b": None}]}], [[1]]),
    ("escapes", STRING, ['line\n"quoted"\\', "émoji 😀"], [1]),
    (
        "a tool's call",
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [closed({"name": {"const": n}, "parameters": closed({"q": STRING})}) for n in "fg"]},
        },
        [[{"name": "g", "parameters": {"q": "x"}}]],
        [[], [{"name": "h", "parameters": {"q": "x"}}]],
    ),
    ("40 fields", closed({f"f_{i}": INTEGER for i in range(40)}), [{f"f_{i}": i for i in range(40)}], [{}]),
    ("200 choices", {"enum": [f"choice number {i}" for i in range(200)]}, ["choice number 117"], ["choice"]),
]  # fmt: skip


class Engine(Protocol):
    """One engine with the model's vocabulary."""

    def build(self, schema: str) -> Any:
        """A matcher for texts of ``schema``, with its first mask computed. Raises when it cannot."""

    def accepts(self, matcher: Any, token: int) -> bool:
        """Take in ``token``, and compute the next mask."""

    def may_end(self, matcher: Any) -> bool:
        """Whether the text may end here."""


class Llguidance:
    package, brings = "llguidance", ()

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import llguidance

        self._module, self._matcher = llguidance, llguidance.LLMatcher
        text = tokenizer.backend_tokenizer.to_str()
        self._vocabulary = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=tokenizer.eos_token_id)

    def build(self, schema: str) -> Any:
        matcher = self._matcher(self._vocabulary, self._matcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.compute_bitmask()
        return matcher

    def accepts(self, matcher: Any, token: int) -> bool:
        is_taken = matcher.consume_token(token)
        if is_taken:
            matcher.compute_bitmask()
        return bool(is_taken)

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class Xgrammar:
    package, brings = "xgrammar", ("tvm_ffi",)

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        self._module = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def build(self, schema: str) -> Any:
        matcher = self._module.GrammarMatcher(self._compiler.compile_json_schema(schema, strict_mode=False))
        matcher.fill_next_token_bitmask(self._mask)
        return matcher

    def accepts(self, matcher: Any, token: int) -> bool:
        is_taken = matcher.accept_token(token)
        if is_taken and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(self._mask)
        return bool(is_taken)

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_completed())


class Outlines:
    package, brings = "outlines_core", ()

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import outlines_core
        from outlines_core.json_schema import build_regex_from_schema

        self._module, self._regex = outlines_core, build_regex_from_schema
        backend = tokenizer.backend_tokenizer
        from memserve.api.openai.interfaces import TokenNames

        names, eos = TokenNames(backend), tokenizer.eos_token_id
        special = set(tokenizer.all_special_ids)
        tokens: dict[bytes, list[int]] = {}
        for token in range(vocab_size):
            if token not in special and (data := names.name(token)[1]):
                tokens.setdefault(data, []).append(token)
        self._vocabulary = outlines_core.Vocabulary(eos, tokens)
        self._allowed: list[int] = []

    def build(self, schema: str) -> Any:
        guide = self._module.Guide(self._module.Index(self._regex(schema), self._vocabulary))
        self._allowed = guide.get_tokens()
        return guide

    def accepts(self, matcher: Any, token: int) -> bool:
        if token not in self._allowed:
            return False
        self._allowed = matcher.advance(token)
        return True

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_finished())


ENGINES: tuple[Any, ...] = (Llguidance, Xgrammar, Outlines)


class Figures:
    """What one engine has shown."""

    def __init__(self) -> None:
        self.build_ms: list[float] = []
        self.mask_us: list[float] = []
        self.wrong: dict[str, str] = {}

    def judge(self, engine: Engine, tokenizer: Any, case: Case) -> None:
        """One schema with its texts."""
        name, schema, good, bad = case
        for expected, values in ((True, good), (False, bad)):
            for value in values:
                try:
                    begun_s = time.perf_counter()
                    matcher = engine.build(json.dumps(schema))
                    self.build_ms.append((time.perf_counter() - begun_s) * 1e3)
                except BaseException as error:  # panics of Rust are BaseExceptions
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    self.wrong[name] = f"not built: {str(error).splitlines()[0][:100] if str(error) else type(error)}"
                    return
                if self._read(engine, matcher, tokenizer, value) is not expected:
                    self.wrong.setdefault(name, f"{'refuses' if expected else 'admits'} {json.dumps(value)[:60]}")

    def _read(self, engine: Engine, matcher: Any, tokenizer: Any, value: Any) -> bool:
        text = json.dumps(value, ensure_ascii=False)
        for token in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids:
            begun_s = time.perf_counter()
            is_taken = engine.accepts(matcher, token)
            self.mask_us.append((time.perf_counter() - begun_s) * 1e6)
            if not is_taken:
                return False
        return engine.may_end(matcher)


def size_mib(package: str) -> float:
    """Of an installed package; 0: it is not."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return 0.0
    folder = Path(next(iter(spec.submodule_search_locations)))
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


COLUMNS = {
    "engine": "{engine}", "build, ms": "{build_ms:.3g} / {build_ms_most:.3g}",
    "mask, us": "{mask_us:.3g} / {mask_us_most:.3g}", "schemas right": "{right}", "MiB": "{mib:.1f}",
    "brings, MiB": "{brings_mib:.1f}",
}  # fmt: skip


def row_of(engine: Any, figures: Figures) -> dict[str, Any]:
    row = {"engine": engine.package, "right": len(CASES) - len(figures.wrong), "mib": size_mib(engine.package)}
    row["brings_mib"] = sum(map(size_mib, engine.brings))
    for name in ("build_ms", "mask_us"):
        if values := getattr(figures, name):
            row |= {name: median(values), f"{name}_most": max(values)}
    return row


def main() -> None:
    args = options(__doc__, path=(Path, "a folder with packages that are not installed"), rounds=3)
    if args.path:
        sys.path.append(str(args.path))
    from memserve.base.config import DEFAULT_MODEL
    from memserve.model.loading.loader import load_tokenizer
    from memserve.model.loading.sources import resolve_source

    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL, "bfloat16", keep_file=True))
    engines: dict[Any, tuple[Engine, Figures]] = {}
    for kind in ENGINES:
        try:
            engines[kind] = kind(tokenizer, len(tokenizer)), Figures()
        except ImportError as error:
            print(f"skipped: {kind.package}: {error}")
    for _ in range(args.rounds):
        for case in CASES:
            for engine, figures in engines.values():
                figures.judge(engine, tokenizer, case)
    print(f"{len(tokenizer)} tokens, {len(CASES)} schemas, {args.rounds} rounds; median / worst")
    rows = [row_of(kind, figures) for kind, (_, figures) in engines.items()]
    show(rows, COLUMNS)
    for kind, (_, figures) in engines.items():
        for case_name, why in figures.wrong.items():
            print(f"{kind.package}: {case_name}: {why}")
    save(args, rows)


if __name__ == "__main__":
    main()
