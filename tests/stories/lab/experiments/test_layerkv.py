"""``memserve sim layerkv``: prompts do not wait for memory, in the production scheduler under virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from memserve.cli.main import run
from memserve_lab.experiments.layerkv import (
    aligned_and_staggered,
    contenders,
    conversation_lengths,
    long_lengths,
    measure_point,
    requests,
)

BY_NAME = {one.name: one for one in contenders()}


def points(rate: float, names: list[str], count: int = 300) -> list:
    random = Random("test")
    workload = requests(conversation_lengths(count, random), rate, random)
    return [measure_point("rate", "llama-2-7b-16k", "l20", 1, BY_NAME[name], rate, workload) for name in names]


def test_layerkv_improves_ttft_at_equal_throughput() -> None:
    """Eight conversations a second are more than fit into the memory of one device."""
    whole, by_layer, with_slo = points(8, ["request-wise", "by layer", "by layer, slo"])
    assert whole.ttft_mean_s > 2 * by_layer.ttft_mean_s and whole.ttft_p99_s > 2 * by_layer.ttft_p99_s
    assert by_layer.tokens_per_s > 0.97 * whole.tokens_per_s
    assert by_layer.violations < whole.violations and with_slo.violations < whole.violations
    assert by_layer.parked > 20 and by_layer.hidden > 0.9


def test_with_room_for_all_nothing_changes() -> None:
    whole, by_layer = points(2, ["request-wise", "by layer"])
    assert by_layer.parked == 0 and by_layer.ttft_mean_s == whole.ttft_mean_s
    assert by_layer.tokens_per_s == whole.tokens_per_s


def test_swap_in_of_long_prompts_does_not_delay_steps() -> None:
    """Blocks of parked sequences, of 2 GB each, came up within one step, which waited for them."""
    random = Random("test")
    workload = requests([(4096, 512)] * 30, 1.0, random)
    ways = [BY_NAME[name] for name in ("request-wise", "by layer")]
    whole, by_layer = (measure_point("context", "llama-2-7b-16k", "l20", 1, one, 4096, workload) for one in ways)
    assert by_layer.parked > 10 and by_layer.hidden > 0.9 and by_layer.waited_share < 0.01
    assert by_layer.tokens_per_s > 0.98 * whole.tokens_per_s and by_layer.ttft_mean_s * 5 < whole.ttft_mean_s


def test_staggered_the_link_has_the_same_work_before_each_layer() -> None:
    random = Random("test")
    workload = requests(conversation_lengths(300, random), 10, random)
    spreads = []
    for one in aligned_and_staggered():
        pages = measure_point("stagger", "llama-2-7b-16k", "l20", 1, one, 10, workload).read_pages
        spreads.append((max(pages) - min(pages)) * len(pages) / sum(pages))
    assert spreads[0] > 0.3 and spreads[1] < spreads[0] / 3, spreads


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--figures", "rate,stagger", "--rates", "7", "--requests", "40", "--settings", "by layer,request-wise"]
    assert run(["sim", "layerkv", *flags, "--out", str(tmp_path / "run")]) == 0
    assert "simulated: a roofline, not measured" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["points"]) == 4 + 2
    assert "69 times lower" in (tmp_path / "run" / "report.md").read_text()
    for wrong in (["--figures", "1"], ["--rates", "many"], ["--settings", "nothing"]):
        assert run(["sim", "layerkv", *wrong]) == 1
        assert "hint: " in capsys.readouterr().err


def test_orbitflows_program_places_layers_of_long_prompts() -> None:
    pytest.importorskip("scipy", reason="the program needs a solver: the bench extra")
    random = Random("long")
    workload = requests(long_lengths(12, random), 0.12, random)
    names = ["by layer", "integer program (orbitflow)", "next-layer"]
    ours, program, none_kept = (
        measure_point("orbitflow", "llama-3-8b", "l20", 1, BY_NAME[name], 0.12, workload, 30.0) for name in names
    )
    assert ours.ttft_mean_s <= program.ttft_mean_s and ours.tokens_per_s >= program.tokens_per_s
    assert program.waited_share <= none_kept.waited_share
    assert all(0 <= share <= 1 for one in (ours, program) for share in (one.ttft_met, one.tpot_met, one.tbt_met))


def test_objectives_do_not_overchunk_offloaded_prompts() -> None:
    """Each piece reads back what lies before it: cut to what answers can spare, pieces once took a quarter of the
    tokens a second away."""
    random = Random("0 orbitflow")
    workload = requests(long_lengths(40, random), 0.08, random)
    whole, with_slo = (
        measure_point("orbitflow", "llama-3-8b", "l20", 1, BY_NAME[name], 0.08, workload, 30.0)
        for name in ("request-wise", "by layer, slo")
    )
    assert with_slo.tokens_per_s > 0.97 * whole.tokens_per_s and with_slo.waited_share < 0.02
