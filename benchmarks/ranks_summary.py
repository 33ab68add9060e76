"""The tables of docs/distributed.md, from the results of `all_reduce.py`, `sharded_rows.py` and `sharded_model.py`."""

from pathlib import Path

from benchmarks import all_reduce_summary, sharded_model_summary, sharded_rows_summary
from benchmarks.records import table


def page(folder: Path) -> str:
    """Everything between the marks of docs/distributed.md; "" without results."""
    parts = []
    if results := all_reduce_summary.read(folder):
        lines = table(all_reduce_summary.HEAD, all_reduce_summary.lines(results), "lrlrrrr")
        parts += ["### Sums", lines, all_reduce_summary.ABOUT, all_reduce_summary.places(results)]
    if results := sharded_rows_summary.read(folder):
        lines = table(sharded_rows_summary.HEAD, sharded_rows_summary.lines(results), "lrrrrlrrrr")
        parts += ["### Rows", lines, sharded_rows_summary.ABOUT, sharded_rows_summary.places(results)]
    if results := sharded_model_summary.read(folder):
        lines = table(sharded_model_summary.HEAD, sharded_model_summary.lines(results), "lrlrr")
        parts += [
            "### Model",
            lines,
            sharded_model_summary.about(results),
            sharded_model_summary.places(results),
        ]
    return "\n\n".join(parts)
