"""The providers' happy paths against @copilotkit/aimock, whose authors know the wire forms but not this project."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from lousho_ray import (
    AnthropicProvider,
    CompactedLLMProviderError,
    LLMProvider,
    OllamaProvider,
    OpenAICompatibleProvider,
    OpenAIProvider,
    OpenRouterProvider,
    create_agent,
    tool,
)
from lousho_ray.events import Event, ReasoningDelta, TextDelta, ToolDone
from lousho_ray.loop.result import ExecutionResult

pytestmark = pytest.mark.interop

GREETING = "Hello from the other side: äöü, 東京 and 😀, in more than one chunk."

Make = Callable[[str, dict[str, str]], Any]

PROVIDERS: dict[str, Make] = {
    "openai-chat": lambda url, headers: OpenAIProvider(
        api="chat", base_url=f"{url}/v1", api_key="k", default_model="gpt-5-mini", headers=headers
    ),
    "openai-responses": lambda url, headers: OpenAIProvider(
        api="responses", base_url=f"{url}/v1", api_key="k", default_model="gpt-5-mini", headers=headers
    ),
    "anthropic": lambda url, headers: AnthropicProvider(
        base_url=url, api_key="k", default_model="claude-sonnet-4-5", headers=headers
    ),
    "compatible": lambda url, headers: OpenAICompatibleProvider(
        base_url=f"{url}/v1", api_key="k", default_model="any", headers=headers
    ),
    "openrouter": lambda url, headers: OpenRouterProvider(
        base_url=f"{url}/api/v1", api_key="k", default_model="openai/gpt-5-mini", headers=headers
    ),
    "ollama": lambda url, headers: OllamaProvider(base_url=url, default_model="deepseek-r1", headers=headers),
}


@tool
async def weather(city: str) -> int:
    """Tells the temperature of a city in degrees Celsius."""
    return {"Paris": 21, "Oslo": 4}[city]


class Client:
    """An agent over one provider; `X-Test-Id` keeps the server's counters and its journal apart from those of other tests."""

    def __init__(self, url: str, make: Make) -> None:
        self.test_id = uuid.uuid4().hex
        self.url = url
        self.provider: LLMProvider = make(url, {"X-Test-Id": self.test_id})

    async def run(self, prompt: str, *, stream: bool) -> tuple[ExecutionResult[Any], list[Event]]:
        agent = create_agent(provider=self.provider, tools=[weather], runtime="local")
        if not stream:
            return await agent.send(prompt), []
        run = agent.stream(prompt)
        events = [event async for event in run]
        return await run.result, events

    async def journal(self) -> list[dict[str, Any]]:
        """What the server understood of the requests."""
        async with httpx2.AsyncClient() as http:
            answer = await http.get(f"{self.url}/__aimock/journal", params={"testId": self.test_id})
        entries: list[dict[str, Any]] = answer.json()
        return entries


@pytest.fixture(params=PROVIDERS)
async def client(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Client]:
    made = Client(url, PROVIDERS[request.param])
    yield made
    await made.provider.aclose()  # type: ignore[attr-defined]


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@both_ways
async def test_text_of_one_call(client: Client, stream: bool) -> None:
    result, events = await client.run("greet", stream=stream)
    assert (result.text, result.finish_reason, result.steps) == (GREETING, "stop", 1)
    if stream:
        deltas = [event.text for event in events if isinstance(event, TextDelta)]
        assert "".join(deltas) == GREETING
        assert len(deltas) > 1


@both_ways
async def test_a_turn_with_two_parallel_calls(client: Client, stream: bool) -> None:
    result, events = await client.run("weather in two cities", stream=stream)
    assert result.text == "Paris has 21 degrees, Oslo has 4."
    assert [(call.name, call.args) for call in result.tool_calls] == [("weather", {"city": "Paris"}), ("weather", {"city": "Oslo"})]
    assert (result.steps, result.tool_errors) == (2, 0)
    if stream:
        assert sorted(event.result for event in events if isinstance(event, ToolDone)) == [4, 21]
    requests = await client.journal()
    assert [entry["response"]["status"] for entry in requests] == [200, 200]
    results = [message for message in requests[-1]["body"]["messages"] if message["role"] == "tool"]
    assert [message["content"] for message in results] == ["21", "4"]
    if client.provider.name != "ollama":  # whose calls have no ids
        assert [message["tool_call_id"] for message in results] == ["call_weather_1", "call_weather_2"]


# Not Ollama, whose `thinking` the server calls by another name.
@pytest.mark.parametrize("client", [name for name in PROVIDERS if name != "ollama"], indirect=True)
@both_ways
async def test_reasoning_is_no_part_of_the_text(client: Client, stream: bool) -> None:
    result, events = await client.run("think", stream=stream)
    assert result.text == "42"
    assert result.reasoning == "Six times seven."
    if stream:
        assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "Six times seven."


@both_ways
async def test_a_429_is_tried_again(client: Client, stream: bool) -> None:
    result, _ = await client.run("overloaded once", stream=stream)
    assert result.text == "Now I have time."
    assert [entry["response"]["status"] for entry in await client.journal()] == [429, 200]


@both_ways
async def test_a_refused_key_is_an_error_with_the_servers_words(client: Client, stream: bool) -> None:
    with pytest.raises(CompactedLLMProviderError, match="That key opens nothing") as caught:
        await client.run("refused", stream=stream)
    assert (caught.value.status, caught.value.compacted.category) == (401, "auth-failure")
