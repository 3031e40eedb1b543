"""Rules of the code's shape that neither the linter nor the type checkers know. CONTRIBUTING.md states them."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import lousho_ray

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE = frozenset({"helper", "helpers", "manager", "managers", "misc", "util", "utils"})

LONG_MODULES: Mapping[str, str] = {
    "lousho_ray/error_codes.py": "one table: every error code with its hint",
}
"""Modules that may be longer, with the reason."""

LONG_FUNCTIONS: Mapping[str, str] = {
    "lousho_ray/cli/eval_command.py:eval_command": "one option a line: it is the interface of the command",
    "lousho_ray/create.py:create_agent": "one option a line: its type, its documentation and its check",
    "lousho_ray/loop/open.py:open_run": "one thing a run needs a line: it makes RunDeps",
}
"""Functions that may be longer, as `module:qualified name`, with the reason."""


def modules() -> list[Path]:
    folders = ("lousho_ray", "actors", "stores", "examples", "benchmarks")
    found = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if "__pycache__" not in path.parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, nested ones, too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, prefix)


def test_modules_are_at_most_400_lines_long() -> None:
    long = {name_of(path): lines for path in modules() if (lines := path.read_text("utf-8").count("\n")) > MAX_MODULE_LINES}
    assert long.keys() == LONG_MODULES.keys(), f"too long, or an exemption nobody needs: {long}"


def test_functions_are_at_most_60_lines_long() -> None:
    long = {
        f"{name_of(path)}:{name}": lines
        for path in modules()
        for name, node in functions(tree_of(path))
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), f"too long, or an exemption nobody needs: {long}"


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [name_of(path) for path in modules() if VAGUE & set(path.stem.split("_"))] == []


def test_no_work_is_left_open_in_comments() -> None:
    markers = ("TODO", "FIX" + "ME", "XXX", "HACK")
    found = [
        f"{name_of(path)}:{token.start[0]}"
        for path in modules()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
        if token.type == tokenize.COMMENT and any(marker in token.string for marker in markers)
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    # The two package roots must begin with the statement that refuses a second import name.
    exempt = {"actors/__init__.py", "stores/__init__.py"}
    trees = {name_of(path): tree_of(path) for path in modules()}
    assert {name for name, tree in trees.items() if tree.body and ast.get_docstring(tree) is None} == exempt


def test_every_public_name_is_documented() -> None:
    def documented(name: str) -> bool:
        value = getattr(lousho_ray, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            # A class without one inherits that of its base, which describes something else; dataclasses make one up.
            own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
            return own is not None and own != "" and not own.startswith(f"{name}(")
        return True

    assert [name for name in lousho_ray.__all__ if not documented(name)] == []


# ------------------------------------------------------------------------------------------------------------- remote waits

NO_WAIT: Mapping[str, str] = {
    "actors/cluster.py:named_actor": "makes an actor; Ray answers with a handle at once",
    "actors/eval_board.py:__init__": "makes an actor",
    "actors/eval_worker.py:eval_worker": "makes an actor",
    "actors/eval_pool.py:_tell_to_stop": "tells a worker to stop; its answer is not waited for",
    "actors/liveness.py:judge": "its answer is waited for in a thread, with a bound",
    "actors/tool_task.py:run_as_task": "a tool may take as long as it needs; the limits of its run and an abort end it",
}
"""Functions that send remote calls without a bound, with the reason."""

BOUNDED = frozenset({"ask", "ask_busy", "_watch", "_control"})
"""Functions that put a bound on the wait for the remote call in their arguments, or wait for none."""


def name_called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def unbounded_waits(tree: ast.AST, function: str = "", bounded: bool = False) -> Iterator[str]:
    """Where a remote call is sent, or its answer is waited for, without a bound: as `function: code`."""
    for node in ast.iter_child_nodes(tree):
        inside, safe = function, bounded
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inside, safe = node.name, False
            case ast.AsyncWith(items=[ast.withitem(context_expr=ast.Call(args=[limit]) as call)]):
                safe = safe or (name_called(call) == "timeout" and not _is_none(limit))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ray"), attr="get" | "wait"), keywords=keywords):
                if not any(keyword.arg == "timeout" and not _is_none(keyword.value) for keyword in keywords):
                    yield f"{inside}: {ast.unparse(node)}"
            case ast.Call() if name_called(node) in BOUNDED:
                safe = True
            case ast.Attribute(value=ast.Call() as call, attr="future") if name_called(call) == "remote":
                safe = True  # a callback is told of its end
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ray"), attr="remote")):
                pass  # makes a class or function remote
            case ast.Call(func=ast.Attribute(attr="remote")) if not safe:
                yield f"{inside}: {ast.unparse(node)}"
            case _:
                pass
        if isinstance(node, ast.Call):
            yield from (f"{inside}: {word.arg}=None" for word in node.keywords if word.arg == "timeout_s" and _is_none(word.value))
        yield from unbounded_waits(node, inside, safe)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def test_every_remote_wait_has_a_bound() -> None:
    # A process that hangs must not hang those that wait for it.
    found = {
        f"{name_of(path)}:{function}": code
        for path in modules()
        if path.is_relative_to(ROOT / "actors") or path.stem == "runtime"
        for function, code in (wait.split(": ", 1) for wait in unbounded_waits(tree_of(path)))
    }
    assert found.keys() == NO_WAIT.keys(), f"unbounded, or an exemption nobody needs: {found}"


def test_an_unbounded_remote_wait_is_found() -> None:
    code = """
async def wait(actor, ref):
    await actor.one.remote()
    async with asyncio.timeout(5):
        await actor.two.remote()
    async with asyncio.timeout(None):
        await actor.three.remote()
    await ask(actor.four.remote(), "It")
    await ask(actor.five.remote(), "It", timeout_s=None)
    ray.get(ref)
    ray.get(ref, timeout=5)
    call = actor.six.remote()
    actor.seven.remote().future().add_done_callback(print)
"""
    found = [wait.removeprefix("wait: ") for wait in unbounded_waits(ast.parse(code))]
    assert found == ["actor.one.remote()", "actor.three.remote()", "timeout_s=None", "ray.get(ref)", "actor.six.remote()"]
