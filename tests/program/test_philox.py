import pytest

from megakernel_runtime.program.philox import philox4x32, uniform

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known-answer file kat_vectors, "philox4x32 10"
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_uses_all_of_seed_and_index():
    base = uniform(1, 1)
    assert len({base, uniform(2, 1), uniform(1 + (1 << 32), 1), uniform(1, 2), uniform(1, 1 + (1 << 32))}) == 5


def test_uniform_fills_the_unit_interval():
    numbers = [uniform(7, i) for i in range(20_000)]
    assert all(0.0 <= n < 1.0 for n in numbers)
    tenths = [sum(int(n * 10) == t for n in numbers) for t in range(10)]
    chi_square = sum((count - 2000) ** 2 / 2000 for count in tenths)
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001
