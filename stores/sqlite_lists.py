"""The long lists of checkpoints in a SQLite store, kept element by element.

A *branch* is a row of elements that records share, each saying how many of them are its own. Elements that stand in the session's
transcript already are not written again: the branch says which, and gets them for its own when the transcript lets go of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lousho_ray.stores.json_form import common_prefix

if TYPE_CHECKING:
    import sqlite3

LIVE_BRANCHES = """SELECT json_extract(value, '$[0]') FROM checkpoints, json_each(lists)
    UNION SELECT json_extract(value, '$[0]') FROM checkpoint_history, json_each(lists)"""


class Base(NamedTuple):
    """Elements of a branch that stand in a transcript: its first `length` messages, from position `shift` of the branch on."""

    session: int
    shift: int
    length: int


def base_in(session: int, stored: Sequence[str], elements: Sequence[str]) -> Base | None:
    """What of `elements` a transcript, stored as `stored`, has. Behind a system prompt it begins at the second."""
    found = [Base(session, shift, common_prefix(stored, elements[shift:])) for shift in (0, 1)]
    best = max(found, key=lambda base: base.length)
    return best if best.length else None


def begin_branch(connection: sqlite3.Connection, elements: Sequence[str], base: Base | None) -> int:
    """A new branch with these elements, of which those of `base` are only referred to."""
    query = (
        "SELECT MAX(IFNULL((SELECT MAX(branch) FROM checkpoint_lists), 0), IFNULL((SELECT MAX(branch) FROM checkpoint_bases), 0))"
    )
    branch: int = (connection.execute(query).fetchone()[0] or 0) + 1
    if base is None:
        extend_branch(connection, branch, elements, 0)
        return branch
    connection.execute("INSERT INTO checkpoint_bases (branch, session, shift, length) VALUES (?, ?, ?, ?)", (branch, *base))
    extend_branch(connection, branch, elements[: base.shift], 0)
    end = base.shift + base.length
    extend_branch(connection, branch, elements[end:], end)
    return branch


def extend_branch(connection: sqlite3.Connection, branch: int, elements: Sequence[str], start: int) -> None:
    """Writes elements from position `start` on."""
    rows = [(branch, position, body) for position, body in enumerate(elements, start)]
    connection.executemany("INSERT INTO checkpoint_lists (branch, position, body) VALUES (?, ?, ?)", rows)


def read_branch(connection: sqlite3.Connection, branch: int, count: int) -> tuple[str, ...]:
    """The first `count` elements; fewer when the file is damaged."""
    query = """SELECT position, body FROM checkpoint_lists WHERE branch = ?1 AND position < ?2
        UNION ALL SELECT position + shift, body FROM checkpoint_bases JOIN messages USING (session)
            WHERE branch = ?1 AND position < length AND position + shift < ?2
        ORDER BY 1"""
    return tuple(row[1] for row in connection.execute(query, (branch, count)))


def delete_branches(connection: sqlite3.Connection, branches: set[int]) -> None:
    for table in ("checkpoint_lists", "checkpoint_bases"):
        connection.executemany(f"DELETE FROM {table} WHERE branch = ?", [(branch,) for branch in branches])


def delete_dead_branches(connection: sqlite3.Connection) -> None:
    """Deletes what no record refers to."""
    for table in ("checkpoint_lists", "checkpoint_bases"):
        connection.execute(f"DELETE FROM {table} WHERE branch NOT IN ({LIVE_BRANCHES})")


def detach(connection: sqlite3.Connection, session: int, start: int = 0) -> None:
    """Gives branches a copy of what they refer to, before the messages of a transcript from `start` on are changed or deleted."""
    of_these = "checkpoint_bases.session = ? AND checkpoint_bases.length > ?"
    connection.execute(
        "INSERT INTO checkpoint_lists (branch, position, body) SELECT branch, position + shift, body "
        f"FROM checkpoint_bases JOIN messages USING (session) WHERE position < length AND {of_these}",
        (session, start),
    )
    connection.execute(f"DELETE FROM checkpoint_bases WHERE {of_these}", (session, start))
