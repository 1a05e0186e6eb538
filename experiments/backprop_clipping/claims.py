"""The paper's numbers: table 1, the best settings of figure 2, and their noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

DELTA = 1e-5


@dataclass(frozen=True)
class Claim:
    """One data set of table 1 and figure 2.

    Attributes:
        plain, clipped: accuracies without privacy, without and with clips.
        relu, tanh: accuracies of DP-SGD with these activations, at `baseline_epsilon`.
        baseline_epsilon: the epsilon of DP-SGD.
        ours: the accuracy of backpropagation clipping, at `epsilon`.
        epsilon: the claimed epsilon, which the authors withdrew.
        epochs, batch_size, input_norm, grad_norm: the best settings.
        layers: the number of layers with weights.
    """

    plain: float
    clipped: float
    relu: float
    tanh: float
    baseline_epsilon: float
    ours: float
    epsilon: float
    epochs: int
    input_norm: float
    grad_norm: float
    layers: int
    batch_size: int = 4096
    learning_rate: float = 1e-3

    @property
    def noise(self) -> float:
        """Sigma by theorem 1: rho = E N (C1 C2)^2 / (2 sigma^2), epsilon = rho + 2 sqrt(rho ln(1/delta))."""
        log = math.log(1 / DELTA)
        root = math.sqrt(log + self.epsilon) - math.sqrt(log)  # of rho
        return self.input_norm * self.grad_norm * math.sqrt(self.epochs * self.layers / 2) / root

    def printed(self, method: str) -> float | None:
        """The accuracy that is claimed for a row, if there is one."""
        return {
            "plain": self.plain,
            "clipped-upstream": self.clipped,
            "dp-sgd-relu": self.relu,
            "dp-sgd-tanh": self.tanh,
            "upstream-clip": self.ours,
        }.get(method)


CLAIMS: dict[str, Claim] = {
    "mnist": Claim(0.990, 0.989, 0.966, 0.981, 2.93, 0.987, 0.07, 25, 1.0, 0.01, 4),
    "fashion_mnist": Claim(0.894, 0.887, 0.819, 0.861, 2.7, 0.886, 0.87, 40, 10.0, 0.01, 4),
    "cifar10": Claim(0.769, 0.744, 0.616, 0.662, 7.53, 0.740, 3.64, 100, 5.0, 0.001, 10),
}
