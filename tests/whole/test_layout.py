"""The tests lie as the package does: a folder per package, a file per module; what differs says why."""

from __future__ import annotations

from harness import ROOT

TESTS = ROOT / "tests"
ELSEWHERE = {
    # Tested by what a user does with them.
    "cli/jobs": "cli/test_search",
    "cli/keys": "cli/test_evaluate",
    "cli/local_data": "cli/test_commands",
    "cli/main": "cli/test_commands",
    "cli/option_types": "cli/test_commands",
    "cli/registry": "cli/test_commands",
    "cli/run_commands": "cli/test_commands",
    "distributed/swap_buffers": "distributed/test_nvme",
    "run": "whole/test_packaging",
    "train/process": "train/test_main",
    "train/session": "train/test_main",
    "train/checkpoints/snapshots": "train/test_selection",
    "train/decide": "train/test_main",
    "train/model": "train/test_main",
    "train/setup": "train/test_main",
    "train/trainers/objectives": "train/test_main",
    "train/agreed": "train/test_main",
    "train/live_state": "train/test_verify",
    "train/trainers/late_rows": "whole/test_host_gpu",
    "train/startup": "train/test_callbacks",
    "train/train": "train/test_main",
    # Steps of one piece of work, which is tested as a whole.
    "recipe/data": "recipe/test_schema",
    "recipe/faults": "recipe/test_rules",
    "recipe/places": "train/test_held_out",
    "recipe/preference": "recipe/test_rules",
    "recipe/heads": "recipe/test_rules",
    "data/auditing/problems": "data/test_audit",
    "data/row_table": "data/test_audit",
    "models/adapted_layers": "models/test_adapters",
    "data/encoding/turns": "data/test_encode",
    "data/encoding/markers": "data/test_encode",
    "data/reading/splits": "data/test_sources",
    "recipe/layer": "recipe/test_overrides",
    "data/token_table": "data/test_prepare",
    "data/auditing/classes": "data/test_labelled",
    "data/encoding/label_encoding": "data/test_labelled",
    "data/batching/head_batches": "train/test_heads",
    "data/batching/answer_batches": "data/test_preferences",
    "data/batching/part_batches": "data/test_collate",
    "train/trainers/told": "train/test_heads",
    "report/class_tables": "train/test_heads",
    "recipe/embedding": "recipe/test_rules",
    "models/output_heads/head_chunk": "models/test_fused_head",
    "models/cast_choice": "models/test_step_casts",
    "models/sentence_files": "models/test_embedding",
    "train/trainers/retrieval": "train/test_embedding",
    "report/scores": "train/test_embedding",
    "data/auditing/answers": "data/test_preferences",
    "data/words": "data/test_rewards",
    "recipe/reinforcement": "recipe/test_rules",
    "recipe/distillation": "recipe/test_rules",
    "recipe/teaching": "train/test_distillation",
    "models/losses/distillation": "train/test_distillation",
    "models/teacher": "train/test_distillation",
    "report/teacher": "train/test_distillation",
    "train/trainers/rollouts": "train/test_policy",
    "train/vllm_server": "train/test_served_answers",
    "distributed/vllm_lines": "train/test_served_answers",
    "planner/generation": "train/test_policy",
    "report/rewards": "train/test_policy",
    "report/leading": "report/test_comparison",
    "train/trainers/reference": "train/test_preference",
    "train/checkpoints/sealing": "train/test_staging",
    "train/checkpoints/left_parts": "train/test_fast_folder",
    "train/health/sentry": "train/test_watchdog",
    "train/batching": "data/test_collate",
    "planner/question": "planner/test_build",
    "models/parallel/shared_rows": "models/test_sequence_parallel",
    "models/parallel/stage": "whole/test_pipeline",
    "train/trainers/pipelined": "whole/test_pipeline",
    "train/checkpoints/stage_files": "whole/test_pipeline",
    "train/trainers/stage_gradients": "whole/test_pipeline",
    "models/parallel/layer_sums": "models/test_tensor_parallel",
    "models/parallel/parts": "whole/test_expert_parallel",
    "models/parallel/process_groups": "train/test_preflight",
    "train/trainers/divided_experts": "whole/test_expert_parallel",
    "train/expert_load": "models/test_routing",
    "train/checkpoints/divided": "whole/test_tensor_parallel",
    "train/health/bad_batches": "train/test_batch_guard",
    "train/checkpoints/saved_state": "train/test_elastic",
    "data/rows": "data/test_formats",
    "distributed/layout": "distributed/test_engines",
    "distributed/exchanges": "train/test_preflight",
    "models/adapter_init": "train/test_initial",
    "models/quantization/stored_loading": "models/test_blockwise",
    "models/own_attention": "models/test_attention",
    "models/special_tokens": "train/test_merge",
    "models/layers": "models/test_tiled_mlp",
    "models/reading": "models/test_load",
    "models/output_heads/head_choice": "models/test_output_head",
    "models/tiny": "models/test_output_head",
    "planner/notes": "planner/test_build",
    "planner/plan": "planner/test_build",
    "report/manifest": "report/test_load",
    "report/page": "report/test_run_page",
    "report/run_charts": "report/test_run_page",
    "report/run_view": "report/test_run_page",
    "train/arguments": "distributed/test_engines",
    "recipe/dotted": "recipe/test_compose",
    "recipe/spelling": "recipe/test_errors",
    "data/encoding/chat_template": "data/test_encode",
    "data/encoding/template_limits": "data/test_encode",
    # Tables and types, tested by what reads them.
    "recipe/compilation": "models/test_compiled_layers",
    "models/compilers": "models/test_compiled_layers",
    "recipe/other_advice": "recipe/test_other_tools",
    "recipe/other_names": "recipe/test_other_tools",
    "recipe/base": "recipe/test_schema",
    "recipe/precisions": "distributed/test_engines",
    "recipe/sections": "recipe/test_show",
    "recipe/parallel": "recipe/test_show",
    "distributed/engine_state": "distributed/test_engines",
}
"""Module to the file with its tests, where that has another name."""


def test_every_module_has_its_tests_or_says_where_they_are() -> None:
    without = set()
    for module in (ROOT / "toolkit").rglob("[!_]*.py"):
        *packages, name = module.relative_to(ROOT / "toolkit").with_suffix("").parts
        package, folders = (packages[0], packages[1:]) if packages else ("", [])
        # A subpackage has a file for all of its modules; one that needs its own has the subpackage in its name.
        names = [name, *folders, "_".join([*folders, name])]
        if not any((TESTS / package / f"test_{each}.py").is_file() for each in names):
            without.add("/".join([*packages, name]))
    assert without == ELSEWHERE.keys()


def test_tests_of_modules_without_a_file_of_their_own_are_where_they_are_said_to_be() -> None:
    assert [path for path in ELSEWHERE.values() if not (TESTS / f"{path}.py").is_file()] == []
