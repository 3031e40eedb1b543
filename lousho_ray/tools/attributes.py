"""The options of a tool besides its function: the MCP hints, the effect, and the checks made when a tool is defined."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from lousho_ray.errors import ConfigurationError, suggest

Effect: TypeAlias = Literal["read", "idempotent", "once"]
"""What running a tool twice does: nothing (`read`), the same as once (`idempotent`), harm (`once`)."""

NeedsApproval: TypeAlias = bool | Callable[..., Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolAnnotations:
    """The MCP hints about a tool. `None` = the author said nothing."""

    title: str | None = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None

    @classmethod
    def of(cls, value: ToolAnnotations | Mapping[str, Any] | None) -> ToolAnnotations:
        """Takes snake_case or MCP's camelCase keys.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID` for an unknown hint.
        """
        if value is None or isinstance(value, ToolAnnotations):
            return value or cls()
        names = {_camel(item.name): item.name for item in fields(cls)}
        hints = {names.get(key, key): hint for key, hint in value.items()}
        for key in hints:
            if key not in names.values():
                known = ", ".join(names.values())
                raise invalid(f"Unknown tool annotation {key!r}.{suggest(key, names.values())} Known: {known}.", "annotations")
        return cls(**hints)

    def to_dict(self) -> dict[str, Any]:
        """MCP's camelCase form, without what was not said."""
        return {_camel(key): hint for key, hint in asdict(self).items() if hint is not None}


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def check_name(name: Any) -> None:
    """Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) for a name no model API takes."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"{name!r} is no tool name: use 1 to 64 letters, digits, `_` or `-`; `name=` replaces a function's own.", "name"
        )


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) for an option whose value cannot be used."""
    for key in ("edits_files", "requires_sandbox"):
        if not isinstance(options.get(key, False), bool):
            raise invalid(f"`{key}` of tool {name!r} is {options[key]!r}; it is True or False.", key)
    approval = options.get("needs_approval", False)
    if not isinstance(approval, bool) and not callable(approval):
        problem = f"is {approval!r}; it is True, False or a function of the arguments"
        raise invalid(f"`needs_approval` of tool {name!r} {problem}.", "needs_approval")
    limit = options.get("max_calls_per_run")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise invalid(f"`max_calls_per_run` of tool {name!r} is {limit!r}; it is a whole number from 1.", "max_calls_per_run")
    effect, effects = options.get("effect"), get_args(Effect)
    if effect is not None and effect not in effects:
        problem = f"is {effect!r}; it is 'read', 'idempotent' or 'once'.{suggest(str(effect), effects)}"
        raise invalid(f"`effect` of tool {name!r} {problem}", "effect")
    check_ray_options(name, options.get("ray_options"))
    sandboxed = options.get("sandbox_execute")
    if sandboxed is not None and not callable(sandboxed):
        raise invalid(f"`sandbox_execute` of tool {name!r} is {sandboxed!r}, which cannot be called.", "sandbox_execute")


_NUMBERS = ("num_cpus", "num_gpus", "memory")

RAY_OPTIONS = frozenset({*_NUMBERS, "resources", "accelerator_type", "label_selector", "runtime_env"})
"""What a tool may ask of the cluster, by Ray's names. `memory` is in bytes; `resources` maps names of the cluster to amounts."""


def check_ray_options(name: str, options: Any) -> None:
    """Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) for a wish that Ray would not understand, before a task is sent."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise invalid(f"`ray_options` of tool {name!r} is {options!r}; it is a dict such as {{'num_gpus': 1}}.", "ray_options")
    for key in options:
        if key not in RAY_OPTIONS:
            known = f"{suggest(str(key), RAY_OPTIONS)} Known: {', '.join(sorted(RAY_OPTIONS))}."
            raise invalid(f"`ray_options` of tool {name!r} has no option {key!r}.{known}", "ray_options")
    amounts = {key: options[key] for key in _NUMBERS if key in options} | dict(_resources(name, options.get("resources", {})))
    for key, amount in amounts.items():
        if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 <= amount < math.inf:
            raise invalid(f"`ray_options` of tool {name!r}: {key} is {amount!r}; it is a number from 0.", "ray_options")


def _resources(name: str, resources: Any) -> Mapping[str, Any]:
    if not isinstance(resources, Mapping):
        raise invalid(f"`ray_options` of tool {name!r}: resources is {resources!r}; it is a dict of name to amount.", "ray_options")
    return resources


def invalid(message: str, option: str) -> ConfigurationError:
    return ConfigurationError(message, field=option)
