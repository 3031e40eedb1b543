"""The routes of the server, the dialects of Chat Completions, and the error body of each vendor."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Route: TypeAlias = Literal["chat", "responses", "messages", "ollama"]
Dialect: TypeAlias = Literal["openai", "openrouter", "mistral", "compatible"]

_SUFFIXES: tuple[tuple[str, Route], ...] = (
    ("/chat/completions", "chat"),
    ("/responses", "responses"),
    ("/messages", "messages"),
    ("/chat", "ollama"),
)
ROUTES: tuple[str, ...] = tuple(route for _, route in _SUFFIXES)
STREAM_TYPES: dict[str, str] = {"ollama": "application/x-ndjson"}
"""Content types of streams; every other route streams `text/event-stream`."""


def check_route(route: str) -> str:
    """The route itself. Raises `ValueError` when it is no route and no path."""
    if route not in ROUTES and not route.startswith("/"):
        raise ValueError(f"unknown route {route!r}; a route is {', '.join(ROUTES)}, or a path beginning with '/'")
    return route


def route_of(path: str) -> str:
    """The route a path belongs to, whatever its prefix; the path itself (without the query) when it is none of them."""
    plain = path.split("?", 1)[0]
    return next((route for suffix, route in _SUFFIXES if plain.endswith(suffix)), plain)


def dialect_of(path: str) -> Dialect:
    """Whose Chat Completions a path speaks: `/v1` OpenAI, `/api/v1` OpenRouter, `/mistral/` Mistral, else a compatible server."""
    if path.startswith("/v1/"):
        return "openai"
    if path.startswith("/api/v1/"):
        return "openrouter"
    return "mistral" if path.startswith("/mistral/") else "compatible"


def error_body(route: str, message: str, *, type: str = "invalid_request_error", code: str | int | None = None) -> dict[str, Any]:
    """An error in the form of the route's vendor."""
    if route == "messages":
        return {"type": "error", "error": {"type": type, "message": message}, "request_id": "req_fake"}
    if route == "ollama":
        return {"error": message}
    return {"error": {"message": message, "type": type, "param": None, "code": code}}
