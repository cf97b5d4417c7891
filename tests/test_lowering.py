"""The programs that schedules are lowered to: proved for every algorithm, refused once something is wrong."""

from __future__ import annotations

import random

import pytest
from topologies import build

from farandole import Schedule, VerificationError, algorithms, verify
from farandole.lowering import lower
from farandole.program import Combine, Local, Place, Program, Publish, Region, Remote
from farandole.program_verifier import verify_programs

EVERY_ALGORITHM = [(collective, name) for collective in algorithms.ALGORITHMS for name in algorithms.names(collective)]
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)


def proof_of(collective: str, name: str, world_size: int, root: int = 0):
    return verify(build(collective, name, world_size, root))


def replaced(programs: tuple[Program, ...], rank: int, operations: list) -> list[Program]:
    changed = list(programs)
    changed[rank] = programs[rank]._replace(operations=tuple(operations))
    return changed


@pytest.mark.parametrize(("collective", "name"), EVERY_ALGORITHM)
def test_the_programs_of_every_algorithm_are_proved(collective, name):
    for world_size in WORLD_SIZES:
        root = world_size - 1 if collective in algorithms.ROOTED else 0
        proof = proof_of(collective, name, world_size, root)
        for shared in (True, False):
            programs = lower(proof, shared=shared)
            for channel_segments in (2, 5):
                verify_programs(programs, proof, channel_segments=channel_segments)


def test_two_ranks_that_each_wait_before_they_send_are_refused():
    proof = proof_of("all_gather", "direct", 2)
    waiting_first = [
        Program(
            rank=rank,
            world_size=2,
            operations=(
                Combine(Place(Region.OUTPUT, 1 - rank), 1 - rank, (Remote(1 - rank, False),), (), False),
                Publish(Place(Region.INPUT, rank), rank, 1 - rank, (0,)),
                Combine(Place(Region.OUTPUT, rank), rank, (Local(Place(Region.INPUT, rank)),), (1,), False),
            ),
            num_work_slots=0,
            size_classes=(0, 1),
        )
        for rank in range(2)
    ]
    with pytest.raises(VerificationError, match="2 of 2 ranks wait for ever") as caught:
        verify_programs(waiting_first, proof)
    assert "it waits for a publication of rank 1" in str(caught.value)
    assert "it waits for its operation 0" not in caught.value.path[0]


def test_an_exchange_within_one_step_is_refused_where_its_queues_can_fill_up():
    """What each rank sends second must leave before what arrives first may land: right on paper, stuck in finite
    queues."""
    crossed = [(0, 0, 2, 1, 0, 0), (0, 0, 3, 1, 1, 0), (0, 1, 1, 0, 3, 0), (0, 1, 0, 0, 2, 0)]
    proof = verify(Schedule("all_to_all", 2, 4, crossed))
    with pytest.raises(VerificationError, match="deadlock with 2 segments of room in each channel"):
        verify_programs(lower(proof), proof)
    in_order = verify(Schedule("all_to_all", 2, 4, [*crossed[:2], crossed[3], crossed[2]]))
    verify_programs(lower(in_order), in_order)


def mutants(programs: tuple[Program, ...], random_: random.Random, tries: int):
    """Programs with one operation dropped, doubled, redirected, or no longer waiting for another."""
    for _ in range(tries):
        rank = random_.randrange(len(programs))
        operations = list(programs[rank].operations)
        if not operations:
            continue
        index = random_.randrange(len(operations))
        operation = operations[index]
        kind = random_.choice(["drop waiting", "other slot", "other reader", "lose operand", "swap operands"])
        if kind == "drop waiting" and operation.after:
            operations[index] = operation._replace(after=())
        elif kind == "other slot":
            slot = operation.place.slot + random_.choice([-1, 1])
            if slot < 0:
                continue
            operations[index] = operation._replace(place=operation.place._replace(slot=slot))
        elif kind == "other reader" and isinstance(operation, Publish) and len(programs) > 2:
            others = [r for r in range(-1, len(programs)) if r not in (rank, operation.reader)]
            operations[index] = operation._replace(reader=random_.choice(others))
        elif kind == "lose operand" and isinstance(operation, Combine) and len(operation.operands) > 1:
            operations[index] = operation._replace(operands=operation.operands[1:])
        else:
            continue
        yield f"{kind} of operation {index} of rank {rank}: {operation}", replaced(programs, rank, operations)


@pytest.mark.parametrize(("collective", "name"), EVERY_ALGORITHM)
def test_programs_with_one_thing_wrong_are_refused(collective, name):
    random_ = random.Random(f"{collective} {name}")
    refused = 0
    for world_size in (2, 3, 4, 5):
        proof = proof_of(collective, name, world_size)
        programs = lower(proof)
        for what, mutant in mutants(programs, random_, 40):
            try:
                verify_programs(mutant, proof)
            except VerificationError:
                refused += 1
            else:
                pytest.fail(f"N={world_size}: accepted: {what}")
    assert refused > 0


def test_a_slot_sent_to_all_others_is_published_once():
    for world_size in (3, 4, 9):
        for program in lower(proof_of("all_gather", "direct", world_size)):
            publications = [o for o in program.operations if isinstance(o, Publish)]
            assert [o.reader for o in publications] == [-1]


def test_without_shared_channels_it_is_published_once_for_each_reader():
    for rank, program in enumerate(lower(proof_of("all_gather", "direct", 4), shared=False)):
        publications = [o for o in program.operations if isinstance(o, Publish)]
        assert {o.reader for o in publications} == {0, 1, 2, 3} - {rank}
        operands = [a for o in program.operations if isinstance(o, Combine) for a in o.operands]
        assert not any(operand.shared for operand in operands if isinstance(operand, Remote))


def test_all_that_arrives_in_one_step_is_combined_at_once():
    for program in lower(proof_of("reduce_scatter", "direct", 5)):
        combines = [o for o in program.operations if isinstance(o, Combine)]
        assert len(combines) == 1
        assert len(combines[0].operands) == 5
        assert combines[0].completes


def test_readers_that_disagree_on_the_order_get_publications_of_their_own():
    """Ranks 1 and 2 take rank 0's slots in opposite orders, so one shared queue cannot serve both."""
    rows = [(0, 0, slot, dst, slot, 0) for dst, order in ((1, (0, 1)), (2, (1, 0))) for slot in order]
    proof = verify(Schedule("broadcast", 3, 2, rows))
    programs = lower(proof)
    verify_programs(programs, proof)
    assert all(o.reader != -1 for o in programs[0].operations if isinstance(o, Publish))
