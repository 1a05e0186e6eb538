"""Triton's interpreter, enabled by TRITON_INTERPRET=1."""

import os
from importlib.util import find_spec

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_counts(tensor, scope):
        """Numpy no longer converts an array of one number to an int implicitly; the interpreter's loops need it."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_counts
