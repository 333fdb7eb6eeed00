"""The command line: errors in one line, exit codes, what is printed where, and what is imported for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from api_world import MODEL, SCRIPT_TEXT, TinyModel, says, serve
from fake_engine import FakeEngine
from memserve.api.http.server import bind
from memserve.base.config import EngineOptions
from memserve.base.errors import InvariantError, UserError
from memserve.base.options import options_of
from memserve.cli import doctor
from memserve.cli.chat import HELP, ChatAccount, ChatSettings, Conversation, EngineBackend, ServerBackend
from memserve.cli.doctor import Finding, Status
from memserve.cli.main import run
from memserve.model.loading import sources
from places import ROOT, SUPPORT
from ports import free_port
from waiting import eventually

GREEDY = ChatSettings(temperature=0.0, max_tokens=None, seed=None)

# -- usage


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        (["srve"], 2, "'srve'", "--help"),
        (["serve", "--prot", "1"], 2, "--prot", "serve --help"),
        (["serve", "--port", "many"], 2, "--port", "serve --help"),
        (["serve", "--port", "70000"], 2, "--port", "serve --help"),
        (["serve", "extra"], 2, "extra", "serve --help"),
        (["serve", "--kv-memory", "lots"], 1, "'lots'", "512MiB"),
        (["serve", "--kv-lower-dtype", "int3"], 1, "'int3'", "int8"),
        (["serve", "--kv-dtype", "int3"], 1, "'int3'", "int8"),
        (["serve", "--kv-ssd", "/d"], 1, "--kv-ssd", "--kv-ssd /mnt/nvme0/memserve=20GiB"),
        (["serve", "--kv-lower-dtype", "int8"], 1, "no lower tier", "--dram-memory 2GiB"),
        (["serve", "--log-level", "loud"], 1, "'loud'", "warning"),
        (["serve", "--caching", "all"], 2, "'all'", "serve --help"),
        (["serve", "--policy", "best"], 1, "'best'", "least-load"),
        (["serve", "--link", "wire"], 1, "'wire'", "shm"),
        (["serve", "--prefill", "0", "--decode", "0"], 1, "without instances", "--colocated"),
        (["serve", "--cluster-host", "0.0.0.0"], 1, "0.0.0.0", "--cluster-host 10.0.0.1"),
        (["serve", "--cluster-port", "5900"], 1, "secret", "--cluster-secret-file"),
        (["serve", "--cluster-port", "5900", "--cluster-secret-file", "/no/such"], 1, "/no/such", "urandom"),
        (["serve", "--in-process", "--decode", "2"], 1, "--in-process", "--decode"),
        (["serve", "--engine", "vllm=10.0.0.1:80"], 1, "names no engine", "vllm=http://"),
        (["serve", "--engine", "tgi=http://x:80"], 1, "names no engine", "vllm=http://"),
        (["serve", "--engine", "vllm=http://x:80,events=x"], 1, "no address of ZeroMQ", "events=tcp://"),
        (["serve", "--engine", "vllm=http://x:80,replay=tcp://x:1"], 1, "publishes", "events=tcp://"),
        (["serve", "--engine", "vllm=http://x:80,event=tcp://x:1"], 1, "unknown", "events=tcp://"),
        (["serve", "--engine", "vllm=http://x:80", "--engine", "sglang=http://x:80"], 1, "named twice", "--engine"),
        (["serve", "--engine", "vllm=http://x:80,role=both"], 1, "no role", "role=prefill"),
        (["serve", "--engine", "sglang=http://x:80,role=decode"], 1, "counterpart", "role=prefill"),
        (["serve", "--engine", "sglang=http://x:80,bootstrap=9"], 1, "bootstrap", "role=prefill"),
        (["serve", "--engine", "llamacpp=http://x:80,role=decode"], 1, "unknown", "vllm=http://"),
        (["serve", "--engine", "vllm=http://x:80", "--colocated", "1"], 1, "need a model", "--model"),
        (["serve", "--engine", "vllm=http://x:80,role=decode"], 1, "counterpart", "role=prefill"),
        (["serve", "--engine", "vllm=http://x:80,format=x"], 1, "unknown format of KV events", "sglang"),
        (["serve", "--admission", "most"], 1, "unknown admission controller", "bounded"),
        (["store", "--listen", "127.0.0.1:7100", "--ssd", "tape://x=1GiB"], 1, "unknown store backend", "file"),
        (
            ["serve", "--engine", "vllm=http://x:80", "--engine-prefill-tokens", "0"],
            2,
            "--engine-prefill-tokens",
            "help",
        ),
        (["serve", "--engine", "vllm=http://x:80", "--prefill", "1"], 1, "no instances", "--prefill"),
        (["serve", "--engine", "vllm=http://x:80", "--admission", "memory"], 1, "block by block", "bounded"),
        (["serve", "--engine", "vllm=http://x:80", "--engine-key-file", "/no/such"], 1, "/no/such", ""),
        (["serve", "--engine-admin-key-file", "/no/such"], 1, "/no/such", "urandom"),
        (["serve", "--engine", "vllm=http://x:80", "--endpoint-picker", "9002"], 1, "HOST:PORT", "--endpoint-picker"),
        (["serve", "--engine", "memserve=http://x:80,events=tcp://x:1"], 1, "publish no KV events", "--engine"),
        (["router", "--join", "x:1", "--endpoint-picker", "127.0.0.1:9002"], 2, "--endpoint-picker", "help"),
        (["engine", "join", "vllm=x", "--engine-admin-key-file", "/no/such"], 1, "names no engine", "vllm=http://"),
        (["engine", "list", "--engine-admin-key-file", "/no/such"], 1, "/no/such", "urandom"),
        (["instance", "--join", "nowhere"], 1, "secret", "--cluster-secret-file"),
        (["instance", "--join", "nowhere", "--cluster-secret-file", __file__], 1, "HOST:PORT", "--join"),
        (["chat", "--temperature", "9", "hi"], 2, "--temperature", "chat --help"),
        (["chat", "--url", "http://127.0.0.1:9", "hi"], 1, "127.0.0.1:9", "memserve serve"),
        (["chat", "--url", "not a url", "hi"], 1, "not a url", "memserve serve"),
    ],
)
def test_errors_are_one_line_and_a_hint(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, error: str, hint: str
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.strip().splitlines()
    assert first.startswith("error: ") and error in first
    assert second.startswith("hint: ") and hint in second


def test_port_in_use_is_reported_before_model_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memserve.host.build.build_engine", lambda options: pytest.fail("loaded"))
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_bad_keys_are_said_before_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memserve.host.build.build_engine", lambda options: pytest.fail("loaded"))
    assert run(["serve", "--port", "0", "--api-key", "a=k", "--api-key", "b=k"]) == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0 and run(["--version"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second and re.fullmatch(r"\d+\.\d+\.\d+", first)
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("serve", "chat", "doctor", "bench", "version"))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from memserve.cli.main import run; run(['serve', '--help']);"
        "print([m for m in ('torch', 'transformers', 'uvicorn', 'tokenizers', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InvariantError("refcount"), 1, "internal: refcount"),
        (KeyboardInterrupt(), 130, ""),
        (UserError("no room", hint="make some"), 1, "hint: make some"),
    ],
    ids=["a bug", "Ctrl-C", "a user error"],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("memserve.cli.doctor.examine", fail)
    assert run(["doctor"]) == code
    assert said in capsys.readouterr().err


# -- doctor


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json", "--port", "0"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    names = {check["name"] for check in report["checks"]}
    assert {"python", "native core", "native kernels", "torch build", "memory", "model", "port"} <= names
    assert all(check["hint"] for check in report["checks"] if check["status"] == "fail")


def test_doctor_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 1 << 20)
    [memory] = [finding for finding in doctor.check_machine() if finding.name == "memory"]
    assert memory.status is Status.WARN and memory.hint
    monkeypatch.setattr(doctor, "PYTHON_MIN", (99, 0))
    [python] = doctor.check_python()
    assert python.status is Status.FAIL and python.hint
    with bind("127.0.0.1", 0) as taken:
        [port] = doctor.check_port("127.0.0.1", taken.getsockname()[1])
        assert port.status is Status.WARN and "--port" in (port.hint or "")
    [folder] = doctor.check_model(str(tmp_path))
    assert folder.status is Status.FAIL


def test_doctor_knows_whether_the_model_is_converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(sources, "bundled_gguf", lambda: gguf)
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))

    def converted() -> Finding:
        return {finding.name: finding for finding in doctor.check_model("default")}["converted model"]

    assert converted().status is Status.WARN
    folder = tmp_path / "cache" / "tiny-0123" / "float32"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert converted().status is Status.OK


def test_doctor_looks_into_a_model_folder(tmp_path: Path) -> None:
    """It said "ready to serve" for a folder without a tokenizer, and later that state-space models are not served."""
    from transformers import BloomConfig, LlamaConfig, MambaConfig

    from memserve.cli.doctor import Status, check_model

    def verdict(folder: Path) -> tuple[Status, str]:
        (found,) = check_model(str(folder))
        return found.status, found.detail

    MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16).save_pretrained(tmp_path / "mamba")
    assert verdict(tmp_path / "mamba")[0] is Status.FAIL and "safetensors" in verdict(tmp_path / "mamba")[1]
    BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=16).save_pretrained(tmp_path / "bloom")
    assert verdict(tmp_path / "bloom")[0] is Status.FAIL and "attention of bloom" in verdict(tmp_path / "bloom")[1]
    llama = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
    llama.save_pretrained(tmp_path / "llama")
    assert verdict(tmp_path / "llama")[0] is Status.FAIL and "tokenizer" in verdict(tmp_path / "llama")[1]
    (tmp_path / "llama" / "config.json").write_text("[1, 2")
    assert verdict(tmp_path / "llama")[0] is Status.FAIL and "config.json" in verdict(tmp_path / "llama")[1]


def test_doctor_fails_without_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "--model", str(tmp_path), "--port", "0"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "not ready" in out


def test_doctor_says_what_to_type(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_model", lambda model: iter([Finding("model", Status.OK, model)]))
    with bind("127.0.0.1", 0) as taken:
        assert run(["doctor", "--model", "my model", "--port", str(taken.getsockname()[1])]) == 0
    assert "memserve serve --model 'my model' --port 0" in capsys.readouterr().out


def test_doctor_knows_a_hub_id_from_a_wrong_path() -> None:
    [hub], [path] = doctor.check_model("org/name"), doctor.check_model("/nowhere/at/all")
    assert (hub.status, path.status) == (Status.WARN, Status.FAIL)


# -- chat


class Terminal:
    """Keeps what a conversation says and notes."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.said: list[str] = []
        self.noted: list[str] = []
        self._interrupt_after = interrupt_after

    def say(self, text: str) -> None:
        self.said.append(text)
        if self._interrupt_after is not None and len(self.said) == self._interrupt_after:
            self._interrupt_after = None
            raise KeyboardInterrupt


def test_a_conversation_remembers_and_obeys() -> None:
    engine = FakeEngine(says(SCRIPT_TEXT))
    terminal = Terminal()
    backend = EngineBackend(engine, TinyModel())
    conversation = Conversation(backend, GREEDY, terminal.say, terminal.noted.append)
    assert conversation.handle_line("hello") and conversation.handle_line("  ") and conversation.handle_line("and?")
    assert "".join(terminal.said) == f"{SCRIPT_TEXT}\n" * 2
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert "from the cache" in terminal.noted[-1]
    assert len(engine.submitted[1].prompt) > len(engine.submitted[0].prompt)
    conversation.handle_line("/system be kind")
    assert conversation.messages == [] and conversation.system == "be kind"
    conversation.handle_line("hello")
    conversation.handle_line("/reset")
    conversation.handle_line("/help")
    assert terminal.noted[-1] == HELP and conversation.messages == []
    conversation.handle_line("/dance")
    assert "unknown command /dance" in terminal.noted[-1]
    assert not conversation.handle_line("/exit")
    backend.close()
    engine.close()


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    engine = FakeEngine(says("word " * 50))
    terminal = Terminal(interrupt_after=2)
    backend = EngineBackend(engine, TinyModel())
    conversation = Conversation(backend, GREEDY, terminal.say, terminal.noted.append)
    assert conversation.handle_line("hello")
    assert terminal.noted == ["[stopped]"]
    assert engine.cancelled == [engine.submitted[0].request_id]
    assert conversation.messages[-1]["content"] == "".join(terminal.said[:2])
    backend.close()
    engine.close()


def test_engine_backend_raises_the_refusal() -> None:
    engine = FakeEngine(says("x"), max_requests=0)
    backend = EngineBackend(engine, TinyModel())
    with pytest.raises(UserError, match="queue is full"):
        list(backend.stream_answer([{"role": "user", "content": "hi"}], GREEDY, ChatAccount()))
    with pytest.raises(UserError, match="context"):
        list(backend.stream_answer([{"role": "user", "content": "hi " * 300}], GREEDY, ChatAccount()))
    backend.close()


def test_chat_with_a_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=["secret"]) as world:
        assert run(["chat", "--url", world.url, "--api-key", "secret", "hello"]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{SCRIPT_TEXT}\n" and "prompt tokens" in captured.err
        assert run(["chat", "--url", f"{world.url}/v1/", "--api-key", "secret", "--quiet", "hello"]) == 0
        assert capsys.readouterr() == (f"{SCRIPT_TEXT}\n", "")
        assert run(["chat", "--url", world.url, "hello"]) == 1
        assert "--api-key" in capsys.readouterr().err
        assert run(["chat", "--url", world.url, "--api-key", "secret", "--model", "gpt-17", "hello"]) == 1
        assert "does not exist" in capsys.readouterr().err
        lines = iter(["hello", "/exit", "never"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        assert run(["chat", "--url", world.url, "--api-key", "secret", "--quiet"]) == 0
        assert capsys.readouterr().out == f"{SCRIPT_TEXT}\n" and next(lines) == "never"


def test_leaving_a_server_s_answer_early_cancels_it() -> None:
    with serve(FakeEngine(says("word " * 50), step_s=0.001)) as world:
        backend = ServerBackend(world.url, None, None)
        answer = backend.stream_answer([{"role": "user", "content": "hi"}], GREEDY, ChatAccount())
        next(answer)
        answer.close()
        assert world.engine.wait_until(lambda: bool(world.engine.cancelled) or not world.engine._running)
        backend.close()


# -- serve


def test_every_engine_option_is_a_flag_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag set to something other than its default must arrive in its field."""
    flags = {
        "model": ("--model", "m"), "dtype": ("--dtype", "float16"), "device": ("--device", "cpu"),
        "kv_memory_bytes": ("--kv-memory", "5KiB", 5120), "dram_memory_bytes": ("--dram-memory", "7KiB", 7168),
        "caching": ("--no-cache", None, False), "max_running": ("--max-running", "3", 3),
        "max_step_tokens": ("--max-step-tokens", "5", 5), "max_waiting": ("--max-waiting", "6", 6),
        "prefill_chunk_tokens": ("--prefill-chunk-tokens", "4", 4), "preemption": ("--preemption", "swap"),
        "steps_in_flight": ("--steps-in-flight", "1", 1), "block_tokens": ("--block-tokens", "16", 16),
        "max_model_tokens": ("--max-model-tokens", "9", 9), "threads": ("--threads", "1", 1),
        "scheduling": ("--scheduling", "slo"), "slo_tpot_ns": ("--slo-tpot-ms", "60.5", 60_500_000),
        "slo_ttft_ns": ("--slo-ttft-ms", "3000", 3_000_000_000), "layerwise": ("--layerwise", "auto"),
        "link_bytes_s": ("--link-gbps", "16", 2e9), "draft_tokens": ("--draft-tokens", "6", 6),
        "keep_tool_prefixes": ("--keep-tool-prefixes", "auto"),
        "window_kv": ("--window-kv", "together"), "nonprefix_reuse": ("--nonprefix-reuse", None, True),
        "nonprefix_recompute": ("--nonprefix-recompute", "0.5", 0.5),
        "kv_dtype": ("--kv-dtype", "int8"), "kv_lower_dtype": ("--kv-lower-dtype", "int8"),
        "kv_folder": ("--kv-ssd", "/d=64MiB", ("/d", 64 << 20)),
        "gpu_memory_share": ("--gpu-memory-share", "0.5", 0.5),
        "foreign_kv": ("--no-foreign-kv", None, False), "tensor": ("--tensor-parallel", "2", 2),
        "pipeline": ("--pipeline-parallel", "3", 3), "prefill_tensor": ("--prefill-tensor-parallel", "4", 4),
        "decode_tensor": ("--decode-tensor-parallel", "5", 5), "lora": ("--lora", "a=/a", ("a=/a",)),
        "quantization": ("--quantization", "none"), "kv_codec": ("--kv-codec", "always"),
        "pooling": ("--pooling", "last"), "lora_folder": ("--lora-folder", "/a"),
        "max_loras": ("--max-loras", "3", 3), "max_lora_rank": ("--max-lora-rank", "16", 16),
    }  # fmt: skip
    assert set(flags) == {one.name for one in options_of(EngineOptions)}
    seen: list[EngineOptions] = []
    monkeypatch.setattr("memserve.cli.cluster.serve.run_server", lambda options, http, cluster: seen.append(options))
    assert run(["serve", *(word for flag in flags.values() for word in flag[:2] if word is not None)]) == 0
    wanted = {name: flag[-1] for name, flag in flags.items()}
    assert {one.name: one.default for one in options_of(seen[0])} == wanted
    assert all(one.default != wanted[one.name] for one in options_of(EngineOptions))


DOUBLE = str(SUPPORT / "served_double.py")


@pytest.fixture
def server_process():
    command = [sys.executable, DOUBLE, "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_says_it_is_ready_serves_and_ends_gently(server_process: subprocess.Popen[str], sign: int) -> None:
    ready, example = server_process.stdout.readline(), server_process.stdout.readline()
    assert MODEL in ready and re.search(r"ready in [\d.]+ s", ready)
    url = re.search(r"http://[^ ]+/v1", ready)[0]
    assert f"curl {url}/chat/completions" in example
    body = json.loads(re.search(r"-d '(.*)'", example)[1])
    with httpx.stream("POST", f"{url}/chat/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server_process.send_signal(sign)
        assert next(lines) == "" and next(lines).startswith("data: ")
        if sign == signal.SIGHUP:  # a closing terminal sends several
            server_process.send_signal(sign)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert server_process.wait(20) == 0
    said = server_process.stderr.read()
    assert "loading" in said
    assert f"{signal.Signals(sign).name}: stopping; 1 requests in progress have 20 s to finish" in said
    assert "stopped: 1 requests have finished, none was cut off" in said


def _gone() -> int:
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


@pytest.mark.parametrize(
    ("stdout", "closed"),
    [
        pytest.param(lambda: os.open("/dev/full", os.O_WRONLY), (), id="full"),
        pytest.param(_gone, (), id="reader gone"),
        pytest.param(lambda: os.open(os.devnull, os.O_WRONLY), (1,), id="stdout closed"),
        pytest.param(lambda: os.open(os.devnull, os.O_WRONLY), (0, 1, 2), id="all closed"),
    ],
)
def test_a_server_needs_no_reader_of_its_lines(stdout: Callable[[], int], closed: tuple[int, ...]) -> None:
    """A full disk, a pipe without a reader, a parent that has closed everything: clients are served all the same, and
    no socket or journal gets the number of a standard file."""
    port = free_port()
    command = [sys.executable, DOUBLE, str(port)]
    to = stdout()
    if closed:  # by a shell: Python between fork and exec may meet threads of gRPC that other tests have started
        closing = "exec " + "".join(f"{descriptor}>&- " for descriptor in closed) + '"$@"'
        command = ["sh", "-c", closing, "sh", *command]
    process = subprocess.Popen(command, stdout=to, stderr=to)
    os.close(to)
    try:
        eventually(lambda: process.poll() is not None or _is_healthy(port))
        assert process.poll() is None
        for descriptor in closed:
            assert os.readlink(f"/proc/{process.pid}/fd/{descriptor}") == os.devnull
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


NOHUP = """
import signal, sys
sys.path.insert(0, {src!r})
from memserve.system.process import EndRequested, ending_signals, ignore_terminal, on_ending_signals, signals_raise
signal.signal(signal.SIGHUP, signal.SIG_IGN)
assert signal.SIGHUP not in ending_signals()
with signals_raise():
    signal.raise_signal(signal.SIGHUP)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ended = []
try:
    with signals_raise():
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)  # what was started is ended in spite of more of them
            signal.raise_signal(signal.SIGTERM)
            ended.append("all")
except EndRequested as asked:
    print(asked.signal_name, ended)
"""


def test_nohup_is_obeyed_and_a_start_is_interrupted_once() -> None:
    code = NOHUP.format(src=str(ROOT / "src"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "SIGHUP ['all']\n", run.stderr
