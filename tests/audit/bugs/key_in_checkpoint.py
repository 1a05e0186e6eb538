"""The checkpoint holds the noise key, to make resuming easy."""

from typing import Any

import pytest

from clipwise.engine import resume
from clipwise.engine.context import StepContext
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    state_dict = resume.state_dict

    def with_key(context: StepContext) -> dict[str, Any]:
        return {**state_dict(context), "key": context.keys.key.secret_bytes().hex()}

    patch.setattr(resume, "state_dict", with_key)


BUG = Bug("a key inside a checkpoint", plant, ("neighbours",))
