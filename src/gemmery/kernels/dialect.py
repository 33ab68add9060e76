"""Functions written for Triton, for use in Gluon kernels."""

import threading
import types
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

#: Gluon's language, and those parts of Triton's that it leaves out although its compiler knows them. Triton looks at
#: the name.
LANGUAGE = types.ModuleType(gl.__name__)
vars(LANGUAGE).update(vars(tl) | vars(gl))

#: Held while functions are copied: half a copy is of no use to another thread.
_lock = threading.RLock()


def value_of(x: Any) -> Any:
    """Returns the value of a constant, in the form for functions that write assembly."""
    return getattr(x, "value", x)


def in_gluon(function: Any) -> Any:
    """The same `@triton.jit` function with Gluon's language for its `tl`, and so for the functions that it calls.

    Gluon's kernels call Triton's functions, but a `tl.arange` there lacks a layout; `gl.arange` finds one by itself.
    The copy has the source of the original, by which Triton notices an edit. It is kept with the original. A constant
    of the module with the name `IN_GLUON` is true in it.
    """
    with _lock:
        if "_in_gluon" not in vars(function):
            _copy(function)
        return vars(function)["_in_gluon"]


def _copy(function: Any) -> None:
    body = function.fn
    names = dict(body.__globals__)
    copy = types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)
    for name in ("__annotations__", "__kwdefaults__", "__module__", "__qualname__", "__doc__"):
        setattr(copy, name, getattr(body, name))
    # Before the functions that it calls, which may call it.
    vars(function)["_in_gluon"] = gluon.jit(copy)
    for name in body.__code__.co_names:
        if names.get(name) is tl:
            names[name] = LANGUAGE
        elif name == "IN_GLUON":
            names[name] = tl.constexpr(True)
        elif type(names.get(name)) is JITFunction:
            names[name] = in_gluon(names[name])
