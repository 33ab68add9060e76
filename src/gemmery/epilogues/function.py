"""A function as an epilogue that is created once and used often, and as the object that a product holds for its
gradient.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from ..memo import keep
from .device_function import device_function, is_device_function
from .identity import Captured, capture

P = ParamSpec("P")
R = TypeVar("R")

_numbers = itertools.count()
#: Epilogues, and the objects that products hold for them, by the names that operators use.
_by_name: weakref.WeakValueDictionary[str, Epilogue[Any, Any] | Held] = weakref.WeakValueDictionary()
#: The objects that products hold for functions that are recognized again.
_held: dict[Any, Held] = {}


class Epilogue(Generic[P, R]):
    """A torch function of a product that runs inside the kernel that computes it.

    It wraps a function `f(product, *args)`; calling it calls the function. Products accept the plain function too. In
    code under `torch.compile`, they accept it if it has no closure and no defaults, which the compiler does not track.

    Attributes:
        name: identifies it in this process.

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
        self._captured: Captured | None = None
        #: The objects that compiled code holds, which only has names.
        self._compiled: set[Held] = set()
        self.name = f"{getattr(function, '__name__', 'epilogue')}-{next(_numbers)}"
        _by_name[self.name] = self

    @property
    def captured(self) -> Captured:
        """The function with the current values of its closure and its globals."""
        known = self._captured
        if known is None or not known.is_unchanged():
            known = self._captured = capture(self.__gemmery_epilogue__)
        return known

    @property
    def known(self) -> Captured | None:
        """The same, if nothing has changed since the last call."""
        known = self._captured
        return known if known is not None and known.is_unchanged() else None

    def for_compiled_code(self) -> Held:
        """Hold the function with its current values, for compiled code to run."""
        held = hold(self.captured, self)
        self._compiled.add(held)
        return held

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself, in torch."""
        return self.__gemmery_epilogue__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"gemmery.epilogue({getattr(self.__gemmery_epilogue__, '__qualname__', self.__gemmery_epilogue__)})"

    def __reduce__(self) -> Any:
        return Epilogue, (self.__gemmery_epilogue__,)


class Held:
    """A function as it was when a product ran with it: operators know it by its name, and gradients run it again.

    Attributes:
        name: by which operators know it while it lives, in this process.
        captured: the function and the values that it took from outside; no tensors, which operators are given.
        many: whether it returned a tuple when it ran last; for operators, which return lists.
        origin: the epilogue whose compiled code it is for.
    """

    def __init__(self, captured: Captured, origin: Epilogue[Any, Any] | None = None) -> None:
        self.captured = self.known = captured.without_tensors()
        self.many = False
        self.origin = None if origin is None else weakref.ref(origin)
        self.name = f"held-{next(_numbers)}"
        _by_name[self.name] = self

    def check_unchanged(self) -> None:
        """RuntimeError if a number of the function has changed since it was compiled."""
        origin = None if self.origin is None else self.origin()
        if origin is not None and self.captured.key is not None and origin.captured.key != self.captured.key:
            raise RuntimeError(
                f"gemmery: {origin!r} captures other values than when it was compiled; pass them through args, or "
                "compile again (torch.compiler.reset())"
            )


def hold(captured: Captured, origin: Epilogue[Any, Any] | None = None) -> Held:
    """Holds a function for operators and gradients; functions that do the same are held once.

    Args:
        origin: the epilogue, if it is for compiled code.
    """
    if captured.key is None:
        return Held(captured, origin)
    key = captured.key, None if origin is None else origin.name
    found = _held.get(key)
    return keep(_held, key, Held(captured, origin)) if found is None else found


#: Epilogues of plain functions, by the functions' keys.
_memo: dict[Any, Epilogue[Any, Any]] = {}
#: Types of values that a function may take from outside and still be recognized when it is created again.
_SIMPLE = (int, float, bool, str, type(None))
#: The attribute in which a function that captures other objects keeps its Epilogue, so that nothing else holds these.
_OWN = "__gemmery_memo__"


def memoised(function: Any) -> Any:
    """The Epilogue of a plain function, the same for a function that is created again from the same code and the same
    values.

    Returns a function unchanged if it can't be recognized that quickly.
    """
    kind = type(function)
    if (
        kind is types.FunctionType
        and function.__closure__ is None
        and function.__defaults__ is None
        and function.__kwdefaults__ is None
    ):
        # The usual cases are here, which saves a call in every product.
        key: Any = (function.__code__, id(function.__globals__))
    elif kind is types.BuiltinFunctionType and isinstance(function.__self__, types.ModuleType | type | None):
        key = function
    else:
        key = _key(function)
    if key is not None:
        found = _memo.get(key)
        return keep(_memo, key, Epilogue(_private(function))) if found is None else found
    if kind is not types.FunctionType:
        return function
    own = function.__dict__
    if _OWN not in own:
        own[_OWN] = Epilogue(function)
    return own[_OWN]


def _key(function: Any) -> Any:
    """A key of a function's values; None if one of them is not simple."""
    if isinstance(function, functools.partial):
        inner, names = memoised(function.func), tuple(function.keywords)
        if not isinstance(inner, Epilogue):
            return None
        values = [*function.args, *function.keywords.values()]
        return _with_values(("partial", inner.name, len(function.args), names), values)
    if type(function) is not types.FunctionType:
        return None
    given, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None  # a cell is empty
    key = (function.__code__, id(function.__globals__), len(given), tuple(named))
    return _with_values(key, [*given, *named.values(), *cells])


def _with_values(key: tuple[Any, ...], values: list[Any]) -> Any:
    """A key with values; None if one of them is not simple."""
    if not all([type(x) in _SIMPLE for x in values]):
        return None
    # Zeros are distinguished by their sign, and numbers by their types.
    return *key, *[(type(x), x or str(x)) for x in values]


def _private(function: Any) -> Any:
    """A function with defaults and a closure that nothing else can change."""
    if isinstance(function, functools.partial):
        return functools.partial(function.func, *function.args, **function.keywords)
    if type(function) is not types.FunctionType or not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__
    ):
        return function
    cells = tuple([types.CellType(cell.cell_contents) for cell in function.__closure__ or ()])
    again = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells or None
    )
    again.__kwdefaults__ = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    again.__qualname__, again.__module__ = function.__qualname__, function.__module__
    again.__dict__.update(function.__dict__)
    return again


def captured_of(given: Any) -> tuple[Callable[..., Any], Captured]:
    """The torch function of an epilogue argument, and its present state.

    Raises:
        TypeError: it is not a function.
    """
    if isinstance(given, Held):
        return given.captured.rebuild(()), given.captured
    if isinstance(given, Epilogue):
        return given.__gemmery_epilogue__, given.captured
    function = function_of(given)
    return function, capture(function)


def function_of(given: Any) -> Any:
    """The torch function of an epilogue argument: of an Epilogue, or of device code."""
    function = device_function(given) if is_device_function(given) else given
    return getattr(function, "__gemmery_epilogue__", function)


def named(name: str) -> Any:
    """The Epilogue of a name, or the object that is held for it.

    Raises:
        RuntimeError: it was deleted, because only compiled code held it.
    """
    found = _by_name.get(name)
    if found is None:
        raise RuntimeError(
            f"gemmery: the epilogue {name} was deleted; keep the result of gemmery.epilogue alive as long as code "
            "that was compiled with it runs"
        )
    return found


def epilogue(function: Callable[P, R]) -> Epilogue[P, R]:
    """Wrap a function as an epilogue; see `Epilogue`. Can be used as a decorator."""
    return Epilogue(function)
