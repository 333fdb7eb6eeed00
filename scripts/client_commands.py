"""Command lines of others, run against a memserve with the bundled model.

    .venv/bin/python scripts/client_commands.py --path DIR:DIR [COMMAND ...]

--path: folders with the commands (``pip install aider-chat``, ``pip install "lm-eval[api]"``, ``npm install
@anthropic-ai/claude-code``, each in a place of its own); others are never run. Commands that are missing are skipped
and named. Nothing of a command is changed: it is told an address, a key and a model, in the way that its own manual
says, and gets a home of its own. The bundled model has room for 8,192 tokens, so Claude Code is given a short system
prompt, and no tools.

Printed: a table of commands, interfaces, and what failed. The exit status is 1 after a failure, 0 else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-example"
RUN_S = 240.0
QUESTIONS = [
    {"q": "The capital of France is", "choices": [" Paris", " Rome"], "label": 0},
    {"q": "The capital of Italy is", "choices": [" Paris", " Rome"], "label": 1},
]


@dataclass(frozen=True, slots=True)
class Command:
    """One command, by one interface."""

    program: str
    interface: str
    arguments: Callable[[str, str, Path], list[str]]
    """Of a server's address, its model and an empty folder."""
    environment: Callable[[str, str], dict[str, str]]
    shows: str
    """What stands in its output when it worked."""


def aider(provider: str) -> Callable[[str, str, Path], list[str]]:
    def arguments(url: str, model: str, folder: Path) -> list[str]:
        (folder / "hello.py").write_text("print('hello')\n")
        quiet = ["--no-show-model-warnings", "--no-check-update", "--no-analytics", "--no-git", "--no-pretty"]
        asked = ["--yes-always", "--map-tokens", "0", "--message", "Say hello in one word", "hello.py"]
        return ["--model", f"{provider}/{model}", *quiet, "--no-show-release-notes", *asked]

    return arguments


def claude(url: str, model: str, folder: Path) -> list[str]:
    return ["-p", "Say hello", "--system-prompt", "Be brief.", "--tools", "", "--model", model]


def lm_eval(kind: str, path: str, tasks: str, *more: str) -> Callable[[str, str, Path], list[str]]:
    def arguments(url: str, model: str, folder: Path) -> list[str]:
        (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
        common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
        common |= {"test_split": "test", "doc_to_text": "{{q}}", "doc_to_target": "{{choices[label]}}"}
        until = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        kinds = {
            "choice": {
                "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "target_delimiter": "",
                "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
            },
            "generate": {
                "output_type": "generate_until", "generation_kwargs": until, "metric_list": [{"metric": "exact_match"}],
            },
            "rolling": {
                "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}",
                "metric_list": [{"metric": "word_perplexity"}],
            },
        }  # fmt: skip
        for name, fields in kinds.items():
            (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **fields}))
        told = f"base_url={url}{path},model={model}"
        return ["--model", kind, "--model_args", told, "--tasks", tasks, "--include_path", str(folder), *more]

    return arguments


def openai_environment(url: str, model: str) -> dict[str, str]:
    return {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY}


def anthropic_environment(url: str, model: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_BASE": url, "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
COMMANDS = {
    "aider by chats": Command("aider", CHATS, aider("openai"), openai_environment, "Tokens:"),
    "aider by messages": Command("aider", "/v1/messages", aider("anthropic"), anthropic_environment, "Tokens:"),
    "claude": Command("claude", "/v1/messages", claude, anthropic_environment, ""),
    "lm_eval local-completions": Command(
        "lm_eval", COMPLETIONS, lm_eval("local-completions", COMPLETIONS, "choice,generate,rolling"),
        openai_environment, "word_perplexity",
    ),
    "lm_eval local-chat-completions": Command(
        "lm_eval", CHATS, lm_eval("local-chat-completions", CHATS, "generate", "--apply_chat_template"),
        openai_environment, "exact_match",
    ),
}  # fmt: skip


def run_command(name: str, url: str, model: str, path: str) -> dict[str, str]:
    """In a folder of its own: ``error`` is empty if it worked, ``missing`` says why it was not run."""
    command = COMMANDS[name]
    program = shutil.which(command.program, path=path)
    if program is None:
        return {"missing": f"{command.program} is not installed: name its folder in MEMSERVE_CLIENTS_PATH"}
    with tempfile.TemporaryDirectory() as folder:
        home = {"HOME": folder, "PATH": f"{path}{os.pathsep}{os.defpath}", "TERM": "dumb"}
        home |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        ran = subprocess.run(
            [program, *command.arguments(url, model, Path(folder))], cwd=folder, timeout=RUN_S, text=True,
            env={**home, **command.environment(url, model)}, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
    worked = ran.returncode == 0 and ran.stdout.strip() and command.shows in ran.stdout
    return {"error": "" if worked else f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="folders with the commands")
    parser.add_argument("commands", nargs="*", choices=[*COMMANDS, []], help="instead of all")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "bench"))
    from harness.processes import end_in_order
    from harness.served import serving

    end_in_order()
    with serving("--metadata", "none") as served:
        names = options.commands or list(COMMANDS)
        reports = {name: run_command(name, served.url, served.model, options.path) for name in names}
    print("| command | interface | failed |\n| --- | --- | --- |")
    for name, report in reports.items():
        if "error" in report:
            print(f"| {name} | {COMMANDS[name].interface} | {'yes' if report['error'] else ''} |")
    for name, report in reports.items():
        if why := report.get("missing") or report.get("error"):
            print(f"\n{name}: {why}")
    raise SystemExit(any(report.get("error") for report in reports.values()))


if __name__ == "__main__":
    main()
