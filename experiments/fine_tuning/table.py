"""Fine-tune a pretrained sentence encoder privately on AG News and IMDB: head only, LoRA, all weights.

    python -m experiments fine-tuning --data DIR --method head
    python -m experiments fine-tuning --data DIR --device cuda --minutes 8    # repeat it until all cells are done

Every finished cell is written at once. A later command skips it. The features of the frozen encoder are computed once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from clipwise.ledger.durable_files import replace_file
from experiments.data.texts import raw_texts
from experiments.harness.command import parser_of
from experiments.harness.environment import device_of, environment
from experiments.harness.store import Store

from .encoder import encoder, features, token_ids
from .report import page
from .train import METHODS, train_encoder, train_head

DATA = ("ag_news", "imdb")
BUDGETS = (None, 1.0, 3.0, 8.0)
SEEDS = 5
Cell = tuple[str, str, float | None, int]


def key_of(data: str, method: str, epsilon: float | None, seed: int) -> str:
    """The name of a cell in the results."""
    return f"{data}/{method}/{'none' if epsilon is None else f'{epsilon:g}'}/{seed}"


def run(options: Any) -> None:
    """Run the cells that are not done, until the time is over."""
    device, began = device_of(options.device), time.monotonic()
    store = Store(options.out)
    command = f"python -m experiments fine-tuning --data DIR --device {options.device}"
    command += "".join(f" --method {method}" for method in options.methods or ())
    store.begin(command, environment(device))
    loaded: dict[tuple[str, bool], Any] = {}  # of one data set

    def over() -> bool:
        return options.minutes is not None and time.monotonic() - began > 60 * options.minutes

    for data, method, epsilon, seed in _cells(options):
        key = key_of(data, method, epsilon, seed)
        if "accuracy" in store.cells.get(key, {}):
            continue
        if over():
            print("The time is over: run the command again to continue.", flush=True)
            break
        place = data, method == "head"
        if place not in loaded:
            loaded = {place: _read(data, method, options, device)}
        train, test = loaded[place]
        before = time.perf_counter()
        if method == "head":
            found = train_head(train, test, epsilon, seed, device)
        else:
            found = train_encoder(method, train, test, epsilon, seed, device, options.piece, options.encoder)
        cell = {"data": data, "method": method, "budget": epsilon, "seed": seed} | found
        store.add(key, cell | {"seconds": round(time.perf_counter() - before, 1)})
        print(key, f"{found['accuracy']:.4f}", flush=True)
    text = page(store, DATA, METHODS, BUDGETS, SEEDS)
    replace_file(options.out / "results.md", lambda file: file.write(text.encode()), mode=0o644)


def _cells(options: Any) -> Iterator[Cell]:
    budgets = BUDGETS if options.epsilon is None else (None, *options.epsilon)
    return product(options.datasets or DATA, options.methods or METHODS, budgets, range(options.seeds))


def _read(data: str, method: str, options: Any, device: Any) -> tuple[Any, Any]:
    """The training part and the test part: features and labels, or (token ids, label) of each text."""
    if method == "head":
        parts = (features(data, train, options.data, options.cache, device, options.encoder) for train in (True, False))
        return tuple(parts)  # type: ignore[return-value]
    found = []
    for train in (True, False):
        texts, labels = raw_texts(data, train, options.data)
        found.append(list(zip(token_ids(texts, options.encoder), labels.tolist(), strict=True)))
    return found[0], found[1]


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = parser_of("python -m experiments fine-tuning", __doc__)
    parser.add_argument("--data", type=Path, help="folder of data sets; if left out, CLIPWISE_DATA names it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--dataset", dest="datasets", action="append", choices=DATA, help="may be repeated; default all"
    )
    parser.add_argument("--method", dest="methods", action="append", choices=METHODS, help="as --dataset")
    parser.add_argument("--epsilon", type=float, action="append", help="may be repeated; default 1, 3 and 8")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--minutes", type=float, help="begin no cell after this time")
    parser.add_argument("--piece", type=int, default=250, help="texts computed at a time, for LoRA and all weights")
    parser.add_argument("--encoder", type=Path, help="folder of the encoder, instead of that of its package")
    parser.add_argument("--save-encoder", type=Path, help="write the encoder to this folder in float16, and end")
    parser.add_argument("--cache", type=Path, default=Path("runs/fine-tuning/features"), help="folder of features")
    parser.add_argument("--out", type=Path, default=Path("runs/fine-tuning"), help="folder of the results")
    options = parser.parse_args(arguments)
    if options.save_encoder is not None:
        _save(options.save_encoder, options.encoder)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        run(options)


def _save(folder: Path, given: Path | None) -> None:
    """For a machine without the package: 45 MB."""
    from transformers import AutoTokenizer

    from .encoder import folder_of_encoder

    encoder(given).half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(folder_of_encoder(given)), local_files_only=True).save_pretrained(folder)
