"""Evals of a small agent, offline: a scripted model plays the agent's part. Run them with `lousho eval examples/evals`."""

from __future__ import annotations

from lousho_ray import create_agent, tool
from lousho_ray.agent import Agent
from lousho_ray.evals import EvalContext, define_eval, exact_match, includes
from lousho_ray.testing import mock_model


@tool
def forecast(city: str, days: int = 1) -> str:
    """Tells the weather of the next days."""
    return f"{city}: rain for {days} days"


def agent_for(case: dict[str, str] | None) -> Agent[str]:
    """An agent with a fresh script for each case."""
    city = "Oslo" if case is None else case["city"]
    script = [{"tool_calls": [{"name": "forecast", "args": {"city": city, "days": 3}}]}, f"Take an umbrella to {city}."]
    return create_agent(provider=mock_model(script), tools=[forecast], instructions="Help travellers.")


async def asks_the_forecast(t: EvalContext, case: dict[str, str]) -> None:
    await t.send(f"What should I take to {case['city']}?")
    t.completed()
    t.called_tool("forecast", {"city": case["city"]}, times=1)
    t.max_steps(2)
    t.check("names the city", t.reply, includes(case["city"]))
    t.soft("is short", t.reply, lambda reply: len(reply) < 80)


define_eval(
    name="weather",
    agent=agent_for,
    test=asks_the_forecast,
    cases=[{"label": "north", "city": "Oslo"}, {"label": "south", "city": "Rome"}],
    tags=["offline", "tools"],
)

define_eval(
    name="greeting",
    agent=create_agent(provider=mock_model(["Good day."])),
    input="Hello",
    score=exact_match("Good day."),
    tags=["offline"],
)
