"""S3 stores: the shipped suite, several stores over one bucket, and what a network does to requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_contract import StoreCheck, store_checks
from tests.contract.s3_server import S3Server, store_of


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


# STO-02, STO-03, STO-04, STO-05, STO-06, STO-07, STO-08, STO-09, STO-10, STO-34 to STO-39, STO-44, STO-D2, STO-D8, STO-D10
# DUR-06, DUR-46, DUR-48, DUR-D6, APR-D4, APR-D5, LES-23, LES-62
@pytest.mark.parametrize("check", store_checks(without={"turns"}), ids=str)
async def test_s3_store_keeps_the_rule(check: StoreCheck, server: S3Server) -> None:
    clock = FakeClock()
    async with store_of(server, clock=clock) as store:
        await check(store, clock)


class _TwoObjects:
    """Alternates between two stores of one bucket."""

    def __init__(self, server: S3Server, clock: FakeClock) -> None:
        self.stores = (store_of(server, clock=clock), store_of(server, clock=clock))
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.stores[self.calls % 2], name)


_ONE_CALLER = {"saves_of_one_id_land_in_order"}  # an order that only the calls of one object have


@pytest.mark.parametrize("check", [check for check in store_checks(without={"turns"}) if str(check) not in _ONE_CALLER], ids=str)
async def test_two_stores_of_one_bucket_keep_the_rule(check: StoreCheck, server: S3Server) -> None:
    clock = FakeClock()
    both = _TwoObjects(server, clock)
    try:
        await check(both, clock)
    finally:
        for store in both.stores:
            await store.aclose()
