"""Publishes a run's model on the Hugging Face Hub, once its files, its card and its licence are in order.

`huggingface_hub` sends it. What is checked here first: that the files are those the run wrote, that others can load
them, and that the card says under which licence they are, which the Hub shows and many tools ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import get_session, validate_repo_id

from toolkit.common import UserError, bytes_text, count_text, in_a_line, shell_line
from toolkit.data.reading.hub import silence
from toolkit.files import read_file, write_atomically
from toolkit.recipe.load import load_resolved
from toolkit.recipe.model_configs import BUILTIN_MODELS
from toolkit.report.card import EXPORT_PROOF, MERGE_PROOF, MERGED, is_hub_id, write_card
from toolkit.train.finished.export import final_model

_REFUSED = "log in with a token that may write there (`hf auth login`), or see whether the account's storage is used up"
_NETWORK = "try again with a network"
_PATIENCE = 300.0
"""Seconds without a byte after which a connection is given up; for a large commit the Hub takes up to a minute."""
_PARTIAL = "*.partial"
"""Files, such as the card, that another process writes right now or was killed while it wrote: none is sent."""
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def push(
    run: Path,
    repository: str,
    license: str | None,
    public: bool,
    branch: str | None,
    folder: Path | None,
    say: Callable[[str], None],
) -> str:
    """Sends the model or adapter of a finished run, or what was merged or exported of it, in one commit.

    Args:
        repository: `OWNER/NAME` on the Hub; it is made, private, if there is none.
        folder: Of the merged or exported model; None for the run's own.
        license: The Hub's name of one, such as `apache-2.0`; by default that of the base model.
        public: Whether a repository that is made now can be seen by everybody.
        branch: Of the repository; by default its main branch.
        say: Takes a line about what will be sent, before it is.

    Returns:
        Where it is now.

    Raises:
        UserError: Before anything is sent, if something is not in order; or if the Hub refuses it.
    """
    _check_name(repository)
    form = _made_of(run, folder) if folder else None
    final = folder or final_model(run)
    base = _loadable_base(run, final)
    if not (final / "README.md").is_file():
        recipe = load_resolved(run / "recipe.yaml")
        write_card(final, run, recipe, recipe.model.path, form)
    # The client itself would wait for ever, for each answer.
    if not constants.HF_HUB_OFFLINE and (reason := silence(constants.ENDPOINT)):
        raise UserError(f"the Hub at {constants.ENDPOINT} cannot be reached: {reason}", _NETWORK)
    get_session().timeout = _PATIENCE
    api = HfApi()
    try:
        card, terms = ModelCard.load(final / "README.md"), license or _license_of(api, base)
        if not terms:
            raise UserError(
                f"it is not known under which licence this model is: {base or 'its base model'} names none",
                "add license=NAME by the Hub's list, such as apache-2.0, as the base model and the data allow",
            )
        if not _LICENSE.fullmatch(terms):
            raise UserError(f"license={terms} is none of the Hub's names", "they are lower case, such as apache-2.0")
        card.data.license = terms
        card.validate()
        owner = api.whoami()["name"]
        files = sorted(file for file in final.rglob("*") if file.is_file() and not file.match(_PARTIAL))
        size = bytes_text(sum(file.stat().st_size for file in files))
        say(
            f"{count_text(len(files), 'file')}, {size}, under {terms}, as {owner} to {repository}: "
            + _names(final, files)
        )
        write_atomically(final / "README.md", str(card))
        api.create_repo(repository, private=not public, exist_ok=True)
        if branch:
            api.create_branch(repository, branch=branch, exist_ok=True)
        return _send(api, run, final, repository, branch)
    except LocalTokenNotFoundError:
        raise UserError("nobody is logged in to the Hub here", "run `hf auth login`, or set HF_TOKEN") from None
    except HfHubHTTPError as error:
        refused = error.response.status_code in (401, 403)
        raise UserError(f"the Hub refuses it: {_said(error)}", _REFUSED if refused else "try again later") from error
    except (HTTPError, ConnectionError) as error:
        raise UserError(f"the Hub cannot be reached: {in_a_line(error)}", _NETWORK) from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the Hub does not take the model card: {error}", f"correct {final / 'README.md'}") from error


def _send(api: HfApi, run: Path, final: Path, repository: str, branch: str | None) -> str:
    """Sends the files; what ends that has many types, of `huggingface_hub`'s threads and of `hf_xet`."""
    message = f"{run.resolve().name}: trained with accelerate-toolkit"
    try:
        done = api.upload_folder(
            repo_id=repository,
            folder_path=final,
            revision=branch,
            commit_message=message,
            ignore_patterns=[_PARTIAL],
        )
    except (HTTPError, UserError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise  # It is the disk.
        reasons = ": ".join(map(_said, filter(None, (error, error.__cause__))))
        raise UserError(
            f"the files did not all reach {repository}: {reasons}",
            f"the same command sends what is missing; where they are refused (401, 403, 422), {_REFUSED}",
        ) from error
    return str(done.commit_url)


def _said(error: BaseException) -> str:
    """An error in a line, with what the Hub itself says of it, which is none of the first lines."""
    said = getattr(error, "server_message", None)
    return f"{in_a_line(error)} {said}" if said and said not in in_a_line(error) else in_a_line(error)


def _check_name(repository: str) -> None:
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{repository}: {in_a_line(error)}", "write OWNER/NAME") from None
    if "/" not in repository:
        raise UserError(f"{repository} names no owner", f"write OWNER/{repository}")


def _made_of(run: Path, folder: Path) -> str:
    """What a folder holds of a run's model, as `write_card` calls it.

    Raises:
        UserError: If it was not made of this run alone.
    """
    proofs = [folder / name for name in (MERGE_PROOF, EXPORT_PROOF) if (folder / name).is_file()]
    if not proofs:
        raise UserError(
            f"folder={folder} holds nothing that was merged or exported",
            "name a folder that `toolkit merge` or `toolkit export` wrote, or leave it out for the run's own model",
        )
    proof = json.loads(read_file(proofs[0]))
    if "adapters" in proof:
        raise UserError(
            f"folder={folder} holds a weighted sum of adapters, of which no run measured anything",
            f"write a card for it and send it with `hf upload`: {folder / 'README.md'}",
        )
    # Of before this was noted, nothing is known.
    name = run.resolve().name
    if (made_of := proof.get("run", name)) != name:
        raise UserError(f"folder={folder} was made of the run {made_of}, not of {name}", "name that run")
    return str(proof.get("format", MERGED))


def _loadable_base(run: Path, final: Path) -> str | None:
    """The base model on the Hub, if it is there.

    Raises:
        UserError: If an adapter's base is not, so that nobody else could load it.
    """
    base = load_resolved(run / "recipe.yaml").model.path
    if is_hub_id(base):
        return base
    merged = f"merge it (`{shell_line('toolkit', 'merge', str(run))}`) and add folder={run / 'merged'}"
    if (final / "adapter_config.json").is_file() and base in BUILTIN_MODELS:
        raise UserError(
            f"this adapter's base is the built-in model, {BUILTIN_MODELS[base]} in 4 bits, which is not on the Hub: "
            "nobody else could load it",
            f"train from the model on the Hub (model.path={BUILTIN_MODELS[base]}), or {merged}",
        )
    if (final / "adapter_config.json").is_file():
        said = json.loads((final / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        raise UserError(
            f"this adapter's base, {Path(str(said)).name}, is not on the Hub: nobody else could load it",
            f"train from the base's id on the Hub (model.path=OWNER/NAME), or {merged}",
        )
    return None


def _license_of(api: HfApi, base: str | None) -> str | None:
    """The licence that the base model's card names."""
    data = api.model_info(base).card_data if base else None
    return data.license if data and isinstance(data.license, str) and data.license != "other" else None


def _names(final: Path, files: list[Path]) -> str:
    return ", ".join(str(file.relative_to(final)) for file in files)
