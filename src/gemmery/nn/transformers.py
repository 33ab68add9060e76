"""Quantized models in Hugging Face's transformers: `from_pretrained` quantizes them, `save_pretrained` saves them.

Importing this module registers `GemmeryConfig` with transformers. Only this module needs transformers; nothing else of
gemmery imports it.

    import gemmery.nn.transformers
    model = AutoModelForCausalLM.from_pretrained( name,
        quantization_config=gemmery.nn.transformers.GemmeryConfig("int4", group_size=64)
    )
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..dtensors import is_sharded
from ..formats.base import Format
from ..formats.files import KEY, flattened, metadata_text, texts_of_file
from ..formats.packing import STRIP
from ..formats.packing import VERSION as PACKING
from ..formats.quantize import Scale
from ..formats.quantize import quantize as quantize_tensor
from ..formats.tensor import QuantizedTensor, lookup
from ..formats.weight import DTYPES, PackedWeight
from . import transposed
from .blocks import PackedGatedMLP
from .experts import Experts
from .packed import PackedLinear
from .projections import StackedLinear, StackedPart
from .quantized import QuantizedLinear
from .replacing import Packing, packed, planned
from .swap import Slot, Swapped

try:
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as found:
    raise ImportError(
        f"gemmery.nn.transformers: it needs transformers 5 or later, which converts weights while loading: {found}"
    ) from found

__all__ = ["GemmeryConfig", "GemmeryQuantizer"]

#: Under which name transformers knows the quantizer, and files of configurations do.
NAME = "gemmery"


class GemmeryConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers has no types
    """The settings by which `from_pretrained` quantizes linear layers and experts, or by which a saved model was
    quantized.

    `from_pretrained(..., quantization_config=GemmeryConfig(...))` quantizes each weight as it is read, as
    `gemmery.nn.quantize` does: the layers become `gemmery.nn.QuantizedLinear` and `gemmery.nn.Experts`. To load a saved
    model, `import gemmery.nn.transformers` first; the files contain the configuration.

    Args:
        format: "int8", "int4", "e4m3", "e5m2", "mxfp4", "nvfp4" or "nf4".
        group_size, symmetric, scale: as for `gemmery.quantize`.
        dtype: the type of the activations that weights are packed for, torch.float16 or torch.bfloat16 or its name. The
            default is that of the model, or torch.bfloat16 if the model's has 32 bits.
        batch_invariant: see `gemmery.matmul`.
        modules_to_not_convert: names of layers to leave, or of modules whose layers to leave, matched as by
            transformers: the beginning or the end of a qualified name, or a regular expression for its beginning. The
            default is the output embeddings (`lm_head`), or the last module if the model has none. Tied weights, and
            those that the model keeps in float32, are always left.

    Raises:
        TypeError: an argument has another type.
        ValueError: there is no such format, or it does not match the other arguments.

    Example:
        >>> import gemmery.nn.transformers
        >>> config = gemmery.nn.transformers.GemmeryConfig("int4", group_size=64)
        >>> config.to_dict()["quant_method"], config.format, config.group_size
        ('gemmery', 'int4', 64)
        >>> gemmery.nn.transformers.GemmeryConfig.from_dict(config.to_dict()) == config
        True
    """

    def __init__(
        self, format: Format | str = "int4", *, group_size: int | None = None, symmetric: bool = True,
        scale: Scale = "channel", dtype: torch.dtype | str | None = None, batch_invariant: bool = False,
        modules_to_not_convert: Iterable[str] | None = None,
    ) -> None:  # fmt: skip
        self.quant_method = NAME
        self.format = format.name if isinstance(format, Format) else format
        self.group_size, self.symmetric, self.scale = group_size, symmetric, scale
        self.dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        self.batch_invariant = batch_invariant
        if isinstance(modules_to_not_convert, str) or not isinstance(modules_to_not_convert, Iterable | None):
            raise TypeError(
                f"GemmeryConfig: modules_to_not_convert is {modules_to_not_convert!r}; it must be a list of names"
            )
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        #: The version of the order in which words hold numbers.
        self.packing = PACKING
        self.check()

    def check(self) -> None:
        """Raise an error for invalid values, which may have been set after construction."""
        lookup("GemmeryConfig", self.format)
        if self.dtype not in (None, "float16", "bfloat16"):
            raise ValueError(f"GemmeryConfig: dtype is {self.dtype!r}; it must be float16 or bfloat16")
        if not isinstance(self.batch_invariant, bool):
            raise TypeError(
                f"GemmeryConfig: batch_invariant is {self.batch_invariant!r}; it must be True or False"
            )
        wrong = [name for name in self.modules_to_not_convert or () if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"GemmeryConfig: modules_to_not_convert has {wrong[0]!r}; it must have names")
        self.pack(torch.zeros(16, 16, device="meta"))

    def pack(self, weight: Tensor) -> QuantizedTensor:
        """Quantize a weight as the configuration says, see `gemmery.quantize`."""
        return quantize_tensor(
            weight, self.format, group_size=self.group_size, symmetric=self.symmetric, scale=self.scale,
            dtype=None if self.dtype is None else getattr(torch, self.dtype),
        )  # fmt: skip

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> GemmeryConfig | tuple[GemmeryConfig, dict[str, Any]]:
        """The configuration from the result of `to_dict`.

        Raises:
            ValueError: it belongs to another method, has an unknown entry, or its weights were packed in an order that
                this version of gemmery does not know.
        """
        given = dict(config_dict)
        method, version = given.pop("quant_method", NAME), given.pop("packing", PACKING)
        if method != NAME:
            raise ValueError(f"GemmeryConfig: quant_method is {method!r}; it must be {NAME!r}")
        known = vars(cls()).keys() - {"quant_method", "packing"}
        if unknown := sorted(given.keys() - known):
            raise ValueError(
                f"GemmeryConfig: there is no {unknown[0]!r}; the configuration has {', '.join(sorted(known))}"
            )
        made = cls(**given)
        made.packing = version
        unused = made.update(**kwargs)
        made.check()
        return (made, unused) if return_unused_kwargs else made

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # it can be changed


class GemmeryQuantizer(HfQuantizer):  # type: ignore[misc]  # transformers has no types
    """The interface between transformers and a model with a `GemmeryConfig`; `model.hf_quantizer` is one.

    Such a model can be saved, loaded and compiled. Gradients reach inputs, biases and everything that is not quantized,
    so adapters can be trained. No part of it can be offloaded to the CPU or the disk.

    Attributes:
        report: the modules that were quantized and left, as `gemmery.nn.quantize` returns them, without `undo`; None
            before a model is loaded.
    """

    requires_calibration = False
    quantization_config: GemmeryConfig

    def __init__(self, quantization_config: GemmeryConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        quantization_config.check()
        self.report: Swapped | None = None
        self.packing: Packing | None = None
        #: Plain modules on meta by their path: what `dequantize` fills again.
        self.originals: dict[str, nn.Module] = {}
        #: Modules that are quantized once all of their parameters are loaded.
        self.waiting: dict[str, Slot] = {}
        #: Of files: the texts of packed weights by their names.
        self.texts: dict[str, Mapping[str, str]] = {}
        self.dtype: torch.dtype | None = None

    # --- properties -----------------------------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` writes such a model: yes, all formats."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: gradients reach inputs and biases; packed weights have none."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether torch.compile supports such a model."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Raises a ValueError for models and options that can't be loaded."""
        places = {str(x) for x in device_map.values()} if isinstance(device_map, dict) else set()
        offloaded = places & {"disk"} or (places & {"cpu"} if len(places) > 1 else set())
        if offloaded:
            raise ValueError(
                f"GemmeryConfig: device_map has {' and '.join(offloaded)} besides other devices; "
                "packed weights are not offloaded, so name GPUs that hold the model, or the CPU alone"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of everything that is not quantized; it stays as requested."""
        self.dtype = dtype
        return dtype

    # --- before weights are read ----------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **options: Any
    ) -> None:
        self.packing, skip = self._packing(model)
        plan = planned(model, self.packing)
        own = set(self.quantization_config.modules_to_not_convert or ())
        plan.left = [
            (name, why) for name, why in plan.left if name in own or name not in skip or "named" not in why
        ]
        slots, plan._slots = plan._slots, []
        self.report = plan
        if self.pre_quantized:
            for file in checkpoint_files or ():
                if os.fspath(file).endswith(".safetensors"):
                    self.texts |= texts_of_file(file)
            slots = [slot for slot in slots if self._is_stored(slot)]
        self.originals = {slot.path: slot.before for slot in slots}
        if not self.pre_quantized:
            self.waiting = {slot.path: slot for slot in slots}
            return
        for slot in slots:
            slot.parent._modules[slot.name] = slot.after

    def _packing(self, model: Any) -> tuple[Packing, list[str]]:
        config = self.quantization_config
        kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
        names = self.get_modules_to_not_convert(model, config.modules_to_not_convert, kept)
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        skip = sorted({*names, *(name.removesuffix(".weight") for name in tied)})
        packing = Packing(
            "GemmeryConfig",
            config.pack,
            QuantizedLinear,
            skip,
            config.batch_invariant,
            STRIP,
            matches=_is_skipped,
        )
        return packing, skip

    def _is_stored(self, slot: Slot) -> bool:
        """Whether the files have packed weights for a module; yes, where their metadata was lost."""
        names = [name for name, x in slot.after._parameters.items() if isinstance(x, PackedWeight)]
        return not self.texts or all(self.texts_of(f"{slot.path}.{name}") is not None for name in names)

    def texts_of(self, name: str) -> Mapping[str, str] | None:
        """The texts of a packed weight, whose name in files may have a longer or shorter prefix; None if there are
        none.
        """
        if name in self.texts:
            return self.texts[name]
        near = [key for key in self.texts if key.endswith(f".{name}") or name.endswith(f".{key}")]
        return self.texts[near[0]] if len(near) == 1 else None

    # --- weights --------------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Whether a parameter belongs to a module that will be quantized."""
        return param_name.rpartition(".")[0] in self.waiting

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """The number of bytes that an element of a weight takes on its device after quantization."""
        slot = self.waiting.get(param_name.rpartition(".")[0])
        name = param_name.rpartition(".")[2]
        after = param if slot is None else slot.after._parameters.get(name, param)
        if not isinstance(after, PackedWeight) or not after.numel():
            size: float = param.element_size()
            return size
        return after.nbytes / after.numel()

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that transformers calls with each weight that it has read."""
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The conversions that assemble packed weights from the tensors in files."""
        if not self.pre_quantized:
            return []
        return [WeightConverter([_pattern(name) for name in _parts()], "", [_Read(self)])]

    def take(self, path: str) -> None:
        """Quantize a module once all of its parameters have been read."""
        slot = self.waiting[path]
        module = slot.before
        given = dict(module._parameters)
        if is_sharded([x for x in given.values() if x is not None]):
            raise ValueError(
                f"GemmeryConfig: {path} is sharded while it is loaded; load the whole model, and shard it with "
                "gemmery.distributed"
            )
        if any(x is not None and x.device.type == "meta" for x in given.values()):
            return
        assert self.packing is not None
        after = packed(module, self.packing)
        # Without its numbers, it is the start of the inverse conversion.
        for name, parameter in given.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    parameter.detach().to("meta"), parameter.requires_grad
                )
        if isinstance(after, str):
            for name, parameter in given.items():
                module._parameters[name] = parameter
            raise ValueError(
                f"{path} can't be quantized: {after}; name it in modules_to_not_convert to leave it as it is"
            )
        for x in after._parameters.values():
            if x is not None:
                x._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark
        for one in [x for x in self.waiting.values() if x.before is module]:
            one.parent._modules[one.name] = after
            del self.waiting[one.path]
        is_on_cpu = any(x is not None and x.device.type == "cpu" for x in given.values())
        given.clear()
        if is_on_cpu:
            _give_back()

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        # transformers has initialized the parameters that the checkpoint lacks.
        for path in list(self.waiting):
            if path in self.waiting:
                self.take(path)
        kept = []
        names = [f"{name}.words" for name, x in model.named_parameters() if isinstance(x, PackedWeight)]
        for conversion in getattr(model, "_weight_conversions", None) or ():
            if not isinstance(conversion, WeightConverter) or not _is_of(conversion, names):
                kept.append(conversion)
        model._weight_conversions = kept
        return model

    # --- saving and the way back ------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Plain tensors, and the texts from which packed weights are built again."""
        tensors, texts = flattened(model.state_dict(), "save_pretrained")
        return tensors, {KEY: metadata_text(texts)}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # Saving a model leaves the name of its type in its configuration.
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or model.dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dequantize: dtype is {dtype!r}; it must be a floating type of torch")
        for path, block in list(model.named_modules(remove_duplicate=False)):
            if isinstance(block, PackedGatedMLP):
                model.set_submodule(path, block.apart())
            elif isinstance(block, StackedPart):
                model.set_submodule(path, block.alone())
            elif isinstance(block, StackedLinear):
                prefix, _, name = path.rpartition(".")
                # A module of attention may have several paths.
                model.get_submodule(prefix)._modules.pop(name, None)
        made: dict[int, nn.Module] = {}
        for path, module in list(model.named_modules(remove_duplicate=False)):
            if isinstance(module, PackedLinear) or (isinstance(module, Experts) and module.packed):
                if id(module) not in made:
                    made[id(module)] = _plain(module, self.originals.get(path), dtype)
                model.set_submodule(path, made[id(module)])
        return model


def _is_skipped(path: str, pattern: str) -> bool:
    return not should_convert_module(path, [pattern])


@functools.cache
def _malloc_trim() -> Any:
    """glibc's function; None if there is another C library."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None


def _give_back() -> None:
    """Returns the free memory between packed weights to the system.

    Quantizing needs memory in between. glibc keeps the memory below a weight that remains, which added up to more than
    the packed model.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _parts() -> tuple[str, ...]:
    """The names of all tensors that a packed weight may consist of."""
    return tuple(dict.fromkeys(name for kind in PackedWeight.KINDS for name in kind.INNER))


def _pattern(name: str) -> str:
    return rf"\.{name}$"


def _is_of(conversion: WeightConverter, names: list[str]) -> bool:
    """Whether saving would undo a conversion at one of these tensors, which are of packed weights."""
    if any(isinstance(step, _Read) for step in conversion.operations):
        return True
    back = conversion.reverse_transform()
    return any(back.rename_source_key(name)[1] is not None for name in names)


def _first(value: Any) -> Tensor:
    found: Tensor = value[0] if isinstance(value, list) else value
    return found


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Puts a weight that was read into its module, and quantizes the module if it is complete."""

    def __init__(self, quantizer: GemmeryQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, missing_keys: Any = None,
        **options: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        (value,) = map(_first, input_dict.values())
        path, _, name = full_layer_name.rpartition(".")
        slot = self.quantizer.waiting.get(path)
        if slot is None:
            # Another name of a module that is quantized already.
            _discard(missing_keys, full_layer_name)
            return {}
        own = slot.before._parameters[name]
        if own is None or own.shape != value.shape:
            # transformers tells what does not fit.
            del self.quantizer.waiting[path]
            return {full_layer_name: value}
        parameter = nn.Parameter(value, own.requires_grad)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark
        slot.before._parameters[name] = parameter
        del value
        input_dict.clear()
        self.quantizer.take(path)
        _discard(missing_keys, full_layer_name)
        return {}


class _Read(ConversionOps):  # type: ignore[misc]
    """Creates a packed weight from the tensors in files."""

    def __init__(self, quantizer: GemmeryQuantizer) -> None:
        # transformers reads this name, and then keeps the types of tensors.
        self.hf_quantizer = quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Read:
        return self

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        tensors = {
            name: _first(input_dict[key]) for name in _parts() if (key := _pattern(name)) in input_dict
        }
        own = model.get_parameter(full_layer_name)
        if not isinstance(own, PackedWeight):
            raise ValueError(
                f"{full_layer_name} is packed in the files and not in the model; modules_to_not_convert names it, or "
                "its kind is not known"
            )
        texts = self.hf_quantizer.texts_of(full_layer_name)
        if texts is None:
            texts = own.to_tensors()[1] | {"packing": str(self.hf_quantizer.quantization_config.packing)}
        weight = PackedWeight.from_tensors(tensors, texts)
        if type(weight) is not type(own) or weight.shape != own.shape:
            raise ValueError(f"{full_layer_name} is {weight!r} in the files, and {own!r} in the model")
        asked = self.hf_quantizer.dtype
        if self.hf_quantizer.quantization_config.dtype is None and asked in DTYPES and asked != weight.dtype:
            weight = weight.in_type(asked)
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


def _discard(missing_keys: Any, name: str) -> None:
    if missing_keys is not None:
        missing_keys.discard(name)


def _plain(module: nn.Module, original: nn.Module | None, dtype: torch.dtype) -> nn.Module:
    """A module with the numbers of packed weights.

    Args:
        original: the unquantized module, on meta; None for a module that was added later.
    """
    if original is None:
        if not isinstance(module, PackedLinear):
            raise ValueError(
                "dequantize: the model has experts that were quantized after it was loaded; call that report's undo() "
                "first"
            )
        original = nn.Linear(
            module.in_features, module.out_features, module.bias is not None, device="meta", dtype=dtype
        )
    for name, old in original._parameters.items():
        given = module._parameters[name]
        if old is None or given is None:
            continue
        value = given.dequantize(dtype) if isinstance(given, QuantizedTensor) else given.detach().to(dtype)
        if isinstance(module, Experts):
            value = _as_stored(value, original, name)
        elif transposed.resembles(original) and name == "weight":
            value = value.t().contiguous()
        original._parameters[name] = nn.Parameter(value, old.requires_grad)
    return original.train(module.training)


def _as_stored(value: Tensor, original: nn.Module, name: str) -> Tensor:
    """A weight or bias of experts in the order in which a class has it, see `hugging_face.stacked`."""
    is_first = not name.startswith("down_proj")
    if is_first and getattr(original, "has_gate", True) and not getattr(original, "is_concatenated", True):
        value = torch.stack(value.chunk(2, dim=1), dim=2).flatten(1, 2)
    if not name.endswith("_bias") and getattr(original, "is_transposed", False):
        value = value.mT
    return value.contiguous()


def _register() -> None:
    # Not by transformers' decorators, which reject a second registration: a module may be imported again.
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = GemmeryConfig
    auto.AUTO_QUANTIZER_MAPPING[NAME] = GemmeryQuantizer


_register()
