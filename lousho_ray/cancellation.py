"""Stopping things: `AbortSignal`, what a run and everything below it looks at, and `CancelToken`, how a caller stops a `send()`.

Aborting is a message, not a task cancellation: a run that is told to stop still settles its tool calls, books its usage and saves
its checkpoint. `guard()` is the bridge to asyncio: it runs one awaitable that the signal may cut short.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from lousho_ray.errors import AgentExecutionError

T = TypeVar("T")

ABANDON_AFTER_S = 1.0
"""How long an aborted model call may take to close its connection before the run goes on without it."""


@dataclass(frozen=True, slots=True)
class AbortReason:
    """Why a run was stopped. `name` is `AbortError`, `TimeoutError` or an exception's class name.

    A run that is stopped with an `error` does not end as aborted: it fails with that.
    """

    name: str
    message: str
    deadline: bool = False
    error: Exception | None = None

    @classmethod
    def of(cls, reason: object | None) -> AbortReason:
        if isinstance(reason, AbortReason):
            return reason
        if isinstance(reason, BaseException):
            return cls(type(reason).__name__, str(reason))
        return cls("AbortError", str(reason) if reason is not None else "The run was aborted.")

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "message": self.message}


class Detour(Exception):  # noqa: N818 - control flow inside a run, never shown to a user
    """Raised inside a run to change its course: nothing has failed."""


class Aborted(Exception):  # noqa: N818 - control flow inside a run, never shown to a user
    """Raised by `AbortSignal.guard` and `raise_if_aborted`."""

    def __init__(self, reason: AbortReason) -> None:
        super().__init__(reason.message)
        self.reason = reason


class AbortSignal:
    """A flag with a reason that fires once. May be set and read from any thread; callbacks run in the thread that sets it."""

    __slots__ = ("_callbacks", "_lock", "_reason")

    def __init__(self) -> None:
        self._reason: AbortReason | None = None
        self._callbacks: dict[int, Callable[[AbortReason], object]] = {}
        self._lock = threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> AbortReason | None:
        return self._reason

    def abort(self, reason: object | None = None) -> bool:
        """Fires the signal; the first reason wins. Returns whether this call was the one."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = AbortReason.of(reason)
            callbacks, self._callbacks = list(self._callbacks.values()), {}
        for callback in callbacks:
            callback(self._reason)
        return True

    def on_abort(self, callback: Callable[[AbortReason], object]) -> Callable[[], None]:
        """Calls `callback(reason)` once the signal fires (at once when it has). Returns a function that takes it back."""
        with self._lock:
            if self._reason is None:
                self._callbacks[id(callback)] = callback
                return lambda: self._forget(callback)
        callback(self._reason)
        return lambda: None

    def _forget(self, callback: Callable[[AbortReason], object]) -> None:
        with self._lock:
            self._callbacks.pop(id(callback), None)

    def follow(self, other: AbortSignal) -> Callable[[], None]:
        """Fires when `other` does. Returns a function that ends this."""
        return other.on_abort(self.abort)

    def raise_if_aborted(self) -> None:
        if self._reason is not None:
            raise Aborted(self._reason)

    async def wait(self) -> AbortReason:
        """Returns the reason once the signal has fired."""
        loop = asyncio.get_running_loop()
        fired = asyncio.Event()
        forget = self.on_abort(lambda _: loop.call_soon_threadsafe(fired.set))
        try:
            await fired.wait()
        finally:
            forget()
        assert self._reason is not None
        return self._reason

    async def guard(self, coroutine: Coroutine[Any, Any, T], *, abandon_after_s: float | None = ABANDON_AFTER_S) -> T:
        """Awaits `coroutine` in a task of its own, which is cancelled when the signal fires.

        Raises:
            Aborted: The signal fired. A task that does not end within `abandon_after_s` seconds of its cancellation is left
                behind and its late outcome dropped; with `None` it is waited for.
        """
        if self._reason is not None:
            coroutine.close()
            raise Aborted(self._reason)
        loop = asyncio.get_running_loop()
        wake: asyncio.Future[None] = loop.create_future()

        def stir(_: object = None) -> None:
            if not wake.done():
                wake.set_result(None)

        task = loop.create_task(_contained(coroutine, stir))
        forget = self.on_abort(lambda _: loop.call_soon_threadsafe(stir))
        task.add_done_callback(stir)  # for a task that is cancelled before it starts
        try:
            await wake
        except asyncio.CancelledError:
            await _cancel_and_settle(task, abandon_after_s)
            raise
        finally:
            forget()
        fired = self.reason
        if task.cancelled() and fired is None:
            raise AgentExecutionError("The call cancelled itself: something inside it raised CancelledError that nobody asked for.")
        if task.done() and not (fired is not None and task.cancelled()):
            outcome = task.result()
            return outcome.settle() if isinstance(outcome, _Escaped) else outcome
        await _cancel_and_settle(task, abandon_after_s)
        assert fired is not None
        raise Aborted(fired)


@dataclass(frozen=True, slots=True)
class _Escaped:
    """What a guarded coroutine raised and asyncio would raise out of the whole event loop, ending every run on it."""

    error: BaseException

    def settle(self) -> NoReturn:
        """`sys.exit()` in a callback fails its run; Ctrl-C stays what it is."""
        if isinstance(self.error, SystemExit):
            raise AgentExecutionError(f"A callback of the run raised SystemExit({self.error.code!r}).") from self.error
        raise self.error


async def _contained(coroutine: Coroutine[Any, Any, T], ended: Callable[[], None]) -> T | _Escaped:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        return _Escaped(error)
    finally:
        ended()  # wakes whoever waits one round of the event loop earlier than the task's own callback


async def _cancel_and_settle(task: asyncio.Task[Any], within_s: float | None) -> None:
    task.cancel()
    if not task.done():
        await asyncio.wait({task}, timeout=within_s)
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class CancelToken:
    """Stops a `send(cancel=token)` from outside: the call then returns a result with `finish_reason="aborted"`."""

    def __init__(self) -> None:
        self.signal = AbortSignal()
        self._after_ms: float | None = None

    @classmethod
    def after_ms(cls, delay_ms: float) -> CancelToken:
        """A token that fires `delay_ms` milliseconds after the run starts, with the reason `TimeoutError`."""
        token = cls()
        token._after_ms = float(delay_ms)
        return token

    def cancel(self, reason: object | None = None) -> None:
        self.signal.abort(reason)

    @property
    def cancelled(self) -> bool:
        return self.signal.aborted

    def watch(self, abort: Callable[[AbortReason], object]) -> Callable[[], None]:
        """Stops a run by `abort(reason)` when the token fires; starts the timer of `after_ms`. The returned function ends this."""
        disarm, forget = self.arm(), self.signal.on_abort(abort)

        def let_go() -> None:
            disarm()
            forget()

        return let_go

    def arm(self) -> Callable[[], None]:
        """Starts the timer of `after_ms` on the running loop; returns a function that stops it."""
        if self._after_ms is None:
            return lambda: None
        message = f"The run took longer than {self._after_ms:g} ms."
        timer = asyncio.get_running_loop().call_later(
            self._after_ms / 1000, self.signal.abort, AbortReason("TimeoutError", message)
        )
        return timer.cancel
