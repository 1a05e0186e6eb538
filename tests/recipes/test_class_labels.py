from __future__ import annotations

from clipwise.noise.key import NoiseKey
from clipwise.recipes.class_labels import released_labels
from clipwise.recipes.counts import NoisedCounts


def test_noise_alone_shows_no_label_of_a_known_domain() -> None:
    labels = [str(row % 2) for row in range(200)]
    for seed in range(300):
        counts = NoisedCounts(5.0, lambda event: None, key=NoiseKey.from_seed(seed))
        assert released_labels(labels, counts, bytes_only=True) == ("0", "1")
