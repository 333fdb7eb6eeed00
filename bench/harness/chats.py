"""Real multi-turn chats for the scripts here: user turns from a data folder, answers from the model under test.

A session is a list of user messages. Each turn sends the whole history, with the answers that the model itself gave, as
any chat client does; so turn ``k`` shares all but its last message with turn ``k - 1``.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]
SESSION_FILES = ("conversations/mtrag_un_human.jsonl.gz", "conversations/mtbench101.jsonl.gz")
DOCUMENT_FILES = ("longdocs/loogle_wikipedia.jsonl.gz", "longdocs/qmsum_meetings.jsonl.gz")


@dataclass
class Session:
    """User turns, and the answer to each so far."""

    name: str
    turns: list[str]
    answers: list[str] = field(default_factory=list)
    system: str = ""

    def messages(self) -> Messages:
        """The history up to and including the next user turn."""
        history: Messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in zip(self.turns, self.answers, strict=False):
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*history, {"role": "user", "content": self.turns[len(self.answers)]}]

    @property
    def done(self) -> bool:
        """Whether every turn has an answer."""
        return len(self.answers) == len(self.turns)

    def fresh(self) -> Session:
        """The same turns, without answers."""
        return Session(self.name, self.turns, [], self.system)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one ``.jsonl.gz`` file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def chat_sessions(data: Path, count: int, turns: int, system_chars: int = 1200) -> list[Session]:
    """``count`` chats of ``turns`` user turns each, longest messages first; every second chat has a system prompt that
    it shares with other chats."""
    results: list[Session] = []
    for name in SESSION_FILES:
        for place, record in enumerate(read(data / name)):
            users = [m["content"] for m in record["messages"] if m["role"] == "user"]
            if len(users) >= turns:
                results.append(Session(f"{Path(name).name.split('.')[0]}-{place}", users[:turns]))
    results.sort(key=lambda s: (-sum(map(len, s.turns)), s.name))
    shared = next(read(data / DOCUMENT_FILES[0]))["document"][:system_chars]
    for session in results[:count:2]:
        session.system = "Answer from this text where you can.\n\n" + shared
    return results[:count]


def opening_ids(data: Path, model: str, count: int, tokens_min: int, tokens_max: int) -> list[list[int]]:
    """Token ids of the openings of ``count`` chats, cut to ``tokens_max``; those below ``tokens_min`` are left out.
    ``SystemExit``: ``data`` has fewer."""
    tokenizer = load_tokenizer(model)
    results: list[list[int]] = []
    for session in chat_sessions(data, 3 * count, 3):
        text = tokenizer.apply_chat_template(session.messages(), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text + " ".join(session.turns), add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens_min:
            results.append(ids[:tokens_max])
    if len(results) < count:
        raise SystemExit(f"{data} has {len(results)} such chats, {count} are wanted")
    return results[:count]


def document_sessions(data: Path, tokenizer: Any, count: int, document_tokens: int, turns: int = 2) -> list[Session]:
    """Questions about one long document each: the document opens the first turn."""
    records = [record for name in DOCUMENT_FILES for record in read(data / name)]
    sessions = []
    for place, record in enumerate(records[:count]):
        ids = tokenizer(record["document"], add_special_tokens=False)["input_ids"][: document_tokens + 50 * place]
        questions = [q["question"] for q in record["questions"]] * turns
        first = tokenizer.decode(ids) + "\n\n" + questions[0]
        sessions.append(Session(f"document-{place}", [first, *questions[1:turns]]))
    return sessions


def document_texts(data: Path | None, count: int) -> list[str]:
    """``count`` long texts, from all files alike; without ``data`` made from a seed: their text has no meaning."""
    if data is None:
        from memserve_lab.workloads.builtin import documents

        return [document.text for document in documents(1, count)]
    records = [record["document"] for name in DOCUMENT_FILES for record in read(data / name)]
    return [str(text) for text in records[:: max(1, len(records) // count)][:count]]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a folder or of a GGUF file."""
    from transformers import AutoTokenizer

    source = Path(model)
    if source.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    return AutoTokenizer.from_pretrained(model)


class Reference:
    """transformers' greedy ``generate``, in float32."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        source = Path(model)
        file_options = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
        folder = str(source.parent) if file_options else model
        self._torch = torch
        self._module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file_options).eval()

    def answer(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens, and at each of them the gap between the two best logits, so that ties can be recognised."""
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            out = self._module.generate(
                input_ids=ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        best = [self._torch.topk(step[0].float(), 2).values for step in out.logits]
        return out.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best]


def remembered(path: Path, key: dict[str, Any], make: Callable[[], Any]) -> Any:
    """What ``make`` gives, from the file ``path`` if it holds that of the same ``key``."""
    if path.exists() and (stored := json.loads(path.read_text()))["key"] == key:
        return stored["answers"]
    answers = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key, "answers": answers}))
    return answers


def reference_answers(model: str, sessions: list[Session], new_tokens: int, path: Path) -> dict[str, list[str]]:
    """The answers of the reference, turn by turn; kept in ``path``."""

    def answer_all() -> dict[str, list[str]]:
        reference, tokenizer, answers = Reference(model), load_tokenizer(model), {}
        for session in (session.fresh() for session in sessions):
            while not session.done:
                text = tokenizer.apply_chat_template(session.messages(), add_generation_prompt=True, tokenize=False)
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                tokens, _ = reference.answer(ids, new_tokens)
                session.answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
            answers[session.name] = session.answers
            print(f"reference: {len(answers)} of {len(sessions)} sessions", end="\r", file=sys.stderr, flush=True)
        return answers

    turns = [[session.name, session.turns, session.system] for session in sessions]
    return dict(remembered(path, {"model": model, "sessions": turns, "new_tokens": new_tokens}, answer_all))
