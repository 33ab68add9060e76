"""gemmery as a choice of torch.compile's max-autotune.

With `mode="max-autotune"`, Inductor measures several kernels for each product of a model, torch's and its own Triton
templates, and compiles a call of the fastest. `enable` adds gemmery's to them. Nothing is changed by the import alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from .record import Offer, choices
from .tag import is_tagged, set_tag

__all__ = ["Offer", "choices", "disable", "enable", "is_enabled"]


def enable() -> AbstractContextManager[object]:
    """Offer gemmery to torch.compile's max-autotune, for what is compiled from now on.

    With torch 2.13 and newer, this concerns what is compiled in this thread, as do torch's own settings; with older
    versions, in all threads.

    Inductor then measures `gemmery.matmul`, `addmm` or `bmm` beside its other choices for `mm`, `addmm` and `bmm` of
    float16 and bfloat16 matrices on a GPU, forward and backward, and calls it where it is the fastest by over 2
    percent. Its log of the measurement lists gemmery as `gemmery_mm`, `gemmery_addmm` or `gemmery_bmm`, and
    `gemmery.compile.choices` returns the times.

    Not offered are products with dynamic sizes or without elements, and graphs with a C++ wrapper. Also required are
    `max_autotune` or `max_autotune_gemm` (the modes that begin with "max-autotune" set both), ATen among
    `max_autotune_gemm_backends`, which is the default, and a measurement in the process itself
    (`autotune_in_subproc=False`, the default). A function that was compiled before does not change:
    `torch.compiler.reset()` has it compiled again.

    Compiled code that is cached knows whether gemmery was enabled, and which version: the setting is a part of
    `torch.compiler.config.cache_key_tag`.

    Returns:
        A context manager, which need not be entered. At the end of a `with` statement, gemmery is disabled again,
        unless it was enabled before. A function is compiled in its first call, and its gradient in the first backward
        pass, so these must be in the statement.

    Example:
        >>> import gemmery.compile
        >>> with gemmery.compile.enable():
        ...     gemmery.compile.is_enabled()
        True
        >>> gemmery.compile.is_enabled()
        False
    """
    # It imports Inductor, which takes seconds.
    from .choice import begin

    undo = ExitStack()
    if not is_enabled():
        undo.callback(disable)
    begin()
    set_tag(True)
    return undo


def disable() -> None:
    """Offer gemmery no longer in this thread; compiled code stays as it is. Without effect if it is not enabled."""
    set_tag(False)


def is_enabled() -> bool:
    """Whether gemmery is offered to torch.compile in this thread."""
    return is_tagged()
