"""A strict fake of the OpenAI, OpenRouter, Anthropic and Ollama HTTP APIs, for tests.

    async with FakeServer() as server:                    # or: with FakeServer.in_thread() as server
        server.respond([Reply(tool_calls=[("add", {"a": 1})]), Reply(text="done")])
        client = AsyncOpenAI(api_key="k", base_url=server.openai_url)

**Addresses**: `server.url` (Anthropic, Ollama), `.openai_url`, `.openrouter_url`, `.mistral_url`, `.compatible_url`. Routes are
told by the end of the path: `/chat/completions` = `chat`, `/responses`, `/messages`, `/chat` = `ollama`; any other path is its
own route.

**Answers**: `server.respond(fn | Reply | text | list, route=None)`. `Reply(text, tool_calls=[(name, args[, id])], usage=(p, c),
finish_reason, reasoning, redacted_reasoning, chunks, delay_gate, model)` is rendered in the form of the route, streamed or not.

**Scenarios**: `server.on(route, *steps)` queues the steps that answer the route's next request; they go before `respond`.
Steps: `status(code, headers, body)`, `send(data)` or plain bytes or text, `split(n)`, `pause(seconds)`, `gate(name)`,
`repeat(*steps, times)`, `eof`, `cut`, `drop`, `hold`, and any `Reply`. Raw wire: `sse`, `D`, `TC`, `FIN`, `U`, `DONE`,
`completion` (chat); `message_start`, `text_delta`, ... (Anthropic); `response_created`, `output_text_delta`, ... (Responses);
`ollama_line`, `ollama_done`, `ollama_error`.

**Gates instead of sleeps**: a `gate("g")` step waits for `server.release("g")`; `await server.reached("g", count)` waits for
requests to come there. Also `await server.wait_for_requests(n)`, `.wait_closed(request)`, `.wait_ended(request)`,
`.wait_idle()`; each has a `_sync` twin.

**Records**: `server.requests` (`RecordedRequest`: `route, path, headers, raw, body, connection, arrived, ended, status,
client_closed, violation`), `.bodies`, `.requests_of(route)`, `.concurrent`, `.max_concurrent`, `.max_concurrent_by_route`,
`.max_in_window(seconds)`.

**Strictness**: a request that breaks a rule of the vendor gets 400 (401 without a key) in the vendor's own error form, the
rule's name in brackets, and is in `server.violations`. `strict=False` turns it off, `ignored_rules={...}` single rules,
`extra_keys={route: {...}}` accepts more top-level keys. `server.know_signature(...)` and its kind make values known that the
server did not issue itself.
"""

from lousho_ray.testing.fake_server.anthropic_wire import (
    anthropic_event,
    anthropic_message,
    block_delta,
    block_start,
    block_stop,
    error_event,
    input_json_delta,
    message_delta,
    message_start,
    message_stop,
    ping,
    signature_delta,
    text_delta,
    thinking_delta,
)
from lousho_ray.testing.fake_server.chat_wire import DONE, FIN, TC, D, U, chunk, completion, sse
from lousho_ray.testing.fake_server.ollama_wire import ollama_answer, ollama_done, ollama_error, ollama_line
from lousho_ray.testing.fake_server.records import RecordedRequest, Violation
from lousho_ray.testing.fake_server.replies import Reply
from lousho_ray.testing.fake_server.responses_wire import (
    arguments_delta,
    function_call_item,
    message_item,
    output_item_added,
    output_item_done,
    output_text_delta,
    reasoning_item,
    reasoning_summary_delta,
    response_completed,
    response_created,
    response_error,
    response_event,
    response_failed,
    response_incomplete,
    response_object,
    response_usage,
)
from lousho_ray.testing.fake_server.routes import error_body
from lousho_ray.testing.fake_server.scenarios import cut, drop, eof, gate, hold, pause, repeat, send, split, status
from lousho_ray.testing.fake_server.server import FakeServer

__all__ = [
    "DONE",
    "FIN",
    "TC",
    "D",
    "FakeServer",
    "RecordedRequest",
    "Reply",
    "U",
    "Violation",
    "anthropic_event",
    "anthropic_message",
    "arguments_delta",
    "block_delta",
    "block_start",
    "block_stop",
    "chunk",
    "completion",
    "cut",
    "drop",
    "eof",
    "error_body",
    "error_event",
    "function_call_item",
    "gate",
    "hold",
    "input_json_delta",
    "message_delta",
    "message_item",
    "message_start",
    "message_stop",
    "ollama_answer",
    "ollama_done",
    "ollama_error",
    "ollama_line",
    "output_item_added",
    "output_item_done",
    "output_text_delta",
    "pause",
    "ping",
    "reasoning_item",
    "reasoning_summary_delta",
    "repeat",
    "response_completed",
    "response_created",
    "response_error",
    "response_event",
    "response_failed",
    "response_incomplete",
    "response_object",
    "response_usage",
    "send",
    "signature_delta",
    "split",
    "sse",
    "status",
    "text_delta",
    "thinking_delta",
]
