"""NoiseKey: the secret of a run, from which noise and samples are derived."""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from typing import NoReturn

from clipwise.errors import ConfigurationError, StepError

KEY_BYTES = 32


class NoiseKey:
    """The secret of a run: a forward-secure ratchet that serves one step at a time.

    All hashing is BLAKE2b with a 32-byte digest, keyed with the current secret k_t; `person` separates
    the uses:

        step key   k_{t+1} = BLAKE2b(key=k_t, person="clipwise.advance", data="")
        sub-key            = BLAKE2b(key=k_t, person="clipwise.derive",  data=label)
        from seed  k_0     = BLAKE2b(         person="clipwise.seed",    data=seed ":" context)
        public id          = BLAKE2b(key=k_0, person="clipwise.key-id",  data=""), 16 bytes

    `advance` overwrites k_t in place. Whoever later reads the object, or the resume file that
    `secret_bytes` is written to, cannot get back to k_t, and so not to noise that was already released.
    (Sub-keys are ordinary bytes: Python frees them, but does not erase them from memory.)

    A key cannot be pickled, deep-copied or saved by torch: one that lands in a checkpoint undoes the
    privacy of every step after it. It serves the process that made it: in a fork it refuses, since parent and child
    would put the same noise on two sums.
    """

    __slots__ = ("_process", "_secret", "id")

    def __init__(self, secret: bytes, id: str = "") -> None:
        # All zeros is what `wipe` leaves behind: never a secret.
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES or not any(secret):
            raise ConfigurationError(
                f"secret must be {KEY_BYTES} bytes that are not all zero: use NoiseKey.fresh() or from_seed(...)."
            )
        self._secret, self._process = bytearray(secret), os.getpid()
        # Public, and the same for every step: ledgers hold it, so that a key that served two runs is found.
        self.id = id or blake2b(digest_size=16, key=secret, person=b"clipwise.key-id").hexdigest()

    @classmethod
    def fresh(cls) -> NoiseKey:
        """A key from the operating system's randomness: the one to use."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int, context: bytes = b"") -> NoiseKey:
        """A reproducible key, for tests and reproduction: no guarantee holds for what it is used for.

        The same noise on two different sums reveals their difference, and every run with this seed has the same
        noise. `context` gives one seed several keys, such as those of the runs of an audit.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigurationError("seed must be an int: give a whole number, or no seed at all.")
        # Decimal digits end at the colon, so (seed, context) -> data is one to one.
        data = f"{seed}:".encode() + context
        return cls(blake2b(data, digest_size=KEY_BYTES, person=b"clipwise.seed").digest())

    @classmethod
    def from_secret_bytes(cls, secret: bytes, id: str = "") -> NoiseKey:
        """The inverse of `secret_bytes`, for the key with this id."""
        return cls(secret, id)

    def secret_bytes(self) -> bytes:
        """The secret itself, for the resume file that only its owner can read, and for nothing else."""
        return bytes(self._current())

    def derive(self, label: str) -> bytes:
        """The 32-byte sub-key of this step for one use, such as `"noise/0"` or `"sampling"`."""
        return self._hash(b"clipwise.derive", label.encode())

    def advance(self) -> None:
        """Go to the next step; the old secret is overwritten."""
        self._current()[:] = self._hash(b"clipwise.advance", b"")

    def copy(self) -> NoiseKey:
        """An independent key at the same step, for a reader that runs ahead."""
        return NoiseKey(self.secret_bytes(), self.id)

    def wipe(self) -> None:
        """Overwrite the secret. The key refuses to work afterwards, rather than give predictable noise."""
        self._secret[:] = bytes(KEY_BYTES)

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy that a fork made of another process's key."""
        return os.getpid() != self._process

    def _current(self) -> bytearray:
        if self.is_forked:
            raise StepError(
                "this NoiseKey belongs to the process that this one was forked from, which may use it: make the "
                "private run in the process that trains."
            )
        if not any(self._secret):
            raise StepError("this NoiseKey was wiped and holds no secret: make a new one.")
        return self._secret

    def _hash(self, person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=KEY_BYTES, key=self._current(), person=person).digest()

    def __repr__(self) -> str:
        return "NoiseKey(<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a NoiseKey cannot be pickled, copied by `copy` or saved by torch: it would put the noise's "
            "secret into a file. Use NoiseKey.copy(), or secret_bytes() for a private resume file."
        )
