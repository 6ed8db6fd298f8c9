# SPDX-License-Identifier: Apache-2.0
"""Importing this settles how the process shares memory and cores. Import it before all else.

One heap for all threads: images are allocated by one thread and freed by another. With several heaps, glibc's
default, these fragment and resident memory creeps up; with one it stays as it is, at the same speed. Libraries
start threads when they are imported, and glibc settles the number of heaps when the first of them allocates.

Sleeping, not spinning: torch's threads wait for one another by spinning by default, which on a robot's shared cores
keeps the other processes, the camera's driver among them, and so each other from running.

The user's own MALLOC_ARENA_MAX and OMP_WAIT_POLICY come first.
"""
import ctypes
import os

M_ARENA_MAX = -8  # of mallopt(3)

_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
if _mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
    _mallopt(M_ARENA_MAX, 1)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when OpenMP is loaded, with torch
