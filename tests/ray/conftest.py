"""One quiet local Ray for all tests of this folder."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator

import pytest

NAMESPACE = "lousho-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A local cluster of two CPUs; gives its namespace."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE)
    try:
        yield NAMESPACE
    finally:
        ray.shutdown()


@pytest.fixture
def fresh_name() -> str:
    """A name no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
