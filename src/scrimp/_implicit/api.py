"""The four functions that users call."""

from __future__ import annotations

from .adjoints import Adjoint, Implicit
from .dispatch import run
from .equation import RowNorm
from .iterate import Progress
from .problem import ARGMIN, FIXED_POINT, ROOT, Function, Params, computing_eps, explicit
from .report import OnFail
from .results import Info, WarmStart
from .settings import Settings
from .solve import differentiable, given
from .solvers import Auto, NewtonKrylov, Solver
from .state import Tree, layout_of
from .tolerance import Tolerance, euclidean

AUTO = Auto()
NEWTON = NewtonKrylov()
IMPLICIT = Implicit()


def fixed_point(
    f: Function,
    x0: Tree,
    *args: Tree,
    params: Params = None,
    solver: Solver = AUTO,
    adjoint: Adjoint = IMPLICIT,
    rtol: float | None = None,
    atol: float | None = None,
    norm: RowNorm = euclidean,
    max_steps: int = 200,
    batch_dims: int = 0,
    order: int = 1,
    on_fail: OnFail = "warn",
    warm: WarmStart | None = None,
    progress: Progress | None = None,
) -> tuple[Tree, Info]:
    """Find x = f(x, *args), differentiable with the memory of one evaluation of f.

    Gradients reach whatever f depends on: ``args``, parameters of modules, tensors that f closes over.

    Args:
        f: Gives the next state from a state and ``args``. Evaluated many times; must be deterministic.
        x0: Where to start: a tensor or a pytree of tensors. The solution is built like it and does
        not depend on it.
        *args: Passed on to f.
        params: Tensors that f depends on, listed, as transforms of ``torch.func`` need them: a
        module that f uses,
            or a pytree, which f then takes as the keyword ``params``. None: all is found through autograd.
        solver: The steps to take; see ``scrimp.solvers``.
        adjoint: How the derivative is found; see ``scrimp.adjoints``.
        rtol: Largest residual relative to f(x). None: 1e-10 in double, 1e-6 in single precision,
        else what the
            dtype allows.
        atol: Largest absolute residual, added to the relative one. None: next to nothing.
        norm: Norms of the rows of a matrix, which measure the residual of each sample.
        max_steps: Steps after which a sample counts as failed.
        batch_dims: How many leading dimensions count independent samples. Each sample is then
        solved for itself. 0
            takes the state as one problem, which is always right.
        order: The highest derivative that will be taken.
        on_fail: Whether to ``"warn"``, ``"raise"`` or ``"ignore"`` when a result or a gradient may be wrong.
        warm: Remembers where this call ends, and starts the next one there.
        progress: Called with the number of steps and the samples' residual norms, once a step.

    Returns:
        The solution and a record of how it was found.

    Example:
        >>> import torch, scrimp
        >>> a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        >>> x, info = scrimp.fixed_point(lambda x, a: (x + a / x) / 2, torch.ones_like(a), a)
        >>> x.backward()
        >>> print(f"{x.item():.6f} {a.grad.item():.6f} {info.all_converged}")
        1.414214 0.353553 True
    """
    settings = Settings(adjoint, rtol, atol, norm, max_steps, order, on_fail, warm, progress)
    return run(FIXED_POINT, f, x0, args, params, solver, batch_dims, settings)


def root(
    g: Function,
    x0: Tree,
    *args: Tree,
    params: Params = None,
    solver: Solver = NEWTON,
    adjoint: Adjoint = IMPLICIT,
    rtol: float | None = None,
    atol: float | None = None,
    norm: RowNorm = euclidean,
    max_steps: int = 100,
    batch_dims: int = 0,
    order: int = 1,
    on_fail: OnFail = "warn",
    warm: WarmStart | None = None,
    progress: Progress | None = None,
) -> tuple[Tree, Info]:
    """Find x with g(x, *args) = 0, differentiable with the memory of one evaluation of g.

    Arguments are those of ``fixed_point``, except that the residual is compared with the size of g's
    terms at the
    start, and that plain, Anderson's and Broyden's steps take x + g(x) for the next state.

    Example:
        >>> import torch, scrimp
        >>> a = torch.tensor([8.0, 27.0], dtype=torch.float64, requires_grad=True)
        >>> x, info = scrimp.root(lambda x, a: x**3 - a, torch.ones_like(a), a, batch_dims=1)
        >>> x.sum().backward()
        >>> print([f"{v:.6f}" for v in x.tolist()], [f"{v:.6f}" for v in a.grad.tolist()])
        ['2.000000', '3.000000'] ['0.083333', '0.037037']
    """
    settings = Settings(adjoint, rtol, atol, norm, max_steps, order, on_fail, warm, progress)
    return run(ROOT, g, x0, args, params, solver, batch_dims, settings)


def argmin(
    loss: Function,
    x0: Tree,
    *args: Tree,
    params: Params = None,
    solver: Solver = NEWTON,
    adjoint: Adjoint = IMPLICIT,
    rtol: float | None = None,
    atol: float | None = None,
    norm: RowNorm = euclidean,
    max_steps: int = 100,
    batch_dims: int = 0,
    order: int = 1,
    on_fail: OnFail = "warn",
    warm: WarmStart | None = None,
    progress: Progress | None = None,
) -> tuple[Tree, Info]:
    """Find a local minimum of loss(x, *args) over x, differentiable at the memory of one gradient.

    Arguments are those of ``root`` for the loss's gradient. The loss has one value a sample: a scalar for
    ``batch_dims=0``. It must be differentiable twice, and once more for each order above the first.

    Example:
        >>> import torch, scrimp
        >>> y = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
        >>> x, info = scrimp.argmin(lambda x, y: ((x - y) ** 2).sum() + (x**2).sum(), torch.zeros_like(y), y)
        >>> x.sum().backward()
        >>> print([f"{v:.6f}" for v in x.tolist()], [f"{v:.6f}" for v in y.grad.tolist()])
        ['0.500000', '1.500000'] ['0.500000', '0.500000']
    """
    settings = Settings(adjoint, rtol, atol, norm, max_steps, order, on_fail, warm, progress)
    return run(ARGMIN, loss, x0, args, params, solver, batch_dims, settings)


def implicit(
    solution: Tree,
    g: Function,
    *args: Tree,
    params: Params = None,
    adjoint: Adjoint = IMPLICIT,
    rtol: float | None = None,
    atol: float | None = None,
    norm: RowNorm = euclidean,
    batch_dims: int = 0,
    order: int = 1,
    on_fail: OnFail = "warn",
) -> tuple[Tree, Info]:
    """Make a solution of g(x, *args) = 0 that anything else has found differentiable.

    Arguments are those of ``root``; ``rtol`` None asks for half of the dtype's digits, which solvers
    usually give.

    Example:
        >>> import torch, scrimp
        >>> from scipy.optimize import brentq
        >>> a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        >>> found = torch.tensor(brentq(lambda x: x**2 - a.item(), 0, 2), dtype=torch.float64)
        >>> x, info = scrimp.implicit(found, lambda x, a: x**2 - a, a)
        >>> x.backward()
        >>> print(f"{a.grad.item():.6f}")
        0.353553
    """
    settings = Settings(adjoint, rtol, atol, norm, 0, order, on_fail)
    layout = layout_of(solution, batch_dims)
    eps = computing_eps(layout)
    tolerance = Tolerance(eps**0.5, atol, norm) if rtol is None else settings.tolerance(eps)
    function, listed = explicit(g, params)
    equation = ROOT.equation(lambda x: function(x, listed, *args), layout)
    found = given(equation, layout.flat(solution, "solution").detach(), tolerance)
    return differentiable(equation, found, tolerance, settings)
