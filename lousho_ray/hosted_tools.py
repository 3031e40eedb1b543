"""Hosted tools: what a model's provider runs itself, inside the model request. Here they are inert descriptions.

`create_agent(tools=[web_search()])` sends the description with every model call of a run. The calls of such a tool have happened
when the run hears of them: no hook, rule or approval sees one. Sub-agents do not inherit hosted tools.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lousho_ray.errors import ConfigurationError

LOOK_UP = frozenset({"web_search", "file_search"})
"""The types that change nothing."""

HostedToolType: TypeAlias = Literal["web_search", "code_interpreter", "file_search", "hosted_tool"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class HostedTool:
    """A tool that the provider runs.

    Attributes:
        type: What `supports_hosted_tool(type)` of a provider is asked.
        name: The name its calls are reported under.
        options: Options of the tool, as JSON. A provider drops those it cannot take, with a warning.
        raw: The wire form that is sent as it is, for `hosted_tool()`.
    """

    type: HostedToolType
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON."""
        return {"type": self.type, "name": self.name, "options": dict(self.options), "raw": copy.deepcopy(self.raw)}


def web_search(
    *,
    allowed_domains: Sequence[str] | None = None,
    blocked_domains: Sequence[str] | None = None,
    max_uses: int | None = None,
    search_context_size: Literal["low", "medium", "high"] | None = None,
    user_location: Mapping[str, str] | None = None,
) -> HostedTool:
    """The provider's web search.

    Args:
        allowed_domains: Only pages of these hosts and their sub-domains. `blocked_domains`: none of these.
        max_uses: Searches of one model call.
        search_context_size: How much of the pages the model reads.
        user_location: `city`, `country` (two letters), `region`, `timezone` (IANA) of the person the search is for.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    if search_context_size not in (None, "low", "medium", "high"):
        allowed = '"low", "medium" or "high"'
        raise _invalid(f"search_context_size must be {allowed}; got {search_context_size!r}.", "search_context_size")
    known = ("city", "country", "region", "timezone")
    place = None if user_location is None else dict(user_location)
    if place is not None and (not place or any(key not in known or not isinstance(place[key], str) for key in place)):
        raise _invalid(f"user_location must be a dict of texts with some of {', '.join(known)}; got {place!r}.", "user_location")
    return _described(
        "web_search",
        allowed_domains=_texts(allowed_domains, "allowed_domains"),
        blocked_domains=_texts(blocked_domains, "blocked_domains"),
        max_uses=_whole(max_uses, "max_uses"),
        search_context_size=search_context_size,
        user_location=place,
    )


def code_interpreter(*, container: str | None = None, file_ids: Sequence[str] | None = None) -> HostedTool:
    """The provider's sandbox, in which the model runs code.

    Args:
        container: The id of a container that is there already; by default the provider makes one.
        file_ids: Uploaded files that the new container gets.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    if container is not None and file_ids is not None:
        raise _invalid("file_ids go into a new container; leave out container, or file_ids.", "file_ids")
    if container is not None and (not isinstance(container, str) or not container):
        raise _invalid(f"container must be the id of a container; got {container!r}.", "container")
    return _described("code_interpreter", container=container, file_ids=_texts(file_ids, "file_ids"))


def file_search(
    *, vector_store_ids: Sequence[str], max_results: int | None = None, filters: Mapping[str, Any] | None = None
) -> HostedTool:
    """The provider's search in files that were uploaded to it.

    Args:
        vector_store_ids: At least one.
        max_results: Passages of one search.
        filters: A filter on the attributes of files, as the provider documents it.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, for an empty list too.
    """
    return _described(
        "file_search",
        vector_store_ids=_texts(vector_store_ids, "vector_store_ids"),
        max_results=_whole(max_results, "max_results"),
        filters=None if filters is None else _plain(filters, "filters"),
    )


def hosted_tool(name: str, raw: Mapping[str, Any]) -> HostedTool:
    """Any other tool of a provider.

    Args:
        name: Under which the agent knows it: 1 to 64 of `A-Z a-z 0-9 _ -`.
        raw: The tool as the provider documents it, sent unchanged: `{"type": "web_search_20250305", "name": "web_search"}`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(f"The name of a hosted tool must be 1 to 64 of A-Z a-z 0-9 _ -; got {name!r}.", "name")
    if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
        raise _invalid(f"raw of hosted tool {name!r} must be a dict with a type, as its provider documents it.", "raw")
    return HostedTool("hosted_tool", name, raw=_plain(raw, "raw"))


def type_of(tool: Any) -> HostedToolType:
    """What a provider is asked about a hosted tool of a request; a bare wire form counts as `hosted_tool`."""
    return tool.type if isinstance(tool, HostedTool) else "hosted_tool"


def unsupported_hosted_tool(provider: str, tool: Any) -> ConfigurationError:
    """The error for a hosted tool that a provider cannot run: it says which pairings work."""
    name = tool.name if isinstance(tool, HostedTool) else tool.get("type", tool) if isinstance(tool, Mapping) else tool
    works = (
        "OpenAI's Responses API runs web_search(), code_interpreter(), file_search() and hosted_tool(),"
        " Anthropic hosted_tool() alone"
    )
    return ConfigurationError(
        f"Provider {provider!r} does not run the hosted tool {name!r}. {works}.",
        code="LOUSHO_HOSTED_TOOL_UNSUPPORTED",
        field="tools",
    )


def _described(kind: HostedToolType, **options: Any) -> HostedTool:
    return HostedTool(kind, kind, {key: value for key, value in options.items() if value is not None})


def _texts(value: Any, option: str) -> list[str] | None:
    if value is None and option != "vector_store_ids":
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value or not all(isinstance(x, str) and x for x in value):
        raise _invalid(f"{option} must be a list of at least one text; got {value!r}.", option)
    return list(value)


def _whole(value: Any, option: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _invalid(f"{option} must be a whole number of at least 1; got {value!r}.", option)
    return value


def _plain(value: Mapping[str, Any], option: str) -> dict[str, Any]:
    """A copy, so that a later change of the caller's dict changes nothing."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _invalid(f"{option} must be plain JSON: {error}.", option) from None
    return copied


def _invalid(message: str, option: str) -> ConfigurationError:
    return ConfigurationError(message, field=option)
