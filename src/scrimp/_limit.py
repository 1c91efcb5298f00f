"""A budget in bytes for every step of a model, or of any code."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from scrimp._book import Book, Scheme, line
from scrimp._budget import Budget, parse_budget
from scrimp._elsewhere import Elsewhere
from scrimp._limited import LimitedForward
from scrimp._limiter import Limiter, Outlook
from scrimp._meter import (
    CAPTURED,
    CudaMeter,
    capacity_of,
    claim_workspaces,
    look_before,
    meter_for,
    prefer_expandable_segments,
)
from scrimp._plan import Plan
from scrimp._rehearsal import Rehearsal
from scrimp._report import Measured, Report, report_on
from scrimp._scope import Control
from scrimp._statistics import Statistics
from scrimp._steps import Call, Known, KnownStep, Step, UnknownStep
from scrimp._trace import Resident, Trace
from scrimp._tracing import device_of
from scrimp.errors import BudgetError, SessionError
from scrimp.policy import KeepAll, Planned
from scrimp.store import Disk, Host, StoreStatistics

_GRAIN = 256  # a plan is made for resident bytes rounded up to this part of the budget: a few bytes change nothing
_STEPS_UNTIL_SETTLED = 3  # on the CPU, what is alive is looked up in this many steps: optimizers make their state
_WORTH_A_PLAN = 16  # a part of the budget: when that much more is free than a plan was made for, a new one is made
_MARGIN = 0.015  # of the budget, given up when the allocator fails, step for step, to place what a plan promised to fit
_TIGHT_MARGIN = 0.04  # given up from the beginning where it had to tidy up in the step that was recorded
_TRIALS = 2  # steps for which a plan is on trial
_CALM = 8  # steps in which the allocator never had to tidy up, after which nobody watches for its failures any more
_SPARE = 50  # a part of the budget, on a GPU: kept free in a step that is recorded, for what operators take within
_FIRST_MARGIN = 0.01  # of the budget, on a GPU: what an allocator loses between the pieces of memory it gives out


_limited: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that are limited now: each is on its device while another one runs."""


class BudgetSession:
    """Keeps steps within a budget. See :func:`scrimp.limit` and :func:`scrimp.session`."""

    def __init__(
        self,
        budget: Budget | None,
        activations: Budget | None,
        device: torch.device,
        module: nn.Module | None,
        elsewhere: Elsewhere,
    ) -> None:
        if (budget is None) == (activations is None):
            raise BudgetError('need either a budget for the device, such as "8GiB", or activations=; have both or none')
        self._wanted = budget if budget is not None else activations or 0
        self._activations_only = budget is None
        self._module_ref = None if module is None else weakref.ref(module)
        self._control = Control(KeepAll(), verify=False)
        self._begin_on(device, elsewhere)
        self._open: Any = None
        self._undo: Callable[[], None] | None = None

    def _begin_on(self, device: torch.device, elsewhere: Elsewhere) -> None:
        """Know nothing yet of the steps on a device."""
        self.device = device
        self._stated = parse_budget(self._wanted, capacity_of(device))
        self._elsewhere = elsewhere
        self._book = Book()
        self._margin = _FIRST_MARGIN if device.type == "cuda" else 0.0
        self._failures = self._retries = self._tight = 0
        if device.type == "cuda" and self._module_ref is not None:
            prefer_expandable_segments()

    def _where(self) -> torch.device:
        """Return the device that the model is on, which may have been moved since it was limited."""
        module = self._module
        first = None if module is None else next(module.parameters(), None)
        if first is not None and first.device != self.device and (device := device_of(module, ())) != self.device:
            self._settle()
            self._begin_on(device, self._elsewhere.on(device))
        return self.device

    # -- faces ------------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """The stated bytes."""
        return self._stated

    @property
    def statistics(self) -> Statistics:
        """What the session did so far and holds now."""
        return self._control.ledger.snapshot(self._stated)

    @property
    def trace(self) -> Trace | None:
        """What the latest step that was recorded did; None before the first was finished."""
        self._settle()
        known = self._book.latest
        if known is None:
            return None
        scheme = self._book.schemes.get(known)
        return known.trace if scheme is None else scheme.trace

    @property
    def plan(self) -> Plan | None:
        """The plan for the latest step, made now if need be.

        None before the first step was finished, and where no plan was found: then every step runs like the first.
        """
        self._settle()
        known = self._book.latest
        try:
            return None if known is None else self._current(known).plan
        except BudgetError:
            return None

    @property
    def stored(self) -> StoreStatistics | None:
        """What its stores did so far and hold now."""
        return None if self._elsewhere.store is None else self._elsewhere.store.statistics

    def report(self) -> Report:
        """Return what was predicted and measured: print it."""
        self._settle()
        known = self._book.latest
        if known is None:
            raise SessionError("there is nothing to report yet: run a step, forward and backward, first")
        scheme = self._current(known)
        return report_on(scheme.trace, scheme.plan, self._book.measured.get(known, Measured()), scheme.limit)

    def _current(self, known: Known) -> Scheme:
        return self._book.schemes.get(known) or self._scheme(known, known.trace.resident)

    def detach(self) -> None:
        """Leave the model as it was before :func:`scrimp.limit`."""
        if line.owner is self:
            _settle_line()
        if self._undo is not None:
            self._undo()
            self._undo = None

    # -- steps ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(
        self,
        signature: object,
        inputs: list[Tensor],
        module: nn.Module | None,
        rehearsal: Callable[[], Rehearsal] | None = None,
    ) -> Iterator[None]:
        call = Call(id(self), signature)
        if line.step is not None and (line.step.is_over or line.owner is None):
            _settle_line()
        if line.step is None:
            line.step = self._begin(call, inputs, rehearsal)
            line.owner = self
        step = line.step
        line.depth += 1
        try:
            with step.call(call, module):
                yield
        except BaseException:
            step.finish()
            line.step = line.owner = None
            raise
        finally:
            line.depth -= 1

    def _begin(self, call: Call, inputs: list[Tensor], rehearsal: Callable[[], Rehearsal] | None) -> Step:
        known = self._book.find(call)
        if known is None:
            return self._online(inputs, rehearsal() if rehearsal is not None else None, None)
        resident = self._resident(known, inputs)
        try:
            scheme = self._scheme(known, resident)
        except BudgetError as error:
            # Evicting as memory fills up may do with less than any plan that was found.
            return self._online(inputs, None, error.smallest)
        nbytes = sum(part.nbytes for part in resident)
        policy = copy.copy(scheme.policy)
        self._control.policy = policy
        limiter = Limiter(
            self._control, meter_for(self.device, nbytes), self._limit(nbytes), self._elsewhere, awake=False
        )
        on_trial = self._book.carried_out.get(known, 0) < (_TRIALS if self.device.type == "cuda" else 1)
        return KnownStep(limiter, known, policy, scheme.plan, on_trial, on_trial or self._tight > 0)

    def _online(self, inputs: list[Tensor], rehearsal: Rehearsal | None, smallest: int | None) -> Step:
        """Return a step that nothing is known of, or for which no plan was found in ``smallest`` bytes."""
        self._elsewhere.get_ready()
        claim_workspaces(self.device)
        before = look_before(self.device, self._modules, inputs)
        self._control.policy = KeepAll()
        meter = meter_for(self.device, before.nbytes)
        limiter = Limiter(self._control, meter, self._limit(before.nbytes), self._elsewhere)
        if self.device.type == "cuda":
            limiter.spare = self._stated // _SPARE

        def outlook(need: int) -> Outlook | None:
            if smallest is not None:
                return Outlook(max(smallest, need), "The smallest budget found to work is")
            found = None if rehearsal is None else rehearsal.smallest(before, self.device, need)
            return None if found is None else Outlook(found, "Rehearsed without data, forward and backward fit into")

        if not self._activations_only:
            limiter.outlook = outlook
        return UnknownStep(limiter, before)

    def _resident(self, known: Known, inputs: list[Tensor]) -> tuple[Resident, ...]:
        """Return what is on the device now, before a step that is known."""
        scheme = self._book.schemes.get(known)
        if scheme is not None:
            if self.device.type == "cuda":
                level = CudaMeter(self.device).level()
                if level <= scheme.covers <= level + self._stated // _WORTH_A_PLAN:
                    return scheme.trace.resident
            elif self._book.settled.get(known, 0) >= _STEPS_UNTIL_SETTLED:
                return scheme.trace.resident
        self._book.settled[known] = self._book.settled.get(known, 0) + 1
        captured = tuple(part for part in known.trace.resident if part.name == CAPTURED)
        return (*look_before(self.device, self._modules, inputs).parts, *captured)

    @property
    def _module(self) -> nn.Module | None:
        return None if self._module_ref is None else self._module_ref()

    @property
    def _modules(self) -> list[nn.Module]:
        own = self._module
        others = [module for module in _limited if module is not own]
        return others if own is None else [own, *others]

    def _limit(self, before: int) -> int:
        """Return the bytes that the device may hold, when it holds ``before`` at the beginning of a step."""
        if not self._activations_only:
            return int(self._stated * (1 - self._margin))
        module = self._module
        parameters = () if module is None else module.parameters()
        coming = sum(p.untyped_storage().nbytes() for p in parameters if p.requires_grad and p.grad is None)
        return before + self._stated + coming

    def _scheme(self, known: Known, resident: tuple[Resident, ...]) -> Scheme:
        """Return a plan for a step that begins with ``resident`` on the device."""
        now = sum(part.nbytes for part in resident)
        limit = self._limit(now)
        old = self._book.schemes.get(known)
        if old is not None:
            if now <= old.covers <= now + limit // _WORTH_A_PLAN and self._limit(old.covers) == old.limit:
                return old
            if self._activations_only and old.limit - old.covers == limit - now:
                return old
        refused = self._book.unplannable.get(known)
        if refused is not None and limit - now <= refused[0]:
            raise refused[1]
        try:
            found = self._book.schemes[known] = self._solved(known, resident, limit)
        except BudgetError as error:
            self._book.unplannable[known] = limit - now, error
            raise
        self._book.carried_out[known] = 0
        return found

    def _solved(self, known: Known, resident: tuple[Resident, ...], limit: int) -> Scheme:
        trace = replace(known.trace, resident=resident)
        now = sum(part.nbytes for part in resident)
        grain = max(limit // _GRAIN, 1)
        allowance = -(-now // grain) * grain - now  # for what may come
        if not self._activations_only:
            try:
                return self._scheme_for(trace, limit - allowance, limit, now + allowance)
            except BudgetError:
                pass  # it is tight: try without an allowance
        return self._scheme_for(trace, limit, limit, now)

    def _scheme_for(self, trace: Trace, bytes_to_use: int, limit: int, covers: int) -> Scheme:
        linked, plan = self._elsewhere.solve(trace, bytes_to_use)
        return Scheme(linked, plan, limit, covers, Planned(linked, plan, self._elsewhere.store))

    def _settle(self) -> None:
        """If a step of this session is over, learn from it."""
        if line.owner is self and line.step is not None and line.step.is_over:
            _settle_line()

    def _learn(self, step: Step) -> None:
        before = self._book.latest
        match step:
            case UnknownStep():
                known = step.known()
                if known is not None:
                    same = self._book.find(known.calls[0])
                    if same is None or same not in self._book.unplannable:
                        self._book.add(known, before)
            case KnownStep():
                self._book.latest = step.known
                self._book.carried_out[step.known] = self._book.carried_out.get(step.known, 0) + 1
                if step.departed:
                    self._book.forget(step.known)
                elif step.ended is not None:
                    measured = self._book.measured.setdefault(step.known, Measured())
                    if step.on_trial:
                        measured.watched(step.limiter.meter.most())
                    else:
                        measured.add(step.limiter.meter, step.began, step.ended)
        if self.device.type == "cuda":
            self._count_failures(step)

    def _count_failures(self, step: Step) -> None:
        """Plan for less where the allocator failed in a planned step: its memory is in too many pieces.

        Where it only had to give back idle pieces and try again, a plan for less would cost more than that does. But as
        long as it has to, steps are watched, since it may fail.
        """
        statistics = torch.cuda.memory_stats(self.device)
        retries, failures = statistics.get("num_alloc_retries", 0), statistics.get("num_ooms", 0)
        if isinstance(step, UnknownStep) and retries > self._retries:
            self._margin = max(self._margin, _TIGHT_MARGIN)
        if isinstance(step, KnownStep):
            self._tight = _CALM if retries > self._retries else max(self._tight - 1, 0)
            if failures > self._failures and not step.departed:
                self._margin = min(self._margin + _MARGIN, 0.5)
        self._retries, self._failures = retries, failures

    # -- as a context -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._open is not None:
            raise SessionError("this session is open already; to nest sessions, make another one")
        if line.depth:
            raise SessionError("a budget is for the whole step; inside of another budget, use session(policy=...)")
        self._open = self._call(None, [], None)
        self._open.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            raise SessionError("this session is not open")
        context, self._open = self._open, None
        context.__exit__(kind, error, trace)
        self._settle()


def _settle_line() -> None:
    step, owner = line.step, line.owner
    line.step = line.owner = None
    if step is not None:
        step.finish()
        if owner is not None:
            owner._learn(step)


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
    _limited.add(model)
    name = weakref.ref(model)

    def undo() -> None:
        forward.put_back()
        if (module := name()) is not None:
            _limited.discard(module)

    session._undo = undo
    return session


__all__ = ["BudgetSession", "limit"]
