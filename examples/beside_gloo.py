"""The training of train_digits.py over farandole and, in the same run, over Gloo: epoch by epoch in turn.

Start it with ``scripts/demo``, or ``farandole run -n 2 examples/beside_gloo.py``. Both start from the same weights and
see the same batches. At the end three things are checked, and the exit code says whether they hold: both have learned
to read, all ranks hold the same weights to the bit, and the weights of both agree to float tolerance.
"""

import sys
import time

import torch
import torch.distributed as dist
import train_digits
from rich import box
from rich.console import Console
from rich.table import Table

from farandole.training import DataParallel

BACKENDS = ("farandole", "gloo")
WANTED_ACCURACY = 0.95
WEIGHT_TOLERANCE = 1e-3


class Training:
    """A model that is trained over one backend.

    Attributes:
        seconds: of all epochs.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        self.group = group
        self.model = DataParallel(train_digits.make_model(seed), group=group)
        self.optimizer = train_digits.make_optimizer(self.model)
        self.seconds = 0.0

    def train(self, images: torch.Tensor, labels: torch.Tensor, batches: list[torch.Tensor]) -> None:
        """One epoch."""
        dist.barrier()
        start = time.perf_counter()
        train_digits.train(self.model, self.optimizer, images, labels, batches)
        self.seconds += time.perf_counter() - start

    def weights(self) -> torch.Tensor:
        """All in one row."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def is_equal_on_all_ranks(self) -> bool:
        """Whether all hold the same bits."""
        mine = self.weights().view(torch.int32)
        rows = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(rows, mine, group=self.group)
        return all(torch.equal(row, mine) for row in rows)


def main() -> int:
    """One rank; the exit code."""
    arguments = train_digits.parse_arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    groups = {"farandole": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    console = Console(quiet=dist.get_rank() != 0, highlight=False)

    images, labels = train_digits.load_images()
    cut = train_digits.NUM_TEST_IMAGES
    trainings = {name: Training(group, arguments.seed) for name, group in groups.items()}
    for batches in train_digits.make_epochs(arguments):
        for training in trainings.values():
            training.train(images[cut:], labels[cut:], batches)

    accuracies = {
        name: train_digits.measure_accuracy(training.model, images[:cut], labels[:cut])
        for name, training in trainings.items()
    }
    ours, theirs = (trainings[name].weights() for name in BACKENDS)
    distance = (ours - theirs).abs().max().item()
    equal = {name: training.is_equal_on_all_ranks() for name, training in trainings.items()}
    checks = {
        f"test accuracy at least {WANTED_ACCURACY} over both": min(accuracies.values()) >= WANTED_ACCURACY,
        f"all {dist.get_world_size()} ranks hold bit-identical weights, over both": all(equal.values()),
        f"both end with equal weights (largest difference {distance:.1e})": distance <= WEIGHT_TOLERANCE,
    }
    print_table(console, trainings, accuracies)
    for claim, holds in checks.items():
        console.print(f"[green]holds[/]  {claim}" if holds else f"[red]FAILS[/]  {claim}")
    dist.destroy_process_group()
    return 0 if all(checks.values()) else 1


def print_table(console: Console, trainings: dict[str, Training], accuracies: dict[str, float]) -> None:
    """What each training came to, on rank 0."""
    table = Table(
        title="DataParallel on digits, what rank 0 saw",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("backend", no_wrap=True)
    for name in ("accuracy", "seconds", "of these waiting for gradients"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, training in trainings.items():
        cells = (f"{accuracies[name]:.4f}", f"{training.seconds:.3f}", f"{training.model.waited_s:.3f}")
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
