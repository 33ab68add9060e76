"""Triton's interpreter without the work that it repeats, and tests that do not depend on those before them."""

import functools

import pytest


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """Each test begins without the calls and plans of the tests before it, so it does the same alone and among them."""
    from gemmery.product import cache

    cache.forget()


@pytest.fixture(scope="session", autouse=True)
def patches_once_a_kernel():
    """A kernel patches `triton.language` when it begins, and takes that back when it ends.

    The interpreter patches again at each call of a device function in between, which changes nothing and takes two
    fifths of the time of these tests. Here it does so once for each module of device functions.
    """
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    kernels = []  # of each that is running, the modules for which it has patched

    def patch_once(function):
        module = id(function.__globals__)
        if kernels and module in kernels[-1]:
            return None  # which only a kernel looks at, and its own module is never among these
        if kernels:
            kernels[-1].add(module)
        return patch(function)

    @functools.wraps(run)
    def run_patched(self, *args, **kwargs):
        kernels.append(set())
        try:
            return run(self, *args, **kwargs)
        finally:
            kernels.pop()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", patch_once)
        patches.setattr(interpreter.GridExecutor, "__call__", run_patched)
        yield
