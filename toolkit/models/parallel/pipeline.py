"""Layers that follow each other on several processes (pipeline parallelism, Huang et al. 2019, arXiv:1811.06965).

The layers of a decoder are cut into stages. A process keeps those of its own and, where it has the first stage, the
embeddings, or where it has the last one, final norm and output head. The model's own forward computes a stage: it is
given hidden states instead of tokens, finds layers that lie elsewhere to leave them as they are, and so makes masks and
positions as it always does. Names of parameters stay those of the whole model, so that what is saved fits together.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from toolkit.common import UserError
from toolkit.models.adapted_layers import saved_names
from toolkit.models.heads import from_config
from toolkit.models.parallel.process_groups import neighbours

CACHES = {"cache", "past_key_values"}
"""What models are given their cache as: from Transformers 5.24 on, and before."""
_REMOVE = "remove parallel.pipeline"
_TRIED = 8
"""Tokens on which it is tried whether a model takes hidden states as they are."""


@dataclass(frozen=True)
class Split:
    """How layers are cut into stages, and which process has which.

    Args:
        layers: Of each stage, in order.
        processes: Of the pipeline.
        returns: Whether stages go to the last process and back, so that the first one has the last stage too (the V of
            ZB-V, Qi et al. 2023); else they go around.
    """

    layers: tuple[int, ...]
    processes: int
    returns: bool = False

    def place(self, stage: int) -> int:
        """Which process of the pipeline has a stage."""
        turn, at = divmod(stage, self.processes)
        return self.processes - 1 - at if self.returns and turn % 2 else at

    def stages(self, place: int) -> list[int]:
        """Those of a process, in order."""
        return [stage for stage in range(len(self.layers)) if self.place(stage) == place]

    def between(self, stage: int) -> tuple[int, int]:
        """Its first layer, and the one after its last."""
        first = sum(self.layers[:stage])
        return first, first + self.layers[stage]


class Elsewhere(torch.nn.Module):
    """A layer that another process has, or another stage of this one: hidden states stay as they are.

    Args:
        number: Of the layer, whose place in a cache tells models how long rows are.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in CACHES & kwargs.keys():
            if kwargs[name] is not None:
                tokens = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
                kwargs[name].update(tokens, tokens, self._number)
        return hidden_states


class Absent(torch.nn.Module):
    """Embeddings, final norm or output head, which another process has."""

    def forward(self, inputs: Any) -> Any:
        return inputs


class Chain:
    """What one process has of a pipeline, and the processes before and after it.

    Args:
        model: A causal language model with all its weights, perhaps with LoRA; all but this process's stages are taken
            out of it.
        split: How its layers are cut.

    Attributes:
        split: The same.
        place: Of this process in the pipeline.
        tied: Whether embeddings and output head are one weight that two processes have.
        sizes: Shape of each parameter that the whole model trains, by name.
        aliases: Their names to those under which PEFT saves them; empty without adapters.
        state: Names of all that the whole model saves, in order.

    Raises:
        UserError: If the model's own forward computes no stages.
    """

    def __init__(self, model: Any, split: Split) -> None:
        self.split, self.place = split, dist.get_rank(_GROUPS["chain"])
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.decoder = self._base.get_decoder()
        kind = self._base.config.model_type
        # Once for all layers: later it would find those of one stage, and never look for others again.
        maybe_install_capturing_hooks(self.decoder)
        self._layers, self._norm = _parts(self.decoder, self._base, kind)
        named = dict(model.named_parameters())
        self.sizes = {name: each.shape for name, each in named.items() if each.requires_grad}
        self.aliases = saved_names(model)
        self.state = list(model.state_dict())
        embeddings, head = self._base.get_input_embeddings(), self._base.get_output_embeddings()
        own = split.stages(self.place)
        first, last = 0 in own, len(split.layers) - 1 in own
        one = head.weight is embeddings.weight
        self.tied = one and split.place(0) != split.place(len(split.layers) - 1)
        names = {id(each): name for name, each in named.items()}
        self._renamed = {}
        if self.tied and last:
            (at,) = (name for name, module in model.named_modules() if module is head)
            self._renamed[f"{at}.weight"] = names[id(head.weight)]
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            head.weight.counted = False
        layers = list(getattr(self.decoder, self._layers))
        norm = getattr(self.decoder, self._norm)
        missing = [Elsewhere(number) for number in range(len(layers))]
        self._of: dict[int, torch.nn.ModuleList] = {}
        for stage in own:
            begin, end = split.between(stage)
            kept = [each if begin <= number < end else missing[number] for number, each in enumerate(layers)]
            self._of[stage] = torch.nn.ModuleList(kept)
        mine = {number for stage in own for number in range(*split.between(stage))}
        self._all = torch.nn.ModuleList(
            each if number in mine else missing[number] for number, each in enumerate(layers)
        )
        setattr(self.decoder, self._layers, self._all)
        self._own_norm = norm if last else Absent()
        setattr(self.decoder, self._norm, self._own_norm)
        if not first:
            self._base.set_input_embeddings(Absent())
        if not last:
            self._base.set_output_embeddings(Absent())
        self._ends = {0: [embeddings] if first else [], len(split.layers) - 1: [norm, head] if last else []}
        self._check(missing, embeddings.weight, kind)
        if not any(each.requires_grad for each in model.parameters()):
            raise UserError(
                f"parallel.pipeline: nothing that process {self.place} of a pipeline has is trained",
                "train something of every part of the model, or remove parallel.pipeline",
            )

    @property
    def stages(self) -> list[int]:
        """Of this process."""
        return list(self._of)

    @property
    def last(self) -> int:
        """The last stage of all."""
        return len(self.split.layers) - 1

    def modules(self, stage: int) -> list[torch.nn.Module]:
        """What a stage consists of."""
        layers = [each for each in self._of[stage] if not isinstance(each, Elsewhere)]
        return [*layers, *self._ends.get(stage, [])]

    def held(self, stage: int) -> list[int]:
        """First layer, and the one after the last, that really are in a stage."""
        there = [number for number, each in enumerate(self._of[stage]) if not isinstance(each, Elsewhere)]
        return [there[0], there[-1] + 1]

    def name(self, name: str) -> str:
        """Of a parameter of this process, in the whole model."""
        return self._renamed.get(name, name)

    def rank(self, stage: int) -> int:
        """Of the process that has a stage of this pipeline."""
        return dist.get_global_rank(_GROUPS["chain"], self.split.place(stage))

    @contextlib.contextmanager
    def only(self, stage: int) -> Iterator[None]:
        """While this context lasts, the model consists of one stage."""
        setattr(self.decoder, self._layers, self._of[stage])
        if stage != self.last:
            setattr(self.decoder, self._norm, Absent())
        try:
            yield
        finally:
            setattr(self.decoder, self._layers, self._all)
            setattr(self.decoder, self._norm, self._own_norm)

    @torch.no_grad()
    def _check(self, missing: Sequence[Elsewhere], like: torch.Tensor, kind: str) -> None:
        """Asks the model itself whether it leaves hidden states as they are where it has no layers."""
        place = next(each.device for each in self._base.parameters())
        hidden = torch.linspace(-1, 1, _TRIED * like.shape[1], device=place).view(1, _TRIED, -1).to(like.dtype)
        setattr(self.decoder, self._layers, torch.nn.ModuleList(missing))
        setattr(self.decoder, self._norm, Absent())
        try:
            left = self.decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        finally:
            setattr(self.decoder, self._layers, self._all)
            setattr(self.decoder, self._norm, self._own_norm)
        if not torch.equal(left, hidden):
            raise UserError(
                f"parallel.pipeline: a {kind} changes hidden states outside of its layers, which every stage would do",
                _REMOVE,
            )


def _parts(decoder: Any, base: Any, kind: str) -> tuple[str, str]:
    """Names of a decoder's layers and of its final norm, beside which it has nothing but its embeddings."""
    number = base.config.get_text_config().num_hidden_layers
    embeddings = base.get_input_embeddings()
    named = [(name, each) for name, each in decoder.named_children() if any(True for _ in each.parameters())]
    layers = [name for name, each in named if isinstance(each, torch.nn.ModuleList) and len(each) == number]
    others = [name for name, each in named if name not in layers and each is not embeddings]
    if len(layers) != 1 or len(others) != 1 or base.get_output_embeddings() is None:
        what = ", ".join(others) or "nothing"
        raise UserError(
            f"parallel.pipeline: beside embeddings and layers a {kind} has {what}, where one norm is expected", _REMOVE
        )
    return layers[0], others[0]


def elsewhere(objective: str, config: Any, split: Split, place: int, trust_remote_code: bool) -> list[str]:
    """Names of the modules of a model whose weights a process of a pipeline does not keep.

    Args:
        objective: As in the recipe.
        config: The model's configuration object; it is not changed.
        place: Of the process in the pipeline.

    Raises:
        UserError: As `Chain`.
    """
    with torch.device("meta"):
        base = from_config(objective, copy.deepcopy(config), trust_remote_code)
    decoder, embeddings, head = base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings()
    names = {id(module): name for name, module in base.named_modules()}
    layers, norm = _parts(decoder, base, config.model_type)
    own, last = split.stages(place), len(split.layers) - 1
    mine = {number for stage in own for number in range(*split.between(stage))}
    away = [each for number, each in enumerate(getattr(decoder, layers)) if number not in mine]
    if last not in own:
        away += [getattr(decoder, norm), head]
    # Tied, the head's weight is read as that of the embeddings.
    if 0 not in own and not (last in own and head.weight is embeddings.weight):
        away.append(embeddings)
    if head.weight is embeddings.weight and 0 in own and last not in own:
        away.remove(head)
    return [names[id(each)] for each in away]


_GROUPS: dict[str, Any] = {}
_CHAIN: dict[str, Chain] = {}


def chain_processes(size: int) -> list[Any]:
    """Makes pipelines of `size` processes each, and groups of those that have the same stages, over which gradients are
    averaged. All processes call this.

    Those of one group are of neighbouring ranks, so that they are on one node, and pipelines go from node to node.

    Returns:
        The groups of this process: its pipeline, and those with the same stages.
    """
    _GROUPS["alike"], _GROUPS["chain"] = neighbours(dist.get_world_size() // size)
    return [_GROUPS["chain"], _GROUPS["alike"]]


def hand_on(group: Any, device: torch.device) -> bool:
    """A small example of what the processes of a pipeline do: each sends its number to the next one and to the one
    before, at the same time.

    Args:
        group: The pipeline.

    Returns:
        Whether this process got theirs.
    """
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
    at = ranks.index(own)
    others = [*ranks[max(0, at - 1) : at], *ranks[at + 1 : at + 2]]
    received = {other: torch.zeros(1, device=device) for other in others}
    sent = torch.full((1,), float(own), device=device)
    works = [dist.P2POp(dist.isend, sent, other, group) for other in others]
    works += [dist.P2POp(dist.irecv, place, other, group) for other, place in received.items()]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return all(place.item() == other for other, place in received.items())


def split_layers(model: Any, split: Split) -> None:
    """Keeps this process's stages of a model; see `Chain`."""
    _CHAIN["own"] = Chain(model, split)


def chain() -> Chain | None:
    """This process's part of a pipeline; None where there is none."""
    return _CHAIN.get("own")


def draw_apart(own: Chain) -> None:
    """Has the stages of different processes drop out differently: until then all have the same random numbers."""
    torch.manual_seed(int(torch.randint(2**62, ())) + own.place)


def piped() -> int:
    """How many processes the layers are spread over."""
    return dist.get_world_size(_GROUPS["chain"]) if _GROUPS else 1


def pipeline_group() -> Any:
    """The processes of this one's pipeline."""
    return _GROUPS["chain"]


def alike_group() -> Any:
    """The processes that have the same stages as this one."""
    return _GROUPS["alike"]


def counts(parameter: Any) -> bool:
    """Whether a parameter is not another process's too."""
    return getattr(parameter, "counted", True)


def gathered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the processes of the first pipeline have, in host memory of the first process; nothing on the others. All
    processes call this."""
    group = pipeline_group()
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return {}
    if dist.get_rank() == 0:
        whole = {name: each.detach().cpu() for name, each in tensors.items()}
        for sender in ranks[1:]:
            described: list[Any] = [None]
            dist.recv_object_list(described, src=sender, group=group)
            for name, shape, dtype in described[0]:
                place = torch.empty(shape, dtype=dtype, device=_device())
                dist.recv(place, src=sender, group=group)
                whole.setdefault(name, place.cpu())
        return whole
    dist.send_object_list([[(name, each.shape, each.dtype) for name, each in tensors.items()]], dst=0, group=group)
    for each in tensors.values():
        dist.send(each.detach().to(_device()).contiguous(), dst=0, group=group)
    return {}


def _device() -> torch.device:
    """On which this process's group sends."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
