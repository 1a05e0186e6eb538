"""The terms of a mean loss, against the loss of each example computed by itself."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipwise.errors import StepError
from clipwise.integrations.loss_terms import LossTerms

B, T, V = 5, 3, 7


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(B, V, dtype=torch.float64, requires_grad=True)


def alone(make, *batch):
    return torch.stack([make(*(part[i : i + 1] for part in batch)) for i in range(len(batch[0]))])


CASES = {
    "cross entropy": (nn.CrossEntropyLoss(), lambda x: torch.arange(len(x)) % V),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), lambda x: torch.arange(len(x)) % V),
    "probabilities": (nn.CrossEntropyLoss(), lambda x: torch.softmax(x.detach().flip(0), 1)),
    "squared error": (nn.MSELoss(), lambda x: torch.ones_like(x)),
    "absolute error": (nn.L1Loss(), lambda x: torch.ones_like(x)),
    "huber": (nn.HuberLoss(), lambda x: torch.ones_like(x)),
    "smooth l1": (nn.SmoothL1Loss(), lambda x: torch.ones_like(x)),
    "logistic": (nn.BCEWithLogitsLoss(), lambda x: (x.detach() > 0).to(x)),
    "margin": (nn.MultiMarginLoss(), lambda x: torch.arange(len(x)) % V),
    "kl": (nn.KLDivLoss(reduction="batchmean"), lambda x: torch.softmax(x.detach(), 1)),
    "by hand": (lambda x, y: ((x - y) ** 2).mean(), lambda x: torch.ones_like(x)),
    "log softmax": (lambda x, y: -F.log_softmax(x, 1).gather(1, y[:, None]).mean(), lambda x: torch.arange(len(x)) % V),
}


@pytest.mark.parametrize("name", CASES)
def test_terms_are_the_losses_of_single_examples(name, logits):
    criterion, target = CASES[name]
    y = target(logits)
    with LossTerms(B) as terms:
        loss = criterion(logits, y)
    found = terms.of(loss)
    torch.testing.assert_close(found, alone(criterion, logits, y))
    torch.testing.assert_close(loss.detach(), criterion(logits, y).detach())
    (expected,) = torch.autograd.grad(alone(criterion, logits, y).sum(), logits)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], expected)


def test_ignored_labels_of_one_example_do_not_scale_another():
    logits = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, V, (B, T))
    y[1, 1:] = -100
    with LossTerms(B) as terms:
        loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    found = terms.of(loss)
    torch.testing.assert_close(found, alone(lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1)), logits, y))


def test_an_example_without_labels_has_loss_zero():
    logits = torch.randn(2, V, requires_grad=True)
    with LossTerms(2) as terms:
        loss = F.cross_entropy(logits, torch.tensor([1, -100]))
    assert terms.of(loss)[1] == 0


@pytest.mark.parametrize("size", [1, B])
def test_squeezed_predictions(size):
    x, y = torch.randn(size, 1, requires_grad=True), torch.randn(size)
    with LossTerms(size) as terms:
        loss = F.mse_loss(x.squeeze(), y.squeeze())
    torch.testing.assert_close(terms.of(loss), (x.squeeze(1) - y).square())


def test_rows_ordered_by_position():
    logits = torch.randn(T, B, V, requires_grad=True)
    y = torch.randint(0, V, (T, B))
    with LossTerms(B, batch_first=False) as terms:
        loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    each = torch.stack([F.cross_entropy(logits[:, i], y[:, i]) for i in range(B)])
    torch.testing.assert_close(terms.of(loss), each)


def test_class_weights_keep_their_scale():
    logits, y, weight = torch.randn(B, V, requires_grad=True), torch.arange(B), torch.arange(1.0, V + 1)
    with LossTerms(B) as terms:
        loss = F.cross_entropy(logits, y, weight=weight)
    torch.testing.assert_close(terms.of(loss), F.cross_entropy(logits, y, weight=weight, reduction="none"))


def test_sums_and_constant_factors(logits):
    y = torch.arange(B)
    with LossTerms(B) as terms:
        loss = 1 + (2 * F.cross_entropy(logits, y) - F.mse_loss(logits, torch.zeros_like(logits)) / 4).float().mean()
    expected = 2 * F.cross_entropy(logits, y, reduction="none") - logits.square().mean(1) / 4
    torch.testing.assert_close(terms.of(loss), expected)


def changed_in_place(how, loss, logits):
    other = F.mse_loss(logits, torch.zeros_like(logits))
    if how == "operators":
        loss += 3 * other
        loss -= 1
        loss *= 2.0
        loss /= 4
    else:
        loss.add_(3 * other).sub_(1).mul_(2.0).div_(4)
    return loss


@pytest.mark.parametrize("how", ["operators", "methods"])
def test_a_loss_that_is_changed_in_place(how, logits):
    with LossTerms(B) as terms:
        loss = changed_in_place(how, F.cross_entropy(logits, torch.arange(B)), logits)
    expected = (F.cross_entropy(logits, torch.arange(B), reduction="none") + 3 * logits.square().mean(1)) / 2
    torch.testing.assert_close(terms.of(loss), expected)
    (gradient,) = torch.autograd.grad(terms.of(loss).mean(), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.mean(), logits)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda loss, logits: loss.add_(logits.norm()),
        lambda loss, logits: loss.pow_(2),
        lambda loss, logits: loss.add_(loss, alpha=2),
        lambda loss, logits: torch.add(input=loss, other=loss),
        lambda loss, logits: torch.div(loss, 2, rounding_mode="floor"),
    ],
)
def test_a_loss_that_is_changed_in_another_way_is_refused(change, logits):
    with LossTerms(B) as terms:
        loss = change(F.cross_entropy(logits, torch.arange(B)), logits)
    with pytest.raises(StepError, match="per-example terms"):
        terms.of(loss)


@pytest.mark.parametrize("positions", [T, B])
def test_positions_on_the_first_axis(positions):
    """The number of positions may equal the batch size by chance."""
    x = torch.randn(positions, B, 2, requires_grad=True)
    with LossTerms(B, batch_first=False) as terms:
        loss = F.mse_loss(x, torch.zeros_like(x))
    torch.testing.assert_close(terms.of(loss), x.square().mean((0, 2)))


def test_an_unknown_axis_of_the_examples_is_refused():
    for shape, batch_first in (((T, B), True), ((B, V), False), ((T * B, V), False)):
        x = torch.randn(shape, requires_grad=True)
        with LossTerms(B, batch_first=batch_first) as terms:
            with pytest.raises(StepError, match="one row for each example"):
                F.mse_loss(x, torch.zeros_like(x))
            loss = x.square().mean()
        with pytest.raises(StepError, match="per-example terms"):
            terms.of(loss)


def test_a_sum_with_an_unknown_summand_is_refused(logits):
    with LossTerms(B) as terms:
        loss = F.cross_entropy(logits, torch.arange(B)) + logits.norm()
    with pytest.raises(StepError, match="per-example terms"):
        terms.of(loss)


def test_a_sum_reduction_is_refused(logits):
    with LossTerms(B) as terms:
        loss = F.cross_entropy(logits, torch.arange(B), reduction="sum")
    with pytest.raises(StepError, match="mean over the batch"):
        terms.of(loss)


def test_backward_gets_the_terms(logits):
    got = []
    with LossTerms(B, got.append):
        F.cross_entropy(logits, torch.arange(B)).backward()
    assert got[0].shape == (B,) and logits.grad is None


def test_backward_to_some_parameters_is_refused(logits):
    got = []
    with LossTerms(B, got.append):
        loss = F.cross_entropy(logits, torch.arange(B))
        for given in ({"inputs": [logits]}, {"gradient": torch.tensor(2.0)}):
            with pytest.raises(StepError, match="gradient= or inputs="):
                loss.backward(**given)
        loss.backward(retain_graph=True)
    assert len(got) == 1


def test_an_empty_batch():
    logits = torch.randn(0, V, requires_grad=True)
    with LossTerms(0) as terms:
        loss = F.cross_entropy(logits, torch.zeros(0, dtype=torch.long))
    assert terms.of(loss).shape == (0,)
