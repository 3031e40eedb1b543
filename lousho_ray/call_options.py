"""The options of one `send()` / `stream()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lousho_ray.cancellation import CancelToken
from lousho_ray.errors import ConfigurationError
from lousho_ray.loop.open import CallOptions
from lousho_ray.option_checks import RUN_KEYWORDS, UNSET, check_positive_int, check_text, unknown_keyword
from lousho_ray.options import ModelSettings, parse_options, parse_reasoning
from lousho_ray.permissions import check_mode


def call_options(
    options: Mapping[str, Any], where: str, *, also: frozenset[str] = frozenset()
) -> tuple[CallOptions, CancelToken | None]:
    """Checks the options of one `send()` / `stream()`. `also` are keywords that the caller reads itself.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with `field`; a keyword that belongs elsewhere says where.
    """
    known = RUN_KEYWORDS | also
    for name in options:
        if name not in known:
            raise unknown_keyword(name, known, where)
    given = {name: value for name, value in options.items() if value is not None}
    metadata = given.get("metadata", {})
    if not isinstance(metadata, Mapping):
        raise ConfigurationError(f"metadata must be a dict, not {type(metadata).__name__}.", field="metadata")
    cancel = given.get("cancel")
    if cancel is not None and not isinstance(cancel, CancelToken):
        raise ConfigurationError(f"cancel must be a CancelToken, not {type(cancel).__name__}.", field="cancel")
    settings = given.get("model_settings")
    call = CallOptions(
        model_settings=None if settings is None else parse_options(ModelSettings, settings),
        max_steps=check_positive_int(given["max_steps"], "max_steps") if "max_steps" in given else None,
        instructions=check_text(given["instructions"], "instructions") if "instructions" in given else None,
        reasoning=parse_reasoning(given.get("reasoning")),
        metadata=dict(metadata),
        principal=given.get("principal"),
        permission_mode=check_mode(given["permission_mode"]) if "permission_mode" in given else None,
        business_state=options.get("business_state", UNSET),
    )
    return call, cancel
