"""`http_request` and `web_fetch` against a server on the loopback interface, reached under made-up names."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError, ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.builtin import create_http_tool, create_web_fetch_tool
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.fetch import _unpacker
from lousho_ray.tools.results import cap_result, encode_result
from tests.wire.web_support import Site, answer, redirect


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    await server.wait_closed()


async def to_loopback(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


LOCAL: dict[str, Any] = {"resolver": to_loopback, "allow_private": ["*.example"]}


async def fetch(url: str, **options: Any) -> dict[str, Any]:
    made = create_web_fetch_tool(**{**LOCAL, **options})
    result: dict[str, Any] = await call_tool(made, made.parse(json.dumps({"url": url})).value, ToolContext("c"))
    return result


async def request(url: str, tool_options: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    made = create_http_tool(**{**LOCAL, **(tool_options or {})})
    result: dict[str, Any] = await call_tool(made, made.parse(json.dumps({"url": url, **arguments})).value, ToolContext("c"))
    return result


async def refusal(url: str, **options: Any) -> str:
    with pytest.raises(ToolExecutionError) as caught:
        await fetch(url, **options)
    return caught.value.message


def test_marks_and_schemas() -> None:  # HTTP-01, HTTP-08
    page, http = create_web_fetch_tool(), create_http_tool()
    assert list(page.parameters["properties"]) == ["url"]
    assert page.read_only
    assert page.annotations.open_world_hint
    assert "untrusted" in page.description
    assert not http.read_only
    assert list(http.parameters["properties"]) == ["url", "method", "headers", "body"]


@pytest.mark.parametrize(
    "options", [{"timeout_ms": 0}, {"max_bytes": 0}, {"max_chars": 0}, {"max_redirects": -1}, {"allow_private": ["a/b"]}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    for make in (create_web_fetch_tool, create_http_tool):
        with pytest.raises(ConfigurationError) as caught:
            make(**options)
        assert caught.value.field == next(iter(options))


# -------------------------------------------------------------------------------------------------------------- web_fetch


async def test_page_is_returned_as_readable_text(site: Site) -> None:  # HTTP-07
    site.pages["/"] = answer(
        b"<!doctype html><html><head><title>T &amp; U</title><style>x{}</style><script>bad()</script></head><body>"
        b"<h1>Head</h1><p>One <b>two</b>\n  three &lt;4&gt; <a href='/next?a=1&amp;b=2'>more</a></p><ul><li>a<li>b</ul>"
        b"<table><tr><td>x</td><td>y</td></tr></table><pre>  k\n   l</pre><script>worse()</script></body></html>",
        kind="text/html; charset=utf-8",
    )
    url = f"http://a.example:{site.port}/"
    assert await fetch(url) == {
        "url": url,
        "finalUrl": url,
        "status": 200,
        "contentType": "text/html; charset=utf-8",
        "content": f"T & U\nHead\nOne two three <4> more ({url}next?a=1&b=2)\n- a\n- b\nx | y\n  k\n   l",
        "truncated": False,
    }
    got = site.got[0]
    assert got.method == "GET"
    assert got.headers["host"] == f"a.example:{site.port}"
    assert got.headers["user-agent"] == "lousho-web-fetch"
    assert "cookie" not in got.headers


@pytest.mark.parametrize(
    ("kind", "body", "content"),
    [
        ("application/json", b'{"a": "<b>"}', '{"a": "<b>"}'),
        ("text/csv", "ä,b".encode("latin-1"), "\ufffd,b"),
        ("text/plain; charset=iso-8859-1", "ä".encode("latin-1"), "ä"),
        ("text/plain; charset=nonsense", "ä".encode(), "ä"),
        ("text/html", "<meta charset='iso-8859-1'><p>ä".encode("latin-1"), "ä"),
        ("application/feed+xml", b"<a/>", "<a/>"),
        ("image/png", b"\x89PNG" + bytes(10), "(14 bytes of image/png, which is no text)"),
        ("application/pdf", b"", ""),
    ],
)
async def test_text_passes_and_other_types_become_a_note(site: Site, kind: str, body: bytes, content: str) -> None:  # HTTP-07
    site.pages["/"] = answer(body, kind=kind)
    assert (await fetch(f"http://a.example:{site.port}/"))["content"] == content


async def test_error_pages_are_returned_with_their_body(site: Site) -> None:  # HTTP-07
    site.pages["/"] = answer(b"sorry", status="503 Service Unavailable")
    result = await fetch(f"http://a.example:{site.port}/")
    assert (result["status"], result["content"]) == (503, "sorry")


async def test_private_targets_are_refused_before_any_connection(site: Site) -> None:  # HTTP-02, HTTP-03
    for url in (f"http://127.0.0.1:{site.port}/", f"http://0x7f.1:{site.port}/", f"http://[::ffff:127.0.0.1]:{site.port}/"):
        assert "127.0.0.1" in await refusal(url) or "::ffff" in await refusal(url)
    assert "hidden.test (127.0.0.1)" in await refusal(f"http://hidden.test:{site.port}/")
    assert site.connections == 0


async def test_rebinding_name_gets_no_second_lookup(site: Site) -> None:  # HTTP-03
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return next(answers)

    site.pages["/"] = answer(b"ok")
    assert (await fetch(f"http://a.example:{site.port}/", resolver=rebinding))["content"] == "ok"
    assert asked == ["a.example"]


async def test_next_address_is_tried_when_one_does_not_answer(site: Site) -> None:
    async def two(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    site.pages["/"] = answer(b"ok")
    assert (await fetch(f"http://a.example:{site.port}/", resolver=two))["content"] == "ok"


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("http://127.0.0.1/", "127.0.0.1"),
        ("http://hidden.test/", "hidden.test"),
        ("file:///etc/passwd", "http"),
        ("http://user:pw@a.example/", "user name"),
        ("http://bad.example/", "blocked"),
        ("http://[::1]/", "::1"),
    ],
)
async def test_every_hop_is_checked(site: Site, location: str, says: str) -> None:  # HTTP-04, HTTP-10
    site.pages["/"] = redirect(location)
    assert says in await refusal(f"http://a.example:{site.port}/", blocked_hosts=["bad.example"])
    assert site.connections == 1


async def test_redirects_are_followed_up_to_the_limit(site: Site) -> None:  # HTTP-04, HTTP-06
    site.pages.update({f"/{n}": redirect(f"/{n + 1}") for n in range(5)} | {"/5": answer(b"end")})
    result = await fetch(f"http://a.example:{site.port}/0")
    assert result["content"] == "end"
    assert result["finalUrl"] == f"http://a.example:{site.port}/5"
    assert "more than 4 times" in await refusal(f"http://a.example:{site.port}/0", max_redirects=4)


async def test_blocked_hosts_are_refused_before_the_lookup(site: Site) -> None:  # HTTP-10
    async def never(host: str, port: int) -> list[str]:
        raise AssertionError("looked up")

    assert "allowed" in await refusal("http://a.example/", allowed_hosts=["b.example"], resolver=never)


async def test_time_covers_a_body_that_never_ends(site: Site) -> None:  # HTTP-06, HTTP-08
    site.pages["/"] = b""
    message = await refusal(f"http://a.example:{site.port}/", timeout_ms=50)
    assert "a.example" in message
    assert "50 ms" in message


async def test_body_is_cut_at_the_byte_limit(site: Site) -> None:  # HTTP-06
    site.pages["/"] = answer(b"x" * 10_000)
    result = await fetch(f"http://a.example:{site.port}/", max_bytes=1_000)
    assert (len(result["content"]), result["truncated"]) == (1_000, True)
    exact = await fetch(f"http://a.example:{site.port}/", max_bytes=10_000)
    assert (len(exact["content"]), exact["truncated"]) == (10_000, False)


async def test_compressed_body_is_unpacked_up_to_the_limit(site: Site) -> None:  # chapter 20: decoded bytes are capped
    site.pages["/small"] = answer(gzip.compress(b"hello"), Content_Encoding="gzip")
    site.pages["/bomb"] = answer(gzip.compress(bytes(50_000_000)), Content_Encoding="gzip", kind="text/plain")
    site.pages["/bad"] = answer(b"not gzip", Content_Encoding="gzip")
    site.pages["/odd"] = answer(b"x", Content_Encoding="br")
    base = f"http://a.example:{site.port}"
    assert (await fetch(f"{base}/small"))["content"] == "hello"
    assert (await fetch(f"{base}/bomb", max_bytes=100_000, max_chars=1_000))["truncated"] is True
    assert "Content-Encoding" in await refusal(f"{base}/bad")
    assert "not asked for" in await refusal(f"{base}/odd")


def test_unpacking_never_makes_more_than_there_is_room_for() -> None:  # chapter 20: decoded bytes are capped
    unpack = _unpacker("gzip")
    assert len(unpack(gzip.compress(bytes(50_000_000)), 1_000)) == 1_000


async def test_result_keeps_to_its_characters_as_json(site: Site) -> None:  # chapter 20: the envelope counts
    site.pages["/"] = answer(b'"\n' * 100_000)
    result = await fetch(f"http://a.example:{site.port}/")
    encoded = encode_result(result).text
    assert 49_900 < len(encoded) <= 50_000
    assert cap_result(encoded, 50_000) == encoded
    assert result["truncated"] is True


@pytest.mark.parametrize(
    "page", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", b"HTTP/1.1 200 OK\r\nBad"]
)
async def test_broken_answers_are_tool_errors_naming_the_host(site: Site, page: bytes) -> None:  # HTTP-08
    site.pages["/"] = page
    assert "a.example" in await refusal(f"http://a.example:{site.port}/")


@pytest.mark.parametrize(
    "url",
    ["http://", "not a url", "http://a.example:99999/", "http://a\tb/", "http://\uff11\uff12\uff17.1/", "", "http://a.example:x/"],
)
async def test_bad_urls_are_tool_errors(url: str) -> None:  # HTTP-08
    assert await refusal(url)


async def test_tools_say_who_they_are(site: Site) -> None:  # HTTP-06
    url = f"http://a.example:{site.port}/"
    await fetch(url)
    await fetch(url, user_agent="mine/1")
    await request(url, {"user_agent": "mine/2"})
    assert [got.headers["user-agent"] for got in site.got] == ["lousho-web-fetch", "mine/1", "mine/2"]


async def test_page_is_cut_at_the_character_limit(site: Site) -> None:  # HTTP-06
    site.pages["/"] = answer(b"x" * 5_000)
    result = await fetch(f"http://a.example:{site.port}/", max_chars=600)
    assert result["truncated"] is True
    assert len(result["content"]) < 600


async def test_environment_proxy_is_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:  # chapter 20: trust_env=False
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    site.pages["/"] = answer(b"direct")
    assert (await fetch(f"http://a.example:{site.port}/"))["content"] == "direct"


async def test_tls_asks_for_the_name_and_not_the_address() -> None:  # chapter 20: SNI uses the name
    hello = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello.set_result(await reader.read(4_096))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "a.example" in await refusal(f"https://a.example:{port}/")
    assert b"a.example" in await hello


# ------------------------------------------------------------------------------------------------------------ http_request


async def test_request_sends_method_headers_and_body(site: Site) -> None:  # HTTP-01
    site.pages["/"] = answer(b"made", status="201 Created", X_Id="7")
    url = f"http://a.example:{site.port}/"
    result = await request(url, method="post", headers={"X-Key": "k"}, body={"a": "ä"})
    assert {key: result[key] for key in ("status", "statusText", "body", "truncated")} == {
        "status": 201,
        "statusText": "Created",
        "body": "made",
        "truncated": False,
    }
    assert result["headers"]["x-id"] == "7"
    got = site.got[0]
    assert (got.method, json.loads(got.body), got.headers["x-key"]) == ("POST", {"a": "ä"}, "k")
    assert got.headers["content-type"] == "application/json"
    await request(url, method="PUT", body="text", headers={"content-type": "text/x"})
    assert (site.got[1].body, site.got[1].headers["content-type"]) == (b"text", "text/x")


@pytest.mark.parametrize("headers", [{"Host": "b.example"}, {"content-length": "3"}, {"X": "a\r\nY: b"}, {"a b": "c"}, {"X": "ä"}])
async def test_headers_that_would_change_the_exchange_are_refused(site: Site, headers: dict[str, str]) -> None:
    with pytest.raises(ToolExecutionError, match="header"):
        await request(f"http://a.example:{site.port}/", headers=headers)
    assert site.connections == 0


@pytest.mark.parametrize("method", ["CONNECT", "G ET", "GET\r\n", "", "é"])
async def test_bad_methods_are_refused(site: Site, method: str) -> None:
    with pytest.raises(ToolExecutionError, match="method"):
        await request(f"http://a.example:{site.port}/", method=method)
    assert site.connections == 0


async def test_other_origin_gets_no_credentials(site: Site) -> None:  # chapter 20: cross-origin redirects
    site.pages["/same"] = redirect("/end")
    site.pages["/other"] = redirect(f"http://b.example:{site.port}/end")
    headers = {"Authorization": "Bearer t", "Cookie": "c=1", "X-Key": "k"}
    for path, kept in (("/same", True), ("/other", False)):
        await request(f"http://a.example:{site.port}{path}", headers=headers)
        last = site.got[-1]
        assert ("authorization" in last.headers, "cookie" in last.headers, "x-key" in last.headers) == (kept, kept, True)


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [
        ("303 See Other", "PUT", "GET"),
        ("303 See Other", "HEAD", "HEAD"),
        ("302 Found", "POST", "GET"),
        ("301 Moved", "POST", "GET"),
        ("302 Found", "PUT", "PUT"),
        ("307 Temporary", "POST", "POST"),
        ("308 Permanent", "POST", "POST"),
    ],
)
async def test_method_and_body_after_a_redirect(site: Site, status: str, method: str, then: str) -> None:  # chapter 20
    site.pages["/"] = redirect("/end", status)
    await request(f"http://a.example:{site.port}/", method=method, body="data")
    last = site.got[-1]
    assert last.method == then
    assert last.body == (b"" if then in {"GET"} else b"data")
    assert ("content-type" in last.headers) is (then != "GET")


async def test_failed_post_says_that_it_may_have_had_an_effect(site: Site) -> None:  # C11
    site.pages["/"] = answer(b"bad gateway", status="502 Bad Gateway")
    url = f"http://a.example:{site.port}/"
    assert "may have taken effect" in (await request(url, method="POST"))["note"]
    assert "note" not in await request(url, method="GET")
