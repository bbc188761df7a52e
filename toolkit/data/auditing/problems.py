"""Which figures of a data set forbid training, and which may not be meant, each with what to change.

What cannot teach anything stops the run; what may be meant is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.common import count_text
from toolkit.data.auditing.audit import Audit, Problem, Side
from toolkit.data.statistics import DataStatistics
from toolkit.recipe import Recipe
from toolkit.recipe.heads import HEADED
from toolkit.recipe.preference import PREFERENCES

MIN_UNTRAINED_FATAL = 0.5


def find_problems(audit: Audit) -> Iterator[Problem]:
    """What is wrong with this data."""
    train, held_out = audit.train, audit.eval
    for name, side in (("training", train), ("held-out", held_out)):
        if side is not None and side.over_long.rows:
            yield from _over_long(name, side, audit.kinds)
    untrained = audit.untrained_rows
    seen = train.rows + untrained
    action = train.over_long.action
    learnt = "text or no label" if train.classes else "text of its own" if train.texts else "trained token"
    have, are = ("has", "is") if untrained == 1 else ("have", "are")
    where = f"first: {audit.first_untrained}" if audit.first_untrained else ""
    first = f" ({where})" if where else ""
    check_settings = "check `data.columns`, `data.format` and `data.train_on`, or raise `batch.seq_len`"
    if not train.rows:
        if untrained and not train.untrained_rows:
            check_settings = f"end rows with the answer to learn, or {check_settings}"
        left_out = f"{count_text(untrained, 'row has', 'rows have')} no {learnt}{first}, "
        left_out += count_text(train.over_long.rows, "is too long", "are too long")
        alike = f", both answers of {train.pairs.equal:,} are the same" if train.pairs and train.pairs.equal else ""
        yield Problem("fatal", f"no usable row: {left_out} (`data.over_long: {action}`){alike}", check_settings)
    elif untrained > MIN_UNTRAINED_FATAL * seen:
        why = "no text, or no known class" if train.classes else "no answer, or it was cut off"
        why = "a text is missing, or is the other" if train.texts else why
        what = f"{untrained:,} of {seen:,} rows {have} no {learnt} ({'; '.join(filter(None, (why, where)))})"
        yield Problem("fatal", what, check_settings)
    elif untrained:
        what = f"{untrained:,} of {seen:,} rows {have} no {learnt} and {are} left out{first}"
        yield Problem("warning", what, "fill or remove them")
    if train.prompts:
        yield from (Problem(level, *each) for level, *each in train.prompts.problems(train.rows))  # type: ignore[arg-type]
    learns_to_stop = audit.objective not in ("language_modelling", *HEADED) and not train.prompts
    if learns_to_stop and train.rows and not train.stop_trained_rows:
        # Those of GLM's models end with the token that begins the next turn, and write none behind the last.
        ended = "set `model.chat_template` to a file, e.g. a copy of this template, that ends the last answer"
        if set(audit.kinds) <= {"Segments", "Tokens"}:
            ended = "end what is trained in each row"
        stops = " or ".join(audit.chat_template.stops)
        yield Problem(
            "fatal",
            "the stop token is trained in no row, so the model would not learn to stop",
            f"{ended} with the model's stop token{f', {stops}' if stops else ''}"
            + (", or raise `batch.seq_len` so that ends are not cut off" if action == "truncate" else ""),
        )
    elif learns_to_stop and train.stop_trained_rows < 0.9 * train.rows:
        yield Problem(
            "warning",
            f"the stop token is trained in only {train.stop_trained_rows:,} of {train.rows:,} rows",
            "raise `batch.seq_len` or set `data.over_long: drop` if ends are cut off",
        )
    without = audit.kinds == ["Completion"] and audit.chat_template.source != "none"
    if audit.objective in ("sft", *PREFERENCES) and without:
        yield Problem(
            "warning",
            "prompts and completions are trained as they are, without the chat template that this model has",
            "for answers in a chat name the columns `instruction` and `output` with `data.columns`; to keep plain "
            "text, ask the trained model in plain text, too",
        )
    elif audit.chat_template.given and train.rows and not audit.chat_template.needed and audit.objective != "seq2seq":
        yield Problem(
            "warning",
            "no row is a conversation, so model.chat_template is read by none and only saved beside the model",
            "remove model.chat_template, or name the columns of a conversation with `data.columns`",
        )
    listed = dict.fromkeys(name for source in audit.sources for name in source.ignored)
    if absent := [name for name in listed if not any(source.ignored.get(name) for source in audit.sources)]:
        yield Problem(
            "warning",
            f"no row has {' or '.join(f'`{name}`' for name in absent)}, which `data.ignore` names",
            "write names as they stand in the data, or remove them from `data.ignore`",
        )
    for source in audit.sources:
        if source.verdicts:
            said = ", ".join(f"`{name}` says no in {rows:,}" for name, rows in source.verdicts.items())
            yield Problem(
                "warning",
                f"all of the {source.rows:,} rows of {source.path} are trained alike, though {said}",
                "if that says which rows are good, keep only those; if not, set "
                f"'data.ignore=[{', '.join(source.verdicts)}]'",
            )
        if source.set_aside:
            names = ", ".join(source.set_aside[:5]) + (", …" if len(source.set_aside) > 5 else "")
            yield Problem(
                "warning",
                f"{count_text(len(source.set_aside), f'file of {source.path} is', f'files of {source.path} are')} not "
                f"trained on, because of a word in the name that means held-out rows (test, eval, dev …): {names}",
                "rename them if they hold training rows, or name each file in `data.sources`; or use them: "
                "data.eval_split=test, or data.eval_split=validation",
            )
        for name, rows in source.worse.items():
            yield Problem(
                "warning",
                f"in {rows:,} of the {source.rows:,} rows of {source.path} the chosen answer is the worse one by "
                f"`{name}`",
                "swap the answers of these rows or remove them: they teach what is not wanted",
            )
        if source.empty_turns:
            rows_of = count_text(source.empty_turns, "row")
            yield Problem(
                "warning",
                f"in {rows_of} of {source.path} a turn that is trained says nothing, so the model would learn to end "
                "its turn at once",
                "remove these turns or rows, or set `train: false` in these messages",
            )
        if source.missing_values:
            rows_of = count_text(source.missing_values, "row")
            yield Problem(
                "warning",
                f"in {rows_of} of {source.path} what is learnt is `nan`, which is what pandas writes for a missing "
                "value",
                "remove these rows, or write the file without turning missing values into text",
            )
        if source.placeholders:
            yield Problem(
                "warning",
                count_text(source.placeholders, f"row of {source.path} has", f"rows of {source.path} have")
                + " a placeholder of a picture, sound or film (such as <image>), which is trained as plain text",
                "remove these rows: their answers describe what the model does not see",
            )
    if audit.duplicates and not audit.deduplicate:
        yield Problem(
            "warning",
            f"{count_text(audit.duplicates, 'row repeats', 'rows repeat')} an earlier row",
            "set `data.deduplicate: true`",
        )
    if audit.in_train_and_eval:
        yield Problem(
            "warning",
            count_text(audit.in_train_and_eval, "held-out row is", "held-out rows are")
            + " also trained on, so the held-out loss is too low",
            "remove them from one side, or hold a fraction out with `data.eval_split: 0.05`",
        )
    if merged := train.boundary_merged_rows:
        yield Problem(
            "warning",
            f"in {count_text(merged, 'row')} one token holds the end of the prompt and the start of the answer",
            "end prompts with a line break, or start completions with a space",
        )
    if lost := train.prompt_lost_rows:
        yield Problem(
            "warning",
            f"in {count_text(lost, 'row')} the chat template leaves out the system message, tools, or texts of "
            "`chat_template_kwargs`",
            "set `model.chat_template` to a template that writes them, or move them into the first user message",
        )
    if train.pairs:
        yield from (Problem("warning", *each) for each in train.pairs.problems())
    if train.classes and train.rows:
        of_words = audit.objective == "token_classification"
        for fatal, what, change in train.classes.problems(held_out is not None, of_words):
            yield Problem("fatal" if fatal else "warning", what, change)
    if train.texts and train.rows:
        for fatal, what, change in train.texts.problems(train.rows, held_out is not None):
            yield Problem("fatal" if fatal else "warning", what, change)
    for what, change in held_out.classes.strangers() if held_out and held_out.classes else ():
        yield Problem("warning", what, change)
    if held_out is not None and not held_out.rows:
        change = "check `data.eval_split`, `data.eval_sources` and `batch.seq_len`"
        strangers = [what for what, _ in held_out.classes.strangers()] if held_out.classes else []
        yield Problem("fatal", ": ".join(["no usable held-out row", *strangers]), change)


def check_batch(audit: Audit, sequences: int, global_batch_size: int) -> Audit:
    """The audit with a warning if all training sequences together are fewer than one global batch. Packed ones have
    several rows each, and texts that are split several for one row."""
    if sequences >= global_batch_size:
        return audit
    unit = "row" if sequences == audit.train.rows else "sequence"
    or_else = ", or set `data.packing: false`" if audit.packing else ""
    few = count_text(sequences, f"training {unit} does", f"training {unit}s do")
    what = f"{few} not fill one global batch of {global_batch_size:,}"
    problem = Problem("warning", what, f"lower `batch.global_batch_size`{or_else}")
    return audit.model_copy(update={"problems": [*audit.problems, problem]})


def check_weights(audit: Audit, desirable: float, undesirable: float) -> Audit:
    """The audit with a warning if, of judged answers with these weights, one kind counts much more than the other."""
    train = audit.train
    found = train.verdicts.problems(train.rows, (desirable, undesirable)) if train.verdicts and train.rows else ()
    return audit.model_copy(update={"problems": [*audit.problems, *(Problem("warning", *each) for each in found)]})


def with_settings(audit: Audit, recipe: Recipe, statistics: DataStatistics | None) -> Audit:
    """The audit with warnings of settings on which prepared data does not depend; of a stream there are no
    statistics."""
    preference = recipe.preference
    audit = check_weights(audit, preference.desirable_weight, preference.undesirable_weight)
    return check_batch(audit, statistics.rows, recipe.batch.sequences_per_step) if statistics else audit


def _over_long(name: str, side: Side, kinds: list[str]) -> Iterator[Problem]:
    """What there is to say about rows longer than `batch.seq_len`."""
    seq_len, action, long = side.over_long.seq_len, side.over_long.action, side.over_long.rows
    if action == "split" and kinds == ["Text"]:
        return
    lengths = side.lengths.percentiles
    what = (
        f"{long:,} of {side.seen_rows:,} {name} rows {'is' if long == 1 else 'are'} longer than "
        f"`batch.seq_len: {seq_len}`, "
        f"the longest has {lengths['max']:,} tokens ({side.longest})"
    )
    change = f"raise `batch.seq_len` (99% of the rows have at most {lengths['p99']:,} tokens)"
    if side.prompts:
        what = (
            f"`rollout.max_completion_tokens` leaves {seq_len:,} tokens to a prompt in `batch.seq_len`, and "
            f"{long:,} of {side.seen_rows:,} {name} prompts {'is' if long == 1 else 'are'} longer, the longest with "
            f"{lengths['max']:,} tokens ({side.longest})"
        )
        change = f"raise `batch.seq_len` (99% of the prompts have at most {lengths['p99']:,} tokens without an answer)"
    if effect := {"drop": "they are left out", "truncate": "their ends are cut off"}.get(action):
        yield Problem("warning", f"{what}; {effect}", f"{change} to keep them whole")
    elif action == "split":
        what += ", and `data.over_long: split` is for text, not for chats or completions"
        yield Problem("fatal", what, f"{change}, or set `data.over_long` to drop or truncate")
    else:
        ways = "drop" if side.prompts else "drop or truncate"
        if kinds == ["Text"]:
            ways = "drop, truncate or, with `objective: language_modelling`, split"
        yield Problem("fatal", what, f"{change}, or set `data.over_long` to {ways}")
