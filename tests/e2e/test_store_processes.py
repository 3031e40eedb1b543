"""SQLite stores under real conditions: many processes on one file, a disk that is full, a file that is gone between two turns."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lousho_ray import MockProvider, SqliteStore, StorageError, create_agent
from lousho_ray.messages import Message
from lousho_ray.ports import GenerateOptions
from tests.unit.loop_support import check_transcript

PROCESSES, TURNS, OWN = 10, 2, 2


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


HAMMER = """
    import asyncio, sys
    from lousho_ray import MockProvider, SqliteStore, create_agent

    def parrot(request):
        return f"heard {request.messages[-1].text}"

    async def main(path, name, turns):
        async with SqliteStore(path) as store:
            agent = create_agent(
                provider=MockProvider(policy=parrot), store=store, runtime="local", session_wait_ms=120_000
            )
            shared, own = agent.session("shared"), [agent.session(f"{name}-{i}") for i in range(2)]
            for turn in range(int(turns)):
                await asyncio.gather(*(session.send(f"{name} {turn}") for session in (shared, *own)))

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.timeout(180)
async def test_ten_processes_hammer_one_file_and_lose_no_turn(tmp_path: Path) -> None:  # STO-31, LES-62, D01, D02
    path = str(tmp_path / "agent.db")
    names = [f"p{number}" for number in range(PROCESSES)]
    ends = await asyncio.gather(*(asyncio.to_thread(run_python, HAMMER, path, name, str(TURNS)) for name in names))
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * PROCESSES  # no "database is locked"
    async with SqliteStore(path) as store:
        shared = await store.sessions.load("shared") or []
        assert sorted(asked(shared)) == sorted(f"{name} {turn}" for name in names for turn in range(TURNS))
        for name in names:
            assert [text for text in asked(shared) if text.startswith(f"{name} ")] == [f"{name} {turn}" for turn in range(TURNS)]
            for number in range(OWN):
                own = await store.sessions.load(f"{name}-{number}") or []
                assert asked(own) == [f"{name} {turn}" for turn in range(TURNS)]
        assert len(await store.sessions.list(limit=None)) == 1 + OWN * PROCESSES


def asked(transcript: list[Message]) -> list[str]:
    """The questions of a transcript in which each is answered before the next."""
    questions, answers = transcript[::2], transcript[1::2]
    assert [message.text for message in answers] == [f"heard {message.text}" for message in questions]
    return [message.text for message in questions]


FULL_DISK = """
    import asyncio, os, resource, sys
    from lousho_ray import MockProvider, SqliteStore, StorageError, create_agent

    calls = 0

    def parrot(request):
        global calls
        calls += 1
        return "heard " + request.messages[-1].text[:8]

    def allow(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    async def main(path):
        async with SqliteStore(path) as store:
            session = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="local").session("talk")
            await session.send("before")
            allow(os.path.getsize(path + "-wal") + 5_000)
            try:
                await session.send("too much " + "x" * 50_000)
            except StorageError as error:
                print(error.code, path in error.detail)
            print(calls, [message.text for message in await session.load()])
            allow(resource.RLIM_INFINITY)
            await session.send("after")
            print(calls, [message.text for message in await session.load()], await session.pending())

    asyncio.run(main(*sys.argv[1:]))
"""


def test_a_full_disk_fails_a_turn_before_its_model_is_called_and_the_session_goes_on(tmp_path: Path) -> None:  # D05
    end = run_python(FULL_DISK, str(tmp_path / "agent.db"))
    assert end.stderr == ""
    assert end.stdout.splitlines() == [
        "LOUSHO_STORAGE_FAILED True",
        "1 ['before', 'heard before']",
        "2 ['before', 'heard before', 'after', 'heard after'] None",
    ]


def parrot(request: GenerateOptions) -> str:
    return f"heard {request.messages[-1].text}"


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_file_that_is_gone_between_two_turns_is_an_error_once(tmp_path: Path, how: str) -> None:  # D05, STO-30
    path, other = tmp_path / "agent.db", tmp_path / "other.db"
    async with SqliteStore(path) as store, SqliteStore(other) as spare:
        session = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="local").session("talk")
        await session.send("one")
        await spare.sessions.save("talk", [])
        await spare.aclose()
        for name in ("agent.db", "agent.db-wal", "agent.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        if how == "replaced":
            other.rename(path)
        with pytest.raises(StorageError, match="removed or replaced") as raised:
            await session.send("two")
        assert str(path) in raised.value.detail
        assert (await session.send("three")).text == "heard three"
        assert [message.text for message in await session.load()] == ["three", "heard three"]
    async with SqliteStore(path) as again:
        assert len(await again.sessions.load("talk") or []) == 2


async def test_a_log_that_is_deleted_while_it_is_open_is_an_error_once_and_loses_nothing(tmp_path: Path) -> None:  # D05
    path = tmp_path / "agent.db"
    async with SqliteStore(path) as store:
        session = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="local").session("talk")
        await session.send("one")
        (tmp_path / "agent.db-wal").unlink()
        with pytest.raises(StorageError, match="removed or replaced"):
            await session.send("two")
        await session.send("three")
        async with SqliteStore(path) as other:  # what was answered is there for others
            kept = await other.sessions.load("talk") or []
        assert [message.text for message in kept] == ["one", "heard one", "three", "heard three"]


NAPS = """
    import asyncio, os, sys
    from lousho_ray import MockProvider, SqliteStore, create_agent, tool, turn_lease
    from lousho_ray.errors import LoushoError
    from lousho_ray.messages import ToolCall
    from lousho_ray.ports import GenerateResult, ToolContext

    turn_lease.LEASE_MS = 400
    name = sys.argv[3]

    def answer(request):
        turns = [message.role for message in request.messages]
        last = request.messages[-1]
        asked = len(turns) - 1 - turns[::-1].index("user")
        if last.role == "user":
            ids = [f"{name} {len(turns)} {number}".replace(" ", "-") for number in range(2)]
            return GenerateResult("", tuple(ToolCall(id, "act", "{}") for id in ids), "tool_calls")
        return f"heard {request.messages[asked].text}"

    async def main(path, effects, name, turns):
        @tool
        async def act(ctx: ToolContext) -> str:
            "Has an effect."
            with open(effects, "a") as file:
                file.write(f"{name} {ctx.tool_call_id}\\n")
            await asyncio.sleep(0.02)
            return "done"

        async with SqliteStore(path) as store:
            agent = create_agent(
                provider=MockProvider(policy=answer), tools=[act], store=store, runtime="local", session_wait_ms=60_000
            )
            session, done = agent.session("shared"), 0
            while done < int(turns):
                try:
                    result = await session.send(f"{name} {done}")
                except LoushoError:
                    result = None
                if result is not None and result.finish_reason == "stop":
                    print(f"{name} {done}", flush=True)
                done += 1

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.timeout(180)
async def test_processes_that_sleep_longer_than_their_lease_lose_and_repeat_nothing(tmp_path: Path) -> None:  # LES-62, D01, DEC-R3
    path, effects = tmp_path / "agent.db", tmp_path / "effects"
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(NAPS), str(path), str(effects)]
    processes = [
        await asyncio.create_subprocess_exec(*command, f"p{number}", "3", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for number in range(PROCESSES)
    ]
    ends = asyncio.gather(*(process.communicate() for process in processes))
    dice = random.Random(7)
    while not ends.done():
        living = [process for process in processes if process.returncode is None]
        for process in (napping := dice.sample(living, min(3, len(living)))):
            process.send_signal(signal.SIGSTOP)
        await asyncio.wait({ends}, timeout=0.7)  # longer than a lease
        for process in napping:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        await asyncio.wait({ends}, timeout=0.5)
    told = [out.decode().splitlines() for out, _ in await ends]
    assert [error.decode() for _, error in await ends if b"Traceback" in error] == []
    async with SqliteStore(path) as store:
        session = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="local").session("shared")
        await session.discard_pending()
        kept = await session.load()
    check_transcript(kept)
    questions = [message.text for message in kept if message.role == "user"]
    assert len(questions) == len(set(questions))
    assert [text for lines in told for text in lines if text not in questions] == []
    answered = {message.tool_call_id for message in kept if message.role == "tool" and not message.is_error}
    assert answered <= {line.split()[1] for line in effects.read_text().splitlines()}
    assert sum(map(len, told)) > PROCESSES
