# SPDX-License-Identifier: Apache-2.0
"""Importing this lets all threads of the process allocate from one heap.

Images are allocated by one thread and freed by another. With several heaps, glibc's default, these fragment and
resident memory creeps up; with one it stays as it is, at the same speed. Import it before all else: libraries
start threads when they are imported, and glibc settles the number of heaps when the first of them allocates.
"""
import ctypes
import os

M_ARENA_MAX = -8  # of mallopt(3)

_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
if _mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:  # the user's choice comes first
    _mallopt(M_ARENA_MAX, 1)
