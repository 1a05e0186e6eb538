"""NoiseKey: the secret of a run, from which noise and samples are derived; and StepKeys, the secrets of its steps."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from typing import NoReturn

from clipwise.errors import ConfigurationError, StepError

KEY_BYTES = 32


class NoiseKey:
    """The secret of a run: a forward-secure ratchet with one secret per step.

    All hashing is BLAKE2b with a 32-byte digest, keyed with the current secret k_t; `person` separates the uses:

        step key   k_{t+1} = BLAKE2b(key=k_t, person="clipwise.advance", data="")
        sub-key            = BLAKE2b(key=k_t, person="clipwise.derive",  data=label)
        from seed  k_0     = BLAKE2b(         person="clipwise.seed",    data=seed ":" context)
        public id          = BLAKE2b(key=k_0, person="clipwise.key-id",  data=""), 16 bytes

    `advance` overwrites k_t in place. An attacker that later reads the object, or the resume file with `secret_bytes`,
    cannot compute k_t, and so cannot compute the noise of earlier releases. (Sub-keys are ordinary bytes: Python frees
    them, but does not erase them from memory.)

    A key cannot be pickled, deep-copied or saved by torch: a key in a checkpoint would break the privacy of all later
    steps. It works only in the process that made it: after a fork, parent and child would add the same noise to two
    sums.
    """

    __slots__ = ("_process", "_secret", "id")

    def __init__(self, secret: bytes, id: str = "") -> None:
        # `wipe` overwrites a secret with zeros, so zeros are never a secret.
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES or not any(secret):
            raise ConfigurationError(
                f"secret must be {KEY_BYTES} bytes that are not all zero: use NoiseKey.fresh() or from_seed(...)."
            )
        self._secret, self._process = bytearray(secret), os.getpid()
        # Public and constant: ledgers hold it, to detect a key that two runs used.
        self.id = id or blake2b(digest_size=16, key=secret, person=b"clipwise.key-id").hexdigest()

    @classmethod
    def fresh(cls) -> NoiseKey:
        """A key from the operating system's randomness. Use this one."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int, context: bytes = b"") -> NoiseKey:
        """A key for tests and reproduction. No guarantee holds for its releases.

        Every run with this seed has the same noise, and the same noise on two different sums reveals their difference.
        `context` derives several keys from one seed, for instance for the runs of an audit.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigurationError("seed must be an int: give a whole number, or no seed at all.")
        # The colon ends the digits, so (seed, context) -> data is injective.
        data = f"{seed}:".encode() + context
        return cls(blake2b(data, digest_size=KEY_BYTES, person=b"clipwise.seed").digest())

    def secret_bytes(self) -> bytes:
        """The secret itself. Only for the resume file, which only its owner can read."""
        return bytes(self._current())

    def derive(self, label: str) -> bytes:
        """The 32-byte sub-key of this step for one use, such as `"noise/0"` or `"sampling"`."""
        return self._hash(b"clipwise.derive", label.encode())

    def advance(self) -> None:
        """Advance to the next step and overwrite the old secret."""
        self._current()[:] = self._hash(b"clipwise.advance", b"")

    def copy(self) -> NoiseKey:
        """An independent key at the same step, to derive the secrets of later steps."""
        return NoiseKey(self.secret_bytes(), self.id)

    def wipe(self) -> None:
        """Overwrite the secret. Later uses of the key raise."""
        self._secret[:] = bytes(KEY_BYTES)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the key."""
        return os.getpid() != self._process

    def _current(self) -> bytearray:
        if self.is_forked:
            raise StepError(
                "this NoiseKey belongs to the process that this one was forked from, which may still use it: make the "
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


class StepKeys:
    """The secrets of the steps to come.

    Attributes:
        key: the key of the next step. `advance` overwrites it.
        epoch: the secret of the current epoch, which its batches are drawn from together with the key of their step.
        slot: the index of the next step in its epoch.
        is_new: whether the ledger does not have the key's id yet.
    """

    def __init__(self, key: NoiseKey, steps_per_epoch: int) -> None:
        self.key, self.epoch, self.slot, self.is_new = key, b"", 0, True
        self._steps_per_epoch = steps_per_epoch

    def advance(self) -> None:
        """Overwrite the secret of this step with that of the next."""
        if self.slot == 0:
            self.epoch = self.key.derive("epoch")
        self.key.advance()
        self.slot = (self.slot + 1) % self._steps_per_epoch

    def ahead(self) -> Iterator[tuple[bytes, bytes, int]]:
        """The sampling secrets of the coming steps: (step secret, epoch secret, slot). Works on a copy of the key."""
        key, epoch, slot = self.key.copy(), self.epoch, self.slot
        while True:
            if slot == 0:
                epoch = key.derive("epoch")
            yield key.derive("sampling"), epoch, slot
            key.advance()
            slot = (slot + 1) % self._steps_per_epoch
