"""The page on the store's client: its Python runs as it stands, and the commands and options that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from memserve.cli.main import command_line
from memserve.store.client.client import StoreClient
from places import ROOT
from served_store import ServedStore

PAGE = ROOT / "docs" / "guides" / "STORE_CLIENT.md"


def test_the_examples_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 7
    with ServedStore(tmp_path) as store:
        names: dict[str, object] = {"address": store.address, "secret_file": store.secret_file}
        for number, block in enumerate(blocks):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
        assert isinstance(names["client"], StoreClient)


def test_the_commands_are_there(tmp_path: Path) -> None:
    import typer

    store = typer.main.get_command(command_line()).commands["store"]
    rows = re.findall(r"`memserve store (\w+) HOST:PORT([^`]*)`", PAGE.read_text())
    assert {name for name, _ in rows} == set(store.commands)
    for name, words in rows:
        options = {option for one in store.commands[name].params for option in one.opts}
        assert set(re.findall(r"--[\w-]+", words)) <= options
    started = re.search(r"^memserve store (--listen.*)$", PAGE.read_text(), re.MULTILINE)
    assert set(re.findall(r"--[\w-]+", started[1])) <= {option for one in store.params for option in one.opts}
