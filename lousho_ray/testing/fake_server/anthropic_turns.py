"""The rules of Anthropic Messages on the order of turns: alternation, calls with results, and thinking."""

from __future__ import annotations

from typing import Any

from lousho_ray.testing.fake_server.rule import Checked, broken, need, unique

_THINKING = ("thinking", "redacted_thinking")


def check_alternation(checked: Checked) -> None:
    """The first message is the user's, and the roles alternate."""
    expected = "user"
    for index, message in enumerate(checked.body["messages"]):
        need(message["role"] == expected, "alternation", f'messages.{index}: roles must alternate between "user" and "assistant"')
        expected = "assistant" if expected == "user" else "user"


def check_pairs(checked: Checked) -> None:
    """All results of a turn are in the one user message after it, first in it, each exactly once."""
    open_ids: list[str] = []
    for index, message in enumerate(checked.body["messages"]):
        where = f"messages.{index}"
        results = [block["tool_use_id"] for block in _blocks(message) if block["type"] == "tool_result"]
        if message["role"] == "user":
            _check_results(results, open_ids, where)
            _check_results_first(message, where)
        open_ids = [block["id"] for block in _blocks(message) if block["type"] == "tool_use"]
        unique(open_ids, "call-id-unique", f"{where}: `tool_use` ids")
    need(not open_ids, "call-unanswered", f"`tool_use` ids without `tool_result` blocks at the end: {', '.join(open_ids)}")


def _check_results(results: list[str], open_ids: list[str], where: str) -> None:
    stray = [call_id for call_id in results if call_id not in open_ids]
    need(not stray, "orphan-result", f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {', '.join(stray)}")
    twice = next((call_id for call_id in results if results.count(call_id) > 1), None)
    need(twice is None, "call-answered-twice", f"{where}: each tool_use must have a single result. Found multiple for id: {twice}")
    missing = [call_id for call_id in open_ids if call_id not in results]
    need(
        not missing,
        "call-unanswered",
        f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(missing)}",
    )


def _check_results_first(message: dict[str, Any], where: str) -> None:
    kinds = [block["type"] == "tool_result" for block in _blocks(message)]
    need(
        kinds == sorted(kinds, reverse=True), "results-first", f"{where}: `tool_result` blocks must come first in the user message"
    )


def check_trailing_space(checked: Checked) -> None:
    """An answer that is given a beginning may not end with white space."""
    last = checked.body["messages"][-1]
    if last["role"] == "assistant":
        texts = [last["content"]] if isinstance(last["content"], str) else [block.get("text", "") for block in last["content"][-1:]]
        ends_clean = texts[-1] == texts[-1].rstrip()
        need(ends_clean, "trailing-space", "messages: final assistant content cannot end with trailing whitespace")


def check_thinking_blocks(checked: Checked) -> None:
    """Thinking is sent back unchanged, with a signature that this server issued, and stands first in its turn."""
    for index, message in enumerate(checked.body["messages"]):
        blocks = _blocks(message)
        thoughts = [block for block in blocks if block["type"] in _THINKING]
        for block in thoughts:
            _check_genuine(block, f"messages.{index}", checked)
        first = not thoughts or blocks[0]["type"] in _THINKING
        need(first, "thinking-first", f"messages.{index}: thinking blocks must come first in an assistant message")


def _check_genuine(block: dict[str, Any], where: str, checked: Checked) -> None:
    if block["type"] == "redacted_thinking":
        need(
            block["data"] in checked.issued.redacted, "thinking-signature", f"{where}: Invalid `data` in `redacted_thinking` block"
        )
        return
    signatures = checked.issued.signatures
    need(block["signature"] in signatures, "thinking-signature", f"{where}: Invalid `signature` in `thinking` block")
    text = signatures[block["signature"]]
    unchanged = text is None or text == block["thinking"]
    need(
        unchanged,
        "thinking-modified",
        f"{where}: `thinking` blocks cannot be modified; they must remain as they were in the response",
    )


def check_thinking_first(checked: Checked) -> None:
    """With thinking on, the turn that is being continued (by results, or as a beginning) starts with its thinking."""
    if checked.body.get("thinking", {}).get("type") not in ("enabled", "adaptive"):
        return
    messages = checked.body["messages"]
    last = messages[-1]
    continued = last if last["role"] == "assistant" else messages[-2] if len(messages) > 1 and _has_results(last) else None
    if continued is not None:
        first = next(iter(_blocks(continued)), {"type": "text"})["type"]
        if first not in _THINKING:
            broken(
                "thinking-first",
                f"Expected `thinking` or `redacted_thinking`, but found `{first}` first in the final assistant message",
            )


def _has_results(message: dict[str, Any]) -> bool:
    return any(block["type"] == "tool_result" for block in _blocks(message))


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []
