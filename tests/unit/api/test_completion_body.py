"""A completion's body is read in one way for token ids and in another for everything else: with one outcome."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from memserve._core import json_cut_ids
from memserve.api.http.errors import ApiError
from memserve.api.openai.endpoints import parse_completion
from memserve.api.openai.request.schema import CompletionBody, Leniency, parse_leniently

PLAIN = ["[1]", "[0]", "[1,2,3]", " [ 1 ,\n2\t,\r3 ] ", "[2147483647]", "[7,0,0,49151]"]
OTHER = [
    '"text"', '""', '"Gr\\u00fc\\u00dfe"', "[]", "[[1,2],[3]]", '["a","b"]', "null", "true", "{}", "[true]", "[1.0]",
    "[1e3]", "[-1]", "[-0]", "[2147483648]", "[99999999999999999999999]", "[1,null]", '[1,"a"]', "12", "1.5",
    "[1e999]", "[01]", "[1,]", "[,1]", "[1 2]", "[1", "1]", "[1]]", '"\\ud800"', '"\\x"', '"a', "[0x1]", "[+1]", "[1.]",
]  # fmt: skip


def outcome(parse, data: bytes):
    try:
        body, ignored = parse(data)
    except ApiError as error:
        return error.status, error.encode_body()
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    if isinstance(fields["prompt"], np.ndarray):
        assert fields["prompt"].dtype == np.int32
        fields["prompt"] = fields["prompt"].tolist()
    return fields, ignored


def check_alike(data: bytes, leniency: Leniency) -> None:
    quick = outcome(lambda text: parse_completion(text, leniency), data)
    assert quick == outcome(lambda text: parse_leniently(text, CompletionBody, leniency), data), data


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize("prompt", [*PLAIN, *OTHER])
def test_a_body_is_read_alike(prompt: str, is_lenient: bool) -> None:
    leniency = Leniency(all_fields=is_lenient)
    for fields in ("", ',"max_tokens":1', ',"max_tokens":-1', ',"odd":1', ',"suffix":"x"', ',"n":"2"', ","):
        check_alike(f'{{"model":"m","prompt":{prompt}{fields}}}'.encode(), leniency)
    check_alike(f'{{"prompt":{prompt}}}'.encode(), leniency)
    check_alike(b'{"model":"m","prompt":"\xff"}', leniency)
    check_alike(b'{"model":"m"}', leniency)


def test_any_damage_is_found_alike() -> None:
    rng, leniency = random.Random(1), Leniency(all_fields=False)
    for _ in range(2000):
        prompt = rng.choice([[rng.randrange(60_000) for _ in range(rng.randrange(1, 6))], "some text", [[1], [2]]])
        data = bytearray(json.dumps({"model": "m", "prompt": prompt, "max_tokens": 3}).encode())
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.choice(b'0123456789,.[]{}"-e \\\xff\x00')
        check_alike(bytes(data), leniency)


@pytest.mark.parametrize("text", PLAIN)
def test_plain_ids_become_an_array(text: str) -> None:
    body = f'{{"n":[7],"prompt":{text},"a":"prompt"}}'
    cut = json_cut_ids(body.encode(), "prompt")
    assert cut is not None
    assert cut[0].decode() == body.replace(text.strip(), "null")
    assert np.frombuffer(cut[1], np.int32).tolist() == json.loads(text)


@pytest.mark.parametrize("text", [text for text in OTHER if text != "[1]]"])  # behind the row, the parser looks
def test_anything_else_is_left_to_the_parser(text: str) -> None:
    for end in ("", ',"n":1'):
        assert json_cut_ids(f'{{"prompt":{text}{end}}}'.encode(), "prompt") is None


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":[1],"prompt":[2]}', '{"prompt":[1],"pr\\u006fmpt":[2]}', '{"a":{"prompt":[1]}}', '["prompt",[1]]',
        '{"prompts":[1]}', '{"promp":[1]}', '{"a":"prompt"}', '"prompt":[1]', "{", "", '{"prompt"', '{"prompt":',
    ],
)  # fmt: skip
def test_absent_or_repeated_field_is_left_to_the_parser(body: str) -> None:
    assert json_cut_ids(body.encode(), "prompt") is None
    check_alike(body.encode(), Leniency(all_fields=False))


@pytest.mark.parametrize("separator", [",", ", ", " , "])
def test_rows_of_any_length_are_read_right(separator: str) -> None:
    rng = random.Random(2)
    for count in (1, 2, 3, 40, 40_000):
        ids = [rng.randrange(10 ** rng.randrange(1, 10)) for _ in range(count)]
        cut = json_cut_ids(f'{{"prompt":[{separator.join(map(str, ids))}]}}'.encode(), "prompt")
        assert cut is not None and np.frombuffer(cut[1], np.int32).tolist() == ids
