"""An application of Ray Serve, with all its processes on this machine: ray_server.py PORT FOLDER [OPTION=VALUE ...].

Options are those of `serve run dashinfer_vlm_ray:app`. Ray's files are in the folder, whose path must be short, because
it contains sockets. Needs the extra `ray`.
"""

from __future__ import annotations

import signal
import sys

import ray
from ray import serve

import dashinfer_vlm_ray

CPUS = 64
"""CPUs that Ray assumes, so that replicas can be more than the machine's."""
OBJECT_STORE_BYTES = 200 << 20


def main() -> None:
    port, folder, *options = sys.argv[1:]
    ray.init(
        num_cpus=CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    arguments = dict(option.split("=", 1) for option in options)
    serve.run(dashinfer_vlm_ray.app(arguments))
    signal.pause()


if __name__ == "__main__":
    main()
