"""Programs drawn at random over the operators that epilogues have: the kernel against torch, element by element.

The reference is computed in float64, with a bound of the error beside each value: what an operator makes of values that
are off by as much as their bounds, and its own rounding. Where that tells nothing, as beside a comparison's tie, an
element counts as unknown. Integers, comparisons of numbers that are exact, NaN and infinity have to be torch's.
"""

import itertools
import math
import operator
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import gemmery

pytestmark = [
    pytest.mark.slow,
    # NumPy's, of numbers that are infinite on purpose, and of integers that wrap.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

M, N = 4, 6
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
#: Beyond its largest numbers a type has others than float64.
LARGEST = {torch.float16: 6e4, torch.bfloat16: 3e38, torch.float32: 3e38, torch.float64: 1e308}
#: Below this, results may be 0.
SMALLEST = 2.0**-125


def alpha(function):
    return lambda x, y: function(x, y, alpha=3) if isinstance(x, torch.Tensor) else NotImplemented


UNARY = {
    "neg": operator.neg, "abs": torch.abs, "relu": torch.relu, "sign": torch.sign, "square": torch.square,
    "reciprocal": torch.reciprocal, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log,
    "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus, "erf": torch.erf,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "isnan": torch.isnan, "isinf": torch.isinf,
    "logical_not": torch.logical_not, "not": operator.invert,
}  # fmt: skip
UNARY |= {f"pow {k}": (lambda x, k=k: x**k) for k in (0, 1, 2, 3, 4, -1, -2, -3, 0.5, -0.5)}
UNARY |= {f"to {str(t)[6:]}": (lambda x, t=t: x.to(t)) for t in (*FLOATS, *INTEGERS)}
UNARY |= {
    f"clamp {low} {high}": (lambda x, low=low, high=high: x.clamp(low, high))
    for low, high in ((-20, 30), (0, 1), (-0.5, 2.5), (3, 200))
}
BINARY = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "remainder": operator.mod,
    "floor_divide": operator.floordiv, "fmod": torch.fmod, "maximum": torch.maximum, "minimum": torch.minimum,
    "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "add alpha": alpha(torch.add),
    "sub alpha": alpha(torch.sub), "rsub": torch.rsub, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}  # fmt: skip
REDUCED = {"sum": torch.sum, "amax": torch.amax, "amin": torch.amin, "mean": torch.mean}
#: What makes of exact floating-point numbers exact ones.
EXACT = {
    "neg", "abs", "relu", "sign", "floor", "ceil", "trunc", "remainder", "fmod", "maximum", "minimum", "floor_divide",
    "pow 0", "pow 1", "where", "amax", "amin", *[x for x in UNARY if x.startswith(("clamp", "to "))],
}  # fmt: skip
#: What jumps so often that numbers that are not exact tell nothing.
JUMPING = {"remainder", "fmod", "floor_divide", "trunc_divide"}
#: What is written for few instructions: off by this much of the larger of 1 and the result, in single precision.
SHORT = {"exp", "exp2", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "erf", "sin", "cos"}
CONSTANTS = (0, 1, -1, 2, 3, 7, -3, 200, 300, 0.5, -2.0, 0.1, 1e4, math.inf, True)


@dataclass
class Known:
    """What is known of a value.

    Attributes:
        own: as torch computes it.
        best: in float64; None for integers.
        error: how far the kernel's may be from that.
        exact: where the kernel's is `own`.
        known: where it is known at all.
    """

    own: object
    best: torch.Tensor
    error: torch.Tensor
    exact: torch.Tensor
    known: torch.Tensor

    @classmethod
    def given(cls, own, wide, is_zero_signed=True):
        best = torch.as_tensor(own).double()
        single = best.to(torch.float32).double()
        fits = torch.as_tensor(own).dtype != torch.float64 or wide
        is_constant = not isinstance(own, torch.Tensor)
        known = torch.ones_like(best, dtype=torch.bool)
        if not fits and not is_constant:  # of float64, the kernel has single precision
            known = (single.isinf() == best.isinf()) & ((best.abs() > SMALLEST) | (best == 0))
        error = (best.abs() * 2.0**-24).nan_to_num(0, 0, 0) if is_constant or not fits else best.abs() * 0
        exact = known & (torch.tensor(is_constant or fits) | (single == best))
        if not is_zero_signed:
            exact = exact & (best != 0)
        return cls(own, best, error.nan_to_num(0, 0, 0), exact, known)


def is_floating(x):
    return x.dtype.is_floating_point if isinstance(x, torch.Tensor) else isinstance(x, float)


def corners(x):
    """Numbers in float64 that a value's may be; 0 has both signs, unless it is exact."""
    if not is_floating(x.own):
        return (x.own,)
    if not x.error.any() and (x.exact | (x.best != 0)).all():
        return (x.best,)
    low = torch.where((x.best == 0) & ~x.exact & (x.error == 0), -0.0, x.best - x.error)
    return x.best, low, x.best + x.error


def apart(x, y):
    """How far numbers are apart: 0 for two that are NaN, NaN where one is, or only one is infinite."""
    same = (x == y) & (torch.signbit(x) == torch.signbit(y)) | (x == y) & (x != 0) | (x.isnan() & y.isnan())
    distance = torch.where(same | (x == y), 0.0, (x - y).abs())
    return torch.where(distance.isinf(), math.nan, distance)


def evaluated(name, function, inputs, wide):
    """What is known of an operator's result; None where torch refuses it.

    And for a Python number beside tensors without dimensions: as an argument of a kernel it is such a tensor itself, and
    may decide over the type.
    """
    shapes = {x.own.shape if isinstance(x.own, torch.Tensor) else None for x in inputs}
    if shapes == {None, ()}:
        return None
    try:
        own = function(*[x.own for x in inputs])
    except (RuntimeError, TypeError, ZeroDivisionError, AttributeError):
        return None
    if not isinstance(own, torch.Tensor):
        return None
    exact, known = torch.tensor(True), torch.tensor(True)
    for x in inputs:
        exact, known = exact & x.exact, known & x.known
    if name in REDUCED:
        exact, known = exact.all(-1, keepdim=True), known.all(-1, keepdim=True)
    if name in ("silu", "gelu", "gelu_tanh"):
        known = known & (inputs[0].best != -math.inf)  # their limit, where torch's formulas give NaN
    exact, known = exact.expand(own.shape), known.expand(own.shape)
    floating = any(is_floating(x.own) for x in inputs)
    if not own.dtype.is_floating_point:
        return of_integers(name, function, inputs, own, exact, known, floating)
    for x in inputs:
        if not is_floating(x.own) and not wide:  # a large integer has to be rounded
            exact = exact & (x.best.to(torch.float32).double() == x.best)
    results = [function(*given) for given in itertools.product(*map(corners, inputs))]
    best, *others = [x.double().expand(own.shape) for x in results]
    error = torch.zeros_like(best)
    for other in others:
        distance = apart(best, other)
        known = known & ~distance.isnan()
        error = torch.maximum(error, distance.nan_to_num(0))
    if name in ("sum", "mean"):
        x = inputs[0]
        error = x.error.sum(-1, keepdim=True) + N * 2.0**-24 * x.best.abs().sum(-1, keepdim=True)
        known = known & (error.isfinite() | ~best.isfinite())
    error = 1.5 * error + rounding(name, own.dtype, best, wide)
    error = torch.where(best.isfinite(), error, 0.0)
    most = min(LARGEST[own.dtype], LARGEST[torch.float64 if wide else torch.float32])
    known = known & (~best.isfinite() | (best.abs() + error < most))
    known = known & (error <= 0.01 * best.abs() + 0.01)
    if name in JUMPING:
        known = known & exact
    if name == "remainder" and own.dtype == torch.float64 and not wide:
        exact = exact & False  # moving it to the other sign rounds, in single precision
    if name in EXACT:
        # torch's own remainder is NaN where the quotient is too large for its instructions.
        known = known & ~(exact & own.isnan() & ~best.isnan())
        best, error = torch.where(exact, own.double(), best), torch.where(exact, 0.0, error)
        exact = exact & ((best != 0) | torch.tensor(name == "neg"))
    else:
        exact = torch.zeros_like(exact)
    return Known(own, best, error, exact, known)


def rounding(name, dtype, best, wide):
    unit = torch.finfo(dtype).eps if not wide and dtype == torch.float64 else 0
    unit = max(torch.finfo(dtype).eps, unit, 2.0**-52 if wide else 2.0**-23)
    size = best.abs()
    if name in SHORT:
        least = 1e-13 if wide else 1e-6
        return (
            2 * unit * size
            + least * size.clamp_min(1)
            + (0 if wide else 1e-5 * size) * (name in ("exp", "exp2"))
        )
    info = torch.finfo(dtype)
    return 4 * unit * size + max(SMALLEST, info.smallest_normal * info.eps)


def of_integers(name, function, inputs, own, exact, known, floating):
    """The same for a result that is no floating-point number, which is exact where it is known."""
    if name in JUMPING:
        known = known & exact
    if floating:
        agreed = torch.ones(own.shape, dtype=torch.bool)
        for given_ in itertools.product(*map(corners, inputs)):
            agreed = agreed & (function(*given_) == own)
        if name.startswith("to ") and own.dtype != torch.bool:
            agreed = (
                agreed & (inputs[0].best.abs() < 100) & (inputs[0].best > -0.99)
            )  # beyond, it is hardware's
            known = known & agreed
        known = known & (agreed | exact)
    return Known(own, own.double(), torch.zeros(own.shape, dtype=torch.float64), known, known)


SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    -3.0,
    0.1,
    math.inf,
    -math.inf,
    math.nan,
    1e-3,
    88.0,
    1e20,
    -1e4,
    300.0,
)
SHAPES = ((M, N), (N,), (M, 1), (), (1, 1), (1, N))


@st.composite
def tensors(draw, shape, dtype):
    count = math.prod(shape)
    if dtype == torch.bool:
        values = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    elif not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        near = st.integers(max(info.min, -5), 5)
        values = draw(st.lists(near | st.integers(info.min, info.max), min_size=count, max_size=count))
    else:
        plain = st.integers(-80, 80).map(lambda x: x / 16)
        values = draw(st.lists(plain | st.sampled_from(SPECIAL), min_size=count, max_size=count))
    return torch.tensor(values, dtype=dtype).reshape(shape)


@st.composite
def programs(draw):
    """A product's operands, an epilogue's arguments, its instructions, and what is known of all its values."""
    dtype = draw(st.sampled_from((torch.float32, torch.float32, torch.float64, torch.int8)))
    wide = dtype == torch.float64
    a, b = draw(tensors((M, 1), dtype)), draw(tensors((1, N), dtype))
    acc = (a.int() * b.int()) if dtype == torch.int8 else a * b
    args = []
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.integers(0, 4)) == 0:
            args.append(draw(st.sampled_from((2, -1, 0.5, 3.25, 7))))
        else:
            kind = draw(st.sampled_from((*FLOATS, *INTEGERS)))
            args.append(draw(tensors(draw(st.sampled_from(SHAPES)), kind)))
    values = [Known.given(acc, wide, False), *[Known.given(x, wide) for x in args]]
    instructions = []
    for _ in range(draw(st.integers(1, 8))):
        # What came last is likely to be used next.
        operand = st.integers(0, len(values) - 1) | st.just(len(values) - 1)
        kind = draw(st.sampled_from(("unary", "binary", "binary", "binary", "where", "reduced")))
        if kind == "unary":
            name, places = draw(st.sampled_from(sorted(UNARY))), [draw(operand)]
        elif kind == "binary":
            name = draw(st.sampled_from(sorted(BINARY)))
            other = draw(operand | st.sampled_from(CONSTANTS).map(lambda x: (x,)))
            places = draw(st.permutations([draw(operand), other]))
        elif kind == "where":
            name, places = "where", [draw(operand) for _ in range(3)]
        else:
            name, places = draw(st.sampled_from(sorted(REDUCED))), [draw(operand)]
            if not isinstance(values[places[0]].own, torch.Tensor) or values[places[0]].own.shape != (M, N):
                continue
        inputs = [Known.given(x[0], wide) if isinstance(x, tuple) else values[x] for x in places]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = evaluated(name, operator_of(name), inputs, wide)
        if made is not None:
            instructions.append((name, places))
            values.append(made)
    returned = [len(values) - 1]
    if draw(st.booleans()):
        returned.append(draw(st.integers(0, len(values) - 1)))
    returned = [i for i in returned if isinstance(values[i].own, torch.Tensor)] or [0]
    return a, b, tuple(args), instructions, returned, values


def operator_of(name):
    if name in REDUCED:
        return lambda x: REDUCED[name](x, -1, keepdim=True)
    if name == "where":
        return torch.where
    return UNARY.get(name) or BINARY[name]


def epilogue_of(instructions, returned):
    def epilogue(*given):
        values = list(given)
        for name, places in instructions:
            values.append(operator_of(name)(*[x[0] if isinstance(x, tuple) else values[x] for x in places]))
        return tuple(values[i] for i in returned)

    return epilogue


@given(programs())
def test_programs_are_torchs(program):
    a, b, args, instructions, returned, values = program
    results = gemmery.matmul(a, b, epilogue=epilogue_of(instructions, returned), args=args)
    for i, result in zip(returned, results, strict=True):
        want = values[i]
        assert (result.shape, result.dtype) == (want.own.shape, want.own.dtype)
        if not result.dtype.is_floating_point:
            assert torch.equal(result[want.known], want.own[want.known])
            continue
        bound = (want.error + torch.finfo(result.dtype).eps * want.best.abs()).nan_to_num(0)
        wrong = want.known & ~(apart(result.double(), want.best) <= bound)
        assert not wrong.any(), (
            f"{result[wrong][0]}, want {want.best[wrong][0]} up to {bound[wrong][0]} at {wrong.nonzero()[0]}"
        )
