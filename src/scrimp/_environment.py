"""Process-wide settings that change what a kernel computes.

A replay runs later than the operator that it repeats, perhaps under other settings. They are put back for its duration,
so that its bits cannot depend on when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

Environment = tuple[Any, ...]


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _fp32_precision(backend: str, operation: str) -> _Setting:
    # The public properties raise when a program mixes the old and the new way to set them; these do not.
    return _Setting(
        partial(torch._C._get_fp32_precision_getter, backend, operation),
        partial(torch._C._set_fp32_precision_setter, backend, operation),
    )


def _reduced_precision(dtype: str) -> _Setting:
    # With the private functions, which give all flags at once, reading takes a tenth of the time.
    write = getattr(torch._C, f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    return _Setting(
        getattr(torch._C, f"_get_cublas_allow_{dtype}_reduced_precision_reduction"),
        lambda flags: write(*flags) if isinstance(flags, tuple) else write(flags),
    )


_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    _Setting(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    _Setting(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    _Setting(torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    _reduced_precision("fp16"),
    _reduced_precision("bf16"),
    _Setting(torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation),
    *(_fp32_precision("cuda", operation) for operation in ("matmul", "conv", "rnn")),
    *(_fp32_precision("mkldnn", operation) for operation in ("matmul", "conv", "rnn")),
)
_READ = tuple(setting.read for setting in _SETTINGS)


def current() -> Environment:
    """Return the settings in force now."""
    return tuple([read() for read in _READ])


def changed_since(environment: Environment, picks_kernels: bool) -> bool:
    """Tell whether settings differ from ``environment``.

    It is asked before every operator. All of them matter only to an operator that picks among kernels by them, such as
    a matrix product or a convolution; for others it looks at those that matter to any.
    """
    if picks_kernels:
        return current() != environment
    return (
        torch.get_default_dtype() is not environment[0]
        or torch._C._get_deterministic_algorithms() is not (environment[1] > 0)
        or torch.get_num_threads() != environment[2]
    )


@contextmanager
def restored(environment: Environment) -> Iterator[None]:
    """Put ``environment`` in force inside the block, and what was in force before back after it."""
    before = current()
    changed = [i for i, value in enumerate(before) if value != environment[i]]
    for i in changed:
        _SETTINGS[i].write(environment[i])
    try:
        yield
    finally:
        for i in changed:
            _SETTINGS[i].write(before[i])
