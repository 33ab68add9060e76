"""Triton's interpreter without work that changes nothing."""

import functools

#: Words of a frame that gets a chunk of its own, of 8 MB.
LARGE = 1_000_000


def make_quick(set_attribute=setattr):
    """Change the interpreter of this process.

    Args:
        set_attribute: is called as `setattr` is; `pytest.MonkeyPatch.setattr` can take the changes back.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    # Sums and products of integers are computed a second time, in 64 bits, for assertions that are switched off.
    assert not interpreter.InterpreterOptions.debug
    set_attribute(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    _ask_once_a_type(interpreter, set_attribute)
    _patch_once_a_kernel(interpreter, set_attribute)


def _ask_once_a_type(interpreter, set_attribute):
    """NumPy's type of a tensor's numbers is asked for at each operation, and the answer takes a dictionary of all."""
    look_up, known = interpreter._get_np_dtype, {}

    def known_type(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    set_attribute(interpreter, "_get_np_dtype", known_type)


def _patch_once_a_kernel(interpreter, set_attribute):
    """A kernel patches `triton.language` when it begins, and takes that back when it ends.

    The interpreter patches again at each call of a device function in between, which changes nothing. Here it does so
    once for each module of device functions.
    """
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

    # Python keeps the frames of calls in chunks of 16 KB. Where a call crosses the end of one, Python takes a chunk from
    # the system for it and gives it back afterwards, which takes longer than most of the interpreter's calls do. All
    # calls below a large frame have room in its chunk.
    run_patched.__code__ = run_patched.__code__.replace(co_stacksize=LARGE)
    set_attribute(interpreter, "_patch_lang", patch_once)
    set_attribute(interpreter.GridExecutor, "__call__", run_patched)
