"""Evals: regression tests for what agents do. `lousho eval` and pytest run them; results can be trusted, resumed and compared."""

from lousho_ray.evals.checks import Checked, at_least, at_most, equals, includes, matches
from lousho_ray.evals.context import EvalContext
from lousho_ray.evals.definition import EvalDefinition, Judge, define_eval
from lousho_ray.evals.judges import llm_critique, llm_judge
from lousho_ray.evals.remote import remote_target
from lousho_ray.evals.scorers import budget, exact_match, tool_call_order
from lousho_ray.providers.interception import set_provider_interceptor

__all__ = [
    "Checked",
    "EvalContext",
    "EvalDefinition",
    "Judge",
    "at_least",
    "at_most",
    "budget",
    "define_eval",
    "equals",
    "exact_match",
    "includes",
    "llm_critique",
    "llm_judge",
    "matches",
    "remote_target",
    "set_provider_interceptor",
    "tool_call_order",
]
