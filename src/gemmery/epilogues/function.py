"""A function as an epilogue that is made once and used often."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from .device_function import device_function, is_device_function
from .identity import Outside, outside

P = ParamSpec("P")
R = TypeVar("R")

_numbers = itertools.count()
#: Epilogues by the names under which operators know them.
_by_name: weakref.WeakValueDictionary[str, Epilogue[Any, Any]] = weakref.WeakValueDictionary()


class Epilogue(Generic[P, R]):
    """A torch function over a product that runs inside the kernel that makes it.

    Made from a function `f(product, *args)`; calling it calls the function. Products take the function as it is, too;
    in code under `torch.compile` they take only this, which is one operator there.

    Attributes:
        name: by which operators know it while it lives, in this process.

    Example:
        >>> import torch, gemmery
        >>> relu_squared = gemmery.epilogue(lambda acc: torch.relu(acc) ** 2)
        >>> gemmery.matmul(torch.ones(2, 3), torch.ones(3, 4), epilogue=relu_squared)
        tensor([[9., 9., 9., 9.],
                [9., 9., 9., 9.]])
    """

    def __init__(self, function: Callable[P, R]) -> None:
        function = function_of(function)
        if not callable(function):
            raise TypeError(f"epilogue: given a {type(function).__name__}; it must be a function")
        #: The function; where `identity` and products find it.
        self.__gemmery_epilogue__: Callable[P, R] = function
        functools.update_wrapper(self, function, updated=())
        #: Whether it returned a tuple when it ran last; for operators, which return lists.
        self.many = False
        #: The tensors that it takes from outside, and what else there is outside; see `remember`.
        self.tensors: tuple[Tensor, ...] = ()
        self.outside: Outside | None = None
        self.name = f"{getattr(function, '__name__', 'epilogue')}-{next(_numbers)}"
        _by_name[self.name] = self

    def remember(self, tensors: tuple[Tensor, ...]) -> None:
        """Note what the function takes from outside now, its tensors among it."""
        self.tensors, self.outside = tensors, outside(self.__gemmery_epilogue__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself, in torch."""
        return self.__gemmery_epilogue__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"gemmery.epilogue({getattr(self.__gemmery_epilogue__, '__qualname__', self.__gemmery_epilogue__)})"

    def __reduce__(self) -> Any:
        return Epilogue, (self.__gemmery_epilogue__,)


def function_of(given: Any) -> Any:
    """The torch function of what a product may be given as one: of an Epilogue, or of device code."""
    function = device_function(given) if is_device_function(given) else given
    return getattr(function, "__gemmery_epilogue__", function)


def named(name: str) -> Epilogue[Any, Any]:
    """The epilogue that operators know by a name.

    Raises:
        RuntimeError: there is none any more: nothing but compiled code held it.
    """
    found = _by_name.get(name)
    if found is None:
        raise RuntimeError(
            f"gemmery: the epilogue {name} is gone; keep what gemmery.epilogue returned as long as code that was "
            f"compiled with it runs"
        )
    return found


def epilogue(function: Callable[P, R]) -> Epilogue[P, R]:
    """A function as an epilogue; see `Epilogue`. Can be used as a decorator."""
    return Epilogue(function)
