"""What users of torch take for granted: graphs, streams, the compiler, autograd, threads, huge tensors."""

import subprocess
import sys
import threading

import pytest
import torch

import gemmery
from gemmery.product.flat import arguments_of
from gemmery.product.run import checked
from gemmery.product.spec import NONE, Options
from tests.gpu.common import DEVICE, DRY, assert_product, error, matrix, needs_cuda, size, values, wide

pytestmark = pytest.mark.gpu

M, N, K = size(512), size(768), size(256)


# ---------------------------------------------------------------------------------------------------------------------
# Graphs and streams


@needs_cuda
@pytest.mark.parametrize("into_out", [False, True], ids=["fresh output", "out="])
def test_a_captured_call_replays_with_new_data(into_out):
    a, b, bias = matrix(M, K, torch.bfloat16), matrix(K, N, torch.bfloat16, "T"), values((N,), torch.bfloat16)
    out = torch.empty(M, N, dtype=torch.bfloat16, device=DEVICE) if into_out else None
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        gemmery.matmul(a, b, bias=bias, out=out)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gemmery.matmul(a, b, bias=bias, out=out)
    for _ in range(2):
        for tensor in (a, b, bias):
            tensor.copy_(values(tensor.shape, tensor.dtype))
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_product(result, a, b, bias)


_FIRST_CALL = """
import torch, gemmery
a = torch.randn(256, 192, device="cuda", dtype=torch.float16)
b = torch.randn(192, 320, device="cuda", dtype=torch.float16)
want = a.double() @ b.double()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        out = gemmery.matmul(a, b)
except RuntimeError as error:
    assert "captur" in str(error).lower(), f"no readable message: {error}"
    print("REFUSED")
else:
    graph.replay()
    torch.cuda.synchronize()
    assert (out.double() - want).norm() <= 1e-3 * want.norm()
    print("CAPTURED")
# Whatever became of the capture, the library goes on working.
out = gemmery.matmul(a, b)
assert (out.double() - want).norm() <= 1e-3 * want.norm()
"""


def child(code):
    """Run Python in a process of its own, since a capture that failed may leave CUDA in disorder."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split()


@needs_cuda
def test_the_first_call_of_a_shape_inside_a_capture_works_or_is_refused_clearly():
    assert child(_FIRST_CALL)[-1] in ("CAPTURED", "REFUSED")


@needs_cuda
def test_work_is_ordered_by_the_current_stream():
    """A producer and a consumer on a side stream: the product waits for one, and the other for it."""
    a, b = matrix(M, K, torch.bfloat16), matrix(K, N, torch.bfloat16)
    gemmery.matmul(a, b)  # compiled now, so that the launch below comes early enough to be wrong
    new, out = matrix(M, K, torch.bfloat16), torch.empty(M, N, dtype=torch.bfloat16, device=DEVICE)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles, some 50 ms
        a.copy_(new)
        gemmery.matmul(a, b, out=out)
        copy = out.clone()
    # Nothing on the default stream waits for the side stream, and nothing was launched there.
    assert torch.cuda.current_stream().query()
    assert not side.query()
    side.synchronize()
    assert_product(copy, new, b)


@needs_cuda
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_tensors_on_any_device(index):
    """With device 0 the current one; the results are complete on the tensors' own device."""
    device = torch.device("cuda", index)
    a, b = matrix(M, K, torch.bfloat16).to(device), matrix(K, N, torch.bfloat16).to(device)
    with torch.cuda.device(0):
        out = gemmery.matmul(a, b)
        bias = gemmery.linear(a, b.t().contiguous(), out[0])
        assert torch.cuda.current_device() == 0
    assert out.device == bias.device == device
    assert_product(out, a, b)


# ---------------------------------------------------------------------------------------------------------------------
# The compiler, operators, autograd


def layer(x, weight, bias):
    return gemmery.linear(x, weight, bias).relu() * 2


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic):
    """One graph without breaks; with `dynamic=True` one compilation for all sizes."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
    weight, bias = matrix(N, K, torch.float32), values((N,), torch.float32)
    for rows in (24, 72, 133) if dynamic else (24,):
        x = matrix(rows, K, torch.float32)
        assert torch.equal(compiled(x, weight, bias), layer(x, weight, bias))
    assert counter.frame_count == 1


def test_compile_with_out():
    torch._dynamo.reset()

    def into(a, b, out):
        gemmery.matmul(a + 1, b, out=out)
        return out * 2

    a, b = matrix(48, K, torch.float32), matrix(K, 64, torch.float32)
    out = torch.zeros(48, 64, device=DEVICE)
    doubled = torch.compile(into, fullgraph=True)(a, b, out)
    assert_product(out, a + 1, b)
    assert torch.equal(doubled, out * 2)


def test_compile_trains():
    torch._dynamo.reset()
    tensors = [matrix(48, K, torch.float32), matrix(N, K, torch.float32), values((N,), torch.float32)]
    gradients = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        function(*leaves).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, compiled in zip(*gradients, strict=True):
        assert error(compiled, wide(ours)) < 1e-5


def test_opcheck():
    a, b = matrix(33, 48, torch.float32), matrix(48, 80, torch.float32, "T")
    bias = values((80,), torch.float32)
    operator, into = torch.ops.gemmery.product.default, torch.ops.gemmery.product_out.default

    def arguments(*tensors, alpha=1, beta=1):
        return arguments_of(checked("matmul", *tensors, NONE, None, Options(), alpha, beta), "")

    torch.library.opcheck(operator, (*arguments(a, b, None), False))
    leaves = [tensor.clone().requires_grad_() for tensor in (a, b, bias)]
    torch.library.opcheck(operator, (*arguments(*leaves, alpha=0.5, beta=2), False))
    batch = values((3, 1, 33, 48), torch.float32).requires_grad_()
    torch.library.opcheck(operator, (*arguments(batch, *leaves[1:]), False))
    torch.library.opcheck(into, (*arguments(a, b, bias), torch.empty(33, 80, device=DEVICE)))


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(lower):
    a, b = matrix(M, K, torch.float32), matrix(N, K, torch.float32)
    bias = values((N,), torch.float32)
    with torch.autocast(DEVICE, dtype=lower):
        out = gemmery.linear(a, b, bias)
        wanted_type = torch.nn.functional.linear(a, b, bias).dtype
    assert out.dtype == wanted_type == lower
    assert torch.equal(out, gemmery.linear(a.to(lower), b.to(lower), bias.to(lower)))


SHAPES = [
    ((40, 24), (24, 56), (56,)),
    ((3, 5, 24), (24, 16), (16,)),
    ((2, 1, 20, 24), (3, 24, 16), (20, 1)),
    ((24,), (24, 16), (16,)),
    ((7, 24), (24,), ()),
    ((24,), (24,), ()),
]


@pytest.mark.parametrize(("a", "b", "bias"), SHAPES, ids=str)
def test_gradients_are_torchs(a, b, bias):
    """For a loss that depends on every element of the result."""
    leaves = [values(shape, torch.float64).requires_grad_() for shape in (a, b, bias)]
    ours = gemmery.matmul(leaves[0], leaves[1], bias=leaves[2])
    torchs = torch.matmul(leaves[0], leaves[1]) + leaves[2]
    weights = values(torchs.shape, torch.float64)
    for mine, want in zip(
        torch.autograd.grad((ours * weights).sum(), leaves),
        torch.autograd.grad((torchs * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, want, rtol=1e-10, atol=1e-10)


def test_gradients_by_differences():
    a, b, c = (values(shape, torch.float64).requires_grad_() for shape in ((5, 7), (7, 6), (5, 6)))
    assert torch.autograd.gradcheck(lambda *t: gemmery.addmm(t[2], t[0], t[1], alpha=0.5, beta=-2), (a, b, c))


def test_gradients_of_16_bit_operands_are_as_accurate_as_torchs():
    tensors = [matrix(M, K, torch.bfloat16), matrix(N, K, torch.bfloat16)]
    grad = values((M, N), torch.bfloat16)
    found = []
    for function in (gemmery.linear, torch.nn.functional.linear):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        function(*leaves).backward(grad)
        found.append([leaf.grad for leaf in leaves])
    wants = wide(grad) @ wide(tensors[1]), wide(grad).t() @ wide(tensors[0])
    for ours, torchs, want in zip(*found, wants, strict=True):
        assert error(ours, want) <= 1.01 * error(torchs, want)


# ---------------------------------------------------------------------------------------------------------------------
# Threads and memory


@needs_cuda  # the interpreter is for one thread
def test_threads_that_call_for_the_first_time_at_once():
    """Eight threads meet at shapes that none has seen, each on a stream of its own."""
    count, failures = 8, []
    shapes = [(40 + 8 * i, 72, 104) for i in range(3)]
    data = [(matrix(m, k, torch.float16), matrix(k, n, torch.float16)) for m, n, k in shapes]
    barrier = threading.Barrier(count)
    torch.cuda.synchronize()

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for a, b in data:
                    barrier.wait(timeout=120)
                    for _ in range(3):
                        assert_product(gemmery.matmul(a, b), a, b)
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@needs_cuda
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(4096, 4096, 1024), (1000, 1001, 1003), (16, 4096, 4096)],
    ids=["persistent", "odd", "flat"],
)
def test_a_call_allocates_its_output_and_copies_that_its_plan_names(m, n, k):
    a, b = matrix(m, k, torch.bfloat16), matrix(k, n, torch.bfloat16, "T")
    out = gemmery.matmul(a, b)
    copies = len(gemmery.plan(a, b).copies)
    assert copies == (2 if k % 8 else 0)

    def allocations():
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    gemmery.matmul(a, b, out=out)
    before = allocations()
    for _ in range(10):
        gemmery.matmul(a, b, out=out)
    assert allocations() == before + 10 * copies
    for _ in range(10):
        gemmery.matmul(a, b)
    assert allocations() == before + 10 + 20 * copies


# ---------------------------------------------------------------------------------------------------------------------
# Sizes past 32 bits


@pytest.fixture
def roomy():
    """Hand back what other tests hold, and afterwards what this one did."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def assert_rows(out, a, b, rows):
    """Check some rows of a product that is too big to be checked whole."""
    for start in rows:
        part, want = out[start : start + 64], wide(a[start : start + 64]) @ wide(b)
        assert_product(part, a[start : start + 64], b)
        assert error(part, want) < 1e-2  # over a long K the bound on each element is wide


def long_random(shape, dtype):
    """Random numbers made piece by piece, so that making them takes no multiple of the memory."""
    tensor = torch.empty(shape, dtype=dtype, device=DEVICE)
    for part in tensor.split(4096):
        part.copy_(values(part.shape, dtype))
    return tensor


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16], ids=str)
def test_an_operand_of_more_than_2_31_elements(dtype, roomy):
    a, b = long_random((70000, 32768), dtype), matrix(32768, 48, dtype, "T")
    assert a.numel() > 1 << 31
    # 65536 rows hold 2^31 elements.
    assert_rows(gemmery.matmul(a, b), a, b, (0, 32768 - 32, 65536 - 32, 70000 - 64))


@needs_cuda
def test_an_operand_of_more_than_2_31_elements_without_alignment(roomy):
    """The same through pointers."""
    a, b = long_random((70000, 32767), torch.int8), matrix(32767, 47, torch.int8, "T")
    assert a.numel() > 1 << 31
    assert_rows(gemmery.matmul(a, b), a, b, (0, 65536 - 32, 65538, 70000 - 64))


@needs_cuda
def test_a_second_operand_of_more_than_2_31_elements(roomy):
    b = long_random((70000, 32768), torch.int8).t()
    a = matrix(48, 32768, torch.int8)
    assert b.numel() > 1 << 31
    out = gemmery.matmul(a, b)
    assert_rows(out.t(), b.t(), a.t(), (0, 65536 - 32, 70000 - 64))


@needs_cuda
@pytest.mark.parametrize("n", [36864, 36865], ids=["aligned", "odd"])
def test_an_output_of_more_than_2_31_elements(n, roomy):
    a, b = matrix(65536, 64, torch.float16), matrix(64, n, torch.float16, "T")
    out = gemmery.matmul(a, b)
    assert out.numel() > 1 << 31
    # 2^31 elements are some 58254 rows.
    assert_rows(out, a, b, (0, 29000, 58254 - 32, 65536 - 64))


@needs_cuda
@pytest.mark.parametrize("start", [0, 8], ids=["aligned", "misaligned"])
@pytest.mark.parametrize(
    "where", ["rows of a", "columns of a", "rows of b", "columns of b", "rows of out", "columns of out"]
)
def test_strides_of_more_than_2_31(where, start, roomy):
    """Three rows or columns further apart than 32 bits reach, through pointers and, if aligned, descriptors."""
    direction, _, name = where.split()
    step, by_rows = (1 << 31) + 16, direction == "rows"
    # The extent that is walked in such steps is 3: M, N or K.
    m, n, k = 48, 96, 80
    if where in ("rows of a", "rows of out"):
        m = 3
    elif where in ("columns of b", "columns of out"):
        n = 3
    else:
        k = 3
    shapes = {"a": (m, k), "b": (k, n), "out": (m, n)}
    dtype = torch.int32 if name == "out" else torch.int8
    buffer = torch.zeros(2 * step + 256, dtype=dtype, device=DEVICE)
    far = buffer.as_strided(shapes[name], (step, 1) if by_rows else (1, step), start)
    tensors = {key: far if key == name else values(shapes[key], torch.int8) for key in ("a", "b")}
    if name == "out":
        gemmery.matmul(tensors["a"], tensors["b"], out=far)
        assert_product(far, tensors["a"], tensors["b"])
        assert buffer.count_nonzero() == far.count_nonzero()
    else:
        far.copy_(values(far.shape, torch.int8))
        assert_product(gemmery.matmul(tensors["a"], tensors["b"]), tensors["a"], tensors["b"])


@needs_cuda
def test_a_batch_further_apart_than_2_31(roomy):
    step = (1 << 31) + 16
    buffer = torch.zeros(2 * step + 4096, dtype=torch.int8, device=DEVICE)
    a = buffer.as_strided((3, 32, 64), (step, 64, 1))
    a.copy_(values(a.shape, torch.int8))
    b = values((3, 64, 48), torch.int8)
    assert_product(gemmery.bmm(a, b), a, b)


def test_a_batch_of_many_small_matrices():
    """More than the 65535 blocks that CUDA launches along a grid's second dimension."""
    count = 200 if DRY else 70000
    a, b = values((count, 8, 16), torch.float16), values((count, 16, 8), torch.float16)
    assert_product(gemmery.bmm(a, b), a, b)
    # The same b for all, and one of its own for each in a batch of two dimensions that do not merge.
    assert_product(gemmery.matmul(a, b[0]), a, b[0])
    pairs = a[: count // 2 * 2].view(-1, 2, 8, 16)
    assert_product(gemmery.matmul(pairs, b[:2]), pairs, b[:2])
