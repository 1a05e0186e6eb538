"""Torch generators seeded from a full 32-byte key.

Torch's CPU generator is a Mersenne Twister with 624 words of state, but `manual_seed` keeps only 32 bits of its seed,
so an attacker could try all streams. Here the whole state is filled from a 32-byte key (SHAKE-256), so the draws are as
secret as the key. CUDA's generator (Philox) uses all of its 64-bit seed.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import shake_256

import numpy as np
import torch

from clipwise.errors import ConfigurationError

_WORDS = 624  # of 32 bits, each of which `get_state` keeps in 64
_FIRST_BYTE = 24  # before them: the seed, which has no effect here, and the position in the words


def generator_from(key: bytes) -> torch.Generator:
    """A CPU generator with its whole state from `key`, 32 secret bytes."""
    words = np.frombuffer(shake_256(key).digest(4 * _WORDS), dtype="<u4").astype(np.uint64)
    generator = torch.Generator().manual_seed(0)  # at the beginning of its words
    state = generator.get_state()
    state[_FIRST_BYTE : _FIRST_BYTE + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8))
    return generator.set_state(state)


def private_generator() -> torch.Generator:
    """A generator from the operating system's randomness. The global random state does not change."""
    return generator_from(secrets.token_bytes(32))


def seed_global_generators(key: bytes) -> None:
    """Let the global generators of torch (on the CPU), numpy and Python draw from `key`, 32 secret bytes."""
    torch.set_rng_state(generator_from(key).get_state())
    np.random.seed(np.frombuffer(key, dtype=np.uint32))
    random.seed(key)


@contextmanager
def drawing_from(key: bytes, devices: Collection[torch.device]) -> Iterator[None]:
    """In this block torch's global generators, of the CPU and of these devices, draw from `key`."""
    if unknown := {device.type for device in devices} - {"cpu", "cuda"}:
        raise ConfigurationError(
            f"private.randomness() sets the generators of the CPU and of CUDA, and the model is on {min(unknown)!r}."
        )
    places = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(places):
        torch.set_rng_state(generator_from(key).get_state())
        for place in places:
            seed = shake_256(key + b"cuda" + place.to_bytes(4, "little")).digest(8)
            torch.cuda.default_generators[place].manual_seed(int.from_bytes(seed, "little"))
        yield
