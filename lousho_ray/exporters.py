"""Exporters made of others: several at once (`combine_exporters()`), and one in each process (`worker_local()`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from lousho_ray.errors import ConfigurationError
from lousho_ray.option_checks import check_callable
from lousho_ray.spans import Span, TraceExporter, check_exporter, is_worker_local, told


def combine_exporters(*exporters: TraceExporter) -> TraceExporter:
    """An exporter that sends every span to each of several. What one of them raises is logged once, and the others go on.

    Those that work per process (`worker_local()`) still do so beside others, which get all spans where the caller is.

    Raises:
        ConfigurationError: There is none, or one lacks a method.
    """
    if not exporters:
        raise ConfigurationError("combine_exporters() needs at least one exporter.", field="exporters")
    for index, exporter in enumerate(exporters):
        check_exporter(exporter, f"exporters[{index}]")
    return _Combined([part for exporter in exporters for part in _parts(exporter)])


class _Combined:
    def __init__(self, parts: Sequence[TraceExporter]) -> None:
        self.parts = parts

    @property
    def worker_local(self) -> bool:
        return all(map(is_worker_local, self.parts))

    def on_span_start(self, span: Span) -> None:
        for part in self.parts:
            told(part.on_span_start, span)

    def on_span_end(self, span: Span) -> None:
        for part in self.parts:
            told(part.on_span_end, span)


def _parts(exporter: TraceExporter | None) -> Sequence[TraceExporter]:
    if isinstance(exporter, _Combined):
        return exporter.parts
    return () if exporter is None else (exporter,)


def part_of_each_process(exporter: TraceExporter | None) -> TraceExporter | None:
    """What of an exporter travels to where runs begin: that which works per process."""
    local = [part for part in _parts(exporter) if is_worker_local(part)]
    return combine_exporters(*local) if local else None


def part_of_caller(exporter: TraceExporter | None) -> TraceExporter | None:
    """What of an exporter stays with the caller, and gets the spans of other processes there."""
    here = [part for part in _parts(exporter) if not is_worker_local(part)]
    return combine_exporters(*here) if here else None


def worker_local(factory: Callable[[], TraceExporter]) -> TraceExporter:
    """An exporter of which each process in which runs begin has its own: their spans do not travel to the caller.

    These are the caller's process, session actors and eval workers. What a run starts on a worker is told where the run is.

    `factory` is called once in each process, when its first span starts, and what it makes stays until the process ends. That is
    the place to set up a client, such as an OTLP exporter that sends from every node. When it fails, that is logged, and the
    process has no exporter.

    Args:
        factory: A function without arguments that can be pickled. One defined in an imported module is the same in every call, and
            so is its exporter; for a lambda or a function of `__main__` each call of `worker_local()` stands for one exporter.

    Raises:
        ConfigurationError: `factory` cannot be called.
    """
    return _WorkerLocal(_key_of(check_callable(factory, "factory", "a function without arguments that makes an exporter")), factory)


def _key_of(factory: Callable[[], TraceExporter]) -> str:
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return uuid4().hex
    return f"{module}:{name}"


class _WorkerLocal:
    worker_local = True

    def __init__(self, key: str, factory: Callable[[], TraceExporter]) -> None:
        self._key = key
        self._factory = factory

    def __reduce__(self) -> tuple[Any, ...]:
        return _WorkerLocal, (self._key, self._factory)

    def on_span_start(self, span: Span) -> None:
        _MADE.get(self._key, self._factory).on_span_start(span)

    def on_span_end(self, span: Span) -> None:
        _MADE.get(self._key, self._factory).on_span_end(span)


class _Nothing:
    """What a process has whose factory failed."""

    def on_span_start(self, span: Span) -> None: ...

    def on_span_end(self, span: Span) -> None: ...


class _Made:
    """The exporters that the factories of `worker_local()` made in this process."""

    def __init__(self) -> None:
        self._exporters: dict[str, TraceExporter] = {}
        self._lock = threading.Lock()

    def get(self, key: str, factory: Callable[[], TraceExporter]) -> TraceExporter:
        """The exporter of a key. Raises what its factory raises, the first time."""
        found = self._exporters.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._exporters:
                try:
                    self._exporters[key] = check_exporter(factory(), "factory()")
                except BaseException:
                    self._exporters[key] = _Nothing()
                    raise
            return self._exporters[key]


_MADE = _Made()
