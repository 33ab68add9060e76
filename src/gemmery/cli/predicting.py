"""`gemmery predict` and `roofline`, and `plot` for what was measured."""

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
        typer.Option(metavar="CONFIG", help="Another kernel than the one that is chosen, see gemmery explain."),
    ] = None,
    device: DeviceName = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Predict the time of a product of an M by K and a K by N matrix, for gemmery and for the vendor's BLAS.

    Says which part binds, and the room left under the roofline, on any known GPU; runs nothing and needs none. Times
    are of a single launch with its inputs in no cache.
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
        list[int] | None, typer.Argument(metavar="[M N K]...", help="Products, several one after the other. " + SIZES)
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Suites of the bench, see gemmery bench --list.")
    ] = None,
    dtype: DType = "bf16",
    device: DeviceName = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", exists=True, file_okay=False,
            help="Results of gemmery bench, to be shown too; without, those of the repository that this is run from.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw: .png or .svg.")] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Show the rooflines of a GPU and products under them, predicted and, where a result has them, measured.

    For each type: the peak rate, the operations per byte from which it can be reached (the ridge), and the size of a
    square product M = N = K that computes as long as it reads A and B and writes the output (the break-even).
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
        list[Path], typer.Argument(metavar="RESULT.json...", exists=True, dir_okay=False, help="Of gemmery bench.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A picture, .png or .svg.")],
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="throughput: over size; shapes: the ratio to each peer, row by row; scaling: time over M; ratios: "
            "many results side by side. The first three without, each in a file with its name before the ending.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Draw what gemmery bench measured, with the spread over its rounds."""
    from ..lab.bench_plots import plot as run

    with told():
        found = run(results, words(kind), out)
    for name, drawn in found.items():
        typer.echo(f"{name}: {drawn['file'] or 'the results have nothing to show of it'}")
    write_json(json, found)
