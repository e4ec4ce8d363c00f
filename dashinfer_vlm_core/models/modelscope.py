"""The files of a model on ModelScope, by its HTTP API. They are stored in the cache of Hugging Face."""

from __future__ import annotations

import hashlib
import os
from urllib.parse import urlencode

from ..errors import CheckpointError
from .hub import HubFile, HubSnapshot, ListedFile, cache_folder, checked_files, invalid_list, is_safe_path
from .hub_requests import get_page

DOMAIN = "www.modelscope.cn"
DEFAULT_REVISION = "master"


def list_modelscope_files(repo_id: str, *, revision: str | None) -> HubSnapshot:
    """Ask ModelScope which files a public model has. `MODELSCOPE_DOMAIN` replaces its domain.

    Its commits are those of files. The snapshot is named by a digest of all files instead.

    Raises:
        CheckpointError: the response is not valid.
        HubRefusal, httpx.HTTPError, OSError: there is none, see `open_response`.
    """
    name = revision or DEFAULT_REVISION
    if not is_safe_path(name):
        raise CheckpointError(f"`revision` {name!r} is not a branch or tag.", param="revision")
    domain = os.environ.get("MODELSCOPE_DOMAIN") or DOMAIN
    endpoint = domain.rstrip("/") if "://" in domain else f"https://{domain}"
    query = urlencode({"Revision": name, "Recursive": "true"})
    content = get_page(f"{endpoint}/api/v1/models/{repo_id}/repo/files?{query}", hub="modelscope").content
    try:
        listed = [entry for entry in content["Data"]["Files"] if entry["Type"] != "tree"]
        found = (ListedFile(entry["Path"], entry["Size"], entry["Sha256"]) for entry in listed)
        files = checked_files(repo_id, found, hub="modelscope")
    except (LookupError, TypeError) as error:
        raise invalid_list(repo_id, f"something unexpected ({error!r})", hub="modelscope") from error
    return HubSnapshot(
        repo_id=repo_id,
        revision=name,
        commit=_digest(files),
        files=files,
        cache=cache_folder(),
        base_url=f"{endpoint}/models/{repo_id}/resolve/{name}",
        hub="modelscope",
    )


def _digest(files: tuple[HubFile, ...]) -> str:
    names = "".join(f"{file.path}\0{file.digest}\0" for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha1(names.encode(), usedforsecurity=False).hexdigest()
