"""Styles for torch's `parallelize_module` that shard gemmery's modules."""

from __future__ import annotations

from typing import Any

import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..formats.weight import PackedWeight
from ..moe.sharded import EXPERTS, held
from ..nn.blocks import FusedGatedMLP
from ..nn.experts import Experts
from ..nn.hugging_face import FusedExperts
from ..nn.mlp import MLP, GatedMLP
from ..nn.packed import PackedLinear
from ..nn.projections import StackedPart
from .overlap import GathersInput, ScattersOutput, SumsOutput, overlapping
from .weights import distribute_weight

Layer = nn.Linear | PackedLinear
#: A layer's placements as torch's styles have them: of the weight, and of the bias.
COLUMN_WISE, ROW_WISE = (Shard(0), Shard(0)), (Shard(1), Replicate())

#: The parameters of modules of experts whose first dimension is that of the experts.
OF_EXPERTS = {
    f"{name}{suffix}" for name in ("gate_up_proj", "up_proj", "down_proj") for suffix in ("", "_bias")
}


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's ColwiseParallel, which also supports `QuantizedLinear` and `PrunedLinear`.

    Args:
        input_layouts, output_layouts, use_local_output: as torch's.
        overlap: gather the input's rows while the layer multiplies, with `all_gather_linear`. This requires
            `input_layouts=Shard(dim)` and the default `output_layouts`.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from gemmery.distributed import ColwiseParallel, RowwiseParallel
        >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        >>> parallelize_module(model, mesh, plan)  # doctest: +SKIP
    """

    def __init__(self, *, overlap: bool = False, **how: Any) -> None:
        super().__init__(**how)
        self.overlap = overlap

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, overlap={self.overlap})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_layer("ColwiseParallel", module)
        if self.overlap:
            if self.output_layouts[0] != Shard(-1):
                raise ValueError(
                    f"ColwiseParallel: output_layouts is {self.output_layouts[0]!r}; with overlap=True it must be "
                    "Shard(-1)"
                )
            made = overlapping(
                "ColwiseParallel",
                module,
                device_mesh,
                GathersInput,
                self.input_layouts[0],
                self.use_local_output,
            )
            _shard(made, device_mesh, COLUMN_WISE, self.src_data_rank)
            return made
        if not isinstance(module, PackedLinear):
            return super()._apply(module, device_mesh)
        _shard(module, device_mesh, COLUMN_WISE, self.src_data_rank)
        return _hooked(
            module, device_mesh, self.input_layouts[0], Replicate(), self.output_layouts[0], self.use_local_output
        )  # fmt: skip


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's RowwiseParallel, which also supports `QuantizedLinear` and `PrunedLinear`.

    Args:
        input_layouts, output_layouts, use_local_output: as torch's.
        overlap: send partial sums while the layer multiplies: with `linear_all_reduce` if `output_layouts` is
            `Replicate()`, and with `linear_reduce_scatter` if it is `Shard(dim)`. This requires the default
            `input_layouts`, and a weight whose columns the ranks divide.

    Example: see `ColwiseParallel`.
    """

    def __init__(self, *, overlap: bool = False, **how: Any) -> None:
        super().__init__(**how)
        self.overlap = overlap

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, overlap={self.overlap})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_layer("RowwiseParallel", module)
        if self.overlap:
            if self.input_layouts[0] != Shard(-1):
                raise ValueError(
                    f"RowwiseParallel: input_layouts is {self.input_layouts[0]!r}; with overlap=True it must be "
                    "Shard(-1)"
                )
            placement = self.output_layouts[0]
            made = _summed_over("RowwiseParallel", module, device_mesh, placement, self.use_local_output)
            _shard(made, device_mesh, ROW_WISE, self.src_data_rank)
            return made
        if not isinstance(module, PackedLinear):
            return super()._apply(module, device_mesh)
        _shard(module, device_mesh, ROW_WISE, self.src_data_rank)
        return _hooked(
            module, device_mesh, self.input_layouts[0], Shard(-1), self.output_layouts[0], self.use_local_output
        )  # fmt: skip


class _ModuleParallel(ParallelStyle):
    """A style for a whole module, which receives all of its inputs."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _hooked(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return _hooked(
            module, mesh, self.input_layouts, Replicate(), self.output_layouts, self.use_local_output
        )


class FeedForwardParallel(_ModuleParallel):
    """A whole feed-forward block: its first layers are column-parallel and its last layer is row-parallel.

    If torch's styles are applied to the layers of a block, each layer has its own hooks, so the block's activation
    cannot be part of a product. Here the hooks belong to the block, and it stays fused.

    It supports `gemmery.nn.MLP`, `GatedMLP` with `stacked=False`, and the `FusedGatedMLP` that `gemmery.nn.swap`
    creates.

    Args:
        input_layouts: of a plain input tensor; `Replicate()` by default, `Shard(1)` for a sequence that is sharded.
        output_layouts: of the result; `Replicate()` by default.
        use_local_output: whether the result is a plain tensor.
        overlap: send partial sums while the last layer multiplies, as `RowwiseParallel` does.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> import gemmery.nn
        >>> from gemmery.distributed import FeedForwardParallel
        >>> block = gemmery.nn.GatedMLP(64, 256, stacked=False)
        >>> parallelize_module(block, mesh, FeedForwardParallel())  # doctest: +SKIP
    """

    def __init__(self, *, overlap: bool = False, **how: Any) -> None:
        super().__init__(**how)
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        *first, last = _layers(module)
        if self.overlap:
            _summed_over("FeedForwardParallel", last, device_mesh, self.output_layouts, is_local=False)
        for layer in first:
            _shard(layer, device_mesh, COLUMN_WISE, self.src_data_rank)
        _shard(last, device_mesh, ROW_WISE, self.src_data_rank)
        return self._hooked(module, device_mesh)


class ExpertParallel(_ModuleParallel):
    """Experts that are sharded over ranks.

    Each rank holds a range of the experts and computes the sums over them for all tokens. The sums of all ranks are
    then added. It supports `gemmery.nn.Experts`, with dense, quantized or sparse weights, and the `FusedExperts` that
    `gemmery.nn.swap` creates. Ids of experts are those of the whole module, and ranks may hold different numbers of
    experts.

    Args:
        input_layouts: of plain tensors among the tokens, their ids and the router weights: `Replicate()` by default;
            `Shard(0)` or `Shard(1)` if each rank has a part of the tokens, which are then gathered.
        output_layouts: of the result; `Replicate()` by default, by an all-reduce. With `Shard(0)` or `Shard(1)` it is a
            reduce-scatter.
        use_local_output: whether the result is a plain tensor.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> import gemmery.nn
        >>> from gemmery.distributed import ExpertParallel
        >>> layer = gemmery.nn.Experts(8, 64, 128)
        >>> parallelize_module(layer, mesh, ExpertParallel())  # doctest: +SKIP
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Experts | FusedExperts):
            raise TypeError(
                f"ExpertParallel: module is a {type(module).__name__}; it must be a gemmery.nn.Experts, or experts "
                "that gemmery.nn.swap has replaced"
            )
        parameters = dict(module.named_parameters())
        if others := parameters.keys() - OF_EXPERTS:
            raise ValueError(
                f"ExpertParallel: {sorted(others)[0]} is a parameter of all experts; each rank would have a part of "
                "its gradient alone"
            )
        held(device_mesh, (EXPERTS,), parameters["down_proj"].shape[0])
        for name, parameter in parameters.items():
            setattr(module, name, _sharded(parameter, device_mesh, Shard(0), self.src_data_rank))
        return self._hooked(module, device_mesh)


def _check_layer(style: str, module: nn.Module) -> None:
    """Raises TypeError if the module of a layer's style is a whole block."""
    if isinstance(module, MLP | GatedMLP | FusedGatedMLP):
        raise TypeError(f"{style}: {type(module).__name__} is a whole block; use FeedForwardParallel")


def _layers(block: nn.Module) -> list[Layer]:
    """The layers of a block, in order.

    Raises:
        TypeError: the module is not such a block, or a layer is another module, such as an adapter.
        ValueError: gate and up are one weight.
    """
    names: tuple[str, ...]
    if isinstance(block, MLP):
        names = ("up", "down")
    elif isinstance(block, GatedMLP):
        if block.stacked:
            raise ValueError(
                "FeedForwardParallel: gate and up of this GatedMLP are one weight, whose rows can't be sharded so that "
                "each rank has halves of both; make it with stacked=False"
            )
        names = ("gate", "up", "down")
    elif isinstance(block, FusedGatedMLP):
        names = ("gate_proj", "up_proj", "down_proj")
    else:
        raise TypeError(
            f"FeedForwardParallel: module is a {type(block).__name__}; it must be a gemmery.nn.MLP, a GatedMLP or a "
            "FusedGatedMLP"
        )
    found = []
    for name in names:
        layer = getattr(block, name)
        if not isinstance(layer, Layer):
            raise TypeError(
                f"FeedForwardParallel: {name} is a {type(layer).__name__}; it must be a Linear, a QuantizedLinear or a "
                "PrunedLinear"
            )
        found.append(layer)
    return found


def _summed_over(
    style: str, layer: nn.Module, mesh: DeviceMesh, placement: Placement, is_local: bool
) -> Layer:
    """A layer with some columns of the weight that sends partial sums while it multiplies."""
    kind = ScattersOutput if isinstance(placement, Shard) else SumsOutput
    return overlapping(style, layer, mesh, kind, placement, is_local)


def _shard(
    layer: Layer, mesh: DeviceMesh, placements: tuple[Placement, Placement], src_data_rank: int | None
) -> None:
    """Replace a layer's parameters by sharded ones.

    Raises:
        ValueError: the layer's packed weight is merged with others'.
    """
    if isinstance(layer, StackedPart):
        raise ValueError(
            f"the layer is one packed weight with {' and '.join(layer.others)}, which can't be sharded; shard the "
            "model before gemmery.nn.swap, or call that with fuse=False"
        )
    of_weight, of_bias = placements
    layer.weight = _sharded(layer.weight, mesh, of_weight, src_data_rank)
    if layer.bias is not None:
        layer.bias = _sharded(layer.bias, mesh, of_bias, src_data_rank)


def _sharded(
    value: Tensor, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> nn.Parameter:
    """A parameter, dense or packed, as a sharded one."""
    if isinstance(value, PackedWeight):
        made: Tensor = distribute_weight(value.detach(), mesh, [placement], src_data_rank=src_data_rank)  # type: ignore[type-var]
    else:
        made = distribute_tensor(value, mesh, [placement], src_data_rank=src_data_rank)
    return nn.Parameter(made, requires_grad=value.requires_grad)


def _hooked(
    module: nn.Module, mesh: DeviceMesh, given: Placement, wanted: Placement, result: Placement, is_local: bool
) -> nn.Module:  # fmt: skip
    """A module whose inputs become DTensors, and whose output is redistributed.

    Args:
        given: the placements of plain inputs.
        wanted: the placements that the module requires.
        result: the placements of the output.
        is_local: whether it becomes a plain tensor.
    """

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [given], run_check=False)
        return x.redistribute(placements=[wanted])

    def before(
        module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple([placed(x) for x in inputs]), {name: placed(x) for name, x in named.items()}

    def after(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> Tensor:
        y = output.redistribute(placements=[result])
        return y.to_local() if is_local else y

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return module
