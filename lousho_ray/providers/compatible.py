"""Servers that speak Chat Completions: vLLM, LM Studio, llama.cpp, Ray Serve LLM and others."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from lousho_ray.ports import GenerateOptions
from lousho_ray.providers.openai_chat import ChatDialect, chat_request, chat_result, chat_usage
from lousho_ray.providers.openai_chat_stream import ChatStream
from lousho_ray.providers.openai_client import Call, OpenAIClientProvider
from lousho_ray.providers.reasoning_models import wanted

StructuredOutputs = Literal["json_schema", "json_object", "none"]
CallIds = Literal["openai", "mistral"]


class OpenAICompatibleProvider(OpenAIClientProvider):
    """A server with OpenAI's Chat Completions API. It needs no key.

    Args:
        base_url: The URL that `/chat/completions` is below, such as `http://localhost:8000/v1`.
        name: How the provider is called in events and errors.
        stream_usage: Whether streams ask for usage. Older servers refuse the option.
        structured_outputs: What the server enforces: a JSON schema, any JSON object, or nothing.
        call_ids: The form of tool call ids the server accepts; `None` = Mistral's on `mistral.ai`, else OpenAI's.
        options: See `HTTPProvider`. The reasoning effort is sent only with `force`, since the model's family is not known.
    """

    provider_name = "openai-compatible"

    def __init__(
        self,
        *,
        base_url: str | None = None,
        name: str = "openai-compatible",
        stream_usage: bool = True,
        structured_outputs: StructuredOutputs = "json_schema",
        call_ids: CallIds | None = None,
        **options: Any,
    ) -> None:
        super().__init__(base_url=base_url, **options)
        if base_url is None:
            self._refuse("base_url", "OpenAICompatibleProvider needs base_url, such as 'http://localhost:8000/v1'.")
        if structured_outputs not in ("json_schema", "json_object", "none"):
            self._refuse(
                "structured_outputs",
                f'structured_outputs is "json_schema", "json_object" or "none", not {structured_outputs!r}.',
            )
        if call_ids not in ("openai", "mistral", None):
            self._refuse("call_ids", f'call_ids is "openai" or "mistral", not {call_ids!r}.')
        self.name = name
        self.stream_usage = stream_usage
        self.structured_outputs: StructuredOutputs = structured_outputs
        at_mistral = (urlsplit(base_url or "").hostname or "").endswith("mistral.ai")
        self.call_ids: CallIds = call_ids or ("mistral" if at_mistral else "openai")

    def configuration(self) -> dict[str, Any]:
        return {
            **super().configuration(),
            "name": self.name,
            "stream_usage": self.stream_usage,
            "structured_outputs": self.structured_outputs,
            "call_ids": self.call_ids,
        }

    def call(self, options: GenerateOptions, model: str, *, stream: bool) -> Call:
        dialect = ChatDialect(
            provider=self.name,
            stream_usage=self.stream_usage,
            structured_outputs=self.structured_outputs,
            call_ids=self.call_ids,
            **self.file_rules(),
        )
        reasoning = wanted(options.reasoning, takes_it=False)
        extra = {} if reasoning is None else {"reasoning_effort": reasoning.effort}
        body = chat_request(options, model, dialect, self.warn, stream=stream, extra=extra)
        return Call("/chat/completions", body, chat_result, ChatStream, chat_usage)
