"""What is made when it is first asked for, and is then one and the same for everybody.

`functools.cache` and `cached_property` let threads that ask at the same moment each make their own. Where that would be two
runtimes or two places for pauses, what one of the threads put into the lost one could not be found again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, Self, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

_MAKING = threading.RLock()


def made_once(make: Callable[P, R]) -> Callable[P, R]:
    """A function that is called once for each of its arguments, which are positional."""
    made: dict[tuple[Hashable, ...], R] = {}

    @functools.wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> R:
        if args not in made:
            with _MAKING:
                if args not in made:
                    made[args] = make(*args, **kwargs)
        return made[args]

    return get


class MadeOnce(functools.cached_property[R]):
    """A property of an object that is made once."""

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> R: ...

    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Self | R:
        with _MAKING:
            return super().__get__(instance, owner)
