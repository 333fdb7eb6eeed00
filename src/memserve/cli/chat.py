"""``memserve chat``: a conversation in the terminal."""

from __future__ import annotations

import itertools
import json
import queue
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from memserve.base.config import DEFAULT_MAX_TOKENS, EngineOptions
from memserve.base.errors import UserError
from memserve.base.units import NS_PER_S
from memserve.cli import flags as opt
from memserve.cli.output import progress_bar

if TYPE_CHECKING:
    import httpx

    from memserve.api.openai.interfaces import ServedModel, ServingEngine
    from memserve.api.openai.request.prompts import Prompt
    from memserve.base.types import Request


Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Sampling of the answers. None: the model's recommendation, or the server's default."""

    temperature: float | None
    max_tokens: int | None
    seed: int | None


@dataclass(slots=True)
class ChatAccount:
    """Tokens and times of one answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def __str__(self) -> str:
        later_s = self.total_s - self.first_token_s
        speed = f", {(self.answer_tokens - 1) / later_s:.0f} tokens/s" if self.answer_tokens > 1 and later_s > 0 else ""
        return (
            f"[{self.prompt_tokens} prompt tokens, {self.cached_tokens} from the cache; "
            f"first token {self.first_token_s * 1000:.0f} ms; {self.answer_tokens} tokens{speed}]"
        )


class ChatBackend(Protocol):
    """Answers conversations. Closing the iterator early stops the answer."""

    def stream_answer(self, messages: list[Message], options: ChatSettings, account: ChatAccount) -> Iterator[str]:
        """The answer in pieces; fills in ``account``. Raises :class:`UserError` when there is no answer."""

    def close(self) -> None:
        """Release connections and threads."""


class ServerBackend:
    """Asks a running server with OpenAI's API."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        self._url = base
        self._http = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(600, connect=10))
        self._model = model or self._first_model()

    def stream_answer(self, messages: list[Message], options: ChatSettings, account: ChatAccount) -> Iterator[str]:
        """Stream one answer."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"temperature": options.temperature} if options.temperature is not None else {}
        body |= {"max_tokens": options.max_tokens} if options.max_tokens else {}
        body |= {"seed": options.seed} if options.seed is not None else {}
        started = time.perf_counter()
        with self._guard_connection(), self._http.stream("POST", "/chat/completions", json=body) as response:
            _raise_for_error(response)
            for event in _events(response):
                account.total_s = time.perf_counter() - started
                yield from self._read_event(event, account)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    @staticmethod
    def _read_event(event: dict[str, Any], account: ChatAccount) -> Iterator[str]:
        if "error" in event:
            raise UserError(str(event["error"].get("message", "the server failed")))
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                account.first_token_s = account.first_token_s or account.total_s
                yield text
        if usage := event.get("usage"):
            account.prompt_tokens, account.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            account.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _first_model(self) -> str:
        with self._guard_connection():
            response = self._http.get("/models")
            _raise_for_error(response)
            return str(response.json()["data"][0]["id"])

    def _guard_connection(self) -> _AsUserError:
        return _AsUserError(self._url)


class _AsUserError:
    """Turns connection errors into one clear :class:`UserError`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        import httpx

        if isinstance(error, (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, json.JSONDecodeError)):
            hint = "is it running? start one with: memserve serve"
            raise UserError(f"no answer from {self._url}: {error}", hint=hint) from None


def _raise_for_error(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = json.loads(response.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    hint = "give the server's key with --api-key" if response.status_code == 401 else None
    raise UserError(f"the server refused: {message}", hint=hint)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


class EngineBackend:
    """Runs an engine in this process."""

    def __init__(self, engine: ServingEngine, model: ServedModel) -> None:
        from memserve.api.openai.request.prompts import PromptEncoder

        self._engine = engine
        self._model = model
        self._encoder = PromptEncoder(model)
        self._ids = itertools.count()

    def stream_answer(self, messages: list[Message], options: ChatSettings, account: ChatAccount) -> Iterator[str]:
        """Stream one answer."""
        from memserve.api.openai.response.detokenizer import TextStream
        from memserve.base.types import FinishReason, TokenOutput
        from memserve.host.engine import Rejected

        request = self._build_request(messages, options)
        account.prompt_tokens = len(request.prompt)
        stream = TextStream(self._encoder.tokenizer, stop_token_ids=request.stop.stop_token_ids)
        outputs: queue.SimpleQueue[TokenOutput | Rejected] = queue.SimpleQueue()
        started_ns = time.monotonic_ns()
        self._engine.submit(request, outputs.put)
        try:
            while stream.finish_reason is None:
                output = outputs.get()
                if isinstance(output, Rejected):
                    raise UserError(f"the engine refused: {output.reason}")
                account.total_s = (time.monotonic_ns() - started_ns) / NS_PER_S
                account.first_token_s = account.first_token_s or account.total_s
                account.cached_tokens = max(account.cached_tokens, output.cached_tokens)
                text = stream.push_output(output).text
                account.answer_tokens = len(stream.tokens)
                if text:
                    yield text
            if stream.finish_reason is FinishReason.ERROR:
                raise UserError("the engine failed on this answer", hint="see the log above")
        finally:
            if stream.finish_reason is None:
                self._engine.cancel(request.request_id)

    def close(self) -> None:
        """Stop the tokenizing threads. The engine stays open: its builder closes it."""
        self._encoder.close()

    def _build_request(self, messages: list[Message], options: ChatSettings) -> Request:
        from memserve.api.openai.interfaces import sampling_params_of
        from memserve.base.types import Request, StopParams

        prompt = self._render_prompt(messages)
        room = self._model.max_model_tokens - len(prompt.tokens)
        if room < 1:
            raise UserError("the conversation is longer than the model's context", hint="start over with /reset")
        seed = secrets.randbits(63) if options.seed is None else options.seed
        sampling = sampling_params_of(self._model, {"temperature": options.temperature}, seed=seed)
        bound = options.max_tokens or self._model.default_max_tokens or room
        return Request(
            request_id=f"chat-{next(self._ids)}",
            prompt=prompt.tokens,
            sampling=sampling,
            stop=StopParams(min(bound, room), 0, tuple(self._model.eos_token_ids)),
        )

    def _render_prompt(self, messages: list[Message]) -> Prompt:
        from memserve.api.http.errors import ApiError

        try:
            return self._encoder.render_chat(messages)
        except ApiError as error:
            raise UserError(error.message, hint="does this model have a chat template?") from None


HELP = """\
/help            this text
/reset           forget the conversation
/system TEXT     set the system message, and forget the conversation
/exit            leave (also Ctrl-D)
Ctrl-C           stop the answer"""


@dataclass
class Conversation:
    """The messages so far, and the commands. Independent of the terminal: it prints through ``say`` and ``note``."""

    backend: ChatBackend
    options: ChatSettings
    write_text: Callable[[str], None]
    note: Callable[[str], None]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def handle_line(self, line: str) -> bool:
        """Handle one line of input; ``False`` ends the conversation."""
        text = line.strip()
        if text in ("/exit", "/quit"):
            return False
        if text.startswith("/"):
            self._run_command(*text.partition(" ")[::2])
        elif text:
            self._send_question(text)
        return True

    def _run_command(self, name: str, rest: str) -> None:
        if name == "/help":
            self.note(HELP)
        elif name == "/reset":
            self.messages.clear()
            self.note("the conversation is forgotten")
        elif name == "/system":
            self.system = rest.strip() or None
            self.messages.clear()
            self.note("the system message is set; the conversation is forgotten")
        else:
            self.note(f"unknown command {name}; /help lists them")

    def _send_question(self, text: str) -> None:
        head = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        account = ChatAccount()
        answer = self.backend.stream_answer([*head, *self.messages, question], self.options, account)
        try:
            for piece in answer:
                pieces.append(piece)
                self.write_text(piece)
        except KeyboardInterrupt:
            answer.close()  # type: ignore[attr-defined]  # a generator: closing it cancels the answer
            self.write_text(" ...\n")
            self.note("[stopped]")
        else:
            self.write_text("\n")
            self.note(str(account))
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


@opt.grouped
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this, print the answer, and exit.")] = None,
    *,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server. Default: the model runs in this process.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the server, or the model to load.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0: always the most probable token. Default: the model's own.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Longest answer in tokens. Default: {DEFAULT_MAX_TOKENS}, or the server's."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="With equal logits, equal seeds draw equal answers.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server.", envvar="MEMSERVE_CHAT_KEY")] = None,
    engine: Annotated[EngineOptions, opt.Only("dtype", "kv_memory_bytes")],
    quiet: Annotated[bool, typer.Option("--quiet", help="No notes about tokens and times.")] = False,
) -> None:
    """Talk to a model, in this process or on a running server."""
    options = ChatSettings(temperature, max_tokens, seed)
    with _backend(url, model, api_key, replace(engine, model=model or engine.model)) as backend:
        conversation = Conversation(backend, options, _write_text, _ignore if quiet else _print_note, system)
        if question is not None:
            conversation.handle_line(question)
        else:
            _converse(conversation)


@contextmanager
def _backend(url: str | None, model: str | None, api_key: str | None, options: EngineOptions) -> Iterator[ChatBackend]:
    if url is not None:
        server = ServerBackend(url, model, api_key)
        try:
            yield server
        finally:
            server.close()
        return
    from memserve.system.process import set_thread_environment

    set_thread_environment()
    typer.echo(f"loading {options.model} ...", err=True)
    from memserve.host.build import build_engine

    with progress_bar("loading"):
        engine, loaded = build_engine(options)
    backend = EngineBackend(engine, loaded)
    try:
        yield backend
    finally:
        backend.close()
        engine.close(5.0)


def _converse(conversation: Conversation) -> None:
    """Read lines until there are no more. At a terminal the conversation goes on after an error."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        _enable_line_editing()
        conversation.note("/help lists the commands, /exit leaves")
    going = True
    while going:
        try:
            going = conversation.handle_line(input("> " if at_terminal else ""))
        except EOFError:
            return
        except KeyboardInterrupt:
            conversation.note("\n/exit leaves")
        except UserError as error:
            if not at_terminal:
                raise
            conversation.note(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  # the import gives input() its arrow keys
    except ImportError:
        return


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_note(text: str) -> None:
    typer.echo(typer.style(text, dim=True), err=True)


def _ignore(text: str) -> None:
    return None
