"""Calls through the official OpenAI client: its credentials, URLs, headers, errors and connection pool, but not its types.

The client's typed `create` walks the whole history of a request and builds models of every answer; a call of bytes costs the same
however long the history is. We encode requests and read answers ourselves.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    ReasoningChunk,
    ReasoningEndChunk,
    ServedBy,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.base import EventReader, HTTPProvider, import_client, split_url, split_userinfo
from lousho_ray.providers.failures import MalformedReplyError, note_usage
from lousho_ray.providers.server_words import server_words
from lousho_ray.providers.sse import ServerSentEvent, SSEDecoder
from lousho_ray.usage import ProviderUsage

_CLIENT = ("openai", "openai[aiohttp]>=3.57,<4")


_MACHINE_HEADERS = tuple(
    f"X-Stainless-{name}" for name in ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async")
)
"""In which the client describes the machine. No API needs them, and each header costs several passes over all of them."""


class StreamReader(Protocol):
    """What turns the events of one stream into chunks (see `ChatStream`)."""

    @property
    def complete(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    @property
    def usage(self) -> ProviderUsage | None: ...

    def feed(self, event: ServerSentEvent) -> list[Chunk]: ...

    def finish(self) -> Iterator[Chunk]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: where it goes, what it sends, and who reads the answer, its stream, and the usage that a failed one tells."""

    path: str
    body: bytes
    result: Callable[[Any, GenerateOptions, str | None], GenerateResult]
    reader: Callable[[GenerateOptions, str | None], StreamReader]
    usage: Callable[[Any], ProviderUsage | None]


class OpenAIClientProvider(HTTPProvider):
    """Base of the providers that speak an OpenAI API. A subclass says which call a model turn is (`call`)."""

    client_package = _CLIENT

    def call(self, options: GenerateOptions, model: str, *, stream: bool) -> Call:
        raise NotImplementedError

    def new_client(self) -> Any:
        openai = import_client(*_CLIENT)
        # What the client would take from this process's environment is taken back: what a provider sends is decided where it
        # was made, and one vendor's account data never goes to another.
        unsent = (*ambient_headers(), "OpenAI-Organization", "OpenAI-Project", *_MACHINE_HEADERS)
        headers: dict[str, Any] = {name: openai.Omit() for name in unsent}
        base_url, query, credentials = split_url(self.base_url or "")
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        elif credentials is not None:
            headers["Authorization"] = credentials
        from lousho_ray.providers import direct_calls

        pool = direct_calls.pool(openai, self._timeout())
        client = openai.AsyncOpenAI(
            api_key=self.api_key or "none",
            base_url=base_url,
            default_query=query,
            max_retries=0,
            timeout=self._timeout(),
            default_headers={**headers, **self.headers},
            http_client=pool,
        )
        return direct_calls.DirectCalls(openai, client, pool, self._request_options())

    def _request_options(self) -> dict[str, Any]:
        # Without `admin_api_key_auth` an administrator's key in the environment stays there.
        headers = _call_headers()
        named = any(name.lower() == "authorization" for name in self.headers)
        if not self.api_key and not named and split_userinfo(self.base_url or "")[1] is None:
            headers["Authorization"] = import_client(*_CLIENT).Omit()
        return {
            "headers": headers,
            "params": {},
            "max_retries": 0,
            "timeout": self._timeout(),
            "security": {"bearer_auth": True},
            "idempotency_key": "",  # sent by nobody, but made anew where there is none
        }

    def _timeout(self) -> Any:
        """Limits the connecting only; all other waits are limited here, with the times of this provider."""
        return _connect_timeout(self.connect_timeout_ms)

    def model_for(self, options: GenerateOptions) -> str:
        """The call's own model id, else the provider's default."""
        model = options.model or self.default_model
        if not model:
            raise ConfigurationError(
                f"{type(self).__name__} was called without a model and has no default_model.",
                code="LOUSHO_CONFIG_INVALID",
                field="default_model",
            )
        return model

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        """One model turn. Raises the client's own errors, `ProviderReplyError`s and `OperationTimeoutError`; see `failures`."""
        model = self.model_for(options)
        self.check_hosted(options)
        call = self.call(options, model, stream=False)
        calls = await self.client()
        self.log_body("request", call.body)
        body: Any = None
        try:
            url = _url(self.base_url or "", call.path)
            reply: bytes = await self.within(calls.exchange(url, call.body), "reply")
            self.log_body("reply", reply)
            body = _json(reply)
            result = call.result(body, options, self.name)
        except Exception as error:
            note_usage(error, call.usage(body.get("usage")) if isinstance(body, Mapping) else None)
            self.scrubbed(error)
            raise
        return replace(result, served_by=ServedBy(self.name, model))

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        """One model turn, streamed. Closing the iterator early closes the connection."""
        model = self.model_for(options)
        self.check_hosted(options)
        call = self.call(options, model, stream=True)
        calls = await self.client()
        self.log_body("request", call.body)
        deadline = None if self.timeout_ms is None else asyncio.get_running_loop().time() + self.timeout_ms / 1000
        served_by = ServedBy(self.name, model)
        reader: StreamReader | None = None
        try:
            url = _url(self.base_url or "", call.path)
            response = await self.within(calls.open(url, call.body), "first event", deadline=deadline)
            async with EventReader(self, response, SSEDecoder(), deadline) as events:
                if _is_event_stream(response.headers):
                    reader = call.reader(options, self.name)
                    while not reader.done and (arrived := await _arrived(events, reader)) is not None:
                        for event in arrived:
                            for chunk in reader.feed(event):
                                yield chunk
                    await events.finish()
                    last = reader.finish()
                else:
                    body = await self.within(response.aread(), "reply", deadline=deadline)
                    last = _chunks(call.result(_json(body), options, self.name))
                for chunk in last:
                    yield replace(chunk, served_by=served_by) if isinstance(chunk, FinishChunk) else chunk
        except BaseException as error:
            note_usage(error, None if reader is None else reader.usage)
            if isinstance(error, Exception):
                self.scrubbed(error)
            raise

    async def get_models(self) -> list[str]:
        """The ids of the models that the server lists."""
        client = (await self.client()).client
        try:
            response = await self.within(client.get("/models", cast_to=_response_type(), options=self._request_options()), "reply")
            body = _json(response.content)
        except Exception as error:
            self.scrubbed(error)
            raise
        entries = body.get("data") if isinstance(body, Mapping) else None
        if not isinstance(entries, list):
            raise MalformedReplyError("The server's list of models has no data.", provider=self.name, body=body)
        return [str(entry["id"]) for entry in entries if isinstance(entry, Mapping) and entry.get("id")]

    def file_rules(self) -> dict[str, Any]:
        """What becomes of file parts, as fields of a `ChatDialect`."""
        return {"accepts_files": self.accepts_file_parts, "unsupported_files": self.unsupported_files}


def ambient_headers() -> dict[str, str]:
    """The headers of the client's environment variable `OPENAI_CUSTOM_HEADERS`, one `Name: value` a line."""
    lines = [line.partition(":") for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")]
    return {name.strip(): value.strip() for name, colon, value in lines if colon and name.strip()}


async def _arrived(events: EventReader[ServerSentEvent], reader: StreamReader) -> list[ServerSentEvent] | None:
    """The events that came together; `None` when there are no more."""
    try:
        return await events.read()
    except Exception:
        if reader.complete:  # the answer is whole; only its end mark or its usage is missing
            return None
        raise


def _chunks(result: GenerateResult) -> Iterator[Chunk]:
    """The chunks of a whole reply, for servers that answer a streaming request with one."""
    for block in result.reasoning:
        yield ReasoningChunk(block.text)
        yield ReasoningEndChunk()
    if result.text:
        yield TextChunk(result.text)
    for call in result.tool_calls:
        yield ToolCallChunk(call)
    yield FinishChunk(result.finish_reason, result.usage, response_model=result.response_model)


@functools.cache
def _response_type() -> Any:
    return import_client("httpx2", "httpx2").Response


@functools.lru_cache(maxsize=64)
def _connect_timeout(limit_ms: float | None) -> Any:
    return import_client("httpx2", "httpx2").Timeout(None, connect=None if limit_ms is None else limit_ms / 1000)


@functools.lru_cache(maxsize=1024)
def _url(base_url: str, path: str) -> str:
    """The whole URL of a call: the client would put it together, and take it apart again, at every call."""
    return split_url(base_url)[0].rstrip("/") + path


def _call_headers() -> dict[str, Any]:
    """What the client would add to each call about its own retries and timeouts, taken back."""
    omit = import_client(*_CLIENT).Omit()
    return {"x-stainless-retry-count": omit, "x-stainless-read-timeout": omit}


def _is_event_stream(headers: Mapping[str, str]) -> bool:
    return not headers.get("content-type", "").lower().startswith(("application/json", "text/html"))


def _json(content: bytes) -> Any:
    if not content.strip():
        raise MalformedReplyError("The server's reply is empty.")
    try:
        return json.loads(content)
    except ValueError as error:
        text = content.decode("utf-8", "replace")
        raise MalformedReplyError(f"The server's reply is not JSON: {server_words(text)}", body=text) from error
