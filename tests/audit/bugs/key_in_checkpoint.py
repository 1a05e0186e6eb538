"""The checkpoint holds the key of the noise, for a comfortable way to go on."""

from typing import Any

import pytest

from clipwise.engine.private import Private
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    state_dict = Private.state_dict

    def with_key(self: Private) -> dict[str, Any]:
        return {**state_dict(self), "key": self._key.secret_bytes().hex()}

    patch.setattr(Private, "state_dict", with_key)


BUG = Bug("a key inside a checkpoint", plant, ("neighbours",))
