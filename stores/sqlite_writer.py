"""One thread that owns the connection of a SQLite store and commits in groups.

Callers of any event loop or thread hand in units of work. What arrives while a transaction is being written becomes the next
transaction, so a commit to the disk is paid once a group, and a unit's caller hears back after that commit. The thread is the
standard library's `sqlite3` on a queue: the connection never leaves it, no await stands inside a transaction, and a thread that
waits for work never keeps the interpreter from exiting.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from lousho_ray.errors import StorageError
from lousho_ray.stores.sqlite_schema import Identity, failure, gone, identity, is_busy, open_database

T = TypeVar("T")
Unit = Callable[[sqlite3.Connection], T]
Outcome = tuple["Job", Any, Exception | None]

MAX_GROUP = 500
"""Units in one transaction at most."""

EXIT_TIMEOUT_S = 5.0
"""How long interpreter exit waits for a store that nobody closed."""


class Job:
    """One unit of work and who waits for it: a future of `loop`, or of a plain thread when that is `None`."""

    __slots__ = ("future", "loop", "unit", "write")

    def __init__(self, unit: Unit[Any], write: bool, loop: asyncio.AbstractEventLoop | None) -> None:
        self.unit = unit
        self.write = write
        self.loop = loop
        self.future: asyncio.Future[Any] | Future[Any] = Future() if loop is None else loop.create_future()


class Database:
    """A SQLite file, opened at the first use, by one process.

    Attributes:
        transactions: How many write transactions were committed; each is one flush of the write-ahead log.
    """

    def __init__(self, path: str, busy_timeout_ms: int) -> None:
        self.path = path
        self._owner = _Owner(path, busy_timeout_ms)
        self._thread: Thread | None = None
        self._pid = 0
        self._lock = Lock()
        self._closed = False

    @property
    def transactions(self) -> int:
        return self._owner.transactions

    async def run(self, unit: Unit[T], *, write: bool = False) -> T:
        """Runs `unit` in the owner thread. A write is committed when this returns; cancelling the wait does not split it: it is
        written whole or not at all."""
        job = Job(unit, write, asyncio.get_running_loop())
        self._submit(job)
        result: T = await job.future  # type: ignore[misc]
        return result

    def run_blocking(self, unit: Unit[T], *, write: bool = False) -> T:
        """`run` for plain threads."""
        job = Job(unit, write, None)
        self._submit(job)
        assert isinstance(job.future, Future)
        result: T = job.future.result()
        return result

    def close(self, timeout_s: float | None = None) -> None:
        """Writes what was handed in, closes the connection and ends the thread. A second call does nothing."""
        if self._pid not in {0, os.getpid()}:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._owner.queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _submit(self, job: Job) -> None:
        if self._pid not in {0, os.getpid()}:
            raise StorageError(
                f"The SQLite store {self.path} was opened before this process was forked from process {self._pid}, and a SQLite "
                "connection must not cross a fork; create a new SqliteStore in this process.",
                path=self.path,
            )
        with self._lock:
            if self._closed:
                raise StorageError(f"The SQLite store {self.path} is closed; create a new SqliteStore.", path=self.path)
            if self._thread is None:
                self._start()
            self._owner.queue.put(job)

    def _start(self) -> None:
        self._pid = os.getpid()
        # A daemon thread, so that a store nobody closed does not hold up the interpreter; `_close_all` still ends it in order.
        self._thread = Thread(target=self._owner.serve, name=f"lousho-sqlite {self.path}", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._owner.queue.put, None).atexit = False
        _open_databases.add(self)


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for database in list(_open_databases):
        database.close(EXIT_TIMEOUT_S)


class _Owner:
    """The thread's side. It does not know the `Database`, so that a forgotten one can be collected and end the thread."""

    def __init__(self, path: str, busy_timeout_ms: int) -> None:
        self.path = path
        self.busy_timeout_ms = busy_timeout_ms
        self.queue: SimpleQueue[Job | None] = SimpleQueue()
        self.connection: sqlite3.Connection | None = None
        self.opened: Identity = (None, None)
        """The open file and its log: others may come into their places."""
        self.transactions = 0

    def serve(self) -> None:
        running = True
        while running:
            jobs, running = self._gather()
            if jobs:
                _report(self._execute(jobs))
            del jobs  # what a job's caller saw must not be kept alive by a thread that waits
        self._drop_connection()

    def _gather(self) -> tuple[list[Job], bool]:
        """Waits for a job and takes what else has arrived. The second value turns `False` at the end of the queue's life."""
        jobs: list[Job] = []
        job = self.queue.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) >= MAX_GROUP:
                return jobs, True
            try:
                job = self.queue.get_nowait()
            except Empty:
                return jobs, True
        return jobs, False

    def _execute(self, jobs: Sequence[Job]) -> list[Outcome]:
        try:
            if self.connection is None:
                self.connection = open_database(self.path, self.busy_timeout_ms)
                self.opened = identity(self.path)
            elif self.opened != identity(self.path):
                raise gone(self.path)
            return self._perform(self.connection, jobs)
        except Exception as error:
            self._drop_connection()
            return self._failed(jobs, error)

    def _drop_connection(self) -> None:
        """Closes the connection, whatever state it is in; the next job opens a new one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _perform(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Outcome]:
        """Writes first, as one transaction, then reads: a read sees every write that was handed in before it."""
        writes, reads = [job for job in jobs if job.write], [job for job in jobs if not job.write]
        outcomes = self._write(connection, writes) if writes else []
        return outcomes + self._read(connection, reads) if reads else outcomes

    def _write(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Outcome]:
        try:
            self._begin(connection)
            outcomes = [self._attempt(connection, job, alone=len(jobs) == 1) for job in jobs]
            connection.execute("COMMIT")
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(jobs) > 1 and not (isinstance(error, sqlite3.Error) and is_busy(error)):
                # The transaction was lost as a whole: one unit's trouble is not to be its neighbours'.
                return [outcome for job in jobs for outcome in self._write(connection, [job])]
            return self._failed(jobs, error)
        self.transactions += 1
        return outcomes

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Takes the write lock at once (`IMMEDIATE`): a transaction that starts by reading could not wait for it later."""
        deadline = time.monotonic() + self.busy_timeout_ms / 1000
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.005)

    def _attempt(self, connection: sqlite3.Connection, job: Job, *, alone: bool) -> Outcome:
        """One unit inside the transaction, undone when it fails. Alone it needs no savepoint: the whole is undone."""
        if alone:
            return job, job.unit(connection), None
        connection.execute("SAVEPOINT unit")
        try:
            result = job.unit(connection)
        except Exception as error:
            if not connection.in_transaction:
                raise  # SQLite undid everything by itself, as it does when the disk is full
            connection.execute("ROLLBACK TO unit")
            connection.execute("RELEASE unit")
            return self._failed([job], error)[0]
        connection.execute("RELEASE unit")
        return job, result, None

    def _read(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Outcome]:
        """Reads of one moment: several statements of a unit see the same state, whatever other processes write."""
        outcomes: list[Outcome] = []
        for job in jobs:
            try:
                if not connection.in_transaction:
                    connection.execute("BEGIN")
                outcomes.append((job, job.unit(connection), None))
            except Exception as error:
                outcomes.extend(self._failed([job], error))
        if connection.in_transaction:
            connection.execute("COMMIT")
        return outcomes

    def _failed(self, jobs: Sequence[Job], error: Exception) -> list[Outcome]:
        """Everyone gets an error object of their own: raising one in several tasks would mix up their tracebacks."""
        return [(job, None, failure(copy.copy(error), self.path, self.busy_timeout_ms)) for job in jobs]


def _report(outcomes: Sequence[Outcome]) -> None:
    """Tells the callers, each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, group in by_loop.items():
        if loop is None:
            _settle(group)
            continue
        try:
            loop.call_soon_threadsafe(_settle, group)
        except RuntimeError:
            continue  # the loop was closed; nobody waits any more


def _settle(outcomes: Sequence[Outcome]) -> None:
    for job, result, error in outcomes:
        if job.future.done():
            continue
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
