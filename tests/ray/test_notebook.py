"""What people do in a notebook: cells with `await` at the top, definitions of `__main__` that change, sync calls beside a running
event loop; and a cluster of another version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]

KERNEL = '''
"""Runs cells as a notebook does: all in `__main__`, on one event loop that keeps running."""
import ast, asyncio, inspect, sys, types

CELLS = sys.argv[1].split("# %%")

async def main():
    space = sys.modules["__main__"].__dict__
    for number, cell in enumerate(CELLS):
        code = compile(cell, f"<cell {number}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = types.FunctionType(code, space)()
        if inspect.iscoroutine(result):
            await result

asyncio.run(main())
'''

CELLS = '''
import json, logging, os
import ray
from lousho_ray import GenerateResult, MockProvider, ToolCall, create_agent, tool
from tests.ray.processes import fan_out, task_results

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, namespace="mine")
# %%
FACTOR = 2

class Calculator:
    """Kept between cells."""
    def times(self, number):
        return number * FACTOR

@tool
def compute(number: int) -> str:
    """Computes.

    Args:
        number: What.
    """
    return f"{Calculator().times(number)} {os.getpid() == HERE}"

HERE = os.getpid()

def policy(request):
    if request.messages[-1].role == "tool":
        return json.loads(request.messages[-1].text)
    return GenerateResult(tool_calls=(ToolCall("c", "compute", json.dumps({"number": 21})),), finish_reason="tool_calls")

def agent():
    return create_agent(provider=MockProvider(policy=policy), tools=[compute], description="Computes.")
# %%
session = agent().session()
print((await session.send("Go.")).text)
# %%
print(session.send_sync("Go.").text)
print(agent().session().send_sync("Go.").text)
# %%
FACTOR = 3

@tool
def compute(number: int) -> str:
    """Computes in another way.

    Args:
        number: What.
    """
    return f"{Calculator().times(number) + 1} {os.getpid() == HERE}"

print((await agent().session().send("Go.")).text)
# %%
lead = create_agent(provider=MockProvider(policy=fan_out(2)), subagents={"child": agent()})
results = task_results((await lead.send("Go.")).messages).values()
print([message.text.split("\\\\n")[0].strip('"') for message in results])
# %%
async with agent().session().stream("Go.") as run:
    kinds = [event.type async for event in run]
print(kinds[0], kinds[-1])
# %%
print(ray.get_runtime_context().namespace)
'''


@pytest.mark.timeout(150)
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    # DEC-R1, DEC-R5, Q04
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON", "LOUSHO_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), CELLS],
        env={**variables, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *["42 False"] * 3,
        "64 False",
        "['64 False', '64 False']",
        "run.start run.done",
        "mine",
    ]


OTHER_VERSION = """
import ray
ray.__version__ = "2.0.0"
from lousho_ray import ConfigurationError, MockProvider, create_agent
try:
    create_agent(provider=MockProvider()).session().send_sync("Hi.")
except ConfigurationError as error:
    print(error.code, error.field, " ".join(error.detail.split()))
"""


@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_of_another_version_is_named_with_both_versions(tmp_path: Path) -> None:
    # DEC-R1
    script = tmp_path / "script.py"
    script.write_text(OTHER_VERSION)
    token = ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
    variables = {
        **os.environ,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_AUTH_MODE": "token" if token else "disabled",
    }
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LOUSHO_CONFIG_INVALID runtime Cannot join the cluster at RAY_ADDRESS="), done.stdout
    assert "Version mismatch" in done.stdout
    assert f"Ray: {ray.__version__}" in done.stdout
    assert "2.0.0" in done.stdout
