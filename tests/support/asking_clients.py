"""Clients that ask a few questions again and again, and compare each answer with what one engine alone says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from memserve import LLM
from memserve.base.types import SamplingParams
from tiny_models import prompt

QUESTIONS = 8
JOIN_S = 240.0


def question(seed: int) -> list[int]:
    """Its tokens."""
    return [int(token) for token in prompt(60 + 8 * seed, seed)]


def truth_of(model: Path, count: int) -> list[str]:
    """What one engine without a cache answers to each question, greedily, with ``count`` tokens."""
    with LLM(str(model), dtype="float32", kv_memory="4MiB", threads=1, enable_prefix_caching=False) as llm:
        greedy = SamplingParams(temperature=0)
        answers = (llm.generate([question(at)], greedy, max_tokens=count, ignore_eos=True) for at in range(QUESTIONS))
        return [answer[0].text for answer in answers]


class Load:
    """Clients in threads; ``pause_s`` between two requests of one. What fails or differs is kept."""

    def __init__(self, ask: Callable[[int], str], truth: Sequence[str], clients: int, pause_s: float = 0.0) -> None:
        """``ask``: the answer to a question, by its number."""
        self._ask_one, self._truth, self._pause_s = ask, truth, pause_s
        self._stop = threading.Event()
        self.seconds: list[float] = []
        """That each answer took."""
        self.wrong: list[tuple[int, object]] = []
        self._clients = [threading.Thread(target=self._ask, args=(at,)) for at in range(clients)]

    @property
    def answers(self) -> int:
        """So far, wrong ones included."""
        return len(self.seconds)

    def _ask(self, at: int) -> None:
        while not self._stop.wait(self._pause_s):
            at = (at + 1) % len(self._truth)
            started = time.monotonic()
            try:
                told: object = self._ask_one(at)
            except Exception as error:  # any failure of a request is what this is about
                told = error
            if told != self._truth[at]:
                self.wrong.append((at, told))
            self.seconds.append(time.monotonic() - started)

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(JOIN_S)
