"""gemmery in vLLM: a quantization of this name, and kernels for checkpoints of other libraries.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. It is written
against the interfaces of vLLM 0.33. Only the modules in this package need vLLM, and nothing else of gemmery imports
them.

    vllm serve meta-llama/Llama-3.1-8B --quantization gemmery
    GEMMERY_VLLM_KERNELS=int,fp8 vllm serve Qwen/Qwen3-8B-AWQ
"""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

#: The environment variable that puts kernels before vLLM's own, and the words that it may have.
VARIABLE, KINDS = "GEMMERY_VLLM_KERNELS", ("int", "fp8")


def register() -> None:
    """Register the quantization "gemmery" in vLLM, and kernels if the environment variable names them.

    The quantization changes a model only if it is chosen by its name. `GEMMERY_VLLM_KERNELS` names the kernels that
    come before vLLM's own, separated by commas: "int" computes linear layers with int4 and int8 weights of GPTQ, AWQ
    and compressed-tensors, "fp8" those with fp8 weights and activations. A second call does nothing.

    If vLLM's interfaces differ from those that this module supports, the quantization is not registered, and a warning
    is logged.

    Raises:
        ValueError: the variable contains an unknown word.
        ImportError: the variable names kernels, and vLLM's interfaces differ from those that this module supports.
    """
    wanted = asked(os.environ.get(VARIABLE, ""))
    try:
        from . import config, kernels
    except ImportError as error:
        if wanted:
            raise
        logging.getLogger("gemmery").warning(
            "vLLM has other interfaces than version 0.33, so there is no quantization %r: %s",
            "gemmery",
            error,
        )
        return
    config.register()
    for kind in wanted:
        kernels.put_first(kind)


def asked(text: str) -> list[str]:
    """The words of the environment variable, each once.

    Example:
        >>> asked("int, fp8")
        ['int', 'fp8']
        >>> asked("")
        []
    """
    words = list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))
    for word in words:
        if word not in KINDS:
            raise ValueError(f"{VARIABLE}: there is no {word!r}; it may have {' and '.join(KINDS)}")
    return words
