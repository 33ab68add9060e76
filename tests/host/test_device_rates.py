"""Rates of the device table: what they are the rates of."""

import pytest

from gemmery import devices

TABLE = {name: row for name, row in devices.TABLE.items() if name != "interpreter"}
GEFORCE = [row for name, row in TABLE.items() if "GeForce" in name]
#: Multiply-adds in fp16 with sums in fp32, of a multiprocessor in a clock, dense; and its boost clock in Hz. By the
#: vendor's architecture papers.
UNITS = {
    "NVIDIA A100": (1024, 1.410e9), "NVIDIA GeForce RTX 3090": (256, 1.695e9), "NVIDIA A10": (512, 1.695e9),
    "NVIDIA L40S": (512, 2.520e9), "NVIDIA L4": (512, 2.040e9), "NVIDIA GeForce RTX 4090": (256, 2.520e9),
    "NVIDIA H100": (2048, 1.830e9), "NVIDIA H200": (2048, 1.830e9), "NVIDIA B200": (4096, 1.850e9),
    "NVIDIA GeForce RTX 5090": (256, 2.407e9), "AMD Instinct MI300X": (1024, 2.100e9),
    "AMD Radeon RX 7900 XTX": (256, 2.500e9),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_the_16_bit_rate_is_dense_and_of_sums_in_fp32(row):
    """A rate with sums in fp16, or of sparse matrices, would be twice as high."""
    multiply_adds, clock = UNITS[row.name]
    assert row.fp16 == pytest.approx(2 * multiply_adds * row.sms * clock, rel=0.03)


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_rates_go_by_the_width_of_a_type(row):
    """Half the bits, twice the rate, where units exist; int8 adds in int32 and is not halved on a GeForce."""
    if row.tf32 and row.tf32 != row.fp32:
        assert row.fp16 / row.tf32 == pytest.approx(2, rel=0.03)
    if row.fp8:
        assert row.fp8 / row.fp16 == pytest.approx(2, rel=0.03)
    if row.int8 and row.arch != "gfx1100":
        assert row.int8 / row.fp16 == pytest.approx(4 if row in GEFORCE else 2, rel=0.03)


def test_cards_without_a_row_are_scaled_from_their_own_kind():
    """With the same chip a GeForce adds in fp32 at half the rate of a workstation's card."""
    for arch, game, work in (("sm_86", "RTX 3090", "A10"), ("sm_89", "RTX 4090", "L40S")):
        rows = [
            next(row for name, row in TABLE.items() if name.endswith(f" {word}")) for word in (game, work)
        ]
        for row, name in zip(rows, ("NVIDIA GeForce RTX 1", "NVIDIA RTX 1"), strict=True):
            found = devices._matching(name, arch, 10, 1 << 20)
            for rate in ("bandwidth", "fp16", "tf32", "fp32", "fp64", "fp8", "int8"):
                assert getattr(found, rate) == pytest.approx(getattr(row, rate) * 10 / row.sms)
