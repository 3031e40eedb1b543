"""Traces: a lead with two sub-agents, offline. Its spans go to files; the trace is then read and printed as a tree.

python tracing.py                       # in this process
python tracing.py --runtime ray         # sub-agents on the workers of a cluster: the same tree
python tracing.py --dir /tmp/traces     # keeps the files there; by default they go to .lousho/traces
"""

from __future__ import annotations

import argparse
import asyncio
import json

from lousho_ray import (
    GenerateOptions,
    GenerateResult,
    MockProvider,
    ToolCall,
    create_agent,
    file_trace_exporter,
    list_traces,
    read_trace,
    tool,
)
from lousho_ray.usage import ProviderUsage

USAGE = ProviderUsage(120, 30, cost_usd=0.0002)
TEMPERATURES_C = {"Lisbon": 21, "Oslo": 4}


@tool
def temperature(city: str) -> int:
    """The temperature of a city in °C."""
    if city not in TEMPERATURES_C:
        raise ValueError(f"no station in {city}")
    return TEMPERATURES_C[city]


def call(number: int, name: str, **arguments: str) -> ToolCall:
    return ToolCall(f"call_{number}", name, json.dumps(arguments))


def forecaster(request: GenerateOptions) -> GenerateResult:
    """Looks up the city of its task, then says what it found."""
    found = [message.text for message in request.messages if message.role == "tool"]
    if found:
        return GenerateResult(f"Found: {found[0]}", usage=USAGE)
    city = next(message.text for message in request.messages if message.role == "user").split()[-1]
    return GenerateResult(tool_calls=(call(1, "temperature", city=city),), finish_reason="tool_calls", usage=USAGE)


def lead(request: GenerateOptions) -> GenerateResult:
    """Gives one task a city, all at once, then sums up."""
    answers = [message.text for message in request.messages if message.role == "tool"]
    if answers:
        return GenerateResult(f"Asked for {len(answers)} cities.", usage=USAGE)
    tasks = [
        call(number, "task", agent="forecaster", prompt=f"How warm is {city}", description=f"Look at {city}")
        for number, city in enumerate(("Lisbon", "Oslo", "Atlantis"), 1)
    ]
    return GenerateResult(tool_calls=tuple(tasks), finish_reason="tool_calls", usage=USAGE)


async def main() -> None:
    options = argparse.ArgumentParser(description="Prints the trace of an offline run.")
    options.add_argument("--dir", default=".lousho/traces", help="where the trace files are kept")
    options.add_argument("--runtime", choices=("local", "ray"), default="local", help="where sub-agents run")
    chosen = options.parse_args()
    helper = create_agent(
        provider=MockProvider(policy=forecaster, delay_ms=40),
        tools=[temperature],
        name="forecaster",
        description="Knows how warm a city is.",
        runtime=chosen.runtime,
    )
    agent = create_agent(
        provider=MockProvider(policy=lead, delay_ms=60),
        subagents={"forecaster": helper},
        exporter=file_trace_exporter(chosen.dir),
        name="lead",
        runtime=chosen.runtime,
    )
    result = await agent.send("How warm is it?")
    print(result.text, end="\n\n")
    newest = list_traces(chosen.dir, limit=1)[0]
    print(newest, end="\n\n")
    print(read_trace(newest.trace_id, chosen.dir))


if __name__ == "__main__":
    asyncio.run(main())
