"""Arguments of a call: JSON text in, a validated value or reworded issues out."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field, field_validator

from lousho_ray.errors import ToolArgumentsValidationError
from lousho_ray.tools import Tool, define_tool, tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", 1, None]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Order(BaseModel):
    sku: str
    amount: int = 1

    @field_validator("sku")
    @classmethod
    def known(cls, sku: str) -> str:
        if sku == "none":
            raise ValueError("no such article")
        return sku


def plain_tool(input: Any = SCHEMA) -> Tool[..., Any]:
    return define_tool(name="weather", description="Weather.", input=input, execute=lambda args: args)


@tool
def order(sku: str, amount: int = 1, orders: Annotated[list[Order], Field(max_length=2)] = []) -> None:  # noqa: B006
    """Orders."""


def issues(made: Tool[..., Any], arguments: str) -> list[dict[str, str]]:
    with pytest.raises(ToolArgumentsValidationError) as caught:
        made.parse(arguments)
    assert caught.value.tool_name == made.name
    return caught.value.issues


@pytest.mark.parametrize("blank", ["", "  \n", "{}", "null"])
def test_blank_arguments_are_an_empty_object(blank: str) -> None:  # W05
    parsed = define_tool(name="x", description="d", execute=lambda: 1).parse(blank)
    assert parsed.plain == {}


@pytest.mark.parametrize(
    "text", ['"abc"', "[]", "123", "true", "{", '{"a": 1} x', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}']
)
@pytest.mark.parametrize("made", [plain_tool(), order], ids=["schema", "signature"])
def test_what_is_no_json_object_is_an_issue_without_a_path(made: Tool[..., Any], text: str) -> None:  # TOOL-16, W05, W28
    found = issues(made, text)
    assert [issue["path"] for issue in found] == [""]
    assert found[0]["message"]


def test_absurd_json_is_an_issue_too() -> None:
    assert issues(order, "[" * 100_000) == [{"path": "", "message": "nested too deeply"}]
    assert issues(order, '{"amount": ' + "9" * 10_000 + "}")[0]["path"] == ""
    assert issues(order, '{"é": ' + "[" * 900 + "]" * 900 + "}")


def test_last_of_repeated_keys_wins_everywhere() -> None:  # W28
    parsed = order.parse('{"sku": "a", "sku": "b"}')
    assert parsed.value["sku"] == parsed.plain["sku"] == "b"


def test_defaults_and_coercions_reach_the_function_and_the_events() -> None:  # TOOL-03
    parsed = order.parse('{"sku": "a", "amount": "3", "orders": [{"sku": "b"}]}')
    assert parsed.value == {"sku": "a", "amount": 3, "orders": [Order(sku="b", amount=1)]}
    assert parsed.plain == {"sku": "a", "amount": 3, "orders": [{"sku": "b", "amount": 1}]}


def test_model_input_is_an_instance_and_schema_input_plain_data() -> None:  # TOOL-03
    assert plain_tool(Order).parse('{"sku": "a"}').value == Order(sku="a")
    assert plain_tool().parse('{"city": "Rome", "days": 2}').value == {"city": "Rome", "days": 2}


def test_issues_name_path_and_problem() -> None:  # TOOL-16, RUN-42
    with pytest.raises(ToolArgumentsValidationError) as caught:
        order.parse('{"amount": "x", "orders": [{"sku": "none"}], "amont": 1}')
    found = {issue["path"]: issue["message"] for issue in caught.value.issues}
    assert set(found) == {"sku", "amount", "orders.0.sku", "amont"}
    assert found["sku"] == "required, but missing"
    assert found["orders.0.sku"].startswith("no such article")
    assert "integer" in found["amount"]
    assert '"x"' not in found["amount"]  # ERR-D6
    assert "Did you mean 'amount'?" in found["amont"]
    message = caught.value.message
    assert "'order'" in message
    assert "4 issues" in message
    assert all(path in message for path in found)
    assert "pydantic" not in message


def test_issues_of_a_json_schema_read_the_same() -> None:  # TOOL-16
    found = {i["path"]: i["message"] for i in issues(plain_tool(), '{"days": 0, "tags": ["a", 3], "unit": "K", "citi": "x"}')}
    assert set(found) == {"city", "days", "tags.1", "unit", "citi"}
    assert found["city"] == "required, but missing"
    assert found["tags.1"] == "must be of type string (got integer)"
    assert '["C", 1, null]' in found["unit"]
    assert "Did you mean 'city'?" in found["citi"]


def test_number_of_issues_and_their_length_are_bounded() -> None:
    many = ", ".join(f'"k{i}": 1' for i in range(200))
    assert len(issues(order, f'{{"sku": "a", {many}}}')) == 20
    huge = issues(order, '{"sku": ' + str(["x" * 100_000]).replace("'", '"') + "}")
    assert len(huge[0]["message"]) < 300


@pytest.mark.parametrize(("sent", "value"), [('"1"', 1), ('"null"', None), ('"C"', "C")])
def test_enum_values_sent_as_text_get_their_type_back(sent: str, value: Any) -> None:  # T02
    arguments = f'{{"city": "Rome", "days": 1, "unit": {sent}}}'
    assert plain_tool().parse(arguments).value["unit"] == value

    @tool
    def pick(unit: Literal["C", 1, None]) -> None:
        """Picks."""

    assert pick.parse(f'{{"unit": {sent}}}').value == {"unit": value}
    assert issues(pick, '{"unit": "7"}')[0]["path"] == "unit"


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:  # W22
    assert order.parse(r'{"sku": "a\ud83d"}').value["sku"] == "a\ufffd"
    assert order.parse(r'{"sku": "\ud83d\ude00"}').value["sku"] == "\N{GRINNING FACE}"
    assert order.parse('{"sku": "a\ud83d"}').value["sku"] == "a\ufffd"
    assert plain_tool({}).parse(r'{"k\udc00": ["\ud83d"]}').value == {"k\ufffd": ["\ufffd"]}


def test_nul_bytes_pass_intact() -> None:  # S10
    assert order.parse(r'{"sku": "a\u0000b"}').value["sku"] == "a\0b"


def test_broken_validator_of_the_author_is_an_issue_and_no_crash() -> None:
    class Broken(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            raise KeyError("table")

    found = issues(plain_tool(Broken), '{"n": 1}')
    assert found == [{"path": "", "message": "validation failed: KeyError: 'table'"}]


def test_changing_the_arguments_does_not_change_what_events_hold() -> None:
    for made in (plain_tool({}), plain_tool(dict[str, Any]), order):
        parsed = made.parse('{"sku": "a", "orders": [{"sku": "b"}]}')
        before = repr(parsed.plain)
        parsed.value["orders"].append("changed")
        assert repr(parsed.plain) == before


def test_plain_arguments_are_validated_again() -> None:  # HOOK-08
    assert order.parse_plain({"sku": "a", "amount": "4"}).value["amount"] == 4
    with pytest.raises(ToolArgumentsValidationError, match="amount"):
        order.parse_plain({"sku": "a", "amount": "x"})


def test_plain_form_always_validates_again() -> None:
    class Secretive(BaseModel):
        model_config = ConfigDict(extra="forbid")
        n: int = Field(validation_alias="enn")
        token: SecretStr = SecretStr("s")

        @computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> int:
            return self.n * 2

    made = plain_tool(Secretive)
    plain = made.parse('{"enn": 3}').plain
    assert made.parse_plain(plain).value.n == 3


@given(st.text())
def test_any_text_is_either_parsed_or_refused_with_issues(text: str) -> None:
    with contextlib.suppress(ToolArgumentsValidationError):
        assert isinstance(plain_tool({}).parse(text).value, dict)
