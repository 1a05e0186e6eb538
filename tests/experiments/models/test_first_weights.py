"""First weights whose singular values are all alike."""

import pytest
import torch

from experiments import models
from experiments.models import make_orthogonal_


@pytest.mark.parametrize("name", ["convnet3", "patch_convnet6"])
def test_all_singular_values_are_one_and_biases_zero(name):
    model = models.build(name, input_norm=1.0)
    make_orthogonal_(model)
    for key, p in model.named_parameters():
        if key.endswith("weight"):
            values = torch.linalg.svdvals(p.detach().flatten(1).double())
            torch.testing.assert_close(values, torch.ones_like(values), atol=1e-5, rtol=0)
        else:
            assert not p.any()
