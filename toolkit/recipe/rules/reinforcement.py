"""Rules on objectives that learn from rewards of answers that the model gives itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from toolkit.recipe.errors import Rule
from toolkit.recipe.reinforcement import REINFORCED, Policy, Rewards
from toolkit.recipe.schema import Recipe

_SECTIONS = ("rollout", "rewards", "policy")
_OBJECTIVES = " or ".join(REINFORCED)


def _set(section: str) -> Callable[[Recipe], Iterable[str]]:
    return lambda recipe: [f"{section}.{key}" for key in getattr(recipe, section).changed()]


def _unasked(section: str) -> Rule:
    """A section that other objectives do not read."""
    return Rule(
        section,
        lambda r, _: not r.reinforces and getattr(r, section).changed(),
        "objective {r.objective} learns from given answers, not from rewards of its own",
        f"remove {{{section}_keys}}, or set objective={_OBJECTIVES}",
        keys=_set(section),
    )


def _of_grpo(key: str, why: str) -> Rule:
    default = Policy.model_fields[key].default
    return Rule(
        f"policy.{key}",
        lambda r, _: r.objective == "rloo" and getattr(r.policy, key) != default,
        why,
        f"remove policy.{key}, or set objective=grpo",
    )


def _not_here(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    """What does not go with answers that are generated in training."""
    return Rule(path, lambda r, _: r.reinforces and bool(broken(r)), why, change)


def _keeps_of_base(recipe: Recipe) -> bool:
    """Whether what is trained is no more than adapters over the weights that the run starts from."""
    method = recipe.method
    beside = method.modules_to_save or recipe.model.new_tokens or recipe.model.adapter
    return method.name == "lora" and not beside and method.init_lora_weights not in ("pissa", "olora", "corda", "loftq")


def reward_figures(recipe: Recipe) -> dict[str, str]:
    """What the texts of these rules may name in braces."""
    keys = {f"{section}_keys": ", ".join(_set(section)(recipe)) for section in _SECTIONS}
    room = recipe.batch.seq_len // 2
    return keys | {"half_length": str(max(1, room)), "twice_completion": str(2 * recipe.rollout.max_completion_tokens)}


_BUILT_IN = [
    name for name in Rewards.model_fields if name not in ("file", "function", "function_weight", "trust_python")
]

REINFORCEMENT_RULES = {
    **{f"{section}-objective": _unasked(section) for section in _SECTIONS},
    "rewards-none": _not_here(
        "objective",
        lambda r: not r.rewards.weights(),
        "nothing says how answers are scored",
        "name a reward, e.g. rewards.numeric=true, or a Python file of your own in rewards.file; the built-in ones are "
        + ", ".join(_BUILT_IN),
    ),
    "rewards-trust": _not_here(
        "rewards.file",
        lambda r: r.rewards.file and not r.rewards.trust_python,
        "is Python code, which runs as you, with all your rights",
        "read it, then set rewards.trust_python=true, or remove rewards.file",
    ),
    "rewards-function": _not_here(
        "rewards.function",
        lambda r: r.rewards.file and r.rewards.function in r.rewards.parts(),
        "is called as one of the built-in rewards that are named, and could not be told from it",
        "rename the function, and set rewards.function=my_reward",
    ),
    "rewards-no-file": _not_here(
        "rewards.file",
        lambda r: (
            r.rewards.parts()
            and not r.rewards.file
            and {"function", "function_weight", "trust_python"} & {*r.rewards.changed()}
        ),
        "a function is described, but no file has it",
        "name it, or remove rewards.function, rewards.function_weight and rewards.trust_python",
    ),
    "rollout-length": _not_here(
        "rollout.max_completion_tokens",
        lambda r: r.rollout.max_completion_tokens >= r.batch.seq_len,
        "leaves no room for prompts in batch.seq_len={r.batch.seq_len}",
        "set rollout.max_completion_tokens={half_length}, or batch.seq_len={twice_completion}",
    ),
    "policy-loss": _of_grpo("loss", "RLOO has one loss, of whole answers"),
    "policy-scale": _of_grpo("scale_rewards", "RLOO compares with the mean of the other answers and scales nothing"),
    "policy-importance": _of_grpo("importance", "RLOO compares whole answers, not per token"),
    "policy-reference": _not_here(
        "policy.beta",
        lambda r: r.policy.beta and not _keeps_of_base(r),
        "compares with the model as it was before training, which only plain adapters on a base still hold",
        "set policy.beta=0, or method.name=lora without modules_to_save, new tokens or an adapter to start from",
    ),
    "reinforcement-over-long": _not_here(
        "data.over_long",
        lambda r: r.data.over_long in ("truncate", "split"),
        "a prompt that is cut asks something else",
        "set data.over_long=drop",
    ),
    "reinforcement-streaming": _not_here(
        "data.streaming",
        lambda r: r.data.streaming,
        "what a step's prompts are is known before it, by the numbers of their rows",
        "set data.streaming=false",
    ),
    "reinforcement-eva": _not_here(
        "method.init_lora_weights",
        lambda r: r.method.name == "lora" and r.method.init_lora_weights == "eva",
        "EVA reads answers before the first step, and there are none yet",
        "set method.init_lora_weights=default",
    ),
    **{
        f"reinforcement-{way}": _not_here(
            f"parallel.{way}",
            lambda r, way=way: getattr(r.parallel, way) > 1,  # type: ignore[misc]
            "answers have not been generated with layers that several processes divide",
            f"remove parallel.{way}: strategy.name=zero3 and fsdp shard larger models",
        )
        for way in ("tensor", "expert")
    },
}
