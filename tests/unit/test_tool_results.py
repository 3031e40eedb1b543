"""Results: JSON of any value, the cap, and the shape of failures."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from lousho_ray.errors import ConfigurationError, ToolArgumentsValidationError, ToolExecutionError
from lousho_ray.messages import ImagePart
from lousho_ray.tools import define_tool, tool_error_result
from lousho_ray.tools.results import cap_result, encode_result, error_result, to_json
from lousho_ray.tools.workspace import WorkspaceError

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = "red"
    ODD = object()


class Count(enum.IntEnum):
    TWO = 2


class Model(BaseModel):
    when: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    rate: float = math.nan
    inner: dict[str, Any] = Field(default={}, alias="innerData")


@dataclass
class Row:
    id: int
    tags: set[str]


class Table:
    """Like a pandas DataFrame."""

    columns = ("a",)

    def to_dict(self, orient: str = "dict") -> Any:
        return [{"a": 1}] if orient == "records" else {"a": {0: 1}}


class Frame:
    """Like a polars DataFrame."""

    def to_dicts(self) -> Any:
        return [{"a": 1}]


class Array:
    """Like a numpy array."""

    def tolist(self) -> Any:
        return [1.5, math.inf]


class Opaque:
    pass


class Broken:
    def __str__(self) -> str:
        raise RuntimeError

    def to_dict(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        ("text", "text"),
        (3, 3),
        (1.5, 1.5),
        (math.nan, None),
        ({"x": [math.inf, -math.inf]}, {"x": [None, None]}),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (timedelta(minutes=1, milliseconds=500), 60.5),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.10"), "1.10"),
        (PurePosixPath("/a/b"), "/a/b"),
        (Colour.RED, "red"),
        (Colour.ODD, "ODD"),
        (Count.TWO, 2),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        ({"a", 1}, ["a", 1]),
        ((1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        (deque([1]), [1]),
        ({}.values(), []),
        (Pair(1, 2), {"left": 1, "right": 2}),
        (OrderedDict(a=1), {"a": 1}),
        (Model(), {"when": "2026-01-02T00:00:00Z", "rate": None, "innerData": {}}),
        (Row(1, {"b", "a"}), {"id": 1, "tags": ["a", "b"]}),
        (ValueError("no"), {"error": "ValueError", "message": "no"}),
        (Table(), [{"a": 1}]),
        (Frame(), [{"a": 1}]),
        (Array(), [1.5, None]),
        (
            {7: "a", None: "b", True: "c", 1.5: "f", (1, 2): "d", Colour.RED: "e"},
            {"7": "a", "null": "b", "true": "c", "1.5": "f", "(1, 2)": "d", "red": "e"},
        ),
        (b"plain text", "plain text"),
        (bytearray(b"\xff\xfe"), {"bytes": 2, "mimeType": "application/octet-stream", "base64": "//4="}),
        (bytes(10_000_000), {"bytes": 10_000_000, "mimeType": "application/octet-stream"}),
        (b"%PDF-1.7" + bytes(9_000), {"bytes": 9008, "mimeType": "application/pdf"}),
        (10**5000, "(an integer of 16610 bits)"),
        ("a\0b", "a\0b"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_have_one_stable_json_form(value: Any, expected: Any) -> None:  # TOOL-28, RUN-D8, T08, S10, W28
    encoded = encode_result(value)
    assert encoded.safe == expected
    assert json.loads(encoded.text) == encoded.safe
    assert encode_result(value) == encoded


@pytest.mark.parametrize(
    "value",
    [Opaque(), lambda: 1, object, iter([1]), Broken(), open],
    ids=["object", "function", "class", "iterator", "broken", "built-in"],
)
def test_what_json_cannot_carry_is_null_for_the_model_and_described_in_events(value: Any) -> None:  # TOOL-28, RUN-D8, T08
    encoded = encode_result({"kept": 1, "odd": value})
    assert json.loads(encoded.text) == {"kept": 1, "odd": None}
    assert encoded.safe["kept"] == 1
    assert isinstance(encoded.safe["odd"], str)
    assert encoded.safe["odd"]
    assert "0x" not in encoded.safe["odd"]
    assert encode_result(value).text == "null"


def test_self_reference_and_deep_nesting_end() -> None:  # T08
    loop: dict[str, Any] = {"a": 1}
    loop["self"] = loop
    assert json.loads(encode_result(loop).text) == {"a": 1, "self": None}
    assert encode_result(loop).safe["self"] == "(circular reference)"
    shared = [1]
    assert encode_result([shared, shared]).safe == [[1], [1]]
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert encode_result(deep).text.startswith("[[[")


def test_model_keeps_its_json_serialisers_and_loses_only_what_has_no_json_form() -> None:  # RUN-D8
    class Mixed(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        token: SecretStr = SecretStr("hunter2")
        odd: Any = None

        @field_serializer("token", when_used="json")
        def masked(self, token: SecretStr) -> str:
            return "masked"

    assert encode_result(Mixed()).safe == {"token": "masked", "odd": None}
    encoded = encode_result(Mixed(odd=Opaque()))
    assert "hunter2" not in encoded.text + str(encoded.safe)
    assert json.loads(encoded.text)["odd"] is None


def test_lone_surrogates_are_replaced_everywhere() -> None:  # W22
    for value in ("x\ud83d", ["x\ud83d"], {"x\ud83d": Path("x\ud83d")}, ValueError("x\ud83d")):
        encoded = encode_result(value)
        assert "x\ufffd" in encoded.text
        encoded.text.encode()
    assert encode_result("\ud83d\ude00").safe == "\N{GRINNING FACE}"
    assert encode_result("ä").text == '"ä"'


def test_images_are_named_in_the_text_and_handed_on() -> None:  # T11
    encoded = encode_result({"plot": PNG, "photo": ImagePart("https://example.com/a.jpg", "image/jpeg")})
    assert json.loads(encoded.text) == {
        "plot": {"type": "image", "mimeType": "image/png", "bytes": len(PNG)},
        "photo": {"type": "image", "mimeType": "image/jpeg"},
    }
    assert encoded.images == (ImagePart(PNG, "image/png"), ImagePart("https://example.com/a.jpg", "image/jpeg"))
    assert encode_result(["none"]).images == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20) | st.datetimes(),
    lambda children: st.lists(children) | st.dictionaries(st.text() | st.integers(), children) | st.sets(st.text()),
    max_leaves=20,
)


@given(json_values)
def test_any_value_encodes_to_text_that_parses_back_to_the_safe_value(value: Any) -> None:
    encoded = encode_result(value)
    encoded.text.encode()
    assert json.loads(encoded.text) == encoded.safe


# ------------------------------------------------------------------------------------------------------------------ cap


def test_short_results_are_not_touched() -> None:  # TOOL-29
    assert cap_result('"abc"', 3) == '"abc"'
    assert cap_result("[1,2]", 5) == "[1,2]"
    assert cap_result('"' + "x" * 100_000 + '"', math.inf) == '"' + "x" * 100_000 + '"'
    escaped = to_json('"' * 100)
    assert len(escaped) > 100
    assert cap_result(escaped, 100) == escaped


def test_cut_keeps_head_and_tail_and_names_the_option() -> None:  # TOOL-42
    text = "h" * 600 + "m" * 5_000 + "t" * 400
    cut = json.loads(cap_result(to_json(text), 1_000))
    assert cut.startswith("h" * 600 + "\n")
    assert cut.endswith("\n" + "t" * 400)
    assert "m" * 3 not in cut
    assert "5000" in cut
    assert "max_tool_result_chars=1000" in cut
    assert len(cut) - 1_000 < 300


def test_cut_of_a_structured_result_is_a_json_string() -> None:  # TOOL-42
    whole = to_json([{"n": n} for n in range(1_000)])
    cut = json.loads(cap_result(whole, 100))
    assert cut.startswith(whole[:60])
    assert cut.endswith(whole[-40:])
    assert str(len(whole) - 100) in cut


@given(st.text(), st.integers(1, 50))
def test_cut_is_always_valid_json_within_the_cap(text: str, cap: int) -> None:
    whole = encode_result(text).text
    cut = json.loads(cap_result(whole, cap))
    assert isinstance(cut, str)
    assert len(cut) <= max(cap + 300, cap)


# --------------------------------------------------------------------------------------------------------------- errors


def test_failure_has_the_documented_shape() -> None:  # TOOL-30, RUN-40
    text, payload = error_result("search", ValueError("no such page"))
    assert payload == {"error": "ValueError", "toolName": "search", "message": "no such page", "kind": "execution"}
    assert json.loads(text) == payload
    assert tool_error_result is error_result


def test_message_is_cut_and_carries_no_traceback_or_hint_line() -> None:  # TOOL-30, TOOL-32
    message = error_result("x", ValueError("a" * 5_000)).payload["message"]
    assert len(message) == 2_000
    assert message.endswith("... (truncated)")
    assert error_result("x", ToolExecutionError("just this")).payload["message"] == "just this"
    assert error_result("x", ConfigurationError("just this")).payload["message"] == "just this"
    assert error_result("x", ValueError()).payload["message"] == "ValueError"
    assert error_result("x", ValueError("a\ud83d")).text.encode()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("execution", "ToolExecutionError"),
        ("validation", "ToolArgumentsValidationError"),
        ("not-found", "ToolNotFoundError"),
        ("rejected", "ToolRejectedError"),
        ("not-run", "ToolNotRunError"),
        ("mcp", "McpToolError"),
        ("sandbox", "SandboxRequiredError"),
        ("denied", "ToolDeniedError"),
    ],
)
def test_every_kind_has_its_error_name_and_extras(kind: Any, name: str) -> None:  # TOOL-31, RUN-41
    payload = error_result("x", kind, "why", note="n", reason=None).payload
    assert payload == {"error": name, "toolName": "x", "message": "why", "kind": kind, "note": "n"}


def test_exceptions_choose_their_kind() -> None:  # TOOL-31, RUN-43
    class Refused(Exception):
        tool_error_kind = "denied"

    class Confused(Exception):
        tool_error_kind = "whatever"

    assert error_result("x", Refused("no")).payload["kind"] == "denied"
    assert error_result("x", Confused("no")).payload["kind"] == "execution"


def test_invalid_arguments_carry_their_issues() -> None:  # TOOL-16
    issue = {"path": "a", "message": "required, but missing"}
    payload = error_result("x", ToolArgumentsValidationError("bad", tool_name="x", issues=[issue])).payload
    assert payload["issues"] == [issue]
    assert payload["error"] == "ToolArgumentsValidationError"
    assert payload["kind"] == "validation"


@pytest.mark.parametrize(
    ("options", "warned"),
    [({}, True), ({"effect": "once"}, True), ({"effect": "idempotent"}, False), ({"annotations": {"read_only_hint": True}}, False)],
)
def test_failed_call_that_may_have_had_an_effect_says_so(options: dict[str, Any], warned: bool) -> None:  # C11
    made = define_tool(name="pay", description="Pays.", execute=lambda: None, **options)
    assert ("may have taken effect" in error_result(made, ValueError("502")).text) is warned
    assert "hint" not in error_result(made, "denied", "no").payload
    assert "hint" not in error_result(made, WorkspaceError("refused before anything was done")).payload
    assert "hint" not in error_result(made, ToolArgumentsValidationError("bad")).payload
