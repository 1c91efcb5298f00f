"""What the executor must know of an ATen operator before it may run it again.

Most of it is read off the schema. The tables hold what schemas do not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from scrimp._below import counted_above

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Frozen:
    """A copy of a small argument, taken when the operator ran."""

    tensor: Tensor


class Kind(Enum):
    """How an operator treats storages."""

    LOOK = auto()  # makes no value: returns another look at its input, or no tensor at all
    RESHAPE_IN_PLACE = auto()  # changes the geometry of the tensor object itself, not its bytes
    RESTORAGE = auto()  # swaps or resizes the storage of the tensor object itself
    COMPUTE = auto()  # makes new values, or new versions of the storages that it writes


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts about one operator overload."""

    func: OpOverload
    name: str
    kind: Kind
    writes: tuple[int | str, ...]
    """Positions (or keyword names) of the arguments that it writes."""
    overwrites: bool
    """It writes all of them without reading them first."""
    overwrites_in_training: int | None
    """Position of the ``training`` flag under which it overwrites them without the schema saying so."""
    averages: bool
    """What it writes in training are running averages: no input to its results, but not to be made again either."""
    counted_above: bool
    """Version counters of what it writes rise when it has returned to autograd. Otherwise they have risen before that,
    if they do at all."""
    random: bool
    replayable: bool
    varies: bool
    """Two runs of it may differ, on a GPU at least, if deterministic algorithms are not asked for."""
    varies_on_cpu: bool
    snapshots: bool
    """Some arguments can change later without a trace in any version counter."""
    picks_kernels: bool
    """Settings of the process, such as whether cuDNN may be used and with which precision, say how it computes."""

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that this call writes."""
        tensors: list[Tensor] = []
        for where in self.writes:
            argument = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
            if isinstance(argument, Tensor):
                tensors.append(argument)
            elif isinstance(argument, (list, tuple)):
                tensors.extend(a for a in argument if isinstance(a, Tensor))
        return tensors

    def reads_what_it_writes(self, args: Sequence[Any]) -> bool:
        """Tell whether the old content of what this call writes can influence its results."""
        if self.overwrites:
            return False
        return not self._training(args)

    def _training(self, args: Sequence[Any]) -> bool:
        position = self.overwrites_in_training
        return position is not None and position < len(args) and bool(args[position])

    def with_snapshots(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments with those copied that can change later without a trace in any version counter.

        Batch norm in evaluation mode reads running statistics that training writes behind autograd's back.
        """
        if self._training(args):
            return args
        return [Frozen(arg.clone()) if i in self.writes and arg is not None else arg for i, arg in enumerate(args)]

    def repeats_on(self, device: torch.device) -> bool:
        """Tell whether running it twice on ``device`` gives the same bits."""
        if not self.varies or (device.type == "cpu" and not self.varies_on_cpu):
            return True
        # Under `warn_only` an operator that has no deterministic kernel runs all the same.
        strict = torch.are_deterministic_algorithms_enabled()
        strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
        return strict and self.func.overloadpacket not in _ALWAYS_VARIES


# The noise that comes out in training goes into a memory passed in; position of the flag.
_RRELU = {aten.rrelu_with_noise.default: ((1,), 4)}
# Running statistics: written in training without a word in the schema, and never an input to the outputs then.
_BATCH_NORMS = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
    aten._native_batch_norm_legit.default: ((3, 4), 5),
}
_OVERWRITING = {
    aten.bernoulli_, aten.cauchy_, aten.copy_, aten.exponential_, aten.geometric_, aten.log_normal_, aten.normal_,
    aten.random_, aten.uniform_,
}  # fmt: skip
# Their memory may be filled by a kernel that the dispatcher never sees, so their bytes are not known from the call.
_BLANKS = {
    aten.arange, aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.eye, aten.fill_, aten.full,
    aten.full_like, aten.linspace, aten.logspace, aten.new_empty, aten.new_empty_strided, aten.new_full,
    aten.new_ones, aten.new_zeros, aten.ones, aten.ones_like, aten.scalar_tensor, aten.zero_, aten.zeros,
    aten.zeros_like, aten._efficientzerotensor,
}  # fmt: skip
# State outside of their arguments: dropout descriptors of recurrent kernels.
_STATEFUL = {aten._cudnn_rnn, aten._cudnn_init_dropout_state, aten.miopen_rnn}
# They add in parallel, by atomics or under a lock, so that two runs may differ in the last bit.
_VARIES_ON_CPU = {
    aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put, aten.put, aten.put_,
}  # fmt: skip
# These differ with deterministic algorithms as well, which do not know them: LAPACK's solver rounds by alignment, scans
# add up what other blocks have ready, histograms with weights merge in any order.
_ALWAYS_VARIES = {
    aten.linalg_lstsq, aten.cumprod, aten.cumprod_, aten.logcumsumexp, aten._logcumsumexp, aten.histogram,
    aten._histogramdd_from_bin_cts, aten._histogramdd_from_bin_tensors, aten.max_unpool2d, aten.max_unpool3d,
}  # fmt: skip
_VARIES_ON_GPU = _ALWAYS_VARIES | _VARIES_ON_CPU | {
    aten.bincount, aten.cumsum, aten.cumsum_, aten.histc, aten.index_add, aten.index_add_, aten.index_reduce,
    aten.index_reduce_, aten.kthvalue, aten.median, aten.nll_loss2d_forward, aten.scatter, aten.scatter_,
    aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
}  # fmt: skip
_VARIES_ON_CPU |= _ALWAYS_VARIES - {aten.cumprod, aten.cumprod_, aten.logcumsumexp, aten._logcumsumexp}
# Parts of the names of operators that settings of backends matter to.
_PICK_KERNELS = (
    "mm", "mv", "dot", "addr", "conv", "rnn", "lstm", "gru", "linear", "attention", "norm", "cdist", "linalg", "mkldnn",
)  # fmt: skip
_KNOWN_NAMESPACES = {"aten", "prims"}
_RESTORAGE_NAMES = ("set_", "resize_", "resize_as_")


def _written_arguments(func: OpOverload) -> tuple[int | str, ...]:
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _makes_no_tensor(returned: torch._C.Argument) -> bool:
    return returned.alias_info is not None or "Tensor" not in str(returned.type)


def _kind(func: OpOverload, writes: tuple[int | str, ...]) -> Kind:
    if func.namespace == "aten" and func._schema.name.removeprefix("aten::") in _RESTORAGE_NAMES:
        return Kind.RESTORAGE
    if torch.Tag.inplace_view in func.tags:
        return Kind.RESHAPE_IN_PLACE
    returns = func._schema.returns
    if not writes and all(_makes_no_tensor(value) for value in returns):
        return Kind.LOOK
    return Kind.COMPUTE


def _describe(func: OpOverload) -> Operator:
    writes = _written_arguments(func)
    packet = func.overloadpacket
    training = None
    if func in _BATCH_NORMS or func in _RRELU:
        writes, training = (_BATCH_NORMS | _RRELU)[func]
    is_out = bool(writes) and any(argument.is_out for argument in func._schema.arguments)
    return Operator(
        func=func,
        name=str(func),
        kind=_kind(func, writes),
        writes=writes,
        overwrites=packet in _OVERWRITING or is_out,
        overwrites_in_training=training,
        averages=func in _BATCH_NORMS,
        counted_above=func._schema.is_mutable and counted_above(func),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        replayable=(func.namespace in _KNOWN_NAMESPACES and packet not in _BLANKS and packet not in _STATEFUL),
        varies=packet in _VARIES_ON_GPU,
        varies_on_cpu=packet in _VARIES_ON_CPU,
        snapshots=func in _BATCH_NORMS,
        picks_kernels=any(part in func._schema.name for part in _PICK_KERNELS),
    )


# By id, since the hash of an operator is computed in Python. The facts hold it, so that its id is not given to another.
_known: dict[int, Operator] = {}


def operator(func: OpOverload) -> Operator:
    """Return the facts about ``func``; they are worked out once."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _describe(func)
    return found
