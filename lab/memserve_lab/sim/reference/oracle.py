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


def cell(token: int, position: int, seen: int) -> int:
    """The KV of ``token`` at ``position``, after attention has ``seen`` all before it."""
    return mix(mix(mix(seen, 17), token), position) >> 3


def draw(seen: int, seed: int, index: int, vocab: int) -> int:
    """The next token of sequence ``index``."""
    return (mix(mix(seen, seed + 1), index + 1) >> 20) % vocab


def candidates(seen: int, count: int, vocab: int) -> list[tuple[int, float]]:
    """Distinct tokens with falling logprobs that depend on everything seen."""
    found: list[tuple[int, float]] = []
    logprob, state = 0.0, seen
    while len(found) < min(count, vocab):
        state = mix(state, 5)
        token = (state >> 20) % vocab
        logprob -= 0.01 + ((state >> 30) % 1000) / 1000
        while token in [t for t, _ in found]:
            token = (token + 1) % vocab
        found.append((token, logprob))
    return found


def chain(tokens: Iterable[int]) -> int:
    """What attention sees after ``tokens``."""
    seen = 0
    for position, token in enumerate(tokens):
        seen = mix(seen, cell(int(token), position, seen))
    return seen


def lone_tokens(prompt: Sequence[int] | Iterable[int], count: int, seed: int, index: int, vocab: int) -> list[int]:
    """The first ``count`` tokens of sequence ``index`` of a request that is alone in the world."""
    prompt = list(prompt)
    seen, out = chain(prompt), []
    for position in range(len(prompt), len(prompt) + count):
        token = draw(seen, seed, index, vocab)
        out.append(token)
        seen = mix(seen, cell(token, position, seen))
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
    done: list[tuple[float, tuple[int, ...], float, FinishReason]] = []
    while live:
        pool = _continuations(request, live, width * max(2, 1 + len(stops)), vocab)
        live = []
        for place, (tokens, total) in enumerate(pool):
            if tokens[-1] in stops and len(tokens) >= request.stop.min_tokens:
                if place < width:
                    done.append((_score(request, tokens, total), tokens, total, FinishReason.STOP))
            elif len(live) < width:
                live.append((tokens, total))
        if live and len(live[0][0]) >= limit:
            done += [(_score(request, tokens, total), tokens, total, FinishReason.LENGTH) for tokens, total in live]
            live = []
        done = sorted(done, key=lambda entry: -entry[0])[:width]
        if live and len(done) == width and _score(request, *live[0]) <= done[-1][0]:
            break
    return [(tokens, total, reason) for _, tokens, total, reason in done[: request.n]]


def _continuations(
    request: Request, live: list[tuple[tuple[int, ...], float]], wanted: int, vocab: int
) -> list[tuple[tuple[int, ...], float]]:
    """The best ``wanted`` of all one-token continuations."""
    pool = [
        ((*tokens, token), total + logprob)
        for tokens, total in live
        for token, logprob in lone_candidates([*request.prompt.tolist(), *tokens], wanted, vocab)
    ]
    return sorted(pool, key=lambda entry: -entry[1])[:wanted]


def _score(request: Request, tokens: tuple[int, ...], total: float) -> float:
    return float(total / len(tokens) ** request.length_penalty)
