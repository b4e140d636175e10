"""Serving in virtual time: replicas with the real engine, driven by the requests of a workload.

    profile = load_profile("a10-llama2-7b-bgmv")
    adapters = SimAdapters(profile.geometry.page_layout(16))
    replicas = [Replica(profile, adapters) for _ in range(60)]
    records = simulate(requests, replicas, least_loaded)

Needs no tensor library.
"""

from .cluster import first, least_loaded, simulate, simulate_clients
from .records import Records, Served
from .replica import Replica

__all__ = ["Records", "Replica", "Served", "first", "least_loaded", "simulate", "simulate_clients"]
