"""Bounded weights instead of clipped gradients: digits under differential privacy, without per-example gradients.

python examples/lipschitz.py            # about ten seconds
python examples/lipschitz.py --quick    # one epoch, as a check
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

import clipwise
from clipwise import layers, lipschitz
from clipwise.recipes.digits import digits

EPSILON, DELTA = 8.0, 1e-5
BATCH_SIZE, EPOCHS, LEARNING_RATE = 512, 30, 0.02
INPUT_NORM = 1.0  # images with a larger norm are scaled down to this norm
TEMPERATURE = 0.1  # outputs are small, so the softmax needs a low temperature


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    epochs = 1 if parser.parse_args(arguments).quick else EPOCHS
    torch.set_num_threads(1)
    train, test = digits(train=True), digits(train=False)

    # 1. The first module of the model clips inputs, also in evaluation.
    model = nn.Sequential(
        layers.ClipInput(INPUT_NORM),
        nn.Flatten(),
        nn.Linear(64, 32, bias=False),
        nn.ReLU(),
        nn.Linear(32, 10, bias=False),
    )

    # 2. The loss has a known Lipschitz constant. The sensitivity follows from it and from the norms of the weights.
    loss = lipschitz.SoftmaxCrossEntropy(TEMPERATURE)
    private = clipwise.make_private(
        model,
        torch.optim.Adam(model.parameters(), LEARNING_RATE),
        train,
        clipping=clipwise.Lipschitz(max_weight_norm=1.0, input_norm=INPUT_NORM, loss=loss),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        epsilon=EPSILON,
        delta=DELTA,
        ema=0.95,  # an exponential average of the weights: often better, and post-processing
    )

    # 3. A step also takes the model's outputs.
    with private:
        for _ in range(epochs):
            for images, labels in private.loader:
                outputs = model(images) if len(images) else None  # a sampled batch may be empty
                private.step(None if outputs is None else loss(outputs, labels), outputs=outputs)

        for part in private.parts():
            print(f"{part.name}: one example moves its sum by at most {part.sensitivity:.3f}")
        print("on their limit:", ", ".join(name for name, is_on in private.on_limit().items() if is_on) or "none")
        images, labels = test.tensors
        print(f"test accuracy {accuracy(model, images, labels):.1%}")
        with private.ema.applied():
            print(f"test accuracy of the averaged weights {accuracy(model, images, labels):.1%}")
        print(private.spent())


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    main()
