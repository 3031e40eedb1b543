"""Spans as such: the contract of exporters, `with_span()`, and the book that keeps the contract for spans of other processes."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.spans import Span, SpanBook, SpanRecord, SpanSender, open_span, with_span
from lousho_ray.testing.mock_model import mock_model
from tests.unit.span_support import Recorder


class Half:
    def on_span_start(self, span: Span) -> None: ...


@pytest.mark.parametrize("value", [Half(), print, "console", Recorder])
def test_an_exporter_needs_both_methods(value: Any) -> None:
    # OBS-01
    with pytest.raises(ConfigurationError, match="on_span_end") as caught:
        create_agent(provider=mock_model(["x"]), exporter=value)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "exporter")


@pytest.mark.parametrize("name", ["capture_content", "redact_content"])
def test_the_content_options_are_switches(name: str) -> None:
    # OBS-21, OBS-24
    options: dict[str, Any] = {name: "yes"}
    with pytest.raises(ConfigurationError) as caught:
        create_agent(provider=mock_model(["x"]), **options)
    assert caught.value.field == name


async def test_with_span_tells_of_a_span_around_a_function() -> None:
    # OBS-02, OBS-04, OBS-06
    spans = Recorder()

    async def inner(span: Span | None) -> int:
        assert span is not None
        span.set({"rows": 3, "left": None})
        return 7

    def outer(span: Span | None) -> Span:
        assert span is not None
        return span

    top = with_span(spans, "load", {"table": "t"}, outer)
    assert top.status is not None
    assert (top.parent_id, top.trace_id, top.kind, top.status.code) == (None, top.id, "internal", "ok")
    assert len(top.id) == 32
    spans.open[top.id] = top  # still open, as far as the next one can tell
    assert await with_span(spans, "query", {}, inner, parent_id=top.id, kind="client", trace_id=top.trace_id) == 7
    query = spans.ended[-1]
    assert (query.parent_id, query.trace_id, query.kind, query.attributes) == (top.id, top.id, "client", {"rows": 3})


async def test_without_an_exporter_the_function_runs_all_the_same() -> None:
    # OBS-06
    assert with_span(None, "x", {}, lambda span: (span, 1)) == (None, 1)

    async def later(span: Span | None) -> Span | None:
        return span

    assert await with_span(None, "x", {}, later) is None


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("no"), "ValueError"), (asyncio.CancelledError(), "CancelledError"), (Odd("?"), "_OTHER")]
)
def test_what_leaves_the_block_is_the_failure_of_the_span(error: BaseException, kind: str) -> None:
    # OBS-03, OBS-18
    spans = Recorder()
    with pytest.raises(type(error)), open_span(spans, "x", {}):
        raise error
    (span,) = spans.ended
    assert span.attributes["error.type"] == kind
    assert span.status is not None
    assert span.status.code == "error"


def test_a_wrong_exporter_is_refused_by_with_span() -> None:
    # OBS-01
    wrong: Any = object()
    with pytest.raises(ConfigurationError):
        with_span(wrong, "x", {}, lambda span: None)


# ------------------------------------------------------------------------------------------------------ spans of other processes


def _sent(spans: Recorder) -> tuple[SpanSender, SpanBook]:
    """A sender and the book at the other end, with pickling between them."""
    book = SpanBook(spans)
    return SpanSender(lambda record: book.take(pickle.loads(pickle.dumps(record)))), book


def test_spans_arrive_as_the_objects_that_were_announced() -> None:
    # OBS-04, OBS-39
    spans = Recorder()
    sender, _ = _sent(spans)
    with open_span(sender, "a", {"x": 1}) as top, open_span(sender, "b", {}, parent_id=top.id, trace_id=top.trace_id) as below:
        below.set({"y": 2})
    assert spans.tree() == ["a", "  b"]
    b, a = spans.ended
    assert (a.attributes, b.attributes) == ({"x": 1}, {"y": 2})


def test_what_is_open_when_its_process_is_lost_ends_as_an_error_children_first() -> None:
    # OBS-39
    spans = Recorder()
    sender, book = _sent(spans)
    top = Span("1", "a", "internal", "1", 1.0)
    for span in (top, Span("2", "b", "internal", "1", 2.0, "1"), Span("3", "c", "client", "1", 3.0, "2")):
        sender.on_span_start(span)
    book.lose("RayActorError", "gone")
    assert [span.name for span in spans.ended] == ["c", "b", "a"]
    assert {span.attributes["error.type"] for span in spans.ended} == {"RayActorError"}
    sender.on_span_end(top)  # a late word of the lost one
    book.take(SpanRecord(Span("4", "d", "internal", "1", 2.0, "1"), ended=False))
    assert len(spans.ended) == 3
    assert not spans.open


def test_the_end_of_a_span_ends_what_is_open_below_it() -> None:
    # OBS-03
    spans = Recorder()
    book = SpanBook(spans)
    parents = [None, "1", "2", "1"]
    made = [Span(str(number), f"s{number}", "internal", "1", 1.0, parent) for number, parent in enumerate(parents, 1)]
    for span in made:
        book.on_span_start(span)
    made[1].end_time = 2.0
    book.on_span_end(made[1])
    assert [span.name for span in spans.ended] == ["s3", "s2"]
    made[0].end_time = 2.0
    book.on_span_end(made[0])
    assert [span.name for span in spans.ended] == ["s3", "s2", "s4", "s1"]
    book.on_span_end(made[3])
    assert len(spans.ended) == 4
