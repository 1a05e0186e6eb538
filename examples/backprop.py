"""Train a small network privately without computing the gradient of any single example.

python examples/backprop.py
python examples/backprop.py --epochs 2 --bound gradient
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch.nn import functional as F

import clipwise
from clipwise.recipes.digits import digits
from clipwise.recipes.small_cnn import small_cnn

EPSILON, DELTA = 8.0, 1e-5
BATCH_SIZE = 512  # expected: the realised batch size is random and stays secret
LEARNING_RATE = 0.02
INPUT_NORM = 4.0  # inputs of each layer are clipped to this norm, in training and in evaluation
GRAD_NORM = 1.0  # with mode="normalize" it scales gradient and noise alike


def main(arguments: Sequence[str] | None = None) -> None:
    """From data to a privacy statement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--bound", choices=("upstream", "gradient"), default="gradient")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a network this small is faster on one core
    train, test = digits(train=True), digits(train=False)

    # 1. The clips are modules of the network, also in evaluation.
    model = small_cnn()
    clipwise.layers.clip_inputs(
        model, input_norm=INPUT_NORM, grad_norm=GRAD_NORM, mode="normalize", bound=options.bound
    )
    print(model)

    # 2. The rest is the same as with other strategies.
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    private = clipwise.make_private(
        model,
        optimizer,
        train,
        clipping=clipwise.Backprop(),
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        epsilon=EPSILON,
        delta=DELTA,
    )
    for _ in range(options.epochs):
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)

    # 3. Accuracy and privacy cost.
    x, y = test[:]
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f}%")
    print(private.statement())


if __name__ == "__main__":
    main()
