"""Seeds that depend on what they are for and on nothing else."""

from __future__ import annotations

import hashlib

LARGEST_SEED = 2**31 - 1
"""Of those that users give, from 0 on. NumPy takes up to 2^32 - 1; pipeline stages add to it."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a run's seed and the names or numbers of what it is used for.

    The same parts give the same seed in every process and on every machine, so that random streams need
    no state: a resumed run derives the seeds it would have derived without the interruption.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
