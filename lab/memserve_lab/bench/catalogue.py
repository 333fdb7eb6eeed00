"""Workloads by name: from a folder of data sets, from a user's file, or from a seed alone.

``build`` reads, generates, samples, scales, caps, copies and sets the arrival times, in this order. The form of a
user's JSONL file is recognised by the first line's fields; all lines have one form. ``id``, and ``group`` of chats, are
optional everywhere:

========================================================  =============================================
fields of a line                                          becomes
========================================================  =============================================
``messages`` or ``conversations`` or ``turns``            a chat: turns, the model's own answers between
``document``, ``questions``                               a document and its questions
``prompt``, ``output``?                                   one request of plain text
``timestamp``, ``input_length``, ``output_length``,       one request of a trace (Mooncake's form)
``hash_ids``
========================================================  =============================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memserve.base.errors import UserError
from memserve_lab.bench import datasets
from memserve_lab.bench.datasets import BadRow, Row, read_json_lines
from memserve_lab.workloads import builtin
from memserve_lab.workloads.arrivals import (
    OVERLAP_DEFAULT,
    Bursty,
    Constant,
    Poisson,
    Process,
    by_request,
    by_session,
    closed_loop,
    trace_time,
)
from memserve_lab.workloads.records import Call, CallLog, Workload
from memserve_lab.workloads.sessions import (
    DOCUMENT_TOKENS,
    Layout,
    chat_workload,
    document_workload,
    group_workload,
    react_workload,
    uniform_workload,
)
from memserve_lab.workloads.shape import Caps, capped, leading, sampled, shared, with_block_tokens, with_turns
from memserve_lab.workloads.tokens import Meter
from memserve_lab.workloads.traces import from_windows, replay, replay_calls, replay_sessions

BUILTIN_SESSIONS = 100
GROUP_USERS = 5
GROUP_PREFIX_TOKENS = 6000
UNIFORM_PROMPT_TOKENS, UNIFORM_OUTPUT_TOKENS = 1024, 32  # MemServe figure 12
NO_CAPS = Caps()


class Arrivals(enum.StrEnum):
    """What sets the arrival times."""

    RECORDED = "recorded"  # as in the trace, ``speed`` times as fast; without recorded times all at once
    POISSON = "poisson"  # each request at a point of a Poisson process (MemServe 8.2)
    SESSIONS = "sessions"  # each session begins at a point of a Poisson process
    CONSTANT = "constant"  # requests at even distances
    BURSTY = "bursty"  # requests in bursts (Gamma gaps, variation 3)
    CLOSED = "closed"  # ``users`` users, each waiting for its answer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a workload. Equal recipes over equal data make equal workloads."""

    kind: str = "chat"
    data: Path | None = None
    """Folder of data sets (``conversations/``, ``longdocs/``, ``agents/``, ``fewshot/``, ``traces/``)."""
    file: Path | None = None
    """A user's own JSONL, for kind ``file``."""
    sessions: int | None = None
    """Number of sessions: sampled from data, the beginning of a trace, or generated."""
    seed: int = 0
    share_ratio: float = 1.0
    turns_min: int = 1
    """Sessions with fewer turns are left out before sampling."""
    caps: Caps = NO_CAPS
    block_tokens: int | None = None
    """Scale the blocks of length-only traces to this many tokens."""
    document_tokens: int = DOCUMENT_TOKENS
    arrivals: Arrivals = Arrivals.RECORDED
    requests_per_s: float = 1.0
    users: int = 1
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the catalogue."""

    about: str
    make: Callable[..., Workload]
    """From a recipe, a meter and ``names``."""
    is_trace: bool = False
    """The order matters: cut to its beginning, not sampled."""
    names: tuple[str, ...] = ()
    """Names of data sets, for kinds that share ``make``."""


def known_kind(name: str) -> Kind:
    """The entry of the name; :class:`UserError` if there is none."""
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"unknown workload '{name}'", hint=f"one of {', '.join(KINDS)}")
    return kind


def build(recipe: Recipe, meter: Meter | None = None) -> Workload:
    """The workload of ``recipe``, token counts by ``meter`` (default: four bytes a token).

    :class:`UserError` for an unknown kind, a missing or malformed file, or impossible figures.
    """
    kind = known_kind(recipe.kind)
    if recipe.sessions is not None and recipe.sessions < 1:
        raise UserError(f"a workload needs sessions, got {recipe.sessions}", hint="take at least 1")
    workload = kind.make(recipe, meter, *kind.names)
    if recipe.turns_min > 1:
        workload = with_turns(workload, recipe.turns_min)
    if recipe.sessions is not None:
        cut = leading(workload, recipe.sessions) if kind.is_trace else None
        workload = cut or sampled(workload, recipe.sessions, seed=recipe.seed)
    if recipe.block_tokens is not None:
        workload = with_block_tokens(workload, recipe.block_tokens)
    if recipe.caps != NO_CAPS:
        workload = capped(workload, recipe.caps, meter=meter)
    if recipe.share_ratio != 1:
        workload = shared(workload, recipe.share_ratio, seed=recipe.seed)
    return _timed(workload, recipe, overlap=1 if kind.is_trace else OVERLAP_DEFAULT)


def _timed(workload: Workload, recipe: Recipe, *, overlap: int) -> Workload:
    """``workload`` with arrival times; a trace keeps its order (``overlap`` 1)."""
    match recipe.arrivals:
        case Arrivals.RECORDED:
            return workload if recipe.speed == 1 else trace_time(workload, speed=recipe.speed)
        case Arrivals.CLOSED:
            return closed_loop(workload, users=recipe.users)
        case Arrivals.SESSIONS:
            return by_session(workload, Poisson(recipe.requests_per_s), seed=recipe.seed)
        case _:
            return by_request(workload, _process(recipe), seed=recipe.seed, overlap=overlap)


def _process(recipe: Recipe) -> Process:
    if recipe.arrivals is Arrivals.CONSTANT:
        return Constant(recipe.requests_per_s)
    if recipe.arrivals is Arrivals.BURSTY:
        return Bursty(recipe.requests_per_s, variation=3.0)
    return Poisson(recipe.requests_per_s)


CHATS = ("conversations/mtbench101.jsonl.gz", "conversations/mtrag_un_human.jsonl.gz")
DOCUMENTS = ("longdocs/loogle_wikipedia.jsonl.gz", "longdocs/qmsum_meetings.jsonl.gz")


def _path(recipe: Recipe, name: str) -> Path:
    """The file of a data set, in a subfolder of the data folder or directly in it."""
    if recipe.data is None:
        raise UserError(
            f"workload '{recipe.kind}' needs {name}",
            hint=f"name its folder with --data (docs/guides/BENCH.md says where to get it); from a seed, "
            f"without data, there are: {', '.join(BUILT_IN)}",
        )
    for path in (recipe.data / name, recipe.data / Path(name).name):
        if path.is_file():
            return path
    raise UserError(f"no {name} in {recipe.data}", hint="--data names a folder of data sets")


def _chats_of(recipe: Recipe, meter: Meter | None, *names: str) -> Workload:
    conversations = [
        conversation for name in names for conversation in datasets.read_conversations(_path(recipe, name))
    ]
    source = ", ".join(Path(name).name.split(".")[0] for name in names)
    return chat_workload(conversations, kind=recipe.kind, source=source, meter=meter)


def _chat(recipe: Recipe, meter: Meter | None) -> Workload:
    if recipe.data is not None:
        return _chats_of(recipe, meter, *CHATS)
    count = recipe.sessions if recipe.sessions and recipe.turns_min == 1 else BUILTIN_SESSIONS
    conversations = builtin.conversations(recipe.seed, count)
    return chat_workload(conversations, source=builtin.SOURCE, meter=meter)


def _document_tokens(recipe: Recipe) -> int:
    """Tokens of a document's head: leaves room for the question if prompts are capped."""
    room = recipe.caps.prompt_tokens_max
    return recipe.document_tokens if room is None else min(recipe.document_tokens, max(1, room * 3 // 4))


def _documents(recipe: Recipe, meter: Meter | None) -> Workload:
    if recipe.data is None:
        source, words = builtin.SOURCE, _document_tokens(recipe)
        documents_read = builtin.documents(recipe.seed, recipe.sessions or BUILTIN_SESSIONS, words=words)
    else:
        source = "loogle_wikipedia, qmsum_meetings"
        documents_read = [document for name in DOCUMENTS for document in datasets.read_documents(_path(recipe, name))]
    return document_workload(documents_read, source=source, meter=meter, document_tokens=_document_tokens(recipe))


def _fewshot(recipe: Recipe, meter: Meter | None) -> Workload:
    documents_read = datasets.read_documents(_path(recipe, "fewshot/bbh_cot.jsonl.gz"))
    return document_workload(
        documents_read,
        kind="fewshot",
        source="bbh_cot",
        meter=meter,
        document_tokens=_document_tokens(recipe),
        questions=20,
        layout=Layout.PLAIN,
    )


def _react(recipe: Recipe, meter: Meter | None) -> Workload:
    more: Sequence[str] = ()
    if recipe.data is None:
        source, examples = builtin.SOURCE, builtin.examples(recipe.seed)
        episodes = builtin.episodes(recipe.seed, recipe.sessions or BUILTIN_SESSIONS)
    else:
        source = "react_hotpotqa_trajectories"
        episodes = datasets.read_episodes(_path(recipe, "agents/react_hotpotqa_trajectories.jsonl.gz"))
        examples = datasets.read_examples(_path(recipe, "agents/react_fewshot_prompts.jsonl.gz"), "webthink_simple6")
        more = datasets.read_questions(_path(recipe, "agents/hotpotqa_questions.jsonl.gz"))
    return react_workload(
        episodes, examples, source=source, seed=recipe.seed, sessions=recipe.sessions, more_questions=more, meter=meter
    )


def _groups(recipe: Recipe, meter: Meter | None) -> Workload:
    groups = -(-recipe.sessions // GROUP_USERS) if recipe.sessions else 150
    prefix_tokens = min(GROUP_PREFIX_TOKENS, (recipe.caps.prompt_tokens_max or 2 * GROUP_PREFIX_TOKENS) // 2)
    return group_workload(seed=recipe.seed, groups=groups, users=GROUP_USERS, prefix_tokens=prefix_tokens, meter=meter)


def _uniform(recipe: Recipe, meter: Meter | None) -> Workload:
    return uniform_workload(
        recipe.sessions or BUILTIN_SESSIONS,
        prompt_tokens=recipe.caps.prompt_tokens_max or UNIFORM_PROMPT_TOKENS,
        output_tokens=recipe.caps.output_tokens_max or UNIFORM_OUTPUT_TOKENS,
        seed=recipe.seed,
    )


def _mooncake(recipe: Recipe, meter: Meter | None, name: str) -> Workload:
    rows = datasets.read_mooncake(_path(recipe, f"traces/{name}.jsonl.gz"))
    return replay(rows, kind=recipe.kind, source=name, block_tokens=datasets.MOONCAKE_BLOCK_TOKENS)


def _trace(recipe: Recipe, meter: Meter | None) -> Workload:
    if recipe.data is not None:
        return _mooncake(recipe, meter, "mooncake_conversation_0-30min")
    rows = builtin.trace_rows(recipe.seed, recipe.sessions or 10 * BUILTIN_SESSIONS)
    return replay(rows, kind="trace", source=builtin.SOURCE, block_tokens=builtin.TRACE_BLOCK_TOKENS)


def _azure(recipe: Recipe, meter: Meter | None, name: str) -> Workload:
    rows = datasets.read_azure(_path(recipe, f"traces/{name}.csv.gz"))
    return replay(rows, kind=recipe.kind, source=name, block_tokens=recipe.block_tokens or 16)


def _agentic(recipe: Recipe, meter: Meter | None) -> Workload:
    logs = datasets.read_agentic(_path(recipe, "traces/agentic_coding_sessions.jsonl.gz"))
    block_tokens = datasets.AGENTIC_BLOCK_TOKENS
    return replay_sessions(logs, kind="agentic", source="agentic_coding_sessions", block_tokens=block_tokens)


def _servegen(recipe: Recipe, meter: Meter | None) -> Workload:
    clients = datasets.read_clients(_path(recipe, "traces/servegen_m-small_day1_clients.jsonl.gz"))
    return from_windows(clients, source="servegen_m-small_day1", seed=recipe.seed, duration_s=60.0)


def _calls(recipe: Recipe, meter: Meter | None, name: str) -> Workload:
    logs = datasets.read_call_logs(_path(recipe, f"agents/agent_calls_{name}.jsonl.gz"))
    return replay_calls(logs, kind=recipe.kind, source=f"agent_calls_{name}", meter=meter)


# -- a user's own file


def own_workload(path: Path, meter: Meter | None = None) -> Workload:
    """The requests of ``path``. :class:`UserError` names file and line of what can't be read."""
    name = path.name
    match read_json_lines(path, _form)[0]:
        case "documents":
            return document_workload(datasets.read_documents(path), kind="file", source=name, meter=meter)
        case "chats":
            return chat_workload(datasets.read_conversations(path), kind="file", source=name, meter=meter)
        case "trace":
            rows = datasets.read_mooncake(path)
            return replay(rows, kind="file", source=name, block_tokens=datasets.MOONCAKE_BLOCK_TOKENS)
        case _:
            calls = enumerate(read_json_lines(path, _call), 1)
            logs = [CallLog(log_id or f"{name}-{number}", (call,)) for number, (log_id, call) in calls]
            return replay_calls(logs, kind="file", source=name, meter=meter)


def _form(row: Row) -> str:
    for form, fields in FIELDS.items():
        if any(field in row for field in fields):
            return form
    raise BadRow(f"none of the known forms; fields: {row.keys()}")


def _call(row: Row) -> tuple[str, Call]:
    return row.name("id", ""), Call(row.text("prompt"), row.text("output") if "output" in row else None)


FIELDS = {
    "documents": ("document",),
    "chats": ("messages", "conversations", "turns", "nodes", "transcript"),
    "trace": ("hash_ids",),
    "prompts": ("prompt",),
}


def _file(recipe: Recipe, meter: Meter | None) -> Workload:
    if recipe.file is None:
        raise UserError("workload 'file' needs a file", hint="name your JSONL with --file")
    return own_workload(recipe.file, meter)


KINDS: dict[str, Kind] = {
    "chat": Kind("chats of several turns (ShareGPT type)", _chat),
    "documents": Kind("a long document, several questions (LooGLE type)", _documents),
    "react": Kind("an agent that thinks, acts, observes (ReAct type)", _react),
    "groups": Kind("system prompts shared in groups: 150 groups of 5 users", _groups),
    "uniform": Kind("prompts of 1,024 tokens that share nothing, answers of 32", _uniform),
    "trace": Kind("Mooncake's conversation trace, or one like it", _trace, is_trace=True),
    "synthetic": Kind("Mooncake's synthetic trace", _mooncake, names=("mooncake_synthetic_first_half",), is_trace=True),
    "toolagent": Kind(
        "Mooncake's tool and agent trace", _mooncake, names=("mooncake_toolagent_fragment",), is_trace=True
    ),
    "azure-conv": Kind("Azure's chat service, 2023", _azure, names=("azure_llm_2023_conv_0-30min",), is_trace=True),
    "azure-code": Kind("Azure's code completion, 2023", _azure, names=("azure_llm_2023_code_0-30min",), is_trace=True),
    "agentic": Kind("coding agents: long, growing contexts", _agentic),
    "servegen": Kind("a minute of ServeGen's clients", _servegen, is_trace=True),
    "fewshot": Kind("worked examples, many questions (BIG-Bench Hard)", _fewshot),
    "tree-chat": Kind("branching chats (OpenAssistant)", _chats_of, names=("conversations/oasst_trees.jsonl.gz",)),
    "task-chat": Kind("many short turns (SGD)", _chats_of, names=("conversations/sgd_task_dialogues.jsonl.gz",)),
    "airline": Kind(
        "customer service with tools (tau-bench)", _chats_of, names=("agents/tau_airline_trajectories.jsonl.gz",)
    ),
    "calls-web": Kind("calls of web research agents, as recorded", _calls, names=("magagent",)),
    "calls-code": Kind("calls of a coding agent, as recorded", _calls, names=("miniswe",)),
    "calls-service": Kind("calls of a customer service agent, as recorded", _calls, names=("taubench",)),
    "file": Kind("your own JSONL", _file),
}
"""Every workload by name."""
BUILT_IN = ("chat", "documents", "react", "groups", "uniform", "trace")
"""Workloads that are made from the seed if there is no ``data``."""
