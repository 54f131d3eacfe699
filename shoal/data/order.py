"""A random order of n samples that is evaluated at any index in O(1), without a list of n numbers.

An index is a pair (left, right) with index = left * columns + right, and rows * columns >= n. Each round adds to one of
the two a hash of the other, which can be undone, so that all rounds together are a permutation of the pairs:

    left  = (left  + hash(round, right)) mod rows
    right = (right + hash(round, left )) mod columns         and so on, in turns

A pair that is no index of n is permuted again until it is one ("cycle walking"); of n indices fewer than sqrt(n) pairs
are more than n. All arithmetic is of unsigned 64-bit integers, so that an order is the same on every machine.

Source: Feistel networks (Luby and Rackoff, 1988); cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
domains" (2002); the hash: SplitMix64 (Steele et al., 2014).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64


def shuffled(index: npt.ArrayLike, num: int, seed: int, epoch: int) -> Indices:
    """What stands at these places of the order of ``num`` samples that ``seed`` and ``epoch`` give.

    >>> shuffled(range(8), 8, seed=0, epoch=0).tolist()
    [7, 0, 6, 5, 1, 2, 4, 3]
    >>> shuffled([7, 0], 8, seed=0, epoch=0).tolist()
    [3, 7]

    Args:
        index: of any shape, each from 0 to ``num`` - 1.

    Raises: IndexError: an index that there is not.
    """
    places = np.asarray(index, dtype=np.int64)
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < num:
        raise IndexError(f"places {places.min()} to {places.max()} of an order of {num}")
    rows = math.isqrt(max(num - 1, 0)) + 1
    columns = -(-num // rows)
    keys = _keys(seed, epoch)
    result = _permuted(places.reshape(-1).astype(np.uint64), rows, columns, keys)
    while (outside := result >= np.uint64(num)).any():
        result[outside] = _permuted(result[outside], rows, columns, keys)
    return result.astype(np.int64).reshape(places.shape)


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """A key for each round."""
    of_seed = int(_hash(np.array([seed % _WORD], np.uint64))[0])
    words = [(of_seed ^ (epoch * _GOLDEN)) + (1 + number) * _GOLDEN for number in range(_ROUNDS)]
    return list(_hash(np.array([word % _WORD for word in words], np.uint64)))


def _permuted(index: _Words, rows: int, columns: int, keys: list[np.uint64]) -> _Words:
    left, right = np.divmod(index, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _hash(right ^ key) % np.uint64(rows)) % np.uint64(rows)
        else:
            right = (right + _hash(left ^ key) % np.uint64(columns)) % np.uint64(columns)
    return left * np.uint64(columns) + right


def _hash(words: _Words) -> _Words:
    """SplitMix64's mixing of each word; products are taken modulo 2**64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
