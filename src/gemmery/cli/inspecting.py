"""`gemmery inspect`: the machine code of a kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonFile, app, told, write_json
from .pictures import DeviceName, DType, Layout
from .products import (
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
def inspect(
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
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A config as gemmery explain prints it. Default: the chosen one. Two are compared.",
        ),
    ] = None,
    device: DeviceName = None,
    target: Annotated[
        str | None, typer.Option(metavar="ARCH", help="A target instead of a GPU: sm_80, sm_90, ..., gfx942.")
    ] = None,
    sass: Annotated[bool, typer.Option("--sass", help="Print every instruction of the K loop, with its line.")] = False,
    ttgir: Annotated[bool, typer.Option("--ttgir", help="Print the kernel in Triton's GPU dialect.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the kernel in PTX, or in AMD assembly.")] = False,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Compile the kernel of a product and analyze its machine code, for any known GPU. Needs no GPU.

    Shows registers, spills, shared memory, occupancy and what limits it, the tensor-core instructions, the width of
    loads, and the instructions of the K loop.
    """
    from rich.console import Console

    from ..lab.abstract import abstract_problem
    from ..lab.inspection import inspect as run
    from ..lab.inspection.compile import device_of
    from ..lab.inspection.show import show

    with told():
        problem = abstract_problem(
            m, n, k, device=device_of(device, target), dtype=dtype, layout=layout, weight=weight, group_size=group_size,
            scales=scales, bias=bias, epilogue=epilogue, batch_invariant=batch_invariant,
            batch=batch_sizes(batch),
        )  # fmt: skip
        found = [run(problem, text) for text in config or ()] or [run(problem)]
    asked = [name for name, wanted in (("ttgir", ttgir), ("ptx", ptx), ("amdgcn", ptx)) if wanted]
    texts = [name for name in asked if name in found[0].texts]
    show(found, Console(), listing=sass, texts=texts)
    kept = [*texts, *(["sass"] if sass and "sass" in found[0].texts else [])]
    write_json(json, {"inspections": [one.asdict(kept) for one in found]})
