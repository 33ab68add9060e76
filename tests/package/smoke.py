"""Whether an installed gemmery works: run by the Python of its environment, `python -I smoke.py`, from any directory.

It needs torch, Triton and the packages of `gemmery[cli]`, no checkout, no compiler and no GPU; a GPU that is there is
used. It prints the versions and what was checked, and fails at the first thing that is wrong.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib import metadata
from pathlib import Path

#: What the kernels are asked for; also run through Triton's interpreter, in a process of its own.
PRODUCTS = ("plain", "epilogue", "gradient", "packed", "sparse", "module")
#: Commands, and what they have to print.
COMMANDS = {
    ("--version",): f"gemmery {metadata.version('gemmery')}",
    ("--help",): "Usage: gemmery",
    ("doctor",): "nothing is broken",
    ("inspect", "128", "128", "64", "--target", "sm_90"): "registers",
    ("ladder", "1"): "Results checked",
}


def products(device: str) -> None:
    """Products of each kind, beside torch's."""
    import torch
    from torch.nn import functional as F

    import gemmery
    import gemmery.nn

    torch.manual_seed(0)
    x = torch.randn(16, 64, dtype=torch.float16, device=device)
    w = torch.randn(64, 64, dtype=torch.float16, device=device)
    near = {"rtol": 2e-2, "atol": 0.2}
    for name in PRODUCTS:
        if name == "plain":
            torch.testing.assert_close(gemmery.matmul(x, w), x @ w, **near)
        elif name == "epilogue":
            torch.testing.assert_close(gemmery.linear(x, w, epilogue=F.gelu), F.gelu(F.linear(x, w)), **near)
        elif name == "gradient":
            given, wanted = x.float().requires_grad_(), x.float().requires_grad_()
            gemmery.matmul(given, w.float()).sum().backward()
            (wanted @ w.float()).sum().backward()
            torch.testing.assert_close(given.grad, wanted.grad, rtol=1e-4, atol=1e-3)
        elif name == "packed":
            q = gemmery.quantize(w, "int4", group_size=32)
            torch.testing.assert_close(gemmery.linear(x, q), x @ q.dequantize().T, **near)
        elif name == "sparse":
            s = gemmery.sparsify(w, "2:4")
            torch.testing.assert_close(gemmery.linear(x, s), x @ s.dense().T, **near)
        elif name == "module":
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).to(device, torch.float16)
            wanted = model(x)
            gemmery.nn.swap(model)
            torch.testing.assert_close(model(x), wanted, **near)


def installed() -> None:
    """The package is the one of this environment, with everything in it that is not Python, and needs no compiler."""
    import torch
    import triton

    import gemmery

    place = Path(gemmery.__file__).parent
    assert place.is_relative_to(sysconfig.get_paths()["purelib"]), f"gemmery is that of {place}"
    assert gemmery.__version__ == metadata.version("gemmery"), "the versions differ"
    for name in ("py.typed", "_tutorials/01_vector_add.py"):
        assert (place / name).is_file(), f"{name} is missing"
    required = metadata.requires("gemmery") or []
    assert any(line.startswith("triton") and "linux" in line for line in required), required
    print(
        f"gemmery {gemmery.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__} ({triton.__path__[0]})"
    )


def run(*words: str, **variables: str) -> str:
    """What a program of this environment prints; it has to succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(words, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def commands(on_gpu: bool) -> None:
    """The commands, each as a user runs it."""
    script = Path(sysconfig.get_paths()["scripts"]) / "gemmery"
    for words, wanted in COMMANDS.items():
        # The ladder would start itself again with the interpreter, and import torch twice.
        variables = {"TRITON_INTERPRET": "1"} if words[0] == "ladder" and not on_gpu else {}
        printed = run(str(script), *words, **variables)
        assert wanted in printed, f"gemmery {' '.join(words)} did not print {wanted!r}:\n{printed}"


def main() -> None:
    """All checks, in an empty directory with caches of its own."""
    start = time.perf_counter()
    if sys.argv[1:] == ["--interpreted"]:
        products("cpu")
        return
    here = str(Path(__file__).resolve())
    compilers = [name for name in ("cc", "gcc", "clang", "c++", "g++") if shutil.which(name)]
    if os.environ.get("SMOKE_WITHOUT_COMPILER"):
        assert not compilers, f"there is {compilers[0]}"
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        os.environ |= {"HOME": directory, "GEMMERY_CACHE_DIR": f"{directory}/gemmery", "COLUMNS": "120"}
        os.environ["TRITON_CACHE_DIR"] = f"{directory}/triton"
        installed()
        import torch

        on_gpu = torch.cuda.is_available()
        products("cuda" if on_gpu else "cpu")
        run(sys.executable, "-I", here, "--interpreted", TRITON_INTERPRET="1")
        said = "; commands: none, as typer is not installed"
        if importlib.util.find_spec("typer"):
            commands(on_gpu)
            said = f"; commands: {', '.join(words[0] for words in COMMANDS)}"
        os.chdir("/")
    compiler = f"with {compilers[0]}" if compilers else "without a compiler"
    print(
        f"smoke test passed in {time.perf_counter() - start:.0f} s, {compiler}: {', '.join(PRODUCTS)}{said}"
    )


if __name__ == "__main__":
    main()
