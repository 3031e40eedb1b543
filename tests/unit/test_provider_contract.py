"""What the loop and a provider promise each other."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import lousho_ray
from lousho_ray import GenerateOptions, GenerateResult, LLMProviderError, ToolCall, create_agent, with_retry
from lousho_ray.ports import ServedBy
from tests.unit.loop_support import PolicyProvider, plain

PACKAGE = Path(lousho_ray.__file__).parent


class Smallest:
    """A provider with nothing but what the contract asks for."""

    name = "smallest"

    def __init__(self, default_model: str | None = "small-1") -> None:
        self.default_model = default_model
        self.requests: list[GenerateOptions] = []

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        self.requests.append(options)
        if len(self.requests) == 1 and options.tools:
            return GenerateResult("", tool_calls=(ToolCall("call_1", "look", "{}"),))
        return GenerateResult("Done")


async def test_a_provider_needs_a_name_a_model_and_generate() -> None:
    # PRV-01: what is missing means "no": a stream is then the whole reply in one part.
    run = create_agent(provider=Smallest()).stream("Hi")
    texts = [event.text async for event in run if event.type == "text.delta"]
    assert texts == ["Done"]


async def test_a_call_is_one_turn_and_the_loop_runs_the_tools() -> None:
    # PRV-06
    log: list[str] = []
    provider = Smallest()
    result = await create_agent(provider=provider, tools=[plain("look", log=log)]).send("Hi")
    assert (len(provider.requests), len(log), result.steps) == (2, 1, 2)


@pytest.mark.parametrize(
    ("settings", "sent"),
    [({}, {}), ({"seed": 5}, {"seed": 5}), ({"temperature": 0.0, "stop": ["x"]}, {"temperature": 0.0, "stop": ["x"]})],
)
async def test_a_setting_nobody_set_is_absent(settings: dict[str, Any], sent: dict[str, Any]) -> None:
    # PRV-03
    provider = Smallest()
    await create_agent(provider=provider, model_settings=settings).send("Hi")
    request = provider.requests[0]
    assert dict(request.settings) == sent
    assert request.get("top_p", "absent") == "absent"
    with pytest.raises(AttributeError):
        request.model = "other"  # type: ignore[misc]


async def test_the_model_is_the_agents_else_the_providers_default() -> None:
    # PRV-19
    chosen, default = Smallest(), Smallest()
    await create_agent(provider=chosen, model="large-2").send("Hi")
    await create_agent(provider=default).send("Hi")
    assert [provider.requests[0].model or provider.default_model for provider in (chosen, default)] == ["large-2", "small-1"]


@pytest.mark.parametrize(("retry", "requests"), [(None, 4), ({"max_retries": 1}, 2)])
async def test_retries_of_a_wrapped_provider_are_not_multiplied(retry: Any, requests: int) -> None:
    # PRV-71
    def down(options: GenerateOptions) -> str:
        raise ConnectionError("The server is down.")

    provider = PolicyProvider(down)
    wrapped = with_retry(provider, max_retries=3, backoff={"initial_ms": 0})
    more = {} if retry is None else {"retry": {**retry, "backoff": {"initial_ms": 0}}}
    with pytest.raises(LLMProviderError):
        await create_agent(provider=wrapped, **more).send("Hi")
    assert provider.calls == requests


async def test_who_answered_is_who_the_usage_is_booked_under() -> None:
    # PRV-19: a reply that names another model than the one asked for is booked under its own.
    reply = GenerateResult("Done", served_by=ServedBy("policy", "other-3"))
    result = await create_agent(provider=PolicyProvider(lambda options: reply)).send("Hi")
    assert result.step_usage[0].model == "other-3"


def test_no_module_uses_the_http_client_that_the_vendors_clients_refuse() -> None:
    # PRV-15
    imported = {
        name.partition(".")[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "httpx" not in imported
