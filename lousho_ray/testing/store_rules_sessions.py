"""The store contract: sessions and leases."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from lousho_ray.messages import Message, assistant, user
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_rules import TRANSCRIPT, checkpoint, refused, rule

# ------------------------------------------------------------------------------------------------------------------ sessions


@rule("sessions")
async def unknown_session_is_none_and_empty_is_empty(store: Any, clock: FakeClock) -> None:
    assert await store.sessions.load("a") is None
    await store.sessions.save("a", [])
    assert await store.sessions.load("a") == []


@rule("sessions")
async def every_kind_of_content_comes_back_equal(store: Any, clock: FakeClock) -> None:
    await store.sessions.save("a", TRANSCRIPT)
    assert await store.sessions.load("a") == TRANSCRIPT


@rule("sessions")
async def saving_replaces_what_was_there(store: Any, clock: FakeClock) -> None:
    turns = [user("1"), assistant("2"), user("3"), assistant("4")]
    for messages in (turns, turns[:2], [*turns[:2], user("5")], [user("summary"), *turns[2:]], [], turns):
        await store.sessions.save("a", messages)
        assert await store.sessions.load("a") == messages


@rule("sessions")
async def changes_of_metadata_are_saved(store: Any, clock: FakeClock) -> None:
    for value in (1, True, 1.0, "1", None, {"b": [1]}):
        await store.sessions.save("a", [user("x", flag=value), assistant("y")])
        loaded = await store.sessions.load("a")
        assert json.dumps(loaded[0].metadata) == json.dumps({"flag": value})


@rule("sessions")
async def sessions_are_copied_in_and_out(store: Any, clock: FakeClock) -> None:
    metadata = {"usage": {"tokens": [1]}}
    messages = [Message("user", "x", metadata=metadata)]
    await store.sessions.save("a", messages)
    metadata["usage"]["tokens"].append(2)
    messages.append(user("later"))
    loaded = await store.sessions.load("a")
    assert loaded == [Message("user", "x", metadata={"usage": {"tokens": [1]}})]
    loaded[0].metadata["usage"]["tokens"].append(3)
    loaded.append(user("later"))
    assert await store.sessions.load("a") == [Message("user", "x", metadata={"usage": {"tokens": [1]}})]


@rule("sessions")
async def deleted_session_is_none(store: Any, clock: FakeClock) -> None:
    await store.sessions.delete("never")
    await store.sessions.save("a", [user("x")])
    await store.sessions.delete("a")
    assert await store.sessions.load("a") is None
    await store.sessions.save("a", [user("y")])
    assert await store.sessions.load("a") == [user("y")]


@rule("sessions", "checkpoints", "approvals")
async def ids_that_could_leave_their_place_arerefused(store: Any, clock: FakeClock) -> None:
    for bad in ("", "../x", "a/b", ".hidden", "a\0b", "a\nb", "ü", "a" * 161, None):
        await refused(store.sessions.load(bad), "LOUSHO_SESSION_ID_INVALID")
        await refused(store.sessions.save(bad, []), "LOUSHO_SESSION_ID_INVALID")
        await refused(store.checkpoints.save(checkpoint(bad)), "LOUSHO_SESSION_ID_INVALID")  # type: ignore[arg-type]
        await refused(store.approvals.load(bad), "LOUSHO_SESSION_ID_INVALID")


@rule("sessions")
async def ids_differing_in_case_are_different(store: Any, clock: FakeClock) -> None:
    for name in ("alice", "Alice", "ALICE"):
        await store.sessions.save(name, [user(name)])
    for name in ("alice", "Alice", "ALICE"):
        assert await store.sessions.load(name) == [user(name)]


@rule("sessions")
async def many_sessions_saved_at_once_are_all_there(store: Any, clock: FakeClock) -> None:
    await asyncio.gather(*(store.sessions.save(f"s{i}", [user(str(i))]) for i in range(50)))
    assert [await store.sessions.load(f"s{i}") for i in range(50)] == [[user(str(i))] for i in range(50)]


@rule("sessions")
async def saves_of_one_id_land_in_order(store: Any, clock: FakeClock) -> None:
    await asyncio.gather(*(store.sessions.save("a", [user("x")] * i) for i in range(30)))
    assert len(await store.sessions.load("a")) == 29


@rule("sessions", "list")
async def sessions_are_listed_newest_first_in_pages(store: Any, clock: FakeClock) -> None:
    for number in range(5):
        await store.sessions.save(f"s{number}", [user("x")] * number)
        clock.advance(60_000 if number != 2 else 0)  # s2 and s3 have the same time
    first = await store.sessions.list(limit=2)
    second = await store.sessions.list(limit=2, before=first[-1])
    rest = await store.sessions.list(before=second[-1])
    assert [(info["id"], info["messages"]) for info in first + second + rest] == [(f"s{n}", n) for n in (4, 3, 2, 1, 0)]
    assert first[0]["updated_at"] == "2026-01-01T00:03:00.000Z"


# -------------------------------------------------------------------------------------------------------------------- leases


@rule("sessions", "claim")
async def only_one_holder_has_a_session(store: Any, clock: FakeClock) -> None:
    fence = await store.sessions.claim("a", "one", 1000)
    assert isinstance(fence, int)
    assert await store.sessions.claim("a", "two", 1000) is None
    assert await store.sessions.claim("b", "two", 1000) is not None
    assert await store.sessions.claim("a", "one", 1000) == fence
    await store.sessions.release("a", "two", fence)
    assert await store.sessions.claim("a", "two", 1000) is None
    await store.sessions.release("a", "one", fence)
    later = await store.sessions.claim("a", "two", 1000)
    assert later > fence


@rule("sessions", "claim")
async def of_many_claimers_exactly_one_wins(store: Any, clock: FakeClock) -> None:
    fences = await asyncio.gather(*(store.sessions.claim("a", f"h{i}", 1000) for i in range(20)))
    assert sum(fence is not None for fence in fences) == 1


@rule("sessions", "claim")
async def lease_ends_with_its_time_and_is_prolonged(store: Any, clock: FakeClock) -> None:
    fence = await store.sessions.claim("a", "one", 1000)
    clock.advance(900)
    assert await store.sessions.renew("a", "one", fence, 1000)
    clock.advance(900)
    assert await store.sessions.claim("a", "two", 1000) is None
    clock.advance(100)
    assert await store.sessions.claim("a", "two", 1000) > fence
    assert not await store.sessions.renew("a", "one", fence, 1000)


@rule("sessions", "claim")
async def save_under_an_old_fence_isrefused(store: Any, clock: FakeClock) -> None:
    old = await store.sessions.claim("a", "one", 1000)
    await store.sessions.save("a", [user("1")], fence=old)
    clock.advance(2_000)
    await store.sessions.save("a", [user("1"), user("2")], fence=old)  # it ran out, but nobody wrote since
    new = await store.sessions.claim("a", "two", 1000)
    await store.sessions.save("a", [user("two")], fence=new)
    error = await refused(store.sessions.save("a", [user("1"), user("2"), user("3")], fence=old))
    assert "'a'" in error.detail
    assert str(old) in error.detail
    assert await store.sessions.load("a") == [user("two")]


@rule("sessions", "claim")
async def no_save_overwrites_what_it_was_not_based_on(store: Any, clock: FakeClock) -> None:
    fence = await store.sessions.claim("a", "one", 1000)
    await refused(store.sessions.save("a", [user("no lease")]))
    assert await store.sessions.load("a") is None
    clock.advance(2_000)
    await store.sessions.save("a", [user("meanwhile")])
    await refused(store.sessions.save("a", [user("late")], fence=fence))
    assert await store.sessions.load("a") == [user("meanwhile")]


@rule("sessions", "claim")
async def released_lease_saves_no_more(store: Any, clock: FakeClock) -> None:
    fence = await store.sessions.claim("a", "one", 1000)
    await store.sessions.release("a", "one", fence)
    await refused(store.sessions.save("a", [user("late")], fence=fence))
    await store.sessions.save("a", [user("free")])


@rule("sessions", "claim")
async def deleted_session_is_not_brought_back_by_a_running_turn(store: Any, clock: FakeClock) -> None:
    fence = await store.sessions.claim("a", "one", 1000)
    await store.sessions.save("a", [user("1")], fence=fence)
    await store.sessions.delete("a")
    await refused(store.sessions.save("a", [user("1"), user("2")], fence=fence))
    assert await store.sessions.load("a") is None


@rule("sessions", "claim")
async def lease_time_is_checked(store: Any, clock: FakeClock) -> None:
    for bad in (0, -1, float("nan"), "5", True):
        await refused(store.sessions.claim("a", "one", bad), "LOUSHO_CONFIG_INVALID")


# ------------------------------------------------------------------------------------------------------------- durable turns


@rule("sessions", "checkpoints", "claim", "turns")
async def a_turn_opens_with_its_lease_its_transcript_and_what_was_left_behind(store: Any, clock: FakeClock) -> None:
    fence, messages, left = await store.turns.open("a", "one", 1000)
    assert (messages, left) == (None, None)
    await store.sessions.save("a", TRANSCRIPT, fence=fence)
    await store.checkpoints.save(checkpoint(f"a.turn-{len(TRANSCRIPT)}", 2))
    await store.checkpoints.save(checkpoint("a.turn-0", 1))
    assert await store.turns.open("a", "two", 1000) == (None, None, None)
    assert await store.turns.open("a", "one", 1000) == (fence, TRANSCRIPT, checkpoint(f"a.turn-{len(TRANSCRIPT)}", 2))


@rule("sessions", "checkpoints", "claim", "turns")
async def a_turn_ends_in_one_step(store: Any, clock: FakeClock) -> None:
    fence, _, _ = await store.turns.open("a", "one", 1000)
    await store.checkpoints.save(checkpoint("a.turn-0"))
    await store.checkpoints.save(checkpoint("a.turn-7"))
    for _ in range(2):  # a call whose answer was lost is made again
        await store.turns.end("a", [user("x"), assistant("y")], holder="one", fence=fence, checkpoint="a.turn-0")
        assert await store.sessions.load("a") == [user("x"), assistant("y")]
        assert await store.checkpoints.load("a.turn-0") is None
        assert await store.sessions.claim("a", "two", 1000) is not None
        await store.sessions.release("a", "two")
    assert await store.checkpoints.load("a.turn-7") is not None


@rule("sessions", "checkpoints", "claim", "delete_prefix", "turns")
async def a_turn_that_shortens_the_transcript_forgets_all_turns(store: Any, clock: FakeClock) -> None:
    fence, _, _ = await store.turns.open("a", "one", 1000)
    for key in ("a.turn-0", "a.turn-7", "b.turn-0"):
        await store.checkpoints.save(checkpoint(key))
    await store.turns.end("a", [user("x")], holder="one", fence=fence, checkpoint="a.turn-0", shortened=True)
    assert [await store.checkpoints.load(key) is None for key in ("a.turn-0", "a.turn-7", "b.turn-0")] == [True, True, False]


@rule("sessions", "checkpoints", "claim", "turns")
async def a_turn_that_lost_its_lease_changes_nothing(store: Any, clock: FakeClock) -> None:
    fence, _, _ = await store.turns.open("a", "one", 1000)
    await store.checkpoints.save(checkpoint("a.turn-0"))
    clock.advance(2000)
    assert (await store.turns.open("a", "two", 1000)).fence is not None
    await refused(store.turns.end("a", [user("x")], holder="one", fence=fence, checkpoint="a.turn-0"))
    assert await store.sessions.load("a") is None
    assert await store.checkpoints.load("a.turn-0") is not None
    assert await store.sessions.holder("a") == "two"
