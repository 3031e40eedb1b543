"""Composition: what the actors of an agent are, in one process or on a cluster. The only place with actor names and options."""

from __future__ import annotations

from lousho_ray.agent import Runtime, RuntimeName
from lousho_ray.definition import AgentDefinition
from lousho_ray.limits.budget import LocalLedger
from lousho_ray.ports import SessionStore
from lousho_ray.session import LocalLink, SessionHost, SessionLines, SessionLink
from lousho_ray.stores.memory import MemorySessionStore
from lousho_ray.subagents import LocalSpawner, Spawner


class LocalRuntime:
    """Everything in this process; never imports `ray`."""

    name: RuntimeName = "local"

    def __init__(self) -> None:
        self._lines = SessionLines()

    def spawner(self, definition: AgentDefinition) -> Spawner:
        """Children of one top-level run share a ledger of their own."""
        return LocalSpawner(LocalLedger())

    def session(self, definition: AgentDefinition, session_id: str, store: SessionStore | None) -> SessionLink:
        sessions = store if store is not None else MemorySessionStore()
        line = self._lines.of(sessions, session_id)
        return LocalLink(SessionHost(definition, session_id, sessions, line, lambda: self.spawner(definition)))


def create_runtime(name: RuntimeName) -> Runtime:
    """The runtime of that name. Starts nothing."""
    return LocalRuntime()
