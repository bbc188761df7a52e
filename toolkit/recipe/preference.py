"""The section of a recipe for preference objectives: which loss, and how strongly it prefers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from toolkit.recipe.base import Section
from toolkit.recipe.heads import REWARD

PAIRED = ("dpo", "cpo", "simpo", "orpo", REWARD)
"""Objectives whose rows are pairs of answers, a chosen one and a rejected one."""
JUDGED = "kto"
"""The objective whose rows are single answers, each of which is good or bad."""
PREFERENCES = (*PAIRED, JUDGED)
REFERRING = ("dpo", JUDGED)
"""Objectives that compare with a reference, the model as it is before training."""
OF_DIFFERENCES = ("sigmoid", "hinge", "robust", "exo_pair")
"""Losses of DPO that read nothing but how much more the chosen answer has gained than the rejected one."""
LOSSES = (*OF_DIFFERENCES, "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
SMOOTHED = ("robust", "exo_pair")
"""Losses of DPO that read `label_smoothing`."""
PREFERENCE_LEARNING_RATES = {"full": 1e-6, "lora": 1e-5}
"""Defaults of preference objectives by method, a twentieth of the usual ones: TRL has 1e-6 for DPO and 2e-5 for SFT."""
_BETA = {"simpo": 2.0}
_SFT_WEIGHT = {"cpo": 1.0, "orpo": 1.0}
_MARGIN = {REWARD: 0.0}


class Preference(Section):
    """Settings of preference objectives; others do not read this section."""

    loss: Literal[LOSSES] = "sigmoid"  # type: ignore[valid-type]
    """The loss of `objective: dpo`, by TRL's names: `sigmoid` is that of the DPO paper, `hinge` that of SLiC, `ipo` is
    squared and always per token, `robust` allows for wrong labels; also `exo_pair`, `nca_pair`, `bco_pair`,
    `sppo_hard`, and `apo_zero` or `apo_down` if the chosen answers are better or worse than the model's own."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How much a change of log-probability counts: of DPO and KTO, against the reference (larger ones stay nearer to
    it; tau of IPO), of CPO and SimPO without one; of ORPO the weight of its odds ratio. With `simpo` 2.0 by default."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped, for `objective: cpo` and the losses `robust` and `exo_pair` of
    DPO."""
    length_normalized: bool = False
    """Whether DPO compares the answers' mean log-probabilities per token instead of their sums, so that long answers
    count no more than short ones; for the losses `sigmoid`, `hinge`, `robust` and `exo_pair`."""
    margin: Annotated[float, Field(ge=0)] = 1.0
    """Margin by which the chosen answer should win, for `objective: simpo` (gamma in its paper) and `reward`, where it
    is 0 by default."""
    center_rewards: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an additional loss of `objective: reward`, the squared sum of a pair's rewards, which keeps them around
    zero (Eisenstein et al. 2023, arXiv:2312.09244, who use 0.01); TRL's `center_rewards_coefficient`."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an additional loss, the negative log-likelihood per token of each pair's chosen answer. For `cpo` and
    `orpo`, whose losses include it, 1.0 by default."""

    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the loss of good answers, for `objective: kto`."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the loss of bad answers, for `objective: kto`. If there are more answers of one kind, give the other
    more weight: the number of good answers times their weight should be 1 to 4/3 times that of bad ones (Ethayarajh et
    al. 2024, arXiv:2402.01306, equation 8)."""

    def of(self, objective: str) -> Preference:
        """This section with an objective's own defaults, which count as such."""
        defaults = {"beta": _BETA.get(objective), "sft_weight": _SFT_WEIGHT.get(objective)}
        defaults["margin"] = _MARGIN.get(objective)
        decided = self.model_copy()
        for key, value in defaults.items():
            if value is not None and key not in self.model_fields_set:
                decided.__dict__[key] = value
        return decided
