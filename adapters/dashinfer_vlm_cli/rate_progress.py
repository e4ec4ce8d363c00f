"""Progress with a rate per minute."""

from __future__ import annotations

from typing import Any, ClassVar

from dashinfer_vlm_core.progress import Progress


class RateProgress(Progress):
    """Progress with what was done per minute of this run, and the remaining time.

    Args:
        total: as for `tqdm`.
        desc: as for `tqdm`.

    Attributes:
        noun: what is counted.
    """

    noun: ClassVar[str]
    bar_text: ClassVar[str] = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{per_minute}, {remaining} left]"
    log_text: ClassVar[str] = "{desc}: {n_fmt}/{total_fmt}, {per_minute}, {remaining} left"

    def __init__(self, *, total: int, desc: str) -> None:
        super().__init__(total=total, desc=desc, unit="", smoothing=0)

    @property
    def num_done(self) -> int:
        """The number for the rate."""
        return int(self.n)

    @property
    def format_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().format_dict
        rate = 60 * self.num_done / values["elapsed"] if values["elapsed"] else 0.0
        return values | {"per_minute": f"{rate:.1f} {self.noun} per minute"}
