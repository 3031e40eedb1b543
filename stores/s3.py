"""`S3Store`: all three parts in a bucket of Amazon S3 or of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.stores.entries import DEFAULT_HISTORY_LIMIT, PruneCounts, cutoff_ms, milliseconds
from lousho_ray.stores.location import REQUEST_TIMEOUT_MS, StoreLocation, s3_location
from lousho_ray.stores.parts import ClosingStore
from lousho_ray.stores.s3_approvals import S3Approvals
from lousho_ray.stores.s3_bucket import Bucket
from lousho_ray.stores.s3_checkpoints import S3Checkpoints
from lousho_ray.stores.s3_lanes import Lanes
from lousho_ray.stores.s3_sessions import S3Sessions

CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")


class S3Store(ClosingStore):
    """Sessions, checkpoints and approvals in a bucket, for any number of machines.

    Each record is one object, and a save writes it whole. Claims and leases are conditional writes, so of several processes exactly
    one wins, whoever they are. The bucket is checked at the first use. One object works from several event loops and threads, but
    not across a fork. Pickling it sends its location, with credentials only when they were passed here.

    Args:
        bucket: The bucket; it must exist.
        prefix: What the names of all objects start with, so that several stores share a bucket.
        endpoint: The server's URL, such as `http://127.0.0.1:9000`; `None`: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, else Amazon.
        region: `None`: `AWS_REGION`, `AWS_DEFAULT_REGION`.
        credentials: `access_key_id`, `secret_access_key` and, for temporary ones, `session_token`; `None`: those of the
            environment, or the role of the machine.
        single_writer: `True` only when this one object alone writes below the prefix; the bucket then need not know conditional
            writes.
        timeout_ms: How long one request may take, in milliseconds. A failed one is tried again for as long.
        history_limit: How many saves of each checkpoint to keep; 0 keeps none. Each is a whole copy.
        clock: Where the time of leases and records comes from. The clocks of machines that share a store should agree to within a
            few seconds.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with the argument as `field`.
        MissingDependencyError: `LOUSHO_PEER_MISSING`: `pip install "lousho-ray[s3]"`.
        StorageError: `LOUSHO_STORAGE_FAILED`, from any method: no such bucket, no permission, no answer, no conditional writes,
            closed, used after a fork.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Mapping[str, str] | None = None,
        single_writer: bool = False,
        timeout_ms: float = REQUEST_TIMEOUT_MS,
        history_limit: int = DEFAULT_HISTORY_LIMIT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._open(
            s3_location(
                bucket,
                prefix,
                endpoint=endpoint,
                region=region,
                single_writer=single_writer,
                timeout_ms=timeout_ms,
                credentials=_credentials(credentials),
                history_limit=history_limit,
            ),
            clock,
        )

    @classmethod
    def at(cls, location: StoreLocation) -> S3Store:
        """The store of a location."""
        store = cls.__new__(cls)
        store._open(location, SYSTEM_CLOCK)
        return store

    def _open(self, location: StoreLocation, clock: Clock) -> None:
        self.location = location
        self.history_limit = location.history_limit
        self._clock = clock
        bucket = Bucket(location, milliseconds(clock))
        self._lanes = Lanes(location.url, bucket.check)
        self.sessions = S3Sessions(bucket, self._lanes, clock)
        self.checkpoints = S3Checkpoints(bucket, self._lanes, location.history_limit, clock)
        self.approvals = S3Approvals(bucket, self._lanes, clock)

    def prune(self, older_than_ms: float) -> PruneCounts:
        cutoff = self._cutoff(older_than_ms)
        return self._lanes.run_blocking(("prune",), lambda: self._prune(cutoff))

    async def aprune(self, older_than_ms: float) -> PruneCounts:
        """`prune` without blocking the event loop."""
        cutoff = self._cutoff(older_than_ms)
        return await self._lanes.run(("prune",), lambda: self._prune(cutoff))

    def close(self) -> None:
        self._lanes.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop. Cancelling the wait does not stop the closing."""
        await asyncio.shield(asyncio.to_thread(self.close))

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Store.at, (self.location,)

    def __repr__(self) -> str:
        return f"S3Store({self.location.url!r})"

    def _cutoff(self, older_than_ms: float) -> int:
        return cutoff_ms(older_than_ms, milliseconds(self._clock)())

    async def _prune(self, cutoff: int) -> PruneCounts:
        """What an unresolved approval needs is gathered first; a record that changes meanwhile is kept."""
        unresolved, needed = await self.approvals.needed_sessions()
        needed |= await self.checkpoints.needed_sessions(unresolved)
        return PruneCounts(
            sessions=await self.sessions.discard_older(cutoff, needed),
            checkpoints=await self.checkpoints.discard_older(cutoff, needed),
            approvals=await self.approvals.discard_older(cutoff),
        )


def _credentials(given: Mapping[str, str] | None) -> str:
    """Checked credentials as JSON; empty when none are given. Errors name keys, never values."""
    if given is None:
        return ""
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"credentials must be a dict with {', '.join(CREDENTIALS)}.", field="credentials")
    for name in given:
        if name not in CREDENTIALS:
            raise ConfigurationError(
                f"credentials has an unknown key {name!r}; allowed are {', '.join(CREDENTIALS)}.{suggest(str(name), CREDENTIALS)}",
                field="credentials",
            )
    for name in CREDENTIALS:
        value = given.get(name, "" if name != "session_token" else None)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigurationError(f"credentials[{name!r}] must be a non-empty string.", field="credentials")
    return json.dumps({name: value for name, value in given.items() if value is not None}, sort_keys=True)
