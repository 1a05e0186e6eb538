"""The defaults of `clipwise train` for texts: the search that chose them, and accuracies.

    python -m experiments recipes/texts --data DIR --embed      # sentence embeddings, once: minutes
    python -m experiments recipes/texts --data DIR --search     # on a part of the training texts of both sets
    python -m experiments recipes/texts --data DIR --judge      # on the test texts

The defaults are one rule that fits the searches on both sets, so each set had a part in its own defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise.recipes.kind import Settings
from clipwise.recipes.texts import TextEncoder
from clipwise.recipes.texts.defaults import HASHED_WORDS, SENTENCES, text_settings
from experiments.data.columns import columns
from experiments.harness.command import parser_of
from experiments.recipes import texts_page
from experiments.recipes.media import Results, part, run

COMMAND = "python -m experiments recipes/texts --data DIR"
BUDGETS = (1.0, 3.0, 8.0)
VALIDATION_EVERY = 5
SHAPE = (1 / 8, 200)  # sampling rate and steps
PLACES = (2**14, 2**16)  # of hashed words, tried at one budget


@dataclass(frozen=True)
class Set:
    """A set of texts.

    Args:
        train, test: files without their ends.
        parts: columns of the text, where a file has them.
        labels: as in the files.
        embedded: texts for training and testing whose sentence embeddings are computed.
    """

    train: str
    test: str
    parts: tuple[str, ...]
    labels: tuple[str, ...]
    embedded: tuple[int, int]


SETS = {
    "ag_news": Set(
        "ag_news_train10k", "ag_news_test", ("title", "description", "text"), ("0", "1", "2", "3"), (3000, 1000)
    ),
    "imdb": Set("imdb_train", "imdb_test", ("text",), ("0", "1"), (2000, 1000)),
}
LEARNING_RATES = {None: (1 / 16, 1 / 8, 1 / 4), 100_000: (1 / 2, 1, 2)}


def encoder_of(name: str, model: str) -> TextEncoder:
    """The encoder of a set, with declared labels."""
    return TextEncoder(SETS[name].labels, model_name=model)


@lru_cache(maxsize=4)
def raw(name: str, is_training: bool, folder: Path) -> tuple[list[str], Tensor]:
    """Texts and labels, in an order that a public seed shuffles: files may be sorted by label."""
    found = SETS[name]
    table = columns(found.train if is_training else found.test, folder)
    texts = [" ".join(map(str, row)) for row in zip(*(table[c] for c in found.parts if c in table), strict=True)]
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[i] for i in order], torch.from_numpy(table["label"]).long()[order]


def data_of(encoder: TextEncoder, name: str, is_training: bool, options: argparse.Namespace) -> TensorDataset:
    """Encoded texts and labels."""
    texts, labels = raw(name, is_training, options.data)
    if encoder.model_name == SENTENCES:
        x = load_file(options.cache / f"{name}.safetensors")["train" if is_training else "test"]
        return TensorDataset(x, labels[: len(x)])
    return TensorDataset(*encoder.features(texts), labels)


def embed(options: argparse.Namespace) -> None:
    """Compute the sentence embeddings and keep them in `--cache`."""
    options.cache.mkdir(parents=True, exist_ok=True)
    for name in options.sets:
        encoder = encoder_of(name, SENTENCES)
        sizes = dict(zip(("train", "test"), SETS[name].embedded, strict=True))
        found = {
            split: encoder.features(raw(name, split == "train", options.data)[0][:size])[0]
            for split, size in sizes.items()
        }
        save_file(found, options.cache / f"{name}.safetensors")


def search(options: argparse.Namespace) -> None:
    """Train on four fifths of the training texts over a grid, and compare on the others."""
    for model in options.models:
        results = Results(f"texts-search-{model}", f"{COMMAND} --search --model {model}")
        for name in options.sets:
            _search(encoder_of(name, model), name, results, options)


def _search(encoder: TextEncoder, name: str, results: Results, options: argparse.Namespace) -> None:
    sizes = PLACES if encoder.model_name == HASHED_WORDS else (encoder.places,)
    for places in sizes:
        encoder = replace(encoder, places=places)
        data = data_of(encoder, name, True, options)
        is_validation = np.arange(len(data)) % VALIDATION_EVERY == 0
        train, validation = (part(data, np.flatnonzero(rows).tolist()) for rows in (~is_validation, is_validation))
        for as_if, learning_rates in LEARNING_RATES.items():
            for epsilon in (1.0, 3.0) if places == PLACES[0] and as_if is None else (3.0,):
                for learning_rate in learning_rates:
                    rate, steps = SHAPE
                    settings = Settings(encoder.model_name, round(rate * len(train)), rate * steps, learning_rate)
                    facts = {"data": name, "places": places, "as_if": as_if, "epsilon": epsilon}
                    if not results.has(settings, **facts):
                        results.add(facts | run(encoder, settings, train, validation, epsilon, as_if=as_if))


def judge(options: argparse.Namespace) -> None:
    """Train with the defaults on all training texts; test on the test texts."""
    for model in options.models:
        results = Results(f"texts-judgement-{model}", f"{COMMAND} --judge --model {model} --seeds {options.seeds}")
        for name in options.sets:
            encoder = encoder_of(name, model)
            train, test = (data_of(encoder, name, is_training, options) for is_training in (True, False))
            for epsilon in BUDGETS:
                settings = text_settings(len(train), epsilon, "fast", model)
                for seed in range(options.seeds):
                    if not results.has(settings, data=name, epsilon=epsilon, seed=seed):
                        results.add({"data": name} | run(encoder, settings, train, test, epsilon, seed=seed))


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = parser_of("python -m experiments recipes/texts", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--cache", type=Path, default=Path("runs/embeddings"), help="folder of embeddings")
    parser.add_argument("--embed", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--set", dest="sets", action="append", choices=list(SETS), help="both if left out")
    parser.add_argument("--model", dest="models", action="append", choices=[HASHED_WORDS, SENTENCES])
    parser.add_argument("--seeds", type=int, default=3, help="of --judge")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    options.sets, options.models = options.sets or list(SETS), options.models or [HASHED_WORDS, SENTENCES]
    torch.set_num_threads(options.threads)
    for is_asked, stage in ((options.embed, embed), (options.search, search), (options.judge, judge)):
        if is_asked:
            stage(options)
    texts_page.write()
