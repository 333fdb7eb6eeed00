"""Reads ``multipart/form-data``, in which files are uploaded, piece by piece: a file is never in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memserve.api.http.errors import ApiError, bad_request, echo

PART_HEAD_BYTES_MAX = 8192
_PADDING_BYTES_MAX = 256
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FieldBegins:
    """A field of the form; what comes until the next one is its value."""

    name: str
    filename: str | None
    """None: it is no file."""


def boundary_of(content_type: str) -> bytes:
    """What separates the fields of a body. Raises :class:`ApiError` 415 for a body of another kind."""
    kind, _, parameters = content_type.partition(";")
    match = _BOUNDARY.search(parameters)
    if kind.strip().lower() != "multipart/form-data" or match is None:
        raise ApiError(415, "Unsupported media type: send the file as 'Content-Type: multipart/form-data'")
    return (match[1] or match[2]).encode("latin-1")


class FormParser:
    """Bytes in, fields and pieces of their values out. Holds a delimiter's length, or the head of a field."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # so that the first delimiter is like all others
        self._in_value = self._in_head = False
        self.is_complete = False
        """The last delimiter has been read; what comes behind it is dropped."""

    def push_bytes(self, data: bytes) -> Iterator[FieldBegins | bytes]:
        """The fields that begin in ``data``, and the pieces of their values. Raises :class:`ApiError` 400 for a body
        that is no form."""
        self._held += data
        while not self.is_complete:
            if self._in_head:
                begins = self._read_head()
                if begins is None:
                    return
                yield begins
            piece, is_whole = self._read_value()
            if self._in_value and piece:
                yield piece
            if not is_whole or not self._pass_delimiter():
                return

    def _read_value(self) -> tuple[bytes, bool]:
        """What is there before the next delimiter, and whether that has come; it stays held."""
        place = self._held.find(self._delimiter)
        end = place if place >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
        piece = bytes(self._held[:end])
        del self._held[:end]
        return piece, place >= 0

    def _pass_delimiter(self) -> bool:
        """Read the delimiter at the front. False: its end has not come yet."""
        rest = self._held[len(self._delimiter) :]
        if rest.startswith(b"--"):
            self.is_complete = True
            self._held.clear()
            return True
        padding, line_end, _ = rest.partition(b"\r\n")
        if len(padding) > _PADDING_BYTES_MAX or (len(rest) >= 2 and bytes(padding).strip(b" \t") not in (b"", b"\r")):
            raise bad_request("The form is malformed: something stands behind a boundary")
        if not line_end:
            return False
        del self._held[: len(self._delimiter) + len(padding)]  # the line end stays: a head may be empty
        self._in_value, self._in_head = False, True
        return True

    def _read_head(self) -> FieldBegins | None:
        """The field whose head is complete. None: it is not."""
        head, end, _ = self._held.partition(b"\r\n\r\n")
        if not end:
            if len(self._held) > PART_HEAD_BYTES_MAX:
                raise bad_request(f"The head of a field of the form is longer than {PART_HEAD_BYTES_MAX} bytes")
            return None
        del self._held[: len(head) + len(end)]
        self._in_value, self._in_head = True, False
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                parameters = {key.lower(): text for key, text in _PARAMETER.findall(value)}
                if "name" in parameters:
                    return FieldBegins(parameters["name"], parameters.get("filename"))
        raise bad_request(f"A field of the form has no name: {echo(head.decode('latin-1'))}")
