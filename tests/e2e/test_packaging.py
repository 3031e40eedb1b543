"""What is shipped, what an import costs, and what the package says it depends on."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import lousho_ray

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LAZY = ("ray", "openai", "anthropic", "mcp")
IMPORT_CPU_S = 0.3

PUBLIC = [
    "AbortSignal",
    "Agent",
    "AgentExecutionError",
    "AgentRun",
    "AnthropicProvider",
    "BudgetExceededError",
    "CancelToken",
    "CompactedLLMProviderError",
    "Compaction",
    "CompactionInfo",
    "CompactionInput",
    "CompactionOutput",
    "ConfigurationError",
    "CreateAgentOptions",
    "Event",
    "ExecutionResult",
    "FilePart",
    "FileSessionStore",
    "GenerateOptions",
    "GenerateResult",
    "GuardrailError",
    "HostedTool",
    "ImagePart",
    "LLMProvider",
    "LLMProviderError",
    "LLMProviderRegistry",
    "Limits",
    "LoushoError",
    "MemorySessionStore",
    "Message",
    "MissingDependencyError",
    "MockProvider",
    "ModelSettings",
    "OllamaProvider",
    "OpenAICompatibleProvider",
    "OpenAIProvider",
    "OpenRouterProvider",
    "OperationTimeoutError",
    "PermissionMode",
    "PermissionRule",
    "PiProvider",
    "ProjectInstructions",
    "PropagatingToolError",
    "RateLimitError",
    "RateLimiter",
    "RateLimits",
    "Retry",
    "RunFork",
    "S3Store",
    "SDKError",
    "Session",
    "SessionAwaitingApprovalError",
    "SessionStep",
    "Span",
    "SqliteStore",
    "StorageError",
    "TextPart",
    "Tool",
    "ToolArgumentsValidationError",
    "ToolCall",
    "ToolContext",
    "ToolExecutionError",
    "ToolRegistry",
    "Trace",
    "TraceExporter",
    "TraceSummary",
    "TrajectoryComparison",
    "Usage",
    "ValidationError",
    "allow",
    "always",
    "ask",
    "ask_question_tool",
    "code_interpreter",
    "combine_exporters",
    "compact_messages",
    "compare_trajectories",
    "create_agent",
    "create_compaction_hook",
    "create_rate_limiter",
    "define_tool",
    "deny",
    "estimate_cost",
    "estimate_tokens",
    "event_from_dict",
    "file_search",
    "file_store",
    "file_trace_exporter",
    "format_usage",
    "get_checkpoint_history",
    "get_model_info",
    "hosted_tool",
    "is_agent_event",
    "is_pinned",
    "list_models",
    "list_traces",
    "load_project_instructions",
    "memory_store",
    "never",
    "once",
    "otel_trace_exporter",
    "pin_message",
    "prune_tool_results_strategy",
    "ray_metrics_exporter",
    "ray_store",
    "read_trace",
    "register_model",
    "resolve_provider",
    "set_token_estimator",
    "summarize_strategy",
    "text_of",
    "tool",
    "two_phase_strategy",
    "web_search",
    "with_fallback",
    "with_rate_limit",
    "with_retry",
    "with_span",
    "worker_local",
]


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in walk(folder) if path.suffix == ".py")


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder, through links, without caches. (`Path.rglob` does not follow links on every Python.)"""
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(where, name) for name in files)


def run(code: str, *options: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a new process whose only paths are those of the arguments."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders behind, and takes in what an earlier one left."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("lousho_ray", "actors", "stores", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed, far from the checkout."""
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_the_wheel_holds_the_modules_the_type_marker_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"lousho_ray-{lousho_ray.__version__}.dist-info/"
    shipped = {name for name in names if not name.startswith(info)}
    modules = {path.relative_to(ROOT).as_posix() for path in python_files(ROOT / "lousho_ray")}
    page = {"lousho_ray/evals/reports/page.css", "lousho_ray/evals/reports/page.js"}
    assert shipped == modules | page | {"lousho_ray/py.typed"}
    assert {"lousho_ray/actors/worker.py", "lousho_ray/stores/sqlite.py"} <= shipped
    assert f"{info}licenses/LICENSE" in names


def test_the_installed_wheel_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = """
import asyncio, importlib, pkgutil, sys
import lousho_ray
for module in pkgutil.walk_packages(lousho_ray.__path__, "lousho_ray."):
    importlib.import_module(module.name)
for name, module in sys.modules.items():
    if name.partition(".")[0] in ("lousho_ray", "actors", "stores"):
        assert name.startswith("lousho_ray"), name
        assert module.__file__.startswith(sys.argv[1]), module.__file__
agent = lousho_ray.create_agent(provider=lousho_ray.MockProvider(["it works"]), runtime="local", store=lousho_ray.memory_store())
print(asyncio.run(agent.session().send("hello")).text)
"""
    # -S: the editable install of this environment is a .pth file, which only the site module reads.
    paths = os.pathsep.join([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    code = code.replace("sys.argv[1]", repr(str(installed)))
    done = run(code, "-S", cwd=tmp_path, PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (0, "it works\n"), done.stderr


def test_the_listed_packages_are_the_folders_on_disk() -> None:
    folders = {path.parent for path in python_files(ROOT / "lousho_ray")}
    found = sorted(folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders)
    assert PROJECT["tool"]["setuptools"]["packages"] == found
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_version_is_the_same_in_both_places() -> None:
    assert PROJECT["project"]["version"] == lousho_ray.__version__


@pytest.mark.parametrize("name", ["actors", "stores"])
def test_the_folders_at_the_top_cannot_be_imported_under_their_own_names(name: str) -> None:
    done = run(f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    assert f"ImportError: import lousho_ray.{name}, not {name}: two import names would mean two classes" in done.stderr


def test_importing_the_package_is_cheap_and_loads_no_client(tmp_path: Path) -> None:
    code = """
import sys, time
start = time.process_time()
import lousho_ray
print(time.process_time() - start, *sorted({name.partition(".")[0] for name in sys.modules}))
"""
    costs = []
    for _ in range(3):
        cost, *loaded = run(code, cwd=tmp_path).stdout.split()
        assert not set(LAZY) & set(loaded)
        costs.append(float(cost))
    assert min(costs) < IMPORT_CPU_S


def test_an_agent_in_one_process_runs_without_ray_and_without_a_client(tmp_path: Path) -> None:
    code = """
import sys
from lousho_ray import MockProvider, create_agent, create_rate_limiter, memory_store, tool
@tool
def now() -> str:
    "The time."
    return "noon"
child = create_agent(provider=MockProvider(), description="Helps.", runtime="local")
limiter = create_rate_limiter({"max_concurrent": 2}, name="shared")
agent = create_agent(
    provider=MockProvider(), tools=[now], subagents={"child": child}, rate_limit=limiter, store=memory_store(), runtime="local"
)
assert agent.session().send_sync("What does now say?").tool_calls
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = run(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not set(LAZY) & set(done.stdout.split())


def test_the_public_names_are_these_sorted_and_all_of_them_load() -> None:
    assert lousho_ray.__all__ == PUBLIC == sorted(PUBLIC)
    assert [name for name in PUBLIC if getattr(lousho_ray, name, None) is None] == []
    assert set(PUBLIC) <= set(dir(lousho_ray))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lousho_ray' has no attribute 'create_agents'"):
        _ = lousho_ray.create_agents


def first_constant(arguments: list[ast.expr], module: ast.Module) -> str | None:
    """The first argument of a call when it is a literal, also as the first item of a tuple of the module: `fn(*_CLIENT)`."""
    match arguments:
        case [ast.Constant(value=str(text)), *_]:
            return text
        case [ast.Starred(value=ast.Name(id=name)), *_]:
            for node in module.body:
                match node:
                    case ast.Assign(targets=[ast.Name(id=found)], value=ast.Tuple(elts=items)) if found == name:
                        return first_constant(items, module)
    return None


def imported(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Top-level modules that the files import, by name or through `import_client("name", ...)`, and the files that do."""
    found: dict[str, set[str]] = {}
    for path in paths:
        module = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(module):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_client", "importlib.import_module"):
                names = [first_constant(node.args, module) or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_only_the_actors_import_ray() -> None:
    files = imported(python_files(ROOT / "lousho_ray"))["ray"]
    assert files
    assert [name for name in files if not name.startswith("lousho_ray/actors/")] == []


def test_provider_clients_are_imported_by_providers_alone() -> None:
    found = imported(python_files(ROOT / "lousho_ray"))
    assert {name for client in ("openai", "anthropic") for name in found[client] if "/providers/" not in name} == set()


def distributions(names: Iterable[str]) -> set[str]:
    """The installed distributions that provide these top-level modules; an unknown module counts as its own."""
    # Many distributions have a part of `opentelemetry`; the SDK brings the API.
    known = {**packages_distributions(), "pydantic_core": ["pydantic"], "opentelemetry": ["opentelemetry-sdk"]}
    own = {*sys.stdlib_module_names, "__future__", "lousho_ray", ""}
    return {normal(known.get(name, [name])[0]) for name in names if name not in own}


def normal(requirement: str) -> str:
    """The normalised name of a requirement, without extras and versions."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]).lower()


def test_every_dependency_is_imported_and_every_import_is_a_dependency() -> None:
    project = PROJECT["project"]
    extras = (project["optional-dependencies"][name] for name in ("s3", "parquet", "otel"))
    declared = {normal(item) for item in itertools.chain(project["dependencies"], *extras)}
    plugin = ROOT / "lousho_ray/evals/pytest_plugin.py"  # only pytest loads it
    files = [path for path in python_files(ROOT / "lousho_ray") if path != plugin]
    assert distributions(imported(files)) == declared


def test_the_dev_extra_covers_what_tests_and_benchmarks_import() -> None:
    project = PROJECT["project"]
    declared = {normal(item) for item in (*project["dependencies"], *project["optional-dependencies"]["dev"])}
    local = {"tests", *(path.stem for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py"))}
    used = imported(path for folder in ("tests", "benchmarks", "examples") for path in python_files(ROOT / folder))
    assert distributions(used.keys() - local) - declared == set()
