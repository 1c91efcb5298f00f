"""What a step takes that did not fit into its budget, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from scrimp._answers import Answers
from scrimp._budget import format_bytes
from scrimp._meter import Before
from scrimp._optimizers import Coming, state_to_come
from scrimp._rehearsal import Rehearsal, apart
from scrimp._shortage import Outlook, of_it, past_this


@final
class Lookout:
    """Says what a step takes, given what it takes at one moment.

    Args:
        before: what was on the device before it.
        device: which.
        parameters: returns those that belong to the step.
        rehearsal: of its first call, where it has one.
        smallest: what the smallest plan takes, where the step was recorded before.
        answers: what the step is answered when it asks its data.
    """

    def __init__(
        self,
        before: Before,
        device: torch.device,
        parameters: Callable[[], Sequence[Tensor]],
        rehearsal: Rehearsal | None,
        smallest: int | None,
        answers: Answers,
    ) -> None:
        self._before = before
        self._device = device
        self._parameters = parameters
        self._rehearsal = rehearsal
        self._smallest = smallest
        self._answers = answers

    def __call__(self, need: int) -> Outlook:
        """Look."""
        coming = apart(lambda: state_to_come(self._parameters(), self._device)) or Coming()
        if self._smallest is not None:
            nbytes = max(self._smallest, need) + coming.nbytes
            return Outlook(nbytes, f"The smallest budget found to work is {_exactly(nbytes)}{_give(coming)}")
        if self._rehearsal is None:
            return past_this(need, coming)
        found = self._rehearsal.smallest(self._before, self._device, need, self._answers)
        if found is None:
            return past_this(need, coming)._replace(final=False)
        nbytes = found.nbytes + coming.nbytes
        if found.guesses or not found.whole:
            fits = "forward and backward fit into" if found.whole else "what can be seen of forward fits well into"
            advice = (
                f"Rehearsed without data, with guesses at what the model asks its data, {fits} {_exactly(nbytes)}"
                f"{_give(coming)}"
            )
            return Outlook(nbytes, advice, final=False)
        return Outlook(
            nbytes, f"Rehearsed without data, forward and backward fit into {_exactly(nbytes)}{_give(coming)}"
        )


def _exactly(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _give(coming: Coming) -> str:
    unforeseen = " and ".join(coming.unforeseen)
    beyond = f" What {unforeseen} is going to hold cannot be foreseen, and comes on top." if unforeseen else ""
    return f"{of_it(coming)}.{beyond} Give at least that"
