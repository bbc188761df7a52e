"""The section of a recipe that says what beside rows is divided over processes."""

from __future__ import annotations

from typing import Literal

from toolkit.recipe.base import Section
from toolkit.recipe.sections import PositiveInt

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


class Parallel(Section):
    """What beside rows is divided over processes. The rest of them divides rows, and `strategy` spreads the model over
    all."""

    sequence: PositiveInt = 1
    """How many processes share each row: every one computes a part of its tokens, and in attention a part of the heads
    over all of them (Ulysses, Jacobs et al. 2023, arXiv:2309.14509). Activations and logits of a process shrink with
    it. Divides the model's attention heads; needs an attention backend that takes the boundaries of documents."""
    context: PositiveInt = 1
    """How many processes share each row, as with `sequence`, but in attention each keeps the queries of its tokens and
    gathers the keys and values of the whole row (Llama Team 2024, arXiv:2407.21783, section 3.3.2). It need not divide
    the heads, and less is sent where few of them have keys of their own."""
    tensor: PositiveInt = 1
    """How many processes divide each layer: every one has a part of the heads and of the inner width, with the weights,
    gradients and optimizer state of them (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053). They read the
    same rows. Divides the model's heads of keys and values and its inner width; under `ddp`, `zero1`, `zero2` and
    `fsdp`, and beside `sequence` or `context`, whose processes then share the heads that are left."""
    expert: PositiveInt = 1
    """How many processes divide the experts of each layer of a mixture: every one has some of them, with their weights,
    gradients and optimizer state, and gets the tokens that meet them from the others (expert parallelism, Lepikhin et
    al. 2020, arXiv:2006.16668). They read rows of their own. Divides the model's experts; under `ddp`."""
    pipeline: PositiveInt = 1
    """How many processes the layers are spread over, one run of them after the other (pipeline parallelism, Huang et
    al. 2019, arXiv:1811.06965). Hidden states go from each to the next, one micro-batch behind the other, so that
    little is sent, and only between neighbours: it suits slow links between nodes. At most as many as there are layers;
    under `ddp`."""
    schedule: Schedule = "1f1b"
    """In which order a pipeline's processes take the micro-batches of a step. `gpipe`: all forwards, then all
    backwards. `1f1b`: a backward pass as soon as one can be, which holds fewer of them at a time (Narayanan et al.
    2019). `interleaved_1f1b`: two runs of layers on each process, for half the time in which processes wait (Narayanan
    et al. 2021, arXiv:2104.04473). `zero_bubble`: two runs as well, and gradients of weights fill up the time in which
    processes would wait (ZB-V, Qi et al. 2023, arXiv:2401.10241). All train alike."""

    @property
    def stages(self) -> int:
        """Runs of layers of the whole pipeline."""
        return self.pipeline * (1 if self.schedule in ("gpipe", "1f1b") else 2) if self.pipeline > 1 else 1

    @property
    def sharing(self) -> int:
        """How many processes share each row, in whichever way."""
        return self.sequence * self.context

    @property
    def shares_by(self) -> str:
        """The key by which processes share rows; empty if they do not."""
        return "parallel.context" if self.context > 1 else "parallel.sequence" if self.sequence > 1 else ""

    @property
    def divides(self) -> bool:
        """Whether processes have parts of what the strategy itself leaves whole."""
        return self.tensor > 1 or self.expert > 1

    @property
    def together(self) -> int:
        """How many processes of neighbouring ranks get the same rows."""
        return self.sharing * self.tensor

    @property
    def together_by(self) -> str:
        """The key by which they do, or both."""
        return " x ".join(filter(None, [self.shares_by, "parallel.tensor" if self.tensor > 1 else ""]))
