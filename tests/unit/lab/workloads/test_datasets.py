"""Readers of data files: what they make, what they refuse and where, and the reference figures of public data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from memserve.base.errors import UserError
from memserve.cli.main import run
from memserve_lab.bench import datasets
from memserve_lab.bench.catalogue import KINDS, Arrivals, Recipe, build, own_workload
from memserve_lab.workloads.records import Blocks, Chat, History, Span, Text
from memserve_lab.workloads.shape import Caps
from memserve_lab.workloads.statistics import measure

MOONCAKE = {"timestamp": 27_482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 9]}
CHAT = {"id": 7, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
CLIENT = {
    "client": 2,
    "windows": [[0, 0.5, 1.0, "Gamma", 0.9, 2.0]],
    "lengths": [{"t": 0, "input_q": [1], "output_q": [2]}],
}
TREE = {"id": "t", "nodes": [{"i": 0, "parent": -1, "role": "user", "content": "x"}]}
CALLS = {"id": "c", "calls": [{"base": -1, "keep": 0, "append": "abc", "output": "x"}]}
DOCUMENT = {"id": "d", "document": "text", "questions": [{"question": "why?", "answer": "because"}]}
EPISODE = {"id": "e", "question": "who?", "steps": [{"thought": "t", "action": "a", "observation": "o"}]}
AGENTIC = {
    "id": "s",
    "block_size": 64,
    "requests": [
        {"t": 0, "type": "n", "in": 130, "out": 9, "hash_ranges": [[1, 2]]},
        {"t": 5, "type": "subagent", "requests": [{"t": 0, "type": "n", "in": 70, "out": 3, "hash_ranges": [[1, 1]]}]},
        {"t": 9, "type": "s", "in": 190, "out": 9, "think_time": 4.0, "hash_ranges": [[1, 2], [7, 7]]},
    ],
}


def written(folder: Path, *lines: object, name: str = "file.jsonl") -> Path:
    """A file of JSON lines; text is written as it is."""
    path = folder / name
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


# -- what is read


@pytest.mark.parametrize("name", ["file.jsonl", "file.jsonl.gz"])
def test_mooncake_rows(tmp_path: Path, name: str) -> None:
    (row,) = datasets.read_mooncake(written(tmp_path, MOONCAKE, "", name=name))
    assert (row.at_s, row.input_tokens, row.output_tokens) == (27.482, 1100, 52)
    assert row.spans == (Span(46, 1024), Span(9, 76))


def test_azure_rows(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    first, second = datasets.read_azure(written(tmp_path, *lines, name="file.csv"))
    assert second.at_s - first.at_s == pytest.approx(4.314579, abs=1e-5)
    assert (first.input_tokens, first.output_tokens, first.spans) == (374, 44, None)


def test_agentic_sessions_and_their_sub_agents(tmp_path: Path) -> None:
    session, helper = datasets.read_agentic(written(tmp_path, AGENTIC))
    assert [row.spans for row in session.rows] == [(Span(1, 128),), (Span(1, 128), Span(7, 62))]
    assert [row.think_s for row in session.rows] == [0.0, 4.0]
    assert (helper.parent, helper.rows[0].input_tokens) == ("s", 70)


def test_clients(tmp_path: Path) -> None:
    (client,) = datasets.read_clients(written(tmp_path, CLIENT))
    assert (client.record_id, client.windows[0].requests_per_s, client.windows[0].shape) == ("2", 0.5, 0.9)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (CHAT, ["user:hi", "assistant:hello"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]}, ["user:a"]),
        ({"turns": ["one", "two"]}, ["user:one", "user:two"]),
        ({"transcript": "user: a\nb\nassistant: None\ntool: 5\nassistant: c"}, ["user:a\nb", "user:5", "assistant:c"]),
        ({**CHAT, "contexts": ["fact "]}, ["user:Passages:\nfact\n\nhi", "assistant:hello"]),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": None}]}, ["user:x"]),
    ],
    ids=["messages", "sharegpt", "turns", "transcript", "passages", "tools"],
)  # fmt: skip
def test_forms_of_chats(tmp_path: Path, record: object, said: list[str]) -> None:
    (chat,) = datasets.read_conversations(written(tmp_path, record))
    assert [f"{message.role}:{message.content}" for message in chat.messages] == said


def test_a_tree_is_a_chat_for_each_leaf(tmp_path: Path) -> None:
    parents = {0: -1, 1: 0, 2: 0, 3: 1}
    nodes = [{"i": i, "parent": p, "role": "user", "content": str(i)} for i, p in parents.items()]
    chats = datasets.read_conversations(written(tmp_path, {"id": "t", "nodes": nodes}))
    assert [("".join(m.content for m in chat.messages), chat.group) for chat in chats] == [("02", "t"), ("013", "t")]


def test_calls_are_put_together_again(tmp_path: Path) -> None:
    calls = [
        {"base": -1, "keep": 0, "append": "abcdef", "output": "x"},
        {"base": 0, "keep": 3, "append": "XY", "output": "y"},
        {"base": 1, "keep": 4, "append": "", "output": "z"},
    ]
    (log,) = datasets.read_call_logs(written(tmp_path, {"id": "c", "calls": calls}))
    assert [(call.prompt, call.output) for call in log.calls] == [("abcdef", "x"), ("abcXY", "y"), ("abcX", "z")]


def test_a_users_own_files(tmp_path: Path) -> None:
    chat, document, prompt, trace = (
        own_workload(written(tmp_path, record)).sessions[0]
        for record in (
            CHAT,
            {"id": "d", "document": "long", "questions": [{"question": "why?"}]},
            {"prompt": "Once", "output": "upon a time"},
            MOONCAKE,
        )
    )
    assert isinstance(chat.turns[0].says, Chat) and chat.history is History.CLOSED
    assert isinstance(document.turns[0].says, Chat) and document.session_id == "d"
    assert prompt.turns[0].says == Text("Once") and prompt.turns[0].output_tokens_max == 3
    assert isinstance(trace.turns[0].says, Blocks) and trace.turns[0].output_tokens_max == 52


# -- what is refused, and where

TOO_FEW = {**MOONCAKE, "hash_ids": [1]}
BAD_LINES = [
    (datasets.read_mooncake, [MOONCAKE, "{not json"], "line 2: not JSON"),
    (datasets.read_mooncake, [MOONCAKE, "[1, 2]"], "line 2: an object was expected"),
    (datasets.read_mooncake, [{**MOONCAKE, "input_length": -5}], "line 1: 'input_length' should be a whole number"),
    (datasets.read_mooncake, [{**MOONCAKE, "input_length": True}], "line 1: 'input_length' should be a whole number"),
    (datasets.read_mooncake, [MOONCAKE, "", TOO_FEW], "line 3: 1100 tokens are not 1 blocks"),
    (datasets.read_mooncake, [{**MOONCAKE, "hash_ids": [1, "2", 3]}], "'hash_ids' should be whole numbers"),
    (datasets.read_mooncake, [{**MOONCAKE, "timestamp": float("nan")}], "line 1: 'timestamp' should be a number"),
    (datasets.read_mooncake, [{"timestamp": 1}], "line 1: 'hash_ids' is missing (there: timestamp)"),
    (datasets.read_mooncake, ['{"timestamp": ' + "9" * 5000 + "}"], "line 1: "),
    (datasets.read_mooncake, [{**MOONCAKE, "timestamp": 10**400}], "line 1: 'timestamp' should be a number"),
    (datasets.read_mooncake, ["[" * 100_000], "line 1: "),
    (datasets.read_mooncake, [], "contains no records"),
    (own_workload, ['{"prompt": "\\ud800"}'], "line 1: 'prompt' contains half a character"),
    (datasets.read_conversations, [CHAT, {"messages": "hi"}], "line 2: 'messages' should be a list"),
    (datasets.read_conversations, [{"messages": [{"role": "king", "content": "x"}]}], "line 1: unknown role 'king'"),
    (datasets.read_conversations, [{"nodes": [{"i": 1, "parent": 0}]}], "line 1: node 1 comes before its parent 0"),
    (datasets.read_call_logs, [{"calls": [{"base": 0, "keep": 1, "append": ""}]}], "must be an earlier call"),
    (datasets.read_agentic, [{**AGENTIC, "block_size": 16}], "'block_size' should be 64"),
    (datasets.read_agentic, [{**AGENTIC, "requests": [{"in": 64, "out": 1, "hash_ranges": [[5, 1]]}]}], "not a range"),
    (datasets.read_agentic, [{**AGENTIC, "requests": [{"in": 9, "out": 1, "hash_ranges": [[1, 2]]}]}], "more than the"),
    (datasets.read_clients, [{**CLIENT, "windows": [[0, 1, 1, "Poisson", 1, 1]]}], "unknown family of gaps 'Poisson'"),
    (datasets.read_clients, [{**CLIENT, "windows": [[0, 1, 1, "Gamma", 0, 1]]}], "a Gamma distribution cannot have"),
    (datasets.read_clients, [{**CLIENT, "windows": [[0, 1]]}], "a window should be"),
    (datasets.read_clients, [{**CLIENT, "windows": [["x", 1, 1, "Gamma", 1, 1]]}], "line 1: 't' should be a number"),
    (datasets.read_clients, [{**CLIENT, "lengths": [{"t": 0, "input_q": [], "output_q": [1]}]}], "'input_q' should be"),
    (datasets.read_documents, [{"document": "d", "questions": [{"q": "?"}]}], "line 1: 'question' is missing"),
    (datasets.read_azure, ["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "line 2: 'TIMESTAMP'"),
    (datasets.read_azure, ["TIMESTAMP,ContextTokens", "2023-11-16 18:15:46.68,1"], "'GeneratedTokens' is missing"),
    (own_workload, [CHAT, {"what": 1}], "line 2: none of the known forms"),
    (own_workload, [CHAT, {"prompt": "x"}], "line 2: 'messages' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "lines", "says"), BAD_LINES, ids=[case[2][:40] for case in BAD_LINES])
def test_a_malformed_file_is_one_clear_error(tmp_path: Path, read: object, lines: list[object], says: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


READERS = [
    (datasets.read_mooncake, MOONCAKE),
    (datasets.read_agentic, AGENTIC),
    (datasets.read_clients, CLIENT),
    (datasets.read_conversations, CHAT),
    (datasets.read_conversations, TREE),
    (datasets.read_call_logs, CALLS),
    (datasets.read_documents, DOCUMENT),
    (datasets.read_episodes, EPISODE),
    (own_workload, CHAT),
    (own_workload, {"prompt": "x"}),
]
ODD = [None, True, -1, 0, 1.5, float("inf"), 10**30, "", "text", [], [[]], [None], {}, {"a": 1}]


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place in a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def with_odd(value: object, path: tuple[object, ...], odd: object) -> object:
    """A copy of ``value`` with ``odd`` at ``path``."""
    if not path:
        return odd
    made = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = with_odd(made[path[0]], path[1:], odd)
    return made


@pytest.mark.parametrize(("read", "record"), READERS)
def test_whatever_stands_in_any_field_is_read_or_refused(tmp_path: Path, read: object, record: object) -> None:
    """Every odd value at every place: a workload, or one error that names file and line, and nothing else."""
    refused = 0
    for place in places(record):
        for odd in ODD:
            path = written(tmp_path, with_odd(record, place, odd))
            try:
                read(path)
            except UserError as error:
                refused += 1
                assert f"{path} line 1" in str(error) or f"{path} contains no" in str(error)
    assert refused > len(ODD) // 2


def test_a_torn_file_names_the_last_good_line(tmp_path: Path) -> None:
    path = written(tmp_path, *[MOONCAKE] * 4000, name="file.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"is damaged after line \d+"):
        datasets.read_mooncake(path)


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="damaged"):
        datasets.read_mooncake(path)
    with pytest.raises(UserError, match="cannot read"):
        datasets.read_mooncake(tmp_path / "nothing")


# -- by name

BUILT_IN = ["chat", "documents", "react", "groups", "trace"]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_without_data_a_seed_is_enough(kind: str) -> None:
    caps = Caps(prompt_tokens_max=400, output_tokens_max=20)
    recipe = Recipe(kind, sessions=10, seed=3, caps=caps, arrivals=Arrivals.POISSON, share_ratio=2, block_tokens=16)
    made = build(recipe)
    assert made == build(recipe)
    assert len(made.sessions) == 20
    measured = measure(made)
    assert measured.output_tokens.max() <= 20
    assert measured.prompt_tokens.max() <= 400
    assert measured.shared_share >= 0.5, "every session is there twice"


@pytest.mark.parametrize("arrivals", Arrivals)
def test_every_way_of_arriving_by_name(arrivals: Arrivals) -> None:
    made = build(Recipe("trace", sessions=5, arrivals=arrivals, speed=2.0, users=4))
    assert made.users == (4 if arrivals is Arrivals.CLOSED else None)
    times = [session.arrival_s for session in made.sessions]
    assert times == sorted(times), "a trace keeps its order"


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (Recipe("nonsense"), "unknown workload"),
        (Recipe("azure-conv"), "--data"),
        (Recipe("file"), "--file"),
        (Recipe("chat", sessions=0), "got 0"),
        (Recipe("chat", data=Path("/nonexistent")), "mtbench101"),
    ],
)
def test_unbuildable_recipe_is_refused_with_advice(recipe: Recipe, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(recipe)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, {**MOONCAKE, "timestamp": 0}, MOONCAKE)
    assert run(["bench", "workload", "--kind", "file", "--file", str(path)]) == 0
    assert "shared prefix, all blocks: 0.500 of 6" in capsys.readouterr().out
    assert run(["bench", "workload", "--kind", "file", "--file", str(path), "--speed", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["due_last_s"], summary["prompt_tokens"]["mean"]) == (2, 13.741, 1100)


def test_the_command_draws_what_is_read_and_what_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two workloads, of which one is also made from the seed: three lines in each of the five pictures."""
    pytest.importorskip("matplotlib", reason="matplotlib (extra: bench) is not installed")
    (tmp_path / "traces").mkdir()
    written(tmp_path / "traces", MOONCAKE, MOONCAKE, name="mooncake_conversation_0-30min.jsonl.gz")
    written(tmp_path / "traces", MOONCAKE, name="mooncake_synthetic_first_half.jsonl.gz")
    command = ["bench", "workload", "--kind", "trace,synthetic", "--data", str(tmp_path)]
    assert run([*command, "--plot", str(tmp_path / "shapes.svg")]) == 0
    assert capsys.readouterr().out.count("shared prefix, all blocks") == 2
    drawn = (tmp_path / "shapes.svg").read_text()
    for name in (
        "trace, mooncake_conversation_0-30min (2 requests; 0.500", "trace, built-in (1,000 requests",
        "synthetic, mooncake_synthetic_first_half (1 requests; 0.000",
    ):  # fmt: skip
        assert f"<!-- {name}" in drawn
    assert run([*command, "--plot", str(tmp_path / "shapes.novel")]) == 1
    assert "cannot draw" in capsys.readouterr().err


def test_a_models_own_tokenizer_weighs_the_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, path = tmp_path / "model", written(tmp_path, {"prompt": "one two three"})
    model.mkdir()
    words = Tokenizer(WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").touch()
    command = ["bench", "workload", "--kind", "file", "--file", str(path), "--json", "--model", str(model)]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"]["mean"] == 3
    assert run([*command, "--prompt-tokens-max", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"]["mean"] == 2


def test_the_command_names_file_and_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE, "oops")
    assert run(["bench", "workload", "--kind", "file", "--file", str(path)]) != 0
    assert f"{path} line 2: not JSON" in capsys.readouterr().err


# -- public data (needs --data-sets)


@pytest.mark.parametrize(
    ("kind", "blocks", "share", "input_mean", "output_mean"),
    [
        ("trace", 146_464, 0.341, 12_870, 346),
        ("synthetic", 49_401, 0.329, 12_346, 192),
        ("toolagent", 2_873, 0.366, 7_444, 184),
    ],
)
def test_mooncakes_reference_figures(
    data_sets: Path, kind: str, blocks: int, share: float, input_mean: int, output_mean: int
) -> None:
    """Shares of blocks in file order with an unlimited cache, as the data's own description gives them."""
    measured = measure(build(Recipe(kind, data=data_sets)))
    assert measured.blocks.sum() == blocks
    assert round(measured.shared_share, 3) == share
    assert round(measured.prompt_tokens.mean()) == input_mean
    assert round(measured.output_tokens.mean()) == output_mean


@pytest.mark.parametrize("kind", ["chat", "documents", "react", "trace"])
def test_generated_workload_resembles_its_source(data_sets: Path, kind: str) -> None:
    """Lengths, turns and shared prefixes of the built-in workloads against the data that they stand in for."""
    made, source = (measure(build(Recipe(kind, data=folder, seed=1))) for folder in (None, data_sets))
    for column in ("turns", "prompt_tokens", "output_tokens"):
        assert getattr(made, column).mean() == pytest.approx(getattr(source, column).mean(), rel=0.25), column
    assert made.shared_share == pytest.approx(source.shared_share, abs=0.06)


@pytest.mark.parametrize(
    ("kind", "sessions", "requests"),
    [
        ("azure-conv", 10_108, 10_108),
        ("azure-code", 5_740, 5_740),
        ("agentic", 142, 6_436),
        ("fewshot", 27, 540),
        ("tree-chat", 375, None),
        ("task-chat", 300, 2_147),
        ("airline", 60, None),
        ("react", 60, 216),
        ("documents", 105, None),
        ("chat", 1_227, None),
        ("calls-code", 10, 210),
        ("calls-service", 12, 209),
    ],
)
def test_every_data_set_gives_all_its_records(data_sets: Path, kind: str, sessions: int, requests: int | None) -> None:
    made = build(Recipe(kind, data=data_sets))
    assert len(made.sessions) == sessions
    assert requests is None or made.request_count == requests


def test_every_kind_is_built_from_data(data_sets: Path) -> None:
    for kind in KINDS:
        if kind != "file":
            assert build(Recipe(kind, data=data_sets, sessions=3)).request_count >= 3
