"""The one seam through which the model calls of a run can be watched, limited, recorded or replayed.

Evals use it so that eval files need no change. It is context-local: what runs beside it does not see it, and with nothing installed
it costs one look at a context variable a run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeAlias

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import LLMProvider
from lousho_ray.providers.wrapper import check_provider

Interceptor: TypeAlias = Callable[[LLMProvider], LLMProvider]

_interceptor: ContextVar[Interceptor | None] = ContextVar("lousho_provider_interceptor", default=None)


def set_provider_interceptor(fn: Interceptor) -> Callable[[], None]:
    """Puts `fn` between the runs of this context (and of the tasks started in it) and their providers.

    Covers plain and streamed calls, sub-agents in this process, approval resumes and the side calls of hooks.

    Args:
        fn: Gets a run's provider, with its retries and fallbacks, and returns the one to call. It must return the same wrapper for
            the same provider, and leave its own wrappers as they are.

    Returns:
        A function that takes it away again and puts back what was there before; to be called in the same context.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: `fn` cannot be called.
    """
    if not callable(fn):
        raise ConfigurationError(f"set_provider_interceptor() takes a function of a provider, not {type(fn).__name__}.", field="fn")
    token = _interceptor.set(fn)
    return lambda: _interceptor.reset(token)


def intercepted(provider: LLMProvider) -> LLMProvider:
    """The provider to call in place of `provider`: itself, when nothing is installed."""
    fn = _interceptor.get()
    return provider if fn is None else check_provider(fn(provider), "the provider returned by the interceptor")


def replays(provider: LLMProvider) -> bool:
    """Whether recorded answers come from it: they need no rate limit."""
    return getattr(provider, "replays", False) is True
