"""A machine that is not here, played: described bytes are counted, and operators advance a clock by estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from scrimp._answers import Answers, Reader, asks_data, least
from scrimp._geometry import fresh
from scrimp._live import LiveStorages
from scrimp._machine import Machine
from scrimp._meter import Meter
from scrimp._operators import Kind, operator
from scrimp._record import tensors_in
from scrimp._record_mode import replaying
from scrimp._shape_rules import own_rule
from scrimp._value import Call
from scrimp.errors import TraceError


class EndlessError(TraceError):
    """A step asks its data more than anybody could guess."""


META = torch.device("meta")
_GUESSES = 32  # a step that asks its data more than that is a loop, which waits for an answer that nobody gives
aten = torch.ops.aten


@final
class MachineMeter(Meter):
    """Counts described bytes, and reads a clock that operators advance by their estimated time."""

    def __init__(self, on: Machine) -> None:
        self.machine = on
        self.device = META
        self.block = on.block
        self.now = 0.0
        self._live = LiveStorages(on.block)

    @property
    def plays(self) -> torch.device:
        """The kind of device that it plays: a host counts every byte."""
        return torch.device("cpu" if self.block == 1 else "cuda")

    def level(self) -> int:
        """Return the bytes that would be in use."""
        return self._live.now

    def most(self) -> int:
        """Return the most bytes that would have been in use."""
        return self._live.peak

    def requested(self) -> int:
        """Return 0: what an operator uses within itself is not seen."""
        return 0

    def in_pieces(self) -> int:
        """Return 0: nothing is placed anywhere."""
        return 0

    def made(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it dies."""
        self._live.add(storage)

    def found(self, nbytes: int) -> None:
        """Do nothing: what was there before is described one by one."""

    def mark(self) -> float:
        """Read the clock."""
        return self.now

    def keep_busy(self, at_first: bool = False) -> None:
        """Do nothing: the clock stands still between operators."""

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def settle(self) -> None:
        """Do nothing: nothing runs."""


@final
class Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Advances the clock by what each operator would take, and answers where Python asks data a question.

    Args:
        meter: reads the clock.
        answers: what was answered where there was data; None: nobody knows.
        guess: the answer to yes-or-no questions beyond that.
    """

    def __init__(self, meter: MachineMeter, answers: Answers | None = None, guess: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self._reader: Reader | None = None if answers is None else answers.told_again()
        self._guess = guess
        self.answered = 0
        """How often it had to guess at an answer."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._result(func, args, kwargs)
        if operator(func).kind is Kind.COMPUTE:
            self._meter.now += _seconds(self._meter.machine, func, args, kwargs, result)
        return result

    def _result(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if replaying.call is not None and asks_data(func):
            return _as_before(replaying.call)
        answer = None if self._reader is None else self._reader.next(func)
        if answer is not None:
            return answer
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return self._guessed(self._guess)
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            result = own_rule(func, args, kwargs)
            if result is None and self._reader is not None:
                result = self._guessed(least(func, args))
            if result is None:
                raise
            return result

    def _guessed(self, answer: Any) -> Any:
        self.answered += 1
        if self._reader is not None and self.answered > _GUESSES:
            raise EndlessError(f"need an answer to a question about data, have none after {_GUESSES} guesses")
        return answer


def _as_before(call: Call) -> Tensor | list[Tensor]:
    """Describe what an operator returned the first time; it is asked for no result that nobody needs any more."""
    found = {value.index: fresh(value.geometry, META) for ref in call.outputs if (value := ref()) is not None}
    results = [
        found.get(index, torch.empty(0, device=META)) for index in range(len(call.operator.func._schema.returns))
    ]
    return results[0] if len(results) == 1 else results


def _seconds(on: Machine, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    read, made = list(tensors_in([*args, *kwargs.values()])), list(tensors_in(result))
    given = {tensor.untyped_storage()._cdata for tensor in read}
    if made and not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in given for tensor in made):
        return 0.0  # another look at what is there
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
    bits = min((8 * tensor.element_size() for tensor in read if tensor.is_floating_point()), default=32)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return on.seconds(0.0, bits, nbytes)
    return on.seconds(float(count(*args, **kwargs, out_val=result)), bits, nbytes)


@final
class FusedKernels(TorchFunctionMode):
    """Has attention, dropout and RMS norm call the fused kernels of GPUs; ``meta`` would spell them out."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func is nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if func is nn.functional.rms_norm:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not p or inplace:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Do what is like the fused kernel, which ``meta`` lacks: a layer norm saves the same and the mean of each row."""
    if weight is not None and weight.dtype is not input.dtype:  # on GPUs, too, this is spelled out
        return torch.rms_norm(input, list(normalized_shape), weight, eps)
    return torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 0.0)[0]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what ``scaled_dot_product_attention`` does, with a fused kernel."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    flash = attn_mask is None and query.element_size() == 2 and query.ndim == 4
    if flash:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        bias = attn_mask
        if bias is not None and bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )
    result: Tensor = found[0]
    return result
