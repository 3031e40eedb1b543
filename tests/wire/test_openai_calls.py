"""One model call of the OpenAI family against the strict fake server: requests, replies, streams."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import FilePart, ImagePart, Message, TextPart, ToolCall, assistant, system, tool_result, user
from lousho_ray.ports import (
    FinishChunk,
    GenerateOptions,
    Reasoning,
    ResponseFormat,
    ServedBy,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.compatible import OpenAICompatibleProvider
from lousho_ray.providers.failures import ErrorBodyError, classify
from lousho_ray.providers.openai import OpenAIProvider
from lousho_ray.providers.openrouter import OpenRouterProvider
from lousho_ray.testing.fake_server import (
    D,
    FakeServer,
    Reply,
    completion,
    hold,
    sse,
    status,
)

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 16
ADD = ToolDefinition("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
SUB = ToolDefinition("sub", "Subtracts.", {"properties": {}})
CALL = ToolCall("call_1", "add", '{"a": 1}')
CONVERSATION = (system("Be brief."), user("1+1?"), assistant("", [CALL]), tool_result(CALL, '{"sum": 2}'))


def call(*messages: Message, **options: Any) -> GenerateOptions:
    return GenerateOptions(messages=messages or (user("hi"),), **options)


async def chunks_of(provider: Any, options: GenerateOptions) -> list[Any]:
    return [chunk async for chunk in provider.stream(options)]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))


def calls_of(chunks: list[Any]) -> list[tuple[str, str]]:
    return [(chunk.tool_call.name, chunk.tool_call.arguments) for chunk in chunks if isinstance(chunk, ToolCallChunk)]


def stream_head() -> Any:
    return status(200, {"content-type": "text/event-stream"})


@pytest.fixture
async def chat(fake_server: FakeServer) -> AsyncIterator[OpenAIProvider]:
    provider = OpenAIProvider(
        api="chat", api_key="sk-test-0123456789", base_url=fake_server.openai_url, default_model="gpt-4o-mini"
    )
    yield provider
    await provider.aclose()


@pytest.fixture
async def responses(fake_server: FakeServer) -> AsyncIterator[OpenAIProvider]:
    provider = OpenAIProvider(api="responses", api_key="sk-test-0123456789", base_url=fake_server.openai_url)
    yield provider
    await provider.aclose()


@pytest.fixture
async def compatible(fake_server: FakeServer) -> AsyncIterator[OpenAICompatibleProvider]:
    provider = OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="llama")
    yield provider
    await provider.aclose()


# ------------------------------------------------------------------------------------------------------- both APIs, whole turns


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_with_tools_passes_the_strict_rules_of_both_apis(fake_server: FakeServer, api: Any, streamed: bool) -> None:
    # PRV-04, PRV-05, PRV-29, PRV-37, PRV-39
    provider = OpenAIProvider(api=api, api_key="sk-test-0123456789", base_url=fake_server.openai_url)
    fake_server.respond([Reply(text="Two calls.", tool_calls=[("add", {"a": 1}), ("add", {"a": 2})], usage=(11, 7))])
    options = call(*CONVERSATION, tools=(ADD,), settings={"max_tokens": 50, "temperature": 0.5})
    if streamed:
        chunks = await chunks_of(provider, options)
        finish = chunks[-1]
        assert isinstance(finish, FinishChunk)
        assert sum(isinstance(chunk, FinishChunk) for chunk in chunks) == 1
        text, calls, usage = text_of(chunks), calls_of(chunks), finish.usage
        assert (finish.finish_reason, finish.served_by) == ("tool_calls", ServedBy("openai", "gpt-4o-mini"))
    else:
        result = await provider.generate(options)
        text, calls, usage = result.text, [(c.name, c.arguments) for c in result.tool_calls], result.usage
        assert (result.finish_reason, result.served_by) == ("tool_calls", ServedBy("openai", "gpt-4o-mini"))
    assert text == "Two calls."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("add", {"a": 1}), ("add", {"a": 2})]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (11, 7)
    await provider.aclose()


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_reply_goes_back_into_the_next_request(fake_server: FakeServer, api: Any) -> None:
    provider = OpenAIProvider(api=api, api_key="sk-test-0123456789", base_url=fake_server.openai_url)
    fake_server.respond([Reply(tool_calls=[("add", {"a": 1}), ("add", {"a": 2})]), Reply(text="done")])
    first = await provider.generate(call(user("go"), tools=(ADD,)))
    results = [tool_result(made, '{"ok": true}') for made in first.tool_calls]
    last = await provider.generate(call(user("go"), assistant(first.text, first.tool_calls), *results, tools=(ADD,)))
    assert (last.text, last.finish_reason) == ("done", "stop")
    await provider.aclose()


async def test_auto_takes_chat_for_other_servers_and_for_settings_responses_lacks(fake_server: FakeServer) -> None:
    # PRV-D1
    fake_server.respond("ok")
    provider = OpenAIProvider(api_key="sk-test-0123456789", base_url=fake_server.openai_url)
    await provider.generate(call())
    assert [request.route for request in fake_server.requests] == ["chat"]
    await provider.aclose()
    vendor = OpenAIProvider(api_key="sk-test-0123456789", base_url="https://api.openai.com/v1")
    assert vendor.uses_responses(call())
    assert not vendor.uses_responses(call(settings={"seed": 1}))
    assert not vendor.uses_responses(call(settings={"presence_penalty": 0.0}))


# ------------------------------------------------------------------------------------------------------------ what is sent


async def test_keys_and_client_headers_reach_the_server_and_the_client_never_retries(fake_server: FakeServer) -> None:
    # PRV-12: one call is one request, also for a status the client would retry by itself.
    provider = OpenAIProvider(
        api="chat", api_key="sk-test-0123456789", base_url=fake_server.openai_url, headers={"X-Team": "a"}, max_retries=5
    )
    fake_server.on("chat", status(429, {"retry-after": "0"}, {"error": {"message": "slow", "code": "insufficient_quota"}}))
    with pytest.raises(Exception, match="slow") as caught:
        await provider.generate(call())
    failure = classify(caught.value)
    assert (failure.category, failure.retryable, failure.status, failure.retry_after_ms) == ("rate-limit", False, 429, 0.0)
    assert len(fake_server.requests) == 1
    headers = fake_server.requests[0].headers
    assert headers["authorization"] == "Bearer sk-test-0123456789"
    assert headers["x-team"] == "a"
    await provider.aclose()


async def test_account_headers_and_keys_of_openai_do_not_go_to_other_servers(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-vendor-0123456789")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin-0123456789")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Ambient: secret-value")
    fake_server.respond("ok")
    provider = OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="llama")
    await provider.generate(call())
    headers = fake_server.requests[0].headers
    for name in ("authorization", "openai-organization", "openai-project", "x-ambient"):
        assert name not in headers
    await provider.aclose()


async def test_an_authorization_header_of_the_environment_does_not_replace_the_key(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "authorization: Bearer ambient\nX-Gateway: g")
    fake_server.respond("ok")
    for key in ("mine-12345678", None):
        provider = OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="llama", api_key=key)
        await provider.generate(call())
        await provider.aclose()
    sent = [request.headers.get("authorization") for request in fake_server.requests]
    assert sent == ["Bearer mine-12345678", None]
    assert "x-gateway" not in fake_server.requests[0].headers
    assert OpenAIProvider(api_key="k", base_url="https://api.openai.com/v1").headers["X-Gateway"] == "g"


async def test_user_info_of_the_url_becomes_basic_authorization(fake_server: FakeServer) -> None:
    # Field case X01
    fake_server.respond("ok")
    url = fake_server.compatible_url.replace("://", "://user:sek%40ret@") + "?api_key=q"
    provider = OpenAICompatibleProvider(base_url=url, default_model="llama")
    assert (await provider.generate(call())).text == "ok"
    request = fake_server.requests[0]
    assert request.headers["authorization"] == "Basic " + base64.b64encode(b"user:sek@ret").decode()
    assert "api_key=q" in request.path
    await provider.aclose()


async def test_settings_and_response_format_take_the_servers_own_names(
    fake_server: FakeServer, chat: OpenAIProvider, responses: OpenAIProvider
) -> None:
    # PRV-30, PRV-30b, PRV-39b
    fake_server.respond('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    settings = {"max_tokens": 16, "top_p": 0.5, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    options = call(settings=settings, response_format=ResponseFormat(schema), tools=(ADD,))
    await chat.generate(options)
    await responses.generate(options)
    of_chat, of_responses = fake_server.bodies
    assert of_chat["max_tokens"] == 16
    assert of_chat["tool_choice"] == settings["tool_choice"]
    assert of_chat["response_format"]["json_schema"] == {"name": "output", "schema": schema, "strict": False}
    assert of_responses["max_output_tokens"] == 16
    assert of_responses["tool_choice"] == {"type": "function", "name": "add"}
    assert of_responses["text"]["format"] == {"type": "json_schema", "name": "output", "schema": schema, "strict": False}
    assert of_responses["store"] is False
    assert of_responses["tools"][0]["strict"] is False


async def test_images_and_files_are_sent_natively(fake_server: FakeServer, chat: OpenAIProvider, responses: OpenAIProvider) -> None:
    # PRV-21, PRV-22
    fake_server.respond("seen")
    parts = [TextPart("look"), ImagePart(PNG), ImagePart("https://x.test/a.png"), FilePart(b"%PDF-1", "application/pdf", "a.pdf")]
    await chat.generate(call(user(parts)))
    await responses.generate(call(user(parts)))
    chat_parts = fake_server.bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in chat_parts] == ["text", "image_url", "image_url", "file"]
    assert chat_parts[1]["image_url"]["url"].startswith("data:image/png;base64,")
    items = fake_server.bodies[1]["input"][0]["content"]
    assert [part["type"] for part in items] == ["input_text", "input_image", "input_image", "input_file"]
    assert items[1]["detail"] == "auto"
    by_url = user([FilePart("https://x.test/a.pdf", "application/pdf")])
    await responses.generate(call(by_url))
    assert fake_server.bodies[2]["input"][0]["content"] == [{"type": "input_file", "file_url": "https://x.test/a.pdf"}]
    with pytest.raises(ConfigurationError, match="file URL"):
        await chat.generate(call(by_url))


async def test_a_file_the_server_cannot_carry_is_refused_before_any_request(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider
) -> None:
    # LES-54
    message = user([TextPart("read"), FilePart(b"x", "application/pdf", "a.pdf")])
    with pytest.raises(ConfigurationError) as caught:
        await compatible.generate(call(message))
    assert caught.value.code == "LOUSHO_UNSUPPORTED_CONTENT"
    assert fake_server.requests == []
    noting = OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="m", unsupported_files="note")
    fake_server.respond("ok")
    await noting.generate(call(message))
    assert fake_server.bodies[0]["messages"][0]["content"][1]["text"] == "[file a.pdf (application/pdf) not sent]"
    await noting.aclose()


async def test_call_ids_of_other_providers_are_made_legal_and_stay_pairs(fake_server: FakeServer) -> None:
    # PRV-27, field case L07
    odd = [ToolCall(id_, "add", "{}") for id_ in ("functions.add:0", "x" * 90, "call_|fc_9", "")]
    results = [tool_result(made, "1") for made in odd]
    mistral = OpenAICompatibleProvider(base_url=fake_server.mistral_url, default_model="m", api_key="k" * 8, call_ids="mistral")
    for provider in (
        OpenAIProvider(api="chat", api_key="k" * 8, base_url=fake_server.openai_url),
        OpenAIProvider(api="responses", api_key="k" * 8, base_url=fake_server.openai_url),
        mistral,
    ):
        fake_server.respond("ok")
        await provider.generate(call(user("go"), assistant("", odd), *results, user("next"), tools=(ADD,)))
        await provider.aclose()
    sent = fake_server.bodies[0]["messages"]
    ids = [made["id"] for made in sent[1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in sent[2:6]]
    assert len(set(ids)) == 4


async def test_unpaired_calls_and_results_are_repaired_in_the_request_only(fake_server: FakeServer, chat: OpenAIProvider) -> None:
    # PRV-D10
    orphan = Message("tool", "late", tool_call_id="gone", tool_name="add")
    messages = (user("go"), orphan, assistant("", [CALL]), user("and now?"))
    fake_server.respond("ok")
    await chat.generate(call(*messages))
    sent = fake_server.bodies[0]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "user"]
    assert json.loads(sent[2]["content"])["kind"] == "not-run"
    assert messages[1] is orphan


async def test_odd_text_and_arguments_of_a_transcript_pass_the_strict_rules(
    fake_server: FakeServer, chat: OpenAIProvider, responses: OpenAIProvider
) -> None:
    # Field cases W02, W22, PRV-26: lone surrogates, blank and broken arguments, made-up tool names.
    calls = [ToolCall("a", "add", ""), ToolCall("b", "add", "{broken"), ToolCall("c", "functions.add it", "[1]")]
    messages = (user("x\ud83d"), assistant("", calls), *[tool_result(made, "y\udc00") for made in calls], user("go on"))
    for provider in (chat, responses):
        fake_server.respond("ok")
        await provider.generate(call(*messages))
    sent = fake_server.bodies[0]["messages"]
    assert sent[0]["content"] == "x\ufffd"
    assert [made["function"]["arguments"] for made in sent[1]["tool_calls"]] == ["{}", "{}", "{}"]


async def test_system_text_anywhere_becomes_one_leading_prompt(
    fake_server: FakeServer, chat: OpenAIProvider, responses: OpenAIProvider
) -> None:
    # RUN-15
    messages = (system("one"), user("hi"), system("two"))
    for provider in (chat, responses):
        fake_server.respond("ok")
        await provider.generate(call(*messages))
    assert [m["role"] for m in fake_server.bodies[0]["messages"]] == ["system", "user"]
    assert fake_server.bodies[0]["messages"][0]["content"] == "one\n\ntwo"
    assert fake_server.bodies[1]["instructions"] == "one\n\ntwo"


async def test_reasoning_goes_to_reasoning_models_only_and_drops_temperature(
    fake_server: FakeServer, chat: OpenAIProvider, responses: OpenAIProvider, caplog: pytest.LogCaptureFixture
) -> None:
    # PRV-78, PRV-79, PRV-80
    fake_server.respond("ok")
    asked = Reasoning("high", summary="auto")
    for model in ("gpt-5", "gpt-4o", "gpt-5-chat-latest", "o1-mini"):
        for provider in (chat, responses):
            await provider.generate(call(model=model, reasoning=asked, settings={"temperature": 0.1}))
    bodies = {(body["model"], "input" in body): body for body in fake_server.bodies}
    assert bodies["gpt-5", False]["reasoning_effort"] == "high"
    assert bodies["gpt-5", True]["reasoning"] == {"effort": "high", "summary": "auto"}
    assert "temperature" not in bodies["gpt-5", False]
    assert "temperature" not in bodies["gpt-5", True]
    for model in ("gpt-4o", "gpt-5-chat-latest", "o1-mini"):
        assert "reasoning" not in bodies[model, True]
        assert "reasoning_effort" not in bodies[model, False]
        assert bodies[model, True]["temperature"] == 0.1
    assert sum("temperature" in record.message for record in caplog.records) == 2  # once per provider


async def test_responses_drops_the_settings_it_does_not_have(fake_server: FakeServer, responses: OpenAIProvider) -> None:
    # PRV-D1
    fake_server.respond("ok")
    await responses.generate(call(settings={"seed": 1, "stop": ["x"], "frequency_penalty": 1.0}))
    assert not {"seed", "stop", "frequency_penalty"} & set(fake_server.bodies[0])


async def test_hosted_tools_on_chat_are_refused(chat: OpenAIProvider) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await chat.generate(call(hosted_tools=({"type": "web_search"},)))
    assert caught.value.code == "LOUSHO_HOSTED_TOOL_UNSUPPORTED"
    assert not chat.supports_hosted_tool("web_search")


# ------------------------------------------------------------------------------------------------------------- OpenRouter


async def test_openrouter_asks_for_cost_and_marks_the_cacheable_prefix_of_claude(fake_server: FakeServer) -> None:
    # PRV-56, PRV-75, PRV-35, PRV-80c
    provider = OpenRouterProvider(api_key="or-key-12345678", base_url=fake_server.openrouter_url)
    fake_server.on(
        "chat", status(200, body=completion({"content": "ok"}, usage={"prompt_tokens": 5, "completion_tokens": 1, "cost": 0}))
    )
    options = call(
        *CONVERSATION,
        user("more"),
        model="anthropic/claude-sonnet-4.5",
        tools=(ADD, SUB),
        reasoning=Reasoning("low", budget_tokens=2048),
    )
    result = await provider.generate(options)
    assert result.usage is not None
    assert result.usage.cost_usd == 0.0
    body = fake_server.bodies[0]
    mark = {"type": "ephemeral"}
    assert body["usage"] == {"include": True}
    assert body["reasoning"] == {"max_tokens": 2048}
    assert body["messages"][0]["content"][-1]["cache_control"] == mark
    assert body["messages"][-1]["content"][-1]["cache_control"] == mark
    assert body["tools"][1]["cache_control"] == mark
    assert json.dumps(body).count("cache_control") == 3
    fake_server.respond("ok")
    await provider.generate(call(*CONVERSATION, user("more"), model="openai/gpt-4o", tools=(ADD,), reasoning=Reasoning("low")))
    plain = fake_server.bodies[1]
    assert "cache_control" not in json.dumps(plain)
    assert "reasoning" not in plain
    await provider.aclose()


async def test_openrouter_errors_inside_a_stream_are_errors(fake_server: FakeServer) -> None:
    # PRV-56, field case L10
    provider = OpenRouterProvider(api_key="or-key-12345678", base_url=fake_server.openrouter_url)
    fake_server.on("chat", stream_head(), D({"content": "x"}), sse({"error": {"code": 429, "message": "busy"}}), hold)
    with pytest.raises(ErrorBodyError, match="busy") as caught:
        await chunks_of(provider, call(model="m/m"))
    assert classify(caught.value).category == "rate-limit"
    await provider.aclose()
