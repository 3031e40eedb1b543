"""Calls of a store as they travel: a transcript that both sides have already is only named, with what is new of it.

Each side keeps what was last exchanged about each session and each run, under the token of the call that brought it. A side that
has forgotten it says so, and gets the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lousho_ray.actors.shared_lists import SharedList, SharedLists, same_start
from lousho_ray.ids import new_id
from lousho_ray.messages import Message
from lousho_ray.stores.durable_turns import OpenedTurn
from lousho_ray.stores.json_form import FixedJson, own


class Call(NamedTuple):
    """A call of a store.

    Attributes:
        part: The part of the store, its `method` and what that is given.
        token: Names what this call exchanges from here on.
        have: Names what the caller has of the list that the answer brings.
    """

    part: str
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    token: str = ""
    have: str | None = None

    @property
    def name(self) -> str:
        return f"{self.part}.{self.method}"


class Cut(NamedTuple):
    """Stands for a list: the first `same` of what is known under the token `base`, and the rest."""

    base: str
    same: int
    rest: list[Any]


class Lacking(NamedTuple):
    """The answer to a call with a list that is not known (any more): nothing was done."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call under way, as it was made, and what its answer may be cut from."""

    call: Call
    name: str | None
    base: SharedList | None


class CallSender:
    """The caller's side."""

    def __init__(self) -> None:
        self._shared = SharedLists()
        self._id = new_id()
        self._numbers = itertools.count()

    def begin(self, call: Call, *, whole: bool = False) -> tuple[Call, Exchange]:
        """The call as it is to be sent. `whole`: with nothing cut, because the other side lacks it."""
        call = call._replace(token=f"{self._id}/{next(self._numbers)}")
        name, items = _given(call)
        if items is not None and name is not None:
            known = None if whole else self._shared.get(name)
            same = 0 if known is None else same_start(known.items, items)
            sent = call if known is None or not same else _with_given(call, Cut(known.token, same, list(items[same:])))
            return sent, Exchange(call, name, None)
        name = _answered(call)
        known = None if name is None else self._shared.get(name)
        return call._replace(have=None if known is None else known.token), Exchange(call, name, known)

    def end(self, exchange: Exchange, value: Any) -> Any:
        """The answer of a call that has succeeded, whole."""
        call, name, base = exchange.call, exchange.name, exchange.base
        if name is None:
            return value
        _, items = _given(call)
        if items is None:
            answer = _in_answer(value)
            if isinstance(answer, Cut):
                assert base is not None
                answer = [*own(base.items[: answer.same]), *answer.rest]
                value = _with_answer(value, answer)
            items = answer
        if items is not None:
            self._shared.put(name, call.token, _kept(items))
        return value


class CallReceiver:
    """The store's side."""

    def __init__(self) -> None:
        self._shared = SharedLists()

    def begin(self, call: Call) -> Call | None:
        """The call with its list whole; `None` when that is not known here."""
        name, items = _given(call)
        if name is None or items is None:
            return call
        if not isinstance(items, Cut):
            return _with_given(call, _frozen(items))
        known = self._shared.get(name)
        if known is None or known.token != items.base:
            return None
        return _with_given(call, [*known.items[: items.same], *_frozen(items.rest)])

    def end(self, call: Call, value: Any) -> Any:
        """The answer as it is to be sent."""
        name, items = _given(call)
        if name is not None and items is not None:
            self._shared.put(name, call.token, _kept(items))
            return value
        asked, answer = _answered(call), _in_answer(value)
        if asked is None or answer is None:
            return value
        known = self._shared.get(asked)
        same = same_start(known.items, answer) if known is not None and known.token == call.have else 0
        self._shared.put(asked, call.token, _kept(answer))
        return value if known is None or not same else _with_answer(value, Cut(known.token, same, list(answer[same:])))


def _given(call: Call) -> tuple[str | None, Any]:
    """The list that a call brings, and what it is a state of."""
    match call.name, call.args:
        case (("turns.end" | "sessions.save"), (str() as id, list() | tuple() as items, *_)):
            return f"session {id}", items
        case "checkpoints.save", (Mapping() as record,) if isinstance(record.get("messages"), list | tuple):
            return f"run {str(record.get('sessionId')).partition('.turn-')[0]}", record["messages"]
        case _:
            return None, None


def _with_given(call: Call, items: Any) -> Call:
    if call.name == "checkpoints.save":
        return call._replace(args=({**call.args[0], "messages": items},))
    return call._replace(args=(call.args[0], items, *call.args[2:]))


def _answered(call: Call) -> str | None:
    """What the list in the answer to a call is a state of."""
    return f"session {call.args[0]}" if call.name in ("turns.open", "sessions.load") and call.args else None


def _in_answer(value: Any) -> Any:
    items = value.messages if isinstance(value, OpenedTurn) else value
    return items if isinstance(items, list | tuple) else None


def _with_answer(value: Any, items: Any) -> Any:
    return value._replace(messages=items) if isinstance(value, OpenedTurn) else items


def _kept(items: Sequence[Any]) -> Sequence[Any]:
    """Items that nobody changes: metadata of messages could be."""
    return own(items) if items and isinstance(items[0], Message) else items


def _frozen(items: Sequence[Any]) -> list[Any]:
    """Messages of a record, whose JSON is then made once."""
    return [FixedJson(item) if type(item) is dict else item for item in items]
