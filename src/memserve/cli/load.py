"""``memserve bench load``: requests of one length against any OpenAI-compatible server (level 4)."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.errors import UserError

if TYPE_CHECKING:
    from memserve.bench.load.client import Target
    from memserve.bench.metrics import Slo
    from memserve.workloads.words import Workload

MS_PER_S = 1e3

BaseUrl = Annotated[str, typer.Option(help="The server's address, with or without /v1.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Model to ask for; default: the server's first.")]
ApiKey = Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY")]
Rate = Annotated[float | None, typer.Option(min=0, help="Open loop: requests a second, at random (Poisson).")]
Users = Annotated[int | None, typer.Option(min=1, help="Closed loop: concurrent sessions.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Give a request up after this time.")]
SloTtft = Annotated[
    float | None, typer.Option("--slo-ttft-ms", min=0, help="For goodput: longest time to the first token.")
]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot-ms", min=0, help="For goodput: longest time per token.")]
SloJct = Annotated[float | None, typer.Option("--slo-jct-ms", min=0, help="For goodput: longest time to the end.")]
VocabSize = Annotated[
    int | None,
    typer.Option(min=100, help="Token ids of length-only prompts are below it; default: the model's own."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for results.json and records.jsonl.gz.")]


def load(
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: ModelName = None,
    api_key: ApiKey = None,
    rate: Rate = None,
    users: Users = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 128,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of every answer.")] = 16,
    vocab_size: Annotated[int, typer.Option(min=100, help="Prompts are token ids below it.")] = 32_000,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0,
    timeout_s: Timeout = 600.0,
    max_s: Annotated[float | None, typer.Option(min=0.1, help="End the run after this time.")] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Load any OpenAI-compatible server with requests of one length, and report their latency."""
    from memserve.bench.load.client import Target

    workload = _workload(rate, users, requests, prompt_tokens, shared_tokens, output_tokens, seed)
    target = Target(base_url, api_key, timeout_s)
    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    _run(workload, target, model, vocab_size, max_s, seed, slo, out, as_json)


def read_slo(ttft_ms: float | None, tpot_ms: float | None, jct_ms: float | None) -> Slo:
    """The limits of goodput."""
    from memserve.bench.metrics import Slo

    limits = (None if ms is None else ms / MS_PER_S for ms in (ttft_ms, tpot_ms, jct_ms))
    return Slo(*limits)


def _workload(
    rate: float | None, users: int | None, requests: int, prompt: int, shared: int, output: int, seed: int
) -> Workload:
    from memserve.workloads.arrivals import Poisson, by_session, closed_loop
    from memserve.workloads.sessions import uniform_workload

    if (rate is None) == (users is None):
        raise UserError("say how requests come", hint="either --rate N a second, or --users N at a time")
    workload = uniform_workload(requests, prompt_tokens=prompt, shared_tokens=shared, output_tokens=output)
    if users is not None:
        return closed_loop(workload, users=users)
    assert rate is not None
    return by_session(workload, Poisson(rate), seed=seed)


def _run(
    workload: Workload, target: Target, model: str | None, vocab_size: int, max_s: float | None, seed: int,
    slo: Slo, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from memserve.bench.load.client import first_model
    from memserve.bench.load.driver import Labels, send
    from memserve.bench.load.prompts import Manner
    from memserve.bench.results import Pass, describe, sum_up
    from memserve.bench.study import RunFolder, write_json

    manner = Manner(model or first_model(target), vocab_size)
    folder = RunFolder(out) if out is not None else None
    writer = folder.writer if folder is not None else None
    labels = Labels(target.base_url, workload.kind, seed)
    run = send(workload, target, manner, labels, writer=writer, limit_s=max_s)
    done = Pass.of(run, workload.kind, target.base_url, seed)
    results = sum_up(run.records, [done], slo, shlex.join(["memserve", *sys.argv[1:]]), workload.notes)
    if folder is not None:
        with folder:
            write_json(results, folder.path)
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(results, str_keys=True)))
    else:
        typer.echo("\n".join(describe(results)))
    if run.partial is not None:
        raise typer.Exit(1)
