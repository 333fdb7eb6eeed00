"""``memserve chat``: a conversation in the terminal (level 4)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from memserve.cli import options as opt
from memserve.cli.chat_backends import Account, ChatBackend, ChatOptions, EngineBackend, Message, ServerBackend
from memserve.config import DEFAULT_MAX_TOKENS, EngineOptions
from memserve.errors import UserError

HELP = """\
/help            this text
/reset           forget the conversation
/system TEXT     set the system message, and forget the conversation
/exit            leave (also Ctrl-D)
Ctrl-C           stop the answer"""


@dataclass
class Conversation:
    """What was said, and what the commands do. Knows no terminal: it reads and writes what it is given."""

    backend: ChatBackend
    options: ChatOptions
    say: Callable[[str], None]
    note: Callable[[str], None]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def turn(self, line: str) -> bool:
        """Take one line from the person; ``False`` ends the conversation."""
        text = line.strip()
        if text in ("/exit", "/quit"):
            return False
        if text.startswith("/"):
            self._command(*text.partition(" ")[::2])
        elif text:
            self._ask(text)
        return True

    def _command(self, name: str, rest: str) -> None:
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

    def _ask(self, text: str) -> None:
        head = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        pieces: list[str] = []
        account = Account()
        answer = self.backend.answer([*head, *self.messages, asked], self.options, account)
        try:
            for piece in answer:
                pieces.append(piece)
                self.say(piece)
        except KeyboardInterrupt:
            answer.close()  # type: ignore[attr-defined]  # a generator: closing it cancels the answer
            self.say(" ...\n")
            self.note("[stopped]")
        else:
            self.say("\n")
            self.note(str(account))
        self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]


@opt.grouped
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this, print the answer, and leave.")] = None,
    *,
    url: Annotated[str | None, typer.Option(help="A running server; without it the model runs in here.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the server, or what to load.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0: always the likeliest token; default: the model's own.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Longest answer; default: {DEFAULT_MAX_TOKENS}, or as the server says.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answers.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server.", envvar="MEMSERVE_CHAT_KEY")] = None,
    engine: Annotated[EngineOptions, opt.Only("dtype", "kv_memory_bytes")],
    quiet: Annotated[bool, typer.Option("--quiet", help="No notes about tokens and times.")] = False,
) -> None:
    """Talk to a model, in this process or on a running server."""
    options = ChatOptions(temperature, max_tokens, seed)
    with _backend(url, model, api_key, replace(engine, model=model or engine.model)) as backend:
        conversation = Conversation(backend, options, _say, _ignore if quiet else _note, system)
        if question is not None:
            conversation.turn(question)
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
    from memserve.runtime.process import set_thread_environment

    set_thread_environment()
    typer.echo(f"loading {options.model} ...", err=True)
    from memserve.runtime.build import build_engine

    engine, loaded = build_engine(options)
    backend = EngineBackend(engine, loaded)
    try:
        yield backend
    finally:
        backend.close()
        engine.close(5.0)


def _converse(conversation: Conversation) -> None:
    """Read lines until there are no more. An answer that fails is said, and the conversation goes on."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        _enable_line_editing()
        conversation.note("/help lists the commands, /exit leaves")
    going = True
    while going:
        try:
            going = conversation.turn(input("> " if at_terminal else ""))
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
        import readline  # noqa: F401  # importing it is what gives input() its arrow keys
    except ImportError:
        return


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    typer.echo(typer.style(text, dim=True), err=True)


def _ignore(text: str) -> None:
    return None
