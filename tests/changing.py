"""Epilogues whose values change between calls, and between a call and its gradient: drawn by hypothesis."""

import functools
import types

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

import gemmery

#: What a step does to the product with its number.
STEPS = {
    "times": lambda x, k: x * k,
    "tanh": lambda x, k: torch.tanh(x * k),
    "silu": lambda x, k: F.silu(x + k),
    "power": lambda x, k: (x * x + 1) * k * k,
    "where": lambda x, k: torch.where(x > k, x * k, x - k),
    "in place": lambda x, k: (x + 0.0).mul_(k).add_(k),
    "clamp": lambda x, k: x.clamp(-abs(k), abs(k)) + x,
}


class Program:
    """A chain of steps, each with a number that it takes from somewhere, and that can be set anew."""

    def __init__(self, steps, numbers, prebuilt):
        self.cells = []
        functions = [self._step(i, *step) for i, step in enumerate(steps)]
        self.set(numbers)
        if prebuilt:
            chained = gemmery.epilogues.compose(*functions) if len(functions) > 1 else functions[0]
            self._made = gemmery.epilogue(chained)
        else:
            self._made = None
        self._functions = functions

    def set(self, numbers):
        """Other numbers, in the places where the functions find them."""
        for put, number in zip(self.cells, numbers, strict=True):
            put(number)

    @property
    def function(self):
        """What a product is given: the same object each time if it is prebuilt."""
        if self._made is not None:
            return self._made
        functions = tuple(self._functions)
        return lambda acc: functools.reduce(lambda x, f: f(x), functions, acc)

    def in_torch(self, product):
        """The function on a product of torch's."""
        return functools.reduce(lambda x, f: f(x), self._functions, product.clone())

    def _step(self, i, name, place):
        step = STEPS[name]
        if place == "cell":
            k = 0.0

            def put(value):
                nonlocal k
                k = value

            self.cells.append(put)
            return lambda acc: step(acc, k)
        if place == "module":
            inner = types.ModuleType(f"settings_{i}")
            outer = types.ModuleType("settings")
            outer.inner = inner
            self.cells.append(functools.partial(setattr, inner, "k"))
            return lambda acc: step(acc, outer.inner.k)
        if place == "class":
            owner = type("Owner", (), {"Inner": type("Inner", (), {"k": 0.0})})
            self.cells.append(functools.partial(setattr, owner.Inner, "k"))
            return lambda acc: step(acc, owner.Inner.k)
        if place == "default":

            def by_default(acc, *, k=0.0):
                return step(acc, k)

            self.cells.append(functools.partial(by_default.__kwdefaults__.__setitem__, "k"))
            return by_default
        held = types.SimpleNamespace(k=0.0)
        self.cells.append(functools.partial(setattr, held, "k"))
        return lambda acc: step(acc, held.k)


#: Where a step finds its number. An object's attributes are not looked at, so that nothing is kept of such a function.
PLACES = ("cell", "module", "class", "default", "object")
numbers = st.floats(-2, 2, allow_nan=False).map(lambda x: round(x, 2))


@st.composite
def histories(draw):
    """Steps, whether they are prebuilt, and the numbers of several calls."""
    steps = draw(
        st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(PLACES)), min_size=1, max_size=3)
    )
    calls = draw(
        st.lists(st.lists(numbers, min_size=len(steps), max_size=len(steps)), min_size=2, max_size=4)
    )
    return steps, draw(st.booleans()), calls


def check(history):
    """Every call gives what torch gives with the numbers of its moment, and so does its gradient, taken at the end."""
    steps, prebuilt, calls = history
    program = Program(steps, calls[0], prebuilt)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 4), (4, 5)))
    x = a.clone().requires_grad_()
    made = []
    for numbers in calls:
        program.set(numbers)
        want = program.in_torch(x @ b)
        plain = gemmery.matmul(a, b, epilogue=program.function)
        torch.testing.assert_close(plain, want.detach(), rtol=1e-9, atol=1e-9)
        y = gemmery.matmul(x, b, epilogue=program.function)
        torch.testing.assert_close(y.detach(), want.detach(), rtol=1e-9, atol=1e-9)
        made.append((y, want))
    program.set([0.37] * len(steps))
    for y, want in made:
        (grad,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(want.sum(), x)
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-8)
