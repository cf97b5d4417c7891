"""Trains a small convolutional network on handwritten digits with DataParallel, over farandole.

Start it with ``farandole run -n 2 examples/train_digits.py``, or with torchrun. The backend is the one word
in ``init_process_group``. Needs torch and scikit-learn, whose real 8 x 8 images are part of its package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from farandole.training import DataParallel

NUM_TEST_IMAGES = 360


def main() -> None:
    """One rank."""
    arguments = parse_arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    images, labels = load_images()
    model = DataParallel(make_model(arguments.seed))
    optimizer = make_optimizer(model)
    for epoch, batches in enumerate(make_epochs(arguments), start=1):
        loss = train(model, optimizer, images[NUM_TEST_IMAGES:], labels[NUM_TEST_IMAGES:], batches)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    accuracy = measure_accuracy(model, images[:NUM_TEST_IMAGES], labels[:NUM_TEST_IMAGES])
    if dist.get_rank() == 0:
        print(f"test accuracy {accuracy:.4f}")
    dist.destroy_process_group()


def parse_arguments(description: str | None) -> argparse.Namespace:
    """What all trainings of this folder can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: 10)")
    parser.add_argument("--batch", type=int, default=64, help="images per global batch, over all ranks (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the images (default: 0)")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.batch < 1:
        parser.error("--epochs and --batch must be at least 1")
    return arguments


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, (1797, 1, 8, 8) in 0..1, and their labels, in one shuffled order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


def make_model(seed: int) -> nn.Module:
    """38,282 parameters. Smooth: ReLU and maximum would turn a rounding into another gradient, and runs drift apart."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Stochastic gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_epochs(arguments: argparse.Namespace) -> list[Sequence[torch.Tensor]]:
    """Indices of each global batch, per epoch; the same on every rank."""
    num_images = len(load_digits().target) - NUM_TEST_IMAGES
    generator = torch.Generator().manual_seed(arguments.seed)
    orders = [torch.randperm(num_images, generator=generator) for _ in range(arguments.epochs)]
    return [order.split(arguments.batch) for order in orders]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    batches: Sequence[torch.Tensor],
) -> float:
    """One epoch; returns the last loss on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for batch in batches:
        mine = batch.tensor_split(world_size)[rank]
        optimizer.zero_grad()
        # The shares of a batch may differ by one image, and DataParallel takes the mean over ranks: so each takes the
        # sum over its images, divided by how many there would be in equal shares.
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        loss = loss * world_size / len(batch)
        loss.backward()
        optimizer.step()
    return loss.item()


def measure_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Of all test images, each rank reading its share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        predicted = model(images.tensor_split(world_size)[rank]).argmax(dim=1)
    num_right = (predicted == labels.tensor_split(world_size)[rank]).sum()
    dist.all_reduce(num_right)
    return num_right.item() / len(labels)


if __name__ == "__main__":
    main()
