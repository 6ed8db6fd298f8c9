# SPDX-License-Identifier: Apache-2.0
"""A table of parameters: a frozen dataclass whose fields hold defaults, ranges and descriptions."""
from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from dataclasses import dataclass, field, fields
from typing import Self

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.node import Node


class Change(enum.Enum):
    """When a new value of a parameter takes effect."""

    NOW = "next frame"
    RESET = "next reset"
    CONFIGURE = "only while unconfigured"
    START = "only at start"


class ParameterError(ValueError):
    """A value that a parameter cannot have; the message names the parameter, the value and the reason."""


def parameter(
    default: bool | int | float | str | tuple[str, ...],
    description: str,
    change: Change,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> dataclasses.Field:
    """Return a row of the table. A number needs its range, least to most."""
    return field(default=default, metadata={
        "description": description, "change": change, "least": least, "most": most, "choices": choices,
    })


_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "tuple[str, ...]": tuple}
_ROS_TYPES = {"bool": "bool", "int": "integer", "float": "double", "str": "string", "tuple[str, ...]": "string array"}


@dataclass(frozen=True)
class ParameterTable:
    """Parameters of a node: derive, and give every field by `parameter`. Making one raises ParameterError."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type == "float" and type(value) is int:  # `map_period: 2` in a file means 2.0
                value = float(value)
            elif entry.type == "tuple[str, ...]" and isinstance(value, (list, type(None))):  # as rclpy has them
                value = tuple(value or ())
            object.__setattr__(self, entry.name, value)
            reason = _type_error(entry, value) or _range_error(entry, value) or self._content_error(entry.name, value)
            if reason:
                raise ParameterError(f"{entry.name} is {value!r}: {reason}")
        self._check_together()

    def _content_error(self, name: str, value: object) -> str | None:
        """Return what is wrong with a value of the right type in its range, if anything."""

    def _check_together(self) -> None:
        """Raise ParameterError for values that exclude each other."""

    @classmethod
    def declare(cls, node: Node) -> Self:
        """Declare all parameters on a node and return their values, overrides included.

        Raises ParameterError if an override cannot be, with the reason.
        """
        values = {}
        for entry in fields(cls):
            try:
                default = list(entry.default) if isinstance(entry.default, tuple) else entry.default
                values[entry.name] = node.declare_parameter(entry.name, default, _descriptor(entry)).value
            except Exception as error:  # rclpy has several, with no common base
                raise ParameterError(str(error)) from error
        return cls(**values)

    @classmethod
    def markdown_table(cls) -> str:
        """Return the table for the documentation."""
        lines = ["| parameter | type | default | range | takes effect | description |", "|---|---|---|---|---|---|"]
        for entry in fields(cls):
            lines.append(f"| `{entry.name}` | {_ROS_TYPES[entry.type]} | {_default_text(entry)} | {_range_text(entry)} "
                         f"| {entry.metadata['change'].value} | {entry.metadata['description']} |")
        return "\n".join(lines) + "\n"

    @classmethod
    def yaml_file(cls) -> str:
        """Return a parameter file: every parameter at its default, with its description."""
        lines = ["# SPDX-License-Identifier: Apache-2.0", "# Every parameter of the node with its default.",
                 "/**:", "  ros__parameters:"]
        for entry in fields(cls):
            limits = _range_text(entry)
            lines.append(f"    # {entry.metadata['description']}" + (f" Range: {limits}." if limits else ""))
            lines.append(f"    {entry.name}: {_default_text(entry)}")
        return "\n".join(lines) + "\n"


def frame_error(value: str) -> str | None:
    """Return what is wrong with the name of a frame that may be empty, if anything."""
    if value.startswith("/") or re.search(r"\s", value):
        return "a frame's name has no leading slash and no white space"
    return None


def _descriptor(entry: dataclasses.Field) -> ParameterDescriptor:
    limits = entry.metadata
    descriptor = ParameterDescriptor(
        description=limits["description"],
        additional_constraints=f"A change takes effect: {limits['change'].value}."
        + (f" One of: {', '.join(limits['choices'])}." if limits["choices"] else ""),
        read_only=limits["change"] is Change.START,
        dynamic_typing=entry.type == "float",  # so that a whole number is taken as well
    )
    if entry.type == "int":
        descriptor.integer_range = [IntegerRange(from_value=limits["least"], to_value=limits["most"], step=1)]
    elif entry.type == "float":
        descriptor.floating_point_range = [FloatingPointRange(from_value=limits["least"], to_value=limits["most"])]
    return descriptor


def _default_text(entry: dataclasses.Field) -> str:
    if isinstance(entry.default, (str, tuple)):
        return json.dumps(entry.default)
    return str(entry.default).lower()


def _range_text(entry: dataclasses.Field) -> str:
    limits = entry.metadata
    if limits["choices"]:
        return ", ".join(limits["choices"])
    if limits["least"] is None:
        return ""
    return f"{limits['least']:g} to {limits['most']:g}" if entry.type == "float" else (
        f"{limits['least']} to {limits['most']}")


def _type_error(entry: dataclasses.Field, value: object) -> str | None:
    if type(value) is not _TYPES[entry.type]:
        return f"expected a value of type {_ROS_TYPES[entry.type]}"
    return None


def _range_error(entry: dataclasses.Field, value: object) -> str | None:
    limits = entry.metadata
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    if limits["least"] is not None and not limits["least"] <= value <= limits["most"]:
        return f"expected {_range_text(entry)}"
    if limits["choices"] and value not in limits["choices"]:
        return f"expected one of {_range_text(entry)}"
    return None
