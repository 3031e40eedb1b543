"""How the options of an agent and of a call work together, and what becomes of them when a run goes on later."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest

from lousho_ray.agent_options import CreateAgentOptions
from lousho_ray.context.strategies import prune_tool_results_strategy, two_phase_strategy
from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.messages import ToolCall, user
from lousho_ray.options import ModelSettings
from lousho_ray.ports import GenerateOptions, GenerateResult, ResponseFormat
from lousho_ray.providers import OpenAICompatibleProvider, OpenAIProvider
from lousho_ray.providers.anthropic_wire import build_request
from lousho_ray.providers.mock import MockProvider
from lousho_ray.stores.memory import InMemoryApprovalStore, MemorySessionStore, memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from tests.unit.compaction_support import conversation, work
from tests.unit.loop_support import PolicyProvider, agent_of, calls, kinds, plain, results, shape

TASK = ("task", {"agent": "w", "prompt": "Dig", "description": "d"})


def pay(**options: Any) -> Any:
    return define_tool(name="pay", description="Pays.", execute=lambda args: "paid", needs_approval=True, **options)


# -------------------------------------------------------------------------------------------------------------- shared options


async def test_shared_options_are_a_dict_and_later_keys_win() -> None:
    # CA-07
    model = mock_model(["Done"])
    shared: CreateAgentOptions = {"provider": model, "instructions": "Be brief.", "max_steps": 3}
    overrides: CreateAgentOptions = {"instructions": "Be long.", "model_settings": {"seed": 1}}
    agent = create_agent(**{**shared, **overrides})
    await agent.send("Hi")
    assert model.calls[0].messages[0].text == "Be long."
    assert agent.definition.max_steps == 3


def test_the_checks_run_on_the_merged_options() -> None:
    # CA-07
    shared: CreateAgentOptions = {"provider": MockProvider(), "instructions": "a", "model": "m"}
    with pytest.raises(ConfigurationError) as caught:
        create_agent(**{**shared, "prompt": "b"})
    assert caught.value.code == "LOUSHO_CONFIG_CONFLICTING_OPTIONS"


def test_every_keyword_of_the_typed_dict_is_one_of_create_agent() -> None:
    # CA-07, CA-04
    for name in CreateAgentOptions.__annotations__:
        create_agent(**{name: None, "provider": MockProvider()})


# ------------------------------------------------------------------------------------------------------------------ one by one


@pytest.mark.parametrize("name", ["Ann's bot", "研究", "a/b c.d", "x" * 300])
async def test_a_name_may_hold_any_characters(name: str) -> None:
    # CA-D7
    assert (await agent_of("Done", name=name).send("Hi")).agent_name == name


def test_the_default_model_of_anthropic_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-D5
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    assert create_agent().definition.provider.default_model == "claude-sonnet-4-5"  # type: ignore[union-attr]


def test_a_value_that_one_provider_refuses_is_neither_clamped_nor_checked_before() -> None:
    # CA-31, CA-D8
    settings = {"temperature": 1.7, "stop": ("a", "b", "c", "d", "e")}
    create_agent(provider=MockProvider(), model_settings=settings)
    request = build_request(GenerateOptions([user("Hi")], settings=settings), "claude-3-5-haiku-latest", lambda key, text: None)
    body = json.loads(request.encode())
    assert (body["temperature"], body["stop_sequences"]) == (1.7, ["a", "b", "c", "d", "e"])


async def test_the_smaller_of_both_step_limits_wins() -> None:
    # CA-23
    for option, limit, wanted in ((2, 5, 2), (5, 2, 2)):
        agent = create_agent(
            provider=mock_model([calls("a")], "repeat-last"),
            tools=[plain("a")],
            max_steps=option,
            limits={"max_steps": limit},
        )
        assert (await agent.send("Go")).steps == wanted


async def test_listening_makes_send_stream_its_model_calls() -> None:
    # CA-23, EVT-12
    deltas: list[str] = []
    agent = agent_of("One two", on_event=lambda event: deltas.append(event.text) if event.type == "text.delta" else None)
    await agent.send("Hi")
    assert deltas == ["One ", "two"]


async def test_a_subagent_uses_its_own_settings_and_a_side_call_nobodys() -> None:
    # CA-32
    summary = mock_model(["Summary"], "repeat-last")
    child_model = mock_model(["Found"])
    child = create_agent(provider=child_model, name="w", description="Works.", model_settings={"seed": 2}, reasoning="low")
    model = mock_model([calls(TASK), "Done"])
    lead = create_agent(
        provider=model,
        subagents={"w": child},
        model_settings={"seed": 1, "temperature": 0.5},
        reasoning="high",
        compaction={"summarizer": summary, "context_window": 300, "threshold_percent": 0.1, "protected_tokens": 1},
    )
    await lead.send([user("old " * 400), user("Go")], model_settings={"top_p": 0.1})
    assert [dict(call.settings) for call in child_model.calls] == [{"seed": 2}]
    assert [call.reasoning.effort for call in child_model.calls if call.reasoning] == ["low"]
    assert all(dict(call.settings) == {"seed": 1, "temperature": 0.5, "top_p": 0.1} for call in model.calls)
    for call in summary.calls:
        assert not {"seed", "temperature", "top_p"} & set(call.settings)
        assert call.reasoning is None


# ---------------------------------------------------------------------------------------------------------------------- stores


async def test_each_part_of_a_store_is_a_default_of_its_own() -> None:
    # CA-22
    store, sessions, approvals = memory_store(), MemorySessionStore(), InMemoryApprovalStore()

    def agent(**options: Any) -> Any:
        return agent_of(calls("pay"), "Done", tools=[pay()], store=store, **options)

    paused = await agent().session("a").send("Go")
    assert await store.approvals.load(paused.approval_id) is not None
    assert await store.checkpoints.load("a.turn-0") is not None
    await agent_of("Done", store=store).session("b", store=sessions).send("Hi")
    assert await sessions.load("b")
    assert not await store.sessions.load("b")
    plain_run = await agent(approval_store=approvals).send("Go")
    assert await approvals.load(plain_run.approval_id) is not None
    assert await store.approvals.load(plain_run.approval_id) is None


# ------------------------------------------------------------------------------------------------- a run that goes on later


async def test_what_a_call_gave_is_gone_when_a_decision_continues_its_run() -> None:
    # CA-37
    model = mock_model([calls("pay"), "Done"])
    agent = create_agent(
        provider=model, tools=[pay()], instructions="Be brief.", model_settings={"seed": 1}, reasoning="low", max_steps=4
    )
    paused = await agent.send("Go", instructions="In French.", model_settings={"seed": 2}, reasoning="high", max_steps=1)
    assert paused.finish_reason == "awaiting-approval"
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert result.ok  # a second step: the call's max_steps=1 is gone
    first, second = model.calls
    assert (first.messages[0].text, dict(first.settings)) == ("Be brief.\n\nIn French.", {"seed": 2})
    assert (second.messages[0].text, dict(second.settings)) == ("Be brief.", {"seed": 1})
    assert [call.reasoning.effort for call in model.calls if call.reasoning] == ["high", "low"]


@pytest.mark.parametrize("durable", [False, True])
async def test_a_paused_run_keeps_its_model_and_asks_for_tools_again_with_what_it_began_with(durable: bool) -> None:
    # CA-17, DUR-45
    asked: list[Any] = []
    models = iter(["first", "second", "third"])

    def tools(who: Any) -> Any:
        asked.append((shape(who.input), who.session_id, dict(who.metadata), who.principal))
        return [pay()]

    store = memory_store() if durable else None
    model = mock_model([calls("pay"), "Done"])
    agent = create_agent(provider=model, model=lambda who: next(models), tools=tools, store=store)
    paused = await agent.session("s").send([user("Go"), user("now")], metadata={"k": 1}, principal="me")
    await agent.approvals.resolve(paused.approval_id, approved=True)
    assert [call.model for call in model.calls] == ["first", "first"]
    assert asked == [(["user:Go", "user:now"], "s", {"k": 1}, "me")] * 2


async def test_another_agent_object_keeps_the_model_of_a_paused_run() -> None:
    # CA-17, DUR-45: as in another process.
    store = memory_store()

    def agent(turn: Any, chosen: str) -> Any:
        return create_agent(provider=mock_model([turn]), model=lambda who: chosen, tools=[pay()], store=store)

    first = agent(calls("pay"), "m-1")
    paused = await first.session("s").send("Go")
    second = agent("Done", "m-2")
    await second.approvals.resolve(paused.approval_id, approved=True)
    assert second.definition.provider.calls[0].model == "m-1"


async def test_a_new_turn_asks_for_its_model_again() -> None:
    # CA-14, CA-17
    models = iter(["first", "second"])
    model = mock_model(["One", "Two"])
    session = create_agent(provider=model, model=lambda who: next(models), store=memory_store()).session("s")
    await session.send("Hi")
    await session.send("Hi")
    assert [call.model for call in model.calls] == ["first", "second"]


async def test_a_model_string_of_a_paused_run_is_resolved_again_with_retry_and_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-15, CA-17
    made: list[str] = []

    def build(spec: str, **options: Any) -> Any:
        made.append(spec)
        return mock_model([calls("pay")] if len(made) == 1 else [ConnectionError("gone"), "Done"])

    monkeypatch.setattr("lousho_ray.providers.resolve.resolve_provider", build)
    specs = iter(["mock/a", "mock/b"])
    retry = {"max_retries": 1, "backoff": {"initial_ms": 0}}
    agent = create_agent(model=lambda who: next(specs), tools=[pay()], retry=retry)
    paused = await agent.send("Go")
    assert (await agent.approvals.resolve(paused.approval_id, approved=True)).text == "Done"
    assert made == ["mock/a", "mock/a"]


# --------------------------------------------------------------------------------------------------------- slips and their advice


@pytest.mark.parametrize(
    ("call", "name", "says"),
    [
        ("create_agent", "session_id", "agent.send()"),
        ("create_agent", "metadata", "agent.send()"),
        ("create_agent", "principal", "agent.send()"),
        ("create_agent", "cancel", "agent.send()"),
        ("create_agent", "turn_policy", "agent.session()"),
        ("create_agent", "sessionId", "agent.send()"),
        ("send", "tools", "create_agent()"),
        ("send", "output", "create_agent()"),
        ("send", "hooks", "create_agent()"),
        ("send", "turn_policy", "agent.session()"),
        ("send", "maxSteps", "max_steps"),
        ("session", "tools", "create_agent()"),
        ("session", "metadata", "agent.send()"),
        ("session", "turnPolicy", "turn_policy"),
    ],
)
async def test_an_option_in_the_wrong_place_says_where_it_belongs(call: str, name: str, says: str) -> None:
    # CA-04, CA-33, CA-D6
    agent = agent_of("never")
    takes: dict[str, Any] = {
        "create_agent": create_agent,
        "session": agent.session,
        "send": lambda **given: agent.stream("Hi", **given),
    }
    with pytest.raises(ConfigurationError) as caught:
        takes[call](**{name: 1})
    assert caught.value.field == name
    assert says in caught.value.detail
    assert "Allowed:" in caught.value.detail


async def test_a_wrong_option_of_a_call_is_found_before_the_model_is_asked() -> None:
    # CA-27, ERR-18
    provider = PolicyProvider(lambda options: "never")
    agent = create_agent(provider=provider)
    for settings in ({"temperature": 3}, {"stop": "END"}, {"maxTokens": 5}, {"max_output_tokens": 5}):
        with pytest.raises(ConfigurationError) as caught:
            agent.stream("Hi", model_settings=settings)
        assert caught.value.field == f"model_settings.{next(iter(settings))}"
    assert provider.calls == 0


# ----------------------------------------------------------------------------------------------------------- what a result holds


async def test_a_result_is_ok_only_when_the_model_ended_it_and_says_otherwise_what_to_do() -> None:
    # LES-09
    done = await agent_of("Done").send("Hi")
    assert done.ok
    assert done.raise_if_incomplete() is done
    cut = await agent_of({"text": "Do", "finish_reason": "length"}).send("Hi")
    stopped = await agent_of(calls("a"), tools=[plain("a")], max_steps=1).send("Hi")
    for result, reason, advice in ((cut, "length", "max_tokens"), (stopped, "max-steps", "max_steps")):
        assert not result.ok
        with pytest.raises(Exception, match=reason) as caught:
            result.raise_if_incomplete()
        assert advice in str(caught.value)


async def test_calls_of_a_result_are_parsed_and_odd_arguments_stay_text() -> None:
    # LES-14
    def execute(args: Any) -> Any:
        return 1

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = define_tool(name="t", description="T.", input=schema, execute=execute)
    odd = GenerateResult("", (ToolCall("c1", "t", '{"n": 1}'), ToolCall("c2", "t", '{"n": ')), "tool_calls")
    replies = iter([odd, GenerateResult("Done")])
    result = await create_agent(provider=PolicyProvider(lambda options: next(replies)), tools=[tool]).send("Hi")
    assert [(call.id, call.name, call.args) for call in result.tool_calls] == [("c1", "t", {"n": 1}), ("c2", "t", '{"n": ')]


async def test_new_messages_are_those_of_this_run_and_messages_all() -> None:
    # LES-15
    session = agent_of("One", calls("a"), "Two", tools=[plain("a")]).session()
    first = await session.send("Hi")
    second = await session.send("Again")
    assert shape(first.new_messages) == ["user:Hi", "assistant:One"]
    assert shape(second.new_messages) == ["user:Again", "assistant:+a", "tool:a", "assistant:Two"]
    assert shape(second.messages)[1:] == [*shape(first.new_messages), *shape(second.new_messages)]
    assert second.messages[0].role == "system"


async def test_new_messages_of_a_continued_run_are_those_of_the_whole_run() -> None:
    # LES-15
    agent = agent_of(calls("pay"), "Done", tools=[pay()])
    paused = await agent.send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert shape(result.new_messages) == ["user:Go", "assistant:+pay", "tool:pay", "assistant:Done"]
    assert results(result.messages) == ["paid"]


# ------------------------------------------------------------------------------- options whose effect is tested nowhere else


async def test_a_turn_waits_for_another_process_no_longer_than_session_wait_ms() -> None:
    # DEC-R3
    store = memory_store()
    assert await store.sessions.claim("s", "somebody/else", 60_000) is not None
    with pytest.raises(LoushoError, match="20 ms") as caught:
        await agent_of("never", store=store, session_wait_ms=20).session("s").send("Hi")
    assert caught.value.code == "LOUSHO_SESSION_BUSY"


async def test_an_approval_after_its_time_denies_the_call() -> None:
    log: list[str] = []
    tool = define_tool(name="pay", description="Pays.", execute=lambda args: log.append("ran"), needs_approval=True)
    agent = agent_of(calls("pay"), "Done", tools=[tool], approval_ttl_ms=0.001)
    paused = await agent.send("Go")
    pending = await agent.approvals.get(paused.approval_id)
    assert pending is not None
    assert pending.expires_at is not None
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert kinds(result.messages) == ["denied"]
    assert log == []


@pytest.mark.parametrize(("answer", "wanted"), [(True, ["ok"]), ("because", ["ok"]), (False, ["rejected"]), ("defer", [])])
async def test_approve_decides_in_code(answer: Any, wanted: list[str]) -> None:
    asked: list[Any] = []

    async def approve(call: Any) -> Any:
        asked.append((call["tool_name"], call["args"], call["agent_name"]))
        return answer

    result = await agent_of(calls("pay"), "Done", tools=[pay()], approve=approve).send("Go")
    assert asked == [("pay", {}, "agent")]
    assert kinds(result.messages) == wanted
    assert (result.finish_reason == "awaiting-approval") is (answer == "defer")


async def test_ask_question_offers_the_tool_and_pauses_for_the_answer() -> None:
    model = mock_model([calls(("ask_question", {"question": "Which?"})), "Done"])
    agent = create_agent(provider=model, ask_question=True)
    paused = await agent.send("Go")
    assert [tool.name for tool in model.calls[0].tools] == ["ask_question"]
    result = await agent.approvals.answer(paused.approval_id, "The red one")
    assert "The red one" in str(results(result.messages)[0])
    assert [tool.name for tool in (await _request_of(create_agent(provider=mock_model(["x"])))).tools] == []


async def _request_of(agent: Any) -> GenerateOptions:
    await agent.send("Hi")
    request: GenerateOptions = agent.definition.provider.calls[0]
    return request


class City(pydantic.BaseModel):
    zip_code: int


async def test_output_gives_the_validated_object() -> None:
    result = await agent_of('{"zip_code": 12}', output=City).send("Where?")
    assert result.object == City(zip_code=12)


async def test_output_validate_sends_its_issues_back_once() -> None:
    model = mock_model(['{"zip_code": 12}', '{"zip_code": 34}'])

    def validate(city: City, ctx: Any) -> list[str]:
        return [] if city.zip_code == 34 else ["not in this country"]

    result = await create_agent(provider=model, output=City, output_validate=validate).send("Where?")
    assert result.object == City(zip_code=34)
    assert result.output_repaired
    assert "not in this country" in model.calls[1].messages[-1].text


@pytest.mark.parametrize(("option", "shown"), [(True, True), (False, False), ("auto", True)])
async def test_output_prompt_decides_whether_the_schema_stands_in_the_prompt(option: Any, shown: bool) -> None:
    agent = create_agent(provider=mock_model(['{"zip_code": 1}']), output=City, output_prompt=option)
    assert ("zip_code" in (await _request_of(agent)).messages[0].text) is shown


@pytest.mark.parametrize("option", ["auto", False])
async def test_prompt_caching_goes_with_every_request(option: Any) -> None:
    # CA-20
    assert (await _request_of(create_agent(provider=mock_model(["x"]), prompt_caching=option))).prompt_caching == option


async def test_a_session_has_its_own_compaction() -> None:
    class Seen:
        name = "seen"
        times = 0

        def compact(self, work: Any) -> Any:
            self.times += 1
            return {"messages": work.messages}

    for agent_has, session_has, wanted in ((False, True, 1), (True, False, 0), (True, None, 1)):
        strategy = Seen()
        on = {"strategy": strategy, "context_window": 10, "threshold_percent": 0.1, "protected_tokens": 0}
        agent = agent_of("Done", compaction=on if agent_has else False)
        await agent.session("s", compaction=on if session_has else session_has).send("Hello there, this is long enough")
        assert strategy.times == wanted


async def test_account_options_of_openai_and_the_wait_for_a_connection_reach_the_client() -> None:
    provider = OpenAIProvider(api_key="k", organization="org-1", project="proj-1", connect_timeout_ms=1500)
    client = (await provider.client()).client
    headers = client.default_headers
    assert (headers["OpenAI-Organization"], headers["OpenAI-Project"]) == ("org-1", "proj-1")
    assert client.timeout.connect == 1.5
    await provider.aclose()


@pytest.mark.parametrize("asks", [True, False])
def test_a_compatible_server_is_asked_for_the_usage_of_streams_unless_it_refuses_that(asks: bool) -> None:
    # PRV-31, PRV-59
    provider = OpenAICompatibleProvider(base_url="http://127.0.0.1:9/v1", default_model="m", stream_usage=asks)
    body = json.loads(provider.call(GenerateOptions([user("Hi")]), "m", stream=True).body)
    assert ("stream_options" in body) is asks


@pytest.mark.parametrize(("enforced", "sent"), [("json_schema", "json_schema"), ("json_object", "json_object"), ("none", None)])
def test_a_compatible_server_gets_the_response_format_that_it_enforces(enforced: Any, sent: str | None) -> None:
    # PRV-59
    provider = OpenAICompatibleProvider(
        base_url="http://127.0.0.1:9/v1", default_model="m", structured_outputs=enforced, name="own"
    )
    options = GenerateOptions([user("Give JSON")], response_format=ResponseFormat({"type": "object"}))
    body = json.loads(provider.call(options, "m", stream=False).body)
    assert body.get("response_format", {}).get("type") == sent
    assert provider.name == "own"


ALL_SETTINGS: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.4,
    "top_p": 0.3,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "stop": ["END"],
    "seed": 5,
    "tool_choice": "none",
}


@pytest.mark.parametrize("where", ["agent", "call"])
async def test_every_model_setting_reaches_the_request(where: str) -> None:
    # CA-26
    assert set(ALL_SETTINGS) == set(ModelSettings.model_fields)
    model = mock_model(["Done"])
    agent = create_agent(provider=model, tools=[plain("a")], **({"model_settings": ALL_SETTINGS} if where == "agent" else {}))
    await agent.send("Hi", **({"model_settings": ALL_SETTINGS} if where == "call" else {}))
    assert {**model.calls[0].settings, "stop": list(model.calls[0].settings["stop"])} == ALL_SETTINGS


def test_a_reasoning_summary_is_asked_for_when_wanted() -> None:
    for summary, sent in (("auto", {"effort": "low", "summary": "auto"}), (None, {"effort": "low"})):
        reasoning = create_agent(provider=MockProvider(), reasoning={"effort": "low", "summary": summary}).definition.reasoning
        provider = OpenAIProvider(api_key="k", api="responses")
        body = json.loads(provider.call(GenerateOptions([user("Hi")], reasoning=reasoning), "gpt-5", stream=False).body)
        assert body["reasoning"] == sent


def test_project_instructions_are_read_from_the_files_named(tmp_path: Path) -> None:
    # CA-39
    (tmp_path / ".git").mkdir()
    (tmp_path / "AGENTS.md").write_text("Use tabs.")
    (tmp_path / "RULES.md").write_text("Use spaces.")
    agent = create_agent(provider=MockProvider(), project_instructions={"cwd": str(tmp_path), "files": ["RULES.md"]})
    assert "Use spaces." in agent.definition.project_block
    assert "Use tabs." not in agent.definition.project_block


async def test_the_mock_provider_answers_by_its_policy_and_takes_its_time() -> None:
    # PRV-61
    request = GenerateOptions([user("Hi")])
    provider = MockProvider(policy=lambda options: f"re: {options.messages[-1].text}", delay_ms=20)
    started = time.perf_counter()
    assert (await provider.generate(request)).text == "re: Hi"
    assert time.perf_counter() - started >= 0.015


@pytest.mark.parametrize("two_phases", [False, True])
def test_a_pruning_strategy_protects_what_it_is_told_to(two_phases: bool) -> None:
    def pruned(**given: Any) -> str:
        if two_phases:
            summarizer = mock_model(["S"], "repeat-last")
            strategy: Any = two_phase_strategy(model=summarizer, **given)
        else:
            strategy = prune_tool_results_strategy(**given)
        output = strategy.compact(work(conversation(2, calls=1, chars=1_000), forced=False))
        made = asyncio.run(output) if inspect.isawaitable(output) else output
        return str(made.messages[3].text)

    assert pruned().startswith("[pruned:")
    assert "begins:" not in pruned()
    assert "begins:" in pruned(preview_chars=20)
    assert not pruned(protected_tokens=100_000).startswith("[pruned:")


def test_an_agent_shows_its_options_read_only_and_without_keys() -> None:
    # CA-50, CA-49
    limits, tools = {"max_steps": 3}, [plain("a")]
    agent = create_agent(
        provider=MockProvider(),
        instructions="Use sk-proj-abcdefghijklmnop1234.",
        limits=limits,
        tools=tools,
        output=City,
        hooks=None,
    )
    limits["max_steps"] = 9
    tools.clear()
    assert set(agent.options) == {"provider", "instructions", "limits", "tools", "output"}
    assert agent.options["limits"] == {"max_steps": 3}
    assert [tool.name for tool in agent.options["tools"]] == ["a"]
    assert "abcdefghijklmnop" not in str(agent.options)
    for change in (agent.options, agent.options["limits"]):
        with pytest.raises(TypeError):
            change["max_steps"] = 1
    with pytest.raises(AttributeError):
        agent.options = {}  # type: ignore[misc]


async def test_a_run_with_a_session_id_goes_on_where_it_was() -> None:
    # CA-36
    ran: list[str] = []
    model = mock_model([calls("a"), ConnectionError("gone"), "Done"])
    agent = create_agent(provider=model, tools=[plain("a", log=ran)], store=memory_store(), retry=False)
    with pytest.raises(LoushoError, match="gone"):
        await agent.send("Go", session_id="run-1")
    result = await agent.resume("run-1")
    assert result is not None
    assert result.text == "Done"
    assert ran == ["a"]
    assert await agent.resume("run-1") is None


@pytest.mark.parametrize(
    ("store", "session_id", "code"),
    [(None, "s", "LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE"), (memory_store(), "a b", "LOUSHO_SESSION_ID_INVALID")],
)
async def test_a_session_id_needs_checkpoints_and_a_fit_form(store: Any, session_id: str, code: str) -> None:
    # CA-36
    with pytest.raises(ConfigurationError) as caught:
        await agent_of("never", store=store).send("Hi", session_id=session_id)
    assert (caught.value.code, caught.value.field) == (code, "session_id")
