"""Anthropic's Messages API.

The official client keeps credentials, headers, the URL and the connections; a body encoded here is sent over them as it is
(`direct_calls`), and replies are read here. The client's typed `create` walks the whole history on every call.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, ResponseFormat, ServedBy
from lousho_ray.providers.anthropic_parts import FileRule
from lousho_ray.providers.anthropic_reply import ReplyReader, add_usage, fold_result
from lousho_ray.providers.anthropic_schema import output_schema
from lousho_ray.providers.anthropic_wire import MessagesRequest, WireOptions, build_request
from lousho_ray.providers.base import EventReader, HTTPProvider, import_client, split_url
from lousho_ray.providers.failures import MalformedReplyError, TruncatedStreamError, error_body, note_usage
from lousho_ray.providers.prices import get_model_info
from lousho_ray.providers.sse import ServerSentEvent, SSEDecoder
from lousho_ray.usage import ProviderUsage

BASE_URL = "https://api.anthropic.com"

_PATH = "/v1/messages"

_CLIENT = ("anthropic", "anthropic[aiohttp]>=2.14,<3")

CONTINUATIONS = 3
"""How often one call sends a `pause_turn` reply back to be continued."""


class AnthropicProvider(HTTPProvider):
    """Claude models over Anthropic's Messages API.

    PDF and text files are sent natively.

    Args:
        api_key: Default: the environment variable `ANTHROPIC_API_KEY`.
        base_url: Default: `ANTHROPIC_BASE_URL`, else Anthropic's own.
        structured_outputs: Sends the schema of a `response_format` as `output_config.format`. Off, it is left to the prompt.
        options: As for every built-in provider; see `HTTPProvider`.

    The environment is read here and never again: a provider that travels to another machine takes what it was made with.
    """

    provider_name = "anthropic"
    built_in_model = "claude-sonnet-4-5"
    key_variable = "ANTHROPIC_API_KEY"
    accepts_file_parts = True
    client_package = _CLIENT

    def __init__(
        self, *, api_key: str | None = None, base_url: str | None = None, structured_outputs: bool = False, **options: Any
    ) -> None:
        api_key = api_key or os.environ.get("ANTHROPIC_API_KEY")
        super().__init__(api_key=api_key, base_url=base_url or os.environ.get("ANTHROPIC_BASE_URL") or BASE_URL, **options)
        self.structured_outputs = structured_outputs

    def configuration(self) -> dict[str, Any]:
        return {**super().configuration(), "structured_outputs": self.structured_outputs}

    def supports_hosted_tool(self, type: str) -> bool:
        return type == "hosted_tool"

    def enforces_response_format(self, response_format: ResponseFormat, model: str | None = None) -> bool:
        """With `structured_outputs`, schemas that the API can express are enforced."""
        return self.structured_outputs and response_format.schema is not None and output_schema(response_format.schema) is not None

    def new_client(self) -> Any:
        anthropic = import_client(*_CLIENT)
        # Headers that the client would take from this process's environment: what is sent was decided where this was made.
        ambient = [line.partition(":")[0].strip() for line in os.environ.get("ANTHROPIC_CUSTOM_HEADERS", "").split("\n")]
        base_url, query, credentials = split_url(self.base_url or BASE_URL)
        # Next to an `Authorization` the client leaves the key out by itself.
        named = {} if credentials is None else {"Authorization": credentials, "X-Api-Key": self.api_key}
        from lousho_ray.providers import direct_calls

        pool = direct_calls.pool(anthropic, self._timeout())
        client = anthropic.AsyncAnthropic(
            api_key=self.api_key,
            base_url=base_url,
            max_retries=0,
            default_query=query,
            default_headers={**{name: anthropic.Omit() for name in ambient if name}, **named, **self.headers},
            http_client=pool,
        )
        return direct_calls.DirectCalls(anthropic, client, pool, {"timeout": self._timeout()})

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        """One model turn, unstreamed.

        Raises:
            OperationTimeoutError: No reply within `timeout_ms`.
            Exception: The client's own errors and `ProviderReplyError`s, for `classify` to judge.
        """
        model, request = self._request(options)
        chunks: list[Chunk] = []
        usage: ProviderUsage | None = None
        sent = 0
        while True:
            try:
                body = await self._reply(request)
            except Exception as exc:
                note_usage(exc, usage)  # of the parts before this one
                self.scrubbed(exc)
                raise
            reader = ReplyReader(model, options.messages)
            chunks += reader.read(body)
            usage = add_usage(usage, reader.usage)
            if not reader.paused or sent == CONTINUATIONS:
                return fold_result(chunks, _finish(reader, usage), body)
            request = request.continued(reader.content)
            sent += 1

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        """One model turn in chunks. Closing the iterator closes the connection.

        Raises:
            OperationTimeoutError: The first event or the next one did not come in time.
            TruncatedStreamError: The stream ended without `message_stop`.
            Exception: As `generate()`.
        """
        model, request = self._request(options)
        usage: ProviderUsage | None = None
        sent = 0
        while True:
            reader = ReplyReader(model, options.messages)
            try:
                async with await self._open(request) as events:
                    while not reader.done and (batch := await events.read()) is not None:
                        for chunk in self._feed(reader, batch):
                            yield chunk
                    await events.finish()
                if not reader.done:
                    raise TruncatedStreamError("Anthropic's stream ended before the answer did.", provider=self.name)
            except BaseException as exc:
                note_usage(exc, add_usage(usage, reader.usage))
                if isinstance(exc, Exception):
                    self.scrubbed(exc)
                raise
            usage = add_usage(usage, reader.usage)
            if not reader.paused or sent == CONTINUATIONS:
                yield _finish(reader, usage)
                return
            request = request.continued(reader.content)
            sent += 1

    async def get_models(self) -> list[str]:
        """The ids of the models this key may use."""
        client = (await self.client()).client
        httpx2 = import_client("httpx2", "httpx2")
        query = {"params": {"limit": 1000}, "timeout": self._timeout()}
        try:
            response = await self.within(client.get("/v1/models", cast_to=httpx2.Response, options=query), "list of models")
            body = self._parse(response.content.decode("utf-8", "replace"))
        except Exception as exc:
            self.scrubbed(exc)
            raise
        return [str(model["id"]) for model in body.get("data") or ()]

    def _request(self, options: GenerateOptions) -> tuple[str, MessagesRequest]:
        self.check_hosted(options)
        model = options.model or self.default_model or ""
        files = FileRule(self.accepts_file_parts, self.unsupported_files == "note")
        info = get_model_info(f"anthropic/{model}")
        limit = None if info is None else info.max_output_tokens
        wire = WireOptions(files, self.structured_outputs, limit)
        return model, build_request(options, model, self.warn, wire)

    def _timeout(self) -> Any:
        """Only connecting is bounded by the client: a whole reply and the gaps of a stream are bounded by this class."""
        httpx2 = import_client("httpx2", "httpx2")
        return httpx2.Timeout(None, connect=None if self.connect_timeout_ms is None else self.connect_timeout_ms / 1000)

    async def _reply(self, request: MessagesRequest) -> Mapping[str, Any]:
        calls = await self.client()  # made before the clock starts: loading the package takes its time once
        content = request.encode(stream=False)
        self.log_body("request", content)
        reply: bytes = await self.within(calls.exchange(_PATH, content), "reply")
        text = reply.decode("utf-8", "replace")
        self.log_body("response", text)
        body = self._parse(text)
        if isinstance(body.get("content"), list):
            return body
        if "error" in body:
            raise error_body(body, provider=self.name)
        raise MalformedReplyError("Anthropic's reply has no content.", provider=self.name)

    def _parse(self, text: str) -> Mapping[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, Mapping):
            return value
        raise MalformedReplyError("Anthropic sent what is no JSON object.", provider=self.name, body=text)

    async def _open(self, request: MessagesRequest) -> EventReader[ServerSentEvent]:
        calls = await self.client()
        content = request.encode(stream=True)
        self.log_body("request", content)
        loop = asyncio.get_running_loop()
        deadline = None if self.timeout_ms is None else loop.time() + self.timeout_ms / 1000
        response = await self.within(calls.open(_PATH, content), "first event", deadline=deadline)
        whole = response.headers.get("content-type", "").startswith(("application/json", "text/html"))
        return EventReader(self, response, _WholeBody() if whole else SSEDecoder(), deadline)

    def _feed(self, reader: ReplyReader, batch: list[ServerSentEvent]) -> Iterator[Chunk]:
        for event in batch:
            if reader.done or event.data.strip() in ("", "[DONE]"):  # servers that imitate the API send OpenAI's end mark
                continue
            self.log_body("event", event.data)
            fields = self._parse(event.data)
            if fields.get("type") == "error" or "error" in fields:
                raise error_body(fields, provider=self.name)
            yield from reader.read(fields) if isinstance(fields.get("content"), list) else reader.feed(fields)


class _WholeBody:
    """A whole body where a stream was asked for: one event, at its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        self._pieces.append(data)
        return []

    def close(self) -> list[ServerSentEvent]:
        return [ServerSentEvent(b"".join(self._pieces).decode("utf-8", "replace"))]


def _finish(reader: ReplyReader, usage: ProviderUsage | None) -> FinishChunk:
    return FinishChunk(reader.finish_reason, usage, ServedBy("anthropic", reader.model), reader.served)
