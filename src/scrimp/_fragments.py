"""What a GPU's allocator loses between the pieces of memory that it gives out, found out by its failures."""

from __future__ import annotations

from typing import final

import torch

from scrimp._steps import KnownStep, Step, UnknownStep

_FIRST_MARGIN = 0.01  # of the budget: given up in any case
_TIGHT_MARGIN = 0.04  # where the allocator had to tidy up in the step that was recorded
_MORE = 0.015  # each time that it fails to place what a plan promised to fit
_MOST = 0.5
_CALM = 8  # steps in which it never had to tidy up, after which nobody watches for its failures any more


@final
class Fragments:
    """The part of a budget that plans leave free for them.

    Args:
        device: on a CPU there are none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = self._failures = self._tight = 0
        self.margin = _FIRST_MARGIN if device.type == "cuda" else 0.0

    @property
    def are_many(self) -> bool:
        """Whether the allocator had to tidy up of late, so that it may fail."""
        return self._tight > 0

    def look_after(self, step: Step) -> None:
        """Leave more free where the allocator failed in a planned step: its memory is in too many pieces.

        Where it only had to give back idle pieces and try again, a plan for less would cost more than that does.
        """
        if self._device.type != "cuda":
            return
        statistics = torch.cuda.memory_stats(self._device)
        retries, failures = statistics.get("num_alloc_retries", 0), statistics.get("num_ooms", 0)
        if isinstance(step, UnknownStep) and retries > self._retries:
            self.margin = max(self.margin, _TIGHT_MARGIN)
        if isinstance(step, KnownStep):
            self._tight = _CALM if retries > self._retries else max(self._tight - 1, 0)
            if failures > self._failures and not step.departed:
                self.margin = min(self.margin + _MORE, _MOST)
        self._retries, self._failures = retries, failures
