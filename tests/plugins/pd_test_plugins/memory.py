"""A worker extension that tells how much memory a worker uses, apart from what its allocator keeps for later."""

from __future__ import annotations

import ctypes
import gc


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


class TidiesMemory:
    """Part of vLLM's worker class."""

    def tidy_memory(self) -> dict[str, int]:
        """Have Python collect its garbage and glibc give back the pages that are free; returns the bytes that were
        allocated and not freed, in all arenas (`used`) and mapped alone (`mapped`)."""
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _Allocated
        found = libc.mallinfo2()
        return {"used": int(found.uordblks), "mapped": int(found.hblkhd)}
