"""The thoughts of a model that writes them in front of its answer, taken out of the text piece by piece.

    text -> AnswerReader -> reasoning, content, and calls (`memserve.api.openai.request.tool_calls`)

Thoughts stand between ``<think>`` and ``</think>``. Some chat templates begin them in the prompt; then the answer has
only the closing mark. What may be the beginning of a mark is held back until it is one or is not.
"""

from __future__ import annotations

from enum import Enum

from memserve.api.openai.request.tool_calls import CallPiece, CallPlan, CallReader, ToolCall

BEGIN, END = "<think>", "</think>"


class Thoughts(Enum):
    """How the answer to a prompt begins."""

    NONE = "none"
    """With content: the text is not searched."""
    POSSIBLE = "possible"
    """With a mark, if the model thinks."""
    BEGUN = "begun"
    """Within thoughts: the prompt has the mark."""


def thoughts_after(prompt: str, parser: str, template: str) -> Thoughts:
    """What can follow ``prompt``, by the parser's name (``--reasoning-parser``) and the chat template."""
    if parser == "none" or (parser == "auto" and END not in template and BEGIN not in template):
        return Thoughts.NONE
    return Thoughts.BEGUN if prompt.rstrip().endswith(BEGIN) else Thoughts.POSSIBLE


class AnswerReader:
    """Reads the text of one sequence of a chat that may have thoughts, calls, or both."""

    def __init__(self, thoughts: Thoughts, plan: CallPlan | None) -> None:
        self._calls = CallReader(plan) if plan is not None else None
        self._thoughts = thoughts
        self._text = ""  # held back
        self._starts = True  # nothing but whitespace has come in this part
        self.had_thoughts = thoughts is Thoughts.BEGUN

    @property
    def calls(self) -> list[ToolCall]:
        """Those that have begun."""
        return self._calls.calls if self._calls is not None else []

    @property
    def is_thinking(self) -> bool:
        """The text so far ends within thoughts."""
        return self._thoughts is Thoughts.BEGUN

    def push_text(self, text: str) -> list[CallPiece]:
        """What ``text`` adds."""
        self._text += text
        pieces: list[CallPiece] = []
        if self._thoughts is Thoughts.POSSIBLE:
            self._find_beginning()
        if self._thoughts is Thoughts.BEGUN:
            pieces += self._take_reasoning()
        if self._thoughts is Thoughts.NONE:
            pieces += self._take_content()
        return pieces

    def flush_pieces(self) -> list[CallPiece]:
        """What was held back."""
        pieces: list[CallPiece] = []
        if self._thoughts is Thoughts.BEGUN:
            rest, self._text = self._text.rstrip(), ""
            pieces = [CallPiece(reasoning=rest)] if rest else []
        self._thoughts = Thoughts.NONE
        return pieces + self._take_content() + (self._calls.flush_pieces() if self._calls is not None else [])

    def _find_beginning(self) -> None:
        stripped = self._text.lstrip()
        if stripped.startswith(BEGIN):
            self._text, self._thoughts, self.had_thoughts = stripped[len(BEGIN) :], Thoughts.BEGUN, True
        elif not BEGIN.startswith(stripped):
            self._thoughts, self._starts = Thoughts.NONE, False

    def _take_reasoning(self) -> list[CallPiece]:
        if self._starts:
            self._text = self._text.lstrip()
            self._starts = not self._text
        offset = self._text.find(END)
        if offset >= 0:
            thoughts, self._text = self._text[:offset].rstrip(), self._text[offset + len(END) :]
            self._thoughts, self._starts = Thoughts.NONE, True
        else:
            thoughts = self._text.removesuffix(_partial_mark(self._text, END)).rstrip()
            self._text = self._text[len(thoughts) :]
        return [CallPiece(reasoning=thoughts)] if thoughts else []

    def _take_content(self) -> list[CallPiece]:
        text, self._text = self._text, ""
        if self._starts and self.had_thoughts:  # the lines between thoughts and answer
            text = text.lstrip()
            self._starts = not text
        if not text:
            return []
        return [CallPiece(text)] if self._calls is None else self._calls.push_text(text)


def _partial_mark(text: str, mark: str) -> str:
    """The end of ``text`` that may be the beginning of ``mark``."""
    return next((mark[:n] for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), "")
