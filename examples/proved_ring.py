"""The training of train_digits.py without torch.distributed, through a ring that is proved; accounts for every byte.

Start it with ``scripts/demo``, or ``farandole run -n 2 examples/proved_ring.py``; it also runs alone.

Every rank holds the whole model and takes its share of each global batch. After backward, the gradients of all ranks
meet in a ring all-reduce that was proved before it ran. At the end four things are checked, and the exit code says
whether they hold: the engine counted as many bytes as the schedules say, all ranks hold the same weights to the bit,
these equal those of one process trained on the same global batches to float tolerance, and the network has learned to
read.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from train_digits import NUM_TEST_IMAGES, load_images, make_epochs, make_model, make_optimizer, parse_arguments

import farandole
from farandole.calls import CollectiveStats
from farandole.cost_model import bus_factor

GRADIENT_ALGORITHM = "ring"
WANTED_ACCURACY = 0.95
WEIGHT_TOLERANCE = 1e-3


def train(
    comm: farandole.Communicator | None,
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    arguments: argparse.Namespace,
    progress: Progress,
    title: str,
) -> None:
    """Train ``model``; without ``comm``, on whole global batches."""
    rank, world_size = (comm.rank, comm.world_size) if comm else (0, 1)
    optimizer = make_optimizer(model)
    parameters = list(model.parameters())
    # One bucket for all gradients: each .grad is a view of it, so backward writes where the ring reads.
    bucket = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, piece in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)

    batches = [batch for epoch in make_epochs(arguments) for batch in epoch]
    task = progress.add_task(title, total=len(batches), loss="")
    for batch in batches:
        mine = batch.tensor_split(world_size)[rank]
        bucket.zero_()
        # The sum over this rank's images, divided by the size of the global batch: summed over ranks, the mean over
        # all.
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
        loss.backward()
        total_loss = loss.detach().clone()
        if comm:
            comm.all_reduce(bucket, "sum", algorithm=GRADIENT_ALGORITHM)
            comm.all_reduce(total_loss, "sum")
        optimizer.step()
        progress.update(task, advance=1, loss=f"loss {total_loss.item():.4f}")


def measure_accuracy(
    comm: farandole.Communicator, model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> float:
    """Of all test images, each rank reading its share."""
    shares = [len(share) for share in torch.arange(len(images)).tensor_split(comm.world_size)]
    with torch.no_grad():
        mine = model(images.split(shares)[comm.rank]).argmax(dim=1)
    predicted = comm.all_gather(mine, counts=shares)
    return (predicted == labels).double().mean().item()


def flat_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def print_traffic(console: Console, entries: list[CollectiveStats], world_size: int) -> None:
    """The table of what travelled."""
    table = Table(title=f"What rank 0 of {world_size} sent", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("collective", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "bytes sent", "scheduled", "seconds", "GB/s bus"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        busbw = entry.payload_bytes / entry.seconds * bus_factor(entry.collective, world_size) / 1e9
        table.add_row(
            entry.collective,
            entry.algorithm,
            f"{entry.calls:,}",
            f"{entry.bytes_sent:,}",
            f"{entry.scheduled_bytes_sent:,}",
            f"{entry.seconds:.4f}",
            f"{busbw:.3f}" if entry.payload_bytes else "-",
        )
    console.print(table)


def main() -> int:
    arguments = parse_arguments(__doc__)
    with farandole.init() as comm:
        console = Console(quiet=comm.rank != 0)
        if comm.rank == 0:
            announce(console, comm)
        images, labels = load_images()
        test_images, test_labels = images[:NUM_TEST_IMAGES], labels[:NUM_TEST_IMAGES]
        train_images, train_labels = images[NUM_TEST_IMAGES:], labels[NUM_TEST_IMAGES:]

        model = make_model(arguments.seed + comm.rank)  # the ranks differ, until rank 0's weights reach all
        for parameter in model.parameters():
            comm.broadcast(parameter, src=0)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
            started = time.perf_counter()
            train(comm, model, train_images, train_labels, arguments, progress, f"{comm.world_size} ranks")
            seconds = time.perf_counter() - started
            accuracy = measure_accuracy(comm, model, test_images, test_labels)
            weights = flat_weights(model)
            all_weights = comm.all_gather(weights).reshape(comm.world_size, -1)
            comm.barrier()
            entries = comm.stats()
            counted_as_scheduled = torch.tensor([entry.bytes_sent == entry.scheduled_bytes_sent for entry in entries])
            counted = comm.all_gather(counted_as_scheduled).all().item()
            if comm.rank != 0:
                return 0
            alone = make_model(arguments.seed)
            train(None, alone, train_images, train_labels, arguments, progress, "1 process")

        print_traffic(console, entries, comm.world_size)
        same_bits = all(torch.equal(row.view(torch.int32), weights.view(torch.int32)) for row in all_weights)
        distance = (flat_weights(alone) - weights).abs().max().item()
        checks = {
            f"on all {comm.world_size} ranks, the engine counted the bytes that the schedules say": counted,
            f"all {comm.world_size} ranks hold bit-identical weights": same_bits,
            f"they equal one process's weights (largest difference {distance:.1e})": distance <= WEIGHT_TOLERANCE,
            f"test accuracy {accuracy:.4f} (wanted: {WANTED_ACCURACY})": accuracy >= WANTED_ACCURACY,
        }
        console.print(f"\n{len(train_images)} images, {arguments.epochs} epochs, {seconds:.1f} s of training")
        for claim, holds in checks.items():
            console.print(f"[green]holds[/]  {claim}" if holds else f"[red]FAILS[/]  {claim}")
        return 0 if all(checks.values()) else 1


def announce(console: Console, comm: farandole.Communicator) -> None:
    """Say what was proved before anything runs."""
    schedule = farandole.algorithms.build("all_reduce", GRADIENT_ALGORITHM, comm.world_size)
    farandole.verify(schedule)
    console.print(
        f"{GRADIENT_ALGORITHM} all_reduce on {comm.world_size} ranks, schedule {schedule.hash[:8]}: "
        f"{len(schedule)} transfers in {schedule.num_steps} steps, proved"
    )


if __name__ == "__main__":
    sys.exit(main())
