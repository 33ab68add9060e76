"""The message if torch or Triton is absent or too old, which no dependency can prevent on every machine."""

import re
import sys

#: By package: the oldest version that has what gemmery imports, and what to install.
OLDEST = {"torch": (2, 11), "triton": (3, 6)}
ADVICE = {
    "torch": "gemmery needs torch 2.11 or newer: https://pytorch.org/get-started has the command that installs it",
    "triton": (
        "gemmery needs Triton 3.6 or newer. With a torch for CUDA or for the CPU, on Linux: pip install 'triton>=3.6'. "
        "A torch for ROCm brings its own Triton: install that torch again. There is none for macOS, and gemmery "
        "was not tried on Windows"
    ),
}


def advised(error: ImportError) -> ImportError:
    """The error with what to install, if torch or Triton is absent or too old; else the error as it is.

    A module that a sufficiently new Triton lacks belongs to a broken installation, which the error itself describes.
    """
    package = (error.name or "").split(".")[0]
    if package not in ADVICE:
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return ModuleNotFoundError(ADVICE[package], name=package)
    # A package that failed to import is not among the modules: its own error tells more.
    version = getattr(sys.modules.get(package), "__version__", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) >= OLDEST[package]:
        return error
    return type(error)(f"{package} {version} is too old: {ADVICE[package]}", name=error.name)
