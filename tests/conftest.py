"""Options of the test run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("memserve", deadline=None)  # speed is measured in bench/, never in tests: machines are busy
settings.load_profile("memserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--data-sets DIR``: the folder of data sets that some tests hold the readers against; without it they skip.

    ``--matrix-cells N --matrix-seed S``: how much of the failure matrix on real processes is run, and which part.
    """
    parser.addoption("--data-sets", type=Path, default=None, help="folder of data sets (traces/, conversations/, ...)")
    parser.addoption("--matrix-cells", type=int, default=2, help="cells of the failure matrix to run")
    parser.addoption("--matrix-seed", type=int, default=2, help="which ones")


@pytest.fixture(scope="session")
def data_sets(pytestconfig: pytest.Config) -> Path:
    """The folder of data sets, or a skip."""
    folder: Path | None = pytestconfig.getoption("--data-sets")
    if folder is None:
        pytest.skip("no --data-sets folder was named")
    return folder
