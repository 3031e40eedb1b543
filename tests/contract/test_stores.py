"""Every store of the package passes the suite that is shipped for stores of users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_contract import StoreCheck, store_checks

Make = Callable[[Path, FakeClock], Any]

BACKENDS: dict[str, tuple[Make, set[Any]]] = {
    "memory": (lambda path, clock: memory_store(clock=clock), {"turns"}),
    "files": (lambda path, clock: file_store(path / "data", fsync=False, clock=clock), {"claim", "turns"}),
    "sqlite": (lambda path, clock: SqliteStore(path / "agent.db", clock=clock), set()),
    "sqlite-in-memory": (lambda path, clock: SqliteStore(":memory:", clock=clock), set()),
}


# STO-02, STO-03, STO-04, STO-05, STO-06, STO-07, STO-08, STO-09, STO-10, STO-12, STO-20, STO-34, STO-35, STO-36, STO-37, STO-38
# STO-39, STO-44, STO-D2, STO-D8, STO-D10, DUR-06, DUR-46, DUR-48, DUR-D6, APR-D4, APR-D5, APR-D6, LES-23, LES-62, SES-D11
@pytest.mark.parametrize(
    ("backend", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check}")
        for name, (_, without) in BACKENDS.items()
        for check in store_checks(without=without)
    ],
)
async def test_store_keeps_the_rule(backend: str, check: StoreCheck, tmp_path: Path) -> None:
    clock = FakeClock()
    async with BACKENDS[backend][0](tmp_path, clock) as store:
        await check(store, clock)


# SqliteStore remembers what it saved; the rules hold as well when another object reads and writes the same file.
class _TwoObjects:
    """Alternates between two stores of one file."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self.stores = (SqliteStore(path, clock=clock), SqliteStore(path, clock=clock))
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.stores[self.calls % 2], name)


_ONE_CALLER = {"saves_of_one_id_land_in_order"}  # an order that only the calls of one object have


@pytest.mark.parametrize("check", [check for check in store_checks() if str(check) not in _ONE_CALLER], ids=str)
async def test_two_stores_of_one_file_keep_the_rule(check: StoreCheck, tmp_path: Path) -> None:
    clock = FakeClock()
    both = _TwoObjects(tmp_path / "agent.db", clock)
    try:
        await check(both, clock)
    finally:
        for store in both.stores:
            await store.aclose()


async def test_checks_of_missing_methods_can_be_left_out() -> None:  # STO-10
    names = {str(check) for check in store_checks(without={"claim", "prune"})}
    assert "unknown_session_is_none_and_empty_is_empty" in names
    assert not names & {"only_one_holder_has_a_session", "pruning_deletes_what_is_old"}
