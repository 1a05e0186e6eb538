import pytest
import torch
import torch.nn.functional as F

from clipwise.kernels import patches, usable

needs_triton = pytest.mark.skipif(not usable(torch.zeros(1)), reason="needs triton, or its interpreter")


@needs_triton
@pytest.mark.parametrize(
    "N,c,H,W,kernel,stride,padding,dilation",
    [
        (2, 3, 5, 6, (3, 3), (1, 1), (1, 1), (1, 1)),
        (3, 40, 7, 5, (3, 2), (2, 1), (1, 0), (1, 1)),
        (2, 300, 4, 4, (2, 2), (1, 2), (0, 1), (2, 1)),
        (1, 1, 9, 9, (5, 5), (2, 2), (2, 2), (1, 1)),
    ],
)
def test_windows_equal_those_of_unfold(N, c, H, W, kernel, stride, padding, dilation):
    torch.manual_seed(0)
    x = torch.randn(N, H, W, c).permute(0, 3, 1, 2)
    places = tuple(
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip((H, W), kernel, stride, padding, dilation, strict=True)
    )
    assert patches.fits(x) == (x.stride(1) == 1)
    found = patches.patches(x, kernel, stride, padding, dilation, places)
    expected = F.unfold(x, kernel, dilation, padding, stride)  # [N, c * o, T]
    expected = expected.view(N, c, -1, places[0] * places[1]).permute(0, 3, 2, 1).flatten(2)
    assert torch.equal(found, expected)
