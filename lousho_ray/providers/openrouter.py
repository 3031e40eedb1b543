"""OpenRouter: Chat Completions for models of many vendors, with the cost of each call."""

from __future__ import annotations

import os
from typing import Any

from lousho_ray.ports import GenerateOptions
from lousho_ray.providers.openai_chat import ChatDialect, chat_request, chat_result, chat_usage
from lousho_ray.providers.openai_chat_stream import ChatStream
from lousho_ray.providers.openai_client import Call, OpenAIClientProvider
from lousho_ray.providers.reasoning_models import openrouter_reasons, wanted

BASE_URL = "https://openrouter.ai/api/v1"


class OpenRouterProvider(OpenAIClientProvider):
    """Models of https://openrouter.ai; ids are `vendor/model`.

    Args:
        api_key: Default: the environment variable `OPENROUTER_API_KEY`.
        base_url: Default: OpenRouter's own.
        options: See `HTTPProvider`; `headers` may carry the attribution headers `HTTP-Referer` and `X-Title`.
    """

    provider_name = "openrouter"
    built_in_model = "openai/gpt-4o-mini"
    key_variable = "OPENROUTER_API_KEY"
    accepts_file_parts = True

    def __init__(self, *, api_key: str | None = None, base_url: str | None = None, **options: Any) -> None:
        super().__init__(api_key=api_key or os.environ.get("OPENROUTER_API_KEY"), base_url=base_url or BASE_URL, **options)

    def call(self, options: GenerateOptions, model: str, *, stream: bool) -> Call:
        extra_usage = {"usage": {"include": True}}
        dialect = ChatDialect(provider=self.name, file_urls=True, extra=extra_usage, **self.file_rules())
        marks = options.prompt_caching == "auto" and model.lower().startswith("anthropic/claude")
        extra = self._reasoning(options, model)
        body = chat_request(options, model, dialect, self.warn, stream=stream, extra=extra, cache_marks=marks)
        return Call("/chat/completions", body, chat_result, ChatStream, chat_usage)

    def _reasoning(self, options: GenerateOptions, model: str) -> dict[str, Any]:
        reasoning = wanted(options.reasoning, openrouter_reasons(model))
        if reasoning is None:
            return {}
        if reasoning.budget_tokens is not None:
            return {"reasoning": {"max_tokens": reasoning.budget_tokens}}
        return {"reasoning": {"effort": reasoning.effort}}
