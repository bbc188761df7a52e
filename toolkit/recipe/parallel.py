"""The sections of a recipe that say how training is divided over processes, and what is kept off their devices."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from toolkit.recipe.base import Place, PositiveInt, Section

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


class Strategy(Section):
    """How training is distributed over devices, and what is offloaded from them."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[(*STRATEGIES, "auto")] = "ddp"  # type: ignore[valid-type]
    """`ddp` replicates the model on every process (one process is plain training), `single` requires one process.
    DeepSpeed `zero1` shards optimizer state, `zero2` gradients too, `zero3` parameters too. `fsdp` is PyTorch's FSDP2.
    `auto` takes the fastest that fits, with offloading only if nothing else fits; if still nothing does, and the
    micro-batch and activation checkpointing are `auto` too, it also tries what `parallel` can divide. Other keys of
    this section keep their values, and only strategies that read them are tried."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer state and fp32 master weights are kept and updated under ZeRO: on the device (`none`), in host
    memory (`cpu`), or on a drive (`nvme`, ZeRO-3 only)."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters are kept while they are not in use: on the device (`none`), in host memory (`cpu`: ZeRO-3, and
    FSDP, which keeps gradients and optimizer state there too), or on a drive (`nvme`: ZeRO-3)."""
    nvme_path: Place | None = None
    """Folder on a local NVMe drive for what is offloaded to `nvme`; each process makes its own folder in it."""
    pin_memory: bool = True
    """Whether offloaded data is in page-locked host memory: copies are faster, but nothing else can use that memory."""
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which ZeRO and FSDP sum gradients over processes and micro-batches. `auto`: fp32, or bf16 under
    `precision: pure_bf16` and `pure_fp8`."""
    overlap_comm: bool = True
    """Whether ZeRO reduces gradients while the backward pass still runs, at the cost of a second bucket of memory."""
    reduce_bucket_size: PositiveInt = 50_000_000
    """Number of gradient elements that ZeRO reduces at a time. A bucket takes this many times the bytes of
    `reduce_dtype`."""
    allgather_bucket_size: PositiveInt = 50_000_000
    """Number of updated parameter elements that ZeRO-1 and ZeRO-2 gather at a time."""
    prefetch_bucket_size: Annotated[int, Field(ge=0)] = 50_000_000
    """Number of parameter elements that ZeRO-3 gathers ahead of their use."""
    param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """Parameters of fewer elements than this (norms, biases) stay whole on every process under ZeRO-3."""
    max_live_parameters: PositiveInt = 1_000_000_000
    """Most elements of gathered parameters that ZeRO-3 keeps on a device at a time."""
    max_reuse_distance: Annotated[int, Field(ge=0)] = 1_000_000_000
    """ZeRO-3 does not release a parameter that is used again within this many elements."""
    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """What FSDP shards: `full_shard` parameters, gradients and optimizer state; `shard_grad_op` the same, but gathered
    parameters are kept until the backward pass; `hybrid_shard` shards within a node and replicates across nodes."""
    reshard_after_forward: bool | None = None
    """Whether FSDP releases gathered parameters between forward and backward pass; by default as `sharding` says."""
    sync_each_batch: bool = False
    """Whether FSDP reduces gradients after every micro-batch and keeps its shard of their sum, as accelerate's
    `sync_each_batch` does. By default it reduces once in a step, and holds all gradients whole until then."""
    wrap_classes: list[str] = []
    """Classes of layers that FSDP gathers as a unit, e.g. `[LlamaDecoderLayer]`; by default the model's own."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """How FSDP writes checkpoints. `sharded` ones are fast, `full` ones are gathered on the first process. The final
    model is always gathered."""
    cpu_ram_efficient_loading: bool = True
    """Under FSDP only the first process of a run reads the weights into host memory; the others receive their
    shards. Each reads them itself where the base is quantized or `parallel.tensor` divides it."""

    @property
    def zero_stage(self) -> int:
        """1 to 3; 0 without DeepSpeed."""
        assert self.name != "auto", "the strategy is not decided yet"
        return int(self.name[-1]) if self.name.startswith("zero") else 0

    @property
    def shards_parameters(self) -> bool:
        """Whether no process holds all parameters, so that every forward pass needs all processes."""
        assert self.name != "auto", "the strategy is not decided yet"
        return self.name in ("zero3", "fsdp")

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to a drive."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def steps_on_host(self) -> bool:
        """Whether the host's processors update the parameters, as they do wherever optimizer state is offloaded: FSDP
        keeps it with the parameters."""
        return self.offload_optimizer != "none" or (self.name == "fsdp" and self.offload_param != "none")


class Parallel(Section):
    """How processes form groups that divide rows, layers or experts. The groups themselves are data parallel, and
    `strategy` says how the model is spread over all processes."""

    sequence: PositiveInt = 1
    """Number of processes that share each row: each computes some of its tokens, and in attention some of the heads for
    all tokens (Ulysses, Jacobs et al. 2023, arXiv:2309.14509). Activations and logits per process shrink accordingly.
    Must divide the number of attention heads; needs an attention backend that takes document boundaries."""
    context: PositiveInt = 1
    """Number of processes that share each row, as with `sequence`, but in attention each keeps the queries of its
    tokens and gathers the keys and values of the whole row (Llama Team 2024, arXiv:2407.21783, section 3.3.2). It need
    not divide the number of heads, and sends less for models with few key/value heads."""
    tensor: PositiveInt = 1
    """Number of processes that divide each layer: each has some of the heads and some of the inner width, with their
    weights, gradients and optimizer state (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053). They read the
    same rows. Must divide the number of key/value heads and the inner width; works under `ddp`, `zero1`, `zero2` and
    `fsdp`, and with `sequence` or `context`, whose processes then share the remaining heads."""
    expert: PositiveInt = 1
    """Number of processes that divide the experts of each layer of a mixture: each has some of them, with their
    weights, gradients and optimizer state, and receives the tokens routed to them from the other processes (expert
    parallelism, Lepikhin et al. 2020, arXiv:2006.16668). They read different rows. Must divide the number of experts;
    works under `ddp`."""
    pipeline: PositiveInt = 1
    """Number of processes over which the layers are spread in consecutive runs (pipeline parallelism, Huang et al.
    2019, arXiv:1811.06965). Hidden states pass from each process to the next, one micro-batch after another, so little
    is sent, and only between neighbours, which suits slow links between nodes. At most the number of layers; works
    under `ddp`."""
    schedule: Schedule = "1f1b"
    """Order in which a pipeline's processes compute the micro-batches of a step. `gpipe`: all forward passes, then all
    backward passes. `1f1b`: each backward pass as soon as possible, which keeps fewer micro-batches in memory
    (Narayanan et al. 2019). `interleaved_1f1b`: two runs of layers per process, which halves the idle time (Narayanan
    et al. 2021, arXiv:2104.04473). `zero_bubble`: two runs as well, with the gradients of weights computed in the idle
    time (ZB-V, Qi et al. 2023, arXiv:2401.10241). All give the same results."""

    @property
    def stages(self) -> int:
        """Runs of layers of the whole pipeline."""
        return self.pipeline * (1 if self.schedule in ("gpipe", "1f1b") else 2) if self.pipeline > 1 else 1

    @property
    def sharing(self) -> int:
        """Processes that share each row, by `sequence` or `context`."""
        return self.sequence * self.context

    @property
    def shares_by(self) -> str:
        """The key by which processes share rows; empty if they do not."""
        return "parallel.context" if self.context > 1 else "parallel.sequence" if self.sequence > 1 else ""

    @property
    def divides(self) -> bool:
        """Whether processes hold only parts of layers or experts, whatever the strategy shards."""
        return self.tensor > 1 or self.expert > 1

    @property
    def together(self) -> int:
        """Processes, of neighbouring ranks, that read the same rows."""
        return self.sharing * self.tensor

    @property
    def together_by(self) -> str:
        """The keys that make them do so."""
        return " x ".join(filter(None, [self.shares_by, "parallel.tensor" if self.tensor > 1 else ""]))
