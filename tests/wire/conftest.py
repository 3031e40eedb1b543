"""Fixtures of the wire tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lousho_ray.testing.fake_server import FakeServer


@pytest.fixture
async def fake_server() -> AsyncIterator[FakeServer]:
    """A strict fake server on the test's loop. A test that breaks a rule on purpose ends with `fake_server.take_violations()`."""
    async with FakeServer() as server:
        yield server
    assert server.violations == []
