"""How evenly a mixture's tokens are spread over its experts, asked for where metrics are logged."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from toolkit.models.routing import Load, Routing
from toolkit.train.session import Session


class ExpertLoad(TrainerCallback):
    """Counts from the first step on; has what there was since the metrics before, for whoever writes the next ones.

    All processes have one, because they add up what they counted.
    """

    def __init__(self, session: Session) -> None:
        self._trainer, self._routing = session.trainer, Routing(session.trainer.model)
        self._load: Load | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._routing.begin(self._trainer.args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.row_at_once = self._trainer.row_at_once or bool(self._routing)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._routing and logs and "loss" in logs:
            self._load = self._routing.take()

    def row(self) -> dict[str, Any]:
        """For a line of `metrics.jsonl`; nothing of a model without experts.

        No expert has a capacity, so no token is ever dropped.
        """
        if (load := self._load) is None:
            return {}
        row = {"expert_load": round(load.most, 4), "expert_load_worst": round(load.worst, 4)}
        row |= {"idle_experts": round(load.idle, 4), "dropped_tokens": 0}
        return row if load.process is None else {**row, "process_load": round(load.process, 4)}
