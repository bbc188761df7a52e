"""What a change buys and costs, in words with figures from both plans."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.plan.search import TIE, Candidate, Changes

_GIB = 2**30
_METHODS = {
    # Biderman et al. 2024, "LoRA Learns Less and Forgets Less".
    "lora": "only adapters are trained, which learn less from much data and want about ten times the learning rate",
    "nf4": "the frozen base is rounded to 4 bits and expanded again for every pass",
}
_PRECISIONS = {
    "pure_bf16": "no fp32 masters: most updates of a small learning rate are lost",
    "bf16": "matrix products in bf16, which has 8 significant bits",
    "fp16": "fp16 with loss scaling, as these devices have no fast bf16",
}
_CHECKPOINTING = {
    "full": "layers are computed twice",
    "selective": "all but attention is computed twice",
    "offload": "layers are computed twice, and their inputs cross to the host and back",
}


def buys(each: Candidate, asked: Candidate) -> str:
    """What is better than with another setting, the one that was asked for as a rule."""
    fits = []
    if asked.fits == "no":
        same = each.plan.fit.where == asked.plan.fit.where
        fits.append(
            f"fits: needs {each.need} instead of {f'{asked.plan.fit.needed / _GIB:.1f}' if same else asked.need}"
        )
    return "; ".join([*fits, *_compared(each, asked)]) or "nothing"


def costs(each: Candidate, asked: Candidate) -> str:
    """What is worse."""
    parts = [*_compared(each, asked, worse=True), *_notes(each.changes)]
    if each.fits == "tight":
        parts.append(f"tight: may need more than the {each.plan.fit.available / _GIB:.1f} GiB there are")
    return "; ".join(parts) or "nothing"


def _compared(each: Candidate, asked: Candidate, worse: bool = False) -> Iterator[str]:
    """The figures that differ in one direction by more than two plans can tell."""

    def differs(new: float, old: float) -> bool:
        return new > old * (1 + TIE) if worse else new < old * (1 - TIE)

    new, old = each.seconds, asked.seconds
    if differs(new, old):
        times = f"{new / old:.2f} times as long" if worse else f"{old / new:.2f} times as fast"
        yield f"{times}: {_three_digits(new)} s a step instead of {_three_digits(old)}"
    if differs(each.cost, asked.cost) and each.plan.devices != asked.plan.devices:
        yield f"{abs(1 - each.cost / asked.cost):.0%} {'more' if worse else 'less'} device time per token"
    for new, old, what in (
        (each.total, asked.total, "memory on a device"),
        (each.plan.host.peak, asked.plan.host.peak, "host memory"),
    ):
        # Of a setting that does not fit it has been said what it needs.
        if differs(new, old) and abs(new - old) > _GIB / 10 and (worse or asked.fits != "no"):
            more = f"{abs(new - old) / _GIB:.1f} GiB {'more' if worse else 'less'} {what}"
            yield f"{more} ({new / _GIB:.1f} instead of {old / _GIB:.1f})"


def _three_digits(seconds: float) -> str:
    """Without an exponent where it would need one."""
    return f"{seconds:,.0f}" if seconds >= 999.5 else f"{seconds:.3g}"


def _notes(changes: Changes) -> Iterator[str]:
    """What the figures do not show."""
    if "optimizer.name" in changes:
        yield "the optimizer's moments are rounded to 8 bits"
    if (method := changes.get("method.name")) in _METHODS:
        yield _METHODS[method]
    if (storage := changes.get("method.quantization")) in _METHODS:
        yield _METHODS[storage]
    if (precision := changes.get("precision")) in _PRECISIONS:
        yield _PRECISIONS[precision]
    every = changes.get("activation_checkpointing.every_n_layers", 1)
    if (mode := changes.get("activation_checkpointing.mode")) in _CHECKPOINTING:
        yield "every second layer is computed twice" if every == 2 else _CHECKPOINTING[mode]
    if "nvme" in changes.values():
        yield "wear of the drive"
    elif "cpu" in (changes.get("strategy.offload_optimizer"), changes.get("strategy.offload_param")):
        yield "state waits in host memory and crosses to it in every step"
