"""The libraries' settings that are shipped: they are the installed libraries', and each of them is judged."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

from toolkit.recipe import Recipe
from toolkit.recipe.libraries import PASSED, fields, uncounted
from toolkit.recipe.rules.extra import own_key, refusal
from toolkit.recipe.schema import sections


def test_fields_are_those_of_the_installed_libraries() -> None:
    import library_fields

    written = json.loads(json.dumps(library_fields.fields()))
    assert written == fields(), "run: python scripts/library_fields.py"


def test_every_setting_is_passed_on_or_has_its_own_key_or_a_reason() -> None:
    for part, known in fields().items():
        for key in known:
            if uncounted(part, key) is not None:
                assert not own_key(part, key), key
            elif own := own_key(part, key):
                section, _, name = own.partition(".")
                assert section in Recipe.model_fields, key
                assert not name or name in sections()[section].model_fields, key
            else:
                assert refusal(part, key), f"{part}.{key}: pass it on in PASSED, or say in rules/extra.py why not"
        for pattern in PASSED[part]:
            assert any(fnmatchcase(key, pattern) for key in known), pattern


# Said, or about how long something may take: no plan counts it.
FREE = {
    "training_arguments": "neftune_noise_alpha logging_first_step ddp_timeout project trackio_space_id "
    "trackio_bucket_id trackio_static_space_id",
    "lora": "bias exclude_modules layers_pattern",
    "deepspeed": "fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale "
    "fp16.consecutive_hysteresis dump_state zero_optimization.offload_optimizer.fast_init",
}


def test_what_is_passed_on_costs_time_or_memory_or_nothing_that_a_plan_counts() -> None:
    for part, known in fields().items():
        costs = {key: cost for key in known if (cost := uncounted(part, key)) is not None}
        assert {key for key, cost in costs.items() if not cost} == set(FREE[part].split())
        assert set(costs.values()) <= {"", "time", "memory", "memory and time"}
        assert None not in PASSED[part].values()
