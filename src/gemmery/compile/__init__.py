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
    """Offer gemmery to torch.compile's max-autotune, for all code that is compiled from now on.

    With torch 2.13 and newer, this applies to the current thread, as torch's own settings do, and with older versions
    to all threads.

    Inductor then measures `gemmery.matmul`, `addmm` or `bmm` along with its other choices for `mm`, `addmm` and `bmm`
    of float16 and bfloat16 matrices on a GPU, forward and backward, and calls gemmery where it is the fastest by over 2
    percent. Its log of the measurement lists gemmery as `gemmery_mm`, `gemmery_addmm` or `gemmery_bmm`, and
    `gemmery.compile.choices` returns the times.

    gemmery is not offered for products with dynamic sizes or without elements, or in graphs with a C++ wrapper. Also
    required are `max_autotune` or `max_autotune_gemm` (the modes that begin with "max-autotune" set both), ATen among
    `max_autotune_gemm_backends`, which is the default, and a measurement in the process itself
    (`autotune_in_subproc=False`, the default). A function that was compiled earlier does not change:
    `torch.compiler.reset()` makes torch compile it again.

    The cache keys of compiled code include whether gemmery was enabled, and its version, through
    `torch.compiler.config.cache_key_tag`.

    Returns:
        A context manager, which does not have to be entered. At the end of a `with` statement, gemmery is disabled
        again, unless it was enabled before. A function is compiled in its first call, and its gradient in the first
        backward pass, so these must be in the statement.

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
    """Stop offering gemmery in this thread.

    Compiled code does not change. This has no effect if gemmery is not enabled.
    """
    set_tag(False)


def is_enabled() -> bool:
    """Whether gemmery is offered to torch.compile in this thread."""
    return is_tagged()
