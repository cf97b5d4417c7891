"""Runs the tests that torch ships for the backends of torch.distributed on one of them.

    python tests/torch_suite.py --ranks 2                    # farandole, where torch's tests think it is gloo
    python tests/torch_suite.py --ranks 3 --backend gloo     # gloo itself, to compare
    python tests/torch_suite.py --ranks 2 --only all_gather --own-name

The tests are those of torch.testing._internal.distributed.distributed_test; they need ``pip install expecttest``. Many
run for "gloo" by name alone; so that farandole gets them, every group that a test asks of gloo is made by farandole,
unless --own-name is given. Tests that torch skips for names of backends, though they need CPU tensors alone, are run.
Prints a line per failure, and at the end how many passed. Not part of CI: it takes minutes, and proves less than
test_torch_backend.py (a backend that does nothing passes 32 of these tests).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from typing import Any

NEED_NO_MORE_THAN_CPU_TENSORS = (
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
    "Coalescing manager currently tests with NCCL only; internal test flaky",
)
"""Reasons for which torch skips tests that any backend of CPU tensors can run."""


def parse_arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="farandole", help="registered with torch.distributed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose names match")
    parser.add_argument("--own-name", action="store_true", help="let the tests see the backend's own name")
    parser.add_argument("--timeout", type=int, default=60, metavar="SECONDS", help="of each test")
    return parser.parse_args()


def make_instead_of_gloo(backend: str) -> None:
    """From now on, groups that are asked of gloo are made by ``backend``, and say that they are of gloo."""
    import torch.distributed.distributed_c10d as c10d

    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_instead(size: int, rank: int, ranks: Any, wanted: Any, *more: Any, **named: Any) -> Any:
        is_gloo = str(wanted) == "gloo"
        group, store = make(size, rank, ranks, c10d.Backend(backend) if is_gloo else wanted, *more, **named)
        if is_gloo and group is not c10d.GroupMember.NON_GROUP_MEMBER:
            c10d._world.pg_map[group] = (c10d.Backend("gloo"), store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend("gloo")))
        return group, store

    c10d._new_process_group_helper = make_instead


def load_tests(name: str, arguments: argparse.Namespace) -> type[unittest.TestCase]:
    """torch's tests, for a backend that they call ``name``."""
    os.environ |= {
        "BACKEND": name,
        "WORLD_SIZE": str(arguments.ranks),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(arguments.timeout),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    utilities = importlib.import_module("torch.testing._internal.common_utils")
    distributed = importlib.import_module("torch.testing._internal.common_distributed")
    if name != arguments.backend:
        make_instead_of_gloo(arguments.backend)
    distributed.TIMEOUT_DEFAULT = arguments.timeout
    for feature in ("ddp", "subgroup", "plugin"):
        distributed.DistTestCases.backend_feature[feature].add(name)
    skip_if = utilities.skip_but_pass_in_sandcastle_if
    utilities.skip_but_pass_in_sandcastle_if = lambda condition, reason: skip_if(
        condition and reason not in NEED_NO_MORE_THAN_CPU_TENSORS, reason
    )
    distributed.skip_if_small_worldsize = skip_below_three_ranks
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    if name != arguments.backend:  # the profiler's events are named after the real backend
        for names in (
            tests.PROFILING_SUPPORTED_BACKENDS,
            tests.CUDA_PROFILING_SUPPORTED_BACKENDS,
            tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
        ):
            names.clear()

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


def skip_below_three_ranks(test: Any) -> Any:
    """In place of torch's decorator for tests that need ranks 0 to 2, which asks for eight."""

    @functools.wraps(test)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < 3:
            skips = importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS
            sys.exit(skips["small_worldsize"].exit_code)
        return test(*arguments, **named)

    return wrapped


class Result(unittest.TestResult):
    """Prints failures as they come."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1

    addExpectedFailure = addSuccess  # type: ignore[assignment]

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        super().addError(test, error)
        lines = [line.strip() for line in traceback.format_exception(*error) for line in line.splitlines()]
        telling = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        print(f"FAILED {test._testMethodName}: {(telling or lines)[-1][:200]}", flush=True)

    addFailure = addError  # type: ignore[assignment]


def main() -> int:
    """Run them."""
    arguments = parse_arguments()
    sys.argv = sys.argv[:1]  # torch's tests read it, too
    name = arguments.backend if arguments.own_name else "gloo"
    suite = load_tests(name, arguments)
    loader = unittest.TestLoader()
    chosen = [test for test in loader.getTestCaseNames(suite) if re.search(arguments.only, test)]
    result, start = Result(), time.monotonic()
    unittest.TestSuite(map(suite, chosen)).run(result)
    seconds = time.monotonic() - start
    print(f"# {arguments.backend} as {name}, {arguments.ranks} ranks, {seconds:.0f} s")
    print(f"{result.passed} passed, {len(result.errors)} failed, {len(result.skipped)} skipped")
    return 1 if result.errors or not result.passed else 0


if __name__ == "__main__":
    sys.exit(main())
