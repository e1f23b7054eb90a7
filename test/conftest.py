"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# What a group is tested for must not depend on how busy the machine is: oneDNN's kernels are used
# however slow they are. For child processes too. test_operator.py tests the check itself.
os.environ["LLGA_FUSER_SPEED_CHECK"] = "off"


def pytest_configure(config: pytest.Config) -> None:
    """With `-n`: a worker's threads that wait for each other leave their cores to the others.

    Those that wait busily take twice as long for all of it as one process does.
    """
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collectstart() -> None:
    """Numbers that a module draws while it is imported are the same in every run, too."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def choices_of_autotuning(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not into the user's cache directory; for child processes too."""
    os.environ["LLGA_FUSER_CACHE_DIR"] = str(tmp_path_factory.mktemp("choices"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fuser() -> Iterator[None]:
    """The fuser on for one test; afterwards the executor is what it was."""
    import llga_fuser  # not at the top: the tests of dnnl_graph run without torch's fuser

    previous = llga_fuser.enable(True)
    yield
    llga_fuser.enable(previous)
    llga_fuser.clear_cache()


@pytest.fixture
def all_threads() -> None:
    """Asked for by tests that run with as many threads as torch takes by itself."""


@pytest.fixture
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for the others: on a busy machine two threads wait for each other, op by op."""
    from util import restored

    with restored(torch.get_num_threads, torch.set_num_threads):
        if "all_threads" not in request.fixturenames:
            torch.set_num_threads(1)
        yield
