"""The message if torch or Triton is not installed, which no dependency can bring on every machine."""

#: By the module that is missing.
ADVICE = {
    "torch": "gemmery needs torch 2.11 or newer: https://pytorch.org/get-started has the command that installs it",
    "triton": (
        "gemmery needs Triton 3.6 or newer. With a torch for CUDA or for the CPU, on Linux: pip install 'triton>=3.6'. "
        "A torch for ROCm brings its own Triton: install that torch again. There is none for macOS, and gemmery "
        "was not tried on Windows"
    ),
}


def advised(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with what to install, where it is about torch or Triton, absent or too old; else the error as it is."""
    advice = ADVICE.get((error.name or "").split(".")[0])
    return error if advice is None else ModuleNotFoundError(advice, name=error.name)
