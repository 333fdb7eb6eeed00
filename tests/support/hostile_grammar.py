"""Hostile requests drawn at random from grammars of HTTP, JSON and parameters.

``attack(target, seed, number)`` is the same for the same three arguments: a miss is repeated by its seed and number.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from hostile_words import CHUNKS, DEEP, FIRST_LINES, LINES, NAMES, NUMBERS, TEXTS, VALUES, Raw
from memserve.api.openai.request.schema import ChatBody, CompletionBody, DocumentBody

ANSWER_TOKENS_MAX, TIMEOUT_S_MAX, TTL_S_MAX = 6, 2.0, 0.5
"""What most requests ask for: the attack is on the edge and on steps, and should not wait for long answers, nor for
pins."""

LIST_ITEMS_MAX = 4000

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/documents/{id}": DocumentBody,
}
_FIELDS = {path: {field.name: field.type for field in inspect.type_info(kind).fields} for path, kind in BODIES.items()}
PAGES = ("/health", "/metrics", "/v1/models", "/v1/documents", "/openapi.json")
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "CONNECT", "get", "BREW")


class Ending(enum.Enum):
    """What the client does when everything is sent."""

    WAIT = "reads its answers"
    HALF_CLOSE = "sends the end of the stream, and reads"
    LEAVE = "leaves after some bytes of the answer"


@dataclass(frozen=True)
class Target:
    """The server, as far as the grammars aim at it."""

    model: str
    context_tokens: int
    vocab_size: int
    key: str = ""


@dataclass(frozen=True)
class Attack:
    """One connection: bytes in pieces, and what may come back."""

    name: str
    pieces: tuple[bytes, ...]
    methods: tuple[str, ...]
    """Of the requests, in order: an answer to HEAD has no body."""
    ending: Ending
    sound: bool
    """The bytes are HTTP: each request gets its answer, unless an answer before it closes the connection."""
    leave_after_bytes: int = 0


def attack(target: Target, seed: int, number: int) -> Attack:
    """Attack ``number`` of a run."""
    rng = random.Random(f"{seed}:{number}")
    family = rng.choices((_raw, _broken, _json, _params, _leaver), (3, 5, 5, 8, 2))[0]
    pieces, methods, ending, sound, leave_after = family(target, rng)
    name = f"{seed}:{number} {family.__name__[1:]}"
    return Attack(name, tuple(pieces), tuple(methods), ending, sound, leave_after)


_Drawn = tuple[Sequence[bytes], Sequence[str], Ending, bool, int]


# -- the five families


def _raw(target: Target, rng: random.Random) -> _Drawn:
    """Sound HTTP in odd clothes: chunks, trailers, pipelines, bytes that come one by one."""
    count = rng.choice((1, 1, 2, 3, 8))
    drawn = [_request(target, rng) for _ in range(count)]
    data = b"".join(piece for piece, _ in drawn)
    return _pieces(data, rng), [method for _, method in drawn], Ending.WAIT, True, 0


def _broken(target: Target, rng: random.Random) -> _Drawn:
    """HTTP with damage."""
    drawn = [_request(target, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    data = b"".join(piece for piece, _ in drawn)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_DAMAGES)(data, rng)
    ending = rng.choice((Ending.WAIT, Ending.WAIT, Ending.HALF_CLOSE, Ending.LEAVE))
    return _pieces(data, rng), [method for _, method in drawn], ending, False, 0


def _json(target: Target, rng: random.Random) -> _Drawn:
    """A valid body, mutated as JSON."""
    path = rng.choice(tuple(BODIES))
    body: Any = _valid(path, target, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        body = _mutated(body, rng)
    text = render(body, rng)
    if rng.random() < 0.2:
        text = _spoilt(text, rng)
    return _post(target, path, text.encode("utf-8", "surrogatepass"), rng)


def _params(target: Target, rng: random.Random) -> _Drawn:
    """Any fields with values at, inside and outside of their limits, together."""
    path = rng.choices(tuple(BODIES), (5, 4, 1))[0]
    body, fields = _valid(path, target, rng), _FIELDS[path]
    outside = rng.choice((0.0, 0.0, 0.1, 0.5))
    for name in rng.sample(sorted(fields), min(rng.choice((1, 2, 3, 5, 8)), len(fields))):
        special = _SPECIAL.get(name)
        drawn = special(target, rng) if special else _value(fields[name], rng, outside)
        if name not in ("model", "prompt", "messages") or rng.random() < 0.3:
            body[name] = drawn
    return _post(target, path, render(body, rng).encode("utf-8", "surrogatepass"), rng)


def _leaver(target: Target, rng: random.Random) -> _Drawn:
    """A good request, often a stream, of a client that leaves at any byte of the question or the answer."""
    path = rng.choice(("/v1/completions", "/v1/chat/completions"))
    body = _valid(path, target, rng) | {"stream": rng.random() < 0.7, "max_tokens": rng.choice((1, 20, 60))}
    body |= {"n": rng.choice((1, 1, 2, 5)), "ignore_eos": True}
    data = _framed(target, "POST", path, json.dumps(body).encode(), rng)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data))]
    ending = rng.choice((Ending.LEAVE, Ending.LEAVE, Ending.HALF_CLOSE))
    return _pieces(data, rng), ["POST"], ending, False, rng.choice((0, 0, 1, 100, 1000, 5000))


def _post(target: Target, path: str, body: bytes, rng: random.Random) -> _Drawn:
    method = "PUT" if path.startswith("/v1/documents") else "POST"
    return [_framed(target, method, path, body, rng)], [method], Ending.WAIT, True, 0


# -- HTTP


def _path(rng: random.Random) -> str:
    path = rng.choice(
        (*BODIES, *BODIES, *PAGES, "/v1/models/{id}", "/", "*", "/v1", "/v1/", "//v1//models", "/v1/embeddings")
    )
    if rng.random() < 0.15:
        odd = (
            "%00", "%ff", "%2e%2e/", "..", "?a=b&c", "?%", ";x", "%zz", "%", "é", "#f", "\\", "\t", "/" * 99,
            "x" * 20_000,
        )  # fmt: skip
        path = path + rng.choice(odd)
    return f"http://elsewhere.example{path}" if rng.random() < 0.03 else path


def _document_id(rng: random.Random) -> str:
    return rng.choice(("d1", "d2", "d3", "d4", "D.1:x_-", "x" * 128, "x" * 129, "%20", "%f0%9f%98%80", "-", ".."))


def _request(target: Target, rng: random.Random) -> tuple[bytes, str]:
    """One sound request of any method, path and headers."""
    path = _path(rng).encode("utf-8").decode("latin-1")
    if any(char in path for char in "\t\x7f") or not path.isascii():
        path = path.encode("ascii", "ignore").decode().replace("\t", "")
    fit = "PUT" if path.startswith("/v1/documents/") else "POST" if path in BODIES else "GET"
    method = rng.choice(METHODS[:6]) if rng.random() < 0.3 else fit
    body = b""
    if method in ("POST", "PUT", "PATCH") or rng.random() < 0.1:
        kind = path if path in BODIES else rng.choice(tuple(BODIES))
        body = render(_valid(kind, target, rng), rng).encode("utf-8", "surrogatepass")
        body = rng.choice((body, body, body, b"", b"{}", body[: len(body) // 2]))
    return _framed(target, method, path, body, rng), method


def _framed(target: Target, method: str, path: str, body: bytes, rng: random.Random) -> bytes:
    """Request line, headers, and the body by its length or in chunks."""
    path = path.replace("{id}", _document_id(rng))
    fields = ["host: x", f"authorization: Bearer {target.key}"] if target.key else ["host: x"]
    if rng.random() < 0.95:
        fields.append("content-type: " + rng.choice(("application/json",) * 9 + ("application/json; charset=utf-8",)))
    for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 3, 20))):
        fields.append(f"{rng.choice(NAMES)}:{rng.choice((' ', '', '  '))}{rng.choice(VALUES)}")
    rng.shuffle(fields)
    if body and rng.random() < 0.3:
        fields.append("transfer-encoding: " + rng.choice(("chunked", "Chunked")))
        tail = _chunked(body, rng)
    else:
        tail = body
        if body or method in ("POST", "PUT", "PATCH") or rng.random() < 0.1:
            fields.append(f"Content-Length:{rng.choice(('', ' '))}{'0' * rng.choice((0, 0, 0, 3))}{len(body)}")
    version = "HTTP/1.0" if rng.random() < 0.05 and tail is body else "HTTP/1.1"
    return "\r\n".join([f"{method} {path} {version}", *fields, "", ""]).encode("latin-1") + tail


def _chunked(body: bytes, rng: random.Random) -> bytes:
    size = rng.choice((1, 7, 100, 4096)) if len(body) < 2000 else 4096
    parts = []
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        extension = rng.choice((b"", b"", b"", b";a", b";a=b", b' ;a="b"', b";" + b"x" * 500))
        parts.append(b"%b%b\r\n%b\r\n" % (rng.choice((b"%x", b"%X", b"%04x")) % len(piece), extension, piece))
    trailers = b"".join(b"t%d: %b\r\n" % (at, b"v" * 50) for at in range(rng.choice((0, 0, 0, 1, 50))))
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def _pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """The bytes as they are sent: in one, in a few at random places, or the beginning one by one."""
    how = rng.random()
    if how < 0.6 or len(data) < 2:
        return [data]
    if how < 0.9:
        cuts = sorted(rng.randrange(1, len(data)) for _ in range(rng.choice((1, 2, 5))))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]
    return [*(data[at : at + 1] for at in range(min(40, len(data)))), data[40:]]


def _at(data: bytes, rng: random.Random) -> int:
    """A place in ``data``: in its head more often than in its body."""
    end = data.find(b"\r\n\r\n") + 4
    return rng.randrange(min(end, len(data)) or 1) if rng.random() < 0.7 else rng.randrange(len(data) or 1)


def _insert(data: bytes, rng: random.Random) -> bytes:
    odd = (
        b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b"\x80", b"\xff", b"\x7f", b"0", b";", b",",
        b"\r\n ",
    )  # fmt: skip
    at = _at(data, rng)
    return data[:at] + rng.choice(odd) * rng.choice((1, 1, 2, 100)) + data[at:]


def _delete(data: bytes, rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] + data[at + rng.choice((1, 1, 2, 10, 100)) :]


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _at(data, rng)]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at, count = _at(data, rng), rng.choice((1, 20, 200))
    return data[: at + count] + data[at : at + count] * rng.choice((1, 3, 50)) + data[at + count :]


def _line(data: bytes, rng: random.Random) -> bytes:
    """One more line in the head."""
    end = data.find(b"\r\n", rng.choice((0, max(0, data.find(b"\r\n\r\n") - 1))))
    return data[: max(0, end)] + b"\r\n" + rng.choice(LINES) + data[max(0, end) :]


def _first_line(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(FIRST_LINES) + data[max(0, data.find(b"\r\n")) :]


def _bad_chunks(data: bytes, rng: random.Random) -> bytes:
    first = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head = first + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(rng.choice(CHUNKS) for _ in range(rng.choice((1, 1, 2, 3))))


def _bare_lines(data: bytes, rng: random.Random) -> bytes:
    return data.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\n\r", b"\r\r\n")), rng.choice((1, 3, -1)))


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _insert, _insert, _delete, _flip, _cut, _repeat, _line, _line, _line, _first_line, _bad_chunks, _bare_lines,
)  # fmt: skip


# -- JSON


def render(value: Any, rng: random.Random) -> str:
    """``value`` as JSON, with :class:`Raw` in it and now and then other spaces. Pairs in a list: an object."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, list | dict) and len(value) > 64 and _plain(value):  # item by item would take its time
        return json.dumps(value)
    if isinstance(value, dict | _Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        space = rng.choice(("", "", " ", "\n\t"))
        return "{" + ",".join(f"{space}{render(k, rng)}:{render(v, rng)}" for k, v in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(render(item, rng) for item in value) + "]"
    return json.dumps(value, ensure_ascii=rng.random() < 0.7)


def _plain(value: list[Any] | dict[str, Any]) -> bool:
    """Whether the ``json`` module can render it: a list or an object of nothing but texts and numbers."""
    items = value.values() if isinstance(value, dict) else value
    return not isinstance(value, _Pairs) and {type(item) for item in items} <= {str, int, float, bool}


class _Pairs(list[Any]):
    """An object with names that may repeat."""


def _anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice((None, True, False, [], {}, [None], {"": None}))
    if kind == 5:
        return Raw(rng.choice(DEEP))
    if kind == 6:
        return rng.choice(([0] * 3000, ["a"] * 3000, {f"k{i}": i for i in range(1500)}, [[]] * 3000))
    if kind < 9:
        return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice(("role", "content", "type", "a", "", "1", *TEXTS)): _anything(rng, depth + 1)
        for _ in range(rng.randrange(4))
    }


def _mutated(value: Any, rng: random.Random) -> Any:
    """``value`` with one thing changed, somewhere in it."""
    inner = isinstance(value, dict | list) and not isinstance(value, Raw) and len(value) and rng.random() < 0.85
    if not inner:
        return _anything(rng)
    if isinstance(value, _Pairs):
        return _Pairs(rng.sample(value, len(value)))
    if isinstance(value, list):
        at, how = rng.randrange(len(value)), rng.random()
        if how < 0.15:
            return (value * rng.choice((0, 2, 50)))[:LIST_ITEMS_MAX]
        return [*value[:at], _mutated(value[at], rng) if how < 0.8 else _anything(rng), *value[at + (how < 0.9) :]]
    name, how = rng.choice(list(value)), rng.random()
    if how < 0.15:
        return {known: value[known] for known in value if known != name}
    if how < 0.25:
        return _Pairs([*value.items(), (name, _mutated(value[name], rng))])
    if how < 0.35:
        return value | {rng.choice((name.upper(), name + " ", "__class__", "x" * 5000, *TEXTS)): _anything(rng)}
    return value | {name: _mutated(value[name], rng)}


def _spoilt(text: str, rng: random.Random) -> str:
    """Text that is JSON no more, most likely."""
    at = rng.randrange(len(text) + 1)
    match rng.randrange(5):
        case 0:
            return text[:at]
        case 1:
            return (
                text[:at] + rng.choice(("\0", "\ufeff", ",", "}", "]", '"', "\\", "\ud800", "/*x*/", "'")) + text[at:]
            )
        case 2:
            return text + rng.choice(("}", text, " " * 5000, "\0", "null"))
        case 3:
            return rng.choice(("\ufeff", " " * 5000, "\x0b", ")]}',\n")) + text
    return text[:at] + text[at + rng.choice((1, 2, 20)) :]


# -- parameters


def _valid(path: str, target: Target, rng: random.Random) -> dict[str, Any]:
    """A small body that is right."""
    bounds = {"model": target.model, "max_tokens": rng.randrange(1, ANSWER_TOKENS_MAX + 1), "timeout_s": TIMEOUT_S_MAX}
    if path == "/v1/completions":
        return bounds | {"prompt": rng.choice(("hi", "once upon a time", "hello " * 30))}
    if path == "/v1/chat/completions":
        return bounds | {"messages": [{"role": "user", "content": rng.choice(("hi", "what?", "hello " * 20))}]}
    return {"text": "a handbook of " + "hello " * rng.randrange(30), "ttl_s": TTL_S_MAX}


def _ids(target: Target, rng: random.Random) -> list[Any]:
    end = target.vocab_size
    odd = (0, 1, end - 2, end - 1, end - 1, end, end + 1, -1, 2**31 - 1, 2**31, 2**70, True, 1.0)
    most = rng.choice((2, 2, 4, 4, len(odd)))
    return [
        rng.choice(odd[:most]) if most > 2 else rng.randrange(end) for _ in range(rng.choice((0, 1, 2, 8, 128, 129)))
    ]


def _bias(target: Target, rng: random.Random) -> Any:
    values = (-100, 100, 0, 1e-9, -100.0, 100, -101, 1e30, Raw("1e400"))
    most = rng.choice((6, 6, 6, 9))
    tokens = [token for token in _ids(target, rng) if rng.random() < 0.95]
    bias = {str(token): rng.choice(values[:most]) for token in tokens}
    if rng.random() < 0.1:  # every token of a small vocabulary, or as many as there may be
        bias = {str(token): rng.choice((-100, 100)) for token in range(min(target.vocab_size, 1024))}
    return bias


def _prompt(target: Target, rng: random.Random) -> Any:
    context = target.context_tokens
    match rng.randrange(7):
        case 0:
            return _ids(target, rng)
        case 1:
            return [_ids(target, rng), [1]]
        case 2:
            return [rng.randrange(target.vocab_size) for _ in range(rng.choice((1, 33, 300)))]
        case 3:  # up to the context and beyond it; one value again and again, which is quick to draw
            return [rng.randrange(target.vocab_size)] * rng.choice((1, 33, context, context + 1))
        case 4:
            return [rng.choice(TEXTS) for _ in range(rng.choice((0, 1, 3, 20)))]
        case 5:
            return rng.choice(TEXTS)
    return _anything(rng)


def _messages(target: Target, rng: random.Random) -> Any:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": rng.choice(("{}", "{", "[1]", "", '{"a":1}'))},
    }
    roles = ("system", "developer", "user", "assistant", "tool", "function", "robot")
    odd: tuple[dict[str, Any], ...] = (
        {}, {}, {"name": "x"}, {"tool_calls": [call]}, {"reasoning_content": "so"}, {"tool_call_id": "1"},
        {"content": [{"type": "text", "text": "a"}]}, {"content": None}, {"refusal": "no"},
        {"content": [{"type": "image_url"}]}, {"function_call": {"name": "f", "arguments": "{}"}},
    )  # fmt: skip
    count = rng.choice((0, 1, 2, 5, 60))
    return [
        {"role": rng.choice(roles[: rng.choice((4, 7))]), "content": rng.choice(TEXTS), **rng.choice(odd)}
        for _ in range(count)
    ]


def _tools(target: Target, rng: random.Random) -> Any:
    tool = {"type": "function", "function": {"name": rng.choice(TEXTS), "parameters": _anything(rng)}}
    return [tool] * rng.choice((0, 1, 3, 129))


def _bounded(*values: Any) -> Callable[[Target, random.Random], Any]:
    return lambda target, rng: rng.choice(values)


_TEMPLATE_WORDS = ("tokenize", "messages", "x", "tools", "chat_template", "self", "")

_SPECIAL: dict[str, Callable[[Target, random.Random], Any]] = {
    "prompt": _prompt,
    "messages": _messages,
    "tools": _tools,
    "tool_choice": _bounded("none", "auto", "required", {"type": "function"}, None),
    "logit_bias": _bias,
    "stop_token_ids": _ids,
    "model": lambda target, rng: rng.choice((target.model, target.model.upper(), target.model + "\0", "gpt-17", "")),
    "max_tokens": _bounded(0, 1, 2, ANSWER_TOKENS_MAX, 10**15, -1, None),
    "max_completion_tokens": _bounded(0, 1, ANSWER_TOKENS_MAX, 10**9),
    "min_tokens": _bounded(0, 1, 2, ANSWER_TOKENS_MAX, ANSWER_TOKENS_MAX + 1, -1),
    "timeout_s": _bounded(0, 1e-9, 0.01, 0.1, TIMEOUT_S_MAX, -1, Raw("1e400")),
    "n": _bounded(1, 2, 3, 8, 128, 129, 0),
    "best_of": _bounded(1, 2, 3, 8, 20, 129, 0),
    "beam_width": _bounded(1, 2, 4, 16, 129),
    "use_beam_search": _bounded(True, True, False, None),
    "stop": _bounded(
        "", "a", "e", ["a", "b"], [], ["\0"], ["x" * 1000] * 32, ["a"] * 33, "x" * 1001, ["😀", "\ud83d"], [["a"]]
    ),
    "echo": _bounded(True, False, None, 1),
    "stream": _bounded(True, True, False, None, "yes"),
    "stream_options": _bounded({"include_usage": True}, {}, None, {"x": 1}),
    "session": _bounded("s1", "s2", "s3", "", "x" * 200, "x" * 201, "\x1f", "\0"),
    "session_id": _bounded("s1", "s2", ""),
    "session_ttl_s": _bounded(0.001, 0.1, TTL_S_MAX, 604_801, 0),
    "document": _bounded("d1", "d2", "d3", "d4", "none", "", "\0", "x" * 513),
    "cache_salt": _bounded("", "a", "b", "\x1f", "x" * 512, "x" * 513, "\0"),
    "chat_template_kwargs": lambda target, rng: {rng.choice(_TEMPLATE_WORDS): _anything(rng)},
    "seed": _bounded(0, -1, 2**63 - 1, -(2**63), 2**63, 7),
    "ttl_s": _bounded(0.01, TTL_S_MAX, 0, 604_801),
    "endpoint": _bounded("chat", "completions", "x"),
}  # fmt: skip
"""Fields whose types say too little, or whose largest values would only make the attack slow."""


def _value(kind: Any, rng: random.Random, outside: float) -> Any:
    """A value of a field's type, within its limits or at them; with probability ``outside`` beyond them."""
    if rng.random() < outside * 0.3:
        return _anything(rng)
    match kind:
        case inspect.UnionType():
            return _value(rng.choice(kind.types), rng, outside)
        case inspect.IntType() | inspect.FloatType():
            return _number(kind, rng, outside)
        case inspect.StrType():
            least, most = kind.min_length or 0, min(kind.max_length or 2000, 20_000)
            if rng.random() < outside:
                return "x" * rng.choice((max(least - 1, 0), most + 1))
            return rng.choice(("x" * least, "y" * most, rng.choice(TEXTS)))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.ListType():
            count = rng.choice((0, 1, 3, kind.max_length or 5)) + (rng.random() < outside)
            return [_value(kind.item_type, rng, outside) for _ in range(min(count, 300))]
        case inspect.DictType():
            return {
                rng.choice(("1", "a", *TEXTS)): _value(kind.value_type, rng, outside) for _ in range(rng.randrange(4))
            }
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.StructType():
            return {field.name: _value(field.type, rng, outside) for field in kind.fields if rng.random() < 0.6}
        case inspect.NoneType():
            return None
    return _anything(rng)


def _number(kind: Any, rng: random.Random, outside: float) -> Any:
    whole = isinstance(kind, inspect.IntType)
    step = 1 if whole else 1e-9
    least = kind.ge if kind.ge is not None else (kind.gt + step if kind.gt is not None else -1e18)
    most = kind.le if kind.le is not None else (kind.lt - step if kind.lt is not None else 1e18)
    if rng.random() < outside:
        return rng.choice((least - step, most + step, least - 1, most + 1, *NUMBERS))
    between = least + (most - least) * rng.random()
    value = rng.choice((least, most, min(least + step, most), max(most - step, least), between))
    return int(value) if whole else value
