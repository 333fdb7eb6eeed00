"""Options are declared once: configs, flags, keywords, command lines and vLLM's names say one thing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from memserve.base import config as configs
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.options import NEGATED, SECONDS, command_line_of, from_keywords, option, options_of
from memserve.base.units import GIB, MIB
from memserve.cli.cluster import serve
from memserve.cli.flags import Only, Without, grouped
from memserve.cli.main import run


@dataclasses.dataclass(frozen=True)
class Paint:
    """What nests."""

    red: int = option(1, least=0)
    """How ``red``."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Some flags."""

    width: int = option(3, "--wide", least=1, vllm="max_width")
    """How wide."""
    solid: bool = option(True, "--flat", form=NEGATED)
    """Has volume. False: Has none."""
    wait_ns: int | None = option(None, "--wait", form=SECONDS)
    """Seconds. None: for ever."""
    secret: int = 0
    """No flag."""
    paint: Paint = dataclasses.field(default_factory=Paint)
    """Nested."""


FOUR = Size(width=4)


def said(*arguments: str, command: Any = None) -> tuple[int, str]:
    app = typer.Typer()

    @grouped
    def draw(name: Annotated[str, typer.Argument()], *, again: Annotated[int, typer.Option()] = 1, size: Size) -> None:
        """Draw it."""
        typer.echo(f"{name} {size.width} {size.solid} {size.wait_ns} {size.paint.red} {again}")

    app.command()(command or draw)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output.strip()


def test_fields_are_flags_with_their_defaults_and_limits() -> None:
    assert said("box") == (0, "box 3 True None 1 1")
    given = ("--wide", "7", "--flat", "--wait", "0.5", "--red", "2", "--again", "2")
    assert said("box", *given) == (0, "box 7 False 500000000 2 2")
    assert said("box", "--wide", "0")[0] == 2 and said("box", "--red", "-1")[0] == 2
    code, text = said("--help")
    assert code == 0
    for words in ("Draw it.", "How wide.", "Has none.", "Seconds. Default: for ever.", "How red.", "default: 3"):
        assert words in text
    assert "--size" not in text and "--secret" not in text and "--max-width" not in text


def test_a_command_may_have_some_options_and_defaults_of_its_own() -> None:
    @grouped
    def narrow(*, size: Annotated[Size, Only("width")] = FOUR) -> None:
        typer.echo(f"{size.width}")

    @grouped
    def wide(*, size: Annotated[Size, Without("width")]) -> None:
        typer.echo(f"{size.paint.red}")

    assert said(command=narrow) == (0, "4") and said("--wide", "5", command=narrow) == (0, "5")
    assert said("--red", "5", command=narrow)[0] == 2
    assert said("--red", "5", command=wide) == (0, "5") and said("--wide", "5", command=wide)[0] == 2


def test_no_default_has_two_values() -> None:
    """A field that two configs have is either one option, or has one default."""
    defaults: dict[str, set[Any]] = {}
    for cls in (c for c in vars(configs).values() if dataclasses.is_dataclass(c) and c.__module__ == configs.__name__):
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                defaults.setdefault(field.name, set()).add(field.default)
    assert len(defaults) > 30
    differ = {name: values for name, values in defaults.items() if len(values) > 1}
    assert set(differ) == {"caching"}, "one default, or two names"  # Caching of a cluster, bool of a pool: two types
    flags = [one.flag for cls in (EngineOptions, configs.ClusterConfig, serve.EdgeConfig) for one in options_of(cls)]
    assert len(flags) == len(set(flags)) > 30


def test_default_budgets_suit_the_machine() -> None:
    scheduler = SchedulerConfig()
    assert (scheduler.max_running, scheduler.step_tokens, scheduler.chunk_tokens) == (64, 512, 512)
    assert SchedulerConfig(max_step_tokens=100).chunk_tokens == 100
    assert SchedulerConfig(prefill_chunk_tokens=10).chunk_tokens == 10
    with pytest.raises(UserError, match="max_running must be at least 1"):
        SchedulerConfig(max_running=0)


VLLM = {
    "max_num_seqs": ("7", 7, "max_running", 7),
    "max_num_batched_tokens": ("99", 99, "max_step_tokens", 99),
    "long_prefill_token_threshold": ("33", 33, "prefill_chunk_tokens", 33),
    "max_model_len": ("1234", 1234, "max_model_tokens", 1234),
    "block_size": ("16", 16, "block_tokens", 16),
    "kv_cache_dtype": ("int8", "int8", "kv_dtype", "int8"),
    "swap_space": ("1.5", 1.5, "dram_memory_bytes", GIB + GIB // 2),
    "kv_cache_memory_bytes": ("64MiB", 64 * MIB, "kv_memory_bytes", 64 * MIB),
    "tensor_parallel_size": ("2", 2, "tensor", 2),
    "pipeline_parallel_size": ("3", 3, "pipeline", 3),
    "gpu_memory_utilization": ("0.5", 0.5, "gpu_memory_share", 0.5),
    "lora_modules": ("a=/a", ["a=/a"], "lora", ("a=/a",)),
    "max_cpu_loras": ("3", 3, "max_loras", 3),
    "max_lora_rank": ("16", 16, "max_lora_rank", 16),
}
"""vLLM's name -> its value on a command line and as a keyword; our field and its value."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """What `memserve serve` and `memserve instance` would build."""
    seen: list[EngineOptions] = []
    monkeypatch.setattr("memserve.cli.cluster.serve.run_server", lambda engine, http, cluster: seen.append(engine))
    monkeypatch.setattr("memserve.cli.cluster.instance._run_supervised", lambda engine, *rest: seen.append(engine))
    return seen


COMMANDS = (["serve"], ["instance", "--join", "h:1", "--supervised"])


@pytest.mark.parametrize("name", VLLM)
def test_names_of_vllm_are_understood(name: str, engines: list[EngineOptions]) -> None:
    word, keyword, field, value = VLLM[name]
    flag = "--" + name.replace("_", "-")
    assert all(run([*command, flag, word]) == 0 for command in COMMANDS)
    found = [*engines, from_keywords(EngineOptions(), {name: keyword})]
    assert [{one.name: one.default for one in options_of(engine)}[field] for engine in found] == [value] * 3
    assert all(run(command_line) == 0 for command_line in (["serve", *command_line_of(one)] for one in found))
    assert len(set(engines)) == 1


def test_every_name_of_vllm_has_a_test() -> None:
    assert {one.vllm for one in options_of(EngineOptions) if one.vllm} == {*VLLM, "enable_prefix_caching"}


def test_prefix_caching_is_switched_by_vllm_s_flags(engines: list[EngineOptions]) -> None:
    for flags in (["--enable-prefix-caching"], ["--no-enable-prefix-caching"], ["--no-cache"], []):
        assert run(["serve", *flags]) == 0
    assert [engine.caching for engine in engines] == [True, False, False, True]
    assert not from_keywords(EngineOptions(), {"enable_prefix_caching": False}).caching


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-running", "64", "--max-num-seqs", "8"],  # the default, said aloud, contradicts as any value
        ["--max-num-seqs", "8", "--max-running", "9"],
        ["--no-cache", "--enable-prefix-caching"],
        ["--dram-memory", "1GiB", "--swap-space", "2"],
    ],
)
def test_two_names_with_two_values_are_an_error(flags: list[str], engines: list[EngineOptions], capsys: Any) -> None:
    assert run(["serve", *flags]) == 1
    error = capsys.readouterr().err
    assert "name one option and have different values" in error and not engines
    assert all(flag in error for flag in flags if flag.startswith("--"))


def test_two_names_with_one_value_are_fine(engines: list[EngineOptions]) -> None:
    assert (
        run(["serve", "--max-running", "8", "--max-num-seqs", "8", "--dram-memory", "2GiB", "--swap-space", "2"]) == 0
    )
    assert engines[0].scheduler.max_running == 8 and engines[0].dram_memory_bytes == 2 * GIB


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_vllms_share_of_a_gpu_is_ours_and_bounded(
    command: list[str], engines: list[EngineOptions], capsys: Any
) -> None:
    assert run([*command, "--gpu-memory-utilization", "2"]) == 1
    assert "gpu_memory_share must be at most 1, got 2" in capsys.readouterr().err and not engines
    assert run([*command, "--gpu-memory-utilization", "0.5"]) == 0
    assert engines[0].gpu_memory_share == 0.5


def test_keywords_of_llm() -> None:
    engine = EngineOptions(model="m")
    given = {"kv_memory": "5MiB", "dram_memory_bytes": 7, "max_running": 3, "threads": None}
    made = from_keywords(engine, given)
    assert made == dataclasses.replace(
        engine, kv_memory_bytes=5 * MIB, dram_memory_bytes=7, scheduler=SchedulerConfig(max_running=3)
    )
    from_keywords(engine, {"max_running": 3, "max_num_seqs": 3, "tensor_parallel_size": 1})
    assert from_keywords(engine, {"lora": "a=/a"}) == from_keywords(engine, {"lora": ["a=/a"]})
    many = from_keywords(engine, {"lora": ["a=/a", "b=/b"]})
    assert many.lora == ("a=/a", "b=/b") and command_line_of(many)[-4:] == ("--lora", "a=/a", "--lora", "b=/b")
    with pytest.raises(UserError, match="max_running and max_num_seqs name one option"):
        from_keywords(engine, {"max_running": 3, "max_num_seqs": 4})
    assert from_keywords(engine, {"gpu_memory_utilization": 0.9}).gpu_memory_share == 0.9
    with pytest.raises(UserError, match=r"unknown option 'max_runing'.*did you mean 'max_running'"):
        from_keywords(engine, {"max_runing": 3})


HELP = """
import sys
from memserve.cli.cluster import serve
from memserve.cli.main import run
for command in ([], ["serve"], ["instance"], ["chat"], ["profile"], ["doctor"], ["sim", "run"], ["bench", "serve"]):
    assert run([*command, "--help"]) == 0, command
heavy = {"torch", "transformers", "tokenizers", "starlette", "uvicorn", "zmq", "httpx", "aiohttp", "matplotlib"}
print("loaded:", *sorted(heavy & sys.modules.keys()))
"""


def test_help_loads_nothing_that_is_slow_to_load() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
