from __future__ import annotations

import pytest
import torch

from clipwise.recipes.images.scattering import NORM, scattering, scattering_size


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (1, 8), (1, 1), (3, 5), (1, 64)])
def test_shape(channels, side):
    x = torch.rand(2, channels, side, side) - 0.5
    assert scattering(x).shape == (2, scattering_size(channels, side))
    assert scattering(x[:0]).shape == (0, scattering_size(channels, side))


def test_features_of_an_image_do_not_depend_on_its_batch():
    x = torch.rand(300, 1, 12, 12) - 0.5
    one_by_one = torch.cat([scattering(image) for image in x[254:260].split(1)])
    torch.testing.assert_close(scattering(x)[254:260], one_by_one, rtol=0.02, atol=0.002)


def test_features_are_finite_and_of_bounded_norm():
    x = torch.stack([torch.zeros(1, 28, 28), torch.full((1, 28, 28), 0.5), torch.rand(1, 28, 28) - 0.5])
    found = scattering(x).float()
    assert found.isfinite().all()
    assert (found.norm(dim=1) <= NORM * 1.02).all()
    assert found[2].norm() > NORM / 2


def test_wavelets_measure_orientation_and_not_brightness():
    across = torch.linspace(0, 12.0, 28)[None, None, None].expand(1, 1, 28, 28).sin() / 4
    found = scattering(torch.cat([across, across.transpose(2, 3), across + 0.1])).float()
    assert (found[0] - found[1]).norm() > 1
    assert (found[0] - found[2])[49:].norm() < (found[0] - found[1])[49:].norm() / 2
