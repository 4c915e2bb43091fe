"""Prints what the replica directory of the Ray cluster of this host says."""

import json
from dataclasses import asdict

import ray

from cluster.application import APPLICATION
from cluster.directory import directory_actor

if __name__ == "__main__":
    ray.init(address="auto", namespace=APPLICATION, log_to_driver=False, logging_level="ERROR")
    print(json.dumps([asdict(record) for record in ray.get(directory_actor(APPLICATION).live.remote()).records]))
