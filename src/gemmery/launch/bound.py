"""Launches of kernels that compute no product: prepared once, like those of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..devices import INTERPRETED, on_device
from ..memo import keep
from . import direct


class Bound:
    """A kernel with everything fixed but the addresses of its tensors.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: programs along x, y, z.
        arguments: gives the kernel's run-time arguments for tensors of the layout that it was made for.
        constants: its constexpr parameters and the compiler's options.
        direct: the fast launch, if there is one.
    """

    takes_numbers = False
    cluster = 1
    split = None
    workspace_size = (0, 0)

    def __init__(
        self, kernel: Any, programs: int, arguments: Callable[[Sequence[Any]], Sequence[Any]], constants: dict[str, Any]
    ) -> None:  # fmt: skip
        self.kernel, self.grid = kernel, (programs, 1, 1)
        self.arguments, self.constants = arguments, constants
        self.direct: direct.Launch | None = None

    def direct_arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> Sequence[Any]:
        """See `direct.Fixed`."""
        return self.arguments(tensors)

    def compile(self, tensors: Sequence[Any]) -> Any:
        """Compile without launching, for the active driver's target; tensors may be on the meta device."""
        return self.kernel.warmup(*self.arguments(tensors), grid=self.grid, **self.constants)

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """Launch on the current device and stream, on the ordinary path."""
        self.kernel[self.grid](*self.arguments(tensors), **self.constants)

    def shorten(self, tensors: Sequence[Tensor]) -> None:
        """Prepare the fast launch on the GPU of these tensors, the current one, if that is possible."""
        if not INTERPRETED:
            compiled = self.compile(tensors)
            compiled._init_handles()
            self.direct = direct.prepare(self, compiled, tensors[0].get_device(), tensors, ())


def same(
    kernel: Any, tensors: Sequence[Tensor], arguments: Callable[[Sequence[Any]], Sequence[Any]],
    constants: dict[str, Any],
) -> Callable[[], None]:  # fmt: skip
    """A function that launches one program of a kernel with the same tensors each time, on the current stream.

    The tensors' device must be the current one, when the function is made and when it is called. The caller keeps the
    tensors alive.
    """
    known = Bound(kernel, 1, arguments, constants)
    known.shorten(tensors)
    direct, addresses = known.direct, [x.data_ptr() for x in tensors]

    def launch() -> None:
        if direct is None or not direct(addresses):
            known.launch(tensors)

    return launch


_known: dict[Any, Bound] = {}


def launch(key: tuple[Any, ...], tensors: Sequence[Tensor], bind: Callable[[], Bound]) -> None:
    """Launch a kernel on the current stream of the tensors' device.

    Args:
        key: determines the result of `bind`, together with the device and the alignment of addresses to 16 bytes.
        tensors: those whose addresses differ between launches.
        bind: creates the launch for a new key.
    """
    addresses: list[int] = []
    looks: list[Any] = [key, tensors[0].get_device()]
    for x in tensors:
        address = x.data_ptr()
        addresses.append(address)
        looks.append(address & 15 == 0)
    known = _known.get(tuple(looks))
    if known is not None and known.direct is not None and known.direct(addresses):
        return
    # Triton launches on the current device, whatever device the tensors are on.
    with on_device(tensors[0]):
        if known is None:
            known = bind()
            known.shorten(tensors)
            keep(_known, tuple(looks), known)
        known.launch(tensors)
