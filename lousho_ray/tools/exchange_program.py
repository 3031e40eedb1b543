"""One HTTP exchange, as a program for a sandbox: the standard library only, JSON in and out.

It gets addresses that were judged outside and looks nothing up. Where the sandbox's only way out is a credential broker
(`LOUSHO_BROKER`), it sends the request through that.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import ssl
import sys
from typing import Any
from urllib.parse import urlsplit


def dial(addresses: list[str], port: int, timeout_s: float) -> socket.socket:
    for last, address in enumerate(addresses, start=1 - len(addresses)):
        try:
            return socket.create_connection((address, port), timeout_s)
        except OSError:
            if last == 0:
                raise
    raise OSError("there is no address")


def exchange(job: dict[str, Any]) -> dict[str, Any]:
    headers, target, port, addresses = dict(job["headers"]), job["target"], job["port"], job["addresses"]
    broker, secure = urlsplit(os.environ.get("LOUSHO_BROKER", "")), job["scheme"] == "https"
    if broker.hostname:
        place = headers["Host"]
        target = f"{broker.path}/{place}{target}" if secure else f"http://{place}{target}"
        headers["Host"] = broker.netloc if secure else place
        addresses, port, secure = [broker.hostname], broker.port or 80, False
    connection = http.client.HTTPConnection(addresses[0], port)
    connection.sock = dial(addresses, port, job["timeout_s"])
    if secure:
        connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=job["server_name"])
    try:
        connection.putrequest(job["method"], target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(base64.b64decode(job["body"]))
        return answer(connection.getresponse(), job["max_bytes"])
    finally:
        connection.close()


def answer(response: http.client.HTTPResponse, max_bytes: int) -> dict[str, Any]:
    headers: dict[str, str] = {}
    for name, value in response.getheaders():
        headers[name.lower()] = f"{headers[name.lower()]}, {value}" if name.lower() in headers else value
    body = b""
    while len(body) <= max_bytes and (chunk := response.read(max_bytes + 1 - len(body))):
        body += chunk
    if response.length and len(body) <= max_bytes:
        raise OSError("the answer breaks off")
    encoded = base64.b64encode(body).decode("ascii")
    return {"status": response.status, "reason": response.reason, "headers": headers, "body": encoded}


def main() -> None:
    try:
        result = exchange(json.load(sys.stdin))
    except (OSError, http.client.HTTPException) as error:
        result = {"error": str(error) or type(error).__name__}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
