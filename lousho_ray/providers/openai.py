"""OpenAI: the Responses API by default, Chat Completions where it must be."""

from __future__ import annotations

import functools
import os
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from lousho_ray.hosted_tools import HostedToolType
from lousho_ray.ports import GenerateOptions, ResponseFormat
from lousho_ray.providers.openai_chat import ChatDialect, chat_request, chat_result, chat_usage
from lousho_ray.providers.openai_chat_stream import ChatStream
from lousho_ray.providers.openai_client import Call, OpenAIClientProvider, ambient_headers
from lousho_ray.providers.openai_responses import UNKNOWN_SETTINGS, responses_request, responses_result, responses_usage
from lousho_ray.providers.openai_responses_stream import ResponsesStream
from lousho_ray.providers.openai_strict import strict_form
from lousho_ray.providers.reasoning_models import openai_reasons, wanted

BASE_URL = "https://api.openai.com/v1"

API = Literal["auto", "chat", "responses"]


class OpenAIProvider(OpenAIClientProvider):
    """Models of OpenAI, or of a server that speaks its API.

    Args:
        api: `"responses"`, `"chat"`, or `"auto"`: Chat Completions when `base_url` is not OpenAI's or the call sets `stop`, `seed`
            or a penalty (which Responses does not have), else Responses.
        api_key: Default: the environment variable `OPENAI_API_KEY`.
        base_url: Default: `OPENAI_BASE_URL`, else OpenAI's own.
        organization: Default: `OPENAI_ORG_ID`. Only sent to OpenAI.
        project: Default: `OPENAI_PROJECT_ID`. Only sent to OpenAI.
        options: See `HTTPProvider`.

    Headers of `OPENAI_CUSTOM_HEADERS` are sent to OpenAI only. The environment is read here and never again: a provider that
    travels to another machine takes what it was made with.
    """

    provider_name = "openai"
    built_in_model = "gpt-4o-mini"
    key_variable = "OPENAI_API_KEY"
    accepts_file_parts = True

    def __init__(
        self,
        *,
        api: API = "auto",
        api_key: str | None = None,
        base_url: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        **options: Any,
    ) -> None:
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or BASE_URL
        super().__init__(api_key=api_key or os.environ.get("OPENAI_API_KEY"), base_url=base_url, **options)
        if api not in ("auto", "chat", "responses"):
            self._refuse("api", f'api is "auto", "chat" or "responses", not {api!r}.')
        self.api: API = api
        self.is_vendor = is_openai(base_url)
        self.organization = organization or os.environ.get("OPENAI_ORG_ID")
        self.project = project or os.environ.get("OPENAI_PROJECT_ID")
        if self.is_vendor:
            account = {"OpenAI-Organization": self.organization, "OpenAI-Project": self.project, **ambient_headers()}
            self.headers = {**{name: value for name, value in account.items() if value}, **self.headers}

    def configuration(self) -> dict[str, Any]:
        return {**super().configuration(), "api": self.api, "organization": self.organization, "project": self.project}

    def supports_hosted_tool(self, type: str) -> bool:
        """The Responses API runs web search, code interpreter, file search and any tool given raw."""
        return type in get_args(HostedToolType) and (self.api == "responses" or (self.api == "auto" and self.is_vendor))

    def enforces_response_format(self, response_format: ResponseFormat, model: str | None = None) -> bool:
        """OpenAI itself enforces the schemas of its strict mode; other servers take them as hints."""
        return self.is_vendor and response_format.schema is not None and strict_form(response_format.schema) is not None

    def uses_responses(self, options: GenerateOptions) -> bool:
        """Which of the two APIs a call goes to."""
        if self.api != "auto":
            return self.api == "responses"
        if not self.is_vendor:
            return False
        return bool(options.hosted_tools) or not any(key in options.settings for key in UNKNOWN_SETTINGS)

    def call(self, options: GenerateOptions, model: str, *, stream: bool) -> Call:
        reasoning = wanted(options.reasoning, openai_reasons(model))
        dropped = ("temperature", "top_p") if reasoning is not None else ()
        for key in dropped:
            if key in options.settings:
                self.warn(f"reasoning:{key}", f"{key} is not sent: {model} does not take it together with reasoning.")
        if self.uses_responses(options):
            extra: dict[str, Any] = {}
            if reasoning is not None:
                summary = {"summary": reasoning.summary} if reasoning.summary else {}
                extra = {"reasoning": {"effort": reasoning.effort, **summary}}
            files: Literal["send", "note", "error"] = "send" if self.accepts_file_parts else self.unsupported_files
            strict = self.is_vendor
            body = responses_request(
                options, model, files, self.warn, stream=stream, extra=extra, dropped=dropped, strict_schemas=strict
            )
            return Call("/responses", body, responses_result, ResponsesStream, responses_usage)
        extra = {} if reasoning is None else {"reasoning_effort": reasoning.effort}
        body = chat_request(options, model, self._dialect(), self.warn, stream=stream, extra=extra, dropped=dropped)
        return Call("/chat/completions", body, chat_result, ChatStream, chat_usage)

    def _dialect(self) -> ChatDialect:
        return _dialect(self.name, self.base_url, self.is_vendor, **self.file_rules())


@functools.lru_cache(maxsize=64)
def _dialect(provider: str, base_url: str | None, is_vendor: bool, **files: Any) -> ChatDialect:
    key = "max_completion_tokens" if is_vendor or is_azure(base_url) else "max_tokens"
    return ChatDialect(provider=provider, max_tokens_key=key, strict_schemas=is_vendor, **files)


def is_openai(base_url: str | None) -> bool:
    """Whether a base URL is OpenAI's own, in any of its regions."""
    host = urlsplit(base_url or BASE_URL).hostname or ""
    return host == "openai.com" or host.endswith(".openai.com")


def is_azure(base_url: str | None) -> bool:
    """Whether a base URL is OpenAI's models on Azure, which take OpenAI's own field names."""
    return (urlsplit(base_url or "").hostname or "").endswith(".openai.azure.com")
