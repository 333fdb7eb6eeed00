"""Options of the test run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--data-sets DIR``: the folder of data sets that some tests hold the readers against; without it they skip."""
    parser.addoption("--data-sets", type=Path, default=None, help="folder of data sets (traces/, conversations/, ...)")


@pytest.fixture(scope="session")
def data_sets(pytestconfig: pytest.Config) -> Path:
    """The folder of data sets, or a skip."""
    folder: Path | None = pytestconfig.getoption("--data-sets")
    if folder is None:
        pytest.skip("no --data-sets folder was named")
    return folder
