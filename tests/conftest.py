"""What all tests share."""

import signal
import weakref

import pytest
from torch import nn

from scrimp import _budget_session, _limit

# A shell has jobs in the background ignore Ctrl-C, and so would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_limited_models_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU every limited module of the process counts: those that other tests have left must not."""
    nobody = weakref.WeakSet[nn.Module]()
    for module in (_budget_session, _limit):
        monkeypatch.setattr(module, "limited_modules", nobody)
