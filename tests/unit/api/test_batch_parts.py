"""The parts of batches: forms read in pieces, inputs, answers on disk, how many requests run at once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from memserve.api.batches.answers import AnswerFiles, encode_answer, encode_missed, line_id
from memserve.api.batches.batch import ERRORS_MAX, LINES_MAX, read_plan, window_s
from memserve.api.batches.form import FieldBegins, FormParser, boundary_of
from memserve.api.batches.pace import HOLD_NS, START, BatchPace
from memserve.api.http.errors import ApiError
from memserve.base.errors import InvariantError

CHAT = "/v1/chat/completions"


def form(boundary: bytes, *fields: tuple[bytes, bytes]) -> bytes:
    parts = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in fields]
    return b"".join([*parts, b"--%b--\r\n" % boundary])


def read(parser: FormParser, pieces: list[bytes]) -> list[tuple[FieldBegins, bytes]]:
    fields: list[tuple[FieldBegins, bytes]] = []
    for piece in pieces:
        for part in parser.push_bytes(piece):
            if isinstance(part, FieldBegins):
                fields.append((part, b""))
            else:
                fields[-1] = (fields[-1][0], fields[-1][1] + part)
    return fields


@pytest.mark.parametrize("seed", range(20))
def test_form_is_read_alike_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    near = (b"\r\n--b", b"\r", b"\n", b"--boundary", b"\r\n--boundar", b"-", b"x" * 50, b"\r\n\r\n")
    value = b"".join(rng.choice(near) for _ in range(30)).replace(b"\r\n--boundary", b"|")
    head = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain'
    body = b"preamble\r\n" + form(
        b"boundary", (b'content-disposition: form-data; name="purpose"', b"batch"), (head, value)
    )
    body += b"epilogue"
    cuts = sorted(rng.randrange(len(body)) for _ in range(rng.randrange(40)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    parser = FormParser(boundary_of("multipart/form-data; boundary=boundary"))
    assert read(parser, pieces) == [
        (FieldBegins("purpose", None), b"batch"),
        (FieldBegins("file", "a.jsonl"), value),
    ]
    assert parser.is_complete


def test_form_holds_no_value_and_ends_only_at_its_boundary() -> None:
    parser = FormParser(b"b")
    list(parser.push_bytes(b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'))
    for _ in range(100):
        pieces = [part for part in parser.push_bytes(b"x" * 10_000) if isinstance(part, bytes)]
        assert sum(map(len, pieces)) >= 10_000 - 8
    assert not parser.is_complete


@pytest.mark.parametrize(
    "body",
    [b"--b\r\nContent-Type: text/plain\r\n\r\nx", b"--b\r\n" + b"x" * 9000, b"--bxx\r\n", b"--b" + b" " * 300],
    ids=["no name", "long head", "behind a boundary", "padding"],
)
def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        list(FormParser(b"b").push_bytes(body))
    assert refused.value.status == 400


def test_bodies_of_other_kinds_are_415() -> None:
    for kind in ("application/json", "multipart/form-data", "", "multipart/mixed; boundary=x"):
        with pytest.raises(ApiError) as refused:
            boundary_of(kind)
        assert refused.value.status == 415
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"


def line(custom_id: str, content: str = "hello", **changes: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes)


def plan_of(folder: Path, *lines: str, most: int = 1 << 20) -> Any:
    path = folder / "input"
    path.write_text("\n".join(lines))
    return read_plan(path, CHAT, most)


def test_requests_with_common_prefixes_stand_together(tmp_path: Path) -> None:
    starts = ["the handbook says " * 40, "another text " * 40, "x"]
    texts = [f"{start}{ending * 30}{number}" for number in range(30) for start in starts for ending in "ab"]
    plan = plan_of(tmp_path, *[line(str(number), text) for number, text in enumerate(texts)])
    assert not plan.errors and sorted(entry.number for entry in plan.lines) == list(range(1, len(texts) + 1))
    order = [texts[entry.number - 1] for entry in plan.lines]
    for start in starts[:2]:
        places = [place for place, text in enumerate(order) if text.startswith(start)]
        assert places == list(range(places[0], places[0] + len(places)))
    data = (tmp_path / "input").read_bytes()
    assert all(texts[e.number - 1] in data[e.offset : e.offset + e.nbytes].decode() for e in plan.lines)


WRONG = {
    "no json": ("{", "invalid_json_line", None),
    "a list": ("[1]", "invalid_json_line", None),
    "no body": ('{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}', "invalid_json_line", "body"),
    "deep": ('{"custom_id": "x", "body": ' + "[" * 2000 + "]" * 2000 + "}", "invalid_json_line", None),
    "empty id": (line(""), "invalid_custom_id", "custom_id"),
    "twice": (line("first"), "duplicate_custom_id", "custom_id"),
    "method": (line("x", method="GET"), "invalid_method", "method"),
    "url": (line("x", url="/v1/completions"), "mismatched_url", "url"),
    "stream": (line("x", body={"stream": True}), "invalid_request", "stream"),
    "long": (line("x", "y" * 10_000), "line_too_long", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lines_are_named(tmp_path: Path, name: str) -> None:
    text, code, param = WRONG[name]
    plan = plan_of(tmp_path, line("first"), "", text, line("last"), most=2000)
    (error,) = plan.errors
    assert (error.code, error.param) == (code, param)
    assert code == "line_too_long" or error.line == 3
    assert [entry.number for entry in plan.lines] == [1, 4]


def test_inputs_that_are_empty_or_too_long_are_refused(tmp_path: Path) -> None:
    assert [error.code for error in plan_of(tmp_path, "", " ").errors] == ["empty_file"]
    assert len(plan_of(tmp_path, *["{"] * 3 * ERRORS_MAX).errors) == ERRORS_MAX
    path = tmp_path / "input"
    path.write_text("\n".join(line(str(number)) for number in range(LINES_MAX + 1)))
    plan = read_plan(path, CHAT, 1 << 20)
    assert [error.code for error in plan.errors] == ["too_many_tasks"]


def test_windows_are_minutes_hours_or_days() -> None:
    assert [window_s(text) for text in ("24h", "90m", "7d")] == [86_400, 5400, 604_800]
    for text in ("", "0h", "31d", "24", "h", "1.5h", "-1h", "24H"):
        with pytest.raises(ApiError):
            window_s(text)


BATCH = "batch_0123"


def answer(number: int) -> bytes:
    return encode_answer(line_id(BATCH, number), f"r{number}", 200, "req-1", b'{"text": "x"}')


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_torn_last_line_is_cut_off_and_asked_again(tmp_path: Path, cut: int) -> None:
    answers = AnswerFiles(tmp_path / "out", tmp_path / "err")
    for number in (3, 1, 2):
        answers.append_answer(number, answer(number), is_error=False)
    missed = encode_missed(line_id(BATCH, 9), "r9", "batch_expired", "too late")
    answers.append_answer(9, missed, is_error=True)
    answers.close()
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole[:-cut])
    again = AnswerFiles(tmp_path / "out", tmp_path / "err")
    assert [number for number in range(10) if again.is_answered(number)] == [1, 3, 9]
    with pytest.raises(InvariantError):
        again.append_answer(3, answer(3), is_error=False)
    again.append_answer(2, answer(2), is_error=False)
    assert again.counts(10) == again.counts(10).__class__(10, 3, 1)
    again.close()
    assert (tmp_path / "out").read_bytes() == whole


def test_files_without_lines_are_removed(tmp_path: Path) -> None:
    AnswerFiles(tmp_path / "out", tmp_path / "err").close()
    assert not list(tmp_path.iterdir())


def answered(pace: BatchPace, now_ns: int, times: int = 1) -> None:
    for _ in range(times):
        while pace.has_room:
            pace.begin_request()
        pace.end_request(is_refused=False, now_ns=now_ns)


def test_requests_of_batches_grow_in_number_while_alone() -> None:
    pace = BatchPace(most=40)
    answered(pace, 0, times=10)
    assert pace.limit == START + 10
    answered(pace, 0, times=1000)
    assert pace.limit == 40


def test_refusals_and_queues_make_batches_smaller() -> None:
    pace = BatchPace()
    answered(pace, 0, times=60)
    before = pace.limit
    pace.begin_request()
    pace.end_request(is_refused=True, now_ns=0)
    assert pace.limit <= before // 2 + 1
    answered(pace, HOLD_NS - 1, times=5)
    assert pace.limit <= before // 2 + 1
    pace.note_waiting(pace.in_flight - 3)
    assert pace.limit == 3
    answered(pace, HOLD_NS, times=1)
    assert pace.limit == 3
    pace.note_waiting(0)
    answered(pace, HOLD_NS, times=pace.in_flight)
    assert pace.limit > 3


def test_batches_shrink_to_one_where_interactive_requests_wait() -> None:
    pace, now_ns = BatchPace(), 0
    answered(pace, 0, times=60)
    for _ in range(12):
        pace.note_interactive(queue_ns=50, to_first_token_ns=100, now_ns=now_ns)
        now_ns += HOLD_NS
        while pace.in_flight > pace.limit:
            pace.end_request(is_refused=False, now_ns=now_ns - 1)
    assert pace.limit == 1
    pace.note_interactive(queue_ns=1, to_first_token_ns=100, now_ns=now_ns + HOLD_NS)
    answered(pace, now_ns + HOLD_NS, times=3)
    slowly = pace.limit
    assert slowly < 4
    answered(pace, now_ns + 3 * HOLD_NS, times=3)
    assert pace.limit >= slowly + 3
