"""farandole beside Gloo, Open MPI, MPICH and Intel MPI: the same calls, interleaved in one run. See README.md here."""
