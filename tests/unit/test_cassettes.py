"""record_replay: what is written, what is given back, and what a call that does not match is told."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.cancellation import AbortSignal
from lousho_ray.create import create_agent
from lousho_ray.errors import CassetteError, CassetteMismatchError, CompactedLLMProviderError, ConfigurationError, RateLimitError
from lousho_ray.messages import Message, ToolCall
from lousho_ray.ports import GenerateOptions, ToolDefinition
from lousho_ray.providers import with_fallback, with_retry
from lousho_ray.providers.failures import classify
from lousho_ray.testing import mock_model, record_replay
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import agent_of


def ask(text: str = "Hi", **options: Any) -> GenerateOptions:
    return GenerateOptions([Message("user", text)], **options)


async def recorded(path: Path, *script: Any, texts: tuple[str, ...] = ("Hi",), **options: Any) -> dict[str, Any]:
    provider = record_replay(mock_model(list(script)), cassette=path, mode="record", **options)
    for text in texts:
        await provider.generate(ask(text))
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def no_provider() -> Any:
    raise AssertionError("a replay never makes the provider")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_run_is_replayed_as_it_was_recorded(streamed: bool, tmp_path: Path) -> None:
    # CASS-01, CASS-02, CASS-03, CASS-06, CASS-07
    usage = {"input_tokens": 3, "output_tokens": 2}
    script = [{"tool_calls": [{"name": "add", "args": {"a": 1, "b": 2}}], "usage": usage}, {"text": "It is three.", "usage": usage}]

    async def run(provider: Any) -> Any:
        agent = create_agent(provider=provider, tools=[add])
        return await (agent.stream("1 + 2?").result if streamed else agent.send("1 + 2?"))

    path = tmp_path / "deep" / "run.json"
    live = await run(record_replay(lambda: mock_model(script), cassette=path))
    again = await run(record_replay(no_provider, cassette=path))
    nothing = await run(record_replay(None, cassette=path, mode="replay"))
    for result in (again, nothing):
        assert (result.text, result.tool_calls, result.usage, result.steps) == (live.text, live.tool_calls, live.usage, 2)
    kinds = {entry["kind"] for entry in json.loads(path.read_text())["entries"]}
    assert kinds == {"stream" if streamed else "generate"}


async def test_the_file_has_the_documented_form_and_an_allow_list_of_the_request(tmp_path: Path) -> None:
    # CASS-04, CASS-05
    path = tmp_path / "c.json"
    provider = record_replay(mock_model(["Hi"]), cassette=path, mode="record")
    messages = [
        Message("user", "q", metadata={"secret": "of the caller"}),
        Message("assistant", "", tool_calls=(ToolCall("call_9", "t", '{"b": 1, "a": 2}'),)),
        Message("tool", "9", tool_call_id="call_9", tool_name="t", is_error=True),
    ]
    tools = (
        ToolDefinition("t", "Does.", {"title": "T", "type": "object", "properties": {"title": {"type": "string", "title": "X"}}}),
    )
    settings = {"temperature": 0.5, "max_tokens": 9, "seed": 7}
    await provider.generate(GenerateOptions(messages, model="m", tools=tools, settings=settings))
    text = path.read_text()
    data = json.loads(text)
    assert text == json.dumps(data, indent=2) + "\n"
    assert list(data) == ["version", "sdkVersion", "recordedAt", "provider", "entries"]
    assert data["provider"] == {"name": "mock", "defaultModel": "mock-model"}
    assert data["entries"][0]["request"] == {
        "model": "m",
        "messages": [
            {"role": "user", "text": "q"},
            {"role": "assistant", "text": "", "toolCalls": [{"name": "t", "args": {"b": 1, "a": 2}}]},
            {"role": "tool", "text": "9", "toolName": "t", "isError": True},
        ],
        "tools": [{"name": "t", "description": "Does.", "schema": {"properties": {"title": {"type": "string"}}, "type": "object"}}],
        "temperature": 0.5,
        "maxTokens": 9,
    }


def test_schemas_are_stored_without_the_layout_of_a_library() -> None:
    from lousho_ray.testing.cassette_values import canonical_schema

    inner = {"type": "object", "properties": {"n": {"type": "integer", "description": "A number."}}}
    left = {"$defs": {"P": {**inner, "title": "P"}}, "properties": {"p": {"$ref": "#/$defs/P"}}, "type": "object", "$schema": "x"}
    right = {"type": "object", "properties": {"p": inner}}
    assert canonical_schema(left) == canonical_schema(right)
    loop = {"$defs": {"N": {"properties": {"next": {"$ref": "#/$defs/N"}}}}, "$ref": "#/$defs/N"}
    assert canonical_schema(loop)["properties"]["next"]


async def test_a_mismatch_names_the_first_difference_and_how_to_record_again(tmp_path: Path) -> None:
    # CASS-08, CASS-09
    path = tmp_path / "c.json"
    await recorded(path, "one", "two", texts=("a", "b"))
    player = record_replay(None, cassette=path)
    await player.generate(ask("a"))
    with pytest.raises(CassetteMismatchError, match=r"messages\[0\].text: recorded 'b', now 'x'.*mode='record'") as caught:
        await player.generate(ask("x"))
    assert (caught.value.call_number, caught.value.cassette, caught.value.code) == (2, str(path), "LOUSHO_CASSETTE_INVALID")
    with pytest.raises(CassetteMismatchError, match="no more entry"):
        await player.generate(ask("c"))
    streaming = record_replay(None, cassette=path)
    with pytest.raises(CassetteMismatchError, match="kind"):
        _ = [chunk async for chunk in streaming.stream(ask("a"))]


async def test_by_request_each_entry_is_used_once_in_any_order(tmp_path: Path) -> None:
    # CASS-08
    path = tmp_path / "c.json"
    await recorded(path, "1", "2", "3", texts=("a", "b", "a"))
    player = record_replay(None, cassette=path, match="request")
    assert [(await player.generate(ask(text))).text for text in ("b", "a", "a")] == ["2", "1", "3"]
    with pytest.raises(CassetteMismatchError, match="unused equal"):
        await player.generate(ask("a"))


async def test_times_dates_ids_and_the_order_of_keys_and_tools_do_not_count(tmp_path: Path) -> None:
    # CASS-10, LES-42
    path = tmp_path / "c.json"
    tools = tuple(ToolDefinition(name, name, {"type": "object"}) for name in "ab")

    def request(text: str, arguments: str, order: int) -> GenerateOptions:
        call = ToolCall(f"call_{order}", "a", arguments)
        return GenerateOptions([Message("user", text), Message("assistant", "", tool_calls=(call,))], tools=tools[::order])

    first = "On 2026-01-02, 2026-01-02T03:04:05.678Z, May 3, 2026: call_abc 3f2b8c1e-0000-4000-8000-000000000000"
    later = "On 2027-11-12, 2027-11-12T13:14:15Z, June 13, 2027: call_xyz 4a2b8c1e-1111-4111-8111-111111111111"
    await record_replay(mock_model(["ok"]), cassette=path, mode="record").generate(request(first, '{"x": 1, "y": 2}', 1))
    assert (await record_replay(None, cassette=path).generate(request(later, '{"y": 2, "x": 1}', -1))).text == "ok"
    with pytest.raises(CassetteMismatchError):
        await record_replay(None, cassette=path).generate(request(later, '{"y": 2, "x": 2}', -1))


async def test_own_values_are_normalized_and_texts_redacted(tmp_path: Path) -> None:
    # CASS-11, CASS-12
    path = tmp_path / "c.json"
    secrets = ["sk-abcdef123456", "sk-ant-abc123456", "Bearer abcdefgh12", "AIza" + "x" * 30, "ghp_" + "a" * 20, "AKIA" + "A" * 16]
    secrets += ["github_pat_" + "b" * 20, "gho_" + "c" * 20, "ghs_" + "d" * 20]

    def redact(text: str) -> str:
        return text.replace("Ann", "<name>")

    await recorded(path, "Hello Ann " + secrets[0], texts=("I am Ann, run 7: " + " ".join(secrets),), redact=redact)
    text = path.read_text()
    assert not [secret for secret in [*secrets, "Ann"] if secret in text]
    assert text.count("[REDACTED]") == len(secrets) + 1

    def normalize(request: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(request).replace("run 7", "run n").replace("run 8", "run n"))  # type: ignore[no-any-return]

    player = record_replay(None, cassette=path, redact=redact, normalize=normalize)
    assert (await player.generate(ask("I am Ann, run 8: " + " ".join(secrets)))).text == "Hello <name> [REDACTED]"


class Down(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.mark.parametrize("error", [Down(503), Down(400), TimeoutError("slow"), ConnectionError("gone"), ValueError("odd")])
async def test_an_error_is_raised_again_and_judged_as_it_was(error: Exception, tmp_path: Path) -> None:
    # CASS-07
    path = tmp_path / "c.json"
    with pytest.raises(type(error)):
        await recorded(path, error)
    with pytest.raises(Exception, match=str(error)) as caught:
        await record_replay(None, cassette=path).generate(ask())
    assert type(caught.value).__name__ == type(error).__name__
    was, now = classify(error), classify(caught.value)
    assert (now.category, now.retryable, now.status) == (was.category, was.retryable, was.status)


async def test_a_rate_limit_keeps_how_long_the_provider_asked_to_wait(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(RateLimitError):
        await recorded(path, RateLimitError("slow down", status=429, retry_after=2))
    with pytest.raises(RateLimitError) as caught:
        await record_replay(None, cassette=path).generate(ask())
    assert (caught.value.retry_after, caught.value.status) == (2, 429)


async def test_a_mismatch_is_no_provider_error_and_is_not_tried_again(tmp_path: Path) -> None:
    # CASS-09, EVAL-35
    path = tmp_path / "c.json"
    await recorded(path, "one", texts=("something else",))
    spare = mock_model(["spare"])
    player = record_replay(None, cassette=path)
    with pytest.raises(CassetteMismatchError) as caught:
        await create_agent(provider=with_fallback([with_retry(player), spare])).send("Hi")
    assert (caught.value.call_number, spare.calls) == (1, [])


async def test_a_tool_that_answers_differently_is_told_apart(tmp_path: Path) -> None:
    # LES-41
    path = tmp_path / "c.json"
    answers = iter([1, 2])

    @tool
    def count() -> int:
        """Counts."""
        return next(answers)

    script = [{"tool_calls": [{"name": "count"}]}, "done"]
    await create_agent(provider=record_replay(mock_model(script), cassette=path, mode="record"), tools=[count]).send("Hi")
    with pytest.raises(CassetteMismatchError, match="A tool answered differently"):
        await create_agent(provider=record_replay(None, cassette=path), tools=[count]).send("Hi")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("{", "not readable JSON"),
        ('{"version": 2}', "version 2"),
        ('{"version": 1, "provider": {}, "entries": []}', "no provider"),
        ('{"version": 1, "provider": {"name": "m"}, "entries": [{"kind": "odd"}]}', "malformed entry 1"),
        (
            '{"version": 1, "provider": {"name": "m"}, "entries": [{"kind": "generate", "request": {"messages": []}}]}',
            "malformed entry 1: its response",
        ),
    ],
)
def test_a_file_that_cannot_be_replayed_says_why(text: str | None, said: str, tmp_path: Path) -> None:
    # CASS-13
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CassetteError, match=said) as caught:
        record_replay(None, cassette=path, mode="replay")
    assert str(path) in str(caught.value)
    assert "mode='record'" in str(caught.value)


async def test_an_aborted_call_uses_up_no_entry(tmp_path: Path) -> None:
    # CASS-14
    path = tmp_path / "c.json"
    await recorded(path, "one")
    player = record_replay(None, cassette=path)
    abort = AbortSignal()
    abort.abort("stop")
    with pytest.raises(Exception, match="stop"):
        await player.generate(ask(abort=abort))
    assert (await player.generate(ask())).text == "one"


async def test_the_mode_is_decided_when_the_provider_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASS-01, CASS-15
    path = tmp_path / "c.json"
    first = record_replay(mock_model(["one", "two"]), cassette=path)
    await first.generate(ask())
    await first.generate(ask())
    assert len(json.loads(path.read_text())["entries"]) == 2
    monkeypatch.setenv("LOUSHO_RECORD", "1")
    del first
    await record_replay(mock_model(["three"]), cassette=path).generate(ask())
    monkeypatch.delenv("LOUSHO_RECORD")
    assert (await record_replay(None, cassette=path).generate(ask())).text == "three"


def test_recording_needs_a_provider_and_a_file_of_its_own(tmp_path: Path) -> None:
    # CASS-02
    with pytest.raises(ConfigurationError, match="needs a provider"):
        record_replay(None, cassette=tmp_path / "c.json", mode="record")
    first = record_replay(mock_model(["a"]), cassette=tmp_path / "c.json", mode="record")
    with pytest.raises(ConfigurationError, match="recording to"):
        record_replay(mock_model(["a"]), cassette=tmp_path / "x" / ".." / "c.json", mode="record")
    assert first.name == "mock"


async def test_a_recording_that_was_closed_leaves_the_file_to_others_without_garbage_collection(tmp_path: Path) -> None:
    # CASS-02
    class Closable:
        name, default_model, closed = "mock", None, False

        def __init__(self) -> None:
            self.generate = mock_model(["a", "b"]).generate

        async def aclose(self) -> None:
            self.closed = True

    inner, path = Closable(), tmp_path / "c.json"
    gc.disable()
    try:
        first = record_replay(inner, cassette=path, mode="record")
        cycle: list[Any] = [first]
        cycle.append(cycle)
        async with create_agent(provider=first) as agent:
            await agent.send("Hi")
        assert inner.closed
        second = record_replay(mock_model(["c"]), cassette=path, mode="record")
        await second.generate(ask())
        with pytest.raises(ConfigurationError, match="recording to"):
            await first.generate(ask())
        assert json.loads(path.read_text())["entries"][0]["response"]["text"] == "c"
        first.close()  # has nothing to give up
        with pytest.raises(ConfigurationError, match="close that one first"):
            record_replay(mock_model(["d"]), cassette=path, mode="record")
        second.close()
        assert (await first.generate(ask())).text == "b"
    finally:
        gc.enable()


async def test_recording_the_same_again_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    # LES-44
    path = tmp_path / "c.json"
    data = await recorded(path, "one", "two", texts=("a", "b"))
    data["recordedAt"] = "2020-01-01T00:00:00.000Z"
    path.write_text(json.dumps(data, indent=2) + "\n")
    before = path.read_bytes()
    await recorded(path, "one", "two", texts=("a", "b"))
    assert path.read_bytes() == before
    assert (await recorded(path, "one", "three", texts=("a", "b")))["recordedAt"] != data["recordedAt"]


async def test_calls_made_together_are_kept_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    gate = asyncio.Event()

    async def slow(request: GenerateOptions) -> str:
        await gate.wait()
        return "slow"

    async def quick(request: GenerateOptions) -> str:
        gate.set()
        return "quick"

    provider = record_replay(mock_model([slow, quick]), cassette=path, mode="record")
    await asyncio.gather(provider.generate(ask("a")), provider.generate(ask("b")))
    entries = json.loads(path.read_text())["entries"]
    assert [(entry["request"]["messages"][0]["text"], entry["response"]["text"]) for entry in entries] == [
        ("a", "slow"),
        ("b", "quick"),
    ]


async def test_streams_are_replayed_at_once_or_with_their_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASS-06
    path = tmp_path / "c.json"
    provider = record_replay(mock_model(["one two"]), cassette=path, mode="record")
    live = [chunk async for chunk in provider.stream(ask())]
    data = json.loads(path.read_text())
    for chunk in data["entries"][0]["chunks"]:
        chunk["delayMs"] = 40
    path.write_text(json.dumps(data))
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert [chunk async for chunk in record_replay(None, cassette=path).stream(ask())] == live
    assert waited == []
    assert [chunk async for chunk in record_replay(None, cassette=path, replay_timing=True).stream(ask())] == live
    assert waited == [0.04] * len(live)


async def test_a_stream_that_broke_off_breaks_off_again(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    provider = record_replay(mock_model([Down(400)]), cassette=path, mode="record")
    with pytest.raises(CompactedLLMProviderError):
        await create_agent(provider=provider).stream("Hi").result
    await provider.save()
    with pytest.raises(CompactedLLMProviderError, match="status 400"):
        await create_agent(provider=record_replay(None, cassette=path)).stream("Hi").result


def test_helpers_of_tests() -> None:
    # TEST-02
    from lousho_ray.testing import make_tool_context

    assert make_tool_context(session_id="s").session_id == "s"


async def test_all_events_of_a_run_are_collected() -> None:
    # TEST-07
    from lousho_ray.testing import collect

    events = await collect(agent_of("Hi").stream("x"))
    assert [events[0].type, events[-1].type] == ["run.start", "run.done"]
