"""Ollama over its own chat API, spoken with `httpx2` alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from lousho_ray.ports import Chunk, GenerateOptions, GenerateResult
from lousho_ray.providers.base import EventReader, HTTPProvider, import_client, split_url
from lousho_ray.providers.failures import MalformedReplyError, ProviderReplyError, TruncatedStreamError, error_body
from lousho_ray.providers.ollama_wire import LineDecoder, ReplyReader, chat_request, fold_result
from lousho_ray.providers.server_words import error_object, server_words
from lousho_ray.tokens import estimate_tokens
from lousho_ray.usage import ProviderUsage

DEFAULT_BASE_URL = "http://localhost:11434"
TRUNCATED_BELOW = 0.5
"""A prompt that Ollama counts at less than this part of our estimate was cut."""
MIN_CUT_TOKENS = 1_000
"""Smaller differences are errors of the estimate."""


class OllamaStatusError(ProviderReplyError):
    """Ollama answered with an error status. `response` has its headers."""

    def __init__(self, message: str, *, provider: str, status: int, body: Any, response: Any) -> None:
        super().__init__(message, provider=provider, status=status, body=body)
        self.response = response


class OllamaProvider(HTTPProvider):
    """Models served by Ollama.

    A model that is being loaded sends nothing for a while: `timeout_ms` (600,000) covers that, `connect_timeout_ms` (10,000) does
    not. Images may be given as bytes or `data:` URLs; for other URLs a note is sent.

    Args:
        base_url: A bare host gets `/api`; a URL with a path is used as it is. Default `http://localhost:11434`.
        context_window: Also asked of Ollama as `num_ctx`.
        options: As for every built-in provider; see `HTTPProvider`. `api_key` is only needed by hosted Ollama.
    """

    provider_name = "ollama"
    built_in_model = "llama3"

    def __init__(self, *, base_url: str | None = None, **options: Any) -> None:
        super().__init__(base_url=base_url or DEFAULT_BASE_URL, **options)

    @property
    def api_url(self) -> str:
        """What the paths of the API are added to, without query and user info."""
        url = split_url(str(self.base_url))[0].removesuffix("/")
        return url if urlsplit(url).path else f"{url}/api"

    def new_client(self) -> Any:
        httpx2 = import_client("httpx2", "httpx2")
        connect = None if self.connect_timeout_ms is None else self.connect_timeout_ms / 1000
        _, query, credentials = split_url(str(self.base_url))
        authorization = f"Bearer {self.api_key}" if self.api_key else credentials
        key = {} if authorization is None else {"authorization": authorization}
        return httpx2.AsyncClient(
            headers={"content-type": "application/json", **key, **self.headers},
            params=query,
            timeout=httpx2.Timeout(None, connect=connect),
            limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
        )

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        """One model turn, unstreamed.

        Raises:
            OperationTimeoutError: No reply within `timeout_ms`.
            Exception: `httpx2` errors and `ProviderReplyError`s, for `classify` to judge.
        """
        model = options.model or self.default_model or ""
        body = self._body(options, model, stream=False)
        client = await self.client()
        try:
            response = await self.within(self._send(client, model, body, stream=False), "reply")
            fields = self._fields(response.content)
        except Exception as exc:
            self.scrubbed(exc)
            raise
        if not isinstance(fields.get("message"), Mapping):
            raise MalformedReplyError("Ollama's reply has no message.", provider=self.name)
        reader = ReplyReader(model, options.messages)
        result = fold_result(reader.feed({**fields, "done": True}), fields)
        self._check_context(options, result.usage)
        return result

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        """One model turn in chunks. Closing the iterator closes the connection.

        Raises:
            OperationTimeoutError: The first line or the next one did not come in time.
            TruncatedStreamError: The stream ended without `done`.
            Exception: As `generate()`.
        """
        model = options.model or self.default_model or ""
        body = self._body(options, model, stream=True)
        reader = ReplyReader(model, options.messages)
        try:
            async with await self._open(model, body) as lines:
                while not reader.done and (batch := await lines.read()) is not None:
                    for chunk in self._chunks(reader, batch):
                        if chunk is not reader.finish:
                            yield chunk
                await lines.finish()
        except Exception as exc:
            self.scrubbed(exc)
            raise
        if reader.finish is None:
            raise TruncatedStreamError("Ollama's stream ended before the answer did.", provider=self.name)
        self._check_context(options, reader.finish.usage)
        yield reader.finish

    async def get_models(self) -> list[str]:
        """The names of the models that were pulled."""
        client = await self.client()
        try:
            response = await self.within(client.get(f"{self.api_url}/tags"), "list of models")
            if response.is_error:
                raise self._status_error(response, "")
            fields = self._fields(response.content)
        except Exception as exc:
            self.scrubbed(exc)
            raise
        return [str(model["name"]) for model in fields.get("models") or ()]

    def _body(self, options: GenerateOptions, model: str, *, stream: bool) -> bytes:
        self.check_hosted(options)
        files, window = self.unsupported_files, self.context_window
        body = chat_request(options, model, self.warn, stream=stream, files=files, context_window=window)
        self.log_body("request", body)
        return body

    async def _send(self, client: Any, model: str, body: bytes, *, stream: bool) -> Any:
        """The response, read in full unless it is streamed. Raises `OllamaStatusError`."""
        response = await client.send(client.build_request("POST", f"{self.api_url}/chat", content=body), stream=stream)
        if response.is_error:
            await response.aread()
            raise self._status_error(response, model)
        return response

    def _status_error(self, response: Any, model: str) -> OllamaStatusError:
        text = response.content.decode("utf-8", "replace")
        words = server_words(text) or f"HTTP {response.status_code}"
        if response.status_code == 404:
            unknown = model and "model" in words.lower()
            hint = f"Run: ollama pull {model}" if unknown else f"Is {self.api_url} the address of Ollama's API?"
            words = f"{words.rstrip('.')}. {hint}"
        # Servers in front of Ollama give codes, such as that of an exhausted quota, beside the words.
        body = {"error": {**error_object(text), "message": words}}
        return OllamaStatusError(words, provider=self.name, status=response.status_code, body=body, response=response)

    async def _open(self, model: str, body: bytes) -> EventReader[bytes]:
        client = await self.client()
        loop = asyncio.get_running_loop()
        deadline = None if self.timeout_ms is None else loop.time() + self.timeout_ms / 1000
        response = await self.within(self._send(client, model, body, stream=True), "first event", deadline=deadline)
        return EventReader(self, response, LineDecoder(), deadline)

    def _chunks(self, reader: ReplyReader, lines: list[bytes]) -> Iterator[Chunk]:
        for line in lines:
            yield from reader.feed(self._fields(line))
            if reader.done:
                return

    def _fields(self, content: bytes) -> Mapping[str, Any]:
        """The JSON object of a body or line. Raises `ErrorBodyError` when it is an error, `MalformedReplyError` when it is none."""
        text = content.decode("utf-8", "replace")
        self.log_body("response", text)
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, Mapping):
            raise MalformedReplyError("Ollama sent what is no JSON object.", provider=self.name, body=text)
        if "error" in fields:
            raise error_body(fields, provider=self.name)
        return fields

    def _check_context(self, options: GenerateOptions, usage: ProviderUsage | None) -> None:
        """Warns when Ollama counted far fewer prompt tokens than were sent: it drops the oldest messages without an error."""
        if usage is None or "context" in self._warned or any(not isinstance(m.content, str) for m in options.messages):
            return
        sent = estimate_tokens(options.messages)
        if usage.prompt_tokens < sent * TRUNCATED_BELOW and sent - usage.prompt_tokens > MIN_CUT_TOKENS:
            self.warn(
                "context",
                f"Ollama read {usage.prompt_tokens} tokens of a prompt of about {sent}: it does not fit the context and was cut,"
                " maybe with the system prompt. Pass context_window= to OllamaProvider to ask for a larger one.",
            )
