"""The fake server speaks to the real clients."""

from __future__ import annotations

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from lousho_ray.testing.fake_server import FakeServer, Reply


async def test_chat_reply_is_rendered_plain_and_streamed(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text="naïve 漢字", usage=(7, 3)))
    async with AsyncOpenAI(api_key="k", base_url=fake_server.openai_url, max_retries=0) as client:
        plain = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert plain.choices[0].message.content == "naïve 漢字"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "naïve 漢字"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    assert [request.client_closed for request in fake_server.requests] == [False, False]


async def test_responses_reply(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text="hello there", tool_calls=[("add", {"a": 1})], reasoning="hm"))
    async with AsyncOpenAI(api_key="k", base_url=fake_server.openai_url, max_retries=0) as client:
        plain = await client.responses.create(model="m", input="hi")
        stream = await client.responses.create(model="m", input="hi", stream=True)
        events = [event async for event in stream]
    assert plain.output_text == "hello there"
    assert plain.output[2].type == "function_call"
    assert events[-1].type == "response.completed"


async def test_messages_reply(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text="hello there", tool_calls=[("add", {"a": 1})], reasoning="hm"))
    async with AsyncAnthropic(api_key="k", base_url=fake_server.url, max_retries=0) as client:
        plain = await client.messages.create(model="m", max_tokens=100, messages=[{"role": "user", "content": "hi"}])
        async with client.messages.stream(model="m", max_tokens=100, messages=[{"role": "user", "content": "hi"}]) as stream:
            streamed = await stream.get_final_message()
    for message in plain, streamed:
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.stop_reason == "tool_use"
