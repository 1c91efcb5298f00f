"""Giving a step aliases of tensors from outside, so that its graph ends there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

# What these tell of a tensor is its own, and not its content.
_PERSONAL = {
    *(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn", "is_leaf")),
    Tensor.register_hook,
    Tensor.retain_grad,
}


def needs_alias(tensor: Tensor) -> bool:
    """Tell whether a graph of a step must not reach this tensor: behind it are nodes or hooks of the caller's."""
    return tensor.grad_fn is not None or bool(tensor._backward_hooks)


def in_use() -> list[Substitute]:
    """Return those in force, the outermost first."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if isinstance(mode, Substitute)]


@final
class Substitute(TorchFunctionMode):
    """Passes an alias to every function that gets one of the tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._aliases = {id(one): one.detach().requires_grad_() for one in tensors if needs_alias(one)}

    def __bool__(self) -> bool:
        return bool(self._aliases)

    def of(self, tensor: Tensor) -> Tensor:
        """Return what stands for a tensor: an alias, or itself."""
        return self._aliases.get(id(tensor), tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function on aliases."""
        kwargs = kwargs or {}
        if func in _PERSONAL:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self.of, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)
