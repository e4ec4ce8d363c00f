"""An application of Ray Serve that a test controls: it reads a JSON object per line, and writes one in response.

Its arguments are the port of the proxy and the number of CPUs that Ray assumes, which can exceed those of the machine.
"""

import dataclasses
import json
import logging
import os
import sys

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ServeDeploySchema

import dashinfer_vlm_ray
from dashinfer_vlm_ray import engine_replica


class ControlledReplica(engine_replica.EngineReplica):
    """A replica that also reports its counters, and can fail like one whose decoder cannot be restarted."""

    async def counts(self) -> dict:
        import torch  # the program itself does not need it

        stats = self._engine.stats()
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "active": stats.active_requests,
            "encoded": stats.vision.encoded,
            "store": dataclasses.asdict(stats.vision.store) if stats.vision.store else {},
        }

    async def fail(self) -> None:
        self._engine._running.pipeline.decoder.fatal_error = "a test"


def run(command: dict) -> object:
    if arguments := command.get("deploy"):
        serve.run(dashinfer_vlm_ray.app(arguments))
        return None
    if config := command.get("validate"):
        ServeDeploySchema.model_validate(config)
        return None
    handle = serve.get_deployment_handle("engine", "default")
    if method := command.get("broadcast"):
        try:
            return handle.broadcast(method).results(timeout_s=60, return_exceptions=True)
        except DeploymentUnavailableError:  # no replica is running now
            return []
    return handle.options(method_name=command["call"]).remote().result()


def main() -> None:
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints does not belong to the responses
    engine_replica.EngineReplica = ControlledReplica
    port, cpus = map(int, sys.argv[1:])
    memory = 200 * 1024 * 1024
    ray.init(
        num_cpus=cpus, include_dashboard=False, object_store_memory=memory, log_to_driver=False,
        logging_level=logging.WARNING,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    print(json.dumps({"result": ray.get_runtime_context().gcs_address}), file=output)
    for line in sys.stdin:
        try:
            result = {"result": run(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - the test reports it
            result = {"error": repr(error)}
        print(json.dumps(result, default=repr), file=output)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
