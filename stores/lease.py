"""Leases on session ids: who may write a transcript.

A lease has a fencing number that rises with every new holder of the store. A save names the number it was made under; a save
under a number that is no longer the current one is refused, so a process that was taken for dead cannot overwrite newer state.
The functions here decide; stores keep the lease and call them inside their transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lousho_ray.errors import ConfigurationError, StorageError


@dataclass(frozen=True, slots=True)
class Lease:
    """`holder` may write until `expires_at_ms` (epoch milliseconds by the store's clock)."""

    holder: str
    fence: int
    expires_at_ms: int


def check_ttl(ttl_ms: float) -> None:
    if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int | float) or not ttl_ms > 0:
        raise ConfigurationError(f"ttl_ms must be a positive number of milliseconds; got {ttl_ms!r}.", field="ttl_ms")


def claimed(lease: Lease | None, holder: str, ttl_ms: float, now_ms: int, next_fence: Callable[[], int]) -> Lease | None:
    """The lease after a claim by `holder`, or `None` while another holder's is live. A holder's live lease keeps its number."""
    if lease is not None and now_ms < lease.expires_at_ms:
        return replace(lease, expires_at_ms=now_ms + round(ttl_ms)) if lease.holder == holder else None
    return Lease(holder, next_fence(), now_ms + round(ttl_ms))


def renewed(lease: Lease | None, holder: str, fence: int, ttl_ms: float, now_ms: int) -> Lease | None:
    """The lease prolonged, or `None` when it was lost. One that ran out but that nobody took since can still be renewed."""
    if lease is None or not holds(lease, holder, fence):
        return None
    return replace(lease, expires_at_ms=now_ms + round(ttl_ms))


def holds(lease: Lease | None, holder: str, fence: int | None) -> bool:
    """Whether `holder` has the lease, under that number or (`None`) any."""
    return lease is not None and lease.holder == holder and fence in (None, lease.fence)


def after_save(lease: Lease | None, fence: int | None, now_ms: int, id: str, path: str | None = None) -> Lease | None:
    """The lease that stands after a save under `fence`.

    A save without a number ends a lease that has run out: its holder can then no longer overwrite what was saved meanwhile.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the number is outdated, or the save has none while a holder's lease is live.
    """
    if fence is None:
        if lease is not None and now_ms < lease.expires_at_ms:
            raise StorageError(
                f"Session '{id}' was not saved: '{lease.holder}' is running a turn on it (lease {lease.fence}). "
                "Wait for that turn, or claim the session and save with its fence.",
                path=path,
            )
        return None
    if lease is None or lease.fence != fence:
        now = "nobody holds it" if lease is None else f"'{lease.holder}' holds lease {lease.fence}"
        raise StorageError(
            f"Session '{id}' was not saved: lease {fence} is outdated ({now}). Another turn may have saved the session since; "
            "load it again and claim it before the next save.",
            path=path,
        )
    return lease


def after_delete(lease: Lease | None, fence: int | None) -> Lease | None:
    """The lease that stands after a delete. Deleting under another's lease ends it, so that its turn cannot bring the data back."""
    return lease if lease is not None and lease.fence == fence else None
