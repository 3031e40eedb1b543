"""`define_eval`: what an eval is. A definition is checked, frozen data; eval files make them, a runner collects them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lousho_ray.agent import Agent
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.option_checks import check_positive_int
from lousho_ray.ports import LLMProvider
from lousho_ray.providers.wrapper import check_provider

JUDGE_SUFFIXES = (".judge.eval.py", "_judge_eval.py")
"""Files that call a model to grade; only `lousho eval --judge` runs them."""

_CLASSIC = ("input", "provider", "score", "tool_registry", "max_steps", "temperature", "max_tokens")


@dataclass(frozen=True, slots=True)
class Judge:
    """Who grades in `t.judge()`. Without `model` the provider's `default_model` is asked."""

    provider: LLMProvider
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Classic:
    """An eval that runs once and is scored by one function."""

    input: Any
    score: Callable[[Any], Any]
    threshold: float
    provider: LLMProvider | None = None
    tools: Any = None
    max_steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalDefinition:
    """One eval. `threshold` is the least share of passing cases, `timeout_ms` bounds one case, `file` is where it was defined."""

    name: str
    agent: Any = None
    test: Callable[..., Any] | None = None
    cases: Any = None
    tags: tuple[str, ...] = ()
    judge: Judge | None = None
    target: Any = None
    threshold: float = 1.0
    repeat: int = 1
    timeout_ms: float | None = None
    classic: Classic | None = None
    file: Path | None = None


@dataclass(slots=True)
class Collector:
    """What the eval file that is being loaded defines."""

    file: Path
    found: list[EvalDefinition] = field(default_factory=list)


_collector: ContextVar[Collector | None] = ContextVar("lousho_eval_collector", default=None)


@contextmanager
def collecting(file: Path) -> Iterator[list[EvalDefinition]]:
    """Takes the evals that are defined inside the block."""
    collector = Collector(file)
    token = _collector.set(collector)
    try:
        yield collector.found
    finally:
        _collector.reset(token)


def define_eval(
    *,
    name: str,
    agent: Any = None,
    test: Callable[..., Any] | None = None,
    cases: Any = None,
    tags: Sequence[str] = (),
    judge: Mapping[str, Any] | Judge | None = None,
    target: Any = None,
    threshold: float | None = None,
    repeat: int = 1,
    timeout_ms: float | None = None,
    **classic: Any,
) -> EvalDefinition:
    """Defines an eval; only in a file that `lousho eval` or pytest loads.

    Args:
        name: Names it in reports and cassettes; once in a run.
        agent: An agent, or a function that makes one: it is called at the first `t.send()` of each case, with the case when it
            takes an argument. A scripted agent that several cases share runs out of turns.
        test: `async test(t)` or `test(t, case)`.
        cases: A dataset, each item run on its own: a list, an iterable (also async), a `ray.data.Dataset`, or a path to JSON,
            JSONL, CSV or Parquet, relative to the file. An item is named by its `label`, else `name`, else `input`; a text names
            itself.
        tags: What `--tag` chooses by.
        judge: `{"provider", "model"}` for `t.judge()`.
        target: A `remote_target()` to run against in place of `agent`.
        threshold: With `cases` the least share of cases that pass, 0 to 1 (default 1.0). In the classic form the least score.
        repeat: How often each case is run.
        timeout_ms: Bounds one case; no limit by default.
        **classic: The classic form in place of `test`: `input`, `score` (a function of the result), and optionally `provider`,
            `tool_registry`, `max_steps`, `temperature`, `max_tokens`.

    Raises:
        LoushoError: `LOUSHO_EVALS_INVALID`: outside an eval runner, or a definition that cannot be run.
        ConfigurationError: `LOUSHO_CONFIG_MISSING_AGENT`: neither `agent` nor `target`; `LOUSHO_CONFIG_INVALID`: a wrong value.
    """
    collector = _collector.get()
    if collector is None:
        raise invalid("define_eval() works in eval files only: run them with `lousho eval`, or with pytest.")
    _check_name(name)
    _check_agent(name, agent, target)
    definition = EvalDefinition(
        name=name,
        agent=agent,
        test=_checked_test(name, test, classic),
        cases=cases,
        tags=_tags(tags),
        judge=_judge(judge),
        target=target,
        threshold=_share(threshold) if test is not None else 1.0,
        repeat=check_positive_int(repeat, "repeat"),
        timeout_ms=_timeout(timeout_ms),
        classic=_classic(name, classic, threshold) if test is None else None,
        file=collector.file,
    )
    collector.found.append(definition)
    return definition


def invalid(message: str) -> LoushoError:
    """The error of an eval that is used in the wrong way."""
    return LoushoError(message, code="LOUSHO_EVALS_INVALID")


@functools.lru_cache(maxsize=1024)
def takes_case(test: Callable[..., Any]) -> bool:
    """Whether a test function takes the case besides `t`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(test).parameters.values()
    return sum(parameter.kind in kinds for parameter in parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(f"The name of an eval must be a non-empty str; got {name!r}.", field="name")


def _check_agent(name: str, agent: Any, target: Any) -> None:
    if agent is None and target is None:
        raise ConfigurationError(
            f"Eval {name!r} has neither an agent nor a target.", code="LOUSHO_CONFIG_MISSING_AGENT", field="agent"
        )
    if agent is not None and not isinstance(agent, Agent) and not callable(agent):
        raise ConfigurationError(
            f"The agent of eval {name!r} must be an agent or a function that makes one, not {type(agent).__name__}.", field="agent"
        )


def _checked_test(name: str, test: Any, classic: Mapping[str, Any]) -> Any:
    unknown = next((key for key in classic if key not in _CLASSIC), None)
    if unknown is not None:
        from lousho_ray.option_checks import unknown_key

        known = (*inspect.signature(define_eval).parameters, *_CLASSIC)
        raise unknown_key(unknown, tuple(key for key in known if key != "classic"), "define_eval()")
    if test is not None and classic:
        raise ConfigurationError(
            f"Eval {name!r} has both test and {next(iter(classic))}, which belongs to the classic form; keep one of the forms.",
            code="LOUSHO_CONFIG_CONFLICTING_OPTIONS",
            field=next(iter(classic)),
        )
    if test is None and "score" not in classic:
        raise invalid(f"Eval {name!r} has nothing to run: pass test=, or input= and score=.")
    if test is not None and not callable(test):
        raise ConfigurationError(f"The test of eval {name!r} must be a function of t, not {type(test).__name__}.", field="test")
    return test


def _classic(name: str, given: Mapping[str, Any], threshold: float | None) -> Classic:
    if "input" not in given or not callable(given["score"]):
        raise invalid(f"Eval {name!r} needs input= and a function as score=.")
    settings = {key: given[key] for key in ("temperature", "max_tokens") if given.get(key) is not None}
    provider = given.get("provider")
    return Classic(
        input=given["input"],
        score=given["score"],
        threshold=1.0 if threshold is None else _number(threshold, "threshold"),
        provider=None if provider is None else check_provider(provider),
        tools=given.get("tool_registry"),
        max_steps=None if given.get("max_steps") is None else check_positive_int(given["max_steps"], "max_steps"),
        settings=settings,
    )


def _tags(tags: Any) -> tuple[str, ...]:
    if isinstance(tags, str) or not all(isinstance(tag, str) and tag.strip() for tag in tags):
        raise ConfigurationError(f"tags must be a list of non-empty texts, for example ['smoke']; got {tags!r}.", field="tags")
    return tuple(tags)


def _judge(judge: Any) -> Judge | None:
    if judge is None or isinstance(judge, Judge):
        return judge
    if not isinstance(judge, Mapping) or "provider" not in judge or set(judge) - {"provider", "model"}:
        raise ConfigurationError('judge must be {"provider": ..., "model": ...}; the model is optional.', field="judge")
    return Judge(check_provider(judge["provider"], "judge.provider"), judge.get("model"))


def _share(threshold: Any) -> float:
    share = 1.0 if threshold is None else _number(threshold, "threshold")
    if not 0 <= share <= 1:
        raise ConfigurationError(f"threshold is a share of cases, from 0 to 1; got {threshold!r}.", field="threshold")
    return share


def _timeout(timeout_ms: Any) -> float | None:
    if timeout_ms is not None and not _number(timeout_ms, "timeout_ms") > 0:
        raise ConfigurationError(f"timeout_ms must be a number of milliseconds above 0; got {timeout_ms!r}.", field="timeout_ms")
    return None if timeout_ms is None else float(timeout_ms)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{name} must be a number; got {value!r}.", field=name)
    return float(value)
