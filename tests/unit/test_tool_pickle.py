"""Tools travel between processes: by name where they can be imported, by value from scripts and notebooks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel, Field

from lousho_ray.tools import Tool, define_tool, tool

LOCK = threading.Lock()


class City(BaseModel):
    name: str


@tool(needs_approval=True, effect="read")
def locked(city: City) -> str:
    """Uses something of its module that cannot travel."""
    with LOCK:
        return city.name


def plain(args: City) -> str:
    return args.name


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    @tool
    def price(self, item: str) -> str:
        """Tells the price."""
        return f"{item} at {self.name}"


DEFINED = define_tool(name="defined", description="Defined.", input=City, execute=plain)


def sent(value: Any, pickler: Any = cloudpickle) -> Any:
    return pickle.loads(pickler.dumps(value))


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_decorated_function_of_a_module_travels_by_name(pickler: Any) -> None:
    assert sent(locked, pickler) is locked
    assert len(pickler.dumps(locked)) < 200
    renamed = sent(locked.with_name("other"), pickler)
    assert renamed.name == "other"
    assert renamed.function is locked.function
    assert renamed.needs_approval is True


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_method_travels_with_its_instance(pickler: Any) -> None:
    made = sent(Shop("A").price, pickler)
    assert made("tea") == "tea at A"


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_defined_tool_travels_with_its_schema(pickler: Any) -> None:
    made: Tool[..., Any] = sent(DEFINED, pickler)
    assert made.parameters == DEFINED.parameters
    assert made.parse('{"name": "Rome"}').value == City(name="Rome")


def test_local_function_with_a_local_type_travels_by_value() -> None:
    class Local(BaseModel):
        n: int

    @tool(max_calls_per_run=3)
    def use(local: Local, limit: Annotated[int, Field(ge=1)] = 2) -> int:
        """Uses.

        Args:
            local: What to use.
        """
        return local.n

    made = sent(use)
    assert made is not use
    assert made.parameters == use.parameters
    assert made.max_calls_per_run == 3
    assert made.parse('{"local": {"n": 3}}').value["local"].n == 3
    assert made.__name__ == "use"


SCRIPT = '''
from __future__ import annotations
import sys
from typing import Literal
import cloudpickle
from pydantic import BaseModel
from lousho_ray.tools import define_tool, tool

class Address(BaseModel):
    street: str
    kind: Kind = "home"

Kind = Literal["home", "work"]
Address.model_rebuild()

@tool
def send(to: Address, text: str = "hi", ctx=None) -> str:
    """Sends.

    Args:
        to: Where to.
    """
    return f"{send.name} {to.street} {text}"

schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
sent = define_tool(name="sent", description="Sent.", input=schema, execute=lambda a: a["n"])
cloudpickle.dump([send, sent], open(sys.argv[1], "wb"))
'''

READER = """
import pickle, sys
send, sent = pickle.load(open(sys.argv[1], "rb"))
value = send.parse('{"to": {"street": "x"}}').value
print(send(**value), send.parameters["properties"]["to"]["description"], sent(sent.parse('{"n": 3}').value))
"""


def test_tools_of_a_script_work_in_a_process_that_does_not_have_it(tmp_path: Path) -> None:
    script, data = tmp_path / "job.py", tmp_path / "tools.pickle"
    script.write_text(SCRIPT)
    for arguments in ([str(script), str(data)], ["-c", READER, str(data)]):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=50, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "send x hi Where to. 3\n"
