"""`gemmery explain`, `tune` and `warmup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile, app, told, words, write_json
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
def explain(
    m: Rows,
    n: Columns,
    k: Summed,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, fp32, tf32, fp64, int8, fp8, ...")] = "bf16",
    layout: Annotated[
        str, typer.Option(
            metavar="NN|NT|TN|TT",
            help="Layouts of A and B: N is row-major, T column-major; a Linear's weight is a T as B.",
        )
    ] = "NT",
    batch: Batch = None,
    weight: Weight = "",
    group_size: GroupSize = None,
    scales: Scales = "",
    bias: Bias = False,
    epilogue: Epilogue = "",
    batch_invariant: BatchInvariant = False,
    device: Annotated[
        str | None, typer.Option(
            metavar="NAME",
            help="A GPU, such as H200. Default: the GPU of this machine, or an H200.",
        )
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of configs to show.")] = 5,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Show which config runs the product of an M by K and a K by N matrix, and why. Needs no GPU.

    The table has a row for each candidate, first the one that runs. Its columns are predicted times in microseconds,
    except waves, which is a number, and measured, which is a measured time:

    \b
    total       the whole product
    compute     the K steps at the rate of the tensor cores
    l2          the same steps at the bandwidth of L2
    memory      each distinct byte once, at the memory bandwidth
    overhead    launch, start of the pipeline, epilogues and stores
    reduction   adding the partial sums of tiles that are split along K
    correction  the correction by measured times of similar products
    waves       tiles on the busiest multiprocessor
    measured    a timing of this machine, see gemmery tune

    compute, l2 and memory overlap, so total is less than their sum. The lines below the table explain what bounds the
    first candidate, and what it gains over the next. gemmery chooses kernels by these figures; gemmery predict gives a
    better estimate of the time.
    """
    from ..lab.abstract import abstract_problem
    from ..launch.explain import explain_problem
    from ..select.shapes import device_named

    with told():
        problem = abstract_problem(
            m, n, k, device=device_named(device), dtype=dtype, layout=layout, weight=weight, group_size=group_size,
            scales=scales, bias=bias, epilogue=epilogue, batch_invariant=batch_invariant, batch=batch_sizes(batch),
        )  # fmt: skip
        explanation = explain_problem(problem, top)
    typer.echo(str(explanation))
    write_json(json, explanation.asdict())


@app.command()
def tune(
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Suites of gemmery bench; see gemmery bench --list.")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(metavar="MxNxK", help="Sizes to tune, or BxMxNxK with a batch. " + SIZES)
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Problems that a program logged with GEMMERY_LOG=FILE.", exists=True),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(
            metavar="TYPE",
            help="Type of suites and sizes without one: bf16 (default), fp16, ...",
        )
    ] = None,
    layout: Annotated[str, typer.Option(
        metavar="NN|NT|TN|TT",
        help="Layouts of --shapes, see gemmery explain.",
    )] = "NT",
    bias: Annotated[bool, typer.Option("--bias", help="With --shapes: add N numbers to each row.")] = False,
    exhaustive: Annotated[
        bool, typer.Option(
            "--exhaustive",
            help="Measure all configs, not only those that are predicted to be near the best.",
        )
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Also measure configs that were measured before.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0, help="Start no measurement after this time.")] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Measure which configs are fastest on this GPU. Later calls with the same shapes use them.

    Each timing is stored at once: after Ctrl-C, the same command continues where it stopped.
    """
    if not (suite or shapes or from_log):
        raise typer.BadParameter(
            "give suites, shapes or a log to tune", param_hint="--suite, --shapes or --from-log"
        )
    from ..devices import TABLE
    from ..lab.tuning import Request, gpu_here
    from ..lab.tuning import tune as run

    request = Request(
        suites=words(suite), shapes=words(shapes), log=from_log, dtypes=words(dtype) or ["bf16"], layout=layout,
        bias=bias,
    )  # fmt: skip
    with told():
        problems = request.problems(gpu_here() or TABLE["interpreter"])
    raise typer.Exit(run(problems, exhaustive=exhaustive, again=again, seconds=seconds, json_path=json))


@app.command()
def warmup(
    model_shapes: Annotated[
        Path,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False,
            help='A list of weights: [{"name": "qkv", "N": 6144, "K": 4096, "bias": false}, ...].',
        ),
    ],
    max_m: Annotated[int, typer.Option(min=1, help="Prepare inputs of 1 to this many rows.")] = 8192,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Type of weights in the file without one.")] = "bf16",
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Compile every kernel that products with a model's weights run, so that a server compiles none later."""
    from ..lab.tuning import read_weights
    from ..lab.tuning import warmup as run

    with told():
        weights = read_weights(model_shapes, dtype)
    raise typer.Exit(run(weights, max_m=max_m, json_path=json))
