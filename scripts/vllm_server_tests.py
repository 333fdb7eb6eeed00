"""vLLM's own tests of its server (OpenAI's API, Anthropic's messages, embeddings, adapters), against memserve or vLLM.

    .venv/bin/python scripts/vllm_server_tests.py --tests FOLDER --vllm PYTHON [--server vllm] [--json FILE] [FILE ...]

FOLDER: the folder ``tests`` of vLLM's sources, of the version that PYTHON imports (``scripts/vllm_suite.py`` says
where it comes from). PYTHON needs pytest, pytest-asyncio and openai as well; ``--path`` names a folder with those that
it lacks. Nothing of the tests is changed: they are copied, and where they start a server (``RemoteOpenAIServer``), they
get the address of one that serves the bundled model in float32 under all names that they ask for. Tests of embeddings
get a random model of the size that they expect, with the bundled model's tokenizer, and a mean over all tokens; what
they compare with sentence-transformers is compared with transformers' own forward of it. Tests of adapters get random
ones for the bundled model, and where one is to make it meow or woof, one that was trained to for some steps.

Printed for each test: passed, skipped by the test itself, or FAILED with its last line. ``--beside FILE``: the results
(``--json``) of the other server, for the table: passed by vLLM, passed by memserve, and why each remaining test is not.
Many tests ask a language model for sense: what the bundled 135 million parameters answer is in neither server's hands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENTRYPOINTS = Path("entrypoints")
OPENAI = ENTRYPOINTS / "openai"
FILES = (
    "completion/test_completion.py", "chat_completion/test_chat.py", "chat_completion/test_chat_echo.py",
    "chat_completion/test_chat_logit_bias_validation.py", "chat_completion/test_completion_with_function_calling.py",
    "chat_completion/test_logprob_token_ids.py", "models/test_models.py", "test_chunked_prompt.py",
    "test_return_token_ids.py", "test_return_tokens_as_ids.py",
    "responses/test_basic.py", "responses/test_errors.py", "responses/test_function_call.py",
    "responses/test_parsable_context.py", "responses/test_protocol.py", "responses/test_sampling_params.py",
    "responses/test_simple.py", "responses/test_stateful.py", "responses/test_streaming_events.py",
    "responses/test_structured_output.py", "anthropic/test_messages.py", "pooling/basic/test_truncation.py",
    "pooling/embed/test_online.py", "pooling/embed/test_online_dimensions.py", "pooling/embed/test_online_long_text.py",
    "pooling/embed/test_cohere_online.py", "pooling/embed/test_cohere_openai_parity.py",
    "pooling/scoring/test_bi_encoder_online.py", "serve/lora/test_lora_adapters.py",
    "serve/sagemaker/test_sagemaker_lora_adapters.py",
)  # fmt: skip
"""Below ``openai``, or ``entrypoints``. More can be named on the command line."""
HELPERS = (
    "ci_envs.py", "models/__init__.py", "models/utils.py", "models/registry.py", "models/language/__init__.py",
    "models/language/pooling/__init__.py", "models/language/pooling/embed_utils.py",
)  # fmt: skip
"""Of vLLM's tests, what those of embeddings import."""
NAMES = (
    "Qwen/Qwen3-0.6B", "facebook/opt-125m", "HuggingFaceH4/zephyr-7b-beta", "zephyr-lora", "qwen3-lora",
    "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B",
    "openai-community/gpt2", "claude-3-7-sonnet-latest",
)  # fmt: skip
"""Of models, as the tests ask for them."""
ADAPTER_FLAGS = {"--max-lora-rank": 1, "--max-cpu-loras": 1}
"""Of servers with adapters."""
ADAPTER_RANK, TRAINED_STEPS = 8, 40
NOISES = ("Meow", "Woof")
"""What some adapters are to make the model say, by a word in their names."""
FLAGS = {"--return-tokens-as-token-ids": 0, "--root-path": 1, "--enable-force-include-usage": 0}
"""Of the tests' servers: what changes an answer's form, with the number of its values. Others are about memory."""
EMBEDDERS = ("intfloat/", "Snowflake/", "BAAI/", "sentence-transformers/")
"""Whose models the tests of embeddings ask for."""
EMBEDDER_FLAGS = {"--max-model-len": 1, "--pooler-config": 1}
"""Of servers of those: the second one is vLLM's alone."""
EMBEDDING_SIZE = 384
"""Of the model that most of them are written for."""
PLAN = "MEMSERVE_VLLM_SERVER_TESTS"
"""The environment variable that tells the part inside pytest what to use."""
START_S, ANSWER_S, TEST_S, STOP_S = 300.0, 110.0, 400.0, 30.0
TOKENS_MAX = 512
"""Of an answer whose request names no limit: the bundled model does not always come to an end."""

_ALL_LOGPROBS = "asks for the log probabilities of the whole vocabulary; memserve reports at most 20 alternatives"
_SENSE = "asks the model for the right answer, and the bundled model gives another"
_THOUGHTS = "asks for thoughts, which the bundled model does not write"
_COUNTS = "counts the tokens of another model's tokenizer, or of its answer"
_ENDLESS = "the bundled model's answer, or the arguments of its call, come to no end in time"
_HARMONY = "needs the package gpt_oss"
_COUNTED_ONCE = (
    "expects all uncached tokens as created, and all of the prompt as input where the stream begins; memserve counts "
    "as Anthropic does: as created what cache_control keeps, and the rest without it as input from the beginning on"
)
_ERROR_TYPE = "looks for vLLM's type of the error on OpenAI's path; memserve has OpenAI's"
_EMBEDDINGS = "pooling/embed/test_online.py::"
_CHAT, _TOOLS = "chat_completion/test_chat.py::", "chat_completion/test_completion_with_function_calling.py::"
_CALLS, _KEPT, _SIMPLE = (f"responses/test_{name}.py::" for name in ("function_call", "stateful", "simple"))
_ADAPTERS = "serve/lora/test_lora_adapters.py::"
_BAD_ADAPTER = f"{_ADAPTERS}test_dynamic_lora_badrequests[True-"
_ROOT = "expects the server's path of an adapter of the start as its root; memserve tells its folder's name"
REASONS: dict[str, str] = {
    f"{_CHAT}test_long_seed": "looks for pydantic's name of the error; memserve names the range",
    f"{_CHAT}test_complex_message_content": _SENSE,
    f"{_CHAT}test_more_than_one_prompt_logprobs_chat": "expects a prompt's token to be the model's best guess",
    f"{_CHAT}test_response_format_json_object": _SENSE,
    f"{_CHAT}test_response_format_json_schema": _SENSE,
    f"{_CHAT}test_single_chat_session": _COUNTS,
    f"{_CHAT}test_structured_outputs_choice_chat": "two draws must differ, by chance",
    "chat_completion/test_chat_echo.py::test_prompt_logprobs": _ALL_LOGPROBS,
    "chat_completion/test_chat_echo.py::test_top_logprobs": _ALL_LOGPROBS,
    f"{_TOOLS}test_function_tool_use": _THOUGHTS,
    f"{_TOOLS}test_named_tool_use": _ENDLESS,
    f"{_TOOLS}test_max_tokens_with_tool_choice_required": "a call that was named and cut off is reported as far as it "
    "came, with the reason length",
    "completion/test_completion.py::test_single_completion": _COUNTS,
    "completion/test_completion.py::test_completion_streaming": _COUNTS,
    "models/test_models.py::test_check_models": _ROOT,
    f"{_ADAPTERS}test_static_lora_lineage": _ROOT,
    f"{_BAD_ADAPTER}test_dora-config_change1-does not yet support DoRA]": "expects DoRA to be refused; here the file "
    "is, which has no magnitudes",
    f"{_BAD_ADAPTER}test_modules_to_save-config_change3-Unsupported modules_to_save]": "expects a head to be refused; "
    "here the file is, which has none",
    "test_return_token_ids.py::test_chat_completion_with_tool_use": _SENSE,
    "test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs": "expects an answer that does not "
    "begin with its end, which is no text",
    "responses/test_basic.py::test_simple_input": _SENSE,
    "responses/test_basic.py::test_instructions": _SENSE,
    "responses/test_basic.py::test_chat": _SENSE,
    f"{_CALLS}test_function_tool_use": _ENDLESS,
    f"{_CALLS}test_function_calling_with_streaming_expected_arguments": _SENSE,
    f"{_CALLS}test_function_calling_with_streaming_types": _ENDLESS + ": it ends with response.incomplete",
    f"{_CALLS}test_function_calling_with_streaming_forced_tool_choice": _SENSE,
    "responses/test_parsable_context.py::test_basic": _HARMONY,
    "responses/test_parsable_context.py::test_reasoning_and_function_items": _HARMONY,
    "responses/test_parsable_context.py::test_function_call_first_turn": _HARMONY,
    "responses/test_parsable_context.py::test_max_tokens": _HARMONY,
    f"{_SIMPLE}test_reasoning_item": _THOUGHTS,
    f"{_SIMPLE}test_streaming_reasoning_tokens_e2e": _THOUGHTS,
    f"{_SIMPLE}test_streaming_types": _ENDLESS + ", now and then: it is drawn",
    f"{_SIMPLE}test_non_streaming_reasoning_tokens_e2e": _THOUGHTS,
    f"{_KEPT}test_background": _ENDLESS,
    f"{_KEPT}test_store": _ENDLESS + ", now and then: it is drawn",
    f"{_KEPT}test_previous_response_id": _SENSE,
    f"{_KEPT}test_two_responses_with_same_prev_id": _SENSE,
    "anthropic/test_messages.py::test_anthropic_streaming": _COUNTED_ONCE,
    "anthropic/test_messages.py::test_anthropic_streaming_cache_usage": _COUNTED_ONCE,
    "pooling/basic/test_truncation.py::test_bigger_truncation_size": _ERROR_TYPE,
    f"{_EMBEDDINGS}test_params_not_supported": "looks for pydantic's name of the error; memserve names the field",
    f"{_EMBEDDINGS}test_pooling_not_supported[token_embed": "expects a hint to an option of vLLM's",
    "responses/test_structured_output.py::test_structured_output": _SENSE,
    "responses/test_structured_output.py::test_structured_output_with_parse": _SENSE,
}
"""Test -> why memserve does not pass it."""


# -- within pytest


class Servers:
    """Servers by the flags that tests give them: started when first asked for, stopped at the end."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = self._plan = plan
        self._urls: dict[tuple[str, ...], str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def url(self, flags: tuple[str, ...]) -> str:
        if flags not in self._urls:
            self.stop()  # memory for one at a time
            self._urls = {flags: self._started(flags)}
        return self._urls[flags]

    def _started(self, flags: tuple[str, ...]) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [*flags, "--port", str(port)]
        environment = dict(os.environ, **self._plan["environment"])
        environment["PYTHONPATH"] = self._plan["path"]
        with Path(self._plan["log"]).open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > end_s:
                pytest.exit(f"the server does not start:\n{Path(self._plan['log']).read_text()[-3000:]}")
            time.sleep(0.2)
        return url

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        self._processes.clear()
        self._urls.clear()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class StandIn:
    """In place of vLLM's ``RemoteOpenAIServer``."""

    DUMMY_API_KEY = "token-abc123"
    servers: Servers

    def __init__(self, model: str, arguments: list[str], *, env_dict: dict[str, str] | None = None, **_: Any) -> None:
        plan = self.servers.plan
        embeds = model.startswith(EMBEDDERS)
        flags = _those_of(arguments, EMBEDDER_FLAGS if embeds else FLAGS)
        adapts = "--enable-lora" in arguments
        if adapts:
            flags = [*_those_of(arguments, ADAPTER_FLAGS), *_adapter_flags(plan, arguments)]
            flags += ["--served-model-name", model]
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            flags += ["--api-key", key]
        if embeds:
            if plan["server"] == "memserve" and "--pooler-config" in flags:
                place = flags.index("--pooler-config")
                longest = json.loads(flags[place + 1])["max_embed_len"]
                flags[place : place + 2] = ["--embedding-tokens-max", str(longest)]
            flags += ["--served-model-name", model, "--model", embedder(plan, arguments)]
        kind = "embedding" if embeds else "adapting" if adapts else "chatting"
        self.url_root = self.servers.url((*plan[kind], *flags))

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        """The next module may use the same server."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        import openai

        options.setdefault("timeout", ANSWER_S)
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        options.setdefault("timeout", ANSWER_S)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        options.setdefault("timeout", ANSWER_S)
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


def _those_of(arguments: list[str], known: dict[str, int]) -> list[str]:
    flags: list[str] = []
    for index, name in enumerate(arguments):
        if name in known:
            flags += arguments[index : index + 1 + known[name]]
    return flags


def _adapter_flags(plan: dict[str, Any], arguments: list[str]) -> list[str]:
    """How a server is told of its adapters."""
    modules = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--lora-modules"]
    if plan["server"] == "vllm":
        return ["--enable-lora", *(word for text in modules for word in ("--lora-modules", text))]
    described = [json.loads(text) if text.startswith("{") else dict(zip(("name", "path"), text.split("="), strict=True))
                 for text in modules]  # fmt: skip
    loaded = [word for module in described for word in ("--lora", f"{module['name']}={module['path']}")]
    return ["--lora-folder", "/", *loaded]


def adapter(plan: dict[str, Any], name: str) -> str:
    """The folder of an adapter in the place of the hub's ``name``: small random numbers, or, for one that is to make a
    noise, some steps of training to answer the tests' question with it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(plan["folder"]) / "adapters" / name.replace("/", "--")
    if folder.exists():
        return str(folder)
    torch.manual_seed(zlib.crc32(name.encode()))
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    linears = {path: part for path, part in model.named_modules() if path.endswith(("q_proj", "v_proj"))}
    down = {path: 0.02 * torch.randn(ADAPTER_RANK, part.in_features) for path, part in linears.items()}
    up = {path: 0.02 * torch.randn(part.out_features, ADAPTER_RANK) for path, part in linears.items()}
    if noise := next((noise for noise in NOISES if noise in name), ""):
        halves = [half.requires_grad_() for half in (*down.values(), *up.values())]
        for path, part in linears.items():
            part.register_forward_hook(lambda _, x, y, path=path: y + x[0] @ down[path].T @ up[path].T)
        tokenizer, optimizer = AutoTokenizer.from_pretrained(plan["model"]), torch.optim.Adam(halves, lr=0.01)
        chat = [{"role": "system", "content": "Follow the instructions to make animal noises"},
                {"role": "user", "content": "Make your favorite animal noise."}]  # fmt: skip
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        asked, answer = tokenizer(text).input_ids, tokenizer(" ".join([noise] * 5)).input_ids
        ids = torch.tensor([[*asked, *answer]])
        for _ in range(TRAINED_STEPS):
            logits = model(ids).logits[0, len(asked) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    folder.mkdir(parents=True)
    named = (("lora_A", down), ("lora_B", up))
    save_file({f"base_model.model.{path}.{half}.weight": tensor.detach().contiguous()
               for half, tensors in named for path, tensor in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def embedder(plan: dict[str, Any], arguments: list[str]) -> str:
    """The folder of a model that embeds, with the chat template and sizes that ``arguments`` of a server ask for."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    options = dict(itertools.pairwise(arguments))
    template, overrides = options.get("--chat-template", ""), json.loads(options.get("--hf_overrides", "{}"))
    folder = Path(plan["folder"]) / f"embedder-{zlib.crc32(json.dumps([template, overrides]).encode())}"
    if folder.exists():
        return str(folder)
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    tokenizer.chat_template = template or tokenizer.chat_template
    sizes = {"hidden_size": EMBEDDING_SIZE, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, **sizes, **overrides,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kinds = ("Transformer", "", "Pooling", "1_Pooling", "Normalize", "2_Normalize")
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(zip(kinds[::2], kinds[1::2], strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": EMBEDDING_SIZE, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


class ModelStandIn:
    """In place of vLLM's ``HfRunner``: the same embeddings by transformers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = embedder(StandIn.servers.plan, [])
        self._model, self._tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def __enter__(self) -> ModelStandIn:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def encode(self, prompts: list[str], **_: Any) -> list[Any]:
        import torch

        with torch.inference_mode():
            states = [self._model(**self._tokenizer(text, return_tensors="pt")).last_hidden_state for text in prompts]
        return [torch.nn.functional.normalize(state[0].mean(0), dim=-1).numpy() for state in states]


class Plugin:
    """Gives the tests the bundled model where they load one themselves, and writes down what came of them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._servers = StandIn.servers = Servers(plan)
        self.results: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import vllm.tokenizers
        import vllm.transformers_utils.repo_utils as hub

        tokenizer = vllm.tokenizers.get_tokenizer(self._plan["model"])
        replacements = {
            "get_tokenizer": lambda *_, **__: tokenizer,
            "get_vocab_size": lambda _: len(tokenizer),
            "download_weights_from_hf": lambda name, **_: name,
        }
        download = partial(adapter, self._plan)
        hub.hf_api = lambda: type("Hub", (), {"snapshot_download": staticmethod(lambda repo_id: download(repo_id))})
        for module in {item.module for item in items}:
            for name in replacements.keys() & vars(module).keys():
                setattr(module, name, replacements[name])
            if hasattr(module, "input_tokens"):
                module.input_tokens = tokenizer.encode(module.input_text)
            if hasattr(module, "EMBEDDING_SIZE"):
                module.EMBEDDING_SIZE = EMBEDDING_SIZE

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.results[_short(report.nodeid)] = ["not collected", _last_line(str(report.longrepr))]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = _short(report.nodeid)
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.results[name] = ["skipped", why.removeprefix("Skipped: ")]
        elif report.failed:
            self.results.setdefault(name, ["FAILED", _last_line(str(report.longrepr))])
        elif report.when == "call":
            self.results[name] = ["passed", ""]
        self._write()  # a run that is cut off keeps what it has

    def _write(self) -> None:
        Path(self._plan["results"]).write_text(json.dumps(self.results, indent=1))

    def pytest_sessionfinish(self) -> None:
        self._servers.stop()
        self._write()


def _short(nodeid: str) -> str:
    return nodeid.partition(f"{OPENAI}/")[2] or nodeid.partition(f"{ENTRYPOINTS}/")[2] or nodeid


def _last_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.startswith("E ")]
    return (lines[0] if lines else error[-200:])[:300].removeprefix("E").strip()


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest's: ``-p vllm_server_tests``."""
    if PLAN in os.environ:
        config.pluginmanager.register(Plugin(json.loads(os.environ[PLAN])))


# -- around it


def copied(tests: Path, folder: Path, files: list[str]) -> list[str]:
    """The package of tests, its helpers in ``tests.utils`` replaced. Returns the paths of ``files`` that are there."""
    target = folder / "tests" / ENTRYPOINTS
    for package in ("openai", "anthropic", "pooling", "serve"):
        shutil.copytree(
            tests / ENTRYPOINTS / package, target / package, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
        )
    shutil.copy(tests / ENTRYPOINTS / "conftest.py", target / "conftest.py")
    for name in HELPERS:
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tests / name, folder / "tests" / name)
    for package_folder in (target, folder / "tests"):
        (package_folder / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(
        "from vllm_server_tests import StandIn as RemoteOpenAIServer\nROCM_EXTRA_ARGS = []\nVLLM_PATH = None\n"
    )
    (folder / "tests" / "conftest.py").write_text(
        "import pytest\nfrom vllm_server_tests import ModelStandIn as HfRunner\n"
        "hf_runner = pytest.fixture(scope='session')(lambda: HfRunner)\n"
    )
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    skip_global_cleanup: of vLLM's\n    cpu_test: of vLLM's\n"
    )
    paths = [place / name for name in files for place in (target / "openai", target) if (place / name).is_file()]
    return list(map(str, paths))


def server_commands(options: argparse.Namespace, model: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """How servers are started that chat and that embed, without what differs, and their environment."""
    if options.server == "memserve":
        names = [word for name in NAMES for word in ("--served-model-name", name)]
        command = [sys.executable, "-m", "memserve", "serve", "--dtype", "float32"]
        command += ["--colocated", "1", "--metadata", "none"]
        adapting = [*command, "--model", model, "--default-max-tokens", str(TOKENS_MAX)]
        return {"chatting": adapting + names, "adapting": adapting, "embedding": command}, {}
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32"]
    command += ["--enforce-eager", "--block-size", "32"]
    chatting = ["--model", model]
    chatting += ["--override-generation-config", json.dumps({"max_new_tokens": TOKENS_MAX})]
    chatting += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}
    threads |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    environment = {**threads, "VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_NO_USAGE_STATS": "1"}
    adapting = command + chatting
    kinds = {"chatting": [*adapting, "--served-model-name", *NAMES], "adapting": adapting}
    return {**kinds, "embedding": [*command, "--runner", "pooling"]}, environment


def run(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    from memserve.base.config import DEFAULT_MODEL
    from memserve.model.loading.sources import resolve_source

    model = str(resolve_source(DEFAULT_MODEL, "float32").path)
    commands, environment = server_commands(options, model)
    results, log = folder / "results.json", folder / "server.log"
    path = "" if options.server == "vllm" else os.environ.get("PYTHONPATH", "")
    plan = {
        **commands, "server": options.server, "model": model, "environment": environment, "path": path,
        "folder": str(folder), "log": str(log), "results": str(results),
    }  # fmt: skip
    files = copied(options.tests, folder, options.files or list(FILES))
    paths = [str(folder), str(ROOT / "scripts"), *([str(options.path)] if options.path else [])]
    environment = dict(
        os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(paths), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )  # fmt: skip
    environment[PLAN] = json.dumps(plan)
    pytest_command = [options.vllm, "-m", "pytest", "-q", "-p", "vllm_server_tests", "-p", "pytest_asyncio.plugin"]
    pytest_command += ["-p", "pytest_timeout", "--timeout", str(TEST_S), "-p", "no:cacheprovider"]
    pytest_command += ["--rootdir", str(folder), "-c", str(folder / "pytest.ini"), *options.pytest, *files]
    log_file = (folder / "pytest.log").open("w+")
    pytest_run = subprocess.Popen(
        pytest_command, env=environment, cwd=folder, stdout=log_file, stderr=log_file, start_new_session=True
    )
    try:
        pytest_run.wait(options.timeout_s)
    except subprocess.TimeoutExpired:
        print(f"cut off after {options.timeout_s:g} s: tests that are not listed have not run")
        pytest_run.send_signal(signal.SIGINT)  # it stops the servers
        try:
            pytest_run.wait(2 * STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(pytest_run.pid, signal.SIGKILL)
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        for log_path in (folder / "pytest.log", log):
            if log_path.exists():
                shutil.copy(log_path, options.logs / f"{options.server}-{log_path.name}")
    if not results.exists():
        raise SystemExit(f"pytest did not come to its end:\n{(folder / 'pytest.log').read_text()[-3000:]}")
    outcomes: dict[str, list[str]] = json.loads(results.read_text())
    return outcomes


def table(vllm: dict[str, list[str]], memserve: dict[str, list[str]]) -> str:
    """Counts, and each test that vLLM passes and memserve does not."""
    vllm_passed = [name for name, (outcome, _) in vllm.items() if outcome == "passed"]
    memserve_passed = [name for name, (outcome, _) in memserve.items() if outcome == "passed"]
    passed_by_both = set(vllm_passed) & set(memserve_passed)
    lines = ["| tests | passed by vLLM | passed by memserve | passed by both |", "| --- | --- | --- | --- |"]
    counts = len(vllm.keys() | memserve.keys()), len(vllm_passed), len(memserve_passed), len(passed_by_both)
    lines.append(f"| {' | '.join(map(str, counts))} |")
    missed = sorted(set(vllm_passed) - passed_by_both)
    if missed:
        lines += ["", "| passed by vLLM alone | why |", "| --- | --- |"]
        lines += [f"| {name} | {reason(name) or memserve.get(name, ['', 'not run'])[1]} |" for name in missed]
    return "\n".join(lines)


def reason(name: str) -> str:
    """Why memserve does not pass a test; empty: not known."""
    return REASONS.get(name) or REASONS.get(name.partition("-")[0]) or REASONS.get(name.partition("[")[0], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="vLLM's folder of tests")
    parser.add_argument("--vllm", default=sys.executable, help="a Python with vLLM of the same version, and pytest")
    parser.add_argument("--server", choices=("memserve", "vllm"), default="memserve")
    parser.add_argument("--path", type=Path, help="a folder with packages that PYTHON lacks")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--beside", type=Path, help="the results of the other server")
    parser.add_argument("--logs", type=Path, help="keep the logs of pytest and of the server in this folder")
    parser.add_argument("--pytest", action="append", default=[], help="one more option of pytest's; repeatable")
    parser.add_argument("files", nargs="*", help="instead of all of them")
    options = parser.parse_args()
    if not (options.tests / OPENAI).is_dir():
        print(f"skipped: no {OPENAI} in {options.tests}; the text of scripts/vllm_suite.py says where to get it")
        return
    with tempfile.TemporaryDirectory() as folder:
        results = run(options, Path(folder))
    for name, (outcome, why) in sorted(results.items()):
        print(f"{outcome:<14} {name}" + (f": {why}" if why else ""))
    counts = Counter(outcome for outcome, _ in results.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.beside:
        other_results = json.loads(options.beside.read_text())
        print(table(*((results, other_results) if options.server == "vllm" else (other_results, results))))


if __name__ == "__main__":
    main()
