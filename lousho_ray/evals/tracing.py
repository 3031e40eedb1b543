"""Spans of cases that run on workers: they go to the exporter of the agent as the suite's own process has loaded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lousho_ray.agent import Agent
from lousho_ray.evals.definition import EvalDefinition
from lousho_ray.exporters import combine_exporters, part_of_caller, part_of_each_process
from lousho_ray.spans import SpanRecord, SpanSender, TraceExporter


def exporter_here(definition: EvalDefinition) -> TraceExporter | None:
    """What gets the spans of an eval's cases in the suite's process. An agent that a function makes is made where its case runs,
    and so is its exporter."""
    agent = definition.agent
    return part_of_caller(agent.definition.exporter) if isinstance(agent, Agent) else None


def with_spans_sent(agent: Agent[Any], send: Callable[[SpanRecord], None]) -> Agent[Any]:
    """The agent on a worker: what of its exporter belongs to the suite's process is there, and gets the spans through `send`."""
    exporter = agent.definition.exporter
    if part_of_caller(exporter) is None:
        return agent
    stays = part_of_each_process(exporter)
    parts = (SpanSender(send),) if stays is None else (stays, SpanSender(send))
    return Agent(replace(agent.definition, exporter=combine_exporters(*parts)), "local", agent.options)
