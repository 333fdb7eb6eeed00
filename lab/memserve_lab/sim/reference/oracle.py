"""The output that every request must get: a "model" with a number as KV, and a next token that is a hash of all KV it
sees.

The KV of a position is made of (token, position, everything that attention would have seen before it). A wrong block, a
stale reuse, a missing copy or a wrong position changes the number, and with it every later token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memserve.base.types import FinishReason, Request

_MASK = (1 << 61) - 1


class Violation(AssertionError):
    """An invariant does not hold: the product is wrong, or the world is."""


def require(condition: object, message: str) -> None:
    """Raise :class:`Violation` unless ``condition`` holds."""
    if not condition:
        raise Violation(message)


def mix(state: int, value: int) -> int:
    """61 bits that depend on both."""
    return (state * 6364136223846793005 + value * 1442695040888963407 + 1013904223) & _MASK


def cell(token: int, position: int, hash_seen: int) -> int:
    """The KV of ``token`` at ``position``, after attention has ``seen`` all before it."""
    return mix(mix(mix(hash_seen, 17), token), position) >> 3


def draw(hash_seen: int, seed: int, index: int, vocab: int) -> int:
    """The next token of sequence ``index``."""
    return (mix(mix(hash_seen, seed + 1), index + 1) >> 20) % vocab


def candidates(hash_seen: int, count: int, vocab: int) -> list[tuple[int, float]]:
    """Distinct tokens with falling logprobs that depend on everything seen."""
    results: list[tuple[int, float]] = []
    logprob, state = 0.0, hash_seen
    while len(results) < min(count, vocab):
        state = mix(state, 5)
        token = (state >> 20) % vocab
        logprob -= 0.01 + ((state >> 30) % 1000) / 1000
        while token in [t for t, _ in results]:
            token = (token + 1) % vocab
        results.append((token, logprob))
    return results


def chain(tokens: Iterable[int]) -> int:
    """What attention sees after ``tokens``."""
    hash_seen = 0
    for position, token in enumerate(tokens):
        hash_seen = mix(hash_seen, cell(int(token), position, hash_seen))
    return hash_seen


def lone_tokens(prompt: Sequence[int] | Iterable[int], count: int, seed: int, index: int, vocab: int) -> list[int]:
    """The first ``count`` tokens of sequence ``index`` of a request that is alone in the world."""
    prompt = list(prompt)
    hash_seen, out = chain(prompt), []
    for position in range(len(prompt), len(prompt) + count):
        token = draw(hash_seen, seed, index, vocab)
        out.append(token)
        hash_seen = mix(hash_seen, cell(token, position, hash_seen))
    return out


def lone_candidates(tokens: Iterable[int], count: int, vocab: int) -> list[tuple[int, float]]:
    """Beam candidates after ``tokens``."""
    return candidates(chain(tokens), count, vocab)


Beam = tuple[tuple[int, ...], float, FinishReason]
"""Tokens, cumulative logprob, and the reason of the end."""


def lone_beams(request: Request, context: int, vocab: int) -> list[Beam]:
    """Beam search as one would write it down, for one request alone: its best ``n`` hypotheses."""
    width, stops = request.beam_width, set(request.stop.stop_token_ids)
    limit = min(request.stop.max_tokens, context - len(request.prompt))
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[float, tuple[int, ...], float, FinishReason]] = []
    while live:
        pool = _continuations(request, live, width * max(2, 1 + len(stops)), vocab)
        live = []
        for place, (tokens, total) in enumerate(pool):
            if tokens[-1] in stops and len(tokens) >= request.stop.min_tokens:
                if place < width:
                    finished.append((_score(request, tokens, total), tokens, total, FinishReason.STOP))
            elif len(live) < width:
                live.append((tokens, total))
        if live and len(live[0][0]) >= limit:
            finished += [(_score(request, tokens, total), tokens, total, FinishReason.LENGTH) for tokens, total in live]
            live = []
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        if live and len(finished) == width and _score(request, *live[0]) <= finished[-1][0]:
            break
    return [(tokens, total, reason) for _, tokens, total, reason in finished[: request.n]]


def _continuations(
    request: Request, live: list[tuple[tuple[int, ...], float]], count: int, vocab: int
) -> list[tuple[tuple[int, ...], float]]:
    """The best ``wanted`` of all one-token continuations."""
    pool = [
        ((*tokens, token), total + logprob)
        for tokens, total in live
        for token, logprob in lone_candidates([*request.prompt.tolist(), *tokens], count, vocab)
    ]
    return sorted(pool, key=lambda entry: -entry[1])[:count]


def _score(request: Request, tokens: tuple[int, ...], total: float) -> float:
    return float(total / len(tokens) ** request.length_penalty)
