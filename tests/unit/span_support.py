"""What the tests of spans share: an exporter that checks what is promised to it, and a short form of a trace."""

from __future__ import annotations

from typing import Any

from lousho_ray.spans import Span


class Recorder:
    """Keeps ended spans and checks that each ends once, after its children."""

    def __init__(self) -> None:
        self.ended: list[Span] = []
        self.open: dict[str, Span] = {}
        self.at_start: dict[str, dict[str, Any]] = {}

    def on_span_start(self, span: Span) -> None:
        assert span.id not in self.open
        assert span.parent_id is None or span.parent_id in self.open, "a child that starts after its parent ended"
        assert span.end_time is None
        self.open[span.id] = span
        self.at_start[span.id] = dict(span.attributes)

    def on_span_end(self, span: Span) -> None:
        assert self.open.pop(span.id) is span
        assert all(other.parent_id != span.id for other in self.open.values()), "a parent that ends before its child"
        assert span.end_time is not None
        assert span.end_time >= span.start_time
        assert None not in span.attributes.values()
        self.ended.append(span)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.ended if span.name.startswith(name)]

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def tree(self) -> list[str]:
        """The ended spans, parents first, each with its depth, in the order of their starts; `!` marks errors, `?` no verdict."""
        assert not self.open, f"never ended: {[span.name for span in self.open.values()]}"
        assert len({span.id for span in self.ended}) == len(self.ended)
        order = {span_id: number for number, span_id in enumerate(self.at_start)}
        spans = sorted(self.ended, key=lambda span: order[span.id])
        return [line for span in spans if span.parent_id is None for line in self._lines(span, spans, 0)]

    def _lines(self, span: Span, spans: list[Span], depth: int) -> list[str]:
        mark = "?" if span.status is None else "!" if span.status.code == "error" else ""
        lines = ["  " * depth + span.name + mark]
        for other in spans:
            if other.parent_id == span.id:
                assert other.trace_id == span.trace_id
                lines += self._lines(other, spans, depth + 1)
        return lines
