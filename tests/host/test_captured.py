"""What an epilogue takes from outside: which values make it another function, and that it can be built again as it was."""

import enum
import functools
import sys
import types
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery.epilogues.function import hold
from gemmery.epilogues.identity import capture
from gemmery.epilogues.reads import reads

X = torch.tensor([-1.5, 0.25, 2.0])


class Holder:
    """An object with the attributes that it is given."""

    def __init__(self, **values):
        self.__dict__.update(values)


def module(name, **values):
    made = types.ModuleType(name)
    made.__dict__.update(values)
    return made


PACKAGE = module("package", config=module("package.config", SCALE=2.0, Nested=type("Nested", (), {"k": 2.0})))
FACTOR = 2.0


class Settings:
    class Inner:
        slope = 2.0

    @staticmethod
    def scaled(x):
        return x * Settings.Inner.slope


Pair = namedtuple("Pair", "scale shift")


def deep(acc):
    return acc * PACKAGE.config.SCALE


def deeper(acc):
    return acc * PACKAGE.config.Nested.k


def nested_class(acc):
    return acc * Settings.Inner.slope


def static_method(acc):
    return Settings.scaled(acc)


def by_global(acc):
    return acc * FACTOR


def in_a_comprehension(acc):
    return sum([acc * PACKAGE.config.SCALE for _ in range(2)])


def in_an_inner_function(acc):
    def inner(x):
        return x * PACKAGE.config.SCALE

    return inner(acc)


def own(acc):
    return acc * own.k


own.k = 2.0


def by_keyword(acc, *, k=2.0):
    return acc * k


def missing(acc):
    return acc * NOT_YET  # noqa: F821


def nothing(owner, name):
    return lambda value: setattr(owner, name, value)


#: Functions of a value that is 2.0 at first, with what changes it.
CHANGED = {
    "attribute of a module's module": (deep, nothing(PACKAGE.config, "SCALE")),
    "attribute of a class in it": (deeper, nothing(PACKAGE.config.Nested, "k")),
    "attribute of a class in a class": (nested_class, nothing(Settings.Inner, "slope")),
    "attribute that a static method reads": (static_method, nothing(Settings.Inner, "slope")),
    "global": (by_global, functools.partial(globals().__setitem__, "FACTOR")),
    "within a comprehension": (in_a_comprehension, nothing(PACKAGE.config, "SCALE")),
    "within an inner function": (in_an_inner_function, nothing(PACKAGE.config, "SCALE")),
    "the function's own attribute": (own, nothing(own, "k")),
    "a default by name": (by_keyword, functools.partial(by_keyword.__kwdefaults__.__setitem__, "k")),
    "a function that calls it": (lambda acc: deep(acc) + 1, nothing(PACKAGE.config, "SCALE")),
    "a partial": (functools.partial(lambda f, acc: f(acc), deep), nothing(PACKAGE.config, "SCALE")),
    "a composition": (
        gemmery.epilogues.compose(torch.relu, deep),
        nothing(PACKAGE.config, "SCALE"),
    ),
}


@pytest.mark.parametrize(("function", "change"), CHANGED.values(), ids=CHANGED)
def test_a_value_is_part_of_the_function(function, change):
    change(2.0)
    before = capture(function)
    assert before.key is not None
    assert before.key == capture(function).key
    assert before.is_unchanged()
    want = function(X)
    try:
        change(3.0)
        assert not before.is_unchanged()
        assert capture(function).key != before.key
        # As it was, whatever has become of the value.
        assert torch.equal(before.rebuild(before.tensors)(X), want)
        assert not torch.equal(function(X), want)
    finally:
        change(2.0)


def closure(value):
    return lambda acc: acc * value.k


#: Functions that use an object in a way that does not tell what of it they use.
OPAQUE = {
    "an object": closure(Holder(k=2.0)),
    "a class by getattr": lambda acc: acc * getattr(Settings.Inner, "slope"),  # noqa: B009
    "a module that is passed on": lambda acc: (lambda m: acc * m.config.SCALE)(PACKAGE),
    "a class in a tuple": (lambda cs: lambda acc: acc * cs[0].slope)((Settings.Inner,)),
    "a class that is called": lambda acc: acc * Holder(k=2.0).k,
    "a list": (lambda values: lambda acc: acc * values[0])([2.0]),
    "a bound method": (lambda method: lambda acc: acc * method("k"))(Holder(k=2.0).__dict__.get),
    "an import": lambda acc: __import__("math").pi * acc,
    "the state of torch": lambda acc: acc * 2 if torch.is_grad_enabled() else acc,
    "globals()": lambda acc: acc * globals()["FACTOR"],
    "an object by a partial": functools.partial(lambda h, acc: acc * h.k, Holder(k=2.0)),
    "a subclass of str": (lambda s: lambda acc: acc * len(s))(type("Name", (str,), {})("x")),
    "a subclass of float": (lambda s: lambda acc: acc * s.real)(type("Number", (float,), {})(2.0)),
    "a module of torch": torch.nn.GELU(),
    "a member of an enumeration": (lambda e: lambda acc: acc * e.value)(enum.Enum("E", "A B").A),
}


def imports(acc):
    from gemmery import epilogues

    return epilogues.relu(acc)


def counts(acc):
    global FACTOR
    FACTOR = FACTOR + 0.0
    return acc * FACTOR


OPAQUE |= {"an import inside": imports, "a global that it sets": counts}


@pytest.mark.parametrize("function", OPAQUE.values(), ids=OPAQUE)
def test_what_is_not_fully_known_is_no_key(function):
    found = capture(function)
    assert found.key is None
    assert not found.is_unchanged()
    assert torch.equal(found.rebuild(found.tensors)(X), function(X))


def shadowed(acc):
    return F.relu(acc)


def test_a_patched_function_of_a_library_is_another(monkeypatch):
    before = capture(shadowed)
    monkeypatch.setattr(F, "relu", lambda x: x * 5)
    assert capture(shadowed).key != before.key
    assert not before.is_unchanged()
    assert torch.equal(before.rebuild(())(X), X.relu())


def test_values_that_look_alike_are_told_apart():
    one, other = Pair(2.0, 3.0), namedtuple("Other", "shift scale")(2.0, 3.0)
    scaled = lambda pair: lambda acc: acc * pair.scale  # noqa: E731
    assert capture(scaled(one)).key != capture(scaled(other)).key
    assert capture(scaled(one)).key == capture(scaled(Pair(2.0, 5.0))).key  # its shift is not read
    times = lambda x: lambda acc: acc * x  # noqa: E731
    values = [
        2,
        2.0,
        True,
        1,
        0.0,
        -0.0,
        np.float64(2.0),
        np.float32(2.0),
        2j,
        (2.0,),
        torch.Size((2,)),
        (2,),
    ]
    keys = [capture(times(x)).key for x in values]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_a_name_that_is_assigned_later_is_seen():
    before = capture(missing)
    sys.modules[__name__].NOT_YET = 2.0
    try:
        assert not before.is_unchanged()
        assert capture(missing).key != before.key
        with pytest.raises(NameError):
            before.rebuild(())(X)
    finally:
        del sys.modules[__name__].NOT_YET


def recursive(acc, n=2):
    return acc if n == 0 else recursive(acc * 2, n - 1)


def test_functions_that_call_themselves_are_built_again():
    found = capture(recursive)
    assert found.key is not None
    again = found.rebuild(())
    assert again is not recursive
    assert torch.equal(again(X), X * 4)


def test_tensors_take_other_tensors_places():
    row, scale = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0)
    inner = lambda acc: acc + row  # noqa: E731
    found = capture(functools.partial(lambda s, acc: inner(acc) * s, scale))
    assert {id(x) for x in found.tensors} == {id(row), id(scale)}
    others = [x + 1 for x in found.tensors]
    assert torch.equal(found.rebuild(others)(X), (X + row + 1) * (scale + 1))


def test_what_is_held_of_a_function_keeps_no_tensor_alive():
    import gc
    import weakref

    row = torch.ones(3)
    alive = weakref.ref(row)
    held = hold(capture((lambda r: lambda acc: acc + r)(row)))
    del row
    gc.collect()
    assert alive() is None
    assert held.captured.count == 1


def test_paths_end_where_a_value_is_used():
    def function(acc):
        return PACKAGE.config.SCALE * acc + Settings.scaled(acc) + len(PACKAGE.config.Nested.__name__)

    found = {(path.name, *path.attributes) for path in reads(function.__code__).paths}
    assert ("PACKAGE", "config", "SCALE") in found
    assert ("Settings", "scaled") in found
    assert ("len",) in found
