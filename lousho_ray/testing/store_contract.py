"""The conformance suite that every store passes, for stores of your own too. It needs no test framework.

With pytest and pytest-asyncio:

    import pytest
    from lousho_ray.testing.clock import FakeClock
    from lousho_ray.testing.store_contract import store_checks

    @pytest.mark.parametrize("check", store_checks(without={"claim"}), ids=str)
    async def test_my_store(check, tmp_path):
        clock = FakeClock()
        await check(MyStore(tmp_path, clock=clock), clock)

A check gets an empty store and the clock that the store takes its time from, and raises `AssertionError` when a rule is broken.
`without` leaves out the checks of optional methods a store does not offer.
"""

from __future__ import annotations

from collections.abc import Collection

from lousho_ray.testing import store_rules_runs, store_rules_sessions  # noqa: F401 - importing them fills CHECKS
from lousho_ray.testing.store_rules import CHECKS, Feature, StoreCheck

__all__ = ["Feature", "StoreCheck", "store_checks"]


def store_checks(*, without: Collection[Feature] = ()) -> list[StoreCheck]:
    """All checks but those that need one of `without`."""
    return [check for check in CHECKS if not check.needs.intersection(without)]
