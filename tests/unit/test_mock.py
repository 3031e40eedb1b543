"""The two mocks: `mock_model` follows a script, `MockProvider` has canned replies."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import cloudpickle
import pytest

from lousho_ray.errors import ConfigurationError, TestFailedError
from lousho_ray.messages import Message, ToolCall, assistant, tool_result, user
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    HostedToolResultChunk,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.mock import MockLLMProvider, MockProvider, create_mock_provider
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import MockTurn, mock_model
from lousho_ray.usage import ProviderUsage

REQUEST = GenerateOptions(messages=[user("hi")])


async def read(provider: Any, options: GenerateOptions = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in provider.stream(options)]


async def replies(model: Any, count: int) -> list[GenerateResult]:
    return [await model.generate(REQUEST) for _ in range(count)]


def joined(chunks: list[Chunk]) -> GenerateResult:
    """What a consumer makes of a stream."""
    finish = chunks[-1]
    assert isinstance(finish, FinishChunk)
    return GenerateResult(
        "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)),
        tuple(chunk.tool_call for chunk in chunks if isinstance(chunk, ToolCallChunk)),
        finish.finish_reason,
        finish.usage,
        hosted_tool_calls=tuple(chunk.call for chunk in chunks if isinstance(chunk, HostedToolResultChunk)),
    )


# ------------------------------------------------------------------------------------------------------------------- turns


async def test_each_call_takes_the_next_turn_of_the_script() -> None:
    # MOCK-01, MOCK-02
    async def later(request: GenerateOptions) -> MockTurn:
        await asyncio.sleep(0)
        return MockTurn(f"saw {request.messages[-1].text}")

    model = mock_model(["one", {"text": "two"}, MockTurn("three"), lambda request: "four", later])
    assert [result.text for result in await replies(model, 5)] == ["one", "two", "three", "four", "saw hi"]


async def test_the_fields_of_a_turn() -> None:
    # MOCK-03, MOCK-04, MOCK-05, MOCK-06
    model = mock_model(
        [
            {"text": "calling", "tool_calls": [{"name": "f", "args": {"x": "ü"}}, {"name": "g", "id": "mine"}]},
            {"hosted_tool_calls": [{"name": "web_search", "args": {"q": 1}, "result": ["r"], "sources": ["s"]}]},
            {"tool_calls": [{"name": "f"}], "finish_reason": "length", "usage": {"input_tokens": 3, "output_tokens": 4}},
        ]
    )
    first, second, third = await replies(model, 3)
    assert first.tool_calls == (ToolCall("call_1", "f", '{"x": "ü"}'), ToolCall("mine", "g", "{}"))
    assert (first.text, first.finish_reason, first.usage) == ("calling", "tool_calls", None)
    assert second.hosted_tool_calls == (HostedToolCall("hosted_2", "web_search", {"q": 1}, ["r"], False, ("s",)),)
    assert (second.text, second.finish_reason) == ("", "stop")
    assert third.tool_calls == (ToolCall("call_3", "f", "{}"),)
    assert (third.finish_reason, third.usage) == ("length", ProviderUsage(3, 4))


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        ({"txt": "a"}, "'text'"),
        ({"tool_calls": [{"nme": "f"}]}, "name"),
        ({"tool_calls": [{"name": "f", "arguments": "{}"}]}, "'arguments'"),
        ({"tool_calls": ["f"]}, "name"),
        ({"tool_calls": [{"name": "f", "args": {"x": object()}}]}, "not JSON"),
        ({"usage": {"prompt_tokens": 1}}, "'prompt_tokens'"),
        ({"error": "boom"}, "exception"),
        ({"text": None}, "text"),
        ({"delay_ms": -1}, "delay_ms"),
        (5, "int"),
        (None, "NoneType"),
    ],
)
def test_a_turn_that_cannot_be_used_fails_when_the_script_is_made(turn: Any, named: str) -> None:
    # MOCK-03, MOCK-04
    with pytest.raises(ConfigurationError) as caught:
        mock_model(["fine", turn])
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"
    assert "script[1]" in caught.value.detail
    assert named in caught.value.detail


@pytest.mark.parametrize("script", ["one", {"text": "one"}, None, 5])
def test_a_script_is_a_list(script: Any) -> None:
    with pytest.raises(ConfigurationError, match="list of turns"):
        mock_model(script)


def test_on_exhausted_is_one_of_two() -> None:
    with pytest.raises(ConfigurationError) as caught:
        mock_model([], on_exhausted="repeat")  # type: ignore[arg-type]
    assert caught.value.field == "on_exhausted"


async def test_a_function_that_returns_something_else_is_named_by_its_turn() -> None:
    with pytest.raises(ConfigurationError, match="turn 2"):
        await replies(mock_model(["one", lambda request: 5]), 2)  # type: ignore[list-item, return-value]


@pytest.mark.parametrize("make", [lambda error: error, lambda error: {"error": error}, lambda error: lambda request: error])
async def test_an_error_is_one_turn_and_its_request_is_recorded(make: Any) -> None:
    # MOCK-07
    error = ValueError("boom")
    model = mock_model(["one", make(error), "three"])
    await model.generate(REQUEST)
    with pytest.raises(ValueError, match="boom") as caught:
        await model.generate(REQUEST)
    assert caught.value is error
    assert (await model.generate(REQUEST)).text == "three"
    assert len(model.calls) == 3


async def test_retries_take_further_turns() -> None:
    # MOCK-07
    model = mock_model([ConnectionError("down"), ConnectionError("down"), "up"])
    assert (await with_retry(model, backoff={"initial_ms": 0}).generate(REQUEST)).text == "up"
    model.assert_exhausted()


async def test_a_delay_is_waited_and_ends_at_once_when_the_call_is_cancelled() -> None:
    # MOCK-08, MOCK-10
    clock = FakeClock()
    model = mock_model([{"text": "slow", "delay_ms": 100}, {"error": ValueError("x"), "delay_ms": 100}], clock=clock)
    first = asyncio.create_task(model.generate(REQUEST))
    await clock.run_for(99)
    assert not first.done()
    await clock.run_for(1)
    assert (await first).text == "slow"
    second = asyncio.create_task(model.generate(REQUEST))
    await clock.run_for(50)
    assert len(model.calls) == 2
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert clock.waiting == 0


async def test_concurrent_calls_get_turns_in_arrival_order() -> None:
    # "Decide so": arrival order
    clock = FakeClock()
    model = mock_model([{"text": "a", "delay_ms": 20}, {"text": "b", "delay_ms": 10}], clock=clock)
    tasks = [asyncio.create_task(model.generate(REQUEST)) for _ in range(2)]
    await clock.run_for(20)
    assert [(await task).text for task in tasks] == ["a", "b"]


# --------------------------------------------------------------------------------------------------------------- snapshots


async def test_requests_are_recorded_as_they_were() -> None:
    # MOCK-09
    metadata: dict[str, Any] = {"tags": ["a"]}
    settings: dict[str, Any] = {"stop": ["x"], "temperature": 0}
    messages = [Message("user", "hi", metadata=metadata)]
    model = mock_model(["one", "two"])
    await model.generate(GenerateOptions(messages=messages, settings=settings, notify=print))
    messages.append(user("later"))
    metadata["tags"].append("b")
    settings["temperature"] = 1
    seen = model.calls[0]
    assert len(seen.messages) == 1
    assert seen.messages[0].metadata == {"tags": ["a"]}
    assert seen.settings == {"stop": ["x"], "temperature": 0}
    assert seen.messages == [Message("user", "hi", metadata={"tags": ["a"]})]
    assert seen.notify is None
    assert model.last_call is seen
    await model.generate(REQUEST)
    assert model.last_call is model.calls[1]


async def test_changing_a_snapshot_raises() -> None:
    # MOCK-09
    model = mock_model(["one"])
    await model.generate(
        GenerateOptions(messages=[Message("user", "hi", metadata={"a": {"b": 1}})], settings={"seed": 1, "stop": ["x"]})
    )
    seen: Any = model.last_call
    with pytest.raises(AttributeError):
        seen.model = "x"
    with pytest.raises(AttributeError):
        seen.messages[0].content = "x"
    for change in (
        lambda: seen.settings.update(seed=2),
        lambda: seen.settings.__setitem__("seed", 2),
        lambda: seen.settings.pop("seed"),
        lambda: seen.settings.clear(),
        lambda: seen.settings["stop"].append("y"),
        lambda: seen.settings["stop"].__setitem__(0, "y"),
        lambda: seen.messages.append(user("x")),
        lambda: seen.messages.clear(),
        lambda: seen.messages[0].metadata["a"].__setitem__("b", 2),
    ):
        with pytest.raises(TypeError):
            change()


async def test_schemas_are_kept_by_reference_and_hosted_tools_recorded() -> None:
    # MOCK-09, MOCK-14
    schema = {"type": "object"}
    tool = ToolDefinition("f", "F.", schema)
    model = mock_model(["one"])
    await model.generate(GenerateOptions(messages=[user("hi")], tools=(tool,), hosted_tools=({"type": "web_search"},)))
    assert model.calls[0].tools[0].parameters is schema
    assert model.calls[0].hosted_tools == ({"type": "web_search"},)
    assert model.supports_hosted_tool("anything")


async def test_a_function_turn_gets_the_frozen_request_after_it_was_recorded() -> None:
    # MOCK-10
    def turn(request: GenerateOptions) -> str:
        assert model.last_call is request
        with pytest.raises(TypeError):
            request.settings["seed"] = 2  # type: ignore[index]
        return "ok"

    model = mock_model([turn])
    assert (await model.generate(GenerateOptions(messages=[user("hi")], settings={"seed": 1}))).text == "ok"


# ------------------------------------------------------------------------------------------------------- the script's end


async def test_a_call_too_many_names_itself_and_the_last_message() -> None:
    # MOCK-11
    model = mock_model(["one"])
    await model.generate(REQUEST)
    with pytest.raises(TestFailedError) as caught:
        await model.generate(GenerateOptions(messages=[user("what now?")]))
    assert caught.value.code == "LOUSHO_TEST_FAILED"
    assert "call 2" in caught.value.detail
    assert "what now?" in caught.value.detail
    assert "Add a turn" in caught.value.detail
    assert len(model.calls) == 2


async def test_the_last_turn_may_repeat_for_ever() -> None:
    # MOCK-11
    model = mock_model(["one", "two"], on_exhausted="repeat-last")
    assert [result.text for result in await replies(model, 4)] == ["one", "two", "two", "two"]
    with pytest.raises(TestFailedError):
        await mock_model([], on_exhausted="repeat-last").generate(REQUEST)


async def test_turns_that_are_left_fail_the_test() -> None:
    # MOCK-12
    model = mock_model(["one", {"tool_calls": [{"name": "search"}]}, ValueError("x"), lambda request: "four"])
    await model.generate(REQUEST)
    with pytest.raises(AssertionError) as caught:
        model.assert_exhausted()
    assert isinstance(caught.value, TestFailedError)
    assert caught.value.code == "LOUSHO_TEST_FAILED"
    assert "3 scripted turns" in caught.value.detail
    assert "turn 2" in caught.value.detail
    assert "search" in caught.value.detail
    await model.generate(REQUEST)
    with pytest.raises(ValueError, match="x"):
        await model.generate(REQUEST)
    await model.generate(REQUEST)
    model.assert_exhausted()


async def test_reset_rewinds_script_ids_and_calls() -> None:
    # MOCK-12
    model = mock_model([{"tool_calls": [{"name": "f"}]}])
    first = await model.generate(REQUEST)
    model.reset()
    assert model.calls == []
    assert model.last_call is None
    assert await model.generate(REQUEST) == first


# --------------------------------------------------------------------------------------------------------------- streaming


async def test_the_order_of_a_stream() -> None:
    # MOCK-13
    turn = {
        "text": " Hello  big\nworld ",
        "tool_calls": [{"name": "f"}],
        "hosted_tool_calls": [{"name": "web_search"}],
        "usage": {"input_tokens": 1, "output_tokens": 2},
    }
    chunks = await read(mock_model([turn]))
    assert [type(chunk) for chunk in chunks[:2]] == [HostedToolCallChunk, HostedToolResultChunk]
    assert [chunk.text for chunk in chunks if isinstance(chunk, TextChunk)] == [" ", "Hello  ", "big\n", "world "]
    assert [type(chunk) for chunk in chunks[-2:]] == [ToolCallChunk, FinishChunk]


@pytest.mark.parametrize(
    "turn",
    [
        "Hello big world",
        "",
        "  \n ",
        {"text": "calling", "tool_calls": [{"name": "f", "args": {"x": 1}}, {"name": "g"}]},
        {"hosted_tool_calls": [{"name": "web", "result": 1}], "text": "x", "usage": {"input_tokens": 1, "output_tokens": 2}},
    ],
)
async def test_streamed_and_plain_calls_give_the_same(turn: Any) -> None:
    # MOCK-13
    assert joined(await read(mock_model([turn]))) == await mock_model([turn]).generate(REQUEST)


async def test_a_scripted_error_comes_out_of_a_stream_too() -> None:
    # MOCK-07
    with pytest.raises(ValueError, match="boom"):
        await read(mock_model([ValueError("boom")]))


async def test_a_model_pickles_with_its_script_and_its_calls() -> None:
    # "Decide so" (Ray): function turns must be picklable
    word = "closure"
    model = mock_model(["one", lambda request: word, {"tool_calls": [{"name": "f"}]}])
    await model.generate(GenerateOptions(messages=[Message("user", "hi", metadata={"a": 1})], settings={"stop": ["x"]}))
    copy = pickle.loads(cloudpickle.dumps(model))
    assert copy.calls[0].settings == {"stop": ["x"]}
    assert copy.calls[0].messages == model.calls[0].messages
    assert (await copy.generate(REQUEST)).text == "closure"
    assert (await copy.generate(REQUEST)).tool_calls[0].id == "call_1"


# ------------------------------------------------------------------------------------------------------------ MockProvider


async def test_canned_texts_come_in_turn_and_again() -> None:
    # PRV-61, MOCK-15
    provider = MockProvider(["a", "b"])
    assert [result.text for result in await replies(provider, 5)] == ["a", "b", "a", "b", "a"]
    assert provider.name == "mock"
    assert MockLLMProvider is MockProvider
    assert create_mock_provider is MockProvider
    assert (await MockProvider().generate(REQUEST)).text


async def test_a_tool_named_by_the_last_user_message_is_called_once_for_it() -> None:
    # PRV-61
    tools = (ToolDefinition("search", "", {}), ToolDefinition("weather", "", {}))
    provider = MockProvider(["done"])
    messages = [user("use search please")]
    first = await provider.generate(GenerateOptions(messages=messages, tools=tools))
    assert first.tool_calls == (ToolCall("call_1", "search", "{}"),)
    assert (first.text, first.finish_reason) == ("", "tool_calls")
    messages += [assistant("", first.tool_calls), tool_result(first.tool_calls[0], "found")]
    assert (await provider.generate(GenerateOptions(messages=messages, tools=tools))).text == "done"
    messages += [assistant("done"), user("search again, and the weather")]
    again = await provider.generate(GenerateOptions(messages=messages, tools=tools))
    assert again.tool_calls == (ToolCall("call_2", "search", "{}"),)
    messages += [assistant("", again.tool_calls), tool_result(again.tool_calls[0], "found")]
    assert (await provider.generate(GenerateOptions(messages=messages, tools=tools))).tool_calls[0].name == "weather"
    assert (await provider.generate(GenerateOptions(messages=[user("search")]))).tool_calls == ()


async def test_the_mock_provider_streams_what_it_would_return() -> None:
    # PRV-61
    tools = (ToolDefinition("search", "", {}),)
    for options in (REQUEST, GenerateOptions(messages=[user("search")], tools=tools)):
        whole = await MockProvider(["hello there"]).generate(options)
        streamed = joined(await read(MockProvider(["hello there"]), options))
        assert (streamed.text, streamed.tool_calls, streamed.finish_reason) == (whole.text, whole.tool_calls, whole.finish_reason)


async def test_the_mock_provider_reports_the_model_it_was_asked_for() -> None:
    result = await MockProvider().generate(GenerateOptions(messages=[user("hi")], model="special"))
    assert result.served_by is not None
    assert result.served_by.model == "special"
    assert await MockProvider(default_model="m").get_models() == ["m"]


@pytest.mark.parametrize("responses", [[], "text", [1]])
def test_wrong_responses_are_refused(responses: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MockProvider(responses)
    assert caught.value.field == "responses"
