"""Data-parallel training whose ranks are actors of Ray: python examples/with_ray.py

It needs Ray and scikit-learn: pip install ".[ray]" scikit-learn. A softmax regression learns the digits of the latter.
Each actor has its own part of the images; in every step all average their gradients. Ray starts the actors, brings them
their data and the group, and takes their results; the gradients go past it, from process to process.
"""

import sys

import numpy as np
import ray
from sklearn.datasets import load_digits

from farandole.ray import Group

NUM_ACTORS, STEPS, RATE = 3, 300, 0.5


@ray.remote(num_cpus=0.25)  # so that there is room for all on any machine
class Trainer:
    """One rank."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.wanted = images, np.eye(10)[labels]

    def train(self, group: Group, rank: int) -> np.ndarray:
        """The weights, the same on all ranks."""
        weights = np.zeros((64, 10))
        with group.join(rank) as comm:  # an actor that fails leaves, so that no other waits for it
            for _ in range(STEPS):
                gradient = self.images.T @ (softmax(self.images @ weights) - self.wanted) / len(self.images)
                comm.all_reduce(gradient, "avg")
                weights -= RATE * gradient
        return weights


def softmax(scores: np.ndarray) -> np.ndarray:
    """Of each row."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def main() -> None:
    """Train on four fifths of the images, test on the others."""
    images, labels = load_digits(return_X_y=True)
    images, is_test = images / 16, np.arange(len(labels)) % 5 == 0
    parts = [np.flatnonzero(~is_test)[rank::NUM_ACTORS] for rank in range(NUM_ACTORS)]
    actors = [Trainer.remote(images[part], labels[part]) for part in parts]
    group = Group(len(actors))
    results = ray.get([actor.train.remote(group, rank) for rank, actor in enumerate(actors)])
    are_equal = all(np.array_equal(result, results[0]) for result in results)
    accuracy = ((images[is_test] @ results[0]).argmax(axis=1) == labels[is_test]).mean()
    print(f"{len(actors)} actors, weights {'' if are_equal else 'not '}bit-identical, accuracy {accuracy:.3f}")
    sys.exit(0 if are_equal and accuracy > 0.9 else 1)


if __name__ == "__main__":
    ray.init()
    main()
