"""The engine of farandole. Use farandole.Communicator instead."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

class Arena:
    @staticmethod
    def create(world_size: int, num_slots: int, slot_bytes: int, nonce: int) -> Arena: ...
    @staticmethod
    def map(descriptor: int) -> Arena: ...
    @property
    def world_size(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def nonce(self) -> int: ...
    @property
    def descriptor(self) -> int: ...
    def close_descriptor(self) -> None: ...

class Plan:
    def __init__(
        self,
        operations: Annotated[NDArray[numpy.int32], dict(shape=(None, 5), order="C", device="cpu", writable=False)],
        operands: Annotated[NDArray[numpy.int32], dict(shape=(None, 4), order="C", device="cpu", writable=False)],
        operand_ends: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        after: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        after_ends: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        size_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        input_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        output_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        num_work_slots: int,
        equal_sizes: bool,
        rank: int,
        world_size: int,
        max_segment_bytes: int,
        element_bytes: int,
    ) -> None: ...

class Work:
    def is_done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def receipt(self) -> tuple[int, int, int, int, float]: ...

class Engine:
    def __init__(self, arena: Arena, rank: int, process_descriptors: Sequence[int], spins: int) -> None: ...
    def run(
        self,
        plan: Plan,
        input: int,
        output: int,
        dtype: int,
        op: int,
        divisor: int,
        fingerprint: int,
        sequenced: bool,
        what: int,
        count: int,
        timeout_s: float,
    ) -> tuple[int, int, int, int, float]: ...
    def submit(
        self,
        plan: Plan,
        input: int,
        output: int,
        dtype: int,
        op: int,
        divisor: int,
        fingerprint: int,
        sequenced: bool,
        what: int,
        count: int,
        timeout_s: float,
    ) -> Work: ...
    def abort(self, reason: int, subject: int) -> None: ...
    def aborted(self) -> tuple[int, int]: ...
    def calls(self) -> list[tuple[int, int, int, int, bool]]: ...
    def close(self) -> None: ...

def instruction_set() -> str: ...
def is_supported(arg0: int, arg1: int, /) -> bool: ...
