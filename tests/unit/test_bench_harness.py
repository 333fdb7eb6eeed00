"""``bench/harness``: flags by their defaults, turns and ratios, tables with empty cells, answers read from a stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.clients import Answer
from harness.flags import Commas, options, save
from harness.rounds import Samples, percentile, quartiles, turns
from harness.tables import show


def test_flags_have_the_types_of_their_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--rounds", "5", "--depths", "1,2", "--kinds", "a", "b", "--trace", "x", "--out", str(tmp_path / "r.json")]
    monkeypatch.setattr("sys.argv", ["script", *words, "--", "--port", "1"])
    given = options(
        "What it does.", rest="serve", quick={"rounds": 1}, rounds=3, depths=Commas(8, 32), kinds=["c"], trace=Path,
        model="", slow=False, only=([], "may be repeated"),
    )  # fmt: skip
    assert (given.rounds, given.depths, given.kinds, given.trace) == (5, [1, 2], ["a", "b"], Path("x"))
    assert (given.model, given.slow, given.only, given.serve) == ("", False, [], ["--port", "1"])
    save(given, {"samples": Samples(), "path": Path("y")})
    assert json.loads((tmp_path / "r.json").read_text()) == {"samples": {}, "path": "y"}


def test_quick_sets_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script", "--quick"])
    assert options("What it does.", quick={"rounds": 1}, rounds=3).rounds == 1


def test_each_round_begins_with_another_contender() -> None:
    assert list(turns(2, "ab", warm=1)) == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    samples = Samples()
    samples["mine"], samples["base"] = [1.0, 30.0, 4.0], [1.0, 10.0, 2.0]
    assert samples.ratio("mine", "base") == 2.0
    assert percentile(range(1, 101), 0.99) == 99
    assert quartiles([4, 1, 3, 2]) == (2, 2.5, 3)


def test_a_cell_without_its_field_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    show([{"name": "a", "s": 1.25}, {"name": "b", "s": None}, {"name": "c"}], {"what": "{name}", "time": "{s:.1f} s"})
    assert capsys.readouterr().out.splitlines()[2:] == ["| a | 1.2 s |", "| b |  |", "| c |  |"]
    show([{"at 0.5": 3}], ["at 0.5"])
    assert capsys.readouterr().out.splitlines()[2:] == ["| 3 |"]


def test_an_answer_is_read_from_its_stream() -> None:
    answer = Answer(200)
    parts = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "Pa"}}]},
        {"choices": [{"index": 0, "delta": {"content": "ris"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
    ]
    for number, part in enumerate(parts):
        answer.take(f"data: {json.dumps(part)}", 0.5 * number)
    with pytest.raises(RuntimeError, match="broke off"):
        answer.checked()
    answer.take("data: [DONE]", 2.0)
    assert (answer.checked().text, answer.first_s, answer.steps_s, answer.cached) == ("Paris", 0.5, [0.5], 4)
    assert answer.finish_reason == "stop"


def test_an_error_within_a_stream_is_one() -> None:
    answer = Answer(200, is_whole=True)
    answer.take('data: {"error": {"code": "overloaded"}}', 0.0)
    with pytest.raises(RuntimeError, match="overloaded"):
        answer.checked()
