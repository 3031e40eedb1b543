"""The limiter a program holds: `RateLimiter`, a queue that model calls pass before they are made.

It talks to a `Link`, which decides: in this process, or in an actor that many processes share. A limiter changes from the first to
the second in place (`promote`), keeping its queue, windows and calls in flight: copying it would double the limit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import ConfigurationError
from lousho_ray.ids import new_id
from lousho_ray.limits.link import Connect, Link, LocalLink, Reference, Ticket
from lousho_ray.limits.rate import LimiterStats
from lousho_ray.options import RateLimits, parse_options
from lousho_ray.ports import Permit

logger = logging.getLogger(__name__)


class RateLimiter:
    """Queues model calls, first in first out, over everything that shares it. Made by `create_rate_limiter`.

    Usable from several event loops and threads at once. Pickles only after `promote`, as a reference to the shared limiter.

    Attributes:
        key: Names this limiter and no other, in every process that shares it. Who enters several limiters does so in the order
            of their keys, so that two calls never wait for each other.
        enabled: `False` lets every call pass (a replay of recorded answers needs no limit).
    """

    def __init__(self, limits: RateLimits, link: Link, *, name: str | None = None) -> None:
        self._limits = limits
        self._name = name
        self.key = name or (new_id("limiter-") if link.reference is None else link.reference.name)
        self._promotion = threading.Lock()
        self._warned_at: float | None = None
        self.link = link
        self.enabled = True

    @property
    def limits(self) -> RateLimits:
        return self._limits

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def shared(self) -> bool:
        """Whether other processes can reach this limiter, so that it may be pickled."""
        return self.link.reference is not None

    async def acquire(self, tokens: int) -> Permit:
        """Waits until a call of `tokens` estimated tokens may start.

        Cancelling the wait leaves the queue at once and books nothing.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, a shared limiter could not be reached.
        """
        if not self.enabled:
            return FREE_PERMIT
        ticket = Ticket(self, tokens, asyncio.get_running_loop())
        if not self.link.enter(ticket):
            try:
                await ticket.future
            except BaseException:
                self.link.withdraw(ticket)
                raise
        return ticket

    async def stats(self) -> LimiterStats:
        return await self.link.stats()

    def promote(self, link_factory: Callable[[RateLimits], Link]) -> None:
        """Turns a limiter of this process into a shared one, in place: queue, windows and calls in flight go over.

        Blocks for the round trip. Does nothing to a limiter that is shared already.

        Args:
            link_factory: Makes the link to the new home from the limits; the limiter's `key` is a name for it that no other has.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the new home could not be reached; nothing has changed.
        """
        with self._promotion:
            if self.link.reference is not None or not isinstance(self.link, LocalLink):
                return
            successor = link_factory(self._limits)
            self.link.hand_over(successor)
            self.link = successor
            if successor.reference is not None:
                self.key = successor.reference.name
                _SHARED[successor.reference] = self

    def note_rejection(self, now: float, provider: str) -> None:
        """A provider answered 429 although this limiter let the call pass: says so once a minute."""
        if self._warned_at is None or now - self._warned_at >= 60:
            self._warned_at = now
            logger.warning(
                "%s rejected a call for its rate although rate_limit %s let it pass: these limits are above the provider's.",
                provider,
                show_limits(self._limits),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        reference = self.link.reference
        if reference is None:
            raise ConfigurationError(
                f"{self!r} lives in this process and cannot be pickled: a copy would double the limit. Give it a name "
                f"(create_rate_limiter(limits, name='openai')) to share it between processes.",
                field="rate_limit",
            )
        return (restore, (reference, self.enabled))

    def __repr__(self) -> str:
        named = "" if self._name is None else f", name={self._name!r}"
        return f"RateLimiter({show_limits(self._limits)}{named})"


class FreePermit:
    """The permit of a limiter that is switched off."""

    def settle(self, tokens: int) -> None: ...

    def release(self) -> None: ...


FREE_PERMIT = FreePermit()

_SHARED: weakref.WeakValueDictionary[Reference, RateLimiter] = weakref.WeakValueDictionary()
_NAMED: weakref.WeakValueDictionary[str, RateLimiter] = weakref.WeakValueDictionary()
_REGISTRIES = threading.Lock()


def create_rate_limiter(
    limits: RateLimits | Mapping[str, Any],
    name: str | None = None,
    *,
    connect: Connect | None = None,
    clock: Clock = SYSTEM_CLOCK,
    field: str = "rate_limit",
) -> RateLimiter:
    """A limiter that several providers and agents may share. Two made from equal limits share nothing, unless they have one name.

    Args:
        limits: `requests_per_minute`, `tokens_per_minute` (numbers above 0), `max_concurrent` (a whole number of at least 1); each
            optional.
        name: One limiter for everybody who asks for this name: in this process, or with `connect` wherever that reaches.
        connect: Makes the link of a named limiter.
        clock: Its time, when it lives in this process.
        field: What an error calls `limits`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: a wrong limit, or `name` has other limits already.
    """
    parsed = parse_options(RateLimits, limits, field=field)
    if name is None:
        return RateLimiter(parsed, LocalLink(parsed, clock))
    if connect is not None:
        link = connect(parsed, name)
        return RateLimiter(parsed, link, name=name) if link.reference is None else restore(link.reference, link=link)
    with _REGISTRIES:
        limiter = _NAMED.get(name)
        if limiter is None:
            limiter = _NAMED[name] = RateLimiter(parsed, LocalLink(parsed, clock), name=name)
        elif limiter.limits != parsed:
            raise conflicting_limits(name, limiter.limits, parsed)
        return limiter


def restore(reference: Reference, enabled: bool = True, link: Link | None = None) -> RateLimiter:
    """The limiter of this process behind a reference: the same object each time while it is in use."""
    with _REGISTRIES:
        limiter = _SHARED.get(reference)
        if limiter is None:
            limiter = RateLimiter(reference.limits, link or reference.connect(), name=reference.name)
            limiter.enabled = enabled
            _SHARED[reference] = limiter
        elif limiter.limits != reference.limits:
            raise conflicting_limits(reference.name, limiter.limits, reference.limits)
        return limiter


def conflicting_limits(name: str, known: RateLimits, asked: RateLimits) -> ConfigurationError:
    return ConfigurationError(
        f"The rate limiter {name!r} exists with {show_limits(known)} and was asked for with {show_limits(asked)}. "
        f"Use the same limits everywhere, or another name.",
        field="rate_limit",
    )


def show_limits(limits: RateLimits) -> str:
    return str({key: value for key, value in limits.model_dump().items() if value is not None})
