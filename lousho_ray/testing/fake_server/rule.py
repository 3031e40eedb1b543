"""What the rules of all vendors share: how a rule is broken, the shapes of values, and the rules of JSON itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class BrokenRuleError(Exception):
    """A request broke a rule. `rule` is its short name; `status` and `type` go into the answer."""

    def __init__(self, rule: str, message: str, *, status: int = 400, type: str = "invalid_request_error") -> None:
        super().__init__(f"{message} [{rule}]")
        self.rule = rule
        self.status = status
        self.type = type


@dataclass(frozen=True, slots=True)
class Checked:
    """What a rule looks at."""

    request: RecordedRequest
    issued: Issued
    extra_keys: frozenset[str] = frozenset()

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.request.body
        return body


def words(text: str) -> frozenset[str]:
    """The words of a text: a readable way to write a long list of names."""
    return frozenset(text.split())


def broken(rule: str, message: str) -> NoReturn:
    raise BrokenRuleError(rule, message)


def need(holds: object, rule: str, message: str) -> None:
    if not holds:
        raise BrokenRuleError(rule, message)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object: UTF-8, no NaN, no key twice, no lone surrogates. Raises `BrokenRuleError`."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_constant, object_pairs_hook=_pairs)
    except UnicodeDecodeError as error:
        raise BrokenRuleError("body-utf8", f"The body is not valid UTF-8: {error}") from error
    except ValueError as error:
        raise BrokenRuleError("body-json", f"We could not parse the JSON body of your request: {error}") from error
    if b"\\ud" in raw or b"\\uD" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BrokenRuleError("body-surrogate", f"The body holds a lone surrogate: {error}") from error
    return an_object(value, "body")


def an_object(value: Any, where: str, *, keys: Collection[str] | None = None, required: Collection[str] = ()) -> dict[str, Any]:
    """`value` as an object with `required` and no keys but `keys`."""
    if not isinstance(value, dict):
        broken("shape", f"Invalid type for '{where}': expected an object, got {_kind(value)}")
    for key in required:
        need(key in value, "shape", f"Missing required parameter: '{where}.{key}'")
    if keys is not None:
        for key in value:
            need(key in keys, "unknown-key", f"Unknown parameter: '{where}.{key}'")
    return value


def a_list(value: Any, where: str, *, non_empty: bool = False) -> list[Any]:
    if not isinstance(value, list):
        broken("shape", f"Invalid type for '{where}': expected an array, got {_kind(value)}")
    need(value or not non_empty, "shape", f"Invalid '{where}': empty array, expected at least one item")
    return value


def a_text(value: Any, where: str, *, non_empty: bool = False) -> str:
    if not isinstance(value, str):
        broken("shape", f"Invalid type for '{where}': expected a string, got {_kind(value)}")
    need(value or not non_empty, "shape", f"Invalid '{where}': empty string")
    return value


def one_of(value: Any, where: str, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        broken("shape", f"Invalid value for '{where}': {value!r}; supported are {', '.join(sorted(allowed))}")
    return value


def matching(pattern: re.Pattern[str], value: Any, where: str, rule: str) -> str:
    text = a_text(value, where)
    need(pattern.fullmatch(text), rule, f"Invalid '{where}': {text!r} does not match '^{pattern.pattern}$'")
    return text


Check = Callable[[Any, str], object]


def number(low: float, high: float) -> Check:
    def check(value: Any, where: str) -> None:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        need(ok, "setting-value", f"Invalid '{where}': expected a number from {low:g} to {high:g}, got {value!r}")

    return check


def integer(low: int | None = None) -> Check:
    least = "" if low is None else f" of at least {low}"

    def check(value: Any, where: str) -> None:
        ok = isinstance(value, int) and not isinstance(value, bool) and (low is None or value >= low)
        need(ok, "setting-value", f"Invalid '{where}': expected an integer{least}, got {value!r}")

    return check


def boolean(value: Any, where: str) -> None:
    need(isinstance(value, bool), "setting-value", f"Invalid '{where}': expected a boolean, got {value!r}")


def choice(*allowed: str) -> Check:
    def check(value: Any, where: str) -> None:
        need(value in allowed, "setting-value", f"Invalid value for '{where}': {value!r}; supported are {', '.join(allowed)}")

    return check


def anything(value: Any, where: str) -> None:
    """Accepts every value that is not null."""


def check_keys(checked: Checked, known: dict[str, Check], required: Collection[str]) -> None:
    """Top-level keys: all known, none null, the required ones present, each with a value its own check accepts."""
    body = checked.body
    for key in required:
        need(key in body, "required-key", f"Missing required parameter: '{key}'")
    for key, value in body.items():
        if key not in known:
            need(key in checked.extra_keys, "unknown-key", f"Unknown parameter: '{key}'")
            continue
        need(value is not None, "null-setting", f"Invalid type for '{key}': null; leave the parameter out instead")
        known[key](value, key)


def check_arguments(value: Any, where: str, rule: str) -> None:
    """`arguments` of a call: a string that holds a JSON object."""
    text = value if isinstance(value, str) else broken(rule, f"Invalid '{where}': expected a string of JSON, got {_kind(value)}")
    try:
        parsed = json.loads(text, parse_constant=_constant)
    except ValueError:
        broken(rule, f"Invalid '{where}': not valid JSON: {text[:80]!r}")
    need(isinstance(parsed, dict), rule, f"Invalid '{where}': expected the JSON of an object, got {text[:80]!r}")


def unique(values: list[str], rule: str, what: str) -> None:
    twice = next((value for value in values if values.count(value) > 1), None)
    need(twice is None, rule, f"{what} must be unique; {twice!r} comes twice")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError(f"duplicate key in {[key for key, _ in pairs]}")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")
