"""The event schema: every documented type, its JSON form, and how events come back from it."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any, get_args

import pytest

from lousho_ray import events
from lousho_ray.errors import LoushoError, ValidationError
from lousho_ray.events import (
    AGENT_EVENT_SCHEMA_VERSION,
    EVENT_TYPES,
    ErrorInfo,
    Event,
    EventUsage,
    Failure,
    RunDone,
    RunStart,
    SubagentInfo,
    TextDelta,
    ToolDone,
    UnknownEvent,
    event_from_dict,
    is_agent_event,
    is_step_event,
    is_text_event,
    is_tool_event,
)
from lousho_ray.usage import ProviderUsage, StepUsage, Usage

ENVELOPE: dict[str, Any] = {"run_id": "r-1", "seq": 4, "timestamp": "2026-01-01T00:00:00.000Z"}
WIRE = {"runId": "r-1", "seq": 4, "timestamp": "2026-01-01T00:00:00.000Z", "v": 1}
CALL = {"toolCallId": "c1", "toolName": "search"}
USAGE = {
    "promptTokens": 10,
    "completionTokens": 2,
    "totalTokens": 12,
    "inputTokens": 10,
    "outputTokens": 2,
    "estimated": False,
}

# EVT-18..EVT-24, LES-10, LES-18, LES-19, LES-22, LES-24, LES-27, LES-53, CODE-11: per type, the JSON of an event with only its
# required fields, and the optional fields it may have besides.
DOCUMENTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "run.start": ({"agentName": "lead"}, {"agentId": "a-1", "continues": {"approvalId": "ap-1"}}),
    "step.start": ({"step": 1}, {}),
    "text.delta": ({"text": "Hel"}, {}),
    "text.done": ({"text": "Hello"}, {}),
    "reasoning.start": ({}, {}),
    "reasoning.delta": ({"text": "hm"}, {}),
    "reasoning.done": ({"text": "hm"}, {"tokens": 3}),
    "tool.start": ({**CALL, "args": {"q": 1}}, {"executedBy": "provider", "parentToolCallId": "c0"}),
    "tool.resume": ({**CALL, "args": {"q": 1}}, {}),
    "tool.partial": ({**CALL, "output": [1], "index": 0}, {"parentToolCallId": "c0"}),
    "tool.done": (
        {**CALL, "result": None, "durationMs": 1.5},
        {"replacedByHook": "cache", "executedBy": "provider", "parentToolCallId": "c0"},
    ),
    "tool.error": (
        {**CALL, "error": {"name": "ValueError", "message": "no"}, "durationMs": 1.5},
        {"executedBy": "provider", "parentToolCallId": "c0"},
    ),
    "todo.updated": (
        {
            "todos": [{"id": "1", "content": "x", "status": "pending"}],
            "counts": {"pending": 1, "in_progress": 0, "completed": 0, "total": 1},
            "toolCallId": "c1",
        },
        {},
    ),
    "approval.requested": (
        {**CALL, "approvalId": "ap-1", "args": {}},
        {
            "kind": "question",
            "question": {"text": "Which?", "options": ["a"], "allowFreeText": True},
            "signIn": {"provider": "x"},
            "expiresAt": "2026-01-02T00:00:00.000Z",
            "subagentPath": ["child"],
        },
    ),
    "approval.resolved": (
        {"approvalId": "ap-1", "toolCallId": "c1", "approved": True, "waitedMs": 12.0},
        {"by": "ann", "note": "fine", "edited": True},
    ),
    "permission.decision": (
        {**CALL, "decision": "deny", "at": "2026-01-01T00:00:00.000Z"},
        {
            "rule": {"index": 0, "reason": "no"},
            "args": {},
            "mode": "plan",
            "reason": "no",
            "hook": "h",
            "by": "ann",
            "edited": True,
            "shadow": True,
            "parentToolCallId": "c0",
        },
    ),
    "step.done": ({"step": 1, "finishReason": "stop"}, {"usage": {**USAGE, "costUsd": 0.25}}),
    "error": ({"error": {"name": "E", "message": "m"}}, {}),
    "provider.retry": (
        {
            "attempt": 1,
            "maxRetries": 2,
            "delayMs": 500.0,
            "error": {"message": "busy", "category": "rate-limit"},
            "provider": "openai",
        },
        {},
    ),
    "provider.fallback": (
        {"from": "openai", "to": "anthropic", "error": {"message": "busy"}},
        {"fromModel": "a", "toModel": "b"},
    ),
    "compaction.start": (
        {"strategy": "prune", "tokensBefore": 10, "contextWindow": 20, "thresholdTokens": 9},
        {"trigger": "manual"},
    ),
    "compaction.done": (
        {"strategy": "two-phase", "tokensBefore": 10, "tokensAfter": 5, "prunedToolCallIds": ["c1"]},
        {"summary": True, "error": {"message": "m"}, "trigger": "manual", "applied": "prune", "noop": False},
    ),
    "context.cleared": ({"sessionId": "s", "messagesCleared": 3}, {}),
    "budget.exceeded": ({"limit": "maxTokens", "value": 12, "max": 10, "scope": "run"}, {}),
    "input.queued": ({"id": "i", "text": "t"}, {}),
    "input.steered": ({"id": "i", "text": "t", "mode": "immediate"}, {}),
    "input.applied": ({"id": "i", "step": 2}, {}),
    "guardrail.tripped": (
        {"name": "pii", "kind": "tool", "reason": "r"},
        {"toolName": "search", "info": {"types": ["email"]}},
    ),
    "guardrail.rewrote": (
        {"name": "pii", "kind": "output", "reason": "r"},
        {"toolName": "search", "info": {"types": ["email"]}},
    ),
    "handoff": ({"from": "a", "to": "b", "toolCallId": "c1"}, {}),
    "agent.drift": (
        {"toolsAdded": ["a"], "toolsRemoved": [], "toolsChanged": [], "instructions": False},
        {"model": {"from": "a", "to": "b"}},
    ),
    "run.done": (
        {"finishReason": "stop", "text": "Hello"},
        {
            "usage": {**USAGE, "costUsd": 0.25, "modelCalls": 1, "hostedToolCalls": {"web_search": 1}},
            "object": {"a": [1]},
            "outputRepaired": True,
        },
    ),
}

SUBAGENT = {
    "name": "b",
    "depth": 2,
    "toolCallId": "c2",
    "parent": {"name": "a", "depth": 1, "toolCallId": "c1", "description": "d"},
}


def test_the_documented_types_are_the_ones_there_are() -> None:
    assert set(EVENT_TYPES) == set(DOCUMENTED)
    assert {cls.type for cls in get_args(Event)} == set(DOCUMENTED)
    assert {cls.__name__ for cls in get_args(Event)} <= set(events.__all__)


@pytest.mark.parametrize("type", DOCUMENTED)
@pytest.mark.parametrize("full", [False, True], ids=["required", "full"])
def test_each_event_has_its_documented_json_and_comes_back_from_it(type: str, full: bool) -> None:
    # EVT-14, EVT-15, EVT-16, EVT-52, TEST-07
    required, optional = DOCUMENTED[type]
    document = {"type": type, **WIRE, **required}
    if full:
        document |= {**optional, "subagent": SUBAGENT}
    event = event_from_dict(json.loads(json.dumps(document)))
    assert event.type == type
    assert event.to_dict() == document
    assert json.loads(json.dumps(event.to_dict())) == event.to_dict()
    assert event_from_dict(event.to_dict()) == event


@pytest.mark.parametrize("type", DOCUMENTED)
def test_each_event_pickles_and_stays_frozen(type: str) -> None:
    required, optional = DOCUMENTED[type]
    event = event_from_dict({"type": type, **WIRE, **required, **optional, "subagent": SUBAGENT})
    assert not isinstance(event, UnknownEvent)
    back = pickle.loads(pickle.dumps(event))
    assert back == event
    assert type_and_slots(back) == type_and_slots(event)
    with pytest.raises(dataclasses.FrozenInstanceError):
        back.seq = 9


@pytest.mark.parametrize("type", DOCUMENTED)
def test_a_required_field_that_is_missing_is_named(type: str) -> None:
    # EVT-52
    required, _ = DOCUMENTED[type]
    for key in required:
        document = {"type": type, **WIRE, **required}
        del document[key]
        with pytest.raises(ValidationError, match=f"'{key}'") as caught:
            event_from_dict(document)
        assert key in caught.value.errors


def test_python_fields_are_snake_case_and_tuples_become_lists() -> None:
    # EVT-16
    event = events.ApprovalRequested(
        **ENVELOPE, approval_id="a", tool_call_id="c", tool_name="t", args={}, subagent_path=("x", "y"), sign_in={"provider": "p"}
    )
    assert event.to_dict()["subagentPath"] == ["x", "y"]
    assert event.to_dict()["signIn"] == {"provider": "p"}


def test_optional_fields_without_a_value_are_absent_but_a_null_result_stays() -> None:
    # EVT-16, EVT-18
    done = ToolDone(**ENVELOPE, tool_call_id="c", tool_name="t", result=None, duration_ms=1)
    assert done.to_dict()["result"] is None
    assert set(done.to_dict()) == {"type", "runId", "seq", "timestamp", "v", "toolCallId", "toolName", "result", "durationMs"}


def test_the_envelope_has_the_schema_version() -> None:
    # EVT-14
    assert TextDelta(**ENVELOPE, text="x").v == AGENT_EVENT_SCHEMA_VERSION == 1


def test_a_value_of_the_json_form_can_be_changed_without_changing_the_event() -> None:
    event = RunStart(**ENVELOPE, agent_name="a", continues={"sessionId": "s"})
    event.to_dict()["continues"]["sessionId"] = "other"
    assert event.continues == {"sessionId": "s"}


def test_an_unknown_type_and_unknown_fields_are_accepted() -> None:
    # EVT-17, EVT-52
    newer = {"type": "tool.teleported", **WIRE, "where": [1]}
    event = event_from_dict(newer)
    assert isinstance(event, UnknownEvent)
    assert (event.type, event.data, event.to_dict()) == ("tool.teleported", newer, newer)
    assert is_agent_event(newer)
    known = event_from_dict({"type": "text.delta", **WIRE, "text": "x", "colour": "red", "subagent": {**SUBAGENT, "mood": "good"}})
    assert isinstance(known, TextDelta)
    assert known.subagent == SubagentInfo(
        name="b", depth=2, tool_call_id="c2", parent=SubagentInfo(name="a", depth=1, tool_call_id="c1", description="d")
    )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"type": 3}, "type"),
        ({"runId": None}, "runId"),
        ({"seq": "4"}, "seq"),
        ({"seq": True}, "seq"),
        ({"timestamp": 1}, "timestamp"),
        ({"v": "1"}, "v"),
        ({"subagent": "child"}, "subagent"),
    ],
)
def test_a_broken_envelope_is_no_event_and_is_named(change: dict[str, Any], key: str) -> None:
    # EVT-52
    document = {"type": "text.delta", **WIRE, "text": "x", **change}
    assert not is_agent_event(document)
    with pytest.raises(ValidationError, match=f"'{key}' must be") as caught:
        event_from_dict(document)
    assert list(caught.value.errors) == [key]


@pytest.mark.parametrize("value", [None, [], "text.delta", {}, {"type": "text.delta"}])
def test_other_values_are_no_events(value: Any) -> None:
    assert not is_agent_event(value)
    with pytest.raises(ValidationError):
        event_from_dict(value)


def test_a_nested_value_that_is_no_object_is_named() -> None:
    with pytest.raises(ValidationError, match="'error' must be an object"):
        event_from_dict({"type": "error", **WIRE, "error": "boom"})


@pytest.mark.parametrize("type", DOCUMENTED)
def test_families(type: str) -> None:
    # EVT-52
    event = event_from_dict({"type": type, **WIRE, **DOCUMENTED[type][0]})
    family = type.partition(".")[0]
    assert is_text_event(event) == (family == "text")
    assert is_tool_event(event) == (family == "tool")
    assert is_step_event(event) == (family == "step")


def test_an_error_in_an_event_is_plain_data() -> None:
    # ERR-30, EVT-16
    event = events.ErrorEvent(**ENVELOPE, error=ErrorInfo.of(LoushoError("m", code="LOUSHO_SESSION_BUSY")))
    assert event.to_dict()["error"] == {"name": "LoushoError", "message": "m", "code": "LOUSHO_SESSION_BUSY"}
    retry = Failure(message="busy")
    assert retry.to_dict() == {"message": "busy"}


def test_usage_of_a_run_of_a_step_and_of_a_call() -> None:
    # EVT-19, COST-09
    reported = ProviderUsage(10, 2, cost_usd=0.25)
    run = Usage(hosted_tool_calls={"web_search": 1})
    run.add_call("m", reported, None)
    assert EventUsage.of(reported).to_dict() == {**USAGE, "costUsd": 0.25}
    assert EventUsage.of(StepUsage(1, "m", reported, estimated=True)).to_dict() == {**USAGE, "estimated": True}
    assert EventUsage.of(StepUsage(1, "m", reported, cost_usd=0.5)).to_dict() == {**USAGE, "costUsd": 0.5}
    assert EventUsage.of(run).to_dict() == {**USAGE, "modelCalls": 1, "hostedToolCalls": {"web_search": 1}}
    assert "costUsd" not in EventUsage.of(run).to_dict()


def test_a_failed_run_is_done_without_usage() -> None:
    # EVT-20
    assert RunDone(**ENVELOPE, finish_reason="error", text="").to_dict() == {
        "type": "run.done",
        **WIRE,
        "finishReason": "error",
        "text": "",
    }


def test_a_batch_of_deltas_pickles_to_few_bytes_each() -> None:
    batch = [TextDelta(run_id="r" * 32, seq=i, timestamp="2026-01-01T00:00:00.000Z", text="word ") for i in range(1000)]
    assert len(pickle.dumps(batch, 5)) / len(batch) < 60


def type_and_slots(event: Any) -> tuple[type, bool]:
    return type(event), hasattr(event, "__dict__")
