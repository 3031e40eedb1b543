"""What stands between a case and its models: the suite's limiter and budget, the case's cassettes, and a record of what was spent.

One `CaseCalls` belongs to one case. It is installed with `set_provider_interceptor`, which is context-local, so cases that run side
by side do not mix.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from lousho_ray.errors import AgentExecutionError, BudgetExceededError, CassetteError
from lousho_ray.evals.outages import outage_of
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Ledger
from lousho_ray.loop.result import ToolCallRecord
from lousho_ray.messages import ToolCall, assistant
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    Limiter,
    LLMProvider,
    ServedBy,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.failures import is_quota_exhausted
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.metering import meter
from lousho_ray.providers.wrapper import ProviderWrapper, close_stream, open_stream
from lousho_ray.usage import ProviderUsage, Spend, Usage


class Cassettes(Protocol):
    """The cassettes of one case."""

    @property
    def replays(self) -> bool:
        """Whether recorded answers are given."""
        ...

    def wrap(self, provider: LLMProvider) -> LLMProvider:
        """The provider that records or replays; called once for each provider, in the order of their first calls."""
        ...

    def close(self) -> None:
        """Ends the recordings: others may record to the same files."""
        ...


@dataclass(slots=True)
class SuiteBudget:
    """What a suite may cost. Calls under way when the limit is reached are finished, so it is passed by at most those."""

    ledger: Ledger
    run_id: str
    max_cost_usd: float

    async def open(self, spent: Spend) -> None:
        """Starts the account with what earlier runs of the suite have spent."""
        await self.ledger.open(self.run_id)
        await self.ledger.report(self.run_id, "earlier", spent)

    async def check(self) -> None:
        """Raises `BudgetExceededError` once the limit is reached. A call without a known price makes the total unknown."""
        total = (await self.ledger.totals(self.run_id))[self.run_id].cost
        if total is not None and total >= Decimal(str(self.max_cost_usd)):
            raise BudgetExceededError(
                f"The suite has spent ${total:.4f} of the ${self.max_cost_usd:g} it may cost.",
                budget={"limit": "maxCostUsd", "value": float(total), "max": self.max_cost_usd, "scope": "suite"},
            )

    async def book(self, spend: Spend) -> None:
        await self.ledger.report(self.run_id, new_id(), spend)


class CaseCalls:
    """The model calls of one case.

    Attributes:
        usage: What all of them used, also sub-agents and judges, also in runs that failed.
        tool_calls: Every call that a model asked for, in the order of the replies.
        outage: Why a call failed for a reason that says nothing about the agent (rate, network, credentials, quota, budget).
    """

    def __init__(
        self,
        *,
        limiter: Limiter | None = None,
        budget: SuiteBudget | None = None,
        cassettes: Cassettes | None = None,
        on_halt: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.usage = Usage()
        self.tool_calls: list[ToolCallRecord] = []
        self.outage: str | None = None
        self._limiter = limiter
        self._budget = budget
        self._on_halt = on_halt
        self.cassettes = cassettes

    def route(self, provider: LLMProvider) -> LLMProvider:
        """Whom a wrapped provider really calls."""
        if self.cassettes is not None:
            provider = self.cassettes.wrap(provider)
            if self.cassettes.replays:
                return provider
        return provider if self._limiter is None else with_rate_limit(provider, self._limiter)

    async def admit(self) -> None:
        """Lets a call through while the suite has money left.

        Raises:
            BudgetExceededError: It has not; the suite is told to halt.
        """
        if self._budget is None:
            return
        try:
            await self._budget.check()
        except BudgetExceededError as error:
            self.outage = error.detail
            self._on_halt(error.detail)
            raise
        except AgentExecutionError as error:
            self._lost_count(error)
            raise

    async def book(self, provider: LLMProvider, options: GenerateOptions, reply: Reply) -> None:
        """Adds a finished call to what the case, and with it the suite, has spent."""
        figures = meter(provider, options, assistant(reply.text, reply.tool_calls), reply.usage, reply.served_by)
        figures.add_to(self.usage)
        for call in reply.tool_calls:
            self.tool_calls.append(ToolCallRecord(call.id, call.name, _arguments(call.arguments)))
        if self._budget is not None:
            try:
                await self._budget.book(figures.spend)
            except AgentExecutionError as error:
                self._lost_count(error)
                raise

    def _lost_count(self, error: AgentExecutionError) -> None:
        """The ledger is gone: nobody can tell any more when the suite's budget is reached."""
        self.outage = f"the suite's account is lost ({error.detail})"
        self._on_halt(self.outage)

    def failed(self, error: Exception) -> None:
        """Notes why a call failed for good, when that was no fault of the agent."""
        if isinstance(error, CassetteError):
            return
        if is_quota_exhausted(error):
            self.outage = f"the provider's quota is used up ({outage_of(error) or error})"
            self._on_halt(self.outage)
        elif (reason := outage_of(error)) is not None:
            self.outage = reason


class CaseSeam:
    """The interceptor of one case. It knows the wrappers, and they the calls: nothing of a case that has ended is in a cycle."""

    def __init__(self, calls: CaseCalls) -> None:
        self._calls = calls
        self._wrappers: dict[int, CaseProvider] = {}

    def __call__(self, provider: LLMProvider) -> LLMProvider:
        """The wrapper of a provider: always the same; a wrapper of this case stays as it is."""
        wrapper = self._wrappers.get(id(provider))
        if wrapper is not None:
            return wrapper
        layer: Any = provider
        while layer is not None:
            if isinstance(layer, CaseProvider) and layer.calls is self._calls:
                return provider
            layer = layer.__dict__.get("inner") if hasattr(layer, "__dict__") else None
        wrapper = self._wrappers[id(provider)] = CaseProvider(provider, self._calls)
        return wrapper


@dataclass(slots=True)
class Reply:
    """What a call brought, for the books."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: ProviderUsage | None = None
    served_by: ServedBy | None = None


class CaseProvider(ProviderWrapper):
    """A provider as the runs of one case see it."""

    def __init__(self, inner: LLMProvider, calls: CaseCalls) -> None:
        super().__init__(inner)
        self.calls = calls
        self._route: LLMProvider | None = None

    @property
    def replays(self) -> bool:
        """Whether recorded answers come from here."""
        return self.calls.cassettes is not None and self.calls.cassettes.replays

    @property
    def _called(self) -> LLMProvider:
        if self._route is None:
            self._route = self.calls.route(self.inner)
        return self._route

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        await self.calls.admit()
        try:
            result = await self._called.generate(options)
        except Exception as error:
            self.calls.failed(error)
            raise
        await self.calls.book(self.inner, options, Reply(result.text, result.tool_calls, result.usage, result.served_by))
        return result

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        await self.calls.admit()
        text: list[str] = []
        tool_calls: list[ToolCall] = []
        chunks: AsyncIterator[Chunk] | None = None
        try:
            chunks = await open_stream(self._called, options)
            async for chunk in chunks:
                match chunk:
                    case TextChunk(text=piece):
                        text.append(piece)
                    case ToolCallChunk(tool_call=call):
                        tool_calls.append(call)
                    case FinishChunk():
                        reply = Reply("".join(text), tuple(tool_calls), chunk.usage, chunk.served_by)
                        await self.calls.book(self.inner, options, reply)
                yield chunk
        except Exception as error:
            self.calls.failed(error)
            raise
        finally:
            await close_stream(chunks)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text
