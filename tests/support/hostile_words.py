"""Odd words of HTTP and JSON, for ``hostile_grammar``."""

from __future__ import annotations

from typing import Any


class Raw(str):
    """Characters that stand in the JSON as they are."""


NAMES = (
    "x-a", "accept", "cookie", "x-request-id", "authorization", "origin", "content-type", "user-agent", "te", "via",
    "x-forwarded-for", "accept-encoding", "if-none-match", "range", "x-memserve-explain", "expect", "upgrade",
    "connection", "access-control-request-method", "a" * 300, "!#$%&'*+-.^_`|~",
)  # fmt: skip
"""Headers that requests carry."""


VALUES = (
    "", "x", "*/*", "Bearer x", "Bearer ", "null", "https://evil.example", "100-continue", "h2c", "keep-alive",
    "close", "gzip", "a, b,, c", "=?utf-8?q?x?=", "x" * 5000, "\xff\xfe", "1", "true", "bytes=0-1", "text/plain", '"',
    "application/json; charset=utf-7", "PUT", "%s%n", "' OR 1=1", "${jndi:ldap://x}",
)  # fmt: skip
"""And what they say."""


LINES = (
    b"content-length: 5", b"content-length: -1", b"content-length: +5", b"content-length: 5, 5",
    b"content-length: 0x10", b"content-length: 99999999999999999999999", b"content-length: 18446744073709551615",
    b"content-length:", b"content-length: 1e3", b"content-length : 5", b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked", b"transfer-encoding: identity", b"transfer-encoding: chunked, chunked",
    b"transfer-encoding:\x0bchunked", b"Transfer-Encoding : chunked", b" folded: line", b"\tfolded", b"no colon",
    b": no name", b"x\0y: z", b"x: a\0b", b"x: a\rb", b"x: a\nb", b"\xc3\xa9: \xc3\xa9", b"host: y", b"host:",
    b"x:" + b"y" * 70_000, b"x: y\r\n" * 200, b"connection: upgrade\r\nupgrade: websocket", b"connection: close",
    b"expect: 100-continue", b"expect: nonsense", b"content-encoding: gzip", b"content-type: text/plain",
    b"content-type:", b"sec-websocket-key: x", b"x-request-id: " + b"a" * 999, b"x-request-id: a b",
    b"x-request-id: \xff",
)  # fmt: skip
"""Lines of a head with which most requests are wrong."""


FIRST_LINES = (
    b"GET / HTTP/1.1", b"GET / HTTP/2.0", b"GET / HTTP/9.9", b"GET /", b"GET", b"GET  /  HTTP/1.1", b"PRI * HTTP/2.0",
    b"GET / HTTP/1.1 x", b"GET / http/1.1", b"GET /\0 HTTP/1.1", b"\x16\x03\x01\x02\x00\x01",
    b"PROXY TCP4 1.2.3.4 5.6.7.8 9 9", b"G\xc3\x89T / HTTP/1.1", b"GET /\xff HTTP/1.1",
    b"POST /v1/completions HTTP/1.", b"A" * 5000, b"GET " + b"/" * 17_000 + b" HTTP/1.1", b"CONNECT x:443 HTTP/1.1",
    b"GET x:y@z HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET http://[ HTTP/1.1", b"HTTP/1.1 200 OK", b"",
)  # fmt: skip
"""First lines."""


CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n", b"-1\r\n", b"fffffffff\r\n", b"ffffffff\r\nx", b" 5\r\nhello\r\n",
    b"5 \r\nhello\r\n", b"5\nhello\n0\n\n", b"5\r\nhelloX\r\n", b"5;a=\"\n\"\r\nhello\r\n", b"g\r\n", b"\r\n",
    b"0" * 2000 + b"\r\n", b"5;" + b"x" * 2000, b"1\r\n{\r\n" * 300, b"0\r\n" + b"t: v\r\n" * 4000 + b"\r\n",
    b"0\r\nt: " + b"v" * 20_000, b"0\r\n t\r\n\r\n", b"0\r\n\r\n\r\n", b"0\r\nx\ny\r\n\r\n",
    b"5\r\nhello\r\n0\r\ncontent-length: 9\r\n\r\n", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
)  # fmt: skip
"""Parts of chunked bodies."""


TEXTS = (
    "", "a", "hi there", "\0", "\ud800", "\udfff\ud800", "é東京😀", "\u200d" * 500, "e\u0301" * 300, "<|end|>",
    "<|im_start|>", "{{ 7*7 }}", "{% for %}", "\ufeff", "\u202e", "\\", '"', "a" * 3000, "\x1f\x1e",
    "../../etc/passwd", "refuse me", "\n" * 200,
)  # fmt: skip
"""Strings in JSON."""


NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 1.5, -0.0, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63) - 1,
    Raw("1e400"), Raw("-1e400"), Raw("1e-400"), Raw("5e-324"), Raw("NaN"), Raw("Infinity"), Raw("1" * 5000),
    Raw("1.0"), Raw("1e2"), Raw("0." + "3" * 3000), Raw("-0"), Raw("01"), Raw("+1"), Raw(".5"), Raw("1."), Raw("0x10"),
    Raw("1e99999999999999999999"),
)  # fmt: skip
"""Numbers in JSON, and what only looks like one."""


DEEP = (
    "[" * 60 + "]" * 60, "[" * 2000 + "]" * 2000, '{"a":' * 400 + "1" + "}" * 400, "[" * 20_000, '{"a":[' * 900,
)  # fmt: skip
"""Nested JSON."""
