"""Everything known about each optimizer, in one table that the rules, the engines, the plan and the trainer read.

A new optimizer is an entry of `OPTIMIZERS`. The classes are those of Transformers' Trainer; Muon's is `train/muon.py`.
Nothing here imports torch, so that recipes are checked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from toolkit.recipe.arguments import FLAG, POSITIVE, RATE, SHARE, Argument, count, number, one_of

Family = Literal[
    "adam", "ademamix", "lion", "sgd", "rmsprop", "adagrad", "adafactor", "muon", "galore", "apollo", "lomo",
    "schedule_free",
]  # fmt: skip

_USUAL_RATES: dict[str, tuple[float, float]] = {
    "lion": (1e-8, 1e-3),  # 3 to 10 times lower than AdamW's (Chen et al. 2023, section 5).
    "sgd": (1e-6, 1.0),
    "rmsprop": (1e-7, 1e-2),
    "adagrad": (1e-6, 1e-1),
    "adafactor": (1e-6, 1e-1),  # 1e-2 relative to the weights in the paper (Shazeer & Stern 2018).
    "muon": (1e-6, 1e-1),  # 2e-2 in its author's runs (Jordan 2024).
    "lomo": (1e-6, 1.0),  # 3e-2 in the paper (Lv et al. 2023).
    "galore": (1e-6, 5e-2),
    "apollo": (1e-6, 5e-2),
    "schedule_free": (1e-6, 10.0),  # Its SGD takes 10 to 50 times the rate of others (Defazio et al. 2024).
}
"""Learning rates per family, an order of magnitude around those of the papers and of Transformers' examples; Adam's are
the default of `Traits.usual_rates`."""

_NEVER = one_of(False)
_SPEED = {"differentiable": _NEVER, "foreach": FLAG}  # A step that can be differentiated cannot be made in place.
_TORCH = {**_SPEED, **dict.fromkeys(("fused", "maximize"), FLAG)}
_PAGED = {"is_paged": FLAG}
_BLOCKS = {"min_8bit_size": count(0), "optim_bits": one_of(8, 32)}
_RMSPROP = {"alpha": RATE, "centered": FLAG, "eps": POSITIVE, "momentum": RATE}
_ARGUMENTS: dict[tuple[str, Family], dict[str, Argument]] = {
    ("torch", "adam"): {**_TORCH, "amsgrad": FLAG, "capturable": FLAG},
    ("torch", "sgd"): {**_TORCH, "dampening": SHARE, "nesterov": FLAG},
    ("torch", "adagrad"): {
        **{**_TORCH, "eps": POSITIVE, "initial_accumulator_value": number(0), "lr_decay": number(0)},
    },
    ("torch", "rmsprop"): {**_SPEED, **_RMSPROP, "maximize": FLAG, "capturable": FLAG},
    ("torch", "muon"): {
        **{"adjust_lr_fn": one_of("original", "match_rms_adamw"), "fused": FLAG, "nesterov": FLAG},
        "ns_steps": count(1, 99),
    },
    ("transformers", "adafactor"): {
        **{"beta1": RATE, "clip_threshold": POSITIVE, "decay_rate": number(-1, 0, below=True)},
        # Its own schedule takes no learning rate.
        **{"relative_step": _NEVER, "scale_parameter": FLAG, "warmup_init": _NEVER},
        "eps": Argument("a pair of numbers, which a recipe cannot write", lambda value: False),
    },
    # It cannot compare moments in few bits, as AMSGrad does.
    ("torchao", "adam"): {"amsgrad": _NEVER, "bf16_stochastic_round": FLAG, "block_size": count(1)},
    ("bitsandbytes", "adam"): {**_PAGED, **_BLOCKS, "amsgrad": FLAG},
    ("bitsandbytes", "lion"): {**_PAGED, **_BLOCKS},
    ("bitsandbytes", "ademamix"): {
        **{**_PAGED, **_BLOCKS, "alpha": number(0), "t_alpha": count(1), "t_beta3": count(1)},
    },
    ("bitsandbytes", "rmsprop"): {
        **{**_BLOCKS, **_RMSPROP, "alpha": number(0, 1, above=True, below=True), "centered": _NEVER},
    },
}
"""Module and family to what `optimizer.args` may set: the keywords of the classes, less what has a key."""
_OF_TRANSFORMERS = {
    **{"beta3": RATE, "rank": count(1), "update_proj_gap": count(1), "scale": POSITIVE},
    "proj_type": one_of("std", "reverse_std", "left", "right", "full"),
    **{"proj": one_of("random", "svd"), "scale_type": one_of("channel", "tensor")},
}
"""Further arguments of Transformers' optimizers, which `Traits.args` names, and their allowed values."""

OWN_KEYS = {
    "lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "betas": "optimizer.beta1 and optimizer.beta2",
}
"""Keywords of optimizers to the keys of a recipe that set them, beside those that have the key's own name."""


@dataclass(frozen=True)
class Traits:
    """One optimizer."""

    name: str
    """The optimizer's name in recipes."""
    family: Family
    """What kind of update it makes."""
    transformers_name: str = ""
    """`TrainingArguments.optim`, where that is another name."""

    module: str = "torch"
    """What its class is imported from."""
    package: str = ""
    """What pip installs that module from; empty for what the toolkit requires itself."""
    gpu_only: bool = False
    """Whether it has no code for a CPU."""
    args: tuple[str, ...] = ()
    """Entries of `optimizer.args` that are no keyword of its class, because Transformers turns them into something else
    (`trainer_optimizer`)."""
    momentum: float | None = None
    """What `optimizer.momentum` is by default; None where it has no meaning."""

    moments: int = 2
    """Tensors of a parameter's shape that it keeps for it."""
    bits: Literal[4, 8, 32] = 32
    """Bits of an element of a moment. With 8 and 4 bits each block of elements has a scale."""
    smallest: int = 4096
    """The fewest elements of a parameter whose moments have so few bits."""
    unpaged: str = ""
    """For bitsandbytes' paged optimizers, whose state is in memory that host and device share: the same with its state
    on the device."""
    factored: bool = False
    """Whether the second moment is stored as sums over rows and columns (Shazeer & Stern 2018), beside `moments`."""
    rank: int = 0
    """Rank to which gradients of matrices are projected (GaLore: Zhao et al. 2024; APOLLO: Zhu et al. 2024) unless
    `optimizer.args.rank` says otherwise: Transformers' default."""
    rest: str = ""
    """The optimizer that updates everything but the matrices of hidden layers, where this one updates only those."""
    eight_bit: str = ""
    """The same optimizer with 8-bit state."""

    layerwise: bool = False
    """Whether it updates each parameter in a hook of its own (`train/optimizer.py`), and not all of them at once."""
    decays: bool = True
    """Whether it applies `optimizer.weight_decay`."""
    foreach: bool = False
    """Whether a step on a GPU makes a copy of all that it updates: torch's `foreach` implementations take tensors
    together."""
    copies: int = 0
    """Copies that a step makes of one parameter at a time: on a CPU in the masters' dtype for `foreach` ones (3 where
    it has not been measured), for all others in fp32 on every device."""

    zero_alternative: str = ""
    """The optimizer most like it that ZeRO can use; empty where ZeRO can use this one. ZeRO updates vectors cut out of
    all parameters laid end to end: what updates each element by itself trains on them as on whole parameters."""
    fsdp_alternative: str = ""
    """The optimizer most like it that FSDP can use; empty where FSDP can use this one. FSDP needs operations that torch
    supports on sharded tensors, with the results of whole ones."""

    def given(self, args: Mapping[str, Any]) -> Traits:
        """The same with entries of `optimizer.args`, of which some change what it keeps for a parameter."""
        moments, bits = self.moments, args.get("optim_bits")
        if (self.module, self.family) == ("torch", "adam"):
            moments += args.get("amsgrad") is True
        if (self.module, self.family) == ("torch", "rmsprop"):
            moments += (args.get("centered") is True) + bool(args.get("momentum"))
        if self.factored:
            moments += args.get("beta1") is not None
        if self.module != "bitsandbytes":
            return replace(self, moments=moments)
        paged, smallest = args.get("is_paged"), args.get("min_8bit_size")
        return replace(
            self,
            bits=bits if bits in (8, 32) else self.bits,
            smallest=smallest if isinstance(smallest, int) else self.smallest,
            unpaged="" if paged is False else self.unpaged or (self.name if paged is True else ""),
        )

    @property
    def reads(self) -> frozenset[str]:
        """The keys of the section that reach it, among those that not every optimizer has."""
        keys = {"momentum"} if self.momentum is not None else set()
        adam = self.family in ("adam", "ademamix", "muon", "galore", "apollo", "schedule_free")
        if self.family == "lion" or (adam and not self.factored and not self.name.endswith("_sgd")):
            keys |= {"beta1", "beta2"} | ({"eps"} if adam else set())
        return frozenset(keys)

    @property
    def arguments(self) -> dict[str, Argument]:
        """What `optimizer.args` may hold, as far as `knows_arguments`."""
        return _ARGUMENTS.get((self.module, self.family), {}) | {name: _OF_TRANSFORMERS[name] for name in self.args}

    @property
    def knows_arguments(self) -> bool:
        """Whether all that its class takes is known here; of other optimizers the class says it."""
        return (self.module, self.family) in _ARGUMENTS

    def key_of(self, keyword: str) -> str:
        """The recipe's own key for a keyword of the class; empty where it belongs to `optimizer.args`."""
        own = OWN_KEYS | {key: f"optimizer.{key}" for key in self.reads}
        return own.get(keyword, "") if keyword not in self.args else ""

    @property
    def usual_rates(self) -> tuple[float, float]:
        """Lowest and highest learning rate that it is used with, over full fine-tuning and adapters."""
        return _USUAL_RATES.get(self.family, (1e-7, 1e-2))

    @property
    def in_backward(self) -> bool:
        """Whether it updates each parameter as soon as its gradient is there and frees that, so that no gradient is
        left to accumulate, to average or to clip."""
        return self.layerwise or self.family == "lomo"

    @property
    def divisible(self) -> bool:
        """Whether its state is tensors of the parameters' shape, so that other processes can hold other parts of it."""
        whole = self.bits < 32 or self.factored or self.rank or self.rest or self.in_backward
        # bitsandbytes' AdEMAMix keeps two moments in one tensor; of other packages nothing is known.
        return not whole and self.family != "ademamix" and self.module in ("torch", "bitsandbytes")

    @property
    def state(self) -> tuple[Any, ...]:
        """What tells what it keeps from what others keep: those with the same go on with each other's checkpoints."""
        of_all = (self.module, self.family, self.moments, self.bits)
        return (*of_all, self.factored, bool(self.rank), self.rest, self.layerwise)

    def updates(self, shape: tuple[int, ...], place: str) -> bool:
        """Whether it updates a parameter itself, and does not leave it to `rest`; for `place` see `Tensors`."""
        return not self.rest or (place == "layer" and len(shape) == 2)

    def state_dtype(self, master: str) -> str:
        """Dtype of 32-bit moments: bitsandbytes' are in fp32 whatever it updates, all others are like the masters."""
        return "float32" if self.module == "bitsandbytes" else master


_AO_8BIT = "adamw_torch_8bit"
_adam = partial(Traits, family="adam")
_torchao = partial(_adam, module="torchao", package="torchao", copies=4)
_bnb = partial(Traits, module="bitsandbytes", fsdp_alternative="adamw")
_bnb_8bit = partial(_bnb, bits=8, fsdp_alternative=_AO_8BIT)
_ademamix: dict[str, Any] = {"family": "ademamix", "args": ("beta3",), "moments": 3}
_lion: dict[str, Any] = {"family": "lion", "moments": 1}
_rmsprop = partial(_bnb, family="rmsprop", moments=1, fsdp_alternative="rmsprop")
_low_rank = partial(Traits, rank=128, decays=False, copies=3, zero_alternative="adamw_8bit")
_low_rank_args = ("rank", "update_proj_gap", "scale", "proj_type")
_galore = partial(
    _low_rank,
    family="galore",
    module="galore_torch",
    package="galore-torch",
    args=_low_rank_args,
    fsdp_alternative="galore_adamw",
)
_apollo = partial(
    _low_rank,
    family="apollo",
    module="apollo_torch",
    package="apollo-torch",
    args=(*_low_rank_args, "proj", "scale_type"),
    fsdp_alternative=_AO_8BIT,
)
_lomo = partial(
    Traits, family="lomo", module="lomo_optim", package="lomo-optim", decays=False, zero_alternative="adamw_8bit"
)
_foreach = partial(Traits, foreach=True, copies=3, zero_alternative="adamw")
_schedule_free = partial(_foreach, family="schedule_free", module="schedulefree", package="schedulefree")

OPTIMIZERS = {
    each.name: each
    for each in (
        # Short names of the field, then what Transformers' Trainer offers under its own names.
        _adam("adamw", transformers_name="adamw_torch_fused", eight_bit="adamw_8bit"),
        _bnb("lion", transformers_name="lion_32bit", eight_bit="lion_8bit", **_lion),
        Traits(
            "muon",
            "muon",
            # Transformers has no Muon; what it makes of this name is the half for the rest.
            transformers_name="adamw_torch_fused",
            momentum=0.95,
            moments=1,
            rest="adamw",
            zero_alternative="adamw",
            fsdp_alternative="adamw",
        ),
        _adam("adamw_torch", eight_bit="adamw_8bit", foreach=True, copies=2),
        _adam("adamw_torch_fused", eight_bit="adamw_8bit"),
        _torchao("adamw_torch_4bit", bits=4),
        _torchao("adamw_torch_8bit", bits=8),
        _bnb_8bit("adamw_8bit", "adam"),
        _bnb_8bit("adamw_bnb_8bit", "adam"),
        _bnb("paged_adamw_32bit", "adam", gpu_only=True, unpaged="adamw", eight_bit="adamw_8bit"),
        _bnb_8bit("paged_adamw_8bit", "adam", gpu_only=True, unpaged="adamw_8bit"),
        _bnb("ademamix", eight_bit="ademamix_8bit", **_ademamix),
        _bnb_8bit("ademamix_8bit", **_ademamix),
        _bnb("paged_ademamix_32bit", gpu_only=True, unpaged="ademamix", eight_bit="ademamix_8bit", **_ademamix),
        _bnb_8bit("paged_ademamix_8bit", gpu_only=True, unpaged="ademamix_8bit", **_ademamix),
        Traits("sgd", "sgd", momentum=0.9, moments=1),
        Traits(
            "adagrad",
            "adagrad",
            moments=1,
            foreach=True,
            copies=1,
            zero_alternative="rmsprop",
            fsdp_alternative="rmsprop",
        ),
        Traits(
            "adafactor",
            "adafactor",
            module="transformers",
            moments=0,
            factored=True,
            copies=2,
            zero_alternative="adamw_8bit",
            fsdp_alternative=_AO_8BIT,
        ),
        _bnb("lion_32bit", eight_bit="lion_8bit", **_lion),
        _bnb_8bit("lion_8bit", **_lion),
        _bnb("paged_lion_32bit", gpu_only=True, unpaged="lion", eight_bit="lion_8bit", **_lion),
        _bnb_8bit("paged_lion_8bit", gpu_only=True, unpaged="lion_8bit", **_lion),
        Traits("rmsprop", "rmsprop", moments=1, foreach=True, copies=1),
        _rmsprop("rmsprop_bnb"),
        _bnb_8bit("rmsprop_bnb_8bit", "rmsprop", moments=1),
        _rmsprop("rmsprop_bnb_32bit"),
        _galore("galore_adamw", fsdp_alternative=""),
        _galore("galore_adamw_8bit", bits=8, gpu_only=True),
        _galore("galore_adafactor", moments=0, factored=True),
        _galore("galore_adamw_layerwise", transformers_name="galore_adamw", layerwise=True),
        _galore(
            "galore_adamw_8bit_layerwise",
            transformers_name="galore_adamw_8bit",
            bits=8,
            gpu_only=True,
            layerwise=True,
        ),
        _galore(
            "galore_adafactor_layerwise",
            transformers_name="galore_adafactor",
            moments=0,
            factored=True,
            layerwise=True,
        ),
        _apollo("apollo_adamw"),
        _apollo("apollo_adamw_layerwise", transformers_name="apollo_adamw", layerwise=True),
        _lomo("lomo", moments=0),
        _lomo("adalomo", gpu_only=True, moments=0, factored=True, copies=3, fsdp_alternative="lomo"),
        _foreach("grokadamw", "adam", module="grokadamw", package="grokadamw", moments=3),
        _foreach("stable_adamw", "adam", module="optimi", package="torch-optimi"),
        _schedule_free("schedule_free_radam"),
        _schedule_free("schedule_free_adamw"),
        _schedule_free("schedule_free_sgd", momentum=0.9, moments=1, zero_alternative="sgd"),
    )
}
"""Name to what is known of it."""
