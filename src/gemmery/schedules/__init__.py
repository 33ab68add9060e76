"""How the programs of a launch walk over its tiles."""

from __future__ import annotations

from ..problem import Config, Problem
from .binding import Binding


def bind(problem: Problem, config: Config) -> Binding:
    """The binding of a problem and a config, of the kernel that the config is for.

    Raises:
        ValueError: the config does not suit the problem, or does not run here.
    """
    if config.schedule == "cluster":
        from .cluster import ClusterBinding

        return ClusterBinding(problem, config)
    if config.schedule == "specialized":
        from .specialized import SpecializedBinding

        return SpecializedBinding(problem, config)
    return Binding(problem, config)
