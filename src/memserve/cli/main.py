"""The command ``memserve``. Nothing is imported before a command needs it."""

from __future__ import annotations

import gc
import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from memserve import __version__
from memserve.base.errors import InvariantError, UserError
from memserve.system.process import die_with_parent

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_ClickException: type = typer.BadParameter.__mro__[2]
"""What typer raises for a wrong command line. It has no public name since typer bundles its own click."""

_COMMANDS = (
    "serve", "model", "engine", "instance", "router", "store", "scale", "chat", "top", "explain", "trees", "doctor",
    "profile",
)  # fmt: skip
_GROUP = "memserve.commands"
"""Entry points of other distributions: each is a command, or a group of commands (``typer.Typer``)."""
_LAB = ("ui", "bench", "sim")
"""Commands of ``memserve-lab``: named here so that a hint can say what to install."""


def command_line(word: str | None = None) -> typer.Typer:
    """All commands; only ``word`` if it names one of them, because importing the others delays every start."""
    app = typer.Typer(
        name="memserve",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110},
        rich_markup_mode=None,  # the drawn tables cut the names of options on a narrow terminal
    )
    app.callback()(_root)
    app.command()(version)
    if word in _LAB:
        _add_installed(app, word)
        return app
    for name in [word] if word in _COMMANDS else _COMMANDS:
        _add(app, name)
    if word not in _COMMANDS:
        _add_installed(app)
    return app


def _add(app: typer.Typer, name: str) -> None:
    match name:
        case "serve":
            from memserve.cli.cluster.serve import serve

            app.command()(serve)
        case "model":
            from memserve.cli.cluster import model

            app.add_typer(model.app, name=name)
        case "engine":
            from memserve.cli.cluster import fleet as engine

            app.add_typer(engine.app, name=name)
        case "instance":
            from memserve.cli.cluster.instance import instance

            app.command()(instance)
        case "router":
            from memserve.cli.cluster.router import router

            app.command()(router)
        case "store":
            from memserve.cli.cluster import store

            app.add_typer(store.app, name=name)
        case "scale":
            from memserve.cli.cluster.ray import scale

            app.command()(scale)
        case "chat":
            from memserve.cli.chat import chat

            app.command()(chat)
        case "top" | "explain" | "trees":
            from memserve.cli import watch

            app.command()(getattr(watch, name))
        case "doctor":
            from memserve.cli.doctor import doctor

            app.command()(doctor)
        case "profile":
            from memserve.cli.profile import profile

            app.command()(profile)


def _add_installed(app: typer.Typer, word: str | None = None) -> None:
    """Commands of other distributions: all, or ``word``. Looked for only where no own command is meant: reading what is
    installed takes longer than most commands need to start."""
    entries = [entry for entry in entry_points(group=_GROUP) if word in (None, entry.name)]
    if word is not None and not entries:
        raise UserError(f"'memserve {word}' is a command of memserve-lab", hint='pip install "memserve[lab]"')
    for entry in entries:
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        version()
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve large language models from one elastic pool of KV memory."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with 0, 1 (it failed) or 2 (wrong usage)."""
    _open_standard_files()
    die_with_parent()
    status = run(arguments)
    gc.freeze()  # else the interpreter takes torch's half a million objects apart before it ends: 0.7 s for nothing
    sys.exit(status)


def _open_standard_files() -> None:
    """Where the parent has closed 0, 1 or 2, they are the null device: else the next socket or journal would get the
    number, and what is printed."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(null := os.open(os.devnull, os.O_RDWR), fd)  # children get it, too
            if null != fd:
                os.close(null)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; an error becomes one line on stderr, and a second one with its hint."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = command_line(next(iter(words), None))(args=words, prog_name="memserve", standalone_mode=False)
    except UserError as error:
        return _print_error(error.message, error.hint, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # the reader of stdout left: nothing can be written, not even at exit
        return EXIT_FAILED
    except InvariantError as error:
        return _print_error(f"internal: {error}", "this is a bug in memserve, please report it", EXIT_FAILED)
    except Exception as error:
        if not isinstance(error, _ClickException):
            raise
        return _usage_error(error)
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # called without a command: show the help text
        typer.echo(str(error))
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "memserve"
    message = str(getattr(error, "format_message", error.__str__)())
    return _print_error(message[:1].lower() + message[1:].rstrip("."), f"try '{path} --help'", EXIT_USAGE)


def _print_error(message: str, hint: str | None, code: int) -> int:
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    return code
