"""`ask_question`: the model asks a person, and the run goes on with the answer, even days later."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.attributes import ToolAnnotations
from lousho_ray.tools.tool import Tool, tool

ASK_QUESTION = "ask_question"


async def ask_question(
    ctx: ToolContext,
    question: Annotated[str, Field(description="One question, in full.", min_length=1)],
    options: Annotated[list[str] | None, Field(description="Answers to choose from.")] = None,
    allow_free_text: Annotated[bool, Field(description="Whether an answer besides the options is welcome.")] = True,
) -> dict[str, Any]:
    """Asks the user and waits for the answer. Use it when you cannot go on without a decision or a fact that only the user has."""
    answer = ctx.approval.note if ctx.approval is not None else None
    if not answer:
        raise _unanswered("There was no answer to the question.")
    chosen = option_index(answer, options or [])
    if chosen is not None:
        return {"answer": answer, "option": chosen}
    if options and not allow_free_text:
        raise _unanswered(f"The answer {answer!r} is none of the options. Ask again if you need one of them.")
    return {"answer": answer}


def option_index(answer: str, options: list[str]) -> int | None:
    """The place of the option that the answer names, from 0; letter case and surrounding blanks do not count."""
    wanted = answer.strip().casefold()
    return next((index for index, option in enumerate(options) if option.strip().casefold() == wanted), None)


def ask_question_tool() -> Tool[..., Any]:
    """The `ask_question` tool. Each call of it pauses the run until `agent.approvals.answer()`."""
    return tool(
        needs_approval=True,
        effect="read",
        metadata={"question": True},
        annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False),
    )(ask_question)


def _unanswered(text: str) -> ToolExecutionError:
    return ToolExecutionError(text, tool_name=ASK_QUESTION)
