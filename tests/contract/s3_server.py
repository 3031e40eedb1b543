"""An S3 server for tests: one bucket in memory, strict about what it is sent, with faults on order.

It does what the store needs of S3 (PutObject, GetObject with ranges, HeadObject, DeleteObject, DeleteObjects, ListObjectsV2) and
answers as the S3 API reference says: conditional writes are atomic, a failed condition is 412, `If-Match` on nothing is 404.
A request it does not know is 501, so that a test cannot pass by accident.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from lousho_ray.stores.s3 import S3Store

BUCKET = "agents"
KEY_ID = "test-key"
CREDENTIALS = {"access_key_id": KEY_ID, "secret_access_key": "test-secret"}
PAGE = 3
"""Keys of one listing page: small, so that every test of listings turns pages."""

Action = Literal["drop-before", "drop-after", "hang", "late", "seen", "conflict", "slow-down", "denied"]


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests of `method` whose key matches.

    - `drop-before`: the connection ends and nothing happens.
    - `drop-after`: it happens, but the answer is lost.
    - `hang`: no answer until `release`, and nothing happens.
    - `late`: it happens after `release`, whether or not the client still waits.
    - `seen`: nothing out of the ordinary.
    - `conflict`: 409, as S3 answers to conditional writes of one moment.
    - `slow-down`: 503.
    - `denied`: 403.

    `met` is set when the first such request has arrived, `done` when a late one has happened.
    """

    method: str
    key: str
    action: Action
    times: int = 1
    most_s: float = 30.0
    release: threading.Event = field(default_factory=threading.Event)
    met: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


CHAOS: tuple[Action, ...] = ("drop-before", "drop-after", "late", "late", "conflict", "slow-down")


class S3Server:
    """Use as a context manager; `endpoint` is where it listens. With `chaos` set, every fourth request meets a fault by chance.

    Args:
        conditions: `enforced`, `ignored` (writes go through whatever they ask for), or `unknown` (501).
    """

    def __init__(self, conditions: Literal["enforced", "ignored", "unknown"] = "enforced") -> None:
        self.conditions = conditions
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.chaos: random.Random | None = None
        self.lock = threading.RLock()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.s3 = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="s3-server")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> S3Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for fault in self.faults:
            fault.release.set()
        self._http.shutdown()
        self._http.end_connections()
        self._http.server_close()
        self._thread.join()

    @contextmanager
    def fault(self, method: str, key: str, action: Action, times: int = 1) -> Iterator[Fault]:
        """The next `times` requests of `method` whose key matches the pattern `key` meet `action`."""
        fault = Fault(method, key, action, times)
        with self.lock:
            self.faults.append(fault)
        try:
            yield fault
        finally:
            with self.lock:
                fault.times = 0
                fault.release.set()

    def count(self, method: str, key: str = "") -> int:
        """How many requests of `method` had a key that matches."""
        with self.lock:
            return sum(made == method and re.search(key, name) is not None for made, name in self.requests)

    def take_fault(self, method: str, key: str) -> Fault | None:
        with self.lock:
            self.requests.append((method, key))
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.key, key):
                    fault.times -= 1
                    return fault
            if self.chaos is not None and method in ("PUT", "GET", "HEAD") and self.chaos.random() < 0.25:
                action = self.chaos.choice(CHAOS)
                return Fault(method, key, action, most_s=self.chaos.uniform(0.0, 0.4))
            return None


def store_of(server: S3Server, prefix: str = "app", **options: Any) -> S3Store:
    return S3Store(BUCKET, prefix, **{"endpoint": server.endpoint, "region": "us-east-1", "credentials": CREDENTIALS, **options})


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128
    s3: S3Server

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """Clients keep connections open that nobody will use again."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http
    body: bytes = b""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        url = urlsplit(self.path)
        _, bucket, *rest = url.path.split("/", 2)
        key = unquote(rest[0]) if rest else ""
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        kind = "LIST" if method == "GET" and "list-type" in query else method
        fault = self.server.s3.take_fault(kind, query.get("prefix", "") if kind == "LIST" else key)
        try:
            if fault is not None and self._meet(fault):
                return
            self._check(unquote(bucket))
            answer = self._answer(kind, key, query)
        except _Refused as refused:
            answer = (refused.status, {}, f"<Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>".encode())
        if fault is not None and fault.action == "drop-after":
            self.close_connection = True
            return
        if fault is not None and fault.action == "late":
            self.close_connection = True
            fault.done.set()
        with suppress(OSError):  # the client may have given up
            self._send(method, *answer)

    def _meet(self, fault: Fault) -> bool:
        """Whether the request ends here."""
        fault.met.set()
        if fault.action in ("hang", "late"):
            fault.release.wait(fault.most_s)
        if fault.action in ("hang", "drop-before"):
            self.close_connection = True
            return True
        refusals = {
            "conflict": (409, "ConditionalRequestConflict"),
            "slow-down": (503, "SlowDown"),
            "denied": (403, "AccessDenied"),
        }
        if fault.action in refusals:
            raise _Refused(*refusals[fault.action])
        return False

    def _check(self, bucket: str) -> None:
        authorization = self.headers.get("authorization", "")
        if not authorization.startswith(f"AWS4-HMAC-SHA256 Credential={KEY_ID}/"):
            raise _Refused(403, "InvalidAccessKeyId")
        claimed = self.headers.get("x-amz-content-sha256", "")
        if claimed != "UNSIGNED-PAYLOAD" and claimed != hashlib.sha256(self.body).hexdigest():
            raise _Refused(400, "XAmzContentSHA256Mismatch")
        if bucket != BUCKET:
            raise _Refused(404, "NoSuchBucket")

    def _answer(self, kind: str, key: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        with self.server.s3.lock:
            if kind == "PUT" and key and not query:
                return self._put(key)
            if kind in ("GET", "HEAD") and key and not query:
                return self._get(key)
            if kind == "DELETE" and key and not query:
                self.server.s3.objects.pop(key, None)
                return 204, {}, b""
            if kind == "LIST" and not key:
                return self._list(query)
            if kind == "POST" and not key and list(query) == ["delete"]:
                return self._delete_many()
        raise _Refused(501, "NotImplemented")

    def _put(self, key: str) -> tuple[int, dict[str, str], bytes]:
        s3 = self.server.s3
        if_match, if_none_match = self.headers.get("if-match"), self.headers.get("if-none-match")
        conditional = if_match is not None or if_none_match is not None
        if conditional and s3.conditions == "unknown":
            raise _Refused(501, "NotImplemented")
        if conditional and s3.conditions == "enforced":
            current = s3.objects.get(key)
            if if_none_match not in (None, "*"):
                raise _Refused(501, "NotImplemented")
            if if_none_match == "*" and current is not None:
                raise _Refused(412, "PreconditionFailed")
            if if_match is not None and current is None:
                raise _Refused(404, "NoSuchKey")
            if if_match is not None and current is not None and if_match.strip('"') != _etag(current):
                raise _Refused(412, "PreconditionFailed")
        s3.objects[key] = self.body
        return 200, {"ETag": f'"{_etag(self.body)}"'}, b""

    def _get(self, key: str) -> tuple[int, dict[str, str], bytes]:
        body = self.server.s3.objects.get(key)
        if body is None:
            raise _Refused(404, "NoSuchKey")
        headers = {"ETag": f'"{_etag(body)}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content-Type": "application/json"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if asked is None:
            return 200, headers, body
        first, last = int(asked[1]), min(int(asked[2]), len(body) - 1)
        if first > last:
            raise _Refused(416, "InvalidRange")
        return 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"}, body[first : last + 1]

    def _list(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, after = query.get("prefix", ""), query.get("continuation-token") or query.get("start-after", "")
        if "delimiter" in query:
            raise _Refused(501, "NotImplemented")
        found = sorted(key for key in self.server.s3.objects if key.startswith(prefix) and key > after)
        page, more = found[:PAGE], len(found) > PAGE
        encode = quote if query.get("encoding-type") == "url" else escape
        entries = "".join(
            f"<Contents><Key>{encode(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{_etag(self.server.s3.objects[key])}&quot;</ETag><Size>{len(self.server.s3.objects[key])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        )
        return 200, {"Content-Type": "application/xml"}, text.encode()

    def _delete_many(self) -> tuple[int, dict[str, str], bytes]:
        if not any(self.headers.get(name) for name in ("content-md5", "x-amz-checksum-sha256", "x-amz-checksum-crc64nvme")):
            raise _Refused(400, "InvalidRequest")
        if (digest := self.headers.get("content-md5")) and digest != base64.b64encode(hashlib.md5(self.body).digest()).decode():
            raise _Refused(400, "BadDigest")
        keys = [element.text or "" for element in ElementTree.fromstring(self.body).iter() if element.tag.endswith("Key")]
        for key in keys:
            self.server.s3.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return 200, {"Content-Type": "application/xml"}, f"<DeleteResult>{deleted}</DeleteResult>".encode()

    def _send(self, method: str, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(body)


def _etag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
