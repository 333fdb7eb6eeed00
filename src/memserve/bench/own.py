"""A user's own requests from a JSONL file (level 4): the form is recognised by the first line's fields.

========================================================  =============================================
fields of a line                                          becomes
========================================================  =============================================
``messages`` or ``conversations`` or ``turns``            a chat: turns, the model's own answers between
``document``, ``questions``                               a document and its questions
``prompt``, ``output``?                                   one request of plain text
``timestamp``, ``input_length``, ``output_length``,       one request of a trace (Mooncake's form)
``hash_ids``
========================================================  =============================================

``id`` and, of chats, ``group`` are optional everywhere. All lines of a file have one form.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memserve.bench.datasets import MOONCAKE_BLOCK_TOKENS, read_conversations, read_documents, read_mooncake
from memserve.bench.rows import BadRow, Row, read_json_lines
from memserve.workloads.chats import chat_workload
from memserve.workloads.documents import document_workload
from memserve.workloads.records import Call, CallLog
from memserve.workloads.tokens import Meter
from memserve.workloads.traces import replay, replay_calls
from memserve.workloads.words import Workload


def own_workload(path: Path, meter: Meter | None = None) -> Workload:
    """The requests of ``path``. :class:`UserError` names file and line of what can't be read."""
    form = read_json_lines(path, _form)[0]
    return FORMS[form](path, meter)


def _form(row: Row) -> str:
    for form, fields in FIELDS.items():
        if any(field in row for field in fields):
            return form
    raise BadRow(f"none of the known forms; fields: {row.keys()}")


def _chats(path: Path, meter: Meter | None) -> Workload:
    return chat_workload(read_conversations(path), kind="file", source=path.name, meter=meter)


def _documents(path: Path, meter: Meter | None) -> Workload:
    return document_workload(read_documents(path), kind="file", source=path.name, meter=meter)


def _prompts(path: Path, meter: Meter | None) -> Workload:
    logs = read_json_lines(path, lambda row: CallLog(row.name("id", ""), (_call(row),)))
    named = [CallLog(log.record_id or f"{path.name}-{number}", log.calls) for number, log in enumerate(logs, 1)]
    return replay_calls(named, kind="file", source=path.name, meter=meter)


def _call(row: Row) -> Call:
    return Call(row.text("prompt"), row.text("output") if "output" in row else None)


def _trace(path: Path, meter: Meter | None) -> Workload:
    return replay(read_mooncake(path), kind="file", source=path.name, block_tokens=MOONCAKE_BLOCK_TOKENS)


FIELDS = {
    "documents": ("document",),
    "chats": ("messages", "conversations", "turns", "nodes", "transcript"),
    "trace": ("hash_ids",),
    "prompts": ("prompt",),
}
FORMS: dict[str, Callable[[Path, Meter | None], Workload]] = {
    "documents": _documents,
    "chats": _chats,
    "trace": _trace,
    "prompts": _prompts,
}
