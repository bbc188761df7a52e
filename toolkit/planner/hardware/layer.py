"""What a CPU reaches in a model, by dtype: real layers with adapters, forward and backward, and their parts alone.

A plan adds up products, attention, element-wise work and launches, each at a rate of its own. Kernels alone are faster
than in a model, where caches are cold, every operation starts threads, and views, autocast and autograd cost time for
which no kernel is counted: of a CPU with AMX small products alone ran 1.7 times as fast. So what products and attention
take is read off a profile of the layers, and what is left of their time is what all else takes: of narrow ones at 4
tokens launches, of real ones at as many as a micro-batch has the bytes that they move. Work is counted as in a trace.
The alternative, the recipe's own model, would need its weights.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from toolkit.models.attention.attention_kernels import varlen_attention
from toolkit.models.lora_products import add_by_product
from toolkit.planner.hardware.specs import DOCUMENTS
from toolkit.planner.speed.step import REFERENCE, product_speed
from toolkit.planner.trace.tracker import Tracker

Work = Callable[[], object]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROWS, _FEW = (4, 160), (1, 4)
"""Rows and tokens of each: of a micro-batch, and of what takes only launches."""
_LENGTHS = (32, 64, 128, 256, 512, 1024)
"""Lengths of rows for which attention is measured; the longest have a batch of one."""
_MODEL = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
"""The layers of SmolLM2-135M, the smallest model that is trained on CPUs."""
_KERNELS: dict[str, Callable[..., Any]] = {
    "eager": eager_attention_forward,
    "sdpa": sdpa_attention_forward,
    DOCUMENTS: varlen_attention,
}
_NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Layers in which only launches take time."""
_WIDE = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 24, "num_key_value_heads": 8}
"""Layers whose products are ten times as large, to tell how the rate of products grows with their size."""
_EMULATED = 0.1
"""A dtype whose products are slower than this share of fp32's has no instructions, and would take minutes."""


def measure(dtypes: Sequence[str], seconds: float, loaded: bool) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The figures of `Calibration.layers` by dtype, and why others are missing.

    Beside other programs threads wait for each other, and no clock says for how long: one is measured then, by the
    processor's time, and all are taken to be as fast together.

    Args:
        dtypes: With fp32 first, to which the others are compared.
        seconds: About how long one may take, beside imports.
        loaded: Whether other programs run.
    """
    figures: dict[str, dict[str, Any]] = {}
    skipped = {}
    probes: list[float] = []
    all_threads = torch.get_num_threads()
    used = 1 if loaded else all_threads
    with torch.random.fork_rng(devices=[]), threads(used):
        for dtype in dtypes:
            each = _Layers(_DTYPES[dtype], seconds / (4 + len(_KERNELS) * len(_LENGTHS)), all_threads / used)
            probes.append(each.probe())
            if probes[-1] < _EMULATED * probes[0]:
                skipped[f"layers, {dtype}"] = "this CPU has no instructions for it"
            else:
                figures[dtype] = each.measure()
    return figures, skipped


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Has torch use so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layers:
    """The measurements in one dtype.

    Args:
        kind: The dtype; frozen weights have it, adapters are fp32 under autocast.
        seconds: For each measurement.
        scale: How many times as fast the machine is as the threads that are measured.
    """

    def __init__(self, kind: torch.dtype, seconds: float, scale: float) -> None:
        self.kind, self.seconds, self.scale = kind, seconds, scale

    def probe(self) -> float:
        """FLOP/s of a product that takes little time even where the dtype is emulated."""
        left, right = (torch.ones(size, 256, dtype=self.kind) for size in (64, 256))
        return 2.0 * 64 * 256 * 256 / self._seconds(lambda: left @ right)

    def measure(self) -> dict[str, Any]:
        """One entry of `Calibration.layers`."""
        narrow, few = self._layers(_NARROW, _FEW)
        with threads(1):  # Nothing in it is worth sharing.
            launch = self._seconds(narrow) / few["launches"]
        layers, work = self._layers(_MODEL, _ROWS)
        # The profiler takes time of its own beside them.
        took, (_, products, attending) = self._seconds(layers), _profiled(layers)
        wide, wide_work = self._layers(_WIDE, _ROWS, count=1)
        wide_took, wide_products, _ = _profiled(wide)
        half, matmul = _size(work["matmul"] / (products * took), wide_work["matmul"] / (wide_products * wide_took))
        attention = {name: {length: self._attention(name, length) for length in _LENGTHS} for name in _KERNELS}
        # What the layers take beside these. Nothing, or nearly all, is left of no model.
        left = (1 - products - attending) * took - work["launches"] * launch
        left = min(max(left, 0.05 * took), 0.8 * took)
        return {
            "matmul": self.scale * matmul,
            "half": half,
            "bandwidth": self.scale * work["moved"] / left,
            "launch_seconds": launch,
            "attention": {
                name: {length: self.scale * rate for length, rate in rates.items()} for name, rates in attention.items()
            },
        }

    def _layers(self, shape: dict[str, int], rows: tuple[int, int], count: int = 2) -> tuple[Work, dict[str, float]]:
        """So many layers forward and backward, which ran once, and the work of that."""
        settings: dict[str, Any] = {**shape, "attn_implementation": "sdpa"}
        config = LlamaConfig(**settings, num_hidden_layers=count, vocab_size=8)
        model: Any = LlamaModel(config)
        model = model.requires_grad_(False).to(self.kind)
        model = inject_adapter_in_model(LoraConfig(r=16, target_modules=list(_linear(shape))), model).train()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        # As `models.adapters` has them.
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # type: ignore[attr-defined]
        add_by_product(model)
        # Hidden states have the dtype of the embeddings, which is that of the frozen weights.
        inputs = torch.randn(*rows, shape["hidden_size"], dtype=self.kind, requires_grad=True)
        upstream = torch.ones(inputs.shape)

        def work() -> None:
            model.zero_grad()
            with torch.autocast("cpu", self.kind, enabled=self.kind != torch.float32):
                out = model(inputs_embeds=inputs, use_cache=False).last_hidden_state
            out.float().backward(upstream)

        tracker = Tracker([*model.parameters(), *model.buffers(), inputs, upstream], model.parameters())
        with tracker:
            work()
        return work, tracker.timeline.work

    def _attention(self, name: str, length: int) -> float:
        """FLOP/s of attention over padded rows, or over documents, of whose pairs half count; forward and backward, two
        products in each for one forward."""
        heads, shared, size = _MODEL["num_attention_heads"], _MODEL["num_key_value_heads"], 64
        batch = max(1, 512 // length)
        module: Any = torch.nn.Module().train()
        module.num_key_value_groups, module.is_causal = heads // shared, True
        rows, tokens = (1, batch * length) if name == DOCUMENTS else (batch, length)
        inputs = [
            torch.randn(rows, count, tokens, size).to(self.kind).requires_grad_() for count in (heads, shared, shared)
        ]
        allowed = torch.ones(batch, 1, length, length, dtype=torch.bool).tril()
        boundaries = torch.arange(0, batch * length + 1, length)
        also: dict[str, Any] = {"attention_mask": allowed}
        if name == "eager":
            hidden = torch.zeros(allowed.shape, dtype=self.kind).masked_fill(~allowed, torch.finfo(self.kind).min)
            also = {"attention_mask": hidden}
        elif name == DOCUMENTS:
            also = {"attention_mask": None, "cu_seq_lens_q": boundaries, "max_length_q": length}

        def work() -> None:
            out = _KERNELS[name](module, *inputs, scaling=size**-0.5, dropout=0.0, **also)[0]
            torch.autograd.grad(out.sum(), inputs)

        pairs = batch * length**2 / (2 if name == DOCUMENTS else 1)
        return 3 * 4.0 * heads * pairs * size / self._seconds(work)

    def _seconds(self, work: Work) -> float:
        """Seconds of one of at least three repetitions after one to warm up; of one thread its processor's.

        Their mean: what delays some of them, a training's steps meet as often.
        """
        clock = _clock()
        work()
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
            started = clock()
            work()
            times.append(clock() - started)
        return statistics.fmean(times)


def _profiled(layers: Work) -> tuple[float, float, float]:
    """Seconds of one of three runs, by `_clock`, and the shares of products and of attention in it; of layers that have
    run before."""
    runs, clock = 3, _clock()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        started, began = time.perf_counter(), clock()
        for _ in range(runs):
            layers()
        whole, took = time.perf_counter() - started, clock() - began
    own = {each.key: each.self_cpu_time_total / 1e6 for each in seen.key_averages()}
    products = own.get("aten::mm", 0.0) + own.get("aten::addmm", 0.0)
    attending = sum(seconds for name, seconds in own.items() if "scaled_dot_product" in name)
    return took / runs, products / whole, attending / whole


def _clock() -> Callable[[], float]:
    """A clock in seconds: processor time if there is one thread, as it may wait for other programs."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _linear(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's weights."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        **dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden)),
        **dict.fromkeys(("k_proj", "v_proj"), (narrow, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
        "down_proj": (hidden, inner),
    }


def _size(products: float, wide: float) -> tuple[float, float]:
    """`Efficiency.half`, and FLOP/s of `REFERENCE`, from those of the products of layers and of wide ones."""

    def mean(shape: dict[str, int], half: float) -> float:
        shapes = list(_linear(shape).values())
        seconds = sum(math.prod(each) / product_speed(math.prod(_ROWS), *each, half=half) for each in shapes)
        return sum(map(math.prod, shapes)) / seconds

    low, high = 1e-3, 1e3
    for _ in range(40):
        half = math.sqrt(low * high)
        low, high = (low, half) if mean(_MODEL, half) / mean(_WIDE, half) < products / wide else (half, high)
    # Of the two, so that neither narrow models nor wide ones are planned by the other's figure alone.
    rate = math.sqrt(products / mean(_MODEL, half) * wide / mean(_WIDE, half))
    return half, rate * product_speed(*REFERENCE, half=half)
