"""Traces like those of real training steps: the ops of the model, sizes in bytes, times from a roofline.

The machine is one accelerator with 400 TFLOP/s of matrix products and 4 TB/s of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scrimp._trace import Event, Op, Release, Resident, Run, Trace, Unpack, Value

_FLOPS = 400e12
_BYTES = 4e12
_LAUNCH = 3e-6


@dataclass
class Builder:
    """Records ops as autograd would see them; :meth:`trace` adds the backward pass in reverse."""

    sizes: list[int] = field(default_factory=list)
    made_by: list[int | None] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    overwritten: dict[int, int] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)
    module: str = ""

    def source(self, nbytes: int) -> int:
        """Something from before the step."""
        self.sizes.append(nbytes)
        self.made_by.append(None)
        self.outputs.append(0)
        self.last_use.append(0)
        return len(self.sizes) - 1

    def op(
        self,
        name: str,
        reads: list[int],
        makes: list[int],
        save: list[int] | None = None,
        save_made: tuple[int, ...] = (),
        flops: float = 0.0,
        weight: int = 0,
        replayable: bool = True,
        in_place: bool = False,
    ) -> list[int]:
        """An op of the forward pass; returns the values that it makes."""
        number, first = len(self.ops), len(self.sizes)
        for output, nbytes in enumerate(makes):
            self.sizes.append(nbytes)
            self.made_by.append(number)
            self.outputs.append(output)
            self.last_use.append(number)
        if in_place:
            self.overwritten[first] = reads[0]
        saves = [*(save or ()), *(first + output for output in save_made)]
        for value in (*reads, *saves):
            self.last_use[value] = number
        moved = sum(self.sizes[value] for value in reads) + sum(makes) + weight
        seconds = max(flops / _FLOPS, moved / _BYTES) + _LAUNCH
        self.ops.append(Op(name, self.module, tuple(reads), tuple(saves), seconds, 0, replayable))
        self.weights.append(weight)
        return list(range(first, first + len(makes)))

    def trace(self, resident: int = 0) -> Trace:
        """The forward pass, and its backward in reverse."""
        values = tuple(
            Value(
                nbytes,
                op,
                output,
                self.overwritten.get(number),
                None if op is None else self.last_use[number],
            )
            for number, (nbytes, op, output) in enumerate(zip(self.sizes, self.made_by, self.outputs, strict=True))
        )
        made: list[list[int]] = [[] for _ in self.ops]
        for number, op in enumerate(self.made_by):
            if op is not None:
                made[op].append(number)
        events: list[Event] = []
        alive = {made[-1][0]}  # whose gradients are there
        for number in range(len(self.ops) - 1, -1, -1):
            op = self.ops[number]
            events.extend(Unpack(value) for value in op.saves)
            grads_in = [value for value in op.reads if self.made_by[value] is not None and value not in alive]
            fresh = sum(self.sizes[value] for value in grads_in) + self.weights[number]
            done = sum(self.sizes[value] for value in made[number] if value in alive)
            alive |= set(grads_in)
            alive -= set(made[number])
            events.append(Run(f"{op.name}_backward", op.module, 2 * op.seconds, max(fresh, 0), fresh - done))
            events.extend(Release(value) for value in op.saves)
        return Trace(values, tuple(self.ops), tuple(events), (Resident("parameters", resident),), 50e9, 50e9)


def norm(build: Builder, x: int, rows: int) -> int:
    """A norm that saves its input and its statistics."""
    return build.op("norm", [x], [build.sizes[x], 4 * rows], save=[x], save_made=(1,))[0]


def linear(build: Builder, x: int, rows: int, into: int, out: int) -> int:
    """A matrix product that saves its input."""
    return build.op("mm", [x], [2 * rows * out], save=[x], flops=2.0 * rows * into * out, weight=2 * into * out)[0]


def gpt(
    layers: int = 12,
    d: int = 2048,
    batch: int = 4,
    length: int = 2048,
    vocabulary: int = 32000,
    dropout: bool = True,
) -> Trace:
    """A pre-norm transformer with fused attention, dropout, GELU and a softmax loss, in bf16."""
    build = Builder()
    rows = batch * length
    tokens = build.source(8 * rows)
    build.module = "embedding"
    x = build.op("embedding", [tokens], [2 * rows * d], save=[tokens])[0]
    for layer in range(layers):
        build.module = f"layers.{layer}"
        h = norm(build, x, rows)
        qkv = linear(build, h, rows, d, 3 * d)
        o, _ = build.op(
            "sdpa",
            [qkv],
            [2 * rows * d, 4 * rows * d // 128],
            save=[qkv],
            save_made=(0, 1),
            flops=4.0 * batch * length**2 * d / 2,
        )
        y = linear(build, o, rows, d, d)
        if dropout:
            y = build.op("dropout", [y], [2 * rows * d, rows * d], save_made=(1,))[0]
        x = build.op("add", [x, y], [2 * rows * d])[0]
        h = norm(build, x, rows)
        f = linear(build, h, rows, d, 4 * d)
        g = build.op("gelu", [f], [8 * rows * d], save=[f])[0]
        y = linear(build, g, rows, 4 * d, d)
        if dropout:
            y = build.op("dropout", [y], [2 * rows * d, rows * d], save_made=(1,))[0]
        x = build.op("add", [x, y], [2 * rows * d])[0]
    build.module = "head"
    logits = linear(build, norm(build, x, rows), rows, d, vocabulary)
    wide = build.op("float", [logits], [4 * rows * vocabulary])[0]
    soft = build.op("log_softmax", [wide], [4 * rows * vocabulary], save_made=(0,))[0]
    build.op("nll", [soft, tokens], [4], save=[tokens])
    return build.trace(resident=layers * 12 * d * d * 2)


def resnet(blocks: int = 16, batch: int = 64) -> Trace:
    """Convolutions, batch norm and in-place ReLU with residuals; the picture shrinks as channels grow."""
    build = Builder()
    size, channels = 56, 64
    x = build.source(2 * batch * 3 * 224 * 224)
    x = conv(build, x, batch, size, 3, channels, 7)
    for block in range(blocks):
        build.module = f"blocks.{block}"
        if block and block % max(blocks // 4, 1) == 0:
            size, channels = max(size // 2, 4), channels * 2
            x = conv(build, x, batch, size, channels // 2, channels, 1)
        y = conv_norm_relu(build, x, batch, size, channels)
        y = conv_norm_relu(build, y, batch, size, channels)
        y = batch_norm(build, conv(build, y, batch, size, channels, channels, 1), channels)
        total = build.op("add_", [y, x], [build.sizes[y]], in_place=False)[0]
        x = build.op("relu_", [total], [build.sizes[total]], save_made=(0,), in_place=True)[0]
    build.op("loss", [x], [4], save=[x])
    return build.trace(resident=100 << 20)


def conv(build: Builder, x: int, batch: int, size: int, into: int, out: int, kernel: int) -> int:
    """A convolution that saves its input."""
    flops = 2.0 * batch * size * size * into * out * kernel * kernel
    return build.op(
        "conv", [x], [2 * batch * out * size * size], save=[x], flops=flops, weight=2 * into * out * kernel**2
    )[0]


def batch_norm(build: Builder, x: int, channels: int) -> int:
    """A norm that saves its input and two small statistics."""
    return build.op("batch_norm", [x], [build.sizes[x], 4 * channels, 4 * channels], save=[x], save_made=(1, 2))[0]


def conv_norm_relu(build: Builder, x: int, batch: int, size: int, channels: int, into: int | None = None) -> int:
    """Convolution, batch norm and in-place ReLU."""
    y = batch_norm(build, conv(build, x, batch, size, into or channels, channels, 3), channels)
    return build.op("relu_", [y], [build.sizes[y]], save_made=(0,), in_place=True)[0]


def unet(depth: int = 4, batch: int = 8, size: int = 256, channels: int = 32) -> Trace:
    """Down and up with skip connections that live across the middle."""
    build = Builder()
    x = build.source(2 * batch * 3 * size * size)
    skips = []
    into = 3
    for level in range(depth):
        build.module = f"down.{level}"
        x = conv_norm_relu(build, x, batch, size, channels, into)
        x = conv_norm_relu(build, x, batch, size, channels)
        skips.append((x, size, channels))
        size, into, channels = size // 2, channels, channels * 2
        x = build.op(
            "max_pool",
            [x],
            [2 * batch * into * size * size, 8 * batch * into * size * size],
            save=[x],
            save_made=(1,),
        )[0]
    build.module = "middle"
    x = conv_norm_relu(build, x, batch, size, channels, into)
    for level, (skip, size, out) in enumerate(reversed(skips)):
        build.module = f"up.{level}"
        x = build.op("upsample", [x], [2 * batch * channels * size * size])[0]
        x = build.op("cat", [x, skip], [build.sizes[x] + build.sizes[skip]])[0]
        x = conv_norm_relu(build, x, batch, size, out, channels + out)
        x = conv_norm_relu(build, x, batch, size, out)
        channels = out
    build.op("loss", [x], [4], save=[x])
    return build.trace(resident=50 << 20)


def chain(length: int, nbytes: int = 1 << 20, seconds: float = 1e-3) -> Trace:
    """A loop of equal steps, each saving its input: where Revolve's schedules are optimal."""
    build = Builder()
    x = build.op("start", [], [nbytes])[0]
    for step in range(length):
        build.module = f"step.{step}"
        x = build.op("step", [x], [nbytes], save=[x], flops=seconds * _FLOPS)[0]
    return build.trace()
