"""Reading what a store holds: plain data of the forms that are written, and an error for anything else. Nothing of it runs."""

from __future__ import annotations

import ast
import base64
import json
import os
import pickle
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import lousho_ray
from lousho_ray.errors import LoushoError, StorageError
from lousho_ray.messages import Message, user
from lousho_ray.stores.files import file_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.tools.tool import tool
from tests.contract.s3_server import S3Server, store_of
from tests.unit.loop_support import agent_of, calls

GONE = object()
"""Stands for a field that is taken out."""


class World:
    """A store on a disk (or in a bucket), and what is really there."""

    def __init__(self, kind: str, folder: Path, server: S3Server | None) -> None:
        self.kind, self._folder, self._server = kind, folder, server
        self.store: Any = self.open()

    def open(self) -> Any:
        """The same store once more, as another process has it: it remembers nothing."""
        if self._server is not None:
            return store_of(self._server)
        return SqliteStore(self._folder / "s.db") if self.kind == "sqlite" else file_store(self._folder, fsync=False)

    def write_message(self, id: str, text: str) -> None:
        """Puts a text in the place of the only message of a session."""
        if self._server is not None:
            name = f"app/sessions/{id}.json"
            head = self._server.objects[name].partition(b"\n")[0]
            self._server.objects[name] = head + f'\n"messages":[{text}]\n}}'.encode()
        elif self.kind == "file":
            (self._folder / "sessions" / f"{id}.json").write_text(f"[{text}]")
        else:
            with closing(sqlite3.connect(self._folder / "s.db")) as connection, connection:
                connection.execute("UPDATE messages SET body = ?", (text,))

    def edit(self, part: str, change: Any) -> None:
        """Changes the only checkpoint (`checkpoints`) or pause (`approvals`: `{"pending", "snapshot"}`)."""
        [path] = (self._folder / part).glob("*.json")
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


@contextmanager
def world_of(kind: str, folder: Path) -> Iterator[World]:
    if kind == "s3":
        with S3Server() as server:
            world = World(kind, folder, server)
            yield world
            world.store.close()
        return
    world = World(kind, folder, None)
    yield world
    world.store.close()


class Trap:
    """Would run a command if it were ever unpickled."""

    def __init__(self, folder: Path) -> None:
        self._command = f"touch {folder / 'ran'}"

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


# --------------------------------------------------------------------------------------------------------------- transcripts

CALL = {"id": "c1", "name": "pay", "arguments": "{}"}

NO_MESSAGES: list[Any] = [
    *(None, 5, [1], "text", {"content": "x"}),
    *({"role": role, "content": "x"} for role in ("wizard", "", None, 5)),
    *({"role": "user", "content": content} for content in (None, 5, {"text": "x"}, ["x"], [None], [{"type": "spell"}])),
    *({"role": "user", "content": [part]} for part in ({"text": "x"}, {"type": "text", "text": 5}, {"type": "text"})),
    *(
        {"role": "user", "content": [{"type": "image", "image": image}]}
        for image in (5, None, {}, {"$bytes": 5}, {"$pickle": "gASV"})
    ),
    {"role": "user", "content": [{"type": "image", "image": "https://x.test/a.png", "mimeType": 5}]},
    *({"role": "assistant", "content": "", "toolCalls": made} for made in (None, "abc", 5, [1], [{}], {"id": "c1"})),
    *({"role": "assistant", "content": "", "toolCalls": [{**CALL, key: bad}]} for key in CALL for bad in (5, {"a": 1})),
    *({"role": "assistant", "content": "x", "reasoning": made} for made in ("abc", [1], [{"text": 5}], [{"signature": {}}])),
    *({"role": "tool", "content": "1", **wrong} for wrong in ({"toolCallId": 5}, {"toolName": []}, {"isError": "no"})),
    *({"role": "user", "content": "x", "metadata": made} for made in ([1], "x", 5)),
    {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": "id"}},
]


@pytest.mark.parametrize("kind", ["sqlite", "file", "s3"])
async def test_what_is_no_message_is_an_error_that_names_its_session(kind: str, tmp_path: Path) -> None:
    # field case S11
    with world_of(kind, tmp_path) as world:
        await world.store.sessions.save("talk", [user("x")])
        for made in NO_MESSAGES:
            world.write_message("talk", json.dumps(made))
            with world.open() as store, pytest.raises(StorageError, match="talk") as raised:
                await store.sessions.load("talk")
            assert raised.value.code in ("LOUSHO_STORAGE_FAILED", "LOUSHO_SESSION_FILE_CORRUPT"), made
        world.write_message("talk", json.dumps({"role": "user"}))  # an older version may have left out what is empty
        with world.open() as store:
            assert await store.sessions.load("talk") == [Message("user")]


@pytest.mark.parametrize("kind", ["sqlite", "file", "s3"])
async def test_a_payload_that_names_code_is_data_or_an_error_and_never_runs(kind: str, tmp_path: Path) -> None:
    # field case S11
    blob = pickle.dumps(Trap(tmp_path))
    packed = base64.b64encode(blob).decode()
    data = {
        "py/object": "os.system",
        "__reduce__": ["os.system", ["id"]],
        "$type": "pickle",
        "data": packed,
        "!!python/object": "os",
    }
    with world_of(kind, tmp_path) as world:
        await world.store.sessions.save("talk", [user("x")])
        world.write_message("talk", json.dumps({"role": "user", "content": "x", "metadata": data}))
        with world.open() as store:
            assert await store.sessions.load("talk") == [Message("user", "x", metadata=data)]
        for text in (blob.decode("latin-1"), packed, "cos\nsystem\n(S'id'\ntR.", "!!python/object/apply:os.system [id]"):
            world.write_message("talk", text.replace("\0", " ") if kind == "sqlite" else text)
            with world.open() as store, pytest.raises(StorageError):
                await store.sessions.load("talk")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("column", ["body", "lists"])
async def test_blobs_in_a_database_are_errors_in_every_part(column: str, tmp_path: Path) -> None:
    # field case S11
    blob = pickle.dumps(Trap(tmp_path))
    with world_of("sqlite", tmp_path) as world:
        await world.store.sessions.save("talk", [user("x")])
        await world.store.checkpoints.save({"sessionId": "talk", "messages": [{"role": "user", "content": "x" * 2_000}]})
        await world.store.approvals.save({"id": "p", "toolCallId": "c", "toolName": "t"}, {"messages": []})
        await world.store.approvals.save({"id": "q", "toolCallId": "c", "toolName": "t"}, {"messages": []})
        await world.store.approvals.resolve("q", decision={"approved": True})
        with closing(sqlite3.connect(tmp_path / "s.db")) as connection, connection:
            connection.execute("UPDATE messages SET body = ?", (blob,))
            for table in ("checkpoints", "checkpoint_history"):
                connection.execute(f"UPDATE {table} SET {column} = ?", (blob,))
            connection.execute("UPDATE approvals SET pending = ?, snapshot = ?", (blob, blob))
            connection.execute("UPDATE approvals SET decision = ? WHERE id = 'q'", (blob,))
        with world.open() as store:
            for read in (
                lambda: store.sessions.load("talk"),
                lambda: store.checkpoints.load("talk"),
                lambda: store.checkpoints.history("talk"),
                lambda: store.approvals.load("p"),
                store.approvals.list_pending,
                lambda: store.approvals.claimed("q"),
                lambda: store.turns.open("talk", "me", 1_000),
            ):
                with pytest.raises(StorageError, match="damaged"):
                    await read()
            await store.checkpoints.delete("talk")  # what cannot be read can still be thrown away
            assert await store.checkpoints.load("talk") is None
    assert not (tmp_path / "ran").exists()


async def test_a_checkpoint_that_lost_a_row_is_an_error_not_a_shorter_conversation(tmp_path: Path) -> None:
    # field case S11: silent loss
    with world_of("sqlite", tmp_path) as world:
        messages = [{"role": "user", "content": "x" * 800}] * 3
        await world.store.checkpoints.save({"sessionId": "talk", "messages": messages})
        with closing(sqlite3.connect(tmp_path / "s.db")) as connection, connection:
            connection.execute("DELETE FROM checkpoint_lists WHERE position = 1")
        with world.open() as store:
            for read in (store.checkpoints.load, store.checkpoints.history):
                with pytest.raises(StorageError, match="2 of the 3 elements"):
                    await read("talk")


LOADERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "yaml", "importlib", "pydoc"}


def test_nothing_that_reads_stored_data_can_load_code() -> None:
    # field case S11: the stores, the checkpoints, and what cassettes keep in files
    for place in ("stores", "loop/checkpoint.py", "resuming.py", "testing/cassette_file.py", "evals/results.py"):
        root = Path(lousho_ray.__file__).parent / place
        for path in [root] if root.is_file() else root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert LOADERS.isdisjoint(name.partition(".")[0] for name in named), path
                called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
                assert called not in ("eval", "exec", "__import__"), path


# --------------------------------------------------------------------------------------------------------------------- NUL bytes

NUL = "a\0b\0"


@tool(needs_approval=True)
def send_to(to: str) -> dict[str, Any]:
    """Sends."""
    return {"to\0": [to, "\0"]}


@pytest.mark.parametrize("kind", ["sqlite", "file", "s3"])
async def test_nul_bytes_pass_through_a_pause_and_back(kind: str, tmp_path: Path) -> None:
    # field case S10: in the input, the arguments, the result, the note and the reply, read back by an object that remembers nothing
    with world_of(kind, tmp_path) as world:
        asks = calls(("send_to", {"to": NUL}), text=NUL)
        agent = agent_of(asks, NUL, tools=[send_to], store=world.store, runtime="local", instructions=NUL)
        paused = await agent.session("talk").send(NUL)
        with world.open() as store:
            other = agent_of(NUL, "Fine", tools=[send_to], store=store, runtime="local")
            [waiting] = await other.approvals.list(all=True)
            assert waiting.args == {"to": NUL}
            await other.approvals.resolve(str(paused.approval_id), approved=True, note=NUL, by=NUL)
            assert (await other.session("talk").send("And?")).text == "Fine"
        with world.open() as store:
            saved = await store.sessions.load("talk") or []
    assert [message.text for message in saved if message.role != "tool"] == [NUL, NUL, NUL, "And?", "Fine"]
    assert json.loads(saved[1].tool_calls[0].arguments) == {"to": NUL}
    assert json.loads(saved[2].text) == {"to\0": [NUL, "\0"]}


@pytest.mark.parametrize("kind", ["sqlite", "file", "s3"])
@pytest.mark.parametrize("id", ["a\0b", "\0", "talk\0", "talk\n", "talk\0.json"])
async def test_an_id_with_a_nul_byte_is_refused_everywhere(kind: str, id: str, tmp_path: Path) -> None:
    # field case S10
    with world_of(kind, tmp_path) as world:
        agent, store = agent_of("never", store=world.store, runtime="local"), world.store
        tries: list[Any] = [
            *(lambda part=part: part.load(id) for part in (store.sessions, store.checkpoints, store.approvals)),
            *(lambda part=part: part.delete(id) for part in (store.sessions, store.checkpoints, store.approvals)),
            lambda: store.sessions.save(id, [user("x")]),
            lambda: store.checkpoints.save({"sessionId": id}),
            lambda: store.checkpoints.history(id),
            lambda: store.approvals.save({"id": id}, {}),
            lambda: store.approvals.resolve(id),
            lambda: agent.session(id).load(),
            lambda: agent.send("x", session_id=id),
            lambda: agent.resume(id),
            lambda: agent.approvals.get(id),
            lambda: agent.approvals.resolve(id, approved=True),
        ]
        for attempt in tries:
            with pytest.raises(LoushoError) as raised:
                await attempt()
            assert raised.value.code == "LOUSHO_SESSION_ID_INVALID"


# ---------------------------------------------------------------------------------------------------- unfinished runs and pauses

RAN: list[int] = []


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pays."""
    RAN.append(amount)
    return "paid"


@tool
def look() -> str:
    """Looks."""
    return "seen"


def paying(world: World, *turns: Any) -> Any:
    return agent_of(*turns, tools=[pay, look], store=world.open(), runtime="local")


def put(*path: Any, value: Any) -> Any:
    """A change of the field at `path`."""

    def change(data: Any) -> None:
        *way, last = path
        for key in way:
            data = data[key]
        if value is GONE:
            data.pop(last, None)
        else:
            data[last] = value

    return change


OF_ANOTHER_FORM: list[tuple[str, Any]] = [
    *(("status", value) for value in ("wizard", 5, None)),
    *(("messages", value) for value in (GONE, "abc", None, 5, [{"role": "x"}], [5])),
    *(("usage", value) for value in (5, "x", {"byModel": {"m": 5}}, {"costUsd": "much"})),
    *((key, [1]) for key in ("stepUsage", "toolCalls", "settled", "decisions", "metadata", "children")),
    *((key, {"call_1": {"x": 1}}) for key in ("children", "settled", "images", "decisions")),
    *(
        (key, "x")
        for key in ("stepIndex", "openedAt", "toolErrors", "revision", "attempts", "ranMs", "agentFingerprint", "runConfig")
    ),
    *(("decisions", {"call_1": value}) for value in (5, {}, {"approved": "yes"}, {"approved": 1}, {"approved": True, "args": "x"})),
    *(("decisions", {"call_1": {"approved": True, key: 5}}) for key in ("note", "by", "asked", "remember", "expired", "more")),
]


@pytest.mark.parametrize("where", ["session", "run"])
async def test_an_unfinished_run_of_another_form_is_refused_and_runs_nothing(where: str, tmp_path: Path) -> None:
    # field case S11
    for number, (key, value) in enumerate(OF_ANOTHER_FORM):
        RAN.clear()
        world = World("file", tmp_path / str(number), None)
        agent = paying(world, calls(("pay", {"amount": 5})))
        await (agent.session("s").send("Go") if where == "session" else agent.send("Go", session_id="s"))
        world.edit("checkpoints", lambda data: data.update(status="in-progress", decisions={"call_1": {"approved": True}}))
        world.edit("checkpoints", put(key, value=value))
        other = paying(world, "Done")
        with pytest.raises(StorageError, match="damaged"):
            await (other.session("s").resume() if where == "session" else other.resume("s"))
        assert RAN == [], (key, value)


PAUSES_OF_ANOTHER_FORM: list[tuple[tuple[str, ...], Any]] = [
    *((("pending", key), value) for key in ("id", "toolCallId", "toolName") for value in (GONE, 5, None)),
    *((("pending", "args"), value) for value in (5, "x", [1])),
    *((("pending", "expiresAt"), value) for value in (5, "soon", {})),
    *((("pending", key), 5) for key in ("createdAt", "subagentPath", "kind", "decidedBy")),
    (("pending", "toolName"), "look"),  # what is shown is not what would run
    *((("snapshot", "messages"), value) for value in (GONE, 5, [{"role": "x"}])),
    (("snapshot", "usage"), 5),
    (("snapshot", "metadata"), 5),
    (("snapshot", "children"), {"call_1": {}}),
]


@pytest.mark.parametrize("where", ["session", "run"])
async def test_a_pause_of_another_form_cannot_be_approved(where: str, tmp_path: Path) -> None:
    # field cases S07, S11
    for number, (path, value) in enumerate(PAUSES_OF_ANOTHER_FORM):
        RAN.clear()
        world = World("file", tmp_path / str(number), None)
        agent = paying(world, calls(("pay", {"amount": 5})))
        paused = await (agent.session("s").send("Go") if where == "session" else agent.send("Go", session_id="s"))
        world.edit("approvals", put(*path, value=value))
        other = paying(world, "Done")
        with pytest.raises(StorageError, match=r"damaged|was changed"):
            await other.approvals.resolve(paused.approval_id, approved=True)
        assert RAN == [], (path, value)


async def test_a_paused_run_without_a_store_of_its_own_is_read_as_strictly(tmp_path: Path) -> None:
    # field case S11: a plain send() has no checkpoint, only the snapshot of its pause
    RAN.clear()
    world = World("file", tmp_path, None)
    paused = await paying(world, calls(("pay", {"amount": 5}))).send("Go")
    world.edit("approvals", put("snapshot", "messages", value=[{"role": "x"}]))
    with pytest.raises(LoushoError, match="damaged"):
        await paying(world, "Done").approvals.resolve(paused.approval_id, approved=True)
    assert RAN == []


async def test_a_fork_of_a_damaged_save_is_refused(tmp_path: Path) -> None:
    # field case S11
    world = World("file", tmp_path, None)
    agent = paying(world, calls("look"), "Done")
    await agent.send("Go", session_id="s")

    def spoil(data: Any) -> None:
        for entry in data:
            entry["checkpoint"]["messages"][0] = {"role": "x"}

    world.edit("checkpoint-history", spoil)
    with pytest.raises(StorageError, match="damaged"):
        await paying(world, "Done").fork("s", 1)
