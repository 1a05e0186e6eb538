"""Handwritten digits that ship with clipwise, so that a first private run needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

_FILE = Path(__file__).with_name("digits.npz")
_TEST_EVERY = 5
_BRIGHTEST = 16  # a pixel counts the inked points of a 4x4 block


def digits(train: bool) -> TensorDataset:
    """1797 images of handwritten digits, 8x8 grey pixels: 1437 to train on, or the other 360 to test on.

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
    (UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn
    distributes it. Images and labels are unchanged and in their original order.

    Every fifth record, beginning with the first, is a test record. The split depends on the position alone, so it
    costs no privacy.

    Args:
        train: whether to return the training part.

    Returns:
        Images, float32 [N, 1, 8, 8] from 0 to 1, and labels, int64 [N] from 0 to 9.
    """
    with np.load(_FILE) as file:
        images, labels = file["images"], file["labels"]
    chosen = (np.arange(len(labels)) % _TEST_EVERY != 0) == train
    return TensorDataset(
        torch.from_numpy(images[chosen].astype(np.float32) / _BRIGHTEST).unsqueeze(1),
        torch.from_numpy(labels[chosen].astype(np.int64)),
    )
