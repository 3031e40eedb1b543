"""What every option goes through: the base of the option models, and the checks of single values and keywords.

An option object is a `dict` with snake_case keys or the matching model. Models are frozen, refuse unknown keys, and never take a
`bool` for a number, a numeric string, or `nan`. A key given as `None` counts as not given. Wrong values are a `ConfigurationError`
whose `field` names the key, such as `limits.max_tokens`.
"""

from __future__ import annotations

import functools
import math
import os
import re
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict

from lousho_ray.errors import ConfigurationError, mask_secrets, suggest

O = TypeVar("O", bound="Options")  # noqa: E741 - one letter per type variable
T = TypeVar("T")


class Options(BaseModel):
    """Base of the option models. The `description` of a field says what is allowed, in error messages too."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True, defer_build=True
    )
    option: ClassVar[str]

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except pydantic.ValidationError as error:
            raise _refused(type(self), self.option, error, data) from None

    # Tells pydantic that this is its own `__init__` but for the error: nested models and `model_validate` then skip it, so that
    # an error of a nested key is reported once, with its whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


# -------------------------------------------------------------------------------------------------------------------- parsing


def parse_options(model: type[O], value: object, *, field: str | None = None) -> O:
    """Checks an option object. `None` gives the defaults; an instance of `model` is immutable and given back as it is.

    Args:
        model: The option's model.
        value: `None`, a mapping with snake_case keys, or an instance of `model`.
        field: The option's name in errors; default is the model's own.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with the field `<field>.<key>`.
    """
    name = field or model.option
    if isinstance(value, model):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a dict or {model.__name__}; got {_shown(value)}.", field=name)
    data = dict(value or {})
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise _refused(model, name, error, data) from None


def parse_switch(model: type[O], value: object, *, field: str | None = None) -> O | None:
    """Like `parse_options` for an option that can be switched: `True` gives the defaults, `False` and `None` give `None`."""
    if value is False or value is None:
        return None
    return parse_options(model, None if value is True else value, field=field)


def _refused(model: type[Options], name: str, error: pydantic.ValidationError, data: Mapping[Any, Any]) -> ConfigurationError:
    """The first problem pydantic found, in our words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    allowed: type[BaseModel] = model
    path, described = [name], ""
    value: Any = data
    for step in problem["loc"]:
        if step not in allowed.model_fields:
            break
        info = allowed.model_fields[str(step)]
        path.append(str(step))
        described = info.description or described
        value = value.get(step) if isinstance(value, Mapping) else value
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            allowed = info.annotation
    if problem["type"] in {"extra_forbidden", "invalid_key"} and issubclass(allowed, Options):
        return unknown_key(problem["loc"][-1], allowed.model_fields, ".".join(path))
    return ConfigurationError(f"{'.'.join(path)} must be {described}; got {_shown(value)}.", field=".".join(path))


def unknown_key(key: object, allowed: Collection[str], where: str) -> ConfigurationError:
    """The error for a key that an option object does not have. `where` is the object, such as `limits`."""
    return ConfigurationError(
        f"{where} has no key {key!r}.{_closest(str(key), allowed)} Allowed: {', '.join(sorted(allowed))}.", field=f"{where}.{key}"
    )


def snake_case(name: str) -> str:
    """`maxSteps` -> `max_steps`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def _closest(name: str, allowed: Collection[str]) -> str:
    twin = snake_case(name)
    if twin != name and twin in allowed:
        return f" Write it as '{twin}'."
    return suggest(name, allowed)


def _shown(value: object) -> str:
    """A wrong value in an error message: short, and without what may be a secret."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, (str, list, tuple, dict)):
        text = mask_secrets(repr(value))
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------------------------------- unknown keywords


class Unset(Enum):
    """The value of an option that was not given, where `None` says something."""

    UNSET = "unset"


UNSET = Unset.UNSET

RUN_KEYWORDS = frozenset(
    {"model_settings", "max_steps", "instructions", "reasoning", "metadata", "principal", "permission_mode", "cancel"}
)
"""The keywords of `session.send()` and `session.stream()`; `agent.send()` and `agent.stream()` also take `session_id` and
`business_state`."""

SESSION_KEYWORDS = frozenset({"id", "store", "checkpoint_store", "turn_policy", "limits", "compaction", "permission_mode"})
"""The keywords of `agent.session()`."""

AGENT_KEYWORDS = frozenset(
    {
        *("model", "provider", "instructions", "prompt", "tools", "name", "description", "max_steps", "model_settings", "limits"),
        *("tool_concurrency", "skills", "subagents", "max_subagent_depth", "subagent_options", "handoffs", "max_handoffs"),
        *("tool_search", "code_mode", "store", "approval_store", "approve", "approval_ttl_ms", "ask_question", "permissions"),
        *("permission_mode", "on_permission_decision", "on_permission_mode_change", "guardrails", "memory", "project_instructions"),
        *("retry", "fallback_models", "rate_limit", "reasoning", "prompt_caching", "hooks", "compaction", "mcp_servers", "output"),
        *("output_validate", "output_prompt", "abort_grace_ms", "session_wait_ms", "store_timeout_ms", "spill_tool_results"),
        *("max_tool_result_chars", "on_agent_drift", "on_event", "on_run_end", "exporter", "capture_content", "redact_content"),
        *("auto_resume", "runtime"),
    }
)
"""The documented keywords of `create_agent()`."""

_HOMES: tuple[tuple[str, frozenset[str]], ...] = (
    ("create_agent()", AGENT_KEYWORDS),
    ("agent.session()", SESSION_KEYWORDS),
    ("agent.send() and agent.stream()", RUN_KEYWORDS | {"session_id", "business_state"}),
)


def unknown_keyword(name: str, allowed: Collection[str], where: str) -> ConfigurationError:
    """The error for a keyword that a call does not take: names the call it belongs to, or the closest keyword.

    Args:
        name: The keyword.
        allowed: What the call takes.
        where: The call, such as `create_agent()`.
    """
    twin = snake_case(name)
    homes = [home for home, keywords in _HOMES if twin in keywords and home != where]
    if twin not in allowed and homes:
        advice = f" It belongs to {' or '.join(homes)}."
    else:
        advice = _closest(name, allowed)
    return ConfigurationError(f"{where} has no option {name!r}.{advice} Allowed: {', '.join(sorted(allowed))}.", field=name)


# ------------------------------------------------------------------------------------------------------------- single options


@functools.cache
def warn_deprecated(text: str, stacklevel: int) -> None:
    """A `DeprecationWarning` once per process, from however many places. `stacklevel` counts this function as 1."""
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def check_positive_int(value: object, field: str, minimum: int = 1) -> int:
    """Returns `value` when it is a whole number of at least `minimum` (a `bool` is none)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
        return value
    raise _must_be(field, f"a whole number of at least {minimum}", value)


def check_positive_number(value: object, field: str, *, infinity: bool = False) -> float:
    """Returns `value` when it is a number above 0 (a `bool` or `nan` is none; infinity only when `infinity`)."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and (infinity or math.isfinite(value)):
        return value
    raise _must_be(field, "a number above 0 or math.inf" if infinity else "a finite number above 0", value)


def check_text(value: object, field: str) -> str:
    """Returns `value` when it is a string that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise _must_be(field, "a string that is not empty", value)


def check_bool(value: object, field: str) -> bool:
    """Returns `value` when it is `True` or `False`."""
    if isinstance(value, bool):
        return value
    raise _must_be(field, "True or False", value)


def check_choice(value: object, field: str, choices: Collection[str]) -> str:
    """Returns `value` when it is one of `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    allowed = "one of " + ", ".join(f'"{choice}"' for choice in choices)
    raise _must_be(field, allowed, value, suggest(value, choices) if isinstance(value, str) else "")


def check_callable(value: T, field: str, kind: str = "a function") -> T:
    """Returns `value` when it can be called."""
    if callable(value):
        return value
    raise _must_be(field, kind, value)


def _must_be(field: str, allowed: str, value: object, advice: str = "") -> ConfigurationError:
    return ConfigurationError(f"{field} must be {allowed}; got {_shown(value)}.{advice}", field=field)


def check_runtime(value: Any) -> str:
    """`local` or `ray`: what was given, else what `LOUSHO_RUNTIME` says."""
    name = value or os.environ.get("LOUSHO_RUNTIME", "").strip() or "ray"
    return check_choice(name, "runtime" if value else "LOUSHO_RUNTIME", ("local", "ray"))
