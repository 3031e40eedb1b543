"""The board of a suite on a cluster: a named actor through which other nodes see and steer it. It ends with the suite's driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from lousho_ray.actors.cluster import NAMESPACE, ask, live, own_place

if TYPE_CHECKING:  # the actor's process needs nothing of evals: importing them takes as much CPU as some thousand cases
    from lousho_ray.evals.control import Command, Status

PREFIX = "lousho-eval-suite-"
_WHAT = "The board of the suite"


class EvalBoardActor:
    """Holds a status, and commands that have not been taken."""

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._status: Status = {}
        self._commands: list[Command] = []
        self._at = 0.0

    def exchange(self, status: Status) -> Sequence[Command]:
        self._status, self._at = status, time.monotonic()
        commands, self._commands = self._commands, []
        return commands

    def status(self) -> Status:
        silent = time.monotonic() - self._at > self._silent_after_s
        return {**self._status, "state": "silent"} if silent else self._status

    def send(self, command: Command) -> None:
        self._commands.append(command)


class ActorBoard:
    """The suite's side of the actor."""

    def __init__(self, suite_id: str) -> None:
        from lousho_ray.evals.control import SILENT_AFTER_S

        options = {"name": PREFIX + suite_id, "namespace": NAMESPACE, "num_cpus": 0, **own_place().preferred}
        self._handle: Any = ray.remote(EvalBoardActor).options(**options).remote(SILENT_AFTER_S)

    async def exchange(self, status: Status) -> Sequence[Command]:
        commands: Sequence[Command] = await ask(live(self._handle).exchange.remote(status), _WHAT)
        return commands

    async def close(self) -> None:
        ray.kill(self._handle)


class ActorSuite:
    """A suite of the cluster, as others see it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: Any = ray.get_actor(name, NAMESPACE)

    async def status(self) -> Status:
        try:
            status: Status = await ask(live(self._handle).status.remote(), _WHAT)
        except Exception:
            return {"id": self._name.removeprefix(PREFIX), "state": "ended"}
        return status

    async def send(self, command: Command) -> None:
        await ask(live(self._handle).send.remote(command), _WHAT)


async def suites_of_cluster() -> list[ActorSuite]:
    """The suites that run on the cluster."""
    named: list[Any] = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    return [ActorSuite(item["name"]) for item in named if item["namespace"] == NAMESPACE and item["name"].startswith(PREFIX)]
