"""Train a small network on handwritten digits under differential privacy.

python examples/train.py                   # a new run, in its own folder under runs/example
python examples/train.py --stop-after 10   # the same, but stop after 10 epochs
python examples/train.py --resume          # resume the latest run from its checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

import clipwise
from clipwise.recipes.digits import digits
from clipwise.recipes.small_cnn import small_cnn

EPSILON, DELTA = 8.0, 1e-5  # the privacy budget of the whole run
BATCH_SIZE = 512  # expected: the realised batch size is random and stays secret
LEARNING_RATE, MOMENTUM = 0.2, 0.9
MAX_NORM = 1.0  # per-example gradients are clipped to this norm


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    folder = choose_folder(options.out, options.resume)
    torch.set_num_threads(1)  # a network this small is faster on one core

    # 1. Data, model and optimizer: plain torch. The test set is never trained on, so evaluating on it costs no privacy
    #    of the training records.
    train, test = digits(train=True), digits(train=False)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    # 2. Make it private. The noise is calibrated so that all epochs together fit the budget. The ledger records
    #    each release before its result becomes visible.
    private = clipwise.make_private(
        model,
        optimizer,
        train,
        clipping=clipwise.PerExample(max_norm=MAX_NORM),
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        epsilon=EPSILON,
        delta=DELTA,
        ledger=folder / "ledger",
    )

    # 3. With --resume, continue from the checkpoint. After a clean end the run continues bit for bit. After a crash
    #    it gets a fresh noise key, and the repeated steps are counted again.
    done = 0
    if options.resume:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        private.load_state_dict(saved["private"])
        done = saved["epochs"]

    # 4. Train. `with` ends the run cleanly, also after an error.
    with private:
        try:
            for epoch in range(done, min(options.epochs, done + options.stop_after)):
                for images, labels in private.loader:
                    losses = None  # a sampled batch may be empty: no forward pass, but still a step
                    if len(images):
                        losses = F.cross_entropy(model(images), labels, reduction="none")  # one loss per example
                    private.step(losses)  # clip, add noise, write the ledger, update
                save(folder, private, model, epoch + 1)
                # RDP is a fast upper bound; the final epsilon is by PLD. The training loss is not shown: it is
                # computed from private batches, and no noise protects it.
                spent = private.spent(accountant="rdp").epsilon
                print(
                    f"epoch {epoch + 1:2} of {options.epochs}   test accuracy {accuracy(model, test):.1%}   "
                    f"epsilon so far (RDP) {spent:.3f}"
                )
        except clipwise.BudgetExhausted as end:
            # Happens after a crash: the repeated steps have used the budget of the last ones.
            print(end)

        # 5. The privacy cost, and the statement to publish with the model.
        print(f"\ntest accuracy {accuracy(model, test):.1%}, {private.spent()}\n")
        statement = private.statement()
        print(statement)
        (folder / "statement.txt").write_text(f"{statement}\n")
        (folder / "statement.json").write_text(json.dumps(statement.to_dict(), indent=2) + "\n")
    print(f"\nEverything is in {folder}")


def save(folder: Path, private: clipwise.Private, model: torch.nn.Module, epochs: int) -> None:
    """Save a checkpoint. It holds no secret and may be published; the noise key is in another file.

    The file gets its name when it is complete: a crash leaves the old checkpoint or the new one.
    """
    state = {"private": private.state_dict(), "model": model.state_dict(), "epochs": epochs}
    torch.save(state, folder / "checkpoint.pt.new")
    os.replace(folder / "checkpoint.pt.new", folder / "checkpoint.pt")


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: torch.utils.data.TensorDataset) -> float:
    images, labels = test.tensors
    return float((model(images).argmax(1) == labels).float().mean())


def choose_folder(out: Path, resume: bool) -> Path:
    """Each run has its own folder: a ledger belongs to one run and is never overwritten."""
    runs = sorted(out.glob("run-*"))
    if resume and not runs:
        raise SystemExit(f"There is no run in {out} to resume: leave out --resume.")
    return runs[-1] if resume else out / f"run-{len(runs) + 1:03}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="resume the latest run")
    parser.add_argument("--stop-after", type=int, default=1000, metavar="N", help="stop after N epochs")
    parser.add_argument("--epochs", type=int, default=30, help="the whole run; the noise is calibrated for it")
    parser.add_argument("--quick", action="store_true", help="one epoch, as a check")
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    options = parser.parse_args(arguments)
    if options.quick:
        options.epochs = 1
    return options


if __name__ == "__main__":
    main()
