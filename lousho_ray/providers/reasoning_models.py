"""Which models take a reasoning option, by family. Sent to another model it would be an error there."""

from __future__ import annotations

import re

from lousho_ray.ports import Reasoning

_OPENAI = re.compile(r"o\d|gpt-(?:[5-9]|\d\d)")
_OPENAI_NOT = re.compile(r"o1-mini|o1-preview|gpt-.*-chat")
_CLAUDE = re.compile(r"claude-3-7-|claude-(?:sonnet|opus|haiku)-(?:[4-9]|\d\d)")
_OTHERS = re.compile(r"deepseek-r1|gemini-(?:2-[5-9]|[3-9])|grok-(?:[3-9]|\d\d)|qwen3")


def openai_reasons(model: str) -> bool:
    """OpenAI's `o` series except `o1-mini` and `o1-preview`, and `gpt-5` and later except `-chat` models."""
    name = model.lower()
    return bool(_OPENAI.match(name)) and not _OPENAI_NOT.match(name)


def claude_reasons(model: str) -> bool:
    """Claude 3.7, and Sonnet, Opus and Haiku from 4 on."""
    return bool(_CLAUDE.match(model.lower().replace(".", "-")))


def openrouter_reasons(model: str) -> bool:
    """The families above under any vendor, and the other reasoning families that OpenRouter serves."""
    name = model.lower()
    if name.endswith(":thinking"):
        return True
    bare = name.rsplit("/", 1)[-1]
    return openai_reasons(bare) or claude_reasons(bare) or bool(_OTHERS.match(bare.replace(".", "-")))


def wanted(reasoning: Reasoning | None, takes_it: bool) -> Reasoning | None:
    """The reasoning option to send, or `None`: not asked for, or not for this model."""
    if reasoning is None or reasoning.effort == "none" or not (takes_it or reasoning.force):
        return None
    return reasoning
