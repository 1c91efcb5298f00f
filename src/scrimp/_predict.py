"""How many bytes an operator is about to allocate for its results, found out on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from scrimp._geometry import geometry_of, is_plain
from scrimp._live import rounded
from scrimp._record import tensors_in

# They compute all terms in the memory of the result, which keeps its size when the result is reduced to one number.
_LOSSES = {
    torch.ops.aten.binary_cross_entropy, torch.ops.aten.huber_loss, torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss, torch.ops.aten.soft_margin_loss,
}  # fmt: skip


@final
class Forecast:
    """Remembers, since the layers of a model call the same operators on the same shapes again and again."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._known: dict[object, int] = {}
        self._within: dict[object, int] = {}
        self._timed: set[object] = set()

    def needs(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the bytes of storages that the call will make, and those that such a call took within itself.

        Where the number depends on data (``nonzero``), or no kernel for ``meta`` exists, it is a guess: as much as the
        largest argument takes.
        """
        key = (func, _key(args), _key(kwargs))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._ask(func, args, kwargs)
        return found, self._within.get(key, 0)

    def is_new(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether it was not asked this before about such a call."""
        key = (func, _key(args), _key(kwargs))
        found = key not in self._timed
        self._timed.add(key)
        return found

    def learn(self, within: int, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take note of what a call took within itself, and gave back."""
        key = (func, _key(args), _key(kwargs))
        self._within[key] = max(within, self._within.get(key, 0))

    def _ask(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        try:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                shadows = tree_map(_shadow, (list(args), dict(kwargs)))
                given = {tensor.untyped_storage()._cdata for tensor in tensors_in([*shadows[0], *shadows[1].values()])}
                made = {
                    tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                    for tensor in tensors_in(func(*shadows[0], **shadows[1]))
                }
        except Exception:  # whatever a kernel says that does not know this device, or cannot know the size
            sizes = [t.untyped_storage().nbytes() for t in tensors_in([*args, *kwargs.values()]) if is_plain(t)]
            return max(sizes, default=0)
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            made[0] = _rnn_workspace(args[0], args[5])
        if func.overloadpacket in _LOSSES and made:
            made = dict.fromkeys(made, max(t.untyped_storage().nbytes() for t in tensors_in([*args])))
        return sum(rounded(nbytes, self._block) for address, nbytes in made.items() if address not in given)


def _rnn_workspace(inputs: Tensor, state: Tensor) -> int:
    """Return about as many bytes as the kernel hands on to backward, and no fewer; its rule for ``meta`` says 0."""
    batch, width = state.shape[-2:]
    return 64 * batch * rounded(width, 16) * (inputs.shape[0] + 1) + (1 << 15)


def _shadow(argument: Any) -> Any:
    match argument:
        case Tensor():
            geometry = geometry_of(argument)
            return torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device="meta")
        case torch.device():
            return torch.device("meta")
        case torch.Generator():
            return None
    return argument


def _key(argument: Any) -> object:
    match argument:
        case Tensor():
            return geometry_of(argument) if is_plain(argument) else object()
        case list() | tuple():
            return tuple(_key(one) for one in argument)
        case dict():
            return tuple((name, _key(one)) for name, one in argument.items())
        case torch.Generator():
            return None
    return (type(argument), argument)
