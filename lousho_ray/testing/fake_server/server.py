"""The fake server: takes requests apart by route, checks them, plays what is scripted, and records everything."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias

from lousho_ray.testing.fake_server import (
    anthropic_rules,
    anthropic_wire,
    chat_rules,
    chat_wire,
    ollama_rules,
    ollama_wire,
    responses_rules,
    responses_wire,
)
from lousho_ray.testing.fake_server.http import Connection, Exchange, HttpRequest, MalformedRequestError
from lousho_ray.testing.fake_server.journal import Journal
from lousho_ray.testing.fake_server.records import RecordedRequest, Violation
from lousho_ray.testing.fake_server.replies import Issued, Reply
from lousho_ray.testing.fake_server.routes import ROUTES, STREAM_TYPES, check_route, error_body, route_of
from lousho_ray.testing.fake_server.rule import BrokenRuleError, Checked, parse_body
from lousho_ray.testing.fake_server.scenarios import Player, Step, StepLike, as_steps, gate, status

Answer: TypeAlias = Reply | str | Sequence[StepLike]
Responder: TypeAlias = Callable[[RecordedRequest], Answer | Awaitable[Answer]]

_RENDERERS: dict[str, Callable[[Reply, RecordedRequest, Issued], list[Step]]] = {
    "chat": chat_wire.render,
    "responses": responses_wire.render,
    "messages": anthropic_wire.render,
    "ollama": ollama_wire.render,
}
_CHECKS: dict[str, tuple[Callable[[Checked], None], ...]] = {
    "chat": chat_rules.CHECKS,
    "responses": responses_rules.CHECKS,
    "messages": anthropic_rules.CHECKS,
    "ollama": ollama_rules.CHECKS,
}


class FakeServer(Journal):
    """A fake of the OpenAI, Anthropic and Ollama HTTP APIs on a free port of 127.0.0.1.

    `async with FakeServer() as server` serves on the running event loop, `with FakeServer.in_thread() as server` in a thread with a
    loop of its own. Every method may be called from any thread; the awaiting ones have a `_sync` twin.

    Args:
        strict: Answer with the vendor's own error when a request breaks one of the vendor's rules.
        extra_keys: Top-level request keys to accept besides the known ones, by route.
        ignored_rules: Short names of rules that may be broken; what the same check looks at after such a rule is let through too.
        timeout_s: Seconds that the waiting methods wait before they raise `TimeoutError`.
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        extra_keys: Mapping[str, Collection[str]] | None = None,
        ignored_rules: Collection[str] = (),
        timeout_s: float = 10.0,
    ) -> None:
        super().__init__(timeout_s)
        self.port = 0
        self._strict = strict
        self._extra_keys = {check_route(route): frozenset(keys) for route, keys in (extra_keys or {}).items()}
        self._ignored_rules = frozenset(ignored_rules)
        self._issued = Issued()
        self._scenarios: dict[str, deque[tuple[Step, ...]]] = {}
        self._responders: dict[str | None, Responder | deque[Answer]] = {}
        self._connections: set[Connection] = set()
        self._connection_count = 0
        self._listener: asyncio.Server | None = None

    # ------------------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.get_running_loop().create_server(self._connect, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._listener is not None
        self._listener.close()
        tasks = [connection.task for connection in self._connections]
        for connection in list(self._connections):
            connection.reset()
            connection.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.wait_closed()

    @classmethod
    @contextmanager
    def in_thread(cls, **options: Any) -> Iterator[Self]:
        """Serves in a thread of its own; takes the arguments of the class."""
        server, stop = cls(**options), asyncio.Event()
        serving: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            try:
                async with server:
                    serving.set_result(asyncio.get_running_loop())
                    await stop.wait()
            except OSError as error:
                serving.set_exception(error)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="fake-server", daemon=True)
        thread.start()
        try:
            loop = serving.result()
            try:
                yield server
            finally:
                loop.call_soon_threadsafe(stop.set)
        finally:
            thread.join()

    # ------------------------------------------------------------------------------------------------- addresses

    @property
    def url(self) -> str:
        """Without a path; what the Anthropic client and an Ollama provider take as their base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def openrouter_url(self) -> str:
        """Chat Completions with OpenRouter's own keys."""
        return f"{self.url}/api/v1"

    @property
    def mistral_url(self) -> str:
        """Chat Completions where tool call ids are exactly 9 letters or digits."""
        return f"{self.url}/mistral/v1"

    @property
    def compatible_url(self) -> str:
        """Chat Completions of a local server: no key needed."""
        return f"{self.url}/compatible/v1"

    # --------------------------------------------------------------------------------------------------- scripts

    def on(self, route: str, *steps: StepLike) -> None:
        """Queues a scenario: the next request of the route gets these steps.

        `route` is `chat`, `responses`, `messages`, `ollama`, or any other path (`/v1/models`). A `Reply` is a step too.
        """
        self._scenarios.setdefault(check_route(route), deque()).append(as_steps(steps))

    def respond(self, answers: Responder | Sequence[Answer] | Reply | str, *, route: str | None = None) -> None:
        """Answers every request that no scenario is queued for.

        Args:
            answers: A function of the `RecordedRequest`, sync or async, called in the server's loop; or one answer for all;
                or a list of answers, taken in order. An answer is a `Reply`, its text, or a list of steps.
            route: Only for this route; it goes before answers for all routes.
        """
        responder: Responder | deque[Answer]
        if isinstance(answers, Reply | str):
            responder = _always(answers)
        elif callable(answers):
            responder = answers
        else:
            responder = deque(answers)
        self._responders[None if route is None else check_route(route)] = responder

    @property
    def unserved(self) -> dict[str, int]:
        """How many queued scenarios of each route no request has taken."""
        return {route: len(queue) for route, queue in self._scenarios.items() if queue}

    def know_signature(self, signature: str, thinking: str | None = None) -> None:
        """Makes a thinking signature known that the server did not issue; with `thinking`, only beside that text."""
        self._issued.signatures[signature] = thinking

    def know_redacted(self, data: str) -> None:
        """Makes the data of a redacted thinking block known."""
        self._issued.redacted.add(data)

    def know_encrypted(self, encrypted_content: str) -> None:
        """Makes the `encrypted_content` of a reasoning item known."""
        self._issued.encrypted.add(encrypted_content)

    # --------------------------------------------------------------------------------------------------- serving

    def _connect(self) -> Connection:
        self._connection_count += 1
        return Connection(self._connection_count, self._serve)

    async def _serve(self, connection: Connection) -> None:
        self._connections.add(connection)
        try:
            while await self._answer(connection, await connection.read_request()):
                pass
        except MalformedRequestError as error:
            await connection.write(f"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n{error}".encode())
        finally:
            self._connections.discard(connection)

    async def _answer(self, connection: Connection, http: HttpRequest) -> bool:
        """Answers one request; returns whether the connection goes on."""
        request = RecordedRequest(
            index=len(self._requests),
            route=route_of(http.path),
            method=http.method,
            path=http.path,
            headers=http.headers,
            raw=http.body,
            body=None,
            connection=connection.number,
            arrived=time.monotonic(),
        )
        exchange = Exchange(connection, lambda: self._end(request))
        try:
            steps = self._check(request)
            self._begin(request)
            await self._player(request, exchange).play(steps or await self._script(request))
        except Exception as error:
            self._note(request, BrokenRuleError("scenario-failed", f"the scenario cannot be played: {error!r}"))
            exchange.reset()
        finally:
            request.status = exchange.status
            request.client_closed = connection.client_closed and request.ended is None
            self._end(request)
        return exchange.keep_alive and not exchange.closed

    def _player(self, request: RecordedRequest, exchange: Exchange) -> Player:
        def render(reply: Reply) -> list[Step]:
            steps = _RENDERERS[request.route](reply, request, self._issued)
            return steps if reply.delay_gate is None else [gate(reply.delay_gate), *steps]

        stream_type = STREAM_TYPES.get(request.route, "text/event-stream")
        return Player(exchange, stream_type=stream_type, pass_gate=self._pass_gate, render=render)

    def _check(self, request: RecordedRequest) -> Sequence[Step]:
        """Parses the body and checks the rules; the steps of an error answer when one is broken, else none."""
        try:
            request.body = parse_body(request.raw)
        except BrokenRuleError as error:
            return self._refuse(request, error) if request.route in ROUTES else ()
        if request.route not in ROUTES:
            return ()
        checked = Checked(request, self._issued, self._extra_keys.get(request.route, frozenset()))
        for check in _CHECKS[request.route] if self._strict else ():
            try:
                check(checked)
            except BrokenRuleError as error:
                if error.rule not in self._ignored_rules:
                    return self._refuse(request, error)
        return ()

    def _refuse(self, request: RecordedRequest, error: BrokenRuleError) -> Sequence[Step]:
        self._note(request, error)
        return [status(error.status, body=error_body(request.route, str(error), type=error.type))]

    def _note(self, request: RecordedRequest, error: BrokenRuleError) -> None:
        request.violation = Violation(request.route, error.rule, str(error), request.index)
        self.violations.append(request.violation)

    async def _script(self, request: RecordedRequest) -> Sequence[Step]:
        """What answers a request: the next scenario of its route, else the responder."""
        queue = self._scenarios.get(request.route)
        if queue:
            return queue.popleft()
        try:
            answer = await self._ask_responder(request)
            return as_steps([answer] if isinstance(answer, Reply) else [Reply(answer)] if isinstance(answer, str) else answer)
        except BrokenRuleError as error:
            return self._refuse(request, error)
        except Exception as error:
            return self._refuse(request, BrokenRuleError("responder-failed", f"the responder raised {error!r}"))

    async def _ask_responder(self, request: RecordedRequest) -> Answer:
        responder = self._responders.get(request.route, self._responders.get(None))
        if responder is None:
            raise BrokenRuleError("nothing-scripted", f"nothing is scripted for {request.route!r}: call server.on() or .respond()")
        if isinstance(responder, deque):
            if not responder:
                raise BrokenRuleError("nothing-scripted", f"the answers given to server.respond() are used up at {request.route!r}")
            return responder.popleft()
        answer = responder(request)
        return await answer if inspect.isawaitable(answer) else answer


def _always(answer: Reply | str) -> Responder:
    return lambda request: answer
