"""Scenarios: what the server does with one request, as a list of steps.

A step is made by `status`, `send`, `split`, `pause`, `gate` and `repeat`, or is one of `eof`, `cut`, `drop` and `hold`. Bytes and
text stand for `send(...)`. After the last step the body is ended in the regular way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lousho_ray.testing.fake_server.http import Exchange
from lousho_ray.testing.fake_server.replies import Reply


@dataclass(frozen=True, slots=True)
class Status:
    code: int
    headers: tuple[tuple[str, str], ...]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Send:
    data: bytes


@dataclass(frozen=True, slots=True)
class Split:
    piece_bytes: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Gate:
    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    steps: tuple[Step, ...]
    times: int | None


@dataclass(frozen=True, slots=True)
class End:
    """How a connection ends: `eof`, `cut`, `drop` or `hold`."""

    kind: str


Step: TypeAlias = Status | Send | Split | Pause | Gate | Repeat | End | Reply
StepLike: TypeAlias = Step | bytes | str

eof = End("eof")
"""Ends the body in the regular way, then closes the connection."""
cut = End("cut")
"""Closes the connection in the middle of the body (FIN): the client sees an incomplete body."""
drop = End("drop")
"""Resets the connection (RST); before any `status` the client gets no answer at all."""
hold = End("hold")
"""Keeps the connection open and silent until the client closes it."""


def status(
    code: int,
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    body: bytes | str | Mapping[str, Any] | Sequence[Any] | None = None,
) -> Status:
    """The status line and headers; with a `body` the whole answer.

    Args:
        code: The HTTP status.
        headers: As a mapping, or as pairs when a name is to be sent twice. A `content-length` or `connection: close` of yours
            replaces the chunked framing of the bytes that are sent after it.
        body: Bytes or text as they are; anything else is sent as JSON.
    """
    pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    names = {name.lower() for name, _ in pairs}
    if isinstance(body, str):
        body = body.encode()
    elif body is not None and not isinstance(body, bytes):
        body = json_bytes(body)
        if "content-type" not in names:
            pairs = (("content-type", "application/json"), *pairs)
    if body is not None and "content-length" not in names:
        pairs = (*pairs, ("content-length", str(len(body))))
    return Status(code, pairs, body)


def json_bytes(value: Any) -> bytes:
    """A value as JSON in UTF-8; only a value with lone surrogates is written with escapes."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def send(data: bytes | str) -> Send:
    """Body bytes; text is encoded as UTF-8. Without a `status` before it, 200 and the route's stream type come first."""
    return Send(data.encode() if isinstance(data, str) else data)


def split(piece_bytes: int | None) -> Split:
    """From here on, that many body bytes per TCP write; `None` ends it."""
    return Split(piece_bytes)


def pause(seconds: float) -> Pause:
    """Waits for real time; use `gate` wherever a test can say when to go on."""
    return Pause(seconds)


def gate(name: str) -> Gate:
    """Waits until the test calls `server.release(name)`; a released gate stays open."""
    return Gate(name)


def repeat(*steps: StepLike, times: int | None = None) -> Repeat:
    """The steps `times` times, or until the client closes."""
    return Repeat(as_steps(steps), times)


def as_steps(steps: Sequence[StepLike]) -> tuple[Step, ...]:
    """Steps with bytes and text made into `send`. Raises `TypeError` naming what is no step."""
    return tuple(_as_step(step) for step in steps)


def _as_step(step: StepLike) -> Step:
    if isinstance(step, bytes | str):
        return send(step)
    if not isinstance(step, Step):
        raise TypeError(f"a scenario step is a Reply, bytes, text or made by status(), send(), gate(), ...; got {step!r}")
    return step


class Player:
    """Plays the steps of a scenario into an exchange."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        stream_type: str,
        pass_gate: Callable[[str], Awaitable[None]],
        render: Callable[[Reply], Sequence[Step]],
    ) -> None:
        self._exchange = exchange
        self._stream_type = stream_type
        self._pass_gate = pass_gate
        self._render = render

    async def play(self, steps: Sequence[Step]) -> None:
        """Plays all steps, then ends the body unless a step ended the connection."""
        steps = [inner for step in steps for inner in (self._render(step) if isinstance(step, Reply) else (step,))]
        for position, step in enumerate(steps, 1):
            if isinstance(step, Send) and position == len(steps):
                await self._start()
                await self._exchange.send(step.data, last=True)
            else:
                await self._step(step)
        if not self._exchange.closed:
            await self._start()
            await self._exchange.finish()

    async def _step(self, step: Step) -> None:
        match step:
            case Status(code, headers, body):
                typed = body is not None or "content-type" in {name.lower() for name, _ in headers}
                await self._exchange.start(code, headers if typed else (("content-type", self._stream_type), *headers))
                if body is not None:
                    await self._exchange.send(body, last=True)
            case Send(data):
                await self._start()
                await self._exchange.send(data)
            case Split(piece_bytes):
                self._exchange.piece_bytes = piece_bytes
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case Gate(name):
                await self._pass_gate(name)
            case Repeat(steps, times):
                await self._repeat(steps, times)
            case End(kind):
                await self._end(kind)
            case Reply():
                for inner in self._render(step):
                    await self._step(inner)

    async def _start(self) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, [("content-type", self._stream_type)])

    async def _repeat(self, steps: Sequence[Step], times: int | None) -> None:
        done = 0
        while times is None or done < times:
            for step in steps:
                await self._step(step)
            done += 1
            await asyncio.sleep(0)

    async def _end(self, kind: str) -> None:
        if kind == "eof":
            await self._start()
            await self._exchange.finish()
            self._exchange.close()
        elif kind == "cut":
            self._exchange.close()
        elif kind == "drop":
            self._exchange.reset()
        else:
            await asyncio.Event().wait()
