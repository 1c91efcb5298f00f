"""Holding every training step of a model under a budget in bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from scrimp._budget import Budget
from scrimp._budget_session import BudgetSession, limited_modules
from scrimp._elsewhere import Elsewhere
from scrimp._limited import LimitedForward
from scrimp._rehearsal import Rehearsal
from scrimp._tracing import device_of
from scrimp.errors import SessionError
from scrimp.store import Disk, Host


def limit(
    model: nn.Module,
    budget: Budget | None = None,
    *,
    activations: Budget | None = None,
    host: Host | Budget | None = None,
    disk: Disk | Budget | None = None,
) -> BudgetSession:
    """Hold every training step of a model under a budget, from the first one on. The training loop stays as it is.

    The first step with inputs of a new shape is recorded while it runs, and held under the budget by dropping values as
    memory fills up. From what was recorded a plan is made, which later steps of the kind follow. Gradients, buffers and
    random draws are those of the plain step, to the last bit. Evaluation, and anything else under ``no_grad``, is not
    touched.

    Args:
        model: Whose ``forward`` is replaced on this object, until :meth:`BudgetSession.detach`.
        budget: Bytes that the device may hold at any moment of the step, parameters, gradients and optimizer state
            included: ``"8GiB"``, ``"8 GB"``, an int, or a fraction of the device such as ``0.9``.
        activations: Instead of ``budget``: bytes for what the step makes, beyond what was there before and the
            parameters' gradients.
        host: Bytes of host memory, or a store, for what takes longer to compute again than to copy; None: none.
        disk: Bytes of files, or a store, for what host memory cannot hold.

    Raises:
        BudgetError: in a step that nothing can fit into the budget; it says what stands in the way.

    >>> import torch, scrimp
    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
    >>> session = scrimp.limit(model, activations="100 kB")
    >>> for _ in range(3):
    ...     model(torch.randn(64, 64)).square().mean().backward()
    >>> session.plan.peak <= session.plan.budget
    True
    >>> session.detach()
    """
    if not isinstance(model, nn.Module):
        raise SessionError(f"need a module to limit, have {model!r}; for other code, use scrimp.session(budget)")
    if isinstance(model.__dict__.get("forward"), LimitedForward):
        raise SessionError("this model is limited already: call detach() of its session first")
    device = device_of(model, ())
    session = BudgetSession(budget, activations, device, model, Elsewhere(host, disk, device))

    def call(
        leaves: list[object], signature: object, module: nn.Module, rehearsal: Callable[[], Rehearsal]
    ) -> AbstractContextManager[None]:
        return session._call(signature, [leaf for leaf in leaves if isinstance(leaf, Tensor)], module, rehearsal)

    forward = model.forward = LimitedForward(model, session._where, call)
    limited_modules.add(model)
    name = weakref.ref(model)

    def undo() -> None:
        forward.put_back()
        if (module := name()) is not None:
            limited_modules.discard(module)

    session._undo = undo
    return session
