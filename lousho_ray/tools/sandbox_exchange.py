"""HTTP exchanges of a tool that a program in a sandbox makes: checked here, connected there."""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lousho_ray.errors import ToolExecutionError
from lousho_ray.tools.fetch import Hop, Response, unpacked

if TYPE_CHECKING:
    from lousho_ray.tools.workspace.shell import SandboxAdapter

_HEAD_CHARS = 200_000
"""Room for status and headers in the program's output."""


@dataclass(frozen=True, slots=True)
class SandboxExchange:
    """Makes each hop by a program (`python3`) of the sandbox, which connects to the addresses that were checked here."""

    sandbox: SandboxAdapter

    async def __call__(self, hop: Hop, max_bytes: int, timeout_ms: float) -> Response:
        """Raises `ToolExecutionError` when the program fails."""
        body = b"" if hop.request.body is None else hop.request.body
        framing = {} if hop.request.body is None else {"Content-Length": str(len(body))}
        job = {
            "method": hop.request.method,
            "scheme": hop.url.scheme,
            "target": hop.url.raw_path.decode("ascii"),
            "server_name": hop.host.name,
            "addresses": [str(address) for address in hop.addresses],
            "port": hop.port,
            "headers": hop.headers | framing,
            "body": base64.b64encode(body).decode("ascii"),
            "max_bytes": max_bytes,
            "timeout_s": timeout_ms / 1000,
        }
        output = await self.sandbox.run(
            *("python3", ("-I", "-c", _program())),
            stdin=json.dumps(job).encode(),
            timeout_ms=timeout_ms,
            max_output_chars=_HEAD_CHARS + max_bytes * 2,
        )
        if output.timed_out:
            raise ToolExecutionError(f"{hop.host.name} took longer than {timeout_ms:g} ms.")
        try:
            answer: dict[str, Any] = json.loads(output.stdout)
        except ValueError:
            reason = output.stderr.strip()[-500:] or f"exit code {output.exit_code}"
            raise ToolExecutionError(f"The program for {hop.host.name} failed in the sandbox: {reason}") from None
        if "error" in answer:
            raise ToolExecutionError(f"The exchange with {hop.host.name} failed: {answer['error']}")
        headers: dict[str, str] = answer["headers"]
        content, truncated = unpacked(base64.b64decode(answer["body"]), headers.get("content-encoding", "identity"), max_bytes)
        return Response(str(hop.url), answer["status"], answer["reason"], headers, content, truncated)


@functools.cache
def _program() -> str:
    return Path(__file__).with_name("exchange_program.py").read_text("utf-8")
