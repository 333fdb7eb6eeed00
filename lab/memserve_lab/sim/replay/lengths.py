"""Scheduling by objectives with other predictions of an answer's length, for studies of what wrong ones cost.

A replayed request says how long its answer is: ``max_tokens`` is the recorded length. No predictor but the oracle may
read it. The one of production would cut its predictions off there, so here it is told the end of the context instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

from memserve.base.config import SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.options import check_ranges, option
from memserve.instance.scheduler.sequence import Sequence
from memserve.instance.scheduler.slo import Objectives, Prediction
from memserve.kv.costs import PreemptionModel

PREDICTORS = ("learnt", "oracle", "shortest", "longest")


@dataclass(frozen=True, slots=True)
class LengthStudy:
    """What the instances' objectives know of the lengths of answers."""

    length_predictor: str = option("learnt")
    """How long --scheduling slo takes answers to be. learnt: as in production, from answers that have ended. oracle: as
    long as they will be. shortest: one more token. longest: to the end of the context."""
    length_noise: float = option(0.0, least=0.0)
    """Sigma of the oracle's errors: each length is multiplied by a lognormal factor. 0: none."""
    length_seed: int = option(0, least=0)
    """Seed of the oracle's errors."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.length_predictor not in PREDICTORS:
            hint = f"use {', '.join(PREDICTORS[:-1])} or {PREDICTORS[-1]}"
            raise UserError(f"unknown predictor {self.length_predictor!r}", hint=hint, param="length_predictor")
        if self.length_noise and self.length_predictor != "oracle":
            message = f"the {self.length_predictor} predictor takes no noise"
            raise UserError(message, hint="--length-predictor oracle does", param="length_noise")

    def expected_length(self, request_id: str, emitted: int, tokens: int, most: int) -> int:
        """Tokens of an answer that has ``told`` and will have ``tokens``, ``most`` at the latest, as predicted."""
        if self.length_predictor == "shortest":
            return emitted + 1
        if self.length_predictor == "longest":
            return max(emitted + 1, most)
        return max(emitted + 1, round(tokens * error_of(request_id, self.length_noise, self.length_seed)))


@functools.lru_cache(1 << 14)
def error_of(request_id: str, sigma: float, seed: int) -> float:
    """The factor by which a noisy oracle is wrong about a request: always the same one, 1 for a ``sigma`` of 0."""
    return Random(f"{seed} {request_id}").lognormvariate(0.0, sigma)


class StudiedObjectives(Objectives):
    """The objectives of production; what they expect of answers comes from a study."""

    __slots__ = ("_context_tokens", "_study")

    def __init__(
        self, config: SchedulerConfig, costs: PreemptionModel, study: LengthStudy, context_tokens: int
    ) -> None:
        super().__init__(config, costs)
        self._study, self._context_tokens = study, context_tokens

    def expected(self, sequence: Sequence) -> Prediction:
        """How long the answer of ``sequence``, which goes on, is expected to be."""
        group, study = sequence.group, self._study
        emitted = len(sequence.out) + sequence.inflight
        most = max(self._context_tokens - sequence.prompt_tokens, emitted + 1)
        if study.length_predictor == "learnt":
            return self.lengths.predict_length(group.tenant, sequence.prompt_tokens, emitted, most)
        request_id = sequence.request_id.partition("#")[0]  # whichever attempt this is
        tokens = study.expected_length(request_id, emitted, sequence.max_tokens, most)
        return Prediction(tokens, tokens, 0)
