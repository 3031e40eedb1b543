"""`create_agent()`, the options of a call, and what the environment decides."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import TextPart, assistant, user
from lousho_ray.option_checks import warn_deprecated
from lousho_ray.options import Limits, ModelSettings
from lousho_ray.ports import GenerateOptions
from lousho_ray.providers.mock import MockProvider
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool, tool
from tests.unit.loop_support import PolicyProvider, agent_of, calls, plain, shape

# --------------------------------------------------------------------------------------------------------------- the keywords


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("max_step", "max_steps"),
        ("maxSteps", "max_steps"),
        ("toolConcurrency", "tool_concurrency"),
        ("nonsense", "Allowed"),
        ("session_id", "send"),
        ("metadata", "send"),
        ("turn_policy", "session"),
    ],
)
def test_an_unknown_keyword_says_where_it_belongs(given: str, says: str) -> None:
    # CA-04, CA-D6
    with pytest.raises(ConfigurationError) as caught:
        create_agent(**{given: 1})
    assert caught.value.field == given
    assert says in caught.value.detail


@pytest.mark.parametrize(("given", "says"), [("limits", "create_agent"), ("tools", "create_agent"), ("model", "create_agent")])
async def test_an_unknown_keyword_of_a_call_says_where_it_belongs(given: str, says: str) -> None:
    # CA-33
    for target in (agent_of("x"), agent_of("x").session()):
        with pytest.raises(ConfigurationError) as caught:
            await target.send("Hi", **{given: 1})
        assert caught.value.field == given
        assert says in caught.value.detail


async def test_a_session_takes_no_session_id() -> None:
    # CA-33
    with pytest.raises(ConfigurationError) as caught:
        await agent_of("x").session().send("Hi", session_id="s")
    assert caught.value.field == "session_id"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": 5}, "name"),
        ({"description": ""}, "description"),
        ({"instructions": 5}, "instructions"),
        ({"model": 5}, "model"),
        ({"provider": "openai"}, "provider"),
        ({"provider": object()}, "provider"),
        ({"provider": MockProvider}, "provider"),
        ({"model_settings": {"temperature": 3}}, "model_settings.temperature"),
        ({"model_settings": {"temperature": True}}, "model_settings.temperature"),
        ({"model_settings": {"top_p": math.nan}}, "model_settings.top_p"),
        ({"model_settings": {"stop": "END"}}, "model_settings.stop"),
        ({"model_settings": {"max_tokens": 0}}, "model_settings.max_tokens"),
        ({"model_settings": {"maxTokens": 5}}, "model_settings.maxTokens"),
        ({"model_settings": {"seed": 1.5}}, "model_settings.seed"),
        ({"model_settings": {"tool_choice": "any"}}, "model_settings.tool_choice"),
        ({"model_settings": 5}, "model_settings"),
        ({"rate_limit": {"max_concurrent": 0}}, "rate_limit.max_concurrent"),
        ({"rate_limit": 5}, "rate_limit"),
        ({"retry": {"max_retries": -1}}, "retry.max_retries"),
        ({"retry": True}, "retry"),
        ({"fallback_models": "openai/gpt-4o"}, "fallback_models"),
        ({"reasoning": "huge"}, "reasoning"),
        ({"reasoning": {"effort": "low", "budget": 5}}, "reasoning.budget"),
        ({"prompt_caching": True}, "prompt_caching"),
        ({"prompt_caching": 0}, "prompt_caching"),
        ({"prompt_caching": "on"}, "prompt_caching"),
        ({"hooks": [object()]}, "hooks"),
        ({"tools": [5]}, "tools"),
        ({"max_tool_result_chars": 0}, "max_tool_result_chars"),
        ({"max_tool_result_chars": -math.inf}, "max_tool_result_chars"),
        ({"max_tool_result_chars": 1.5}, "max_tool_result_chars"),
        ({"on_event": "print"}, "on_event"),
        ({"approve": True}, "approve"),
        ({"store": object()}, "store"),
        ({"runtime": "cloud"}, "runtime"),
        ({"subagents": [1]}, "subagents"),
        ({"limits": {"max_tokens": 0}}, "limits.max_tokens"),
    ],
)
def test_what_cannot_be_used_is_named(options: dict[str, Any], field: str) -> None:
    # CA-03, CA-06, CA-11, CA-20, CA-26, CA-27, RUN-05, TOOL-D
    with pytest.raises(ConfigurationError) as caught:
        create_agent(**{"provider": MockProvider(), **options})
    assert (caught.value.field, caught.value.code) == (field, "LOUSHO_CONFIG_INVALID")
    assert caught.value.hint


def test_none_means_not_given() -> None:
    # CA-05
    names = ("instructions", "tools", "name", "limits", "max_steps", "tool_concurrency", "hooks", "rate_limit", "retry", "store")
    agent = create_agent(provider=MockProvider(), **dict.fromkeys(names))
    assert agent.name == "agent"
    assert agent.definition.instructions == "You are a helpful assistant."


async def test_option_objects_are_copied() -> None:
    # CA-05
    limits, settings, tools, hooks = {"max_steps": 1}, {"seed": 1}, [plain("a")], list[Any]()
    model = mock_model(["Done"])
    agent = create_agent(provider=model, limits=limits, model_settings=settings, tools=tools, hooks=hooks)
    limits["max_steps"], settings["seed"] = 9, 9
    tools.append(plain("b"))
    hooks.append(object())
    await agent.send("Hi")
    assert agent.definition.limits.max_steps == 1
    assert dict(model.calls[0].settings) == {"seed": 1}
    assert [item.name for item in model.calls[0].tools] == ["a"]


async def test_models_are_as_good_as_dicts() -> None:
    # CA-05
    model = mock_model(["Done"])
    agent = create_agent(provider=model, limits=Limits(max_steps=3), model_settings=ModelSettings(seed=4, stop=["x"]))
    await agent.send("Hi", model_settings=ModelSettings(temperature=0.5))
    assert dict(model.calls[0].settings) == {"seed": 4, "stop": ["x"], "temperature": 0.5}


def test_prompt_is_a_deprecated_alias() -> None:
    # CA-13: one warning per process, not one per place
    warn_deprecated.cache_clear()
    with pytest.warns(DeprecationWarning, match="instructions") as warned:
        agent = create_agent(provider=MockProvider(), prompt="Be brief.")
    assert agent.definition.instructions == "Be brief."
    assert [warning.filename for warning in warned] == [__file__]
    create_agent(provider=MockProvider(), prompt="Be long.")  # a second warning would be an error
    with pytest.raises(ConfigurationError) as caught:
        create_agent(provider=MockProvider(), prompt="a", instructions="a")
    assert caught.value.code == "LOUSHO_CONFIG_CONFLICTING_OPTIONS"


async def test_empty_instructions_are_kept() -> None:
    # CA-13
    model = mock_model(["Done"])
    await create_agent(provider=model, instructions="").send("Hi")
    assert model.calls[0].messages[0].text == ""


def test_creating_an_agent_imports_and_starts_nothing() -> None:
    # CA-02
    script = (
        "import sys, asyncio, threading; import lousho_ray; from lousho_ray.providers.mock import MockProvider;"
        "agent = lousho_ray.create_agent(provider=MockProvider());"
        "agent2 = lousho_ray.create_agent(model='openai/gpt-4o-mini');"
        "bad = [m for m in ('ray', 'openai', 'anthropic', 'mcp', 'aiosqlite', 'httpx2') if m in sys.modules];"
        "assert not bad, bad; assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"OPENAI_API_KEY": "k"}, check=False)
    assert done.returncode == 0, done.stderr


async def test_the_same_agent_runs_many_times_at_once() -> None:
    # CA-08
    async def policy(options: GenerateOptions) -> str:
        await asyncio.sleep(0)
        return f"re: {options.messages[-1].text} {options.get('seed')}"

    agent = create_agent(provider=PolicyProvider(policy))
    sent = [agent.send(f"m{number}", model_settings={"seed": number}) for number in range(20)]
    texts = [result.text for result in await asyncio.gather(*sent)]
    assert texts == [f"re: m{number} {number}" for number in range(20)]


# ------------------------------------------------------------------------------------------------------------------ each call


async def test_settings_of_a_call_win_key_by_key_for_that_run() -> None:
    # RUN-06, CA-28, CA-29
    model = mock_model([calls("a"), "Done", "Done"])
    agent = create_agent(provider=model, tools=[plain("a")], model_settings={"temperature": 1, "seed": 1, "stop": []})
    await agent.send("Hi", model_settings={"seed": 2, "top_p": 0.5, "temperature": None})
    await agent.send("Hi")
    assert [dict(call.settings) for call in model.calls] == [
        {"temperature": 1, "seed": 2, "top_p": 0.5},
        {"temperature": 1, "seed": 2, "top_p": 0.5},
        {"temperature": 1, "seed": 1},
    ]
    assert model.calls[0].model is None


async def test_tool_choice_is_left_out_without_tools() -> None:
    # RUN-06, CA-30
    model = mock_model(["Done"])
    await create_agent(provider=model, model_settings={"tool_choice": "required"}).send("Hi")
    assert dict(model.calls[0].settings) == {}


async def test_a_forced_tool_choice_does_not_keep_the_run_from_ending() -> None:
    model = mock_model([calls("a"), "Done"])
    await create_agent(provider=model, tools=[plain("a")], model_settings={"tool_choice": "required"}).send("Hi")
    assert [call.settings.get("tool_choice") for call in model.calls] == ["required", None]


async def test_instructions_of_a_call_extend_every_request_and_are_stored_nowhere() -> None:
    # RUN-07, CA-34
    model = mock_model([calls("a"), "Done", "Done"])
    agent = create_agent(provider=model, instructions="Be brief.", tools=[plain("a")])
    session = agent.session()
    result = await session.send("Hi", instructions="In French.")
    await session.send("Hi")
    prompts = [call.messages[0].text for call in model.calls]
    assert prompts == ["Be brief.\n\nIn French."] * 2 + ["Be brief."]
    assert result.messages[0].text == "Be brief."
    assert all("French" not in message.text for message in session.messages)


@pytest.mark.parametrize("options", [{"instructions": ""}, {"instructions": 5}, {"metadata": 5}, {"reasoning": "huge"}])
async def test_a_wrong_option_of_a_call_is_named(options: dict[str, Any]) -> None:
    # CA-34, CA-35
    provider = PolicyProvider(lambda request: "never")
    agent = create_agent(provider=provider)
    with pytest.raises(ConfigurationError) as caught:
        await agent.send("Hi", **options)
    assert caught.value.field == next(iter(options))
    assert provider.calls == 0


async def test_reasoning_of_a_call_replaces_the_agents() -> None:
    # CA-35
    model = mock_model(["Done", "Done"])
    agent = create_agent(provider=model, reasoning={"effort": "low", "budget_tokens": 100})
    await agent.send("Hi", reasoning="high")
    await agent.send("Hi")
    first, second = (call.reasoning for call in model.calls)
    assert first is not None
    assert second is not None
    assert (first.effort, first.budget_tokens) == ("high", None)
    assert (second.effort, second.budget_tokens) == ("low", 100)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("Hi", ["user:Hi"]),
        ([TextPart("Hi"), TextPart("!")], ["user:Hi!"]),
        (TextPart("Hi"), ["user:Hi"]),
        ([{"type": "text", "text": "Hi"}], ["user:Hi"]),
        ([user("a"), assistant("b"), user("c")], ["user:a", "assistant:b", "user:c"]),
        ([{"role": "user", "content": "Hi"}], ["user:Hi"]),
        (user("Hi"), ["user:Hi"]),
        ((user("Hi"),), ["user:Hi"]),
    ],
)
async def test_forms_of_input(given: Any, wanted: list[str]) -> None:
    # RUN-02, RUN-12, CA-38
    model = mock_model(["Done"])
    await create_agent(provider=model).send(given)
    assert shape(model.calls[0].messages)[1:] == wanted


@pytest.mark.parametrize("given", [5, b"x", [1], [user("a"), "b"], [TextPart("a"), user("b")], [{"type": "odd"}], {"role": "user"}])
async def test_other_input_is_refused(given: Any) -> None:
    # RUN-02
    with pytest.raises(ConfigurationError) as caught:
        await agent_of("never").send(given)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "input")


async def test_no_input_is_refused() -> None:
    # RUN-01
    with pytest.raises(ConfigurationError) as caught:
        await agent_of("never").send(None)  # type: ignore[arg-type]
    assert caught.value.code == "LOUSHO_CONFIG_MISSING_INPUT"


async def test_a_model_next_to_a_provider_is_a_bare_id() -> None:
    # RUN-14, CA-10
    model = mock_model(["Done"])
    result = await create_agent(provider=model, model="some/odd/id").send("Hi")
    assert model.calls[0].model == "some/odd/id"
    assert result.step_usage[0].model == "some/odd/id"


# ---------------------------------------------------------------------------------------------------------- functions of the run


async def test_functions_are_called_once_a_run_with_who_and_what() -> None:
    # CA-14, CA-16
    seen: list[tuple[str, Any]] = []

    def note(option: str, value: Any) -> Any:
        async def resolve(who: Any) -> Any:
            seen.append((option, (shape(who.input), who.session_id, who.metadata, who.principal)))
            return value

        return resolve

    model = mock_model([calls("a"), "Done", "Done"])
    agent = create_agent(
        provider=model,
        model=note("model", "m-1"),
        instructions=note("instructions", "Be brief."),
        tools=note("tools", [plain("a")]),
    )
    assert seen == []
    session = agent.session(id="s")
    await session.send("Hi", metadata={"k": 1}, principal="me")
    assert sorted(option for option, _ in seen) == ["instructions", "model", "tools"]
    assert {str(who) for _, who in seen} == {str((["user:Hi"], "s", {"k": 1}, "me"))}
    await session.send("Again")
    assert len(seen) == 6
    assert [call.model for call in model.calls] == ["m-1"] * 3
    assert [call.messages[0].text for call in model.calls] == ["Be brief."] * 3


async def test_sync_functions_and_model_strings() -> None:
    # CA-15, CA-16
    agent = create_agent(model=lambda who: f"mock/{who.metadata['model']}")
    assert (await agent.send("Hi", metadata={"model": "m1"})).ok


@pytest.mark.parametrize("option", ["model", "instructions", "tools"])
async def test_a_function_that_raises_stops_the_run_before_it_starts(option: str) -> None:
    # RUN-09, CA-15, TOOL-07
    def fail(who: Any) -> Any:
        raise LookupError("not found")

    provider = PolicyProvider(lambda options: "never")
    session = create_agent(provider=provider, **{option: fail}).session(id="s")
    with pytest.raises(ConfigurationError) as caught:
        await session.send("Hi")
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_RESOLVER_FAILED", option)
    assert isinstance(caught.value.__cause__, LookupError)
    assert provider.calls == 0
    assert await session.load() == []


@pytest.mark.parametrize(
    ("option", "value"), [("model", 5), ("instructions", 5), ("instructions", None), ("tools", 5), ("tools", None)]
)
async def test_a_function_that_returns_the_wrong_thing(option: str, value: Any) -> None:
    # CA-15
    with pytest.raises(ConfigurationError) as caught:
        await create_agent(provider=MockProvider(), **{option: lambda who: value}).send("Hi")
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_RESOLVER_FAILED", option)


async def test_tools_of_a_function_get_every_check() -> None:
    # CA-15, CA-21, TOOL-06, TOOL-08
    with pytest.raises(ConfigurationError, match="a"):
        await create_agent(provider=MockProvider(), tools=lambda who: [plain("a"), plain("a")]).send("Hi")
    child = agent_of("x", description="Works.")
    lead = create_agent(provider=MockProvider(), tools=lambda who: [plain("task")], subagents={"w": child})
    with pytest.raises(ConfigurationError, match="task"):
        await lead.send("Hi")


async def test_the_input_of_a_subagents_functions_is_its_prompt() -> None:
    # CA-17
    seen: list[Any] = []

    def instructions(who: Any) -> str:
        seen.append((shape(who.input), who.session_id, who.principal))
        return "Dig."

    child = agent_of("Found", name="w", description="Works.", instructions=instructions)
    task = ("task", {"agent": "w", "prompt": "Dig here", "description": "d"})
    await agent_of(calls(task), "Done", subagents={"w": child}).session(id="s").send("Hi", principal="me")
    assert seen == [(["user:Dig here"], None, "me")]


async def test_forms_of_tools() -> None:
    # TOOL-06, TOOL-08, TOOL-09
    @tool
    def first() -> str:
        """First."""
        return "1"

    def second() -> str:
        """Second."""
        return "2"

    model = mock_model(["Done"])
    await create_agent(provider=model, tools=[first, [second, [plain("third")]], {"fourth": plain("x")}]).send("Hi")
    assert [item.name for item in model.calls[0].tools] == ["first", "second", "third", "fourth"]
    with pytest.raises(ConfigurationError, match="first"):
        create_agent(provider=MockProvider(), tools=[first, {"first": second}])
    needs = define_tool(name="x", description="X.", execute=lambda args: 1, needs_approval=True)
    assert create_agent(provider=MockProvider(), tools=[needs], approve=lambda call: True).name == "agent"


# ------------------------------------------------------------------------------------------------------------- the environment


def inner(agent: Any) -> tuple[str, str | None]:
    provider = agent.definition.provider
    return provider.name, provider.default_model


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"OPENAI_API_KEY": "k"}, ("openai", "gpt-4o-mini")),
        ({"ANTHROPIC_API_KEY": "k"}, ("anthropic", "claude-sonnet-4-5")),
        ({"OPENROUTER_API_KEY": "k"}, ("openrouter", "openai/gpt-4o-mini")),
        ({"OLLAMA_BASE_URL": "http://localhost:1"}, ("ollama", "llama3")),
        ({"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}, ("openai", "gpt-4o-mini")),
        ({"OLLAMA_BASE_URL": "http://localhost:1", "OPENROUTER_API_KEY": "k"}, ("openrouter", "openai/gpt-4o-mini")),
        ({"OPENAI_API_KEY": "  ", "ANTHROPIC_API_KEY": " k "}, ("anthropic", "claude-sonnet-4-5")),
        ({"LOUSHO_MODEL": "mock/m1", "OPENAI_API_KEY": "k"}, ("mock", "m1")),
        ({"LOUSHO_MODEL": "  ", "OPENAI_API_KEY": "k"}, ("openai", "gpt-4o-mini")),
        ({"LOUSHO_MODEL": " openai/gpt-5 ", "OPENAI_API_KEY": "k"}, ("openai", "gpt-5")),
    ],
)
def test_the_environment_chooses_the_model(
    environment: dict[str, str], wanted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # CA-01, CA-12, CA-44, CA-48
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert inner(create_agent()) == wanted


def test_nothing_in_the_environment_tells_every_way_out() -> None:
    # CA-45
    with pytest.raises(ConfigurationError) as caught:
        create_agent()
    assert caught.value.code == "LOUSHO_CONFIG_MISSING_PROVIDER"
    for word in (
        "model",
        "provider",
        "LOUSHO_MODEL",
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "OPENROUTER_API_KEY",
        "OLLAMA_BASE_URL",
    ):
        assert word in caught.value.detail


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("gpt-4o", "LOUSHO_PROVIDER_SPEC_INVALID"),
        ("openia/gpt-4o", "LOUSHO_PROVIDER_UNKNOWN"),
        ("anthropic/claude-x", "LOUSHO_PROVIDER_MISSING_API_KEY"),
    ],
)
def test_a_bad_lousho_model_fails_and_does_not_fall_through(model: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-46
    monkeypatch.setenv("LOUSHO_MODEL", model)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(ConfigurationError) as caught:
        create_agent()
    assert caught.value.code == code
    assert "LOUSHO_MODEL" in caught.value.detail


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("gpt-4o", "LOUSHO_PROVIDER_SPEC_INVALID"),
        ("/gpt-4o", "LOUSHO_PROVIDER_SPEC_INVALID"),
        ("openai/", "LOUSHO_PROVIDER_SPEC_INVALID"),
        ("nobody/x", "LOUSHO_PROVIDER_UNKNOWN"),
        ("openai/gpt-4o", "LOUSHO_PROVIDER_MISSING_API_KEY"),
    ],
)
def test_a_bad_model_string(model: str, code: str) -> None:
    # CA-09
    with pytest.raises(ConfigurationError) as caught:
        create_agent(model=model)
    assert caught.value.code == code
    if code == "LOUSHO_PROVIDER_MISSING_API_KEY":
        assert caught.value.detail.startswith("create_agent: OPENAI_API_KEY is not set")


def test_the_environment_is_read_at_creation_and_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-47
    monkeypatch.setenv("LOUSHO_MODEL", "mock/m1")
    agent = create_agent()
    monkeypatch.setenv("LOUSHO_MODEL", "mock/m2")
    assert inner(agent) == ("mock", "m1")
    assert inner(create_agent(model="mock/m3")) == ("mock", "m3")
    assert inner(create_agent(provider=MockProvider(default_model="m4"))) == ("mock", "m4")


def test_the_runtime_comes_from_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # DEC-R1
    def runtime(**options: Any) -> str:
        return create_agent(provider=MockProvider(), **options).runtime().name

    monkeypatch.delenv("LOUSHO_RUNTIME")
    assert runtime() == "ray"
    assert runtime(runtime="local") == "local"
    monkeypatch.setenv("LOUSHO_RUNTIME", "local")
    assert runtime() == "local"
    assert runtime(runtime="ray") == "ray"
    monkeypatch.setenv("LOUSHO_RUNTIME", "clod")
    with pytest.raises(ConfigurationError) as caught:
        runtime()
    assert caught.value.field == "LOUSHO_RUNTIME"


def test_no_key_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-49
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-value")
    agent = create_agent(name="bot")
    assert repr(agent) == "<Agent 'bot' provider='openai' model='gpt-4o-mini'>"
    assert "very-secret" not in repr(agent.definition)
    assert "very-secret" not in repr(agent.session())


# --------------------------------------------------------------------------------------------------------- retry and fallbacks


async def test_another_provider_is_only_retried_when_asked() -> None:
    # CA-18
    def failing() -> PolicyProvider:
        def policy(options: GenerateOptions) -> str:
            raise ConnectionError("gone")

        return PolicyProvider(policy)

    for options, tries in (({}, 1), ({"retry": {"max_retries": 2, "backoff": {"initial_ms": 0}}}, 3), ({"retry": False}, 1)):
        provider = failing()
        with pytest.raises(Exception, match="gone"):
            await create_agent(provider=provider, **options).send("Hi")
        assert provider.calls == tries


async def test_fallbacks_are_tried_in_order_and_every_call_starts_at_the_first() -> None:
    # CA-19, CA-D4
    broken = mock_model([RuntimeError("1"), RuntimeError("2")], name="first")
    second = mock_model([calls("a"), "Done"], name="second")
    result = await create_agent(provider=broken, fallback_models=[second], tools=[plain("a")]).send("Hi")
    assert result.ok
    assert len(broken.calls) == 2
    assert len(second.calls) == 2


async def test_an_agent_closes_its_clients_and_can_be_used_again() -> None:
    # CA-50, CA-51
    closed: list[int] = []

    class Closing(PolicyProvider):
        async def aclose(self) -> None:
            closed.append(1)

    async with create_agent(provider=Closing(lambda options: "Done")) as agent:
        assert (await agent.send("Hi")).ok
    assert closed == [1]
    assert (await agent.send("Hi")).ok
    await agent.close()
    await create_agent(provider=mock_model(["x"])).close()
