"""The reader of requests: however bytes are cut, the same requests; and limits on all that has no end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memserve.api.http import parser as wire
from memserve.api.http.config import EdgeConfig
from memserve.api.http.parser import END, Head, HttpSyntaxError, RequestReader
from memserve.base.units import KIB

LIMITS = EdgeConfig()
CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SIZED = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
PLAIN = b"GET /c?d=%20e HTTP/1.1\r\nhost: x\r\n\r\n"


def requests(pieces: list[bytes], limits: EdgeConfig = LIMITS) -> list[tuple[str, bytes]]:
    """Path and body of each whole request."""
    reader, found, body = RequestReader(limits), [], b""
    path = ""
    for piece in pieces:
        reader.feed_bytes(piece)
        while (event := reader.next_event()) is not None:
            match event:
                case Head():
                    path, body = event.path, b""
                case bytes():
                    body += event
                case wire._End.END:
                    found.append((path, body))
                    reader.start_next()
    return found


def chunked(sizes: list[int]) -> tuple[bytes, bytes]:
    """A chunked request, and its body."""
    chunks = [bytes([97 + at % 26]) * size for at, size in enumerate(sizes) if size]
    coded = b"".join(b"%X;why=not\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return CHUNKED + coded + b"0\r\nx-trailer: dropped\r\n\r\n", b"".join(chunks)


@given(st.lists(st.sampled_from(["plain", "sized"]) | st.lists(st.integers(0, 300), max_size=5)), st.data())
def test_however_the_bytes_are_cut_the_requests_are_the_same(kinds: list[str | list[int]], data: st.DataObject) -> None:
    """The twin is the list from which the bytes are made."""
    made: list[tuple[bytes, tuple[str, bytes]]] = []
    for kind in kinds:
        if isinstance(kind, list):
            coded, body = chunked(kind)
            made.append((coded, ("/a", body)))
        else:
            made.append({"plain": (PLAIN, ("/c", b"")), "sized": (SIZED, ("/b", b"hello"))}[kind])
    stream = b"".join(coded for coded, _ in made)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[first:last] for first, last in itertools.pairwise([0, *cuts, len(stream)])]
    assert requests(pieces) == [request for _, request in made]


@given(st.binary(max_size=200), st.integers(0, len(CHUNKED) + 30))
@example(b"\n", 0)
@example(b"\r\n\r\n", 3)
def test_noise_is_a_request_or_an_error(noise: bytes, at: int) -> None:
    stream, _ = chunked([3, 4])
    try:
        requests([stream[:at] + noise + stream[at:]])
    except HttpSyntaxError as error:
        assert 400 <= error.status < 600 and len(error.message) < 300


def test_nothing_is_read_behind_a_complete_request() -> None:
    reader = RequestReader(LIMITS)
    reader.feed_bytes(PLAIN * 2)
    assert isinstance(reader.next_event(), Head) and reader.next_event() is END and reader.next_event() is None
    assert reader.unread_bytes == len(PLAIN), "the second request was touched"
    reader.start_next()
    assert isinstance(reader.next_event(), Head) and reader.unread_bytes == 0


def test_a_head_gives_what_asgi_wants() -> None:
    reader = RequestReader(LIMITS)
    reader.feed_bytes(b"\r\nGET /a%20b/?q=1 HTTP/1.1\r\nHost: x\r\nX-Y: z\r\nConnection: close\r\n\r\n")
    head = reader.next_event()
    assert isinstance(head, Head)
    assert (head.method, head.path, head.raw_path, head.query) == ("GET", "/a b/", b"/a%20b/", b"q=1")
    assert head.first_header(b"x-y") == b"z" and head.first_header(b"nothing") is None and not head.keep_alive


ENDLESS = {
    "head": (b"GET /c HTTP/1.1\r\n", b"a: b\r\n", LIMITS.head_bytes_max, 431),
    "one header": (b"GET /c HTTP/1.1\r\na: ", b"b" * 100, LIMITS.head_bytes_max, 431),
    "URL": (b"GET /", b"c" * 100, LIMITS.head_bytes_max, 431),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n", LIMITS.trailer_bytes_max, 431),
    "one trailer": (CHUNKED + b"0\r\na: ", b"b" * 100, LIMITS.trailer_bytes_max, 431),
    "chunk extension": (CHUNKED + b"5;", b"b" * 100, wire.CHUNK_LINE_BYTES_MAX, 400),
    "chunk size": (CHUNKED, b"0" * 100, wire.CHUNK_LINE_BYTES_MAX, 400),
    "tiny chunks": (CHUNKED, b"1;e\r\nx\r\n", 2 * wire.FRAMING_BYTES_FREE, 400),
}


@pytest.mark.parametrize("begin, more, most, status", ENDLESS.values(), ids=ENDLESS)
def test_unbounded_input_is_refused_and_not_buffered(begin: bytes, more: bytes, most: int, status: int) -> None:
    reader, held = RequestReader(LIMITS), 0
    reader.feed_bytes(begin)
    with pytest.raises(HttpSyntaxError) as caught:
        for _ in range(most):
            while isinstance(reader.next_event(), Head | bytes):
                pass
            reader.feed_bytes(more)
            held = max(held, reader.unread_bytes)
    assert caught.value.status == status and held <= most + len(begin) + len(more)


REFUSED = {
    "TLS": (b"\x16\x03\x01", 400),
    "no request line": (b"GET\r\n\r\n", 400),
    "a bare line feed": (b"GET / HTTP/1.1\nhost: x\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
    "length and chunks": (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "another coding": (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501),
    "two codings": (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "chunked twice": (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "chunks in 1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 501),
    "version 3": (b"GET / HTTP/3.0\r\n\r\n", 400),
    "version 2": (b"GET / HTTP/2.0\r\n\r\n", 505),
    "a long URL": (b"GET /" + b"a" * LIMITS.url_bytes_max + b" HTTP/1.1\r\n\r\n", 414),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (LIMITS.fields_max + 1) + b"\r\n", 431),
    "a chunk that is longer than it says": (CHUNKED + b"2\r\nabc\r\n", 400),
    "a negative chunk": (CHUNKED + b"-1\r\n", 400),
    "a huge chunk": (CHUNKED + b"fffffffff\r\n", 400),
    "a line feed in a trailer": (CHUNKED + b"0\r\na: b\nc\r\n\r\n", 400),
}


@pytest.mark.parametrize("data, status", REFUSED.values(), ids=REFUSED)
def test_malformed_requests_are_refused(data: bytes, status: int) -> None:
    with pytest.raises(HttpSyntaxError) as caught:
        requests([data])
    assert caught.value.status == status


def test_chunks_of_a_usual_size_may_be_many() -> None:
    body = [4 * KIB] * 1000
    coded, whole = chunked(body)
    assert requests([coded]) == [("/a", whole)]


def test_the_rest_of_a_body_is_known_by_its_length_alone() -> None:
    reader = RequestReader(LIMITS)
    reader.feed_bytes(SIZED[:-2])
    assert isinstance(reader.next_event(), Head) and reader.next_event() == b"hel" and reader.rest_bytes == 2
    reader.feed_bytes(b"lo")
    assert reader.next_event() == b"lo" and reader.next_event() is END and reader.rest_bytes == 0
    reader = RequestReader(LIMITS)
    reader.feed_bytes(CHUNKED)
    assert isinstance(reader.next_event(), Head) and reader.rest_bytes is None
