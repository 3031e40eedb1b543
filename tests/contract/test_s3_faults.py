"""S3 stores when requests are lost, late or refused, and when several processes want the same thing at one moment."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import S3Store, StorageError, ray_store
from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import Message, assistant, user
from lousho_ray.stores.location import parse_location
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_contract import StoreCheck, store_checks
from lousho_ray.testing.store_rules import checkpoint, pause
from tests.contract.s3_server import BUCKET, CREDENTIALS, Action, S3Server, store_of

QUICK_MS = 300
"""A request timeout that tests can wait for."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def texts(messages: list[Message] | None) -> list[str] | None:
    return None if messages is None else [message.text for message in messages]


async def still_waits(call: asyncio.Task[Any]) -> None:
    """A call that must not end yet does not."""
    await asyncio.wait({call}, timeout=0.2)
    assert not call.done()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


# ------------------------------------------------------------------------------------------------------------ lost answers


@pytest.mark.parametrize("action", ["drop-before", "drop-after", "hang", "conflict", "slow-down"])
async def test_one_bad_answer_to_any_write_changes_nothing(server: S3Server, action: Action) -> None:
    # STO-44, DUR-D6, LES-62: what was done although the answer was lost is not done twice, and not taken for another's work
    async with store_of(server, timeout_ms=QUICK_MS) as store:
        with server.fault("PUT", "leases/", action):
            fence = await store.sessions.claim("a", "one", 60_000)
        assert fence is not None
        with server.fault("PUT", "sessions/", action):
            await store.sessions.save("a", [user("1")], fence=fence)
        with server.fault("PUT", "sessions/", action):
            await store.sessions.save("a", [user("1"), user("2")], fence=fence)
        with server.fault("PUT", "leases/", action):
            assert await store.sessions.renew("a", "one", fence, 60_000)
        with server.fault("PUT", "leases/", action):
            await store.sessions.release("a", "one", fence)
        for revision in (1, 2):
            with server.fault("PUT", "checkpoints/", action), server.fault("PUT", "checkpoint-history/", action):
                await store.checkpoints.save(checkpoint("a", revision, revision=revision))
        with server.fault("PUT", "approvals/", action):
            await store.approvals.save(*pause("p"))
        with server.fault("PUT", "approvals/", action):
            assert await store.approvals.resolve("p") is not None
        assert await store.approvals.resolve("p") is None
    async with store_of(server) as other:
        assert texts(await other.sessions.load("a")) == ["1", "2"]
        assert await other.sessions.claim("a", "two", 60_000) is not None
        assert [entry["step"] for entry in await other.checkpoints.history("a")] == [2, 1]


@pytest.mark.parametrize("action", ["drop-before", "drop-after", "slow-down"])
async def test_one_bad_answer_to_a_read_is_asked_for_again(server: S3Server, action: Action) -> None:
    async with store_of(server) as store:
        await store.sessions.save("a", [user("1")])
        with server.fault("GET", "sessions/", action):
            assert texts(await store.sessions.load("a")) == ["1"]
        with server.fault("LIST", "sessions", action):
            assert [info["id"] for info in await store.sessions.list()] == ["a"]


async def test_a_server_that_does_not_answer_is_a_storage_error_and_forgotten_afterwards(server: S3Server) -> None:
    # DUR-17: the same store works on when the network does
    async with store_of(server, timeout_ms=QUICK_MS) as store:
        await store.sessions.save("a", [user("1")])
        with server.fault("PUT", "sessions/", "hang", times=99), pytest.raises(StorageError, match="Cannot write sessions/a"):
            await store.sessions.save("a", [user("2")])
        with server.fault("GET", "sessions/", "slow-down", times=99), pytest.raises(StorageError, match="503"):
            await store.sessions.load("a")
        await store.sessions.save("a", [user("3")])
        assert texts(await store.sessions.load("a")) == ["3"]


async def test_a_refusal_is_not_tried_again_and_says_where_credentials_come_from(server: S3Server) -> None:
    async with store_of(server) as store:
        await store.sessions.load("a")
        with server.fault("PUT", "checkpoints/", "denied", times=99), pytest.raises(StorageError) as caught:
            await store.checkpoints.save(checkpoint("a"))
        assert "AWS_ACCESS_KEY_ID" in caught.value.detail
        assert caught.value.path == store.location.url
        assert server.count("PUT", "checkpoints/") == 1


async def test_a_failed_save_can_be_sent_again_under_its_lease(server: S3Server) -> None:
    # DUR-D6: the first attempt lands without anybody knowing; the second is the same save, no conflict
    async with store_of(server, timeout_ms=QUICK_MS) as store:
        fence = await store.sessions.claim("a", "one", 60_000)
        await store.sessions.load("a")
        with server.fault("PUT", "sessions/", "late", times=99) as late:
            with pytest.raises(StorageError):
                await store.sessions.save("a", [user("1")], fence=fence)
            late.release.set()
            await until(late.done)
        await store.sessions.save("a", [user("1"), user("2")], fence=fence)
        assert texts(await store.sessions.load("a")) == ["1", "2"]


# -------------------------------------------------------------------------------------------------- fencing under late writes


@pytest.mark.parametrize("saved_before", [True, False])
async def test_a_save_that_arrives_after_a_take_over_does_not_land(server: S3Server, saved_before: bool) -> None:
    # DEC-R3, LES-62: the number is checked before the write is sent, so the write itself must fail when it comes too late
    clock = FakeClock()
    async with store_of(server, clock=clock) as one, store_of(server, clock=clock) as two:
        if saved_before:
            await one.sessions.save("a", [user("start")])
        old = await one.sessions.claim("a", "one", 1_000)
        await one.sessions.load("a")
        with server.fault("PUT", "sessions/", "late") as late:
            saving = asyncio.create_task(one.sessions.save("a", [user("late")], fence=old))
            await until(late.met)
            clock.advance(2_000)
            new = await two.sessions.claim("a", "two", 1_000)
            assert new > old
            base = await two.sessions.load("a")
            assert texts(base) == (["start"] if saved_before else None)
            late.release.set()
            await until(late.done)
            with pytest.raises(StorageError, match=rf"lease {old} is outdated \('two' holds lease {new}\)"):
                await saving
        await two.sessions.save("a", [*(base or []), user("two")], fence=new)
        assert texts(await one.sessions.load("a")) == ["start", "two"][not saved_before :]


async def test_a_save_that_arrives_after_its_lease_was_given_back_does_not_land(server: S3Server) -> None:
    # LES-62: the holder was told that the save failed, gave the lease back, and the save is still on its way
    async with store_of(server, timeout_ms=QUICK_MS) as one, store_of(server) as two:
        old = await one.sessions.claim("a", "one", 60_000)
        await one.sessions.load("a")
        with server.fault("PUT", "sessions/", "late", times=99) as late:
            with pytest.raises(StorageError):
                await one.sessions.save("a", [user("late")], fence=old)
            await one.sessions.release("a", "one", old)
            late.times = 0
            new = await two.sessions.claim("a", "two", 60_000)
            assert await two.sessions.load("a") is None
            late.release.set()
            await until(late.done)
        await two.sessions.save("a", [user("two")], fence=new)
        assert texts(await two.sessions.load("a")) == ["two"]


async def test_a_save_that_arrives_after_a_delete_does_not_bring_the_session_back(server: S3Server) -> None:
    # LES-23
    async with store_of(server) as one, store_of(server) as two:
        fence = await one.sessions.claim("a", "one", 60_000)
        await one.sessions.load("a")
        with server.fault("PUT", "sessions/", "late") as late:
            saving = asyncio.create_task(one.sessions.save("a", [user("late")], fence=fence))
            await until(late.met)
            await two.sessions.delete("a")
            late.release.set()
            with pytest.raises(StorageError, match="is outdated"):
                await saving
        assert await two.sessions.load("a") is None
        assert await two.sessions.list() == []


async def test_a_transcript_that_was_changed_without_the_lease_is_not_overwritten(server: S3Server) -> None:
    # LES-62: a save without a number that was let through before the claim, and landed after it
    async with store_of(server) as one, store_of(server) as two:
        with server.fault("PUT", "sessions/", "late") as late:
            saving = asyncio.create_task(two.sessions.save("a", [user("meanwhile")]))
            await until(late.met)
            fence = await one.sessions.claim("a", "one", 60_000)
            assert await one.sessions.load("a") is None
            late.release.set()
            await saving
        with pytest.raises(StorageError, match="somebody without the lease has changed it"):
            await one.sessions.save("a", [user("mine")], fence=fence)
        assert texts(await one.sessions.load("a")) == ["meanwhile"]
        await one.sessions.save("a", [user("meanwhile"), user("mine")], fence=fence)


async def test_the_lease_of_the_dead_is_ended_by_name(server: S3Server) -> None:
    # SES-76: and whatever it had still on its way does not land
    async with store_of(server) as one, store_of(server) as two:
        await one.sessions.claim("a", "pid-1/run", 60_000)
        assert await two.sessions.holder("a") == "pid-1/run"
        await two.sessions.release("a", "pid-2/run")
        assert await two.sessions.claim("a", "two", 60_000) is None
        writes = server.count("PUT", "sessions/")
        await two.sessions.release("a", "pid-1/run")
        assert await two.sessions.holder("a") is None
        assert await two.sessions.claim("a", "two", 60_000) is not None
        assert server.count("PUT", "sessions/") == writes + 1


async def test_a_lease_is_renewed_while_a_long_save_is_on_its_way(server: S3Server) -> None:
    async with store_of(server) as store:
        fence = await store.sessions.claim("a", "one", 60_000)
        with server.fault("PUT", "sessions/", "late") as late:
            saving = asyncio.create_task(store.sessions.save("a", [user("long")], fence=fence))
            await until(late.met)
            assert await store.sessions.renew("a", "one", fence, 60_000)
            assert not saving.done()
            late.release.set()
            await saving


async def test_a_cancelled_save_is_finished_and_what_comes_after_it_waits(server: S3Server) -> None:
    # STO-44: writes of one key are applied in the order they were made
    async with store_of(server) as store:
        await store.sessions.load("a")
        with server.fault("PUT", "sessions/", "hang") as hanging:  # the first try does nothing, so there must be a second
            saving = asyncio.create_task(store.sessions.save("a", [user("1")]))
            await until(hanging.met)
            saving.cancel()
            loading = asyncio.create_task(store.sessions.load("a"))
            with pytest.raises(asyncio.CancelledError):
                await saving
            hanging.release.set()
            assert texts(await loading) == ["1"]


# -------------------------------------------------------------------------------------------------------- several at one moment


async def test_of_many_stores_one_wins_a_session_and_one_a_decision(server: S3Server) -> None:
    # STO-D4, LES-62
    stores = [store_of(server) for _ in range(8)]
    try:
        await stores[0].approvals.save(*pause("p"))
        fences = await asyncio.gather(*(store.sessions.claim("a", f"h{n}", 60_000) for n, store in enumerate(stores)))
        assert sum(fence is not None for fence in fences) == 1
        taken = await asyncio.gather(*(store.approvals.resolve("p") for store in stores for _ in range(3)))
        assert [record for record in taken if record is not None] == [pause("p")]
        restored = await asyncio.gather(*(store.approvals.restore("p") for store in stores))
        assert sum(restored) == 1
    finally:
        for store in stores:
            await store.aclose()


async def test_of_two_writers_of_a_run_the_lower_revision_never_wins(server: S3Server) -> None:
    # DUR-16, DUR-D6
    async with store_of(server) as one, store_of(server) as two:
        saves = [(one, two)[n % 2].checkpoints.save(checkpoint("a", n, revision=n)) for n in range(20)]
        outcomes = await asyncio.gather(*saves, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), StorageError}
        assert (await one.checkpoints.load("a") or {})["revision"] == 19
        kept = [n for n, outcome in enumerate(outcomes) if outcome is None]
        assert [entry["step"] for entry in await one.checkpoints.history("a")] == kept[::-1]


def test_processes_take_turns_and_lose_none(server: S3Server) -> None:
    # STO-D4, LES-62, DEC-R3
    with store_of(server) as store:
        asyncio.run(store.approvals.save(*pause("pay")))
        url = store.location.url
        keys = {f"AWS_{name.upper()}": value for name, value in CREDENTIALS.items()}
        child = Path(__file__).with_name("s3_child.py")
        command = [sys.executable, str(child), url]
        environment = {**os.environ, **keys}
        children = [
            subprocess.Popen([*command, name, "15"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for name in ("one", "two")
        ]
        ended = [child.communicate(timeout=50) for child in children]
        assert [child.returncode for child in children] == [0, 0], ended
        assert sorted(out for out, _ in ended) == ["", "won\n"]
        said = [text.split() for text in texts(asyncio.run(store.sessions.load("talk"))) or []]
        for name in ("one", "two"):
            assert [int(turn) for who, turn, _ in said if who == name] == list(range(15))
        fences = [int(fence) for _, _, fence in said]
        assert fences == sorted(set(fences))


@pytest.mark.parametrize("seed", range(2))
async def test_no_turn_is_lost_or_overtaken_whatever_the_network_does(server: S3Server, seed: int) -> None:
    # LES-62: leases run out in the middle of turns, and requests are lost, repeated, refused and late
    dice = random.Random(seed)
    saved: list[str] = []

    async def take_turns(name: str, store: S3Store) -> None:
        for turn in itertools.count():
            if len(saved) >= 15:
                return
            try:
                fence = await store.sessions.claim("talk", f"{name}-{turn}", 250)
                if fence is None:
                    await asyncio.sleep(dice.uniform(0.0, 0.1))
                    continue
                messages = await store.sessions.load("talk") or []
                await asyncio.sleep(dice.choice((0.0, 0.0, 0.05, 0.3)))
                text = f"{fence} {name} {turn}"
                await store.sessions.save("talk", [*messages, user(text)], fence=fence)
                saved.append(text)
                if dice.random() < 0.7:
                    await store.sessions.release("talk", f"{name}-{turn}", fence)
            except StorageError:
                pass

    stores = [store_of(server, timeout_ms=QUICK_MS) for _ in range(3)]
    try:
        await asyncio.gather(*(store.sessions.load("talk") for store in stores))
        server.chaos = random.Random(seed)
        await asyncio.gather(*(take_turns(str(number), store) for number, store in enumerate(stores)))
        server.chaos = None
        kept = texts(await stores[0].sessions.load("talk")) or []
        fences = [int(text.split()[0]) for text in kept]
        assert fences == sorted(set(fences))
        assert [text for text in saved if text not in kept] == []
    finally:
        for store in stores:
            await store.aclose()


# ------------------------------------------------------------------------------------------------------------------- pruning


async def test_a_checkpoint_that_is_saved_while_it_is_pruned_stays(server: S3Server) -> None:
    # STO-38
    clock = FakeClock()
    async with store_of(server, clock=clock) as one, store_of(server, clock=clock) as two:
        await one.checkpoints.save(checkpoint("a", 1))
        clock.advance(100_000)
        with server.fault("POST", "", "late") as late:  # the delete, after the object was marked
            pruning = asyncio.create_task(one.aprune(50_000))
            await until(late.met)
            with server.fault("GET", "checkpoints/", "seen") as seen:
                saving = asyncio.create_task(two.checkpoints.save(checkpoint("a", 2)))
                await until(seen.met)
            await still_waits(saving)
            late.release.set()
            assert (await pruning)["checkpoints"] == 1
            await saving
        assert (await two.checkpoints.load("a") or {})["stepIndex"] == 2


async def test_a_session_that_is_saved_while_it_is_pruned_stays(server: S3Server) -> None:
    # STO-38
    clock = FakeClock()
    async with store_of(server, clock=clock) as one, store_of(server, clock=clock) as two:
        await one.sessions.save("a", [user("old")])
        clock.advance(100_000)
        with server.fault("POST", "", "late") as late:
            pruning = asyncio.create_task(one.aprune(50_000))
            await until(late.met)
            assert await two.sessions.claim("a", "two", 1_000) is None
            with server.fault("GET", "leases/", "seen") as seen:
                saving = asyncio.create_task(two.sessions.save("a", [user("new")]))
                await until(seen.met)
            await still_waits(saving)
            late.release.set()
            await pruning
            await saving
        assert texts(await two.sessions.load("a")) == ["new"]


async def test_pruning_leaves_nothing_behind(server: S3Server) -> None:
    # STO-36: leases and marks of what is gone go too
    clock = FakeClock()
    async with store_of(server, clock=clock) as store:
        fence = await store.sessions.claim("a", "one", 1_000)
        await store.sessions.save("a", [user("1")], fence=fence)
        await store.sessions.delete("a")
        await store.checkpoints.save(checkpoint("b"))
        await store.checkpoints.delete("b", keep_history=True)
        await store.approvals.save(*pause("p"))
        await store.approvals.resolve("p")
        clock.advance(100_000)
        assert await store.aprune(50_000) == {"sessions": 0, "checkpoints": 0, "approvals": 1}
        assert server.objects == {}
        later = await store.sessions.claim("a", "two", 1_000)
        assert fence is not None
        assert later is not None
        assert later > fence  # although nothing tells of the old lease any more


# --------------------------------------------------------------------------------------------------------- layout and requests


async def test_each_record_is_one_object_under_its_name(server: S3Server) -> None:
    # STO-18, STO-46
    async with store_of(server, "team/agents") as store:
        await store.sessions.save("Alice", [user("hi")])
        await store.checkpoints.save(checkpoint("Alice.turn-0"))
        await store.approvals.save(*pause("p-1"))
        assert sorted(server.objects) == [
            "team/agents/approvals/p-1.json",
            "team/agents/checkpoint-history/^alice.turn-0/0000000001.json",
            "team/agents/checkpoints/^alice.turn-0.json",
            "team/agents/sessions/^alice.json",
        ]


async def test_a_save_is_one_put_and_lists_nothing(server: S3Server) -> None:
    # STO-46
    async with store_of(server, history_limit=0) as store:
        fence = await store.sessions.claim("a", "one", 60_000)
        await store.sessions.load("a")
        server.requests.clear()
        await store.sessions.save("a", [user("1"), assistant("2")], fence=fence)
        assert server.count("PUT") == 1
        server.requests.clear()
        for step in range(3):
            await store.checkpoints.save(checkpoint("a", step))
        assert [method for method, _ in server.requests] == ["PUT"] * 3
        assert server.count("LIST") == 0


async def test_equal_content_is_another_version(server: S3Server) -> None:
    # An ETag is a hash of the content: without a nonce a writer could not see that somebody wrote the same in between.
    async with store_of(server) as store:
        bodies = set()
        for _ in range(3):
            await store.sessions.save("a", [user("same")])
            bodies.add(server.objects["app/sessions/a.json"])
        assert len(bodies) == 3


async def test_prefixes_do_not_meet(server: S3Server) -> None:
    async with store_of(server, "a") as one, store_of(server, "ab") as two, store_of(server, "") as bare:
        await one.sessions.save("s", [user("a")])
        await two.sessions.save("s", [user("ab")])
        assert texts(await one.sessions.load("s")) == ["a"]
        assert len(await one.sessions.list()) == 1
        assert await bare.sessions.list() == []


async def test_a_damaged_object_is_named(server: S3Server) -> None:
    async with store_of(server) as store:
        await store.sessions.load("a")
        for body in (b"{", b"[]", b"\xff", b'{"head":{"count":1}\n}', b'{"head":{},\n"messages":[3]\n}'):
            server.objects["app/sessions/a.json"] = body
            with pytest.raises(StorageError, match=r"is damaged"):
                await store.sessions.load("a")
            assert server.objects["app/sessions/a.json"] == body


# ------------------------------------------------------------------------------------------------- opening, closing, conditions


@pytest.mark.parametrize("conditions", ["ignored", "unknown"])
async def test_a_bucket_without_conditional_writes_is_refused(conditions: Any) -> None:
    # STO-D4
    with S3Server(conditions) as server:
        async with store_of(server, timeout_ms=QUICK_MS) as store:
            for _ in range(2):
                with pytest.raises(StorageError):
                    await store.approvals.resolve("p")
        assert server.objects == {}
        if conditions == "ignored":
            async with store_of(server) as store:
                with pytest.raises(StorageError, match=r"ignored the condition.*single_writer=True"):
                    await store.sessions.load("a")


@pytest.mark.parametrize("check", store_checks(without={"turns"}), ids=str)
async def test_a_single_writer_needs_no_conditional_writes(check: StoreCheck) -> None:
    # STO-D4
    clock = FakeClock()
    with S3Server("unknown") as server:
        async with store_of(server, clock=clock, single_writer=True) as store:
            await check(store, clock)


async def test_a_bucket_that_is_not_there_is_named(server: S3Server) -> None:
    for single_writer in (True, False):
        options: dict[str, Any] = {"endpoint": server.endpoint, "credentials": CREDENTIALS, "single_writer": single_writer}
        async with S3Store("no-such-bucket", **options) as store:
            with pytest.raises(StorageError, match=r"s3://no-such-bucket.*Create the bucket first"):
                await store.sessions.load("a")


async def test_a_closed_store_is_refused_and_closing_waits_for_what_was_begun(server: S3Server) -> None:
    store = store_of(server)
    saving = asyncio.create_task(store.sessions.save("a", [user("1")]))
    await asyncio.sleep(0)
    await store.aclose()
    await saving
    store.close()
    with pytest.raises(StorageError, match="is closed; create a new one"):
        await store.sessions.load("a")
    with pytest.raises(StorageError, match="is closed"):
        store.prune(0)
    async with store_of(server) as other:
        assert texts(await other.sessions.load("a")) == ["1"]


async def test_a_store_works_from_several_event_loops(server: S3Server) -> None:
    async with store_of(server) as store:
        await store.sessions.save("a", [user("1")])
        loaded = await asyncio.to_thread(lambda: asyncio.run(store.sessions.load("a")))
        assert texts(loaded) == ["1"]


async def test_a_store_is_refused_after_a_fork(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(server) as store:
        await store.sessions.load("a")
        monkeypatch.setattr("lousho_ray.stores.s3_lanes.os.getpid", lambda: -1)
        with pytest.raises(StorageError, match="was used before a fork"):
            await store.sessions.load("a")


# ----------------------------------------------------------------------------------------------------------- URLs and secrets


def test_a_location_is_sent_without_credentials_unless_they_were_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    # STO-42, STO-43
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    with ray_store("s3://bucket-1/some/prefix?region=eu-west-1", history_limit=7) as store:
        assert isinstance(store, S3Store)
        sent = pickle.dumps(store)
        assert b"env-" not in sent
        with pickle.loads(sent) as copy:
            assert (copy.location, copy.history_limit) == (store.location, 7)
        assert repr(store) == "S3Store('s3://bucket-1/some/prefix?region=eu-west-1')"
    given = {"access_key_id": "my-key", "secret_access_key": "my-secret"}
    with S3Store("bucket-1", credentials=given) as store:
        for shown in (repr(store), repr(store.location), store.location.url, str(vars(store))):
            assert "my-" not in shown
        with pickle.loads(pickle.dumps(store)) as copy:
            assert copy.location.s3.credentials == store.location.s3.credentials != ""


async def test_endpoint_region_and_keys_come_from_the_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # STO-43
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    async with ray_store(f"s3://{BUCKET}/env") as store:
        await store.sessions.save("a", [user("1")])
        assert store.location.s3.region == "eu-central-1"
    assert "env/sessions/a.json" in server.objects


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("gs://bucket-1", "'s3://bucket/prefix' and 'memory://'"),
        ("s3://", "bucket must be"),
        ("s3://Bad_Bucket/x", "bucket must be"),
        ("s3://bucket-1/a/../b", "prefix must be"),
        ("s3://bucket-1/a//b", "prefix must be"),
        ("s3://bucket-1?regoin=x", "unknown option 'regoin'.*Did you mean 'region'"),
        ("s3://bucket-1?single_writer=yes", "single_writer must be"),
        ("s3://bucket-1?endpoint=127.0.0.1:9000", "endpoint must be the URL"),
        (None, "is no store URL"),
    ],
)
def test_a_bad_url_is_refused_with_what_is_allowed(url: Any, named: str) -> None:  # STO-43
    with pytest.raises(ConfigurationError, match=f"(?s){named}") as caught:
        ray_store(url)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "url")


@pytest.mark.parametrize(
    "url",
    [
        "s3://topkey:topsecret@bucket-1/x",
        "s3://bucket-1?access_key_id=topkey&secret_access_key=topsecret",
        "s3://bucket-1?endpoint=http://topkey:topsecret@127.0.0.1:9000",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ray_store(url)
    seen: BaseException | None = caught.value
    while seen is not None:
        assert "topsecret" not in str(seen)
        seen = seen.__cause__


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"bucket": 3}, "bucket"),
        ({"prefix": "a b"}, "prefix"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"history_limit": -1}, "history_limit"),
        ({"credentials": {"access_key_id": "x"}}, "credentials"),
        ({"credentials": {"access_key_id": "x", "secret_access_key": "y", "secret": "z"}}, "credentials"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        S3Store(**{"bucket": "bucket-1", **options})
    assert caught.value.field == field


def test_store_urls_open_their_kind_of_store(tmp_path: Path) -> None:  # STO-43
    with ray_store(f"sqlite:///{tmp_path}/a.db", history_limit=3) as store:
        assert isinstance(store, SqliteStore)
        assert store.location == parse_location(f"sqlite:///{tmp_path}/a.db", history_limit=3)
    url = "s3://bucket-1/p?endpoint=http%3A%2F%2F127.0.0.1%3A9&region=eu-west-1&single_writer=true"
    assert parse_location(url).url == url
    assert parse_location(parse_location(url).url) == parse_location(url)
