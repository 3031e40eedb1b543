"""Sessions whose calls, deaths and decisions come at random keep the rules, on every kind of store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from tests.contract.random_sessions import live
from tests.contract.s3_server import S3Server, store_of

SEEDS = range(*map(int, os.environ.get("SESSION_SEEDS", "0:10").split(":")))
"""`SESSION_SEEDS=100:900` looks at other lives than the ones that every run of the tests sees."""

STORES: dict[str, Callable[[Path, FakeClock], Any]] = {
    "memory": lambda path, clock: memory_store(clock=clock),
    "files": lambda path, clock: file_store(path / "data", fsync=False, clock=clock),
    "sqlite": lambda path, clock: SqliteStore(path / "agent.db", clock=clock),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", STORES)
async def test_a_session_keeps_the_rules_whatever_happens(kind: str, seed: int, tmp_path: Path) -> None:
    # SES-15..19, SES-31..33, SES-44..55, DUR-30..33, LES-62: valid transcripts, no input lost or twice, nothing recorded done twice
    clock = FakeClock()
    async with STORES[kind](tmp_path, clock) as store:
        await live(store, clock, seed)


@pytest.mark.parametrize("seed", SEEDS[:4])
async def test_a_session_in_a_bucket_keeps_the_rules_whatever_happens(seed: int) -> None:
    # the same, on S3
    clock = FakeClock()
    with S3Server() as server:
        async with store_of(server, clock=clock) as store:
            await live(store, clock, seed, steps=25)
