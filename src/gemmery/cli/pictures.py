"""`gemmery order` and `indices`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile, app, told, words, write_json
from .products import Columns, Rows, Summed

Sizes = tuple[int, int, int]

Tile = Annotated[
    str | None,
    typer.Option(metavar="MxNxK", help="Rows, columns and K step of a tile. Default: those that gemmery chooses."),
]  # fmt: skip
GroupSize = Annotated[
    int | None, typer.Option(min=1, help="Rows of tiles in a band. Default: what gemmery chooses.")
]
DType = Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, fp32, tf32, fp64, int8, fp8, ...")]
Layout = Annotated[
    str, typer.Option(
        metavar="NN|NT|TN|TT",
        help="Layouts of A and B: N is row-major, T column-major; a Linear's weight is a T as B.",
    )
]  # fmt: skip
DeviceName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A GPU, such as H200. Default: the GPU of this machine, or an H200.")
]  # fmt: skip


def tile_of(text: str | None) -> Sizes | None:
    """The three sizes of a tile in a text such as 128x256x64.

    Raises:
        ValueError: the text is of another form.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)[x×](\d+)[x×](\d+)", text)
    if match is None:
        raise ValueError(f"tile is {text!r}; give rows, columns and K step, such as 128x256x64")
    return int(match[1]), int(match[2]), int(match[3])


def numbers_of(name: str, text: str | None) -> list[int] | None:
    """The whole numbers in a text such as 4096,1.

    Raises:
        ValueError: the text is of another form.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{name} is {text!r}; give integers separated by commas, such as 4096,1")
    return [int(word) for word in text.split(",")]


@app.command()
def order(
    m: Rows,
    n: Columns,
    k: Summed,
    tile: Tile = None,
    orders: Annotated[
        list[str] | None, typer.Option(
            "--order", metavar="NAME",
            help="row, column, grouped. Default: row and grouped.",
        )
    ] = None,
    group_size: GroupSize = None,
    first: Annotated[
        int | None, typer.Option(
            min=1, metavar="TILES",
            help="Count the blocks of this many first tiles. Default: those of a wave.",
        )
    ] = None,
    programs: Annotated[
        int | None, typer.Option(min=1, help="Tiles that are computed at once. Default: as many as the GPU holds.")
    ] = None,
    l2: Annotated[float | None, typer.Option(
        min=0, metavar="MB",
        help="Size of the cache. Default: the GPU's.",
    )] = None,
    dtype: DType = "bf16",
    layout: Layout = "NT",
    device: DeviceName = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a picture, .png or .svg, or an animation, .gif or .html.")
    ] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Show the order in which a product's tiles are computed, the bytes that each order reads, and its hits in L2.

    The product multiplies an M by K and a K by N matrix. Needs no GPU: the cache is simulated.
    """
    from rich.console import Console

    from ..lab.figures import check_name
    from ..lab.orders import compare, launch_of, show
    from ..lab.tuning import kind_named

    with told():
        if out is not None:
            from ..lab.order_pictures import ENDINGS

            check_name(out, ENDINGS)
        kind = kind_named(dtype)
        launch = launch_of(
            m, n, k, dtype=kind.dtype, layout=layout, precision=kind.precision, fast_accum=kind.fast_accum,
            device=device, tile=tile_of(tile), group_size=group_size, programs=programs,
            l2_bytes=None if l2 is None else round(l2 * 2**20),
        )  # fmt: skip
        comparison = compare(launch, words(orders) or ("row", "grouped"), first)
    show(comparison, Console())
    if out is not None:
        from ..lab.order_pictures import draw

        draw(comparison, out)
        typer.echo(f"written: {out}")
    write_json(json, comparison.asdict())


@app.command()
def indices(
    m: Rows,
    n: Columns,
    k: Summed,
    pid: Annotated[int, typer.Option(help="The program's number, tl.program_id(0).")] = 0,
    step: Annotated[int, typer.Option(help="The step of its K loop, from 0.")] = 0,
    turn: Annotated[int, typer.Option(help="Which of its tiles, from 0, if programs are persistent.")] = 0,
    tile: Tile = None,
    group_size: GroupSize = None,
    config: Annotated[str | None, typer.Option(metavar="CONFIG", help="A config as gemmery explain prints it.")] = None,
    layout: Layout = "NT",
    batch: Annotated[str | None, typer.Option(metavar="SIZES", help="Leading dimensions: --batch 8,16.")] = None,
    strides_a: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Strides of A (batch, M, K), elements: --strides-a 4096,1.")
    ] = None,
    strides_b: Annotated[str | None, typer.Option(metavar="NUMBERS", help="Strides of B (batch, K, N).")] = None,
    strides_c: Annotated[str | None, typer.Option(metavar="NUMBERS", help="Strides of C (batch, M, N).")] = None,
    dtype: DType = "bf16",
    device: DeviceName = None,
    edge: Annotated[int, typer.Option(
        min=1, metavar="LANES",
        help="Print this many lanes at each edge of a block.",
    )] = 4,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw heat maps: .png or .svg.")] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Show the offsets of one program's pointers into A, B and C, and the lanes that its masks disable.

    The product multiplies an M by K and a K by N matrix. Needs no GPU. With --tile, each tile of any size has its own
    program.
    """
    from rich.console import Console

    from ..lab.figures import check_name
    from ..lab.indices import accesses, problem_of_strides, schedule_of, show
    from ..lab.tuning import kind_named

    with told():
        if out is not None:
            check_name(out)
        kind = kind_named(dtype)
        problem = problem_of_strides(
            m, n, k, dtype=kind.dtype, precision=kind.precision, fast_accum=kind.fast_accum, layout=layout,
            batch=numbers_of("batch", batch) or (), strides_a=numbers_of("strides_a", strides_a),
            strides_b=numbers_of("strides_b", strides_b), strides_c=numbers_of("strides_c", strides_c), device=device,
        )  # fmt: skip
        schedule = schedule_of(problem, tile=tile_of(tile), group_size=group_size, config=config)
        found = accesses(problem, schedule, pid, turn=turn, step=step)
    show(found, Console(), edge)
    if out is not None:
        from ..lab.figures import save
        from ..lab.index_pictures import picture

        save(picture(found), out)
        typer.echo(f"written: {out}")
    write_json(json, found.asdict())
