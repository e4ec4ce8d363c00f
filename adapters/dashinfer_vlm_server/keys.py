"""The former name of `dashinfer_vlm_server.api_keys`, until 0.3."""

from dashinfer_vlm_core.deprecation import warn_renamed

from . import api_keys

warn_renamed(__name__, api_keys.__name__, stacklevel=2)
Keys = api_keys.ApiKeys
