"""The shell tool over a workspace."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.attributes import NeedsApproval, ToolAnnotations
from lousho_ray.tools.results import to_json
from lousho_ray.tools.tool import Tool, tool
from lousho_ray.tools.workspace.command_rules import CommandPattern, CommandRules
from lousho_ray.tools.workspace.shell import ShellOutput, ShellProvider, command_env

MAX_RESULT_CHARS = 50_000
"""The most characters of one result's JSON, both streams together."""

_MARGIN_CHARS = 300
"""Room for what is not of the streams: the other keys, and the marks of what was left out."""


@dataclass(frozen=True, slots=True)
class ShellTool:
    """What the shell tool runs."""

    shell: ShellProvider
    rules: CommandRules
    needs_approval: NeedsApproval
    default_timeout_ms: float
    max_timeout_ms: float
    max_output_chars: int
    cwd: str | None
    env: Mapping[str, str]
    inherit_env: tuple[str, ...] | bool

    async def run(
        self,
        command: Annotated[str, Field(min_length=1, description="The command line.")],
        ctx: ToolContext,
        timeout_ms: Annotated[float | None, Field(gt=0, description="How long it may take, in milliseconds.")] = None,
    ) -> dict[str, Any]:
        self.rules.check(command)
        limit_ms = min(timeout_ms or self.default_timeout_ms, self.max_timeout_ms)
        output = await self.shell.exec(
            command,
            cwd=self.cwd,
            env=command_env(self.env, self.inherit_env),
            timeout_ms=limit_ms,
            max_output_chars=self.max_output_chars,
            abort=ctx.abort_signal,
        )
        return _fit(_result(output, limit_ms))

    async def gate(self, arguments: Any, ctx: Any) -> Any:
        """Refuses a command before anybody is asked about it; else the tool's own `needs_approval`."""
        self.rules.check(arguments["command"])
        if not callable(self.needs_approval):
            return self.needs_approval
        takes_context = len(inspect.signature(self.needs_approval).parameters) > 1
        asked = self.needs_approval(arguments, ctx) if takes_context else self.needs_approval(arguments)
        return await asked if inspect.isawaitable(asked) else asked


def _result(output: ShellOutput, limit_ms: float) -> dict[str, Any]:
    result: dict[str, Any] = {"exitCode": output.exit_code, "stdout": output.stdout, "stderr": output.stderr}
    if output.timed_out:
        result |= {"timedOut": True, "note": f"Killed after {limit_ms:g} ms, with everything it had started."}
    if output.aborted:
        result |= {"aborted": True, "note": "Killed because the run was stopped."}
    return result


def _fit(result: dict[str, Any]) -> dict[str, Any]:
    """Shortens the streams until the JSON keeps to `MAX_RESULT_CHARS`: cut later, the result would be no JSON.

    Counted in JSON, where a control character takes six characters. Each stream may have half of the room at least.
    """
    while (excess := len(to_json(result)) - MAX_RESULT_CHARS) > 0:
        sizes = {key: len(to_json(result[key])) for key in ("stdout", "stderr")}
        key = max(sizes, key=sizes.__getitem__)
        text, wanted = result[key], max(sizes[key] - excess, MAX_RESULT_CHARS // 2) - _MARGIN_CHARS
        keep = len(text) * wanted // sizes[key]
        head = keep * 6 // 10
        result = {**result, key: f"{text[:head]}\n[... left out ...]\n{text[len(text) - (keep - head) :]}"}
    return result


def create_shell_tool(
    shell: ShellProvider,
    *,
    name: str = "shell",
    needs_approval: NeedsApproval = True,
    allow: Iterable[CommandPattern] | None = None,
    deny: Iterable[CommandPattern] = (),
    default_timeout_ms: float = 120_000,
    max_timeout_ms: float = 600_000,
    max_output_chars: int = 30_000,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: Iterable[str] | bool = (),
) -> Tool[..., Any]:
    """A tool that runs commands: `{command, timeout_ms?}` in, `{exitCode, stdout, stderr}` out, plus `timedOut` or `aborted`.

    Args:
        shell: Where commands run, such as `LocalWorkspace(root)`.
        name: What the model calls the tool.
        needs_approval: `True` by default: a person sees each command first.
        allow: Patterns of commands that may run; without it all may. A plain string also admits every flag behind it, flags that
            write files included: prefer `exact("...")`. No pattern of strings admits `;`, `&`, `|`, redirections and the like.
        deny: Patterns of commands that never run. Neither list can be overridden by an approval.
        default_timeout_ms: How long a command may take that asks for nothing else.
        max_timeout_ms: What larger requests are lowered to.
        max_output_chars: What is kept of each stream, its beginning and its end.
        cwd: The directory of the workspace in which commands run.
        env: Variables every command gets.
        inherit_env: Names of variables copied from this process besides `PATH`, `HOME`, `LANG` and the like; `True` = all.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a bad pattern or limit.
    """
    for option, value in (
        ("default_timeout_ms", default_timeout_ms),
        ("max_timeout_ms", max_timeout_ms),
        ("max_output_chars", max_output_chars),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigurationError(f"`{option}` is {value!r}; it is a number above 0.", field=option)
    runner = ShellTool(
        shell,
        CommandRules.of(allow, deny),
        needs_approval,
        default_timeout_ms,
        max_timeout_ms,
        int(max_output_chars),
        cwd,
        dict(env or {}),
        inherit_env if isinstance(inherit_env, bool) else tuple(inherit_env),
    )
    return tool(
        name=name,
        description=(
            f"Runs a command line with {shell.shell_description} and returns exit code, stdout and stderr. "
            "There is no terminal and no input; what is left in the background is killed when the command ends."
        ),
        needs_approval=runner.gate,
        annotations=ToolAnnotations(read_only_hint=False, open_world_hint=True),
    )(runner.run)
