"""`lousho eval status|pause|resume|cancel|retune`: a running suite, from another terminal or another node."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lousho_ray.errors import ConfigurationError


def control(verb: str, arguments: Sequence[str], concurrency: int | None, limits: Mapping[str, float], *, as_json: bool) -> int:
    """Looks at the suite that is meant, or steers it; prints how it stands."""
    if len(arguments) > 1:
        raise ConfigurationError(f"lousho eval {verb} takes one suite at most; got {len(arguments)}.", field=verb)
    if verb == "retune" and concurrency is None and not limits:
        raise ConfigurationError(
            "lousho eval retune needs --concurrency, --requests-per-minute, --tokens-per-minute or --max-concurrent.",
            field="retune",
        )
    command = {"verb": verb, "concurrency": concurrency, "limits": dict(limits)}
    status = asyncio.run(_control(arguments[0] if arguments else None, command))
    print(json.dumps(status) if as_json else _line(status), file=sys.stdout)  # noqa: T201
    return 0


async def _control(wanted: str | None, command: Mapping[str, Any]) -> Mapping[str, Any]:
    from lousho_ray.evals.control import choose, steer, suites_in
    from lousho_ray.evals.suite import running_folder

    suites: list[Any] = list(suites_in(running_folder(Path.cwd())))
    if not suites and os.environ.get("RAY_ADDRESS"):
        from lousho_ray.runtime import suites_of_cluster

        suites = list(await suites_of_cluster())
    suite, status = await choose(suites, wanted)
    return status if command["verb"] == "status" else await steer(suite, status, command)


def _line(status: Mapping[str, Any]) -> str:
    limits = ", ".join(f"{name} {value:g}" for name, value in status.get("limits", {}).items())
    at_once = status.get("concurrency")
    facts = [f"{status.get('id')}: {status.get('line', status.get('state'))}", at_once and f"concurrency {at_once}", limits]
    return "; ".join(fact for fact in facts if fact)
