"""The random stream of sampling: Philox4x32-10, keyed by a request's seed, counted by the generated token's index.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); test vectors: Random123.
Device code repeats this arithmetic on 32 bit words. Standard library only; must not know: sampling, tensors.
"""

from __future__ import annotations

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85  # added to the key each round
ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four 32 bit words, uniformly distributed and independent for different (counter, key)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + WEYL_0) & _MASK, (k1 + WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1), a multiple of 2**-32, that chooses generated token `index` of a request.

    The key is the seed's low and high word, the counter is the index's low and high word and two zeros; the number is
    the first word of the result.
    """
    counter = (index & _MASK, index >> 32 & _MASK, 0, 0)
    return philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))[0] / 2.0**32
