"""How well the lengths of answers are predicted from what a deployment has seen, on real traces.

    python bench/length_calibration.py --data DATA [--traces azure-conv,azure-code,mooncake,synthetic,agentic]

Requests come at their recorded times, and an answer is learnt when it has ended, at 30 ms a token. By class: the
share of finished answers as ``memserve_output_length_classes_total`` has it. ``lower``, ``median``: how often an
answer was at least as long as the bound, and at most as long as the median, that were predicted when it arrived.
``lower at 64``: how often the bound held that was predicted after 64 tokens, of the answers that went on.

Then predictors side by side, on all requests but the first 1,000. ``kinds`` is the one of the product, with a kind
for each doubling of the prompt; ``finer kinds`` has four of them; ``all`` has one kind. ``classifier`` is multinomial
logistic regression over six percentile ranges of the last 4,096 lengths, from the logarithm of the prompt's length
(with a spline), earlier answers to prompts of that size, and the last 32 lengths; it is fitted again every 250
answers. Log loss is over the classifier's ranges; pinball loss is of the 25th and the 50th percentile of
log2(length), 1 = a factor of two. DATA is a folder of data sets; a trace that is not there is left out. The agentic
trace has no common clock: its sessions follow each other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness.flags import Commas, options, save
from harness.tables import show
from numpy.typing import NDArray

from memserve.base.errors import UserError
from memserve.instance.scheduler.slo import CLASSES, RANGES, OutputLengths
from memserve_lab.bench.datasets import read_agentic, read_azure, read_mooncake

Floats = NDArray[np.float64]
TOKEN_S = 0.03
SETTLED = 1000
FITTED, REFIT = 4096, 250
MOST = 1 << 20
QUANTILES = (0.25, 0.5)


class Answer(NamedTuple):
    """One request of a trace."""

    at_s: float
    prompt: int
    tokens: int


class Guess(NamedTuple):
    """What was predicted when a request arrived."""

    ranges: Floats
    """Probability of each of the ranges between ``edges``."""
    percentiles: tuple[float, ...]
    """Tokens, of ``QUANTILES``."""


class Seen:
    """The predictor of the product. ``kinds``: of how many sizes of prompts an octave has; 0: all are one kind."""

    def __init__(self, kinds: int = 1) -> None:
        self.lengths, self._kinds = OutputLengths(), kinds

    def _size(self, prompt: int) -> int:
        """A number of tokens that the product takes for a size of its own."""
        return prompt if self._kinds == 1 else 1 << int(self._kinds * math.log2(prompt + 1))

    def learn(self, prompt: int, tokens: int) -> None:
        self.lengths.learn_length("", self._size(prompt), tokens)

    def guess(self, prompt: int, edges: list[int]) -> Guess | None:
        lengths_known = self.lengths._lengths_like("", self._size(prompt))
        if lengths_known is None:
            return None
        beyond = [lengths_known.total, *(lengths_known.count_longer(edge) for edge in edges), 0.0]
        shares = -np.diff(beyond) + 0.5
        percentiles = tuple(float(lengths_known.length_at(lengths_known.total * (1 - share))) for share in QUANTILES)
        return Guess(shares / shares.sum(), percentiles)


class Classifier:
    """Multinomial logistic regression, refitted on the answers that ended last."""

    def __init__(self) -> None:
        self._rows: deque[tuple[Floats, int]] = deque(maxlen=FITTED)
        self._lately: deque[float] = deque([6.0] * 32, maxlen=32)
        self._of_size: dict[int, float] = {}
        self._weights: Floats | None = None
        self._mean = self._scale = np.zeros(0)
        self._edges: list[int] = []
        self._within: list[Floats] = []
        self._since = 0

    def features(self, prompt: int) -> Floats:
        """Of a request that arrives now."""
        size, lately = math.log2(prompt + 1), sum(self._lately) / len(self._lately)
        knots = [max(0.0, size - knot) for knot in (6, 8, 9, 10, 11, 12, 13, 14)]
        return np.asarray([size, *knots, lately, self._of_size.get(int(2 * size), lately)])

    def learn(self, features: Floats, prompt: int, tokens: int) -> None:
        """``features`` are those at arrival."""
        self._rows.append((features, tokens))
        long, half_octave = math.log2(tokens), int(2 * math.log2(prompt + 1))
        self._lately.append(long)
        before = self._of_size.get(half_octave, long)
        self._of_size[half_octave] = before + (long - before) / 8
        self._since += 1
        if self._since >= REFIT and len(self._rows) >= SETTLED // 2:
            self._since = 0
            self._fit()

    def _fit(self) -> None:
        lengths = np.asarray([tokens for _, tokens in self._rows])
        self._edges = edges_of(lengths)
        labels = np.searchsorted(self._edges, lengths, side="left")
        self._within = [np.sort(lengths[labels == label]) for label in range(len(RANGES) + 1)]
        rows = np.stack([features for features, _ in self._rows])
        self._mean, self._scale = rows.mean(0), rows.std(0) + 1e-6
        rows = np.concatenate([(rows - self._mean) / self._scale, np.ones((len(rows), 1))], axis=1)
        targets = np.eye(len(RANGES) + 1)[labels]
        if self._weights is None:
            self._weights = np.zeros((rows.shape[1], targets.shape[1]))
        weights, rate, first, second = self._weights, 0.05, np.zeros(self._weights.shape), np.zeros(self._weights.shape)
        for step in range(1, 201):  # Adam
            slope = rows.T @ (softmax(rows @ weights) - targets) / len(rows) + 1e-3 * weights
            first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
            weights = weights - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        self._weights = weights

    def guess(self, features: Floats) -> tuple[Guess, list[int]] | None:
        """The guess, and the first lengths behind its ranges. None: nothing was fitted yet."""
        if self._weights is None:
            return None
        row = np.append((features - self._mean) / self._scale, 1.0)
        shares = softmax(row[None] @ self._weights)[0]
        return Guess(shares, tuple(self._percentile(shares, share) for share in QUANTILES)), self._edges

    def _percentile(self, shares: Floats, share: float) -> float:
        """Within a range lengths are spread as those seen there were."""
        for place, width in enumerate(shares):
            within = self._within[place]
            if share <= width and len(within):
                return float(within[min(len(within) - 1, int(share / width * len(within)))])
            share -= width
        return float(self._within[-1][-1])


def softmax(rows: Floats) -> Floats:
    """Along the last axis."""
    raised = np.exp(rows - rows.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def edges_of(lengths: NDArray[np.int64]) -> list[int]:
    """Longest length of each range but the last."""
    return [int(edge) for edge in np.quantile(lengths, RANGES)]


def pinball(tokens: int, percentile: float, share: float) -> float:
    """Of log2: what it costs to predict ``percentile`` for the share below it."""
    off = math.log2(tokens) - math.log2(max(1.0, percentile))
    return max(share * off, (share - 1) * off)


class Score:
    """The losses of one predictor."""

    def __init__(self) -> None:
        self.count, self.log_loss, self.pinball = 0, 0.0, [0.0] * len(QUANTILES)

    def add(self, tokens: int, guess: Guess, edges: list[int]) -> None:
        self.count += 1
        self.log_loss -= math.log(max(1e-6, guess.ranges[int(np.searchsorted(edges, tokens, side="left"))]))
        for place, share in enumerate(QUANTILES):
            self.pinball[place] += pinball(tokens, guess.percentiles[place], share)

    def cells(self) -> list[str]:
        """Log loss, then pinball losses."""
        return [f"{value / max(1, self.count):.3f}" for value in (self.log_loss, *self.pinball)]


class Replay:
    """One trace, request by request."""

    def __init__(self) -> None:
        self.kinds, self.classifier = Seen(), Classifier()
        self.others = {"finer kinds": Seen(4), "all": Seen(0)}
        self.scores = {name: Score() for name in ("kinds", *self.others, "classifier")}
        self.held: dict[str, list[bool]] = {"lower": [], "median": [], "lower at 64": []}
        self._running: list[tuple[float, int, Answer, Floats]] = []

    def run(self, answers: list[Answer]) -> None:
        """All of them, in order of arrival."""
        for number, answer in enumerate(answers):
            while self._running and self._running[0][0] <= answer.at_s:
                self._end(*heapq.heappop(self._running)[2:])
            features = self.classifier.features(answer.prompt)
            self._watch(answer)
            if number >= SETTLED:
                self._compare(answer, features)
            heapq.heappush(self._running, (answer.at_s + TOKEN_S * answer.tokens, number, answer, features))
        while self._running:
            self._end(*heapq.heappop(self._running)[2:])

    def _end(self, answer: Answer, features: Floats) -> None:
        self.kinds.learn(answer.prompt, answer.tokens)
        for rival in self.others.values():
            rival.learn(answer.prompt, answer.tokens)
        self.classifier.learn(features, answer.prompt, answer.tokens)

    def _watch(self, answer: Answer) -> None:
        predicted = self.kinds.lengths.predict_length("", answer.prompt, 0, MOST)
        if predicted.answers:
            self.held["lower"].append(answer.tokens >= predicted.lower)
            self.held["median"].append(answer.tokens <= predicted.median)
        later = self.kinds.lengths.predict_length("", answer.prompt, 64, MOST)
        if answer.tokens > 64 and later.answers:
            self.held["lower at 64"].append(answer.tokens >= later.lower)

    def _compare(self, answer: Answer, features: Floats) -> None:
        results = self.classifier.guess(features)
        if results is None:
            return
        guess, edges = results
        for name, model in {"kinds": self.kinds, **self.others}.items():
            class_guessed = model.guess(answer.prompt, edges)
            assert class_guessed is not None, "the classifier has seen enough, too"
            self.scores[name].add(answer.tokens, class_guessed, edges)
        self.scores["classifier"].add(answer.tokens, guess, edges)


def read(data: Path, name: str) -> list[Answer]:
    """The answers of a trace, in order of arrival. Raises :class:`UserError` where there is none."""
    traces = data / "traces"
    if name.startswith("azure"):
        rows = read_azure(traces / f"azure_llm_2023_{name.removeprefix('azure-')}_0-30min.csv.gz")
    elif name == "agentic":
        logs = read_agentic(traces / "agentic_coding_sessions.jsonl.gz")
        rows = [row for log in logs for row in log.rows]  # one session after the other
        return [Answer(float(60 * place), row.input_tokens, row.output_tokens) for place, row in enumerate(rows)]
    else:
        file = {"mooncake": "mooncake_conversation_0-30min", "synthetic": "mooncake_synthetic_first_half"}[name]
        rows = read_mooncake(traces / f"{file}.jsonl.gz")
    return sorted(Answer(row.at_s, row.input_tokens, row.output_tokens) for row in rows)


CLASS_COLUMNS = ["trace", "answers", *CLASSES, "lower", "median", "lower at 64"]
LOSSES = ["log loss", *(f"pinball {share:g}" for share in QUANTILES)]


def rows_of(name: str, answers: list[Answer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trace's row in both tables."""
    replay = Replay()
    replay.run(answers)
    classes = replay.kinds.lengths.classes
    total = max(1, sum(classes.values()))
    first: dict[str, Any] = {"trace": name, "answers": len(answers)}
    first |= {key: f"{100 * count / total:.1f}" for key, count in zip(CLASSES, classes.values(), strict=True)}
    first |= {key: f"{100 * float(np.mean(values)):.1f}" if values else "" for key, values in replay.held.items()}
    cells = zip(*(score.cells() for score in replay.scores.values()), strict=True)
    second = dict(zip(LOSSES, (" / ".join(column) for column in cells), strict=True))
    return first, {"trace": name, "answers": replay.scores["kinds"].count, **second}


def main() -> None:
    args = options(
        __doc__, required="data", data=Path,
        traces=Commas("azure-conv", "azure-code", "mooncake", "synthetic", "agentic")
    )  # fmt: skip
    pairs = []
    for name in args.traces:
        try:
            answers = [answer for answer in read(args.data, name) if answer.tokens]
        except UserError as error:
            print(f"{name} is left out: {error}")
            continue
        pairs.append(rows_of(name, answers))
    shares = np.diff([0, *(100 * share for share in RANGES), 100]).round().astype(int)
    expected = dict(zip(CLASS_COLUMNS, ("expected", "", *shares, 75, 50, 75), strict=True))
    print("\nFinished answers by class of length, and how often predictions held (%)\n")
    show([expected, *(first for first, _ in pairs)], CLASS_COLUMNS)
    print("\nLosses on later requests: kinds / finer kinds / all / classifier\n")
    show((second for _, second in pairs), ["trace", "answers", *LOSSES])
    save(args, pairs)


if __name__ == "__main__":
    main()
