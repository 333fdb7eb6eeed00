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

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]
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
        f"field_{at}": {"type": "integer", "minimum": at, "maximum": at * 10**9 + 12345 + number} for at in range(600)
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


@dataclass
class Answer:
    """Of one streamed chat."""

    text: str
    tokens: int
    finish_reason: str
    first_s: float
    gaps_s: list[float]

    @property
    def token_ms(self) -> float:
        """From the first token to the last one."""
        return sum(self.gaps_s) / max(self.tokens - 1, 1) * 1e3


class Server:
    """One that runs."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name, self._url, self._model = name, url, model
        self._client = httpx.Client(timeout=TIMEOUT_S)

    def chat(self, schema: Json | None, seed: int, tokens: int = TOKENS_MAX) -> Answer:
        body: Json = {
            "model": self._model, "messages": [{"role": "user", "content": f"Record {seed}: write one as JSON."}],
            "max_tokens": tokens, "temperature": 1, "seed": seed, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if schema is None:
            body["ignore_eos"] = True
        else:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
        begun_s = last_s = time.perf_counter()
        told, times, usage, reason = [], [], {}, ""
        with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:300]}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk)[:300])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    if text := choice["delta"].get("content"):
                        now_s = time.perf_counter()
                        times.append(now_s - last_s)
                        told, last_s = [*told, text], now_s
        first_s = times[0] if times else time.perf_counter() - begun_s
        return Answer("".join(told), usage.get("completion_tokens", 0), reason, first_s, times[1:])


def fault(answer: Answer, schema: Json) -> str:
    """Why an answer is not valid; empty: it is."""
    import jsonschema

    if answer.finish_reason != "stop":
        return f"ended by {answer.finish_reason or 'nothing'} after {answer.tokens} tokens"
    try:
        jsonschema.validate(json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{next(iter(str(error).splitlines()), '')}: {answer.text[:200]}"
    return ""


def judge(server: Server, schemas: list[Json], pairs: int) -> tuple[list[int], dict[str, list[float]]]:
    """Answers to all schemas; the first ``pairs`` in turns with plain ones of the same length."""
    lengths: list[int] = []
    figures: dict[str, list[float]] = {name: [] for name in ("token", "plain", "ratio", "first", "plain first")}
    wrong: list[str] = []
    for at, schema in enumerate(schemas):
        try:
            answer = server.chat(schema, at)
        except RuntimeError as error:
            wrong.append(f"schema {at}: {error}")
            continue
        if why := fault(answer, schema):
            wrong.append(f"schema {at}: {why}")
        lengths.append(answer.tokens)
        if at < pairs and answer.tokens > 8:
            plain = server.chat(None, at, answer.tokens)
            ratio = answer.token_ms / plain.token_ms
            for name, value in (
                ("token", answer.token_ms), ("plain", plain.token_ms), ("ratio", ratio),
                ("first", answer.first_s * 1e3), ("plain first", plain.first_s * 1e3),
            ):  # fmt: skip
                figures[name].append(value)
    for line in wrong:
        print(f"{server.name}: {line}")
    print(f"{server.name}: {len(schemas) - len(wrong)} of {len(schemas)} valid, {sum(lengths)} tokens", flush=True)
    return lengths, figures


def beside(server: Server, schemas: list[Json], lengths: list[int], constrained: bool) -> Answer:
    """A plain stream, while clients ask without a pause."""
    ended = threading.Event()

    def ask(number: int) -> None:
        at = number
        while not ended.is_set():
            schema = costly(at) if number == 0 else schemas[at % len(schemas)]
            tokens = 40 if number == 0 else TOKENS_MAX
            if not constrained:
                schema, tokens = None, 40 if number == 0 else max(lengths[at % len(lengths)], 2)
            server_of_thread = Server(server.name, server._url, server._model)
            try:
                server_of_thread.chat(schema, at, tokens)
            except RuntimeError as error:
                print(f"{server.name}: beside: {error}")
                return
            at += CLIENTS

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        return server.chat(None, 1, PROBE_TOKENS)
    finally:
        ended.set()
        for client in clients:
            client.join()


def stall(server: Server, times: int) -> str:
    """Gaps of a plain stream beside one client that asks for one token by a costly schema after the other, and what
    they are beside one that asks for one plain token."""
    cells = []
    for asks_costly in (False, True):
        answers: list[float] = []

        def ask(asks_costly: bool = asks_costly, answers: list[float] = answers) -> None:
            client = Server(server.name, server._url, server._model)
            time.sleep(1.0)  # the plain stream has its first token: the first grammar of all counts, too
            for at in range(times):
                begun_s = time.perf_counter()
                client.chat(costly(1000 + at) if asks_costly else None, at, 1)
                answers.append(time.perf_counter() - begun_s)
                time.sleep(0.2)

        asking = threading.Thread(target=ask)
        asking.start()
        gaps_ms: list[float] = []
        while asking.is_alive():
            gaps_ms += [gap * 1e3 for gap in server.chat(None, 1, PROBE_TOKENS).gaps_s]
        worst_ms = sorted(gaps_ms)[-3:][::-1]
        told = " ".join(f"{gap:.0f}" for gap in worst_ms)
        cells.append(f"{median(gaps_ms)} | {told} | {median([answer * 1e3 for answer in answers])}")
    return f"| {server.name} | {' | '.join(cells)} |"


def walk(schemas: list[Json], seed: int) -> None:
    """Without a server: the masks alone, each token drawn evenly from those that may come."""
    import numpy as np

    from memserve.api.openai.request.structured_output import json_grammar
    from memserve.base.config import DEFAULT_MODEL
    from memserve.model.grammar.masks import Grammars
    from memserve.model.loading.loader import load_tokenizer
    from memserve.model.loading.sources import resolve_source

    tokenizer, draw = load_tokenizer(resolve_source(DEFAULT_MODEL, "float32")), random.Random(seed)
    eos, valid, tokens, spent_s = tokenizer.eos_token_id, 0, 0, []
    grammars = Grammars(tokenizer, len(tokenizer), (eos,))
    for at, schema in enumerate(schemas):
        said: list[int] = []
        grammar, built = json_grammar(schema, "schema"), threading.Event()
        grammars.build(at, grammar, lambda _, built=built: built.set())
        built.wait()
        grammars.open(0, at, [])
        while len(said) < TOKENS_MAX and (not said or said[-1] != eos):
            begun_s = time.perf_counter()
            while (mask := grammars.mask(0)) is None:
                pass
            allowed = np.flatnonzero(mask)
            said.append(eos if eos in allowed else int(draw.choice(allowed)))
            spent_s += [time.perf_counter() - begun_s]
            if said[-1] != eos:
                grammars.drawn(0, said[-1])
                grammars.flush()
        grammars.close(0)
        grammars.forget(at)
        text = tokenizer.decode(said, skip_special_tokens=True)
        why = fault(Answer(text, len(said), "stop" if said[-1] == eos else "length", 0.0, []), schema)
        valid, tokens = valid + (not why), tokens + len(said)
        if why:
            print(f"schema {at}: {why}\n  {json.dumps(schema)[:400]}")
    print(f"masks alone: {valid} of {len(schemas)} valid, {tokens} tokens")
    p99_us, worst_us = statistics.quantiles(spent_s, n=100)[98] * 1e6, max(spent_s) * 1e6
    print(f"a mask: median {statistics.median(spent_s) * 1e6:.0f}, p99 {p99_us:.0f}, worst {worst_us:.0f} us")


@contextmanager
def memserve(threads: int) -> Iterator[Server]:
    from served import serving

    flags = ("--dtype", "float32", "--metadata", "none", "--threads", str(threads))
    with serving(*flags) as served:
        yield Server("memserve", served.url, served.model)


@contextmanager
def vllm(python: str, threads: int) -> Iterator[Server]:
    from rivals import bundled_model
    from vllm_servers import Vllm, running

    flags = ("--max-model-len", "2048", "--structured-outputs-config", json.dumps({"backend": "guidance"}))
    server = Vllm(python, str(bundled_model("float32")), cpus=f"0-{threads - 1}", flags=flags)
    with running(server):
        yield Server("vLLM", server.url, server.name)


def median(values: list[float]) -> str:
    return f"{statistics.median(values):.3g}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="a Python with vLLM")
    parser.add_argument("--path", type=Path, help="a folder with packages that are not installed")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=60, help="schemas whose time is compared with plain answers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--walk", action="store_true", help="no server: random tokens among those that the masks admit")
    parser.add_argument("--costly", type=int, default=0, metavar="N", help="only: what N costly schemas cost others")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.path:
        sys.path.append(str(options.path))
    draw = Schemas(options.seed)
    schemas = [draw.draw() for _ in range(options.count)]
    if options.walk:
        walk(schemas, options.seed)
        return
    runs = [memserve(options.threads)] + ([vllm(options.vllm, options.threads)] if options.vllm else [])
    rows = []
    if options.costly:
        print("| server | gap beside plain, ms | worst three | answer, ms | gap beside costly | worst three | answer |")
        print("| --- " * 7 + "|")
        for run in runs:
            with run as server:
                server.chat(None, 0, 20)  # what comes first is slow
                print(stall(server, options.costly), flush=True)
        return
    for run in runs:
        with run as server:
            server.chat(schemas[0], 0)  # what comes first is slow
            lengths, figures = judge(server, schemas, options.pairs)
            cells = [median(figures[name]) for name in ("plain", "token", "ratio", "plain first", "first")]
            for constrained in (False, True):
                gaps_ms = [gap * 1e3 for gap in beside(server, schemas, lengths, constrained).gaps_s]
                cells.append(f"{median(gaps_ms)} / {max(gaps_ms):.3g}")
            rows.append(f"| {server.name} | {' | '.join(cells)} |")
    head = "token, ms | by schema | ratio | first token, ms | by schema | gap beside plain, ms | beside schemas"
    print(f"| server | {head} |")
    print("| --- " * 8 + "|\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
