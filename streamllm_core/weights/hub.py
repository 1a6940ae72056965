"""Models by hub id, downloaded once through huggingface_hub: it resumes, and honours HF_ENDPOINT, HF_HOME, HF_TOKEN."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# The HTTP library's own root error, taken from here because the hub client has changed its library between versions.
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from streamllm_core.errors import ModelError
from streamllm_core.weights.folder import INDEX_FILE, SINGLE_FILE, FolderSource, shard_names

# Never pickles, and no code: only what is read here or by transformers' tokenizers.
_DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
_SUBFOLDERS = ["*/*"]  # patterns match across slashes; other formats of the same weights live in subfolders


def open_hub(repo: str, *, revision: str | None = None, token: str | bool | None = None) -> FolderSource:
    """Open a hub model, downloading what is not in the local cache yet.

    Raises ModelError that says what to do when the id or revision is unknown, access is denied or the hub cannot be
    reached, and when the repository has no safetensors.
    """
    with explained(repo, revision):
        folder = description(repo, revision, token)
        # The index tells which files are the weights: repositories may hold the same ones in other forms as well.
        index = folder / INDEX_FILE
        weights = sorted(set(shard_names(index).values())) if index.is_file() else [SINGLE_FILE]
        folder = _snapshot(repo, folder.name, token, [*_DESCRIPTIONS, *weights])
    return FolderSource(folder, name=repo, fingerprint={"hub": repo, "commit": folder.name})


def description(repo: str, revision: str | None, token: str | bool | None) -> Path:
    """The local folder of a hub model's configuration and tokenizer, without its weights."""
    return _snapshot(repo, revision, token, _DESCRIPTIONS)


@contextlib.contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub as ModelErrors that say what to do."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{repo}: access is restricted: accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo}: has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo}: neither a local folder nor a model on the hub; check the spelling, "
            "or set HF_TOKEN if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repo}: not (wholly) in the local cache, and the hub cannot be reached; connect, unset HF_HUB_OFFLINE, "
            f"or give a local folder ({_first_line(error)})"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{repo}: neither a local path nor a hub id ({_first_line(error)})") from error
    except HfHubHTTPError as error:
        hint = "; set HF_TOKEN to a valid token" if error.response.status_code in (401, 403) else "; try again later"
        raise ModelError(f"{repo}: the hub refused the download ({_first_line(error)}){hint}") from error
    except (NetworkError, OSError) as error:
        raise ModelError(
            f"{repo}: the download failed ({_first_line(error)}); the same command again carries on where it stopped"
        ) from error


def _snapshot(repo: str, revision: str | None, token: str | bool | None, patterns: list[str]) -> Path:
    with _bars_only_on_a_terminal():
        folder = snapshot_download(
            repo, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_SUBFOLDERS
        )
    return Path(folder)


@contextlib.contextmanager
def _bars_only_on_a_terminal() -> Iterator[None]:
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
