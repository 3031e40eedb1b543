"""S3 stores against a server that others wrote: what the test server of this project gets wrong does not pass here."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from lousho_ray.stores.s3 import S3Store
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_contract import StoreCheck, store_checks
from tests.contract.s3_server import BUCKET, CREDENTIALS

PREFIXES = map(str, itertools.count())


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{BUCKET}", method="PUT")).close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.parametrize("check", store_checks(without={"turns"}), ids=str)
async def test_s3_store_keeps_the_rule(check: StoreCheck, endpoint: str) -> None:
    # STO-10, STO-46, STO-D4
    clock = FakeClock()
    async with S3Store(
        BUCKET, next(PREFIXES), endpoint=endpoint, region="us-east-1", credentials=CREDENTIALS, clock=clock
    ) as store:
        await check(store, clock)
