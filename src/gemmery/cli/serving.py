"""`gemmery lab`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile, app, place_for_json, told, words, write_json
from .products import SIZES


@app.command()
def lab(
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", "--device", metavar="NAME",
            help="A GPU, such as H200. Default: the GPU of this machine.",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(metavar="MxNxK", help="Sizes of the product; several with --export. " + SIZES)
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="TYPE", help="bf16, fp16, fp32, tf32, fp8, ...")] = None,
    layout: Annotated[list[str] | None, typer.Option(metavar="NN|NT|TN|TT", help="See gemmery explain.")] = None,
    epilogue: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="none, bias, bias_gelu, swiglu, ...")
    ] = None,
    weight: Annotated[list[str] | None, typer.Option(metavar="FORMAT", help="none, int4, e4m3, nf4, ...")] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", dir_okay=False, callback=place_for_json,
            help="Write the page to one file that needs no server, with every combination of the options above. "
            "Without "
            "--shapes, it has those of language models.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to serve on; 0.0.0.0 for the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = 8477,
    open_: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open a browser. Default: if there is a desktop.")
    ] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Serve a page that shows the predicted time, kernel, waves and traffic of a product.

    Needs no GPU and no network. The options set the first view of the page. With --json, the command writes the data of
    one product and serves nothing.
    """
    from ..files import write_text
    from ..lab.page.command import Request, answer, exported, serve

    with told():
        request = Request(
            {"gpu": words(gpu), "dtype": words(dtype), "layout": words(layout), "epilogue": words(epilogue),
             "weight": words(weight)},
            words(shapes),
        )  # fmt: skip
        if json is not None:
            write_json(json, answer(request))
        if export is not None:
            write_text(export, exported(request))
            typer.echo(f"Page written to {export}")
        if json is None and export is None:
            serve(request, host, port, open_)
