"""What the first steps of a run cost, next to the later ones.

    python -m benchmarks start-up [--steps 20] [--later 60] [--out FILE]

The first steps of a private run find the layout of the examples, compare rules with autograd and test the losses. For
each network the table has the processor time of `make_private`, of the first steps together, and of as many later steps
(by their median), and the ratio of these, with a target of 3. Batches are Poisson samples, so their sizes vary. The
tiny GPT-2 is that of transformers, with dropout, if transformers is installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Generator, Sequence
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from clipwise import PerExample, make_private
from experiments.harness.command import parser_of

_BATCH, _ROWS = 32, 640
_TARGET = 3.0
_WORDS, _LENGTH = 500, 32

Losses = Callable[[nn.Module, Any], Tensor]
Subject = tuple[nn.Module, Dataset[Any], Losses]


def _classified(model: nn.Module, *shape: int) -> Subject:
    data = TensorDataset(torch.randn(_ROWS, *shape), torch.randint(0, 10, (_ROWS,)))
    return model, data, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1], reduction="none")


def _mlp() -> Subject:
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return _classified(nn.Sequential(*layers), 784)


def _cnn() -> Subject:
    layers = nn.Conv2d(1, 16, 5, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.Flatten()
    return _classified(nn.Sequential(*layers, nn.Linear(512, 10)), 1, 28, 28)


def _gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS, n_positions=_LENGTH, n_embd=64, n_layer=2, n_head=2))
    data = TensorDataset(torch.randint(0, _WORDS, (_ROWS, _LENGTH)))

    def losses(net: nn.Module, batch: Any) -> Tensor:
        logits = net(input_ids=batch[0]).logits[:, :-1]
        words = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
        return words.view(len(logits), -1).mean(1)

    return model, data, losses


SUBJECTS: dict[str, Callable[[], Subject]] = {"MLP": _mlp, "CNN": _cnn, "tiny GPT-2": _gpt2}


def _seconds_of_each(steps: Generator[None, None, None], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.process_time()
        next(steps)
        found.append(time.process_time() - start)
    return found


def _private_steps(subject: Subject, folder: str) -> Generator[None, None, None]:
    """The first item is `make_private`, each further one a step."""
    model, data, losses = subject
    with make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        data,
        batch_size=_BATCH,
        clipping=PerExample(max_norm=1.0),
        noise_multiplier=1.0,
        ledger=Path(folder) / "ledger",
    ) as private:
        yield
        for batch in chain.from_iterable(repeat(private.loader)):
            private.step(losses(model, batch) if len(batch[0]) else None)
            yield


def _plain_steps(subject: Subject) -> Generator[None, None, None]:
    model, data, losses = subject
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (*tensors,) = data.tensors  # type: ignore[attr-defined]
    while True:
        rows = torch.randperm(_ROWS)[:_BATCH]
        optimizer.zero_grad()
        losses(model, [t[rows] for t in tensors]).mean().backward()
        optimizer.step()
        yield


def measured(name: str, first: int, later: int) -> dict[str, float]:
    """Seconds of processor time of the phases of one run, and of a plain step."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    plain = _seconds_of_each(_plain_steps(SUBJECTS[name]()), 3 + later)[3:]
    torch.seed()
    with TemporaryDirectory() as folder:
        steps = _private_steps(subject, folder)
        (made,) = _seconds_of_each(steps, 1)
        times = _seconds_of_each(steps, first + later)
        steps.close()
    return {
        "make_private": made,
        "first": sum(times[:first]),
        "later": median(times[first:]) * first,
        "plain": median(plain) * first,
    }


def table(first: int, later: int) -> str:
    """All networks, with the ratio that has a target."""
    lines = [
        f"| | make_private, s | first {first}, s | {first} later ones, s | first over later | later over plain |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in SUBJECTS:
        if name.endswith("GPT-2") and importlib.util.find_spec("transformers") is None:
            continue
        found = measured(name, first, later)
        ratio = found["first"] / found["later"]
        verdict = "met" if ratio <= _TARGET else "not met"
        lines.append(
            f"| {name} | {found['make_private']:.3f} | {found['first']:.3f} | {found['later']:.3f} | "
            f"{ratio:.2f} (<= {_TARGET:g}: {verdict}) | {found['later'] / found['plain']:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = parser_of("python -m benchmarks start-up", __doc__)
    parser.add_argument("--steps", type=int, default=20, help="first steps")
    parser.add_argument("--later", type=int, default=60, help="later steps")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = f"torch {torch.__version__}, 1 thread, processor time\n\n{table(options.steps, options.later)}"
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
