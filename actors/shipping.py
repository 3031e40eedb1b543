"""Shipping agents: a definition is pickled once, put into the object store once, and rebuilt once in each process that runs it.

It is pickled by Ray's own cloudpickle, as results are on their way back: a class of `__main__` is then the same class again.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.cloudpickle import cloudpickle

from lousho_ray.actors.cluster import ask, this_process
from lousho_ray.actors.obstacle import find_obstacle
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import AgentExecutionError, ConfigurationError, LoushoError, message_of
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.providers.prices import adopt_models, registered_models

KEPT_DEFINITIONS = 32
"""Rebuilt definitions that a worker process keeps, the least used one going first."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """A definition on its way: its content hash, and the reference to its bytes (in a list: Ray then does not fetch it unasked).

    Without a parcel it names one that has arrived: each reference that travels costs both sides some bookkeeping.
    """

    digest: str
    parcel: list[Any]

    def named(self) -> Shipment:
        """The same without its parcel."""
        return Shipment(self.digest, [])


class Shipper:
    """Makes shipments. Limiters that still live in this process are moved to the cluster first, so that they stay one."""

    def __init__(self, promote: Callable[[RateLimiter], None]) -> None:
        self._promote = promote
        self._made: OrderedDict[int, tuple[AgentDefinition, Shipment]] = OrderedDict()
        self._process = ""
        self._lock = asyncio.Lock()

    async def ship(self, definition: AgentDefinition) -> Shipment:
        """The shipment of a definition; the same one for the same object."""
        async with self._lock:
            if this_process() != self._process:  # What was put into the store of another cluster is not in this one.
                self._process = this_process()
                self._made.clear()
            known = self._made.get(id(definition))
            if known is not None and known[0] is definition:
                self._made.move_to_end(id(definition))
                return known[1]
            data = await asyncio.to_thread(dump, definition.portable(), self._promote)
            shipment = Shipment(hashlib.sha256(data).hexdigest(), [await asyncio.to_thread(ray.put, data)])
            self._made[id(definition)] = (definition, shipment)
            while len(self._made) > KEPT_DEFINITIONS:
                self._made.popitem(last=False)
            return shipment


class Warehouse:
    """Rebuilds definitions in the process that runs them, each once."""

    def __init__(self) -> None:
        self._definitions: OrderedDict[str, AgentDefinition] = OrderedDict()

    def lacks(self, shipment: Shipment) -> bool:
        """Whether this is the name of a shipment whose parcel is not here (any more)."""
        return not shipment.parcel and shipment.digest not in self._definitions

    async def unpack(self, shipment: Shipment) -> AgentDefinition:
        if shipment.digest not in self._definitions:
            data: bytes = await ask(shipment.parcel[0], "The object store that holds the agent")
            if shipment.digest not in self._definitions:  # Others waited for the same bytes.
                self._definitions[shipment.digest], models = cloudpickle.loads(data)
                adopt_models(models)
                while len(self._definitions) > KEPT_DEFINITIONS:
                    self._definitions.popitem(last=False)
        self._definitions.move_to_end(shipment.digest)
        return self._definitions[shipment.digest]


def dump(value: AgentDefinition, promote: Callable[[RateLimiter], None]) -> bytes:
    """Pickles by value what an import cannot find (tools of `__main__` and notebooks).

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, naming the option and the object that cannot be pickled.
    """
    try:
        # The models the user registered travel along: a call costs the same on every node.
        return _dump((value, registered_models()), promote)
    except LoushoError:
        raise
    except Exception as error:
        obstacle = find_obstacle(value, lambda part: _failure(part, promote))
        raise ConfigurationError(
            f"The agent cannot be sent to another process: {obstacle or error}. Make it inside the tool or hook that uses it, "
            "or use runtime='local'.",
            field=obstacle.field if obstacle is not None else None,
        ) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, promote: Callable[[RateLimiter], None]) -> None:
        super().__init__(file)
        self._promote = promote

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, RateLimiter):
            self._promote(obj)
        return super().reducer_override(obj)


def _dump(value: Any, promote: Callable[[RateLimiter], None]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, promote).dump(value)
    return file.getvalue()


def _failure(value: Any, promote: Callable[[RateLimiter], None]) -> Exception | None:
    """Why a value cannot be pickled; `None` when it can."""
    try:
        _dump(value, promote)
    except Exception as error:
        return error
    return None


def portable(error: BaseException) -> BaseException:
    """The error, or one of ours that says the same when it cannot be sent to another process."""
    if isinstance(error, LoushoError):
        return error
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return AgentExecutionError(f"{type(error).__name__}: {message_of(error)}")
    return error
