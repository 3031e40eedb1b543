"""A process that takes turns on one session: `s3_child.py URL NAME TURNS`. Credentials come from the environment."""

from __future__ import annotations

import asyncio
import sys

from lousho_ray import ray_store
from lousho_ray.messages import user


async def take_turns(url: str, name: str, turns: int) -> None:
    async with ray_store(url) as store:
        sessions = store.sessions
        for turn in range(turns):
            while (fence := await sessions.claim("talk", name, 10_000)) is None:
                await asyncio.sleep(0.005)
            messages = await sessions.load("talk") or []
            await sessions.save("talk", [*messages, user(f"{name} {turn} {fence}")], fence=fence)
            await sessions.release("talk", name, fence)
        if await store.approvals.resolve("pay", token=name) is not None:
            sys.stdout.write("won\n")


asyncio.run(take_turns(sys.argv[1], sys.argv[2], int(sys.argv[3])))
