"""Return the installed versions of packages."""

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

request = json.loads(Path(sys.argv[1]).read_text())
for module in request["imports"]:
    importlib.import_module(module)
Path(sys.argv[2]).write_text(json.dumps({name: version(name) for name in request["packages"]}))
