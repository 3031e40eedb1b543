"""Permission rules and modes: which tool calls run, pause for a person, or are refused. Pure; the gate of the loop asks it.

Rules are tried in order and the first that matches decides; a mode then acts on what is left. No mode turns a refusal into a run.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from lousho_ray.errors import ConfigurationError, suggest

PermissionMode: TypeAlias = Literal["default", "plan", "acceptEdits", "dontAsk"]
MODES: tuple[PermissionMode, ...] = get_args(PermissionMode)

PermissionAction: TypeAlias = Literal["allow", "deny", "ask"]
ACTIONS: tuple[PermissionAction, ...] = get_args(PermissionAction)

Tools: TypeAlias = "str | Sequence[str] | re.Pattern[str]"
When: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], "bool | Awaitable[bool]"]

PLAN_REASON = "The run is in plan mode: it may read, not change anything. Describe the change instead of making it."
DONT_ASK_REASON = "The call needs a person's approval, and in mode dontAsk nobody is asked."

PLAN_BLOCK = (
    "## Plan mode\n\nYou are in plan mode: read and look things up, but change nothing. Calls of tools that change something are "
    "refused. Answer with a plan of the changes that you would make."
)
"""What the system prompt of a run that starts in plan mode says."""


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """One rule: for the calls of `tool` for which `when` holds.

    Attributes:
        tool: A tool's name, several names, a compiled pattern that is searched in the name, or `"*"`.
        action: `allow` runs the call unasked, `deny` refuses it, `ask` pauses it for a person.
        when: `fn(args, {"tool_name", "tool_call_id", "session_id"})`, sync or async. When it raises, the call fails with it.
        reason: Told to the model when the rule denies, and kept in the audit entry.
        ttl_ms: How long a person has to decide what this rule asks; in place of the agent's `approval_ttl_ms`.
    """

    tool: str | tuple[str, ...] | re.Pattern[str]
    action: PermissionAction
    when: When | None = None
    reason: str | None = None
    ttl_ms: float | None = None

    def names(self, tool_name: str) -> bool:
        """Whether the rule is for this tool."""
        if isinstance(self.tool, re.Pattern):
            return self.tool.search(tool_name) is not None
        return self.tool == "*" or tool_name in ((self.tool,) if isinstance(self.tool, str) else self.tool)


def allow(tools: Tools) -> PermissionRule:
    """Calls of these tools run without a person, also where the tool itself would ask."""
    return check_rule({"tool": tools, "action": "allow"}, "allow()")


def deny(tools: Tools, reason: str | None = None) -> PermissionRule:
    """Calls of these tools are refused; the model reads the reason."""
    return check_rule({"tool": tools, "action": "deny", "reason": reason}, "deny()")


def ask(tools: Tools) -> PermissionRule:
    """Calls of these tools wait for a person."""
    return check_rule({"tool": tools, "action": "ask"}, "ask()")


def check_rules(value: object) -> tuple[PermissionRule, ...]:
    """The checked `permissions` option: a list of rules, or of dicts with their fields.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, naming the rule.
    """
    if isinstance(value, str | Mapping | PermissionRule) or not isinstance(value, Sequence):
        raise _wrong("permissions", "a list of rules such as [deny('shell'), ask('pay')]", type(value).__name__)
    return tuple(check_rule(rule, f"permissions[{index}]") for index, rule in enumerate(value))


def check_rule(rule: object, field: str) -> PermissionRule:
    """One checked rule; `field` names it in errors."""
    given = {name: getattr(rule, name) for name in _FIELDS} if isinstance(rule, PermissionRule) else rule
    if not isinstance(given, Mapping):
        raise _wrong(field, "a rule, or a dict with tool and action", type(rule).__name__)
    for key in given:
        if key not in _FIELDS:
            advice = f"{suggest(str(key), _FIELDS)} Allowed: {', '.join(_FIELDS)}."
            raise ConfigurationError(f"{field} has no key {key!r}.{advice}", field=f"{field}.{key}")
    action: Any = given.get("action")
    when: Any = given.get("when")
    reason, ttl_ms = given.get("reason"), given.get("ttl_ms")
    if action not in ACTIONS:
        raise _wrong(f"{field}.action", "'allow', 'deny' or 'ask'", repr(action), suggest(str(action), ACTIONS))
    if not (when is None or callable(when)):
        raise _wrong(f"{field}.when", "a function of the arguments", type(when).__name__)
    if reason is not None and not isinstance(reason, str):
        raise _wrong(f"{field}.reason", "a str", type(reason).__name__)
    if ttl_ms is not None and not _is_duration(ttl_ms):
        raise _wrong(f"{field}.ttl_ms", "a number of milliseconds above 0", repr(ttl_ms))
    condition: When | None = given.get("when")
    return PermissionRule(_tools(given.get("tool"), f"{field}.tool"), action, condition, reason, ttl_ms)


_FIELDS = ("tool", "action", "when", "reason", "ttl_ms")


def _tools(value: object, field: str) -> str | tuple[str, ...] | re.Pattern[str]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise _wrong(field, "a tool's name, a list of names, a compiled pattern or '*'", repr(value))


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _wrong(field: str, allowed: str, got: str, advice: str = "") -> ConfigurationError:
    return ConfigurationError(f"{field} must be {allowed}; got {got}.{advice}", field=field)


@dataclass(frozen=True, slots=True)
class Match:
    """The rule that decides a call. `index` counts the joined list: rules of the leads, outermost first, then the agent's own."""

    rule: PermissionRule
    index: int
    source: Literal["lead", "own"]

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"index": self.index, "source": self.source}
        return told if self.rule.reason is None else {**told, "reason": self.rule.reason}


@dataclass(frozen=True, slots=True)
class Permissions:
    """The rules that a run's calls meet."""

    leads: tuple[PermissionRule, ...] = ()
    own: tuple[PermissionRule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leads or self.own)

    async def match(self, tool_name: str, args: Mapping[str, Any], about: Mapping[str, Any]) -> Match | None:
        """The first rule for a call, or `None`. Raises what a rule's `when` raises."""
        for index, rule in enumerate((*self.leads, *self.own)):
            if rule.names(tool_name) and (rule.when is None or await _holds(rule.when, args, about)):
                return Match(rule, index, "lead" if index < len(self.leads) else "own")
        return None


async def _holds(when: When, args: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    answer = when(args, about)
    return bool(await answer if inspect.isawaitable(answer) else answer)


def check_mode(value: object, field: str = "permission_mode") -> Any:
    """A mode, or a function that returns one, as given.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    if callable(value) or value in MODES:
        return value
    allowed = f"one of {', '.join(map(repr, MODES))}, or a function that returns one"
    raise _wrong(field, allowed, repr(value), suggest(str(value), MODES))


class ModeCell:
    """The permission mode of a run, read anew at every tool call: it may be switched while the run goes on.

    A `fixed` one, which a single `send()` was given, is not.
    """

    __slots__ = ("_fixed", "_mode")

    def __init__(self, mode: Any = "default") -> None:
        self._mode = mode
        self._fixed = False

    def fix(self, mode: Any) -> None:
        """Sets the mode for good."""
        self._mode, self._fixed = mode, True

    def set(self, mode: Any) -> None:
        if not self._fixed:
            self._mode = mode

    def now(self) -> PermissionMode:
        """The mode in force.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_RESOLVER_FAILED`: the function given as `permission_mode` raised, or returned none.
        """
        if not callable(self._mode):
            mode: PermissionMode = self._mode
            return mode
        try:
            return _checked_answer(self._mode())
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"The function given as permission_mode= raised {type(error).__name__}: {error}",
                code="LOUSHO_CONFIG_RESOLVER_FAILED",
                field="permission_mode",
            ) from error


def _checked_answer(answer: Any) -> PermissionMode:
    if answer not in MODES:
        raise ConfigurationError(
            f"The function given as permission_mode= returned {answer!r}; it must return one of {', '.join(MODES)}.",
            code="LOUSHO_CONFIG_RESOLVER_FAILED",
            field="permission_mode",
        )
    mode: PermissionMode = answer
    return mode


def mode_of_child(lead: PermissionMode, own: Any) -> Any:
    """The mode of a sub-agent: its lead's unless that is `default`, else its own. One made for planning always plans."""
    if own == "plan":
        return own
    return own if lead == "default" else lead
