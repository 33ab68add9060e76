"""`gemmery predict`, `roofline` and `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile, app, told, words, write_json
from .pictures import DeviceName, DType, Layout
from .products import (
    SIZES,
    Batch,
    BatchInvariant,
    Bias,
    Columns,
    Epilogue,
    GroupSize,
    Rows,
    Scales,
    Summed,
    Weight,
    batch_sizes,
)  # fmt: skip


@app.command()
def predict(
    m: Rows,
    n: Columns,
    k: Summed,
    dtype: DType = "bf16",
    layout: Layout = "NT",
    batch: Batch = None,
    weight: Weight = "",
    group_size: GroupSize = None,
    scales: Scales = "",
    bias: Bias = False,
    epilogue: Epilogue = "",
    batch_invariant: BatchInvariant = False,
    config: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="A config to use instead of the chosen one, see gemmery explain."),
    ] = None,
    device: DeviceName = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Predict the time of the product of an M by K and a K by N matrix, for gemmery and for the vendor's BLAS.

    Shows what bounds the product, and its distance to the roofline, for any known GPU. Needs no GPU. Times are those of
    a single launch with cold inputs.
    """
    from ..lab.abstract import abstract_problem
    from ..lab.prediction import predict as run
    from ..lab.prediction.describe import describe
    from ..select.shapes import device_named

    with told():
        problem = abstract_problem(
            m, n, k, device=device_named(device), dtype=dtype, layout=layout, weight=weight, group_size=group_size,
            scales=scales, bias=bias, epilogue=epilogue, batch_invariant=batch_invariant,
            batch=batch_sizes(batch),
        )  # fmt: skip
        found = run(problem, config)
    typer.echo(describe(found))
    write_json(json, found.asdict())


@app.command()
def roofline(
    sizes: Annotated[
        list[int] | None, typer.Argument(metavar="[M N K]...", help="Sizes of one or more products. " + SIZES)
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Suites of gemmery bench; see gemmery bench --list.")
    ] = None,
    dtype: DType = "bf16",
    device: DeviceName = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", exists=True, file_okay=False,
            help="Results of gemmery bench to show as well. Default: those of the repository that this runs from.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a picture, .png or .svg.")] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Show the rooflines of a GPU, and products under them, as predicted and, if recorded, as measured. Needs no GPU.

    Prints for each type the peak rate, the ridge (the operations per byte from which the peak can be reached), and the
    break-even (the size M = N = K at which computing takes as long as reading A and B and writing the output).
    """
    from ..lab.figures import check_name
    from ..lab.prediction.recorded import folder
    from ..lab.rooflines import rooflines, triples
    from ..select.shapes import device_named

    with told():
        if out is not None:
            check_name(out)
        found = rooflines(
            device_named(device),
            triples(sizes or []),
            words(suite),
            dtype,
            folder() if results is None else results,
        )
        if out is not None:
            from ..lab.roofline_pictures import draw

            draw(found, out)
    typer.echo(str(found))
    write_json(json, found.asdict())


@app.command()
def plot(
    results: Annotated[
        list[Path], typer.Argument(
            metavar="RESULT.json...", exists=True, dir_okay=False,
            help="Results of gemmery bench.",
        )
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A picture, .png or .svg.")],
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="throughput: over size; shapes: the ratio to each peer, row by row; scaling: time over M; ratios: "
            "many results side by side. Default: the first three, each in a file with its name before the ending.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Draw the results of gemmery bench, with the spread over the rounds."""
    from ..lab.bench_plots import plot as run

    with told():
        found = run(results, words(kind), out)
    for name, drawn in found.items():
        typer.echo(f"{name}: {drawn['file'] or 'not drawn: the results have no data for it'}")
    write_json(json, found)
