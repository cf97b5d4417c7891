"""Training that goes on when ranks are lost: farandole run -n 4 --max-lost 2 examples/survivors.py

A linear model is trained by gradient descent. Every step uses one batch, which the ranks
that are there share; so the weights do not depend on how many they are. To show it, ranks 1 and 2 end in the middle. At
the end the weights are compared with those of one process.
"""

import os
import sys

import numpy as np

import farandole

STEPS, ROWS, FEATURES, RATE = 60, 240, 16, 0.1
ENDS = {1: 20, 2: 40}  # rank of the job: the step in which it ends


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step."""
    random = np.random.default_rng(step)
    inputs = random.normal(size=(ROWS, FEATURES))
    return inputs, inputs @ np.arange(FEATURES) + 0.1 * random.normal(size=ROWS)


def gradient(weights: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of half the sum of squared errors."""
    return inputs.T @ (inputs @ weights - targets)


def train(comm: farandole.Communicator) -> tuple[np.ndarray, farandole.Communicator]:
    """The weights after all steps, and the communicator of the ranks that are left."""
    job_rank, weights, step, has_lost = comm.rank, np.zeros(FEATURES), 0, False
    while step < STEPS:
        try:
            if has_lost:
                comm = comm.shrink()
                step, weights = furthest(comm, step, weights)
                has_lost = False
            if ENDS.get(job_rank) == step:
                os._exit(3)
            inputs, targets = batch(step)
            mine = slice(comm.rank, None, comm.world_size)
            total = comm.all_reduce(gradient(weights, inputs[mine], targets[mine]))
            weights = weights - RATE / ROWS * total
            step += 1
        except farandole.PeerLostError as error:
            sys.stdout.write(f"rank {job_rank} in step {step}: {str(error).splitlines()[0]}\n")
            has_lost = True
    return weights, comm


def furthest(comm: farandole.Communicator, step: int, weights: np.ndarray) -> tuple[int, np.ndarray]:
    """Where all go on: some ranks may have been through a step when others were not."""
    steps = comm.all_gather(np.array([step]))
    source = int(np.argmax(steps))
    return int(steps[source]), comm.broadcast(weights.copy(), src=source)


def main() -> None:
    """Train, and compare."""
    weights, comm = train(farandole.init())
    alone = np.zeros(FEATURES)
    for step in range(STEPS):
        alone -= RATE / ROWS * gradient(alone, *batch(step))
    distance = float(np.abs(weights - alone).max())
    sys.stdout.write(f"rank {comm.rank} of {comm.world_size} that are left: largest difference {distance:.1e}\n")
    sys.exit(distance > 1e-9)


if __name__ == "__main__":
    main()
