"""The offline model of `research.py`: a policy that decides each reply from the tool results it has been given.

It knows nothing of the files but what the tools returned: change a file and the report changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lousho_ray import GenerateOptions, GenerateResult, Message, MockProvider, ToolCall, estimate_tokens
from lousho_ray.usage import ProviderUsage

USD_PER_TOKEN = 0.5e-6


def research_model(delay_ms: float = 0) -> MockProvider:
    """A mock provider that plays both the lead and its readers."""
    return MockProvider(policy=decide, delay_ms=delay_ms, default_model="mock-research")


def decide(request: GenerateOptions) -> GenerateResult:
    """One reply. Who is asked shows in the tools on offer: only the lead has `task`."""
    offered = {tool.name for tool in request.tools}
    reply = lead(request.messages) if "task" in offered else reader(request.messages)
    tokens_in, tokens_out = estimate_tokens(request.messages), estimate_tokens(reply if isinstance(reply, str) else str(reply))
    usage = ProviderUsage(tokens_in, tokens_out, cost_usd=(tokens_in + 3 * tokens_out) * USD_PER_TOKEN)
    if isinstance(reply, str):
        return GenerateResult(reply, usage=usage)
    return GenerateResult(tool_calls=tuple(reply), finish_reason="tool_calls", usage=usage)


def lead(messages: Sequence[Message]) -> str | list[ToolCall]:
    files = results(messages, "list_files")
    if not files:
        return [call("list", "list_files")]
    answers = results(messages, "task")
    if not answers:
        return [task(number, entry) for number, entry in enumerate(files[0], 1)]
    return report(files[0], answers)


def task(number: int, entry: dict) -> ToolCall:
    prompt = (
        f"Study the file {entry['path']} ({entry['lines']} lines): what is it for, what does it define, which parts matter most?"
    )
    return call(f"task{number}", "task", agent="reader", prompt=prompt, description=f"Study {entry['path']}")


def reader(messages: Sequence[Message]) -> str | list[ToolCall]:
    prompt = next(message.text for message in messages if message.role == "user")
    path, total = re.search(r"file (\S+) \((\d+) lines\)", prompt).groups()
    searches, pages = results(messages, "search_text"), results(messages, "read_file")
    if not searches:
        return [
            call("defs", "search_text", path=path, pattern=r"^(class|def|async def|#+) ?\w*"),
            call("imports", "search_text", path=path, pattern=r"^\s*(import|from) \w"),
            call("head", "read_file", path=path, lines=40),
        ]
    definitions, imports = searches[0], searches[1]
    if len(pages) == 1:
        start, length = largest(definitions, int(total))
        return [call("body", "read_file", path=path, start_line=start, lines=min(length, 120))]
    return findings(path, int(total), definitions, imports, pages)


def findings(path: str, total: int, definitions: list[str], imports: list[str], pages: list[str]) -> str:
    """The reader's answer, as facts that the lead can count."""
    start, length = largest(definitions, total)
    kinds = [line.split(": ", 1)[1] for line in definitions]
    classes = [name(kind) for kind in kinds if kind.startswith("class")]
    functions = [name(kind) for kind in kinds if "def " in kind]
    modules = sorted({re.split(r"[\s.,]+", line.split(": ", 1)[1].strip())[1] for line in imports})
    body = "\n".join(line.partition(": ")[2] for line in pages[1].splitlines())
    branches = len(re.findall(r"\b(?:if|elif|for|while|except)\b", body))
    facts = [
        f"{path}: {purpose(pages[0])}",
        f"- size: {total} lines, {len(classes)} classes, {len(functions)} top-level functions",
        f"- classes: {', '.join(classes) or 'none'}",
        f"- functions: {', '.join(functions[:12]) or 'none'}",
        f"- largest part: lines {start} to {start + length - 1}, {branches} branches in what was read of it",
        f"- imports: {', '.join(modules) or 'none'}",
    ]
    return "\n".join(facts)


def report(files: list[dict], answers: list[str]) -> str:
    """The lead's report, made of the readers' answers alone."""
    lines = sum(entry["lines"] for entry in files)
    sections, imported = [], {}
    for entry, answer in zip(files, answers, strict=True):
        text = answer["message"] if isinstance(answer, dict) else answer.split("\n\n[sub-agent")[0]
        title, _, facts = text.partition("\n")
        sections.append(f"## {entry['path']}\n\n{title.partition(': ')[2] or title}\n\n{facts}".rstrip())
        for module in re.findall(r"- imports: (.*)", text):
            for item in module.split(", "):
                imported.setdefault(item, []).append(entry["path"])
    common = sorted(((len(users), item) for item, users in imported.items() if item != "none" and len(users) > 1), reverse=True)[:8]
    shared = "\n".join(f"- `{item}` is imported by {count} of them" for count, item in common) or "- nothing"
    summary = f"{len(files)} files with {lines:,} lines were studied, one reader each."
    return "\n\n".join(["# Report", summary, *sections, f"## In common\n\n{shared}"])


def largest(definitions: list[str], total: int) -> tuple[int, int]:
    """Where the longest definition starts, and its length in lines."""
    starts = [int(line.split(":", 1)[0]) for line in definitions] or [1]
    lengths = [after - start for start, after in zip(starts, [*starts[1:], total + 1], strict=True)]
    length = max(lengths)
    return starts[lengths.index(length)], max(1, length)


def purpose(page: str) -> str:
    """The first sentence of the file's own words."""
    text = " ".join(line.partition(": ")[2].strip() for line in page.splitlines())
    quoted = re.search(r'"""(.+?)(?:"""|$)', text)
    words = (quoted.group(1) if quoted else text).strip(' #"')
    return re.split(r"(?<=[.!?])\s", words)[0][:160] or "no description"


def name(line: str) -> str:
    return re.sub(r"^(?:class|async def|def) ", "", line).split("(")[0].rstrip(":")


def call(id: str, tool: str, **arguments: object) -> ToolCall:
    return ToolCall(id, tool, json.dumps(arguments))


def results(messages: Sequence[Message], tool: str) -> list:
    """What the calls of a tool returned, in order."""
    return [json.loads(message.text) for message in messages if message.role == "tool" and message.tool_name == tool]
