"""The rung of sparse weights: storage, which lane has what, and the instruction as it is emulated."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture(scope="module")
def rung() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TUTORIALS))
        import _common

        yield _common.rung(12)


def integers(*shape: int) -> torch.Tensor:
    """Small numbers other than 0, whose products and sums are exact."""
    return (torch.randint(1, 4, shape) * (2 * torch.randint(0, 2, shape) - 1)).half()


def sparse_integers(rung: ModuleType, n: int, k: int) -> torch.Tensor:
    """With fours of two, one and no numbers that are not 0."""
    return rung.prune(integers(n, k)) * (torch.rand(n, k) < 0.8)


def test_pruning_keeps_the_largest(rung: ModuleType) -> None:
    w = torch.tensor([[1.5, -0.2, 0.1, -0.9, 0.3, 0.8, -1.1, 0.0]]).half()
    assert torch.equal(rung.prune(w), torch.tensor([[1.5, 0, 0, -0.9, 0, 0.8, -1.1, 0]]).half())


def test_compressed_is_nine_sixteenths_and_the_same_weight(rung: ModuleType) -> None:
    w = sparse_integers(rung, 32, 128)
    compressed = rung.compress(w)
    assert (compressed.values.nbytes + compressed.words.nbytes) * 16 == w.nbytes * 9
    codes = compressed.codes()
    places = torch.stack((codes & 3, codes >> 2), -1)
    assert (places[..., 0] < places[..., 1]).all()
    fours = torch.zeros(32, 32, 4).half().scatter(-1, places, compressed.values.unflatten(-1, (-1, 2)))
    assert torch.equal(fours.flatten(-2), w)


def test_each_number_has_one_lane(rung: ModuleType) -> None:
    def all_of(place, *counts: int) -> list[tuple[int, int]]:
        return sorted(
            place(*index) for index in torch.cartesian_prod(*map(torch.arange, (32, *counts))).tolist()
        )

    def grid(rows: int, columns: int) -> list[tuple[int, int]]:
        return [(row, column) for row in range(rows) for column in range(columns)]

    assert all_of(rung.place_in_a, 4, 2) == grid(16, 16)
    assert all_of(rung.place_in_b, 4, 2) == grid(32, 8)
    assert all_of(rung.place_in_c, 4) == grid(16, 8)
    assert all_of(rung.place_in_codes, 8) == grid(16, 16)


def test_torch_has_the_codes_in_the_same_lanes(rung: ModuleType) -> None:
    """Its metadata for CUTLASS: a word a lane for 32 rows and 32 columns, and the selector says which 16 rows."""
    w, x = rung.prune(integers(32, 64)), integers(8, 64)
    values, metadata = sparse_semi_structured_from_dense_cutlass(w)
    words = metadata.contiguous().view(torch.int32).reshape(2, 32)
    compressed = rung.compress(w)
    assert torch.equal(values, compressed.values)
    a = rung.fragments(compressed).a
    b = torch.stack([x[:, 32 * i : 32 * i + 32].T[rung.place_in_b(*lanes(rung, 4, 2))] for i in range(2)])
    b = b.view(torch.int32).squeeze(-1)
    n, m = rung.place_in_c(*lanes(rung, 4))
    for rows in range(2):
        d = torch.zeros(32, 4)
        for step in range(2):
            d = rung.mma_sp(a[rows, step], b[step], d, words[step], selector=rows)
        whole = torch.zeros(16, 8)
        whole[n, m] = d
        assert torch.equal(whole, w[16 * rows : 16 * rows + 16].float() @ x.float().T)


def lanes(rung: ModuleType, *counts: int) -> list[torch.Tensor]:
    return rung.indices(32, *counts, device=torch.device("cpu"))


def test_product_is_exact_for_integers(rung: ModuleType) -> None:
    w, a = sparse_integers(rung, 48, 192), integers(11, 192)
    compressed = rung.compress(w)
    want = (a.double() @ w.double().T).half()
    assert torch.equal(rung.expanded(a, compressed), want)
    # Without a GPU, `matmul` is the emulation, which takes the place of the instruction.
    assert not rung.has_mma_sp()
    assert torch.equal(rung.matmul(a, rung.fragments(compressed)), want)


@pytest.mark.parametrize("what", ["selector", "codes"])
def test_what_is_wrong_is_noticed(rung: ModuleType, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, a = sparse_integers(rung, 16, 128), integers(8, 128)
    packed = rung.fragments(rung.compress(w))
    if what == "selector":
        mma_sp = rung.mma_sp
        monkeypatch.setattr(rung, "mma_sp", lambda *args, selector: mma_sp(*args, selector=1 - selector))
    else:
        packed = rung.Fragments(packed.a, packed.codes.flip(1))
    assert not torch.equal(rung.matmul(a, packed), (a.double() @ w.double().T).half())


def test_what_it_refuses(rung: ModuleType) -> None:
    with pytest.raises(ValueError, match="3 of four"):
        rung.compress(torch.tensor([1.0, 2, 3, 0] * 16).half().expand(16, 64))
    for shape in ((8, 64), (16, 32), (0, 64), (64,)):
        with pytest.raises(ValueError, match="multiples of 16 and 64"):
            rung.compress(torch.zeros(shape).half())
    compressed = rung.compress(torch.zeros(16, 64).half())
    packed = rung.fragments(compressed)
    for a, message in (
        (integers(4, 128), r"\(M, 64\)"),
        (integers(4, 64).float(), "float32"),
        (integers(0, 64), "M > 0"),
        (integers(64, 4).T, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            rung.expanded(a, compressed)
        with pytest.raises(ValueError, match=message):
            rung.matmul(a, packed)
    with pytest.raises(ValueError, match="out must be"):
        rung.matmul(integers(4, 64), packed, torch.empty(4, 8).half())


def test_it_says_what_ran(rung: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rung.check()
    names = {row.name for row in rows if row.role == "this"}
    assert names == {"1 masked, rung 8", "2 expanded in registers", "3 mma.sp, emulated", "4 gemmery"}
    assert "emulation in torch" in capsys.readouterr().out
