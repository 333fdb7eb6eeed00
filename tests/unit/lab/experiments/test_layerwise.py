"""``memserve bench layerwise``: how passes are summed up and compared; the servers themselves are not started here."""

from __future__ import annotations

from random import Random

import pytest

from memserve.api.metrics.http import ApiMetrics
from memserve.base.units import NS_PER_S
from memserve.cli.main import run
from memserve.host.stats import EngineStats
from memserve.instance.events import LinkUse
from memserve.instance.layerwise.state import LayerReport
from memserve.instance.stats import InstanceStats
from memserve_lab.bench.load.driver import LoadRun
from memserve_lab.bench.load.prompts import Outcome, RequestRecord
from memserve_lab.experiments.layerwise import (
    BY_LAYER,
    BY_REQUEST,
    Copied,
    LayerwiseResults,
    LayerwiseStudy,
    Plan,
    _totals,
    conversation_lengths,
    point_of,
    settings_of,
)


def plan(**changes: object) -> Plan:
    options: dict = {
        "figures": ("rate",), "settings": (BY_REQUEST, BY_LAYER), "contexts": (), "context_rate": 1.0, "rates": (1.0,),
        "requests": 4, "answer_tokens": 16, "rounds": 2, "flags": (), "link_gbps": 16.0, "slo_ttft_s": 3.0,
        "slo_tpot_s": 0.2,
    }  # fmt: skip
    return Plan(**{**options, **changes})


def record(ttft_s: float, tpot_s: float, tokens: int = 5, outcome: Outcome = Outcome.OK) -> RequestRecord:
    first_ns = round((1 + ttft_s) * NS_PER_S)
    token_ns = [first_ns + round(number * tpot_s * NS_PER_S) for number in range(tokens)]
    return RequestRecord(
        session="s", turn=0, scheduled_ns=NS_PER_S, first_ns=first_ns, token_ns=token_ns, end_ns=token_ns[-1],
        output_tokens=tokens, outcome=outcome,
    )  # fmt: skip


def test_a_pass_is_summed_up() -> None:
    """Of four requests one misses its first token's objective, one that of the others, and one is not answered."""
    records = [record(1.0, 0.1), record(4.0, 0.1), record(1.0, 0.3), record(0.5, 0.1, outcome=Outcome.REFUSED)]
    point = point_of("rate", BY_LAYER, 1.0, LoadRun(records, planned=4), plan())
    assert (point.ttft_mean_s, point.ttft_p99_s) == (2.0, 4.0)
    assert point.tpot_mean_s == pytest.approx(0.5 / 3)
    assert point.violations == 0.75 and point.failed == 1
    assert point.tokens_per_s == pytest.approx(15 / 5.4)


def test_settings_stand_beside_by_request() -> None:
    results = LayerwiseResults()
    for ttft_s in (4.0, 6.0):
        results.points += [
            point_of("rate", name, 1.0, LoadRun([record(ttft_s / less, 0.1)], planned=1), plan())
            for name, less in ((BY_REQUEST, 1), (BY_LAYER, 4))
        ]
    results.copied.append(Copied("prefill alone", 2.0, 0.5, 10.0, 1e9, 2e9))
    rates, copied = LayerwiseStudy(plan(), results).make_tables()
    assert "emulated" in rates.title
    assert [row[4] for row in rates.rows] == ["as soon", "4.0 times sooner"]
    assert copied.rows[0][:6] == ["prefill alone", "2.00", "0.50", "75%", "10.0", "20%"]


def test_all_settings_are_served_alike_but_for_what_is_compared() -> None:
    flags = settings_of(3.0, 0.2)
    assert flags[BY_REQUEST] == () and flags[BY_LAYER] == ("--layerwise", "auto")
    assert flags[f"{BY_LAYER}, slo"][-4:] == ("--slo-ttft-ms", "3000", "--slo-tpot-ms", "200")


def test_lengths_are_those_of_the_seed() -> None:
    first, again = (conversation_lengths(30, 100, Random(4)) for _ in range(2))
    assert first == again and all(64 <= prompt <= 1800 and 16 <= answer <= 300 for prompt, answer in first)


def test_link_metrics_are_parsed() -> None:
    layers = LayerReport(link=LinkUse(1000, 2000, 3 * NS_PER_S, 1 * NS_PER_S))
    stats = EngineStats(device_ns=5 * NS_PER_S, instance=InstanceStats(layers=layers))
    told = _totals(ApiMetrics().render_page(stats).decode())
    assert told == {"up": 1000, "down": 2000, "busy": 3, "waited": 1, "device": 5}


def test_wrong_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--figures", "1"], ["--rates", "many"], ["--contexts", "0"]):
        assert run(["bench", "layerwise", *wrong]) == 1
        assert "hint: " in capsys.readouterr().err
