"""2:4 sparse weights on the host: how they lie, which numbers are kept, and what the tensor does as one of torch."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import gemmery
from gemmery import epilogues
from gemmery.formats import SparseTensor, load_safetensors, save_safetensors, sparsify
from gemmery.formats.kept import CODES
from gemmery.formats.sparse import (
    check_metadata,
    packed_metadata,
    padded,
    sparsify_as,
    transposable_mask,
    unpacked_metadata,
)
from gemmery.operands.packed import PackedOperand
from gemmery.operands.sparse import DECODERS, SparseOperand
from gemmery.product.run import _parts

BF16, F16 = torch.bfloat16, torch.float16
#: Whole blocks of 32 rows and 64 columns, parts of them, a batch of one and of two dimensions, and no rows.
SHAPES = [(32, 64), (64, 192), (40, 68), (1, 4), (33, 132), (3, 40, 100), (2, 3, 32, 64), (0, 64), (32, 0)]
#: Four bits that no metadata has: the first place is not below the second one.
UNDEFINED = [first | second << 2 for second in range(4) for first in range(second, 4)]


def values(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pruned(w):
    """The two largest of each four by a loop of its own; of equal ones the first."""
    result = torch.zeros_like(w)
    for at in itertools.product(*map(range, w.shape[:-1])):
        row = w[at]
        for k in range(0, w.shape[-1], 4):
            first = sorted(range(k, k + 4), key=lambda i: (-abs(row[i].item()), i))[:2]
            for i in first:
                result[(*at, i)] = row[i]
    return result


def check_equal(a, b):
    assert type(a).__mro__[0] in (SparseTensor, torch.nn.Parameter)
    assert (a.shape, a.dtype, a.device, a.static) == (b.shape, b.dtype, b.device, b.static)
    assert a.parts().keys() == b.parts().keys()
    assert all(x.equal(y) for x, y in zip(a.parts().values(), b.parts().values(), strict=True))


def made_again(w):
    """A weight of another one's parts, which checks them."""
    how = {"code": w.code, "dtype": w.dtype, "group_size": w.group_size} if w.code else {}
    return SparseTensor(w.shape, **w.parts(), **how)


def apart(a, b):
    return all(
        x.data_ptr() != y.data_ptr() for x, y in zip(a.parts().values(), b.parts().values(), strict=True)
    )


def full(*batch, seed=0, per_row=True):
    """A weight with everything that one can have."""
    w = sparsify(values(*batch, 72, 196, seed=seed))
    channel = torch.rand((*batch, 72) if per_row else (1,)) + 0.5
    return w.with_parts(w.parts() | {"channel": channel})


def int4(*shape, group_size=32, dtype=BF16):
    return gemmery.quantize(sparsify(values(*shape, dtype=dtype)), "int4", group_size=group_size)


WEIGHTS = {
    "plain": lambda: sparsify(values(64, 128)), "channel": full, "one": lambda: full(per_row=False),
    "batch": lambda: full(2, 3), "float16": lambda: sparsify(values(40, 100, dtype=F16)),
    "int4": lambda: int4(72, 196, dtype=F16), "int4 rows": lambda: int4(64, 128, group_size=0),
    "int4 batch": lambda: int4(2, 3, 40, 196, group_size=64),
}  # fmt: skip
each_weight = pytest.mark.parametrize("w", [make() for make in WEIGHTS.values()], ids=WEIGHTS)


def test_a_repeated_call_looks_at_all_of_a_weight():
    """`product.run` writes down by hand what `values` of operands has, since that takes less time."""
    x, packed = values(3, 196), gemmery.quantize(values(72, 196), "int4", group_size=32)
    for weight, operand in ((full(), SparseOperand), (int4(72, 196), SparseOperand), (packed, PackedOperand)):
        given, _ = _parts(x, weight)
        assert all(one is other for one, other in zip(given, [x, *operand(weight).values], strict=True))


# --- pruning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_two_of_four_are_kept(shape, dtype):
    x = values(*shape, dtype=dtype)
    w = sparsify(x, "2:4")
    half = x.to(dtype if dtype in (BF16, F16) else BF16)
    assert (tuple(w.shape), w.dtype) == (shape, half.dtype)
    assert w.dense().equal(pruned(half))
    rows, columns = padded(*shape[-2:])
    assert w.values.shape == (*shape[:-2], rows, columns // 2)
    assert w.metadata.shape == (*shape[:-2], columns // 32, rows)
    check_metadata(w.metadata, "test")
    assert not w.values[..., shape[-2] :, :].any()
    assert not w.values[..., shape[-1] // 2 :].any()


def test_bytes():
    w = sparsify(values(64, 256))
    assert w.nbytes * 8 == 64 * 256 * 9
    text = "SparseTensor((64, 256), pattern=2:4, dtype=torch.bfloat16, device='cpu', bytes=18432)"
    assert repr(w) == text


def test_of_equal_numbers_the_first_are_kept_and_nan_is_seen():
    assert sparsify(torch.ones(1, 4).half()).dense().tolist() == [[1, 1, 0, 0]]
    assert sparsify(torch.tensor([[-2.0, 1, 2, 2]]).half()).dense().tolist() == [[-2, 0, 2, 0]]
    w = sparsify(torch.tensor([[1.0, torch.nan, 3, torch.inf]]).half()).dense()
    assert w[0, 1].isnan()
    assert w[0, 3].isinf()


def test_negative_zero_counts_as_zero():
    x = torch.tensor([[-0.0, 1, -0.0, 2], [-0.0, -0.0, -0.0, -0.0], [1, -0.0, -0.0, -0.0]]).half()
    for method in ("as_is", "magnitude"):
        w = sparsify(x, method=method)
        assert w.dense().equal(x)
        assert not torch.signbit(w.dense()).any()
        assert not torch.signbit(w.values).any()


@pytest.mark.parametrize("pattern", [p for p in itertools.product((0, 1), repeat=4) if sum(p) <= 2])
def test_as_is_keeps_what_is_there(pattern):
    x = torch.tensor([pattern]).half() * torch.tensor([[1.0, -2, 3, -4]]).half()
    x = x.repeat(5, 17)
    w = sparsify(x, method="as_is")
    assert w.dense().equal(x)
    check_metadata(w.metadata, "test")


def test_as_is_names_the_first_place_with_too_many():
    x = sparsify(values(3, 40, 100)).dense()
    x[1, 7, 52:55] = 1
    x[2, 0, 0:4] = 1
    with pytest.raises(
        ValueError, match=r"sparsify: weight\[1, 7, 52:56\] has [34] nonzero elements; .*as_is"
    ):
        sparsify(x, method="as_is")
    with pytest.raises(ValueError, match=r"weight\[0:4\]|weight\[0, 0:4\] has 4 nonzero"):
        sparsify(torch.ones(1, 4), method="as_is")


@pytest.mark.parametrize("shape", [(4, 4), (32, 64), (40, 100), (3, 12, 20)])
def test_transposable(shape):
    x = values(*shape)
    mask = transposable_mask(x)
    blocks = mask.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4))
    assert blocks.sum(-1).eq(2).all()
    assert blocks.sum(-3).eq(2).all()
    w = sparsify(x, method="transposable")
    assert w.dense().equal(torch.where(mask, x, 0))
    check_equal(sparsify_as(x, mask), w)
    turned = sparsify_as(x.mT, mask.mT)
    assert turned.dense().equal(w.dense().mT)
    check_equal(sparsify(w.dense().mT, method="as_is"), turned)


def test_transposable_masks_are_the_best_of_all():
    patterns = [
        torch.tensor(p)
        for p in itertools.product([r for r in itertools.product((0, 1), repeat=4) if sum(r) == 2], repeat=4)
        if torch.tensor(p).sum(0).eq(2).all()
    ]
    assert len(patterns) == 90
    x = values(32, 32, dtype=torch.float32)
    mask = transposable_mask(x)
    generator = torch.Generator().manual_seed(1)
    for i, k in itertools.product(range(0, 32, 4), repeat=2):
        block = x[i : i + 4, k : k + 4].abs()
        kept = (block * mask[i : i + 4, k : k + 4]).sum()
        assert kept >= max((block * p).sum() for p in patterns) - 1e-5
        assert kept >= (block * patterns[int(torch.randint(90, (), generator=generator))]).sum() - 1e-6
    everything, by_rows = x.abs().sum(), pruned(x).abs().sum()
    assert everything / 2 < x[mask].abs().sum() < by_rows


def test_errors_of_sparsify():
    for arguments, error, text in (
        ((torch.ones(4, 4), "1:4"), ValueError, "pattern is '1:4'; it must be '2:4'"),
        ((torch.ones(4, 6),), ValueError, r"weight is \(4, 6\); it must be .*K is a multiple of 4"),
        ((torch.ones(4),), ValueError, r"weight is \(4,\)"),
        ((torch.ones(4, 4, dtype=torch.int8),), TypeError, "weight is torch.int8; it must be float16"),
        ((torch.ones(4, 4).to(torch.float8_e4m3fn),), TypeError, "weight is torch.float8_e4m3fn"),
        (([[1.0] * 4],), TypeError, "weight is a list; it must be a plain tensor"),
        ((sparsify(torch.ones(4, 4)),), TypeError, "weight is a SparseTensor"),
        ((gemmery.quantize(torch.ones(16, 32), "int8"),), TypeError, "weight is a QuantizedTensor"),
    ):
        with pytest.raises(error, match=f"sparsify: {text}"):
            sparsify(*arguments)
    with pytest.raises(
        ValueError, match="method is 'best'; it must be one of magnitude, transposable, as_is"
    ):
        sparsify(torch.ones(4, 4), method="best")
    with pytest.raises(
        ValueError, match=r"weight is \(6, 8\); for method='transposable' N must be a multiple"
    ):
        sparsify(torch.ones(6, 8), method="transposable")


def test_on_meta():
    w = sparsify(torch.empty(40, 100, device="meta", dtype=BF16), method="as_is")
    assert (w.device.type, w.shape, w.nbytes) == ("meta", (40, 100), sparsify(values(40, 100)).nbytes)


# --- how it lies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(32, 64), (64, 128), (96, 320)])
def test_it_lies_as_torchs_own(shape, dtype):
    dense = sparsify(values(*shape, dtype=dtype)).dense()
    dense[:, :8] = 1 + torch.arange(8)  # what they keep of four zeros differs
    dense = sparsify(dense).dense()
    ours = sparsify(dense, method="as_is")
    numbers, metadata = sparse_semi_structured_from_dense_cutlass(dense)
    assert numbers.shape == ours.values.shape
    assert numbers.equal(ours.values)
    assert metadata.view(torch.int32).view(ours.metadata.shape).equal(ours.metadata)
    theirs = ours.metadata.view(torch.int16).view(metadata.shape)
    assert sparse_semi_structured_to_dense_cutlass(ours.values, theirs).equal(dense)


def test_torchs_own_is_taken_without_a_copy(monkeypatch):
    class SparseSemiStructuredTensorCUTLASS:
        """What is read of torch's class, which asks for a GPU when one is made."""

        def __init__(self, dense):
            self.shape, self.dtype, self.dense = dense.shape, dense.dtype, dense
            if not (dense.shape[0] % 32 or dense.shape[1] % 64):
                self.packed, self.meta = sparse_semi_structured_from_dense_cutlass(dense)

        def to_dense(self):
            return self.dense

    monkeypatch.setattr(torch.sparse, "SparseSemiStructuredTensor", SparseSemiStructuredTensorCUTLASS)
    dense = sparsify(values(64, 128)).dense()
    theirs = SparseSemiStructuredTensorCUTLASS(dense)
    ours = sparsify(theirs, method="transposable")
    assert ours.dense().equal(dense)
    assert ours.values is theirs.packed
    assert ours.metadata.data_ptr() == theirs.meta.data_ptr()
    turned = SparseSemiStructuredTensorCUTLASS(dense)
    turned.packed = turned.meta = None
    with pytest.raises(
        ValueError, match=r"sparsify: weight is the transpose of .*, \(64, 128\); .* without .t\(\)"
    ):
        sparsify(turned)
    with pytest.raises(TypeError, match=r"quantize: w is torch's .*; quantize gemmery.sparsify\(w\)"):
        gemmery.quantize(theirs, "int8")
    odd = sparsify(values(48, 32)).dense()
    assert sparsify(SparseSemiStructuredTensorCUTLASS(odd)).dense().equal(odd)


def test_products_do_not_take_torchs_own():
    dense = sparsify(values(64, 128)).dense()
    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    theirs = torch.sparse.SparseSemiStructuredTensorCUTLASS(dense.shape, packed, meta, None, None, None)
    with pytest.raises(
        TypeError, match=r"linear: weight is torch's semi-structured tensor; make a .* by gemmery"
    ):
        gemmery.linear(values(5, 128), theirs)
    assert sparsify(theirs).dense().equal(dense)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_metadata_there_and_back(batch):
    first_of = torch.tensor([first | second << 2 for second in range(4) for first in range(second)])
    nibbles = first_of[torch.randint(6, (*batch, 64, 32), generator=torch.Generator().manual_seed(0))].int()
    words = packed_metadata(nibbles)
    assert words.shape == (*batch, 4, 64)
    assert unpacked_metadata(words).equal(nibbles)
    check_metadata(words, "test")


@pytest.mark.parametrize("nibble", UNDEFINED)
def test_undefined_metadata_is_refused(nibble):
    w = sparsify(values(40, 100))
    nibbles = unpacked_metadata(w.metadata)
    assert not torch.isin(nibbles, torch.tensor(UNDEFINED)).any()
    nibbles[37, 9] = nibble
    wrong = w.with_parts(w.parts() | {"metadata": packed_metadata(nibbles)})
    tensors, texts = wrong.to_tensors()
    with pytest.raises(
        ValueError,
        match=r"from_tensors: in the metadata, row 37, columns 36 to 39 have the places \d and \d; the first must be",
    ):
        SparseTensor.from_tensors(tensors, texts)
    with pytest.raises(ValueError, match="row 37, columns 36 to 39"):
        pickle.loads(pickle.dumps(wrong))


# --- few bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 0, 32, 64, 256])
@pytest.mark.parametrize("shape", [(32, 64), (40, 100), (33, 68), (2, 64, 320), (0, 64), (32, 0)])
def test_int4_is_rounded_as_in_a_dense_weight(shape, group_size):
    """Zeros between the kept numbers change neither scales nor codes."""
    s = sparsify(values(*shape))
    w = gemmery.quantize(s, "int4", group_size=group_size)
    dense = gemmery.quantize(s.dense(), "int4", group_size=group_size)
    assert (w.code, w.group_size, w.dtype) == ("int4", dense.group_size, BF16)
    assert w.metadata.equal(s.metadata)
    assert w.dense(torch.float32).equal(dense.dequantize(torch.float32))
    check_equal(made_again(w), w)
    rows, columns = padded(*shape[-2:])
    assert w.values.shape == (*shape[:-2], rows, columns // 4)
    if group_size != 0:
        assert w.channel is None
        assert not w.scales[..., shape[-2] :].any()


def test_int4_by_hand():
    """A scale may be negative: the largest number is -8 of them. Others are rounded to nearest, ties to even."""
    x = torch.zeros(1, 64)
    x[0, [1, 3, 4, 6, 40, 42]] = torch.tensor([4.0, -3.5, 0.25, 1.5, 2.0, -2.0])
    w = gemmery.quantize(sparsify(x, method="as_is"), "int4", group_size=32)
    # By -0.5: -8, 7, -0.5, -3. In the second group both signs are as large, so that nothing is clipped.
    assert w.scales[:, 0].tolist() == [-0.5, torch.tensor(2 / 7).bfloat16().item()]
    low, high = w.values[0, :2] & 15, (w.values[0, :2] >> 4) & 15
    assert (low.tolist(), high.tolist()) == ([8, 0], [7, 13])
    assert w.dense()[0, [0, 1, 2, 3, 4, 6]].tolist() == [0, 4, 0, -3.5, 0, 1.5]
    assert w.values[0, 10].item() == 7 | -7 << 4


def test_int4_keeps_the_rows_scales_that_there_are():
    for group_size in (0, 32):
        plain, scaled = sparsify(values(40, 100)), sparsify(values(40, 100))
        channel = torch.rand(40) + 0.5
        scaled = scaled.with_parts(scaled.parts() | {"channel": channel})
        w, without = (gemmery.quantize(x, "int4", group_size=group_size) for x in (scaled, plain))
        assert w.unscaled().dense().equal(without.unscaled().dense())
        want = without.channel * channel if group_size == 0 else channel
        assert w.channel.equal(want)


def test_int4_in_other_types_and_on_meta():
    w = int4(72, 196)
    half = w.half()
    assert (half.dtype, half.scales.dtype) == (F16, F16)
    assert half.values.equal(w.values)
    check_equal(half.bfloat16(), w)
    check_equal(gemmery.quantize(sparsify(values(72, 196)), "int4", group_size=32, dtype=BF16), w)
    large = gemmery.quantize(sparsify(torch.full((4, 32), 1e6, dtype=BF16)), "int4", group_size=32)
    with pytest.raises(ValueError, match=r"scales have .* would become inf in torch.float16"):
        large.half()
    meta = gemmery.quantize(sparsify(torch.empty(72, 196, dtype=BF16, device="meta")), "int4", group_size=32)
    assert (meta.device.type, meta.nbytes, meta.shape) == ("meta", w.nbytes, w.shape)


def test_bytes_of_int4():
    """3 bits a weight, and 16 for each group of a row."""
    assert int4(64, 256, group_size=128).nbytes * 8 == 64 * (256 * 3 + 2 * 16)
    assert int4(64, 256, group_size=0).nbytes * 8 == 64 * (256 * 3 + 32)
    text = "SparseTensor((64, 256), pattern=2:4, code=int4, group_size=128, dtype=torch.bfloat16, device='cpu', bytes=6400)"
    assert repr(int4(64, 256, group_size=128)) == text


def test_a_type_that_is_asked_for_rounds_scales_alone():
    """As in a dense weight: numbers that float16 can't hold are no error where float32 scales hold them."""
    w = sparsify(torch.tensor([[864256.0, 0, 0, 3], [1e-9, 0, -2e-9, 0]]).bfloat16())
    for format in ("int8", "e4m3"):
        q = gemmery.quantize(w, format, dtype=F16)
        assert q.dtype == F16
        check_equal(q.bfloat16(), gemmery.quantize(w, format))
        torch.testing.assert_close(q.dense(torch.float32), w.dense().float(), rtol=2**-4, atol=1e4)
        assert q.dense(torch.float32)[1, 2] != 0
    text = "quantize: w has 864256, which torch.float16 can't hold: its largest number is 65504"
    with pytest.raises(ValueError, match=text):
        gemmery.quantize(w, "int4", group_size=32, dtype=F16)
    dense = values(40, 100) * 1e-4
    for group_size in (0, 32):
        q = gemmery.quantize(sparsify(dense), "int4", group_size=group_size, dtype=F16)
        want = gemmery.quantize(sparsify(dense).dense(), "int4", group_size=group_size, dtype=F16)
        assert q.dense().equal(want.dequantize())


@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_coo])
def test_torchs_sparse_layouts_are_refused(layout):
    x = torch.eye(64)
    x = x.to_sparse_bsr((16, 16)) if layout == torch.sparse_bsr else x.to_sparse()
    with pytest.raises(
        TypeError, match=rf"sparsify: weight is sparse \({layout}\); it must be a strided tensor"
    ):
        sparsify(x)
    with pytest.raises(TypeError, match=rf"quantize: w is sparse \({layout}\); it must be a strided tensor"):
        gemmery.quantize(x, "int8")


def test_errors_of_quantize():
    w = sparsify(values(40, 100))
    for arguments, text in (
        (
            {"format": "int4", "group_size": 16},
            "group_size is 16; with int4 and a sparse weight it must be one of 0, 32",
        ),
        ({"format": "int4", "group_size": 48}, "group_size is 48; with int4"),
        (
            {"format": "int8", "group_size": 32},
            "group_size is 32; with int8 and a sparse weight it must be 0$",
        ),
        ({"format": "int4", "symmetric": False}, "a sparse weight has no zero points"),
        ({"format": "nf4"}, "format is 'nf4' for a sparse weight; it must be one of e4m3, int8, int4"),
        (
            {"format": "int8", "scale": "tensor"},
            "a sparse weight has no zero points, and no scale of the tensor",
        ),
        ({"format": "int8", "scale": "foo"}, "scale is 'foo'; it must be 'tensor', 'channel' or 'block'"),
        (
            {"format": "e4m3", "dtype": torch.int8},
            "dtype is torch.int8; it must be torch.float16 or torch.bf",
        ),
        ({"format": "int4", "dtype": torch.float32}, "dtype is torch.float32; it must be torch.float16 or"),
        ({"format": "int8", "dtype": "half"}, "dtype is half; it must be torch.float16 or torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"quantize: {text}"):
            gemmery.quantize(w, **arguments)
    for arguments, text in (
        ({"symmetric": "no"}, "symmetric is 'no'; it must be True or False"),
        ({"group_size": True}, "group_size is True; it must be an int or None"),
        ({"group_size": 32.0}, "group_size is 32.0; it must be an int or None"),
    ):
        with pytest.raises(TypeError, match=f"quantize: {text}"):
            gemmery.quantize(w, "int4", **arguments)
    for code, bits in (("int4", 4), ("e4m3", 8)):
        with pytest.raises(ValueError, match=f"have {bits} bits already"):
            gemmery.quantize(gemmery.quantize(w, code), "int4")
    with pytest.raises(ValueError, match="w has NaN or infinity"):
        gemmery.quantize(sparsify(torch.full((4, 4), torch.nan)), "int4")
    x = gemmery.quantize_activations(values(4, 64), "e4m3")
    with pytest.raises(TypeError, match="b keeps elements of int4; a sparse b must keep e4m3"):
        gemmery.scaled_matmul(x, int4(32, 64))


# --- as a tensor -----------------------------------------------------------------------------------------------------


@each_weight
def test_copies(w):
    for result in (w.clone(), copy.deepcopy(w), w.to("cpu", copy=True), pickle.loads(pickle.dumps(w))):
        check_equal(result, w)
        assert apart(result, w)
    for result in (w.detach(), w.data, w.cpu(), w.contiguous(), w.to(w.dtype), w[:]):
        check_equal(result, w)
        assert not apart(result, w)
    with torch.inference_mode():
        check_equal(w.clone().to(w.dtype), w)


@each_weight
def test_torch_save_and_load(w):
    file = io.BytesIO()
    torch.save({"a": w, "p": torch.nn.Parameter(w, requires_grad=False)}, file)
    file.seek(0)
    for result in torch.load(file, weights_only=True).values():
        check_equal(result, w)


@each_weight
def test_files_of_safetensors(w, tmp_path):
    pytest.importorskip("safetensors")
    plain, q = torch.ones(3), gemmery.quantize(torch.ones(16, 32), "int8")
    save_safetensors(tmp_path / "w.safetensors", {"w": w, "tied": w, "plain": plain, "q": q})
    found = load_safetensors(tmp_path / "w.safetensors")
    assert sorted(found) == ["plain", "q", "tied", "w"]
    check_equal(found["w"], w)
    assert found["tied"] is found["w"]
    assert isinstance(found["q"], gemmery.QuantizedTensor)


def test_parameters():
    w = full()
    p = torch.nn.Parameter(w, requires_grad=False)
    p.loader = "mine"
    for result in (p, copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        check_equal(result, w)
        assert isinstance(result, torch.nn.Parameter)
        assert result.loader == "mine"
    a, b = copy.deepcopy([w, w])
    assert a is b
    with pytest.raises(ValueError, match="has no gradient; make parameters of it with requires_grad=False"):
        torch.nn.Parameter(w)


def test_other_types_and_devices():
    w = full()
    half = w.half()
    assert (half.dtype, half.values.dtype, half.channel.dtype) == (F16, F16, torch.float32)
    assert half.metadata.equal(w.metadata)
    check_equal(half.bfloat16(), w)
    with pytest.raises(ValueError, match=r"to: dtype is torch.float32; .* dense\(torch.float32\)"):
        w.float()
    large = sparsify(torch.full((4, 4), 1e6, dtype=BF16))
    with pytest.raises(ValueError, match=r"values have .* would become inf in torch.float16"):
        large.half()
    assert sparsify(torch.full((4, 4), 1e-20, dtype=BF16)).half().dense().eq(0).all()
    meta = w.to("meta")
    assert {x.device.type for x in meta.parts().values()} == {"meta"}
    assert meta.half().shape == w.shape


class Layer(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.weight = torch.nn.Parameter(w, requires_grad=False)
        self.register_buffer("other", w.clone())

    def forward(self, x):
        return F.linear(x, self.weight)


@each_weight
def test_modules(w):
    layer, other = Layer(w), Layer(w.clone())
    for part in (*other.weight.parts().values(), *other.other.parts().values()):
        part.zero_()
    other.load_state_dict(layer.state_dict())
    check_equal(other.weight, w)
    check_equal(other.other, w)
    other.to("meta").to_empty(device="cpu").load_state_dict(layer.state_dict())
    check_equal(other.weight, w)
    other.to("meta").load_state_dict(layer.state_dict(), assign=True)
    check_equal(other.weight, w)
    check_equal(copy.deepcopy(layer).weight, w)
    assert layer.to(F16).weight.dtype == F16
    assert isinstance(layer.weight, torch.nn.Parameter)


def test_copy_takes_the_same_layout_alone():
    w, other = sparsify(values(40, 100)), sparsify(values(40, 100, seed=1))
    assert w.copy_(other) is w
    check_equal(w, other)
    with pytest.raises(TypeError, match=r"copy_: the source is a Tensor .*see gemmery.sparsify"):
        w.copy_(values(40, 100))
    with pytest.raises(TypeError, match="copy_: the source is a QuantizedTensor"):
        w.copy_(gemmery.quantize(values(40, 100), "int8"))
    with pytest.raises(
        ValueError, match=r"copy_: the layout differs .*dtype torch.float16 for torch.bfloat16"
    ):
        w.copy_(other.half())
    with pytest.raises(ValueError, match=r"copy_: the layout differs .*channel"):
        w.copy_(other.with_parts(other.parts() | {"channel": torch.ones(1)}))
    p = torch.nn.Parameter(w, requires_grad=False)
    p.data = third = sparsify(values(40, 100, seed=2))
    check_equal(p, third)
    with pytest.raises(TypeError, match="a Tensor can't be the data"):
        p.data = values(40, 100)


def test_batches():
    for w in (full(3), sparsify(values(3, 40, 100)), full(2, 3)):
        dense = w.dense()
        for index in (1, -1, slice(1, None), slice(None, None, 2)):
            assert w[index].dense().equal(dense[index])
        for part, expected in zip(w, dense, strict=True):
            assert part.dense().equal(expected)
            check_equal(part, part.clone())
    assert w[:, 2].dense().equal(dense[:, 2])
    w[1, 2].copy_(full(seed=5))
    check_equal(w[1, 2], full(seed=5).with_parts(full(seed=5).parts() | {"channel": w[1, 2].channel}))
    with pytest.raises(IndexError):
        w[2]


@each_weight
def test_rows_and_columns(w):
    dense, (N, K) = w.dense(), w.shape[-2:]
    for a, b in ((0, 32), (32, None), (0, 0), (32, 32), (None, N), (32, 999)):
        piece = w[..., a:b, :]
        assert piece.dense().equal(dense[..., a:b, :])
        made_again(piece)
        if piece.shape != w.shape:
            assert apart(piece, w) or not piece.numel()
    for a, b in ((0, 64), (64, None), (64, K)):
        piece = w[..., a:b]
        assert piece.dense().equal(dense[..., a:b])
        made_again(piece)
    with pytest.raises(ValueError, match=r"slice: rows 8 to .* only be sliced at multiples of 32"):
        w[..., 8:32, :]
    with pytest.raises(ValueError, match=r"slice: columns 0 to 32 .* only be sliced at multiples of 64"):
        w[..., :32]
    with pytest.raises(ValueError, match="step 1, not 2"):
        w[..., ::2, :]
    with pytest.raises(NotImplementedError, match="is not a batch"):
        w[..., 0, :]


@pytest.mark.parametrize("group_size", [32, 256])
def test_int4_is_cut_where_groups_end(group_size):
    w = int4(2, 96, 640, group_size=group_size)
    step = max(64, group_size)
    for piece, dense in (
        (w[..., step:], w.dense()[..., step:]),
        (w[..., :step], w.dense()[..., :step]),
        (w[..., 32:96, :], w.dense()[..., 32:96, :]),
        (w[1], w.dense()[1]),
    ):
        assert piece.dense().equal(dense)
        assert piece.group_size == group_size
        check_equal(made_again(piece), piece)
        assert apart(piece, w) or piece.dim() == 2
    with pytest.raises(
        ValueError, match=f"columns 0 to {step // 2} .* only be sliced at multiples of {step}"
    ):
        w[..., : step // 2]
    with pytest.raises(ValueError, match=r"rows 0 to 16 .* only be sliced at multiples of 32"):
        w[..., :16, :]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_shards(batch):
    w = sparsify(values(*batch, 96, 192))
    w = w.with_parts(w.parts() | {"channel": torch.rand(*batch, 96) + 0.5})
    for dim in (-1, -2):
        parts = [w.shard(dim, i, 3) for i in range(3)]
        assert torch.cat([x.dense() for x in parts], dim).equal(w.dense())
        for part in parts:
            made_again(part)
            assert part.channel.data_ptr() != w.channel.data_ptr()
    with pytest.raises(ValueError, match=r"shard: columns 96 to 192 .* only be sliced at multiples of 64"):
        w.shard(-1, 1, 2)
    with pytest.raises(ValueError, match=r"shard: rows 48 to 96 .* only be sliced at multiples of 32"):
        w.shard(-2, 1, 2)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"values": values(40, 50)}, ValueError, r"values is \(40, 50\); it must be \(64, 64\)"),
        (
            {"values": values(64, 64, dtype=torch.float32)},
            TypeError,
            "values is torch.float32; it must be torch.float16",
        ),
        ({"metadata": torch.zeros(4, 64)}, TypeError, "metadata is torch.float32; it must be torch.int32"),
        ({"metadata": torch.zeros(64, 4, dtype=torch.int32)}, ValueError, r"metadata is \(64, 4\)"),
        ({"metadata": torch.zeros(64, 4, dtype=torch.int32).t()}, ValueError, "must be contiguous"),
        ({"channel": torch.ones(39)}, ValueError, r"channel is \(39,\); it must be \(40,\) or \(1,\)"),
        ({"values": None}, TypeError, "values is a NoneType; it must be a plain tensor"),
        (
            {"metadata": torch.zeros(4, 64, dtype=torch.int32, device="meta")},
            ValueError,
            "metadata is on meta",
        ),
        ({"shape": (40,)}, ValueError, r"shape is \(40,\); it must be \(\*batch, N, K\)"),
        ({"shape": (40, 102)}, ValueError, "its last size must be a multiple of 4"),
    ],
)
def test_errors_of_the_constructor(change, error, text):
    w = sparsify(values(40, 100))
    given = {"shape": (40, 100)} | w.parts() | change
    with pytest.raises(error, match=f"SparseTensor: .*{text}"):
        SparseTensor(**given)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (
            {"values": torch.zeros(64, 64, dtype=torch.int8)},
            ValueError,
            r"values is \(64, 64\); .* \(64, 32\)",
        ),
        ({"values": torch.zeros(64, 32, dtype=BF16)}, TypeError, "values is torch.bfloat16; .* torch.int8"),
        ({"scales": torch.ones(3, 64).half()}, ValueError, r"scales is \(3, 64\); it must be \(4, 64\)"),
        ({"scales": torch.ones(4, 64)}, TypeError, "scales is torch.float32; it must be torch.float16"),
        ({"scales": torch.ones(64, 4).half().t()}, ValueError, "scales has strides .* contiguous"),
        ({"scales": None}, ValueError, "group_size is 32 without scales; it must be 0"),
        ({"group_size": 48}, ValueError, "group_size is 48 with scales; .* power of two of at least 32"),
        ({"group_size": 0}, ValueError, "group_size is 0 with scales"),
        ({"code": "int8"}, ValueError, "there are scales with code 'int8'"),
        ({"code": "int2"}, ValueError, "code is 'int2'; it must be one of e4m3, int8, int4, or ''"),
        ({"dtype": None}, ValueError, "dtype is None with code 'int4'"),
    ],
)
def test_errors_of_the_constructor_with_int4(change, error, text):
    w = int4(40, 100, dtype=F16)
    given = {"shape": w.shape, "code": "int4", "dtype": F16, "group_size": 32} | w.parts() | change
    with pytest.raises(error, match=f"SparseTensor: .*{text}"):
        SparseTensor(**given)


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_nan_among_codes_is_refused(bits):
    """Kernels would make 480 of it, and the reference NaN."""
    w = gemmery.quantize(sparsify(values(2, 40, 100)), "e4m3")
    w.values[1, 37, 9] = torch.tensor(bits, dtype=torch.uint8).view(torch.int8)
    text = rf"SparseTensor: values\[1, 37, 9\] is {bits:#x}, NaN in e4m3; .* must be finite"
    with pytest.raises(ValueError, match=text):
        made_again(w)
    with pytest.raises(ValueError, match=text):
        SparseTensor.from_tensors(*w.to_tensors())
    with pytest.raises(ValueError, match=text):
        pickle.loads(pickle.dumps(w))
    # On meta there is nothing to see, and what is made of a weight is not looked at again.
    made_again(w.to("meta"))
    assert w[1].shape == (40, 100)


def test_every_code_has_a_decoder_and_comes_back():
    assert CODES.keys() == DECODERS.keys()
    for code in CODES.values():
        numbers = torch.tensor([[0.0, -1, 7, 4]]).half()
        stored = code.to_values(numbers)
        assert code.to_numbers(stored).to(F16).equal(numbers)
        assert stored.shape[-1] * code.each == 8
        assert stored.dtype == (torch.int8 if code.name else F16)


def test_quantize_makes_no_nan_of_tiny_numbers():
    w = sparsify(torch.full((1, 4), 2.0**-133).bfloat16())
    made_again(gemmery.quantize(w, "e4m3"))


def test_tensors_and_texts():
    w = full()
    tensors, texts = w.to_tensors("a.")
    assert sorted(tensors) == ["a.channel", "a.metadata", "a.values"]
    assert texts == {"format": "2:4", "code": "", "shape": "[72, 196]", "dtype": "bfloat16"}
    check_equal(SparseTensor.from_tensors(tensors, texts, "a."), w)
    with pytest.raises(ValueError, match=r"from_tensors: there is no tensor 'a.metadata'"):
        SparseTensor.from_tensors({"a.values": w.values}, texts, "a.")
    with pytest.raises(
        TypeError, match=r"dtype is torch.float16; without a code it must be that of the values"
    ):
        SparseTensor.from_tensors(tensors, texts | {"dtype": "float16"}, "a.")
    with pytest.raises(ValueError, match="the texts have no shape"):
        SparseTensor.from_tensors(tensors, {"format": "2:4", "dtype": "bfloat16"}, "a.")


def test_tensors_and_texts_of_int4():
    w = int4(72, 196)
    tensors, texts = w.to_tensors("a.")
    assert sorted(tensors) == ["a.metadata", "a.scales", "a.values"]
    assert (texts["code"], texts["group_size"]) == ("int4", "32")
    check_equal(SparseTensor.from_tensors(tensors, texts, "a."), w)
    with pytest.raises(ValueError, match="group_size is 'x'; it must be a whole number"):
        SparseTensor.from_tensors(tensors, texts | {"group_size": "x"}, "a.")
    with pytest.raises(ValueError, match="group_size is 0 with scales"):
        SparseTensor.from_tensors(tensors, {k: x for k, x in texts.items() if k != "group_size"}, "a.")
    with pytest.raises(ValueError, match=r"copy_: the layout differs .*group_size"):
        w.copy_(int4(72, 196, group_size=64))


def test_what_is_not_supported_says_so():
    w = full()
    for act in (lambda: w + 1, lambda: w.view(-1), w.zero_):
        with pytest.raises(NotImplementedError, match=r"not defined for SparseTensor.*its dense\(\)"):
            act()
    with pytest.raises(
        TypeError, match=r"copy_: a plain tensor can't take SparseTensor.*, but its dense\(\)"
    ):
        torch.ones(72, 196).copy_(w)
    for act in (lambda: w.mT, lambda: w.t(), lambda: w.T):
        with pytest.raises(NotImplementedError, match="matmul and bmm take it as it is"):
            act()


# --- products without kernels ----------------------------------------------------------------------------------------


@each_weight
def test_linear(w):
    x = values(*w.shape[:-2], 5, w.shape[-1], dtype=w.dtype)
    want = x.double() @ w.dense(torch.float64).mT
    found = gemmery.matmul(x, w)
    assert (found.double() - want).norm() < 5e-3 * want.norm()
    if w.dim() == 2:
        assert F.linear(x, w).equal(found)
        assert gemmery.linear(x[0], w).shape == w.shape[:1]


def test_gradients_of_kept_numbers():
    x, w = values(5, 100).requires_grad_(), sparsify(values(40, 100))
    w.values.requires_grad_()
    gemmery.linear(x, w).float().square().sum().backward()
    assert w.values.grad.shape == w.values.shape
    assert not w.values.grad[40:].any()
    dense = w.dense().detach().double().requires_grad_()
    (x.detach().double() @ dense.T).square().sum().backward()
    kept = sparsify_as(dense.detach(), w.dense() != 0).values
    assert kept.shape == w.values.shape
    found = w.with_parts(w.parts() | {"values": w.values.grad}).dense().double()
    want = torch.where(w.dense() != 0, dense.grad, 0)
    assert (found - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize(("code", "part"), [("int8", "channel"), ("int4", "scales")])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_scales_have_no_gradients(code, part, is_compiled):
    x, w = values(5, 128), gemmery.quantize(sparsify(values(64, 128)), code)
    getattr(w, part).requires_grad_()
    linear = torch.compile(gemmery.linear, backend="aot_eager") if is_compiled else gemmery.linear
    error = torch._dynamo.exc.BackendCompilerFailed if is_compiled else TypeError
    with pytest.raises(error, match=f"no gradient for the weight's {part}, which requires one"):
        linear(x, w).sum().backward()


def test_what_a_kernel_does_not_take_is_told_on_the_cpu():
    x, w = values(5, 128), sparsify(values(60, 128))
    with pytest.warns(UserWarning, match="on a GPU .* raises an error: .* 60 rows; .* a multiple of 64"):
        y = gemmery.linear(x, w, epilogue=epilogues.swiglu)
    assert y.shape == (5, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemmery.linear(x, sparsify(values(64, 128)), epilogue=epilogues.swiglu)


@pytest.mark.parametrize("code", ["", "int8", "int4"])
def test_torchs_way_to_a_dense_tensor(code):
    w = sparsify(values(60, 128))
    w = gemmery.quantize(w, code) if code else w
    assert type(w.to_dense()) is torch.Tensor
    assert w.to_dense().equal(w.dense())
    assert w.to_dense(torch.float32).equal(w.dense(torch.float32))
