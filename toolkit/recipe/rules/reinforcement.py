"""Rules on objectives that learn from rewards of answers that the model gives itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from toolkit.recipe.errors import Rule
from toolkit.recipe.reinforcement import REINFORCED, VLLM_RANKS, Policy, Rewards
from toolkit.recipe.schema import Recipe

_SECTIONS = ("rollout", "rewards", "policy")
_OBJECTIVES = " or ".join(REINFORCED)
_PLAIN = ("exclude_modules", "layers_pattern")
"""What PEFT may be told beside the keys of `method` for adapters that vLLM reads as PEFT does: see `PEFTHelper` in
vllm/lora/peft_helper.py, which refuses some of the others, and reads others as if they were not there."""


def _set(section: str) -> Callable[[Recipe], Iterable[str]]:
    return lambda recipe: [f"{section}.{key}" for key in getattr(recipe, section).changed()]


def _unasked(section: str) -> Rule:
    """A section that other objectives do not read."""
    others = (
        ", or objective=distillation and distillation.on_policy=1 for a student's own answers"
        if section == "rollout"
        else ""
    )
    return Rule(
        section,
        lambda r, _: not (r.writes if section == "rollout" else r.reinforces) and getattr(r, section).changed(),
        "objective {r.objective} learns from given answers, not from rewards of its own",
        f"remove {{{section}_keys}}, or set objective={_OBJECTIVES}{others}",
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
    beside = method.modules_to_save or recipe.model.new_tokens or recipe.model.adapter or recipe.trains_biases
    return method.name == "lora" and not beside and method.init_lora_weights not in ("pissa", "olora", "loftq")


def _served(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    """What a vLLM server does not generate answers with."""
    return _not_here(path, lambda r: r.rollout.server and broken(r), why, f"{change}, or remove rollout.server")


def _taken(built_in: Collection[str]) -> set[str]:
    """Names that metrics have already behind `reward_`: those of rewards, and of the spread of the sum and of each."""
    return {"std", *built_in, *(f"{name}_std" for name in built_in)}


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
        lambda r: r.rewards.file and r.rewards.function in _taken(r.rewards.parts()),
        "is called as one of the built-in rewards that are named, or as a spread in the metrics, and could not be told "
        "from it",
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
    "rewards-lengths": _not_here(
        "rewards.length",
        lambda r: (
            (length := r.rewards.length)
            and length.min_tokens > min(length.max_tokens or length.min_tokens, r.rollout.max_completion_tokens)
        ),
        "min_tokens is more than max_tokens or rollout.max_completion_tokens, and no answer is long enough",
        "lower rewards.length.min_tokens, or raise these",
    ),
    "rewards-tags": _not_here(
        "rewards.format",
        lambda r: r.rewards.format and len({*r.rewards.format.tags}) < len(r.rewards.format.tags),
        "tags names one twice, and each has to stand once in an answer",
        "name each once in rewards.format.tags",
    ),
    "rollout-length": Rule(
        "rollout.max_completion_tokens",
        lambda r, _: r.writes and r.rollout.max_completion_tokens >= r.batch.seq_len,
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
        "set policy.beta=0, or method.name=lora without modules_to_save, new tokens, trained biases or an adapter to "
        "start from",
    ),
    "policy-no-server": _not_here(
        "policy.server_cap",
        lambda r: "server_cap" in r.policy.changed() and not r.rollout.server,
        "answers are generated by the model in training itself, and their tokens need no weights",
        "remove policy.server_cap, or set rollout.server=http://localhost:8000",
    ),
    "served-batch": _served(
        "rollout.batch_size",
        lambda r: r.rollout.batch_size is not None,
        "a server gets all requests of a step at once, and divides them by itself",
        "remove rollout.batch_size",
    ),
    "served-gguf": _served(
        "model.path",
        lambda r: r.model.gguf_file or r.model.path.endswith(".gguf") or r.model.path.startswith("builtin:"),
        "vLLM serves models of the hub and of folders, and this is a GGUF file",
        "set model.path to the same model as a folder or on the hub",
    ),
    "served-quantized": _served(
        "method.quantization",
        lambda r: r.method.name == "lora" and r.method.quantization != "none",
        "the base is quantized here, and a server has another one, that of the files",
        "set method.quantization=none",
    ),
    "served-new-tokens": _served(
        "model.new_tokens",
        lambda r: r.model.new_tokens,
        "they make the vocabulary larger than a server's that was started with the model",
        "remove model.new_tokens",
    ),
    "served-dora": _served(
        "method.use_dora",
        lambda r: r.method.name == "lora" and r.method.use_dora,
        "vLLM loads no DoRA",
        "set method.use_dora=false",
    ),
    "served-modules": _served(
        "method.modules_to_save",
        lambda r: r.method.name == "lora" and r.method.modules_to_save,
        "vLLM loads no modules that are trained in full beside adapters",
        "remove method.modules_to_save",
    ),
    "served-parameters": _served(
        "method.target_parameters",
        lambda r: r.method.name == "lora" and r.method.target_parameters,
        "adapters of single parameters, such as fused experts, were not tried with vLLM",
        "remove method.target_parameters",
    ),
    "served-rank": _served(
        "method.r",
        lambda r: r.method.name == "lora" and r.method.published_rank > VLLM_RANKS[-1],
        f"the adapter has rank {{r.method.published_rank}}, and vLLM makes room for {VLLM_RANKS[-1]} at most",
        f"set method.r={VLLM_RANKS[-1] // 2}",
    ),
    "served-extra": _served(
        "extra.lora",
        lambda r: r.method.name == "lora" and {*r.extra.lora} - {*_PLAIN},
        f"vLLM reads plain LoRA: beside {' and '.join(_PLAIN)} it refuses or leaves out what PEFT may be told",
        "remove extra.lora",
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
