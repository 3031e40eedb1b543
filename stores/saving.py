"""Saves that may not hang: a store that is far away can be slow or out of reach for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lousho_ray.errors import LoushoError, StorageError

SAVE_TIMEOUT_MS = 30_000.0
PAUSES_S = (0.05, 0.2)
"""Waits before the second and the third attempt."""


async def save_in_time(save: Callable[[], Awaitable[Any]], timeout_ms: float, what: str) -> None:
    """Tries a save up to three times, each with a deadline. Saves overwrite, so one that was done after all may be repeated.

    A refusal of the store (a `LoushoError`) is its answer and not tried again.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: none of the attempts was done in time.
        Exception: What the store raised, at the last attempt.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await save()
            return
        except LoushoError:
            raise
        except TimeoutError as error:
            if pause_s is None:
                text = f"{what} was not saved: {len(PAUSES_S) + 1} attempts took more than store_timeout_ms ({timeout_ms:g}) each."
                raise StorageError(text) from error
        except Exception:
            if pause_s is None:
                raise
        await asyncio.sleep(pause_s or 0)
