"""What the store contract is made of: rules, and the records they store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from lousho_ray.errors import LoushoError
from lousho_ray.messages import FilePart, ImagePart, Message, ReasoningBlock, TextPart, ToolCall, tool_result, user
from lousho_ray.testing.clock import FakeClock

Feature = Literal[
    "sessions", "checkpoints", "approvals", "claim", "list", "history", "delete_prefix", "restore", "list_pending", "prune", "turns"
]
"""The parts and the optional methods. `claim` stands for leases: `claim`, `renew`, `release` and `save(fence=)`; `turns` for the
attribute of that name: see `lousho_ray.stores.durable_turns`."""


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """One rule. Call it with an empty store and its clock."""

    run: Callable[[Any, FakeClock], Awaitable[None]]
    needs: frozenset[str]

    def __str__(self) -> str:
        return self.run.__name__

    async def __call__(self, store: Any, clock: FakeClock) -> None:
        await self.run(store, clock)


CHECKS: list[StoreCheck] = []


def rule(*needs: Feature) -> Callable[[Callable[[Any, FakeClock], Awaitable[None]]], Callable[[Any, FakeClock], Awaitable[None]]]:
    """Adds a rule that needs these parts and methods of a store."""

    def register(run: Callable[[Any, FakeClock], Awaitable[None]]) -> Callable[[Any, FakeClock], Awaitable[None]]:
        CHECKS.append(StoreCheck(run, frozenset(needs)))
        return run

    return register


async def refused(call: Awaitable[Any], code: str = "LOUSHO_STORAGE_FAILED") -> LoushoError:
    """The error of a call that must fail with `code`."""
    found: LoushoError | None = None
    try:
        await call
    except LoushoError as error:
        found = error
    if found is not None:
        assert found.code == code, f"expected {code}, got {found.code}: {found}"
        return found
    raise AssertionError(f"expected {code}, but the call succeeded")


TRANSCRIPT: list[Message] = [
    user(
        [TextPart("what is this?"), ImagePart(b"\x89PNG\x00\xff", "image/png"), FilePart(b"\x00\x01", "application/pdf", "a.pdf")]
    ),
    Message(
        "assistant",
        "",
        tool_calls=(ToolCall("call_1", "look", '{"q": "not json'),),
        reasoning=(ReasoningBlock("hm", "sig", None, "anthropic", "m"), ReasoningBlock(redacted_data="xx")),
    ),
    tool_result(
        ToolCall("call_1", "look"), '{"error": "no"}', is_error=True, metadata={"raw": {"$bytes": "mine"}, "blob": b"\x00\xfe"}
    ),
    Message("assistant", "a NUL \x00, half a pair \ud83d, 你好, \u2028"),
]
"""Every kind of content: parts with bytes, invalid arguments, signed reasoning, metadata that looks like encoded bytes."""


def checkpoint(id: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    """A checkpoint in its JSON form."""
    return {"sessionId": id, "stepIndex": step, "status": "in-progress", "messages": [], **fields}


def pause(id: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pending record and its snapshot."""
    return {"id": id, "toolName": "pay", "args": {"usd": 5}, **fields}, {
        "messages": [{"role": "user", "content": "pay"}],
        "steps": 2,
    }
