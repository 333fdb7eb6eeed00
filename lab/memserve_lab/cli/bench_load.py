"""``memserve bench load``: requests of one length to any server; ``capacity``: the largest rate that settings sustain.

Also the options that the commands of ``memserve bench`` share, and how a study is run from the command line.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.base.config import DEFAULT_MODEL
from memserve.base.errors import UserError
from memserve.cli import flags as opt
from memserve.cli.output import progress_bar

if TYPE_CHECKING:
    from memserve_lab.bench.load.client import Target
    from memserve_lab.bench.metrics import Slo
    from memserve_lab.bench.study import RunFolder, Study
    from memserve_lab.workloads.records import Workload


Instances = Annotated[int, typer.Option(min=1, help="Instances of a setting without a number, such as PD.")]
Servers = Annotated[
    list[str] | None, typer.Option(help="A further setting: NAME=URL of any running server; repeatable.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of data sets. Default: workloads made from the seed.")]
IgnoreEos = Annotated[bool, typer.Option(help="Generate every answer to its full length: equal work for all settings.")]
ServeFlags = Annotated[str, typer.Option(help="Further flags for every `memserve serve`, in quotes.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for the report; default: bench-1, bench-2, ...")]

MS_PER_S = 1e3

BaseUrl = Annotated[str, typer.Option(help="The server's address, with or without /v1.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Model to ask for; default: the server's first.")]
ApiKey = Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY")]
Rate = Annotated[float | None, typer.Option(min=0, help="Open loop: requests per second (Poisson arrivals).")]
Users = Annotated[int | None, typer.Option(min=1, help="Closed loop: concurrent sessions.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds after which a request counts as failed.")]
SloTtft = Annotated[
    float | None, typer.Option("--slo-ttft-ms", min=0, help="For goodput: longest time to the first token.")
]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot-ms", min=0, help="For goodput: longest time per token.")]
SloJct = Annotated[float | None, typer.Option("--slo-jct-ms", min=0, help="For goodput: longest time to the end.")]
VocabSize = Annotated[
    int | None,
    typer.Option(min=100, help="Draw length-only prompts from the token ids below this. Default: the model's own."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for results.json and records.jsonl.gz.")]


def command() -> str:
    """The command line as typed."""
    return shlex.join(["memserve", *sys.argv[1:]])


def chosen(default: Any, **alternatives: Any) -> Any:
    """``default`` (a dataclass) with the given fields replaced."""
    import dataclasses

    return dataclasses.replace(default, **{name: value for name, value in alternatives.items() if value is not None})


def parse_counts(text: str | None, example: str) -> tuple[int, ...] | None:
    """Comma-separated numbers of at least 1, sorted, each once. Raises :class:`UserError` with ``example`` as hint."""
    if text is None:
        return None
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise UserError(f"cannot read {text!r} as counts", hint=f"for example {example}")
    return counts


def parse_rates(text: str) -> tuple[float, ...]:
    """Comma-separated requests a second, sorted, each once. Raises :class:`UserError`."""
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not 0 < rates[0] <= rates[-1] < 1e4:
        raise UserError(f"cannot read {text!r} as rates", hint="for example 0.5,1,2 (requests a second)")
    return tuple(rates)


def run_study(study: Study[Any], folder: RunFolder, *, timed: bool = False, as_json: bool = False) -> None:
    """Measure, write the report, and print where it is; exit status 1 when the results are partial.

    ``timed``: progress lines begin with the seconds since the start. ``as_json``: the results are printed instead.
    """
    from memserve_lab.bench.study import REPORT, RESULTS

    begin = time.monotonic()

    def tell(line: str) -> None:
        typer.echo(f"{time.monotonic() - begin:5.1f} s  {line}" if timed else line, err=True)

    with folder, nullcontext() if study.draws_requests else progress_bar(study.title):
        study.run_study(tell)
    study.write_report(folder.path)
    if as_json:
        typer.echo(json.dumps(json.loads((folder.path / RESULTS).read_text())))
    else:
        for line in study.terminal_lines():
            typer.echo(line)
        typer.echo(f"report: {folder.path / REPORT}")
    if study.results.partial is not None:
        typer.echo(f"partial: {study.results.partial}", err=True)
        raise typer.Exit(1)


def load(
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: ModelName = None,
    api_key: ApiKey = None,
    rate: Rate = None,
    users: Users = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every prompt.")] = 128,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Length of the prefix that all prompts share.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 16,
    vocab_size: Annotated[int, typer.Option(min=100, help="Draw prompts from the token ids below this.")] = 32_000,
    seed: Annotated[int, typer.Option(help="Seed of the arrival times.")] = 0,
    timeout_s: Timeout = 600.0,
    max_s: Annotated[float | None, typer.Option(min=0.1, help="End the run after this many seconds.")] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON object.")] = False,
) -> None:
    """Load any OpenAI-compatible server with requests of one length, and report their latencies."""
    from memserve_lab.bench.load.client import Target

    workload = _workload(rate, users, requests, prompt_tokens, shared_tokens, output_tokens, seed)
    target = Target(base_url, api_key, timeout_s)
    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    _run(workload, target, model, vocab_size, max_s, seed, slo, out, as_json)


def existing(data: Path | None) -> Path | None:
    """``data``, the folder of data sets. Raises :class:`UserError` if there is no such folder."""
    if data is not None and not data.is_dir():
        raise UserError(f"no folder {data}", hint="--data names a folder of data sets")
    return data


def read_slo(ttft_ms: float | None, tpot_ms: float | None, jct_ms: float | None) -> Slo:
    """The SLO that goodput is counted against."""
    from memserve_lab.bench.metrics import Slo

    limits = (None if ms is None else ms / MS_PER_S for ms in (ttft_ms, tpot_ms, jct_ms))
    return Slo(*limits)


def _workload(
    rate: float | None, users: int | None, requests: int, prompt: int, shared: int, output: int, seed: int
) -> Workload:
    from memserve_lab.workloads.arrivals import Poisson, by_session, closed_loop
    from memserve_lab.workloads.sessions import uniform_workload

    if (rate is None) == (users is None):
        raise UserError("give either --rate or --users", hint="--rate N: requests per second; --users N: at a time")
    workload = uniform_workload(requests, prompt_tokens=prompt, shared_tokens=shared, output_tokens=output)
    if users is not None:
        return closed_loop(workload, users=users)
    assert rate is not None
    return by_session(workload, Poisson(rate), seed=seed)


def _run(
    workload: Workload, target: Target, model: str | None, vocab_size: int, max_s: float | None, seed: int,
    slo: Slo, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from memserve_lab.bench.load.client import first_model
    from memserve_lab.bench.load.driver import Labels, send
    from memserve_lab.bench.load.prompts import Manner
    from memserve_lab.bench.results import Pass, describe, sum_up
    from memserve_lab.bench.study import RunFolder, write_json

    manner = Manner(model or first_model(target), vocab_size)
    folder = RunFolder(out) if out is not None else None
    writer = folder.writer if folder is not None else None
    labels = Labels(target.base_url, workload.kind, seed)
    run = send(workload, target, manner, labels, writer=writer, limit_s=max_s)
    load_pass = Pass.of(run, workload.kind, target.base_url, seed)
    results = sum_up(run.records, [load_pass], slo, command(), workload.notes)
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


def capacity(
    workload: Annotated[str, typer.Option(help="One workload; `memserve bench workload` lists them.")] = "sharegpt",
    settings: Annotated[str, typer.Option(help="Comma-separated, as in `memserve bench serve`.")] = "PD,PD-CC,1P1D-CC",
    instances: Instances = 2,
    base_url: Servers = None,
    model: opt.Model = DEFAULT_MODEL,
    data: Data = None,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Longest time to the first token.")] = 2000.0,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    violations_max: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that may miss the SLO.")
    ] = 0.01,
    start: Annotated[float, typer.Option(min=0.01, help="First rate, in requests per second.")] = 1.0,
    precision: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Relative precision of the rate at which the search stops.")
    ] = 0.1,
    probe_s: Annotated[float, typer.Option(min=0.1, help="Seconds of arrivals at each rate.")] = 30.0,
    prompt_tokens_max: Annotated[int, typer.Option(min=16, help="Cut longer prompts, history included.")] = 2048,
    output_tokens_max: Annotated[int, typer.Option(min=1, help="Cut longer answers.")] = 32,
    turns_max: Annotated[int, typer.Option(min=1, help="Cut sessions with more turns.")] = 4,
    vocab_size: VocabSize = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first rate's sample; each later rate takes the next one.")
    ] = 0,
    serve_flags: ServeFlags = "",
    out: Folder = None,
) -> None:
    """Find, by bisection, the largest rate at which a setting keeps its queue bounded and meets its SLO."""
    from memserve_lab.bench.capacity import CapacityStudy, Search, workload_at
    from memserve_lab.bench.catalogue import Recipe
    from memserve_lab.bench.load.client import require_aiohttp
    from memserve_lab.bench.load.prompts import Manner, weighing
    from memserve_lab.bench.settings import kind_of, named_server, parse_settings
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.workloads.shape import Caps

    require_aiohttp()
    contenders = parse_settings(",".join([settings, *map(named_server, base_url or ())]), instances)
    caps = Caps(prompt_tokens_max, output_tokens_max, turns_max)
    recipe = Recipe(kind=kind_of(workload), data=existing(data), seed=seed, caps=caps)
    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    meter, own_vocab_size = weighing(model if settings.strip() else None)  # may convert the model: wrong usage is over
    flags = ("--model", model, *shlex.split(serve_flags))
    manner = Manner("", vocab_size or own_vocab_size, ignore_eos=True)
    plan = Search(recipe, slo, violations_max, start, precision, probe_s, flags, manner, meter)
    workload_at(plan, start, seed)  # shows errors in the data before any server starts
    folder = RunFolder(out)
    run_study(CapacityStudy(plan, contenders, folder, command()), folder)
