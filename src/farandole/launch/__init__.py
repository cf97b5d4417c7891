"""Starts the ranks of a job as processes of this machine, and sees to it that none is left behind.

The launcher serves the job's rendezvous itself, on a free port of the loopback interface, and makes the job's secret.
The first rank that fails ends the job: the others are stopped, and only that rank's traceback is shown.
"""

from farandole.launch.processes import JobResult, RankFailure, run_processes

__all__ = ["JobResult", "RankFailure", "run_processes"]
