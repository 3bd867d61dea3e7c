"""Checks the settings of a cluster. This module imports nothing heavy, so that the command line can call it before it
imports the libraries."""

from __future__ import annotations

from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnpreparedError
from smoe.load.check_zmq import check_zmq


def check_cluster(config: EngineConfig) -> None:
    """Check the settings of the cluster, before anything is read.

    Raises `ClusterError` if there is no cluster of this name. Raises `ConfigError` if pyzmq is missing, or if settings
    of a cluster are given without a cluster.
    """
    if config.cluster is None:
        if config.placement is not None:
            raise UnpreparedError(
                f"`placement={config.placement}` (an option, or part of the presets cluster and od-moe) divides "
                "experts among workers, so it needs a cluster: give the cluster's name with `cluster`, or use "
                "another preset",
                setting="placement",
                given=config.placement,
                allowed="only with `cluster`",
            )
        for name, is_given in {
            "cluster_verify": config.cluster_verify,
            "draft_on": config.draft_on == "cluster",
        }.items():
            if is_given:
                raise ConfigError.idle(name, getattr(config, name), "`cluster`")
        return
    check_zmq()
    from smoe.cluster.stored_identity import read_coordinator

    read_coordinator(config.cluster)
