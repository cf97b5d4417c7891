"""Checkpoints: saved at any stage on any number of ranks, loaded at any other, to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import training_worlds
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training_worlds import Checks, World, batch, bits, network, refusal, squares

from farandole.errors import ArgumentError
from farandole.training import (
    CheckpointError,
    DataParallel,
    FullyShardedParallel,
    ZeroOptimizer,
    export_weights,
    load_checkpoint,
    save_checkpoint,
)
from farandole.training.layout import Layout, boxes_of

check = Checks()
ADAM = partial(torch.optim.AdamW, lr=0.01)
FOLDER = Path(os.environ.get("CHECKPOINTS", "unset"))
NUM_STAGES = 4


class Mixture(nn.Module):
    """Tied, frozen, empty, of no dimension, of 16 bits; and buffers that are saved and that are not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(11, 5)
            self.layers = nn.ModuleList([nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1)])
            self.head = nn.Linear(5, 11, bias=False)
            self.head.weight = self.embedding.weight
            self.scale = nn.Parameter(torch.rand(()))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.frozen = nn.Linear(5, 5)
            self.frozen.requires_grad_(False)
            self.unused = nn.Parameter(torch.rand(4))
            self.register_buffer("kept", torch.rand(3))
            self.register_buffer("not_kept", torch.rand(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.frozen(self.embedding(tokens))[:, None]
        for layer in self.layers:
            values = torch.tanh(layer(values)) + values[:, :1]
        return self.head(values[:, 0]) * self.scale + self.nothing.sum()


def make(world: World, stage: int, seed: int, optimizer_class=torch.optim.AdamW, **options):
    options = options or {"lr": 0.01}
    common = {"group": world.group, "unused": "zeros", "reproducible": True}
    if stage == 3:
        model = FullyShardedParallel(Mixture(seed), **common)
        return model, optimizer_class(model.parameters(), **options)
    model = DataParallel(Mixture(seed), bucket_bytes=150, **common)
    if stage == 0:
        return model, optimizer_class(model.parameters(), **options)
    return model, ZeroOptimizer(model, optimizer_class, stage=stage, **options)


def train(model, optimizer, steps: range) -> None:
    """The same batch on every rank: so the numbers of ranks make no difference."""
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(step))
        (model(tokens) ** 2).mean().backward()
        optimizer.step()


def weights(model) -> dict[str, list]:
    return {name: bits(one) for name, one in model.state_dict().items()}


def folder(world: World, name: str) -> Path:
    """For this group alone."""
    return FOLDER / f"{name}-{world.backend}-{world.size}"


@check(1, 2, 3, 4, backends=["farandole"])
def saved_at_each_stage(world: World) -> None:
    """For the checks that follow."""
    for stage in range(NUM_STAGES):
        model, optimizer = make(world, stage, seed=0)
        train(model, optimizer, range(3))
        optimizer.param_groups[0]["lr"] = 0.02
        path = FOLDER / f"stage{stage}-{world.size}"
        save_checkpoint(path, model, optimizer, extra={"steps": 3})
        torch.save(weights(model), FOLDER / f"weights{stage}-{world.size}.pt")
        dist.barrier(world.group)
        assert {one.name for one in path.parent.iterdir() if one.name.startswith(path.name)} == {path.name}


@check(1, 2, 4)
def loaded_at_any_other(world: World) -> None:
    for stage in range(NUM_STAGES):
        for saved_stage, saved_size in ((0, 1), (1, 2), (2, 4), (3, 3), (3, 4), (1, 3)):
            model, optimizer = make(world, stage, seed=stage + 1)
            if saved_size == 1:
                train(model, optimizer, range(1))  # what it had is replaced
            extra = load_checkpoint(FOLDER / f"stage{saved_stage}-{saved_size}", model, optimizer)
            assert extra == {"steps": 3}
            assert optimizer.param_groups[0]["lr"] == 0.02
            assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
            wanted = torch.load(FOLDER / f"weights{saved_stage}-{saved_size}.pt")
            assert weights(model) == wanted
            train(model, optimizer, range(3, 5))
            path = FOLDER / f"went-on-{saved_stage}-{saved_size}-{world.size}.json"
            if stage == 0 and world.rank == 0:
                path.write_text(json.dumps(weights(model)))
            dist.barrier(world.group)
            # The same batch is summed as often as there are ranks, and divided by them, exactly: they are powers of 2.
            first = FOLDER / f"went-on-{saved_stage}-{saved_size}-1.json"
            assert weights(model) == json.loads(first.read_text()), (stage, saved_stage, saved_size)


@check(2, backends=["farandole"])
def each_element_is_written_once(world: World) -> None:
    for stage in range(NUM_STAGES):
        metadata = dcp.FileSystemReader(FOLDER / f"stage{stage}-3").read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            if name == "about":
                continue
            counts = torch.zeros(entry.size, dtype=torch.int32)
            for chunk in entry.chunks:
                counts[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert bool((counts == 1).all()), name
        assert "model.head.weight" not in metadata.state_dict_metadata  # it is that of the embedding
        assert "optimizer.state.embedding.weight.exp_avg" in metadata.state_dict_metadata


@check(1, backends=["farandole"])
def torchs_own_tools_read_it(world: World) -> None:
    dcp_to_torch_save(FOLDER / "stage3-3", FOLDER / "plain.pt")
    plain = torch.load(FOLDER / "plain.pt", weights_only=False)
    wanted = torch.load(FOLDER / "weights3-3.pt")
    found = {}

    def flatten(prefix: str, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                flatten(f"{prefix}{key}.", value)
            else:
                found[f"{prefix}{key}"] = value

    flatten("", plain)
    for name, one in wanted.items():
        if name != "head.weight":
            assert bits(found[f"model.{name}"]) == one, name


@check(1, 2, 3, backends=["farandole"])
def weights_for_others(world: World) -> None:
    for stage in range(NUM_STAGES):
        model, optimizer = make(world, stage, seed=0)
        train(model, optimizer, range(1))
        path = folder(world, f"export{stage}") / "weights.safetensors"
        export_weights(path, model)
        dist.barrier(world.group)
        wanted = weights(model)
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(wanted)
            assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embedding.weight"}
            for name in file.keys():  # noqa: SIM118
                assert bits(file.get_tensor(name)) == wanted[name]


@check(2, 3, backends=["farandole"])
def optimizers_of_all_kinds(world: World) -> None:
    kinds = [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01), "amsgrad": True, "foreach": False}),
        (torch.optim.Adagrad, {"lr": 0.01}),
    ]
    for kind, options in kinds:
        for stage in (0, 2, 3):
            model, optimizer = make(world, stage, 0, kind, **options)
            train(model, optimizer, range(2))
            path = folder(world, "kinds")
            save_checkpoint(path, model, optimizer)
            train(model, optimizer, range(2, 4))
            again, its_optimizer = make(world, 3 - stage if stage != 2 else 1, 1, kind, **options)
            load_checkpoint(path, again, its_optimizer)
            train(again, its_optimizer, range(2, 4))
            assert weights(again) == weights(model), (kind, stage)


@check(1, 2, 3, backends=["farandole"])
def sixteen_bit_parameters_with_masters(world: World) -> None:
    def made(stage: int, seed: int):
        model = DataParallel(network(seed).bfloat16(), group=world.group, reproducible=True)
        return model, ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-4)

    def go(model, optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(batch(0, step).bfloat16()).float().square().mean().backward()
            optimizer.step()

    model, optimizer = made(1, 0)
    go(model, optimizer, range(3))
    save_checkpoint(folder(world, "masters"), model, optimizer)
    go(model, optimizer, range(3, 9))
    again, its_optimizer = made(2, 1)
    load_checkpoint(folder(world, "masters"), again, its_optimizer)
    go(again, its_optimizer, range(3, 9))
    assert weights(again) == weights(model)


@check(1, 2, backends=["farandole"])
def sixteen_bit_modules_at_any_stage(world: World) -> None:
    def made(stage: int, seed: int):
        module = network(seed).bfloat16()
        if stage == 3:
            model = FullyShardedParallel(module, group=world.group, param_dtype=torch.bfloat16)
            return model, ADAM(model.parameters())
        model = DataParallel(module, group=world.group)
        return model, ZeroOptimizer(model, ADAM, stage=stage) if stage else ADAM(model.parameters())

    def go(model, optimizer, step: int) -> None:
        optimizer.zero_grad()
        model(batch(0, step).bfloat16()).float().square().mean().backward()
        optimizer.step()

    for saved_stage in range(NUM_STAGES):
        model, optimizer = made(saved_stage, 0)
        go(model, optimizer, 0)
        path = folder(world, "narrow")
        save_checkpoint(path, model, optimizer)
        saved = {name: one.bfloat16().clone() for name, one in model.state_dict().items()}
        for stage in range(NUM_STAGES):
            again, its_optimizer = made(stage, 1)
            load_checkpoint(path, again, its_optimizer)
            for name, one in again.state_dict().items():
                assert bits(one.bfloat16()) == bits(saved[name]), (saved_stage, stage, name)
            go(again, its_optimizer, 1)


@check(1, 2, 3, backends=["farandole"])
def states_of_optimizers_are_whole_or_say_whose_they_are(world: World) -> None:
    model, plain = make(world, 0, 0)
    train(model, plain, range(2))
    sharded, zero = make(world, 2, 1)
    sharded.load_state_dict(model.state_dict())
    trained = [one for one in model.parameters() if one.requires_grad]
    again = torch.optim.AdamW(trained, lr=0.01)  # without the frozen ones, as a ZeroOptimizer is
    for one in trained:
        again.state[one] = plain.state[one]
    zero.load_state_dict(again.state_dict())
    train(model, plain, range(2, 4))
    train(sharded, zero, range(2, 4))
    assert weights(sharded) == weights(model)
    own = zero.state_dict()
    zero.load_state_dict(own)
    others = world.all_of(own)
    if world.size > 1:
        text = refusal(lambda: zero.load_state_dict(others[(world.rank + 1) % world.size]), ArgumentError)
        assert (
            f"of rank {(world.rank + 1) % world.size} of {world.size}, which are not those of rank {world.rank}" in text
        )
        assert "use save_checkpoint" in text


@check(2, 3)
def what_does_not_fit_is_named_on_every_rank(world: World) -> None:
    path = folder(world, "plain")
    model = DataParallel(network(), group=world.group)
    optimizer = ADAM(model.parameters())
    save_checkpoint(path, model)

    def said(other: nn.Module, its_optimizer=None, kind=CheckpointError, where: Path = path) -> str:
        text = refusal(lambda: load_checkpoint(where, other, its_optimizer), kind)
        assert len(set(world.all_of(text))) == 1
        return text

    deeper = network()
    deeper.append(nn.Linear(5, 1))
    narrower = network()
    narrower[4] = nn.Linear(7, 3)
    assert said(DataParallel(deeper, group=world.group)) == (
        "the checkpoint is of another model: it lacks 'model.5.bias', 'model.5.weight'"
    )
    shallower = FullyShardedParallel(network()[:4], group=world.group)
    assert said(shallower) == (
        "the checkpoint is of another model: it has 'model.4.bias', 'model.4.weight', which the model has not"
    )
    assert said(DataParallel(narrower, group=world.group)) == (
        "'model.4.weight' is of shape (5, 7) in the checkpoint, (3, 7) in the model"
    )
    assert said(model, optimizer) == "the checkpoint was saved without an optimizer; load it without one"
    assert said(model, where=FOLDER / "nowhere") == f"there is no checkpoint in '{FOLDER}/nowhere'"
    if world.rank == 0:
        (FOLDER / f"spoiled{world.size}").mkdir(exist_ok=True)
        (FOLDER / f"spoiled{world.size}" / ".metadata").write_bytes(b"not this")
    dist.barrier(world.group)
    assert "cannot be read" in said(model, where=FOLDER / f"spoiled{world.size}")
    two_groups = ADAM([{"params": list(model.parameters())[:1]}, {"params": list(model.parameters())[1:]}])
    save_checkpoint(path, model, optimizer)
    assert said(model, two_groups) == (
        "the optimizer has 2 groups, the checkpoint 1, and group 0 is not of the same parameters; make the groups that "
        "were saved"
    )
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "the checkpoint is of another kind of optimizer: its options are ['amsgrad'," in said(model, plain)
    stranger = ADAM(network().parameters())
    assert "make it from model.parameters()" in said(model, stranger, ArgumentError)
    zero_model = DataParallel(network(), group=world.group)
    zero = ZeroOptimizer(zero_model, torch.optim.AdamW, lr=0.1)
    other = torch.optim.AdamW(zero_model.parameters())
    assert (
        said(zero_model, other, ArgumentError)
        == "the parameters are sharded by a ZeroOptimizer; give that one, or none"
    )
    assert said(model, zero, ArgumentError) == "the ZeroOptimizer is that of another model"
    text = refusal(
        lambda: save_checkpoint(path, model, "adam" if world.rank == 0 else None),
        ArgumentError if world.rank == 0 else CheckpointError,
    )
    assert "the optimizer is a str; it must be a torch.optim.Optimizer or None" in text
    assert "it must be a DataParallel or a FullyShardedParallel" in refusal(
        lambda: save_checkpoint(path, network()), ArgumentError
    )


@check(1, 2, 3)
def a_run_that_was_resumed_several_times_is_as_one_that_was_not(world: World) -> None:
    """At one stage after the other: weights, and the state of the optimizer, with the number of its steps."""
    for first_stage in range(NUM_STAGES):
        alone, its_optimizer = make(world, 0, 0)
        train(alone, its_optimizer, range(10))
        model, optimizer = make(world, first_stage, 0)
        for leg in range(5):
            train(model, optimizer, range(2 * leg, 2 * leg + 2))
            path = folder(world, f"leg-{first_stage}-{leg}")
            save_checkpoint(path, model, optimizer)
            model, optimizer = make(world, (first_stage + leg) % NUM_STAGES, leg)
            load_checkpoint(path, model, optimizer)
        assert weights(model) == weights(alone)
        if world.rank == 0:
            metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            steps = {key: torch.zeros(()) for key in metadata if key.endswith(".step") and "nothing" not in key}
            dcp.load(steps, checkpoint_id=path, no_dist=True)
            assert len(steps) > 5
            assert {*map(float, steps.values())} == {10.0}
        dist.barrier(world.group)


@check(1, 2, 3)
def weights_alone_at_stages_that_shard_the_optimizer(world: World) -> None:
    """What was loaded into 16-bit parameters since the last step is what is saved."""
    for stage in (1, 2):
        for dtype in (torch.float32, torch.bfloat16):
            path, after = folder(world, f"weights-{stage}-{dtype}"), folder(world, f"after-{stage}-{dtype}")
            given = network(5).to(dtype)
            save_checkpoint(path, DataParallel(given, group=world.group))
            model = DataParallel(network(6).to(dtype), group=world.group)
            optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=1e-4)
            squares(model(batch(world.rank, 0).to(dtype))).backward()
            optimizer.step()
            optimizer.zero_grad()
            load_checkpoint(path, model)
            assert weights(model) == weights(given)
            save_checkpoint(after, model, optimizer)
            again = DataParallel(network(7).to(dtype), group=world.group)
            its_optimizer = ZeroOptimizer(again, torch.optim.SGD, stage=stage, lr=1e-4)
            load_checkpoint(after, again, its_optimizer)
            assert weights(again) == weights(given)
            for one, its in ((model, optimizer), (again, its_optimizer)):
                squares(one(batch(world.rank, 1).to(dtype))).backward()
                its.step()
            assert weights(again) == weights(model)
            text = refusal(lambda p=path, m=again, o=its_optimizer: load_checkpoint(p, m, o), CheckpointError)
            assert "saved without an optimizer; load it without one" in text


@check(2, 3)
def what_does_not_fit_one_rank_is_told_to_all_and_leaves_the_state(world: World) -> None:
    for stage in range(4):
        path = folder(world, f"one-{stage}")
        model, optimizer = make(world, stage, 0)
        train(model, optimizer, range(2))
        save_checkpoint(path, model, optimizer)
        train(model, optimizer, range(2, 4))

        def states(optimizer=optimizer) -> dict:
            return {
                (id(parameter), key): bits(one)
                for parameter, entries in optimizer.state.items()
                for key, one in entries.items()
                if parameter.numel()
            }

        before = states()
        other = optimizer
        if world.rank == 1:
            plain = [value for group in optimizer.param_groups for value in group["params"]]
            other = torch.optim.SGD(plain, lr=0.1) if stage in (0, 3) else optimizer
            if stage in (1, 2):
                optimizer.param_groups[0]["more"] = 1
        load = partial(load_checkpoint, path, model)
        problem = refusal(partial(load, other), CheckpointError)
        assert "another kind of optimizer" in problem
        assert states() == before
        if stage in (1, 2):
            optimizer.param_groups[0].pop("more", None)
        load(optimizer)
        train(model, optimizer, range(2, 4))
        assert states() == before


@check(2, backends=["farandole"])
def a_save_that_fails_leaves_the_one_before(world: World) -> None:
    path = folder(world, "stays")
    model = DataParallel(network(), group=world.group)
    save_checkpoint(path, model, extra={"number": 1})
    text = refusal(
        lambda: save_checkpoint(path, model, extra={"number": {1, 2} if world.rank == 0 else 2}),
        ArgumentError if world.rank == 0 else CheckpointError,
    )
    assert "must be values that JSON knows" in text
    assert load_checkpoint(path, model) == {"number": 1}
    other = folder(world, "other things")
    if world.rank == 0:
        other.mkdir()
        (other / "thesis.tex").write_text("")
    dist.barrier(world.group)
    text = refusal(lambda: save_checkpoint(other, model), CheckpointError)
    assert text.endswith("is no checkpoint, and would be replaced; give another folder")
    assert (other / "thesis.tex").exists()
    link = folder(world, "link")
    if world.rank == 0:
        link.symlink_to(path)
    dist.barrier(world.group)
    for number in range(3):
        save_checkpoint(link, model, extra={"number": number})
    assert link.is_symlink()
    assert load_checkpoint(path, model) == {"number": 2}
    blocked = FOLDER / "a file"
    blocked.write_text("")
    dist.barrier(world.group)
    text = refusal(lambda: save_checkpoint(blocked / "checkpoint", model), CheckpointError)
    assert str(blocked) in text


@check(2, backends=["farandole"])
def a_save_that_was_interrupted_at_its_end_and_files_that_are_cut_off(world: World) -> None:
    path = folder(world, "replaced")
    model = DataParallel(network(), group=world.group)
    wanted = weights(model)
    save_checkpoint(path, model, extra={"number": 1})
    if world.rank == 0:  # the moment at which neither is at its place
        path.rename(path.with_name(f"{path.name}.before"))
        path.with_name(f"{path.name}.partial").mkdir()
        folder(world, "link to it").symlink_to(path)
    dist.barrier(world.group)
    other = DataParallel(network(1), group=world.group)
    for name in ("replaced", "link to it"):
        assert load_checkpoint(folder(world, name), other) == {"number": 1}
        assert weights(other) == wanted
    save_checkpoint(path, model, extra={"number": 2})
    assert load_checkpoint(path, other) == {"number": 2}
    assert not path.with_name(f"{path.name}.before").exists()
    dist.barrier(world.group)
    if world.rank == 0:
        for file in path.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:10])
    dist.barrier(world.group)
    text = refusal(lambda: load_checkpoint(path, other), CheckpointError)
    assert text.startswith("rank ")
    assert len(set(world.all_of(text))) == 1


# --- Boxes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_are_the_elements_in_their_order(sizes, data):
    shape = torch.Size(sizes)
    start = data.draw(st.integers(0, shape.numel()))
    stop = data.draw(st.integers(start, shape.numel()))
    numbers = torch.arange(shape.numel()).view(shape)
    found = []
    for offsets, extent, first in boxes_of(shape, start, stop):
        box = numbers[tuple(slice(a, a + n) for a, n in zip(offsets, extent, strict=True))]
        assert box.shape == extent
        assert box.numel()
        assert box.reshape(-1)[0] == first
        found += box.reshape(-1).tolist()
    assert found == list(range(start, stop))


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6), st.integers(1, 9))
def test_pieces_of_all_ranks_are_all_elements(shapes, world_size):
    layout = Layout(map(torch.Size, shapes), world_size)
    found = [set() for _ in shapes]
    for rank in range(world_size):
        pieces = layout.pieces(rank)
        assert [piece.tensor for piece in pieces] == list(range(len(shapes)))
        for piece in pieces:
            place = layout.places[piece.tensor]
            assert piece.start == piece.stop or rank * layout.part_numel + piece.offset == place.start + piece.start
            own = set(range(piece.start, piece.stop))
            assert not own & found[piece.tensor]
            found[piece.tensor] |= own
    assert found == [set(range(torch.Size(shape).numel())) for shape in shapes]


# --- Running them -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(tmp_path_factory.mktemp("checkpoints")))
        yield training_worlds.run(__name__)


@pytest.mark.parametrize("name", check.names())
def test_on_ranks(outcomes, name):
    assert outcomes[name] == ""


@pytest.mark.parametrize("earlier", [("2", "2"), ("0", "1")])
def test_a_training_goes_on_elsewhere_to_the_same_bits(tmp_path, earlier):
    """That of examples/train_text.py: stopped at one stage, it goes on with three ranks at stage 3."""

    def run(stage: str, ranks: str, steps: int, folder: str) -> None:
        example = Path(__file__).parent.parent / "examples" / "train_text.py"
        command = [sys.executable, "-m", "farandole", "run", "-n", ranks, str(example), "--stage", stage]
        small = ["--width", "16", "--depth", "2", "--batch", "4", "--context", "16", "--folder", str(tmp_path / folder)]
        result = subprocess.run(
            [*command, *small, "--steps", str(steps)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env=jobs.environment_with({}),
        )
        assert result.returncode == 0, result.stderr

    run("0", "1", 6, "alone")
    stage, ranks = earlier
    run(stage, ranks, 3, "moved")
    run("3", "3", 6, "moved")
    losses = [json.loads((tmp_path / name / "losses.json").read_text()) for name in ("alone", "moved")]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    assert (tmp_path / "moved" / "loss.png").stat().st_size > 1000
