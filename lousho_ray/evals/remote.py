"""Evals against a deployment: each case is one remote session, whose event stream gives the result."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeAlias

from lousho_ray.errors import AgentExecutionError, ConfigurationError, LoushoError, mask_secrets
from lousho_ray.ids import new_session_id
from lousho_ray.loop.result import ExecutionResult, ToolCallRecord
from lousho_ray.messages import Message
from lousho_ray.providers.sse import SSEDecoder
from lousho_ray.usage import Usage

Auth: TypeAlias = str | Callable[[], str | Awaitable[str]]

CONNECT_TIMEOUT_S = 10.0
SILENT_TIMEOUT_S = 60.0
"""A server sends a comment when it has nothing to say for 15 s; one that says nothing for this long is gone."""

SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A deployed agent. Made by `remote_target()`."""

    url: str
    auth: Auth | None = field(default=None, repr=False)
    client: Any = field(default=None, repr=False)

    def open(self) -> RemoteConversation:
        """A conversation of its own: a new session of the deployment."""
        return RemoteConversation(self)


def remote_target(*, url: str, auth: Auth | None = None, client: Any = None) -> RemoteTarget:
    """A deployment to run evals against, as `define_eval(target=...)`.

    Args:
        url: Its base address; `/chat` is below it.
        auth: A token, or a function (sync or async) that gives one; sent as `Authorization: Bearer`. Never printed or written.
        client: An `httpx2.AsyncClient` to use: one with an ASGI transport needs no socket.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: no http address.
    """
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigurationError("url must be an http or https address, for example 'http://127.0.0.1:3000'.", field="url")
    return RemoteTarget(url.rstrip("/"), auth, client)


class RemoteConversation:
    """One session of a deployment."""

    def __init__(self, target: RemoteTarget) -> None:
        self.missing: frozenset[str] = frozenset()
        self._target = target
        self._session_id = new_session_id()
        self._messages: list[Message] = []

    async def send(self, input: Any, **options: Any) -> ExecutionResult[Any]:
        """One turn.

        Raises:
            LoushoError: `LOUSHO_REMOTE_REQUEST_FAILED`: it cannot be reached, answered with an error, or broke off its stream;
                `LOUSHO_REMOTE_UNAUTHORIZED`: it answered 401.
            AgentExecutionError: The agent failed there.
            ConfigurationError: Options of a call: the deployment does not take them.
        """
        if options:
            raise ConfigurationError(
                f"A deployment takes no options of a call; t.send() got {', '.join(options)}.", field=next(iter(options))
            )
        turn = _Turn()
        await self._stream(input, turn)
        self.missing = turn.missing
        self._messages += [Message("user", input if isinstance(input, str) else json.dumps(input)), Message("assistant", turn.text)]
        return turn.result(list(self._messages))

    async def _stream(self, input: Any, turn: _Turn) -> None:
        import httpx2

        client = self._target.client
        own = None
        if client is None:
            client = own = httpx2.AsyncClient(timeout=httpx2.Timeout(SILENT_TIMEOUT_S, connect=CONNECT_TIMEOUT_S))
        try:
            body = {"sessionId": self._session_id, "input": input}
            async with client.stream("POST", f"{self._target.url}/chat", json=body, headers=await self._headers()) as response:
                if response.status_code != 200:
                    raise _refused(self._target.url, response.status_code, (await response.aread()).decode("utf-8", "replace"))
                decoder = SSEDecoder()
                async for data in response.aiter_bytes():
                    for event in decoder.feed(data):
                        if event.event != "done":
                            turn.take(json.loads(event.data))
        except httpx2.HTTPError as error:
            raise _failed(f"{self._target.url} cannot be reached: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise _failed(f"{self._target.url} sent an event that is not JSON: {error}") from error
        finally:
            if own is not None:
                await own.aclose()
        if turn.finish_reason is None:
            raise _failed(f"The stream of {self._target.url} broke off before its run had ended.")

    async def _headers(self) -> dict[str, str]:
        auth = self._target.auth
        token = auth() if callable(auth) else auth
        if inspect.isawaitable(token):
            token = await token
        return {"Accept": "text/event-stream", **({"Authorization": f"Bearer {token}"} if token else {})}


class _Turn:
    """Folds the events of one turn; those of sub-agents only count in the usage, which includes them."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: Any = None
        self._calls: list[ToolCallRecord] = []
        self._errors = 0
        self._steps = 0
        self._usage: Mapping[str, Any] | None = None
        self._error: Mapping[str, Any] = {}
        self._run_id = ""

    def take(self, event: Mapping[str, Any]) -> None:
        if event.get("subagent") is not None:
            return
        match event.get("type"):
            case "run.start":
                self._run_id = str(event.get("runId", ""))
            case "step.start":
                self._steps += 1
            case "tool.start":
                name = str(event.get("toolName"))
                self._calls.append(ToolCallRecord(str(event.get("toolCallId")), name, event.get("args")))
            case "tool.error":
                self._errors += 1
            case "error":
                self._error = event.get("error") or {}
            case "run.done":
                self.finish_reason = event.get("finishReason")
                self.text = str(event.get("text", ""))
                self._usage = event.get("usage")

    @property
    def missing(self) -> frozenset[str]:
        """What the stream did not carry."""
        return frozenset(name for name, found in (("usage", self._usage), ("steps", self._steps)) if not found)

    def result(self, messages: list[Message]) -> ExecutionResult[Any]:
        """The result, as a run in this process would have given it."""
        if self.finish_reason == "error":
            raise AgentExecutionError(f"The remote run failed: {self._error.get('message') or 'no reason given'}")
        return ExecutionResult(
            text=self.text,
            messages=messages,
            tool_calls=list(self._calls),
            tool_errors=self._errors,
            usage=_usage(self._usage),
            finish_reason=self.finish_reason,
            steps=self._steps,
            run_id=self._run_id,
        )


def _usage(data: Mapping[str, Any] | None) -> Usage:
    if data is None:
        return Usage(cost=None)
    cost = data.get("costUsd")
    return Usage(
        input_tokens=int(data.get("inputTokens", data.get("promptTokens", 0))),
        output_tokens=int(data.get("outputTokens", data.get("completionTokens", 0))),
        cost=None if cost is None else Decimal(str(cost)),
        estimated=bool(data.get("estimated", False)),
        model_calls=int(data.get("modelCalls") or 0),
    )


def _refused(url: str, status: int, body: str) -> LoushoError:
    if status == 401:
        return LoushoError(
            f"{url} answered 401: the token is missing or not the one it expects.", code="LOUSHO_REMOTE_UNAUTHORIZED"
        )
    return _failed(f"{url} answered {status}: {mask_secrets(body)[:SHOWN_CHARS]}")


def _failed(message: str) -> LoushoError:
    return LoushoError(message, code="LOUSHO_REMOTE_REQUEST_FAILED")
