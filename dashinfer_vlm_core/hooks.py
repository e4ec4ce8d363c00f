"""The markers of plugin hooks. The hooks are specified in `plugins/hookspecs.py`."""

from __future__ import annotations

import pluggy

GROUP = "dashinfer_vlm"
"""Name of the pluggy project and of the entry point group of plugins."""

API_VERSION = 1
"""Version of the hooks and of the interfaces that they register. Plugins declare theirs in `dashinfer_vlm_api`."""

hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(GROUP)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(GROUP)
