"""How long a step takes.

Time follows the roofline model (Williams et al. 2009): matrix products and attention at a share of the device's dense
peak, everything else at a share of its memory bandwidth, and never faster than Python launches kernels. What engines
send overlaps with the pass it belongs to, whose kernels it slows down; of several GPUs the slowest sets the pace. A
simulation of streams and kernels would know more of single kernels, and as little of what decides: the shares of peaks
that a device reaches, which `toolkit calibrate` measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from toolkit.models.output_heads.head_chunk import head_chunk
from toolkit.planner.generation import generates, kept, prompt_tokens, turns
from toolkit.planner.hardware import End, Rate, between
from toolkit.planner.memory.states import states, weights
from toolkit.planner.memory.teacher import streamed
from toolkit.planner.pipeline import bubble
from toolkit.planner.plan import Disk
from toolkit.planner.speed.communication import HOST, Transfer, inner_link, link_rate
from toolkit.planner.speed.compiled import FUSED, FUSED_ON_CPU, of_adapters
from toolkit.planner.speed.fp8 import in_fp8
from toolkit.planner.trace.types import NOTHING, Amount, Pass, Trace
from toolkit.planner.workload import WIDTH, Load, Workload
from toolkit.recipe import Recipe

HOST_BANDWIDTH, CORE_BANDWIDTH = 100e9, 4e9
"""Bytes/s at which an optimizer runs on a host, in all and per core: 28 bytes per parameter (two moments and the master
read and written, the gradient read) in 0.25 s for a billion, as ZeRO-Offload reports (Ren et al. 2021, table 4)."""
WRITE_BANDWIDTH = {"whole": 2e9, "fsdp": 1.2e9, "zero": 0.4e9}
"""Bytes/s at which one process writes a checkpoint: what libraries do in between limits it, not the drive. DeepSpeed
clones the tensors first. `benchmarks/saves.py` on two idle cores: 2.9 to 3.3e9 (single, DDP; `torch.save` alone 1.3 to
1.8e9), 1.25e9, and 0.41e9 (ZeRO-2 and ZeRO-3)."""
SAVE_SECONDS = {"whole": 0.015, "fsdp": 0.1, "zero": 0.03}
"""What a checkpoint takes however small it is: small files, and processes that agree. Measured there: 0.013 and 0.020,
0.097, 0.023 and 0.042 s."""
REFERENCE = (16384, 4096, 4096)
"""Rows, columns and inner size of the matrix product that `Efficiency.matmul` is stated for: 8B layers, four rows."""
_FOREACH = 18 / 7
"""Passes over memory of torch's AdamW where each operation is a kernel over all tensors, against those of its fused
kernel: `_multi_tensor_adam` reads and writes 18 elements for each parameter, one kernel parameter, gradient and moments
in 7."""
_ON_CPU = {("bitsandbytes", 32): 60, ("bitsandbytes", 8): 140, ("torchao", 8): 250, ("torchao", 4): 385}
"""Bytes that a step moves on a CPU for each element of a moment, by package and bits, where fused kernels are for GPUs
alone and one operation of torch follows the other. Of 135M parameters on two cores of an AMD EPYC it took 0.2 s with
bitsandbytes' Lion, 0.9 with its AdamW in 8 bits, 1.9 and 3.0 with torchao's in 8 and 4; torch's fused AdamW 0.05."""
_OVERLAP = 4
"""How sharply a pass turns from waiting for its kernels to waiting for their launches: of powers the one
that fits eight trainings of 160M to 1.2B parameters on an H100 best, within 9%. The longer of both alone was 16% too
short where both were about as long: then kernels wait for some launches, and launches for some kernels."""
_GUESSED = {"value": 1.0, "low": 0.5, "high": 2.0}
"""Range of what is not measured, as factors of a rate."""

_CONTENTION = {"value": 0.16, "low": 0.0, "high": 0.29}
"""What kernels take longer beside collectives, as a share of the time that these run: both need multiprocessors, memory
bandwidth and power. On four A100 or H100 kernels beside collectives took 18.9% longer in the mean and 40% at most (Lee
et al. 2025, arXiv:2507.03114), which loses 0.189 / 1.189 and 0.4 / 1.4 of that time."""
_SPREAD = {"value": 0.025, "low": 0.0, "high": 0.05}
"""Standard deviation of the speed of GPUs of one kind, of which a step waits for the slowest. Power limits, chips and
cooling make those of a cluster differ by 8%, in some by 22% (Sinha et al. 2022, arXiv:2208.11035). Published runs on
two and four GPUs ask for 0.02 (fms-acceleration, fsdp_qlora) and for more than 0.04 (vectorlm); see docs/plan.md."""

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

OPPOSITE: dict[End, End] = {"value": "value", "low": "high", "high": "low"}
"""The end of a range of rates that gives an end of a range of times."""


def peak_dtype(workload: Workload) -> str:
    """The entry of `Device.flops` that matrix products run at; fp32's where the compute dtype has no units."""
    name, flops = DTYPES[workload.types.compute], workload.hardware.device.flops
    if name == "fp32" and workload.recipe.tf32 and workload.hardware.device.kind == "cuda" and "tf32" in flops:
        return "tf32"
    return name if name in flops else "fp32"


def newton_schulz_flops(recipe: Recipe, trace: Trace) -> float:
    """FLOPs of Muon's iteration, which every rank does for all matrices; 0 for other optimizers.

    Each iteration on a k x n matrix with k <= n forms its Gram matrix, squares that, and multiplies the matrix by both:
    4 k k n + 2 k k k (Jordan et al. 2024, section "Runtime analysis").
    """
    traits = recipe.optimizer.traits
    if traits.family != "muon":
        return 0.0
    matrices = [each for each in trace.tensors if each.trained and traits.updates(each.shape, each.place)]
    once = sum(each.count * (4.0 * k * k * n + 2.0 * k**3) for each in matrices for k, n in [sorted(each.shape)])
    return once * int(recipe.optimizer.args.get("ns_steps", 5))


class Step:
    """One optimizer step at one end of what is expected of the hardware.

    Args:
        load: A micro-batch.
        sent: What is sent, see `communication.transfers`.
        end: `low` is the shortest time.
        experts: See `model_configs.experts`.

    Attributes:
        compute: Seconds of kernels and their launches on a GPU by itself.
        communication: Seconds of it that they do not hide.
        contention: Seconds that kernels take longer beside it, and until the slowest GPU has finished.
        offload: The same, with the optimizer where it runs on the host.
        bubble: Seconds in which it waits for a pipeline to fill and to run empty.
        passing: Seconds of a micro-batch by pass.
        seconds: All together.
    """

    def __init__(
        self,
        workload: Workload,
        load: Load,
        sent: Sequence[Transfer],
        end: End = "value",
        experts: tuple[int, int] = (1, 1),
    ) -> None:
        self._workload, self._sent = workload, sent
        self._recipe, self._layout, self._hardware = workload.recipe, workload.layout, workload.hardware
        self._trace, self._dtype = workload.trace, peak_dtype(workload)
        self._end, self._rates, self._experts = end, OPPOSITE[end], experts
        taught = workload.teacher
        self._teacher = Step(taught, load, (), end, taught.experts) if taught else None
        every, strategy = self._layout.gradient_accumulation_steps, workload.strategy
        on_host = strategy.steps_on_host
        fused = FUSED_ON_CPU if self._hardware.device.kind == "cpu" else FUSED
        left = fused[end] if self._recipe.compiles_layers else 1.0
        again = {"backward": workload.written_again}
        passes = {
            name: self._pass_seconds(self._trace.passes[name], load, left, again.get(name, NOTHING))
            for name in ("forward", "backward")
        }
        self.passing = passes
        update = self._update_seconds(on_host)
        before = workload.passes_before * every * self.evaluation_seconds(load)
        if self._teacher:
            before = every * self._asking_seconds(load)
        self.generation = 0.0
        if generates(self._recipe):
            times, count = turns(workload)
            answers = self._recipe.rollout.num_generations if self._recipe.reinforces else 1
            once = times * self.generation_seconds(count, prompt_tokens(workload, load), answers)
            self.generation = once / self._recipe.policy.num_iterations
        self.compute = before + self.generation + every * sum(passes.values()) + self._accumulation_seconds()
        self.compute += 0.0 if on_host else update
        host = [each for each in sent if each.to_host]
        offload = self._exposed(host, passes)
        # Without NVLink a GPU has one link, for its neighbours and for the host: they take turns.
        shared, taken = (host, offload) if inner_link(self._hardware) == "PCIe" else ([], 0.0)
        self.communication = self._exposed([*shared, *(each for each in sent if not each.to_host)], passes) - taken
        self.offload = offload + (update if on_host else 0.0)
        self.contention = self._contended(passes)
        self.bubble = self._waiting(passes) if workload.place is not None else 0.0
        self.seconds = self.compute + self.communication + self.contention + self.offload + self.bubble

    def evaluation_seconds(self, load: Load) -> float:
        """One batch of held-out rows on each rank."""
        return self._asking_seconds(load) + self._reading_seconds(load)

    def _asking_seconds(self, load: Load) -> float:
        """A pass of the teacher. Layers that wait on the host come on the stream that computes."""
        if self._teacher is None:
            return 0.0
        fetching = streamed(self._workload) / link_rate(HOST, self._hardware, self._rates)
        return fetching + self._teacher.evaluation_seconds(load)

    def _reading_seconds(self, load: Load) -> float:
        """A pass of the model itself, without gradients."""
        computing = self._pass_seconds(self._trace.passes["evaluation"], load)
        sending = [each for each in self._sent if each.during == "forward"]
        return computing + self._pipelined(sum(map(self._transfer_seconds, sending)), computing)

    def generation_seconds(self, count: int, prompt: float, each: int = 1) -> float:
        """So many answers at once, each as long as it may be, to prompts of so many tokens.

        Args:
            each: Answers to the same prompt, which is read once.
        """
        tokens = self._recipe.rollout.max_completion_tokens

        def load(rows: int, length: float) -> Load:
            padded, pairs = rows * length, rows * length**2
            return Load(padded, padded, pairs, pairs, pairs, length, float(rows))

        # Whole weights, which engines that divide them gather, FSDP in the dtype that it computes in.
        gathers = WIDTH[self._workload.types.compute] if self._workload.strategy.name == "fsdp" else None
        read = weights(self._workload, self._trace.tensors, gathers)
        # Answers grow: of what they keep, half is there on average.
        read += kept(self._workload, count) * (prompt + tokens / 2) / (prompt + tokens)
        reading = read / (self._hardware.device.bandwidth * self._of(self._hardware.efficiency(self._dtype).bandwidth))
        asked = self._reading_seconds(load(math.ceil(count / each), prompt))
        return asked + tokens * (self._reading_seconds(load(count, 1.0)) + reading)

    def save_seconds(self, saved: Disk) -> float:
        """A checkpoint, until the process and the machine that write most of it have done so. For what comes after
        that, flushing and hashing, no step waits."""
        strategy = self._recipe.strategy
        form = "zero" if strategy.zero_stage else "fsdp" if strategy.name == "fsdp" else "whole"
        drive = math.inf if self._recipe.checkpoint.in_memory else self._hardware.node.nvme
        seconds = max(saved.writer / WRITE_BANDWIDTH[form], saved.part / drive)
        return (SAVE_SECONDS[form] + seconds) / _GUESSED[self._rates]

    def snapshot_seconds(self, saved: Disk) -> float:
        """A model that may be published, until the first process has it in the host's memory; and until it is written,
        unless that is done behind the steps, as checkpoints then are."""
        seconds = saved.model / min(link_rate(HOST, self._hardware), CORE_BANDWIDTH)
        if self._recipe.checkpoint.staging in ("auto", "none"):
            seconds += saved.model / min(WRITE_BANDWIDTH["whole"], self._hardware.node.nvme)
        return seconds / _GUESSED[self._rates]

    def _pass_seconds(self, each: Pass, load: Load, left: float = 1.0, again: Amount = NOTHING) -> float:
        """The roofline of one pass over a micro-batch, of whose element-wise work within layers a share is left, and
        which moves some bytes beside."""
        device, layers = self._hardware.device, self._trace.layers
        rates, peak = self._hardware.efficiency(self._dtype), device.flops[self._dtype]
        share = load.scored / load.padded
        measured = self._hardware.attention.get(self._dtype, {}).get(load.kernel)
        attention = between(measured, load.stretch) if measured else peak * self._of(rates.attention)

        def of(amount: Amount, pairs: float = load.grid) -> float:
            return amount.of(layers, load.padded, pairs, load.longest, share)

        def within(amount: Amount) -> float:
            return of(amount) - amount.of(0, load.padded, load.grid, load.longest, share)

        moved = of(each.moved) - (1 - left) * within(each.moved) + of(again)
        # Backward, layers that are recomputed have the products of the forward pass, too.
        once = within(self._trace.passes["forward"].matmul)
        rounds = round(within(each.matmul) / once) if once else 1
        backward = each is self._trace.passes["backward"]
        if left < 1 and device.kind != "cpu":
            moved += of_adapters(self._trace, load.padded, WIDTH[self._workload.types.compute], rounds + backward)
        low = in_fp8(self._workload, load, self._experts)
        product = (1 - low.share) / (peak * self._of(rates.matmul_in(self._dtype)))
        if low.share:
            product += low.share / (device.flops["fp8"] * self._of(self._hardware.efficiency("fp8").matmul_in("fp8")))
            # Gradients of inputs and, where weights are trained, of these.
            forward = max(0, rounds - (1 if self._recipe.method.name == "lora" else 2)) if backward else 1
            moved += left * low.moved(load.padded, rounds, forward, backward, self._trace.origin == "traced")
        busy = (
            of(each.matmul) * product / self._products(load.padded)
            + of(each.attention, load.attended) / attention
            + moved / (device.bandwidth * self._of(rates.bandwidth))
        )
        # Seconds are low where rates are high. A GPU computes while Python launches; a CPU does both itself.
        launching = of(each.launches) * getattr(rates.launch_seconds, self._end)
        return busy + launching if device.kind == "cpu" else _overlapped(busy, launching)

    def _products(self, rows: float) -> float:
        """How fast this model's matrix products are, relative to `REFERENCE`, for so many rows.

        Tiles that are not full, waves that do not fill the device and the way into and out of a product cost the more
        the shorter its sides are; d / (d + half) for each of them fits published steps of 256 to 8,192 rows.
        """
        rate = self._hardware.efficiency(self._dtype).half
        if rate is None:
            return 1.0
        half, (count, active) = getattr(rate, self._end), self._experts
        chunk = head_chunk(self._trace.vocabulary, WIDTH[self._workload.types.compute], self._workload.on_cpu)
        own_head = bool(self._trace.own_head)
        work = seconds = 0.0
        for each in self._trace.tensors:
            lookup = each.place == "embeddings" and own_head
            if len(each.shape) < 2 or not each.numel or each.kind == "adapter" or lookup:
                continue
            share = active / count if each.shape[0] == count > 1 else 1.0
            part = min(rows, chunk) if each.place in ("embeddings", "head") else rows * share
            amount = each.numel * each.count * share
            work += amount
            seconds += amount / product_speed(part, *each.shape[-2:], half=half)
        return work / seconds / product_speed(*REFERENCE, half=half) if seconds else 1.0

    def _update_seconds(self, on_host: bool) -> float:
        """Clipping and the optimizer, which only move bytes, but for Muon's products of matrices.

        Masters and moments are read and written; gradients are read by the norm and by the optimizer, and read and
        written by clipping; ZeRO writes the parameters as copies.
        """
        workload, device = self._workload, self._hardware.device
        types, gradient = workload.types, WIDTH[workload.types.reduce]
        each = 2 * WIDTH[types.master] + gradient * (4 if self._recipe.optimizer.max_grad_norm else 1)
        each += WIDTH[types.local] if workload.strategy.zero_stage else 0
        moved = workload.owned * each + 2 * states(workload).optimizer
        if self._recipe.optimizer.traits.foreach:
            update = 2 * WIDTH[types.master] + gradient
            moved += (_FOREACH - 1) * (workload.owned * update + 2 * states(workload).optimizer)
        if on_host and device.kind != "cpu":
            hardware = self._hardware
            host = min(HOST_BANDWIDTH, CORE_BANDWIDTH * hardware.node.cores) / hardware.devices_per_node
            return moved / (host * _GUESSED[self._rates])
        moving = moved / (device.bandwidth * self._of(device.efficiency.optimizer))
        if device.kind == "cpu":
            traits = self._recipe.optimizer.traits
            by_torch = _ON_CPU.get((traits.module, traits.bits), 0) * traits.moments * workload.owned
            moving += by_torch / (device.bandwidth * self._of(device.efficiency.bandwidth))
        name = "bf16" if "bf16" in device.flops else "fp32"
        return moving + newton_schulz_flops(self._recipe, self._trace) / (
            device.flops[name] * self._of(self._hardware.efficiency(name).matmul_in(name))
        )

    def _accumulation_seconds(self) -> float:
        """Sums of gradients over micro-batches: each reads two and writes one."""
        workload, device = self._workload, self._hardware.device
        summed = workload.owned if workload.strategy.sync_each_batch else workload.trained
        moved = 3 * WIDTH[workload.types.reduce] * summed * (self._layout.gradient_accumulation_steps - 1)
        return moved / (device.bandwidth * self._of(device.efficiency.bandwidth))

    def _exposed(self, sent: Sequence[Transfer], passes: Mapping[str, float]) -> float:
        """Seconds of transfers that computation does not hide."""
        seconds = sum(each.times * self._transfer_seconds(each) for each in sent if not each.hidden)
        for name, computing in passes.items():
            of_pass = [each for each in sent if each.hidden and each.during == name]
            in_each = sum(self._transfer_seconds(each) for each in of_pass if each.times > 1)
            in_last = sum(self._transfer_seconds(each) for each in of_pass)
            others = self._layout.gradient_accumulation_steps - 1
            seconds += others * self._pipelined(in_each, computing) + self._pipelined(in_last, computing)
        return seconds

    def _pipelined(self, sending: float, computing: float) -> float:
        """What sending beside computing takes longer than computing alone.

        Both go layer by layer, one ahead of the other: the first layer's transfer hides behind nothing, each other one
        behind one layer's computation (Li et al. 2020, section 3.2.3, for the buckets of DDP; Zhao et al. 2023, section
        3.3, for the prefetching of FSDP).
        """
        layers = max(1, self._trace.layers)
        return sending / layers + (layers - 1) / layers * max(0.0, sending - computing)

    def _waiting(self, passes: Mapping[str, float]) -> float:
        """Bubble of a pipeline, all of whose processes take as long as this one."""
        hop = {each.during: self._transfer_seconds(each) for each in self._sent if each.times > 1 and not each.hidden}
        forward, backward = (passes[name] + hop.get(name, 0.0) for name in ("forward", "backward"))
        tensors = [each for each in self._trace.tensors if each.place == "layer"]
        trained = sum(each.numel * each.count for each in tensors if each.trained)
        # As long as the forward pass, of what is trained (Kaplan et al. 2020, section 2.1).
        weights = passes["forward"] * trained / max(1, sum(each.numel * each.count for each in tensors))
        every = self._layout.gradient_accumulation_steps
        return bubble(self._recipe.parallel, every, forward, max(0.0, backward - weights), weights)

    def _contended(self, passes: Mapping[str, float]) -> float:
        """Seconds that passes take longer than on one GPU: beside collectives, and until the slowest has finished.

        Of n normally distributed speeds the slowest is expected at the quantile of (n - 3/8) / (n + 1/4) (Blom 1958).
        What computing does not hide is communication, and not counted again.
        """
        devices, every = self._hardware.devices, self._layout.gradient_accumulation_steps
        if devices == 1 or self._hardware.device.kind == "cpu":
            return 0.0
        slowest = _SPREAD[self._end] * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
        seconds = slowest * every * sum(passes.values())
        for name, computing in passes.items():
            beside = [each for each in self._sent if each.hidden and each.during == name and not each.to_host]
            in_each = sum(self._transfer_seconds(each) for each in beside if each.times > 1)
            in_last = sum(self._transfer_seconds(each) for each in beside)
            for times, sending in ((every - 1, in_each), (1, in_last)):
                seconds += times * max(0.0, _CONTENTION[self._end] * sending - max(0.0, sending - computing))
        return seconds

    def _transfer_seconds(self, each: Transfer) -> float:
        """One transfer; its links work at the same time."""
        return each.latency + max(
            size / link_rate(name, self._hardware, self._rates) for name, size in each.sent.items()
        )

    def _of(self, rate: Rate) -> float:
        return getattr(rate, self._rates)


def _overlapped(kernels: float, launches: float) -> float:
    """Seconds of a pass whose kernels run while the next ones are launched."""
    return (kernels**_OVERLAP + launches**_OVERLAP) ** (1 / _OVERLAP)


def product_speed(*sides: float, half: float) -> float:
    """Speed of a matrix product, as a share of that of an infinitely large one."""
    return math.prod(side / (side + half) for side in sides)
