# SPDX-License-Identifier: Apache-2.0
"""What scenes are drawn from: shares of kinds and ranges of sizes, motions and camera effects."""
from __future__ import annotations

from dataclasses import dataclass, fields

Range = tuple[float, float]


@dataclass(frozen=True)
class SceneOptions:
    """Shares are probabilities; ranges are (least, greatest). The defaults are the training mixture."""

    outdoors: float = 0.35  # share of outdoor places; the rest are indoors
    corridor: float = 0.2  # share of those indoors that are floors of buildings, with corridors
    office: float = 0.25  # share of the others that are open offices
    furnished: float = 0.4  # share of the others, rooms, that are furnished as kitchens and living rooms are
    room_size: Range = (2.0, 12.0)  # metres, each side
    room_height: Range = (2.2, 4.0)  # metres
    floor_size: Range = (6.0, 25.0)  # metres, each side of a floor with corridors
    place_size: Range = (8.0, 40.0)  # metres, each side of the free area outdoors
    clutter: float = 1.0  # share of the things that are put in
    fov: Range = (40.0, 110.0)  # degrees across the image's width
    step: Range = (0.005, 0.25)  # metres a frame in rooms; up to four times as much outdoors, with the place's size
    max_yaw: float = 10.0  # degrees a frame
    drone: float = 0.2  # share of drones
    hand: float = 0.35  # share of hands; the rest are ground robots
    look_down: float = 0.4  # share of hands that look down, by 5 to 45 degrees and what they drift
    shadows: bool = True
    effects: bool = True  # False: the image as rendered, only brought to an even brightness; nothing below applies
    low_light: float = 0.15  # share of dark, noisy sequences
    noise: float = 0.03  # greatest standard deviation in good light
    motion_blur: float = 0.5  # longest exposure, as a share of the time between frames; 0: none
    defocus: float = 1.5  # greatest circle of confusion of far things, in pixels; 0: none

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and not 0 < value[0] <= value[1]:
                raise ValueError(f"{field.name} must be 0 < least <= greatest, got {value}")
        # Else no path fits.
        for name, least in (("room_size", 1.5), ("room_height", 2.0), ("floor_size", 1.5), ("place_size", 1.5)):
            if getattr(self, name)[0] < least:
                raise ValueError(f"{name} must be at least {least} m, got {getattr(self, name)}")
        for name in ("outdoors", "corridor", "office", "furnished", "clutter", "drone", "hand", "look_down",
                     "low_light", "motion_blur"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0 to 1, got {getattr(self, name)}")
        if self.drone + self.hand > 1:
            raise ValueError(f"drone and hand must add up to at most 1, got {self.drone} and {self.hand}")
        if self.fov[1] >= 170:
            raise ValueError(f"fov must be below 170 degrees, got {self.fov}")
        for name in ("noise", "defocus"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.max_yaw <= 45:
            raise ValueError(f"max_yaw must be within 0 to 45 degrees, got {self.max_yaw}")


MIXED = SceneOptions()
ROOMS = SceneOptions(outdoors=0, corridor=0, office=0, furnished=0, room_size=(3.0, 9.0), room_height=(2.3, 3.8),
                     fov=(50.0, 90.0), step=(0.01, 0.22), max_yaw=9.0, drone=0, look_down=0, low_light=0, motion_blur=0,
                     defocus=0)
# A camera carried through a kitchen or a living room.
INTERIORS = SceneOptions(outdoors=0, corridor=0, office=0, furnished=1, room_size=(2.5, 7.0), room_height=(2.3, 3.4),
                         fov=(45.0, 95.0), step=(0.005, 0.15), drone=0.1, hand=0.8, look_down=0.85, low_light=0.05)
# At desks, and between them; many cameras hardly move.
OFFICES = SceneOptions(outdoors=0, corridor=0, office=1, room_size=(3.0, 11.0), room_height=(2.3, 3.4),
                       fov=(45.0, 95.0), step=(0.003, 0.15), drone=0.05, hand=0.8, look_down=0.6, low_light=0.05)
# Long ways, on which what was seen at first is soon out of sight.
CORRIDORS = SceneOptions(outdoors=0, corridor=1, room_height=(2.2, 3.4), fov=(45.0, 95.0), step=(0.02, 0.3), drone=0.05,
                         hand=0.6, look_down=0.5, low_light=0.05)
DEMO = SceneOptions(outdoors=0, corridor=0, office=0, furnished=0, room_size=(6.0, 8.0), room_height=(2.7, 3.0),
                    step=(0.05, 0.05), effects=False)
# Of sequences that models are measured on.
KINDS = {"rooms": ROOMS, "interiors": INTERIORS, "offices": OFFICES, "corridors": CORRIDORS, "mixed": MIXED}
