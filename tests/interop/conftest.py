"""The tests against a model server that others wrote run where its address is given: see `run.sh`."""

from __future__ import annotations

import os

import pytest

SERVER = "AIMOCK_URL"

collect_ignore_glob = [] if os.environ.get(SERVER) else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interop: against a model server that others wrote (tests/interop/run.sh)")


@pytest.fixture
def url() -> str:
    """Where the server is, without a slash at the end."""
    return os.environ[SERVER].rstrip("/")
