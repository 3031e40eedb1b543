"""PiProvider: one id space over the built-in providers."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import ReasoningBlock, user
from lousho_ray.ports import FinishChunk, GenerateOptions, ServedBy, TextChunk
from lousho_ray.providers.pi import PiProvider
from lousho_ray.providers.prices import get_model_info
from lousho_ray.providers.resolve import resolve_provider
from lousho_ray.testing.fake_server import FakeServer, Reply, hold, ollama_line


def options(model: str | None = None, **rest: Any) -> GenerateOptions:
    return GenerateOptions([user("Hi")], model=model, **rest)


@pytest.fixture
async def pi(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PiProvider]:
    """Default model on Anthropic with a key of its own; Ollama by its variable."""
    monkeypatch.setenv("OLLAMA_BASE_URL", fake_server.url)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.delenv("LOUSHO_EVAL_CASSETTES", raising=False)
    default = "pi/anthropic/claude-sonnet-4-5"
    provider = PiProvider(default_model=default, api_key="anthropic-key", base_url=fake_server.url, timeout_ms=30_000)
    yield provider
    await provider.aclose()


async def test_the_default_model_goes_to_its_provider(pi: PiProvider, fake_server: FakeServer) -> None:
    # PRV-60, PRV-81
    fake_server.respond(Reply(text="ok", reasoning="hm"))
    result = await pi.generate(options())
    assert result.text == "ok"
    assert result.reasoning == (ReasoningBlock("hm", "signature_1", None, "anthropic", "claude-sonnet-4-5"),)
    assert result.served_by == ServedBy("pi", "anthropic/claude-sonnet-4-5")
    assert (fake_server.requests[0].route, fake_server.bodies[0]["model"]) == ("messages", "claude-sonnet-4-5")


@pytest.mark.parametrize("model", ["ollama/hf.co/me/own:8b", "pi/ollama/hf.co/me/own:8b"])
async def test_another_model_goes_to_another_provider_without_the_first_one_s_key(
    model: str, pi: PiProvider, fake_server: FakeServer
) -> None:
    # PRV-60, PRV-60b
    fake_server.respond(Reply(text="ok there"))
    chunks = [chunk async for chunk in pi.stream(options(model))]
    assert chunks[0] == TextChunk("ok ")
    assert isinstance(chunks[-1], FinishChunk)
    assert chunks[-1].served_by == ServedBy("pi", "ollama/hf.co/me/own:8b")
    (request,) = fake_server.requests
    assert (request.route, request.body["model"]) == ("ollama", "hf.co/me/own:8b")
    assert "anthropic-key" not in str(request.headers)


async def test_closing_a_stream_early_closes_the_connection(pi: PiProvider, fake_server: FakeServer) -> None:
    # PRV-09
    fake_server.on("ollama", ollama_line({"content": "one"}), hold)
    stream = pi.stream(options("ollama/m"))
    assert await anext(stream) == TextChunk("one")
    await stream.aclose()
    await fake_server.wait_closed(fake_server.requests[0])


async def test_the_own_key_of_another_provider_is_needed(pi: PiProvider) -> None:
    # PRV-60
    with pytest.raises(ConfigurationError, match="OPENROUTER_API_KEY") as caught:
        await pi.generate(options("openrouter/openai/gpt-4o-mini"))
    assert caught.value.code == "LOUSHO_PROVIDER_MISSING_API_KEY"


@pytest.mark.parametrize(
    ("model", "code", "says"),
    [
        ("openrooter/openai/gpt-4o", "LOUSHO_PROVIDER_UNKNOWN", "'pi/openrouter/openai/gpt-4o'"),
        ("openai/gpt-4o-minni", "LOUSHO_PROVIDER_UNKNOWN", "'pi/openai/gpt-4o-mini'"),
        ("pi/pi/openai/gpt-4o", "LOUSHO_PROVIDER_UNKNOWN", "no provider 'pi'"),
        ("gpt-4o", "LOUSHO_PROVIDER_SPEC_INVALID", "pi/<provider>/<model>"),
    ],
)
async def test_unknown_names_are_refused_with_a_suggestion(model: str, code: str, says: str, pi: PiProvider) -> None:
    # PRV-60b
    for refused in (lambda: PiProvider(default_model=model), lambda: pi._route(options(model))):
        with pytest.raises(ConfigurationError) as caught:
            refused()
        assert (caught.value.code, caught.value.field) == (code, "model")
        assert says in caught.value.detail


async def test_hosted_tools_are_refused_before_any_request(pi: PiProvider, fake_server: FakeServer) -> None:
    # PRV-60b
    assert not pi.supports_hosted_tool("web_search")
    with pytest.raises(ConfigurationError, match="web_search") as caught:
        await pi.generate(options(hosted_tools=("web_search",)))
    assert caught.value.code == "LOUSHO_HOSTED_TOOL_UNSUPPORTED"
    assert fake_server.requests == []


async def test_known_models_are_listed_and_priced_in_pi_s_ids(pi: PiProvider) -> None:
    # PRV-60b
    models = await pi.get_models()
    assert {"openai/gpt-4o-mini", "anthropic/claude-sonnet-4-5"} <= set(models)
    assert get_model_info("pi/openai/gpt-4o-mini") == get_model_info("openai/gpt-4o-mini") is not None


async def test_a_mock_may_be_nested() -> None:
    # PRV-D8
    provider = resolve_provider("pi/mock/anything")
    assert isinstance(provider, PiProvider)
    result = await provider.generate(options())
    assert result.served_by == ServedBy("pi", "mock/anything")
    assert [type(chunk) for chunk in [chunk async for chunk in provider.stream(options())]] == [TextChunk, FinishChunk]


def test_a_provider_travels_as_its_configuration() -> None:
    # PRV-14
    provider = PiProvider(default_model="openai/gpt-4o-mini", api_key="k", timeout_ms=5)
    assert pickle.loads(pickle.dumps(provider)).configuration() == provider.configuration()
