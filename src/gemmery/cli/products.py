"""The options that describe a product, for commands that accept any, and the sizes of a batch."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import words

Rows = Annotated[int, typer.Argument(metavar="M", help="Rows of A and of the result.")]
Columns = Annotated[int, typer.Argument(metavar="N", help="Columns of B and of the result.")]
Summed = Annotated[int, typer.Argument(metavar="K", help="The inner size: columns of A and rows of B.")]
#: The same in an option whose values have the form MxNxK.
SIZES = "M: rows of A and of the result; N: columns of B and of the result; K: the inner size."

Batch = Annotated[
    list[str] | None,
    typer.Option(metavar="SIZES", help="Leading dimensions of plain products: --batch 8,16."),
]
Weight = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="Format of B as a packed weight: int4, int8, e4m3, e5m2, mxfp4, nvfp4, nf4; as a 2:4 sparse weight: "
        "2:4, 2:4-int8, ...",
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Elements of a packed weight that share a scale. Default: that of the format."),
]
Scales = Annotated[
    str,
    typer.Option(
        metavar="tensor|row|block|mx", help="The elements that share a scale, if both operands have 8 bits."
    ),
]
Bias = Annotated[bool, typer.Option("--bias", help="Add N numbers to each row.")]
Epilogue = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="swiglu, bias, bias_gelu, bias_gelu_tanh, bias_relu_squared, bias_residual."
    ),
]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Choose a kernel whose results do not depend on M.")
]


def batch_sizes(given: list[str] | None) -> list[int]:
    """The sizes of `--batch`.

    Raises:
        ValueError: one is not an integer.
    """
    return [_size(word) for word in words(given)]


def _size(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"batch contains {word!r}; give integers separated by commas, such as 8,16")
    return int(word)
