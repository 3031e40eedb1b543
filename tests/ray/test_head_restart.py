"""A cluster that keeps its tables in Redis outlives its head server. Needs a `redis-server`, or its path in `REDIS_SERVER`."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.test_node_loss import run_cluster


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis server of its own."""
    binary = shutil.which(os.environ.get("REDIS_SERVER", "redis-server"))
    assert binary is not None, "Install redis-server 7, or name its path in REDIS_SERVER."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        asyncio.run(listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


async def listens(port: int) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return await writer.wait_closed()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_head_server_that_is_started_again_costs_new_actors_a_delay_and_nothing_else(redis: str, tmp_path: Path) -> None:
    # DEC-R1, RL-36, BUD-33
    report = run_cluster("tests.ray.head_restart_script", str(tmp_path), RAY_REDIS_ADDRESS=redis)
    assert report["turns_under_way"] == ["heard wait"] * 2
    assert report["fan_out_under_way"] == 0
    *known, new = report["answered_without_head"]
    assert not new, "a new session asks the head where its actor is"
    assert known == [True] * 3, "what is there goes on without it"
    assert [said for _, said in report["meanwhile"]] == ["heard two", "heard two", "done", "heard hello"]
    assert [said for _, said in report["after"]] == ["heard three", "done"]
    assert report["limiter"] == 8, "the limiter is the one of before"
    assert report["killed_after"][1] == "heard four", "an actor that is killed later is started again"
    turns = ("one", "wait", "two", "three", "four")
    assert report["kept"] == [text for turn in turns for text in (turn, f"heard {turn}")]
