"""`gemmery inspect`: what a kernel's machine code is like."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonFile, app, told, words, write_json


@app.command()
def inspect(
    m: Annotated[int, typer.Argument(metavar="M")],
    n: Annotated[int, typer.Argument(metavar="N")],
    k: Annotated[int, typer.Argument(metavar="K")],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, fp32, tf32, fp64, int8, fp8, ...")] = "bf16",
    layout: Annotated[
        str, typer.Option(metavar="NN|NT|TN|TT", help="N: row-major, T: column-major, as a Linear's weight is for b.")
    ] = "NT",
    batch: Annotated[list[str] | None, typer.Option(metavar="SIZES", help="Leading dimensions: --batch 8,16.")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Add N numbers to each row.")] = False,
    weight: Annotated[str, typer.Option(metavar="FORMAT", help="A packed weight: int8, int4, e4m3, mxfp4, ...")] = "",
    scales: Annotated[
        str, typer.Option(metavar="tensor|row|block", help="What shares a scale of two 8-bit operands.")
    ] = "",
    epilogue: Annotated[
        str, typer.Option(metavar="NAME", help="swiglu, bias_gelu, bias_residual, ...: those that the bench measures.")
    ] = "",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="With results that do not depend on M.")
    ] = False,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="As gemmery explain writes it; by default the chosen one; two are compared."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="A GPU, such as H200; the one at hand without, or else an H200.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="ARCH", help="sm_80, sm_90, ..., gfx942: in the place of a GPU.")
    ] = None,
    sass: Annotated[bool, typer.Option("--sass", help="Every instruction of the loop along K, with its line.")] = False,
    ttgir: Annotated[bool, typer.Option("--ttgir", help="The kernel in Triton's GPU dialect.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="The kernel in PTX, or in AMD's assembly.")] = False,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Compile the kernel of a product, for any known GPU and without one, and look into its machine code.

    Shows registers, spills, shared memory, occupancy and what limits it, the tensor cores' instructions, how wide loads
    are, and the loop along K as it is issued.
    """
    from rich.console import Console

    from ..lab.inspection.asked import Request
    from ..lab.inspection.show import show

    with told():
        request = Request(
            m, n, k, dtype=dtype, layout=layout, batch=tuple(map(_size, words(batch))), bias=bias,
            batch_invariant=batch_invariant, weight=weight, scales=scales, epilogue=epilogue, device=device,
            target=target, configs=config or (),
        )  # fmt: skip
        found = request.inspections()
    shown = [name for name, wanted in (("ttgir", ttgir), ("ptx", ptx), ("amdgcn", ptx)) if wanted]
    texts = [name for name in shown if name in found[0].texts]
    show(found, Console(), listing=sass, texts=texts)
    kept = [*texts, *(["sass"] if sass and "sass" in found[0].texts else [])]
    write_json(json, {"inspections": [one.asdict(kept) for one in found]})


def _size(word: str) -> int:
    if not word.isdigit():
        raise ValueError(f"batch has {word!r}; its sizes are whole numbers")
    return int(word)
