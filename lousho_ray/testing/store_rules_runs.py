"""The store contract: checkpoints, approvals, pruning."""

from __future__ import annotations

import asyncio
from typing import Any

from lousho_ray.messages import user
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_rules import TRANSCRIPT, checkpoint, pause, refused, rule

# --------------------------------------------------------------------------------------------------------------- checkpoints


@rule("checkpoints")
async def checkpoint_round_trips_with_fields_nobody_knows(store: Any, clock: FakeClock) -> None:
    record = checkpoint(
        "trip.turn-0",
        3,
        messages=[message.to_dict() for message in TRANSCRIPT] * 30,
        businessState={"$bytes": "mine", "deep": [{"x": None}], "big": 2**70, "text": "a\0b\ud83d"},
        futureField=[{"y": 1.5}],
        emptyList=[],
    )
    assert await store.checkpoints.load("trip.turn-0") is None
    await store.checkpoints.save(record)
    assert await store.checkpoints.load("trip.turn-0") == record
    await store.checkpoints.save({"sessionId": "old"})
    assert await store.checkpoints.load("old") == {"sessionId": "old"}


@rule("checkpoints")
async def checkpoints_are_copied_in_and_out(store: Any, clock: FakeClock) -> None:
    record = checkpoint("a", messages=[{"role": "user", "content": "x" * 2000}], state={"n": [1]})
    await store.checkpoints.save(record)
    record["messages"][0]["content"] = "changed"
    record["state"]["n"].append(2)
    loaded = await store.checkpoints.load("a")
    assert loaded == checkpoint("a", messages=[{"role": "user", "content": "x" * 2000}], state={"n": [1]})
    loaded["messages"].clear()
    loaded["state"]["n"].append(3)
    assert await store.checkpoints.load("a") == checkpoint(
        "a", messages=[{"role": "user", "content": "x" * 2000}], state={"n": [1]}
    )


@rule("checkpoints")
async def deleted_checkpoint_is_none(store: Any, clock: FakeClock) -> None:
    await store.checkpoints.delete("never")
    await store.checkpoints.save(checkpoint("a"))
    await store.checkpoints.delete("a")
    assert await store.checkpoints.load("a") is None


@rule("checkpoints")
async def lower_revision_isrefused(store: Any, clock: FakeClock) -> None:
    await store.checkpoints.save(checkpoint("a", 5, revision=5))
    error = await refused(store.checkpoints.save(checkpoint("a", 4, revision=4)))
    assert "revision 4" in error.detail
    assert (await store.checkpoints.load("a"))["stepIndex"] == 5
    await store.checkpoints.save(checkpoint("a", 6, revision=6))
    assert (await store.checkpoints.load("a"))["stepIndex"] == 6


@rule("checkpoints")
async def what_is_not_json_is_refused_by_its_key_path(store: Any, clock: FakeClock) -> None:
    await store.checkpoints.save(checkpoint("a", 1))
    for bad, path in (
        ({"state": {"price": [1, float("nan")]}}, "state.price[1]"),
        ({"state": {"when": object()}}, "state.when"),
        ({"state": b"raw"}, "state"),
        ({"messages": [{"role": "user", "score": float("inf")}]}, "score"),
    ):
        error = await refused(store.checkpoints.save(checkpoint("a", 2, **bad)))
        assert path in error.detail, error.detail
    assert (await store.checkpoints.load("a"))["stepIndex"] == 1


@rule("checkpoints", "history")
async def history_has_the_newest_saves_newest_first(store: Any, clock: FakeClock) -> None:
    assert await store.checkpoints.history("a") == []
    messages: list[dict[str, Any]] = []
    for step in range(60):
        messages.append({"role": "user", "content": f"{step} " + "x" * 200})
        await store.checkpoints.save(checkpoint("a", step, messages=messages))
        clock.advance(1_000)
    await store.checkpoints.save({"sessionId": "b"})
    entries = await store.checkpoints.history("a")
    assert [entry["step"] for entry in entries] == list(range(59, 9, -1))
    assert [len(entry["checkpoint"]["messages"]) for entry in entries] == list(range(60, 10, -1))
    assert entries[-1]["checkpoint"] == checkpoint("a", 10, messages=messages[:11])
    assert entries[0]["saved_at"] == "2026-01-01T00:00:59.000Z"
    assert entries[0]["status"] == "in-progress"
    assert [entry["step"] for entry in await store.checkpoints.history("a", limit=2)] == [59, 58]
    assert (await store.checkpoints.history("b"))[0]["status"] == "in-progress"


@rule("checkpoints", "history")
async def history_keeps_what_a_later_save_rewrote(store: Any, clock: FakeClock) -> None:
    long = [{"role": "user", "content": f"{i}" * 600} for i in range(4)]
    for step, messages in enumerate([long[:2], long[:3], [long[0], long[3]], [*long[:1], long[3], long[2]], long[:1]]):
        await store.checkpoints.save(checkpoint("a", step, messages=messages))
    found = [entry["checkpoint"]["messages"] for entry in await store.checkpoints.history("a")]
    assert found == [long[:1], [long[0], long[3], long[2]], [long[0], long[3]], long[:3], long[:2]]
    assert (await store.checkpoints.load("a"))["messages"] == long[:1]


@rule("checkpoints", "history")
async def deleting_takes_the_history_unless_it_is_kept(store: Any, clock: FakeClock) -> None:
    long = [{"role": "user", "content": "x" * 2000}]
    await store.checkpoints.save(checkpoint("a", 1, messages=long))
    await store.checkpoints.delete("a", keep_history=True)
    assert await store.checkpoints.load("a") is None
    assert [entry["checkpoint"]["messages"] for entry in await store.checkpoints.history("a")] == [long]
    await store.checkpoints.save(checkpoint("a", 2, messages=[*long, *long]))
    assert [entry["step"] for entry in await store.checkpoints.history("a")] == [2, 1]
    await store.checkpoints.delete("a")
    assert await store.checkpoints.history("a") == []


@rule("checkpoints", "history")
async def save_sent_twice_is_one_entry(store: Any, clock: FakeClock) -> None:
    for revision in (1, 2, 2):
        await store.checkpoints.save(checkpoint("a", revision, revision=revision))
    assert [entry["step"] for entry in await store.checkpoints.history("a")] == [2, 1]


@rule("checkpoints", "history", "delete_prefix")
async def prefix_deletes_its_runs_alone(store: Any, clock: FakeClock) -> None:
    for name in ("a.turn-0", "a.turn-12", "a", "a.turn", "aXturn-0", "b.turn-0"):
        await store.checkpoints.save(checkpoint(name))
    await store.checkpoints.delete("a.turn-0", keep_history=True)
    assert await store.checkpoints.delete_prefix("a.turn-") == 2
    assert await store.checkpoints.history("a.turn-0") == []
    assert await store.checkpoints.load("a.turn-12") is None
    for name in ("a", "a.turn", "aXturn-0", "b.turn-0"):
        assert await store.checkpoints.load(name) is not None


# ----------------------------------------------------------------------------------------------------------------- approvals


@rule("approvals")
async def approval_is_taken_once(store: Any, clock: FakeClock) -> None:
    pending, snapshot = pause("p1")
    assert await store.approvals.load("p1") is None
    assert await store.approvals.resolve("p1") is None
    await store.approvals.save(pending, snapshot)
    assert tuple(await store.approvals.load("p1")) == (pending, snapshot)
    assert tuple(await store.approvals.load("p1")) == (pending, snapshot)
    assert tuple(await store.approvals.resolve("p1")) == (pending, snapshot)
    assert await store.approvals.load("p1") is None
    assert await store.approvals.resolve("p1") is None


@rule("approvals")
async def of_many_deciders_exactly_one_wins(store: Any, clock: FakeClock) -> None:
    await store.approvals.save(*pause("p1"))
    taken = await asyncio.gather(*(store.approvals.resolve("p1") for _ in range(20)))
    assert sum(record is not None for record in taken) == 1


@rule("approvals")
async def approvals_are_copied_in_and_out(store: Any, clock: FakeClock) -> None:
    pending, snapshot = pause("p1")
    await store.approvals.save(pending, snapshot)
    pending["args"]["usd"] = 5000
    snapshot["messages"].clear()
    loaded = await store.approvals.load("p1")
    loaded[0]["args"]["usd"] = 6000
    assert tuple(await store.approvals.resolve("p1")) == pause("p1")


@rule("approvals")
async def saving_a_taken_approval_puts_it_back(store: Any, clock: FakeClock) -> None:
    await store.approvals.save(*pause("p1"))
    await store.approvals.resolve("p1")
    await store.approvals.save(*pause("p1"))
    assert tuple(await store.approvals.resolve("p1")) == pause("p1")
    assert await store.approvals.resolve("p1") is None


@rule("approvals", "restore")
async def restored_approval_is_open_again(store: Any, clock: FakeClock) -> None:
    assert not await store.approvals.restore("p1")
    await store.approvals.save(*pause("p1"))
    assert not await store.approvals.restore("p1")
    await store.approvals.resolve("p1", token="t", decision={"approved": True})
    assert await store.approvals.restore("p1")
    assert await store.approvals.claimed("p1") is None
    assert tuple(await store.approvals.load("p1")) == pause("p1")
    assert tuple(await store.approvals.resolve("p1")) == pause("p1")


@rule("approvals", "restore")
async def repeated_claim_with_its_token_gets_the_record_again(store: Any, clock: FakeClock) -> None:
    await store.approvals.save(*pause("p1"))
    assert await store.approvals.claimed("p1") is None
    decision = {"approved": False, "note": "no"}
    assert tuple(await store.approvals.resolve("p1", token="mine", decision=decision)) == pause("p1")
    assert await store.approvals.resolve("p1", token="other") is None
    assert await store.approvals.resolve("p1") is None
    assert tuple(await store.approvals.resolve("p1", token="mine", decision={"approved": True})) == pause("p1")
    assert await store.approvals.claimed("p1") == {
        "token": "mine",
        "claimed_at": "2026-01-01T00:00:00.000Z",
        "decision": decision,
    }


@rule("approvals", "list_pending")
async def open_pauses_are_listed_newest_first(store: Any, clock: FakeClock) -> None:
    for number in range(4):
        await store.approvals.save(*pause(f"p{number}"))
        clock.advance(1_000)
    await store.approvals.resolve("p2")
    assert [record["id"] for record in await store.approvals.list_pending()] == ["p3", "p1", "p0"]
    assert [record["id"] for record in await store.approvals.list_pending(limit=1, before="p3")] == ["p1"]
    await store.approvals.delete("p1")
    assert [record["id"] for record in await store.approvals.list_pending()] == ["p3", "p0"]


# ------------------------------------------------------------------------------------------------------------------- pruning


@rule("sessions", "checkpoints", "approvals", "history", "prune")
async def pruning_deletes_what_is_old(store: Any, clock: FakeClock) -> None:
    long = [{"role": "user", "content": "x" * 2000}]
    for name in ("old", "used"):
        await store.sessions.save(name, [user("x")])
        await store.checkpoints.save(checkpoint(name, 1, messages=long))
        await store.approvals.save(*pause(name))
    await store.approvals.resolve("old")
    clock.advance(100_000)
    await store.sessions.save("used", [user("x"), user("y")])
    await store.checkpoints.save(checkpoint("used", 2, messages=long))
    await store.approvals.resolve("used")
    assert await store.aprune(50_000) == {"sessions": 1, "checkpoints": 1, "approvals": 1}
    assert await store.sessions.load("old") is None
    assert await store.checkpoints.load("old") is None
    assert await store.checkpoints.history("old") == []
    assert len(await store.sessions.load("used")) == 2
    assert [entry["step"] for entry in await store.checkpoints.history("used")] == [2]
    assert (await store.checkpoints.load("used"))["messages"] == long
    assert store.prune(50_000) == {"sessions": 0, "checkpoints": 0, "approvals": 0}


@rule("sessions", "checkpoints", "approvals", "prune")
async def pruning_keeps_what_an_open_approval_needs(store: Any, clock: FakeClock) -> None:
    for name in ("trip", "plain", "other"):
        await store.sessions.save(name, [user("x")])
    waiting: dict[str, Any] = {"status": "awaiting-approval", "approvalId": "p1"}
    await store.checkpoints.save(checkpoint("trip.turn-1", **waiting))
    await store.checkpoints.save(checkpoint("trip.paused", **waiting))
    await store.checkpoints.save(checkpoint("other.turn-1", status="awaiting-approval", approvalId="resolved"))
    await store.approvals.save(*pause("p1"))
    await store.approvals.save({"id": "p2"}, {"sessionId": "plain"})
    await store.approvals.save(*pause("resolved"))
    await store.approvals.resolve("resolved")
    clock.advance(10**9)
    assert await store.aprune(1) == {"sessions": 1, "checkpoints": 1, "approvals": 1}
    for name in ("trip", "plain"):
        assert await store.sessions.load(name) is not None, name
    assert await store.checkpoints.load("trip.turn-1") is not None
    assert await store.checkpoints.load("trip.paused") is not None
    assert tuple(await store.approvals.resolve("p1")) == pause("p1")


@rule("sessions", "claim", "prune")
async def pruning_keeps_a_session_whose_turn_runs(store: Any, clock: FakeClock) -> None:
    await store.sessions.save("a", [user("x")])
    clock.advance(1_000_000)
    fence = await store.sessions.claim("a", "one", 1000)
    assert (await store.aprune(1))["sessions"] == 0
    await store.sessions.save("a", [user("x"), user("y")], fence=fence)
    clock.advance(1_000_000)
    assert (await store.aprune(1))["sessions"] == 1


@rule("prune")
async def pruning_checks_its_argument(store: Any, clock: FakeClock) -> None:
    for bad in (-1, "7d", None, True, float("nan")):
        await refused(store.aprune(bad), "LOUSHO_CONFIG_INVALID")
