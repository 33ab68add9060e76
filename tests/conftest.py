"""What all tests share: one way of running kernels per process, samples of them, no success without a test."""

import gc
import importlib.util
import os
import sys
import zlib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

#: The folders, and whether kernels are interpreted in each. Triton decides that when a kernel is defined, so folders of
#: different kinds can't share a process.
INTERPRETED = {"host": False, "interpret": True, "compile": False, "gpu": False, "browser": False}

# What somebody measured on this machine must not decide what a test runs.
os.environ["GEMMERY_STORE"] = "0"
os.environ.pop("GEMMERY_LOG", None)

if importlib.util.find_spec("hypothesis"):  # machines with a GPU may have pytest alone
    from hypothesis import settings

    # Without a deadline, because the interpreter's time says nothing. The same examples each time, so that a red run is
    # about the change and not about luck; `--hypothesis-profile=search` goes looking for more.
    settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("sample", deadline=None, derandomize=True, max_examples=20)
    settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)
    settings.register_profile("search", deadline=None, max_examples=1000)
    settings.load_profile("ci")


def _folders(config: pytest.Config) -> list[str]:
    """The folders of this directory that the command line's paths reach."""
    found: set[str] = set()
    for argument in config.args:
        path = (config.invocation_params.dir / argument.split("::")[0]).resolve()
        if path != TESTS and path.is_relative_to(TESTS):
            found.add(path.relative_to(TESTS).parts[0])
        elif TESTS.is_relative_to(path):
            found.update(folder for folder in INTERPRETED if (TESTS / folder).is_dir())
    return sorted(found & INTERPRETED.keys())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thin",
        type=int,
        default=1,
        metavar="N",
        help="one in N sets of a test's parameters, by their names",
    )


def pytest_configure(config: pytest.Config) -> None:
    folders = _folders(config)
    names = ", ".join(f"tests/{folder}" for folder in folders)
    wanted = {INTERPRETED[folder] for folder in folders}
    is_on = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    if len(wanted) > 1:
        raise pytest.UsageError(
            f"{names} can't run in one process: kernels are either interpreted or compiled. "
            "Name one folder, or run `make test`."
        )
    if wanted == {True} and not is_on:
        if "triton" in sys.modules:
            raise pytest.UsageError(f"{names}: set TRITON_INTERPRET=1, something imported Triton already")
        os.environ["TRITON_INTERPRET"] = "1"
    if wanted == {False} and is_on:
        raise pytest.UsageError(
            f"{names}: unset TRITON_INTERPRET, these tests need kernels that are not interpreted"
        )


def pytest_report_header() -> str:
    # From the packages' metadata: an import would come before the switch is set.
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "numpy"))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m says
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin = config.getoption("--thin")
    left_out = [x for x in items if "[" in x.nodeid and zlib.crc32(x.nodeid.encode()) % thin]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [x for x in items if x not in gone]
    # Where the step has no factor in common with the lengths of a test's lists of parameters, each value is met.
    places: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            test = item.nodeid.split("[")[0]
            if places[test] % mark.args[0]:
                item.add_marker("exhaustive")
            places[test] += 1
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the garbage collector quick, and check that a group of tests runs in one worker, which sets it up once."""
    # With torch and transformers imported, each pass over all objects takes 0.2 s.
    gc.collect()
    gc.freeze()
    if not session.config.getoption("loadgroup", False):
        return
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if grouped and "@" not in grouped[0].nodeid:
        raise pytest.UsageError(
            "this pytest-xdist ignores groups with this pytest: install those of constraints.txt"
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session in which every test was skipped has checked nothing, so it is no success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus != pytest.ExitCode.OK or session.config.option.collectonly or reporter is None:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "xfailed", "xpassed")):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
