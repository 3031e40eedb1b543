"""Runs web tools in a network of their own where every address is this machine. Reads cases as JSON, writes what happened.

Started by `test_web_names.py` in new user, network and mount namespaces: a route makes all addresses local, so whatever is
connected to arrives at one server that notes the address; and `/etc/resolv.conf` names a name server on the loopback interface, so
the tools ask it through the system's own resolver.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.builtin import create_http_tool, create_web_fetch_tool
from lousho_ray.tools.execute import call_tool
from tests.wire.web_support import NameServer, Site, answer, redirect


def make_network() -> None:
    for command in ("ip link set lo up", "ip route add local 0.0.0.0/0 dev lo", "ip -6 route add local ::/0 dev lo"):
        subprocess.run(command.split(), check=True)
    with tempfile.TemporaryDirectory() as folder:
        for path, text in (("/etc/resolv.conf", "nameserver 127.0.0.1\n"), ("/etc/nsswitch.conf", "hosts: dns\n")):
            mine = Path(folder, Path(path).name)
            mine.write_text(text)
            subprocess.run(["mount", "--bind", mine, os.path.realpath(path)], check=True)


async def happens(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(case.get("env", {}))
    pages = case["pages"].items()
    site = Site({at: redirect(text[3:]) if text.startswith("-> ") else answer(text.encode()) for at, text in pages})
    servers = [
        await asyncio.start_server(site.serve, host, port, family=family)
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))
        for port in (80, 8080)
    ]
    names = await NameServer(case["names"]).open("127.0.0.1", 53)
    make = create_http_tool if case.get("tool") == "http_request" else create_web_fetch_tool
    tool = make(**case.get("options", {}))
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = await call_tool(tool, tool.parse(json.dumps(case["arguments"])).value, ToolContext("c"))
    except ToolExecutionError as error:
        outcome["error"] = error.message
    names.close()
    for server in servers:
        server.close()
        await server.wait_closed()
    for name in case.get("env", {}):
        del os.environ[name]
    sent = [{"host": got.headers.get("host"), "address": got.address, "headers": got.headers} for got in site.got]
    return {**outcome, "connected": site.connected, "sent": sent, "lookups": names.lookups}


async def main() -> None:
    make_network()
    cases = json.loads(sys.stdin.read())
    print(json.dumps({name: await happens(case) for name, case in cases.items()}))  # noqa: T201


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    asyncio.run(main())
