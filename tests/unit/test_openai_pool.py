"""The pool behind the OpenAI client makes the requests that the client's own pool would make."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from lousho_ray.providers.openai_pool import Client, Pool

URL = "http://127.0.0.1:1/v1/chat/completions"
PLAIN = [("accept", "application/json"), ("authorization", "Bearer k"), ("content-type", "application/json")]
CALLS: list[dict[str, Any]] = [
    {"headers": PLAIN},
    {"headers": [*PLAIN, ("accept-encoding", "identity"), ("user-agent", "mine")]},
    {"headers": PLAIN, "params": {"api-version": "1"}},
]


@pytest.mark.parametrize("call", CALLS, ids=["plain", "own-headers", "query"])
async def test_a_request_is_what_the_clients_own_pool_makes(call: dict[str, Any]) -> None:
    # PRV-15
    limits = httpx2.Timeout(None, connect=3)
    async with Pool() as pool, openai.DefaultAioHttpClient() as own:
        for http in (pool, own):
            http.cookies.set("route", "a")
        for _ in range(2):  # the second time from what was kept
            made, wanted = (http.build_request("post", URL, content=b"{}", timeout=limits, **call) for http in (pool, own))
            assert sorted(made.headers.multi_items()) == sorted(wanted.headers.multi_items())
            assert (made.url, made.method, made.content) == (wanted.url, wanted.method, wanted.content)
            assert made.extensions == wanted.extensions


async def test_headers_that_are_left_out_stay_out() -> None:
    # PRV-11
    async with Client(api_key="k", base_url=URL, default_headers={"X-Own": "1", "X-Stainless-OS": openai.Omit()}) as client:  # type: ignore[dict-item]
        assert client.default_headers["X-Own"] == "1"
        assert "X-Stainless-OS" not in client.default_headers
