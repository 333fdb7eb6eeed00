"""Structured output by 200 JSON schemas: always valid, what it costs a token, and whether it holds up other requests.

    .venv/bin/python bench/schemas.py [--vllm PYTHON] [--path FOLDER] [--count N] [--seed N] [--threads N] [--walk]

``--path``: a folder with ``jsonschema`` where it is not installed (``pip install --target FOLDER jsonschema``).
``--vllm``: a Python with vLLM's CPU build (``docs/guides/VLLM.md``), served with the same grammar engine (backend
``guidance``, that is llguidance). The schemas are drawn from a seed: objects in objects, optional and nullable
properties, enums, constants, bounds, lengths, patterns, formats, tuples, ``anyOf``, ``$ref``. Strings and arrays have
bounds, so that a model that writes nonsense comes to an end. For each server, the bundled model in float32:

* valid: each answer, drawn at temperature 1, is parsed and validated against its schema by ``jsonschema``.
* token: milliseconds from one token to the next, one request at a time, with the schema and, in turns, without: the
  median over schemas of both and of their ratio; and to the first token.
* others: a plain stream beside 4 clients that ask for answers by schemas, and beside 4 that ask for plain ones of the
  same lengths: the longest and the median gap between its tokens. One client in four asks by a schema of 600 integers,
  another one each time: the costliest to build. ``--costly N``: that alone, N times, beside one plain stream.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.clients import Answer, Json, meanwhile, stream
from harness.engines import Vllm, running
from harness.flags import options, save
from harness.rounds import Samples, median, percentile
from harness.served import bundled_model, serving
from harness.tables import show

WORDS = ["name", "city", "size", "color", "count", "kind", "note", "start", "end", "price", "owner", "state", "code"]
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)$", "^[a-z]{3,8}$", "^v[0-9]+\\.[0-9]$")
FORMATS = ("date", "uuid", "ipv4")
TOKENS_MAX, TIMEOUT_S = 700, 300.0
CLIENTS, PROBE_TOKENS = 4, 150


class Schemas:
    """Draws schemas; equal seeds draw equal ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> Json:
        """An object at the root, as OpenAI demands."""
        self._defs: Json = {}
        schema = self._object(3)
        return schema | ({"$defs": self._defs} if self._defs else {})

    def _any(self, depth: int) -> Json:
        nested = [self._object, self._array, self._tuple, self._choice, self._reference] if depth else []
        flat = [self._string, self._number, self._enum, self._nullable, self._constant]
        kind: Callable[[int], Json] = self._random.choice([*flat, *nested])
        return kind(depth - 1)

    def _object(self, depth: int) -> Json:
        names = self._random.sample(WORDS, self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        properties = {name: self._any(depth) for name in names}
        closed = {"additionalProperties": False} if self._random.random() < 0.6 else {}
        return {"type": "object", "properties": properties, "required": required, **closed}

    def _array(self, depth: int) -> Json:
        least = self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 1}

    def _tuple(self, depth: int) -> Json:
        parts = [self._any(min(depth, 1)) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2, "maxItems": 2}

    def _choice(self, depth: int) -> Json:
        return {"anyOf": [self._any(min(depth, 1)), {"type": "boolean"}]}

    def _reference(self, depth: int) -> Json:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}
        self._defs[name] = self._object(min(depth, 1))
        return {"$ref": f"#/$defs/{name}"}

    def _string(self, _: int) -> Json:
        match self._random.randrange(3):
            case 0:
                return {"type": "string", "pattern": self._random.choice(PATTERNS[:3])}
            case 1:
                return {"type": "string", "format": self._random.choice(FORMATS)}
        least = self._random.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(1, 20)}

    def _number(self, _: int) -> Json:
        low = self._random.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 1000)}

    def _enum(self, _: int) -> Json:
        return {"enum": self._random.sample(["red", "green", "two words", 3, 4.5, True, None, "é"], 3)}

    def _nullable(self, _: int) -> Json:
        return self._random.choice([{"type": ["boolean", "null"]}, {"anyOf": [self._string(0), {"type": "null"}]}])

    def _constant(self, _: int) -> Json:
        return {"const": self._random.choice(["fixed", 7, False])}


def costly(number: int) -> Json:
    """600 integers, each with bounds of its own: of what was tried the grammar that takes longest to build. ``number``
    makes it another one, which no server has built before."""
    fields: Json = {
        f"field_{place}": {"type": "integer", "minimum": place, "maximum": place * 10**9 + 12345 + number}
        for place in range(600)
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


@dataclass
class Server:
    """One that runs."""

    name: str
    url: str
    model: str

    def chat(self, schema: Json | None, seed: int, tokens: int = TOKENS_MAX) -> Answer:
        """An answer by ``schema``, or a plain one of exactly ``tokens`` tokens."""
        body: Json = {
            "model": self.model, "messages": [{"role": "user", "content": f"Record {seed}: write one as JSON."}],
            "max_tokens": tokens, "temperature": 1, "seed": seed,
        }  # fmt: skip
        if schema is None:
            body["ignore_eos"] = True
        else:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
        return stream(self.url, body, "/v1/chat/completions", timeout=TIMEOUT_S).checked()


def length_of(answer: Answer) -> int:
    """In tokens."""
    return int(answer.usage.get("completion_tokens", 0))


def token_ms(answer: Answer) -> float:
    """Of a token, from the first one to the last one."""
    return sum(answer.steps_s) / max(length_of(answer) - 1, 1) * 1e3


def fault(text: str, finish_reason: str, schema: Json) -> str:
    """Why an answer is not valid; empty: it is."""
    import jsonschema

    if finish_reason != "stop":
        return f"ended by {finish_reason or 'nothing'}"
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{next(iter(str(error).splitlines()), '')}: {text[:200]}"
    return ""


def judge(server: Server, schemas: list[Json], pairs: int) -> tuple[list[int], Samples]:
    """Answers to all schemas; the first ``pairs`` in turns with plain ones of the same length."""
    lengths, figures, wrong = list[int](), Samples(), list[str]()
    for number, schema in enumerate(schemas):
        try:
            answer = server.chat(schema, number)
        except RuntimeError as error:
            wrong.append(f"schema {number}: {error}")
            continue
        if why := fault(answer.text, answer.finish_reason, schema):
            wrong.append(f"schema {number}: {why}")
        lengths.append(length_of(answer))
        if number < pairs and lengths[-1] > 8:
            for name, timed in (("schema", answer), ("plain", server.chat(None, number, lengths[-1]))):
                figures[f"{name} token"].append(token_ms(timed))
                figures[f"{name} first"].append(timed.first_s * 1e3)
    for line in wrong:
        print(f"{server.name}: {line}")
    print(f"{server.name}: {len(schemas) - len(wrong)} of {len(schemas)} valid, {sum(lengths)} tokens", flush=True)
    return lengths, figures


def beside(server: Server, schemas: list[Json], lengths: list[int], constrained: bool) -> list[float]:
    """Gaps of a plain stream in ms, while clients ask without a pause."""

    def ask(over: threading.Event, number: int) -> None:
        for turn in itertools.count(number, CLIENTS):
            if over.is_set():
                return
            schema = costly(turn) if number == 0 else schemas[turn % len(schemas)]
            tokens = 40 if number == 0 else TOKENS_MAX if constrained else max(lengths[turn % len(lengths)], 2)
            try:
                server.chat(schema if constrained else None, turn, tokens)
            except RuntimeError as error:
                print(f"{server.name}: beside: {error}")
                return

    with meanwhile(*(partial(ask, number=number) for number in range(CLIENTS))):
        return [gap * 1e3 for gap in server.chat(None, 1, PROBE_TOKENS).steps_s]


def stall(server: Server, times: int) -> Json:
    """Gaps of a plain stream beside one client that asks for one token by a costly schema after the other, and what
    they are beside one that asks for one plain token."""
    row: Json = {"server": server.name}
    for kind in ("plain", "costly"):
        answers_ms: list[float] = []

        def ask(kind: str = kind, answers_ms: list[float] = answers_ms) -> None:
            time.sleep(1.0)  # the plain stream has its first token: the first grammar of all counts, too
            for number in range(times):
                schema = costly(1000 + number) if kind == "costly" else None
                answers_ms.append(server.chat(schema, number, 1).total_s * 1e3)
                time.sleep(0.2)

        asking = threading.Thread(target=ask)
        asking.start()
        gaps_ms: list[float] = []
        while asking.is_alive():
            gaps_ms += [gap * 1e3 for gap in server.chat(None, 1, PROBE_TOKENS).steps_s]
        worst = " ".join(f"{gap:.0f}" for gap in sorted(gaps_ms)[-3:][::-1])
        row |= {f"{kind}_gap": median(gaps_ms), f"{kind}_worst": worst, f"{kind}_answer": median(answers_ms)}
    return row


def walk(schemas: list[Json], seed: int) -> None:
    """Without a server: the masks alone, each token drawn evenly from those that may come."""
    import numpy as np

    from memserve.api.openai.request.structured_output import json_grammar
    from memserve.base.config import DEFAULT_MODEL
    from memserve.model.grammar.masks import Grammars
    from memserve.model.loading.loader import load_tokenizer
    from memserve.model.loading.sources import resolve_source

    tokenizer, draw = load_tokenizer(resolve_source(DEFAULT_MODEL, "float32", keep_file=True)), random.Random(seed)
    eos, valid, tokens, spent_s = tokenizer.eos_token_id, 0, 0, []
    grammars = Grammars(tokenizer, len(tokenizer), (eos,))
    for place, schema in enumerate(schemas):
        tokens_said: list[int] = []
        grammar, built = json_grammar(schema, "schema"), threading.Event()
        grammars.build_grammar(place, grammar, lambda _, built=built: built.set())
        built.wait()
        grammars.open_slot(0, place, [])
        while len(tokens_said) < TOKENS_MAX and (not tokens_said or tokens_said[-1] != eos):
            begun_s = time.perf_counter()
            while (mask := grammars.next_mask(0)) is None:
                pass
            allowed = np.flatnonzero(mask)
            tokens_said.append(eos if eos in allowed else int(draw.choice(allowed)))
            spent_s += [time.perf_counter() - begun_s]
            if tokens_said[-1] != eos:
                grammars.take_token(0, tokens_said[-1])
                grammars.flush_tokens()
        grammars.close_slot(0)
        grammars.forget_grammar(place)
        text = tokenizer.decode(tokens_said, skip_special_tokens=True)
        why = fault(text, "stop" if tokens_said[-1] == eos else "length", schema)
        valid, tokens = valid + (not why), tokens + len(tokens_said)
        if why:
            print(f"schema {place}: {why}\n  {json.dumps(schema)[:400]}")
    print(f"masks alone: {valid} of {len(schemas)} valid, {tokens} tokens")
    p99_us, worst_us = percentile(spent_s, 0.99) * 1e6, max(spent_s) * 1e6
    print(f"a mask: median {median(spent_s) * 1e6:.0f}, p99 {p99_us:.0f}, worst {worst_us:.0f} us")


@contextmanager
def memserve(threads: int) -> Iterator[Server]:
    with serving("--dtype", "float32", "--metadata", "none", "--threads", str(threads)) as served:
        yield Server("memserve", served.url, served.model)


@contextmanager
def vllm(python: str, threads: int) -> Iterator[Server]:
    """The same model, with the same grammar engine."""
    flags = ("--max-model-len", "2048", "--structured-outputs-config", json.dumps({"backend": "guidance"}))
    server = Vllm(python, bundled_model("float32"), cpus=f"0-{threads - 1}", flags=flags)
    with running(server):
        yield Server("vLLM", server.url, server.name)


STALL = {"server": "{server}"} | {
    f"{title} beside {kind}": f"{{{kind}_{name}}}"
    for kind in ("plain", "costly") for title, name in (("gap, ms,", "gap:.3g"), ("worst three", "worst"),
                                                       ("answer", "answer:.3g"))
}  # fmt: skip
COLUMNS = {
    "server": "{server}", "token, ms": "{plain_token:.3g}", "by schema": "{schema_token:.3g}", "ratio": "{ratio:.3g}",
    "first token, ms": "{plain_first:.3g}", "first by schema": "{schema_first:.3g}",
    "gap beside plain, ms": "{plain_gap:.3g} / {plain_most:.3g}",
    "beside schemas": "{schema_gap:.3g} / {schema_most:.3g}",
}  # fmt: skip


def compare(server: Server, schemas: list[Json], pairs: int) -> Json:
    """Validity, time a token, and the gaps of others."""
    server.chat(schemas[0], 0)  # what comes first is slow
    lengths, figures = judge(server, schemas, pairs)
    row: Json = {"server": server.name, "ratio": figures.ratio("schema token", "plain token")}
    row |= {name.replace(" ", "_"): figures.median(name) for name in list(figures)}
    for kind in ("plain", "schema"):
        gaps_ms = beside(server, schemas, lengths, kind == "schema")
        row |= {f"{kind}_gap": median(gaps_ms), f"{kind}_most": max(gaps_ms)}
    return row


def main() -> None:
    args = options(
        __doc__, vllm=str, path=(Path, "a folder with packages that are not installed"), count=200,
        pairs=(60, "schemas whose time is compared with plain answers"), seed=1, threads=2,
        walk=(False, "no server: random tokens among those that the masks admit"),
        costly=(0, "only: what so many costly schemas cost others"),
    )  # fmt: skip
    if args.path:
        sys.path.append(str(args.path))
    draw = Schemas(args.seed)
    schemas = [draw.draw() for _ in range(args.count)]
    if args.walk:
        walk(schemas, args.seed)
        return
    rows = []
    for run in [memserve(args.threads)] + ([vllm(args.vllm, args.threads)] if args.vllm else []):
        with run as server:
            if args.costly:
                server.chat(None, 0, 20)
                rows.append(stall(server, args.costly))
            else:
                rows.append(compare(server, schemas, args.pairs))
    show(rows, STALL if args.costly else COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    main()
