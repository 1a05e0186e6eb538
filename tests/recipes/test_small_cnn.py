import pytest
import torch
from torch.nn import functional as F

import clipwise
from clipwise.recipes.small_cnn import small_cnn


@pytest.mark.parametrize(("classes", "image_size", "width"), [(10, 8, 16), (3, 28, 4)])
def test_one_row_of_scores_per_image(classes, image_size, width):
    model = small_cnn(classes, image_size=image_size, width=width)
    assert model(torch.rand(5, 1, image_size, image_size)).shape == (5, classes)


def test_it_can_be_trained_privately():
    def loss(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    torch.manual_seed(0)
    report = clipwise.check(small_cnn(), loss, (torch.rand(6, 1, 8, 8), torch.arange(6)))
    assert report.ok and not report.notes


def test_brightness_and_contrast_do_not_matter():
    """Each image is normalized by its own pixels."""
    torch.manual_seed(0)
    model, x = small_cnn(), torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model(x), model(3 * x + 2), rtol=1e-3, atol=1e-3)
