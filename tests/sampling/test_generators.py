"""Generators are as wide as their key, and torch's own are put back."""

from __future__ import annotations

import secrets
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from clipwise import Private, make_private
from clipwise.errors import PrivacyWarning, StepError
from clipwise.sampling.generators import generator_from, private_generator
from clipwise.validation.training_loop import is_seeded_by_hand
from tests.runs import private_run

CPU = {torch.device("cpu")}


def words(generator: torch.Generator) -> list[int]:
    """The 624 words of a Mersenne twister."""
    state = generator.get_state().numpy()[24 : 24 + 8 * 624]
    return list(np.frombuffer(state.tobytes(), dtype=np.uint64))


def test_all_words_of_the_state_come_from_the_key() -> None:
    key = secrets.token_bytes(32)
    assert words(generator_from(key)) == words(generator_from(key))
    found = words(generator_from(key))
    assert len(set(found)) > 600 and max(found) > 2**31
    by_seed = words(torch.Generator().manual_seed(7))
    assert words(torch.Generator().manual_seed(7 + 2**32)) == by_seed, "what torch keeps of a seed is 32 bits"
    for place in range(0, 32, 4):  # keys that share all but 4 bytes, or nothing but 4 bytes
        other = key[:place] + secrets.token_bytes(4) + key[place + 4 :]
        alone = secrets.token_bytes(place) + key[place : place + 4] + secrets.token_bytes(28 - place)
        for near in (other, alone):
            assert len(set(found) & set(words(generator_from(near)))) < 5
    assert words(private_generator()) != words(private_generator())


def test_it_draws_as_a_generator_does() -> None:
    x = torch.rand(20000, generator=generator_from(b"k" * 32))
    assert abs(float(x.mean()) - 0.5) < 0.02 and abs(float(x.var()) - 1 / 12) < 0.005
    assert len(torch.randperm(100, generator=generator_from(b"k" * 32)).unique()) == 100


def test_a_seed_set_by_hand_is_recognised() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.seed()
        assert not is_seeded_by_hand(CPU)
        torch.manual_seed(2**31)
        assert is_seeded_by_hand(CPU)


# ---------------------------------------------------------------------- in a run


def dropout_run(**options: object) -> tuple[nn.Module, Private]:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return private_run(model, **options)


def step(model: nn.Module, private: Private) -> None:
    x, y = next(iter(private.loader))
    private.step(F.cross_entropy(model(x), y, reduction="none"))


def seed_warnings(model: nn.Module, private: Private, steps: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model, private)
    return [str(w.message) for w in caught if "seeded by hand" in str(w.message)]


def test_a_known_seed_under_dropout_is_warned_of_once() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, private = dropout_run()
        assert len(seed_warnings(model, private)) == 1
        assert "the user seeded the torch generator" in str(private.statement())
        assert not seed_warnings(*dropout_run(seed=1)), "a run with a given seed claims nothing"
        assert not seed_warnings(*private_run()), "nothing is drawn"
        model, private = dropout_run()
        model.eval()
        assert not seed_warnings(model, private)
        torch.seed()
        model, private = dropout_run()
        assert not seed_warnings(model, private)
        assert "use a generator with a secret seed" in str(private.statement())
        torch.manual_seed(3)  # by an epoch of the loop, say
        assert len(seed_warnings(model, private)) == 1


def test_random_layers_draw_from_the_run_s_key() -> None:
    """For any seed of torch, and its own stream continues unchanged."""

    def masks(seed: int, private: Private) -> torch.Tensor:
        torch.manual_seed(seed)
        next(iter(private.loader))
        with private.randomness():
            return F.dropout(torch.ones(200), 0.5)

    with torch.random.fork_rng(devices=[]):
        model, private = dropout_run(noise_multiplier=1.0)
        first = masks(0, private)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(first, masks(1, private))
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrivacyWarning)
            for _ in range(2):
                x, y = next(iter(private.loader))
                with private.randomness():
                    losses = F.cross_entropy(model(x), y, reduction="none")
                private.step(losses)
        assert not torch.equal(first, masks(0, private))
        assert not torch.equal(first, masks(0, dropout_run()[1]))
        assert "random layers used the run's key" in str(private.statement())
        assert len(seed_warnings(model, private)) == 1  # a step outside of such a block
        assert "the user seeded the torch generator" in str(private.statement())


def test_it_is_for_a_batch_that_was_handed_out() -> None:
    _, private = dropout_run()
    with pytest.raises(StepError, match="inside the loop"), private.randomness():
        pass


def test_a_seeded_run_with_private_randomness_repeats_whole() -> None:
    found = []
    for torch_seed in (0, 1):
        torch.manual_seed(0)
        model, private = dropout_run(seed=5)
        torch.manual_seed(torch_seed)
        for _ in range(3):
            x, y = next(iter(private.loader))
            with private.randomness():
                losses = F.cross_entropy(model(x), y, reduction="none")
            private.step(losses)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


class Noisy(Dataset):  # type: ignore[type-arg]
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        return torch.tensor([torch.rand(()), np.random.rand(), random.random()])


@pytest.mark.parametrize("seed", [None, 5])
def test_workers_draw_from_the_run_s_key(seed: int | None) -> None:
    """A worker's seed comes from torch's generator otherwise, which may have a published one."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Noisy(),
            sampling="full",
            noise_multiplier=1.0,
            num_workers=1,
            seed=seed,
        )
        found.append(next(iter(private.loader)).detach())
    same = (found[0] == found[1]).all(0)
    assert same.all() if seed is not None else not same.any()
