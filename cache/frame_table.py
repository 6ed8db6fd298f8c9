# SPDX-License-Identifier: Apache-2.0
"""Which kept frame sits in which page and special slot: the bookkeeping of the cache, without tensors."""
from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, eq=False)
class FrameTable:
    """The kept frames of one sequence at one moment, oldest first.

    A frame is named by its number among the kept frames of the sequence, from 0. It holds one page (its patches)
    while it is a scale frame or inside the window, and one special slot while it is remembered. Tables are values:
    each verb returns a new one, so that an earlier one can be gone back to, and blocks that are in the same
    state share a table and all that is derived from it. They compare by identity.
    """

    frame_count: int
    pages: tuple[tuple[int, int], ...]  # (frame, page)
    free_pages: tuple[int, ...]  # ascending
    specials: tuple[tuple[int, int], ...]  # (frame, special slot)
    free_specials: tuple[int, ...]  # ascending

    @staticmethod
    def empty(num_pages: int, num_special_slots: int) -> FrameTable:
        """Return the table of a sequence without frames."""
        return FrameTable(0, (), tuple(range(num_pages)), (), tuple(range(num_special_slots)))

    def can_append(self) -> bool:
        """Tell whether a page and a special slot are free."""
        return bool(self.free_pages and self.free_specials)

    def append(self) -> FrameTable:
        """Add the next frame in the lowest free page and slot, which keeps what is used side by side.

        Raises RuntimeError when nothing is free.
        """
        if not self.can_append():
            raise RuntimeError(
                f"the cache is full: {len(self.pages)} frames hold its {len(self.pages) + len(self.free_pages)} pages; "
                "evict frames first, or raise max_num_frames"
            )
        return FrameTable(
            frame_count=self.frame_count + 1,
            pages=(*self.pages, (self.frame_count, self.free_pages[0])),
            free_pages=self.free_pages[1:],
            specials=(*self.specials, (self.frame_count, self.free_specials[0])),
            free_specials=self.free_specials[1:],
        )

    def evict(self, scale_frames: int, sliding_window: int, remembered_frames: int) -> FrameTable:
        """Free what no later frame may see.

        Pages stay with the first `scale_frames` frames and the last `sliding_window`; special slots with the scale
        frames and the newest others, `remembered_frames` in all. Returns the same table if nothing has to go.
        """
        page_horizon = self.frame_count - sliding_window
        special_horizon = self.frame_count - remembered_frames + min(scale_frames, self.frame_count)
        pages, freed_pages = _split(self.pages, scale_frames, page_horizon)
        specials, freed_specials = _split(self.specials, scale_frames, special_horizon)
        if not freed_pages and not freed_specials:
            return self
        return replace(
            self,
            pages=pages,
            free_pages=tuple(sorted(self.free_pages + freed_pages)),
            specials=specials,
            free_specials=tuple(sorted(self.free_specials + freed_specials)),
        )

    def drop_last(self) -> FrameTable:
        """Remove the newest frame, whatever of it is still held. Raises RuntimeError when there is no frame."""
        if not self.frame_count:
            raise RuntimeError("there is no frame to roll back")
        newest = self.frame_count - 1
        freed_pages = tuple(page for frame, page in self.pages[-1:] if frame == newest)
        freed_specials = tuple(slot for frame, slot in self.specials[-1:] if frame == newest)
        return FrameTable(
            frame_count=newest,
            pages=self.pages[: len(self.pages) - len(freed_pages)],
            free_pages=tuple(sorted(self.free_pages + freed_pages)),
            specials=self.specials[: len(self.specials) - len(freed_specials)],
            free_specials=tuple(sorted(self.free_specials + freed_specials)),
        )


def _split(
    held: tuple[tuple[int, int], ...], scale_frames: int, horizon: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Part (frame, place) pairs into those of scale frames or frames from `horizon` on, and the places of the rest."""
    kept = tuple(pair for pair in held if pair[0] < scale_frames or pair[0] >= horizon)
    if len(kept) == len(held):
        return held, ()
    return kept, tuple(place for frame, place in held if scale_frames <= frame < horizon)


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of pages and special slots lie in a block's buffer.

    The special slots lie before the pages, the first slot next to the first page. Both are taken lowest first, so
    that what is visible is one run of tokens whenever the window fills or slides.
    """

    num_pages: int
    num_special_slots: int
    page_tokens: int
    slot_tokens: int

    @staticmethod
    def of(max_num_frames: int, max_total_frames: int, tokens_per_frame: int, num_special_tokens: int) -> TokenLayout:
        """Return the layout of a cache of these sizes (see FlashInferKVCacheManager)."""
        return TokenLayout(
            num_pages=max_num_frames,
            # Frames that are not evicted yet need slots beside the remembered ones; pages run out before these do.
            num_special_slots=max_total_frames + max_num_frames - 1,
            page_tokens=tokens_per_frame - num_special_tokens,
            slot_tokens=num_special_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole buffer."""
        return self.num_special_slots * self.slot_tokens + self.num_pages * self.page_tokens

    def page_start(self, page: int) -> int:
        """Return the first token of a page."""
        return self.num_special_slots * self.slot_tokens + page * self.page_tokens

    def slot_start(self, slot: int) -> int:
        """Return the first token of a special slot."""
        return (self.num_special_slots - 1 - slot) * self.slot_tokens

    def visible_runs(self, table: FrameTable) -> list[tuple[int, int]]:
        """Return the tokens that a table holds, as sorted runs [start, stop) that do not touch each other."""
        pieces = [(self.slot_start(slot), self.slot_tokens) for _, slot in table.specials]
        if self.page_tokens:
            pieces += [(self.page_start(page), self.page_tokens) for _, page in table.pages]
        pieces.sort()
        runs: list[tuple[int, int]] = []
        for start, tokens in pieces:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + tokens)
            else:
                runs.append((start, start + tokens))
        return runs
