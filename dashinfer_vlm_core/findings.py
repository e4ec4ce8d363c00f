"""Results of the checks of `dashinfer-vlm doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "missing", "unusable", "slow", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of a check of `dashinfer-vlm doctor`.

    Attributes:
        name: what was checked.
        status: `broken` has to be fixed; `missing` and `unusable` components are optional, and `slow` ones work.
        detail: the result, human-readable.
        fix: what to do about it, with the command; empty if nothing has to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""
