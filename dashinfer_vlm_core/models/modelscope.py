"""The files of a model on ModelScope, by its HTTP API. They are stored in the cache of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from ..errors import CheckpointError
from .hub import HubFile, HubSnapshot, ListedFile, cache_folder, checked_files, invalid_list, is_safe_path

DOMAIN = "www.modelscope.cn"
DEFAULT_REVISION = "master"
MAX_LIST_BYTES = 20 * 10**6
TIMEOUT_SECONDS = 30.0


def list_modelscope_files(repo_id: str, *, revision: str | None) -> HubSnapshot:
    """Ask ModelScope which files a public model has. `MODELSCOPE_DOMAIN` replaces its domain.

    Its commits are those of files. The snapshot is named by a digest of all files instead.

    Raises:
        CheckpointError: there is no such model or revision, or the response is not valid.
        httpx.HTTPError: ModelScope cannot be reached.
    """
    name = revision or DEFAULT_REVISION
    if not is_safe_path(name):
        raise CheckpointError(f"`revision` {name!r} is not a branch or tag.", param="revision")
    domain = os.environ.get("MODELSCOPE_DOMAIN") or DOMAIN
    endpoint = domain.rstrip("/") if "://" in domain else f"https://{domain}"
    content = _get(f"{endpoint}/api/v1/models/{repo_id}/repo/files", repo_id, name)
    try:
        listed = [entry for entry in content["Data"]["Files"] if entry["Type"] != "tree"]
        files = checked_files(repo_id, (ListedFile(entry["Path"], entry["Size"], entry["Sha256"]) for entry in listed))
    except (LookupError, TypeError) as error:
        raise invalid_list(repo_id, f"something unexpected ({error!r})") from error
    return HubSnapshot(
        repo_id=repo_id,
        revision=name,
        commit=_digest(files),
        files=files,
        cache=cache_folder(),
        base_url=f"{endpoint}/models/{repo_id}/resolve/{name}",
        sends_token=False,
    )


def _get(url: str, repo_id: str, revision: str) -> Any:
    import httpx

    received = bytearray()
    query = {"Revision": revision, "Recursive": "true"}
    with httpx.stream("GET", url, params=query, timeout=TIMEOUT_SECONDS, follow_redirects=True) as response:
        if response.status_code in {401, 403, 404}:
            raise CheckpointError(
                f"ModelScope has no public model {repo_id!r} with the revision {revision!r}. Check its name at"
                " https://modelscope.cn.",
                param="model",
            )
        response.raise_for_status()
        for block in response.iter_bytes():
            received += block
            if len(received) > MAX_LIST_BYTES:
                raise invalid_list(repo_id, "too many files")
    try:
        return json.loads(received)
    except ValueError as error:
        raise invalid_list(repo_id, "something that is not JSON") from error


def _digest(files: tuple[HubFile, ...]) -> str:
    names = "".join(f"{file.path}\0{file.digest}\0" for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha1(names.encode(), usedforsecurity=False).hexdigest()
