"""The section `strategy`: how training is spread over devices, with the knobs of every engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from toolkit.recipe.section import PositiveInt, Section

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")


class Strategy(Section):
    """How training is spread over devices, and what is kept off them."""

    main_key: ClassVar[str | None] = "name"

    name: Literal[(*STRATEGIES, "auto")] = "ddp"  # type: ignore[valid-type]
    """`ddp` replicates the model on every process (one process is plain training), `single` insists on one process.
    DeepSpeed `zero1` shards optimizer state, `zero2` gradients too, `zero3` parameters too. `fsdp` is PyTorch's
    FSDP2. `auto` takes the fastest that fits, with offloading where nothing else fits; other keys of this section then
    stand, and leave only the strategies that read them."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """ZeRO: where optimizer state and fp32 masters live and are updated (`nvme`: stage 3 only)."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters wait while they are not computed with: ZeRO-3 `cpu` or `nvme`; FSDP `cpu`, which keeps gradients
    and optimizer state there too."""
    nvme_path: str | None = None
    """Folder on a local NVMe drive for what is offloaded there; each process makes a folder of its own in it."""
    pin_memory: bool = True
    """Page-locked host memory for what is offloaded: faster copies, memory that nothing else can use."""
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """ZeRO and FSDP: in what gradients are summed over processes and micro-batches. `auto`: fp32 (bf16 under
    `pure_bf16`)."""
    overlap_comm: bool = True
    """ZeRO: reduce gradients while the backward pass still runs, at the cost of a second bucket."""
    reduce_bucket_size: PositiveInt = 50_000_000
    """ZeRO: elements reduced at a time. A bucket takes this many times the bytes of `reduce_dtype`."""
    allgather_bucket_size: PositiveInt = 50_000_000
    """ZeRO-1 and 2: elements of updated parameters gathered at a time."""
    prefetch_bucket_size: Annotated[int, Field(ge=0)] = 50_000_000
    """ZeRO-3: elements of parameters gathered ahead of use."""
    param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """ZeRO-3: parameters of fewer elements (norms, biases) stay whole on every process."""
    max_live_parameters: PositiveInt = 1_000_000_000
    """ZeRO-3: most elements of gathered parameters on a device at a time."""
    max_reuse_distance: Annotated[int, Field(ge=0)] = 1_000_000_000
    """ZeRO-3: a parameter used again within this many elements is not released in between."""
    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """FSDP: `full_shard` shards parameters, gradients and optimizer state; `shard_grad_op` keeps gathered parameters
    until the backward pass; `hybrid_shard` shards within a node and replicates across nodes."""
    reshard_after_forward: bool | None = None
    """FSDP: release gathered parameters between forward and backward pass; by default as `sharding` says."""
    wrap_classes: list[str] = []
    """FSDP: classes of layers that are gathered as a unit, e.g. `[LlamaDecoderLayer]`; by default the model's own."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """FSDP: how checkpoints are written. `sharded` ones are fast and resume on another number of processes; `full` ones
    are gathered on the first. The final model is always gathered."""
    cpu_ram_efficient_loading: bool = True
    """FSDP: only the first process of a run reads the weights into host memory; the others receive their shards."""

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
