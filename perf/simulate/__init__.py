"""Serving in virtual time: replicas with the real engine, driven by the requests of a workload.

    from chorus.perf.simulate.cluster import least_loaded, simulate
    from chorus.perf.simulate.replica import Replica

    profile = load_profile("a10-llama2-7b-bgmv")
    adapters = SimAdapters(profile.geometry.page_layout(16))
    replicas = [Replica(profile, adapters) for _ in range(60)]
    records = simulate(requests, replicas, least_loaded)

Needs no tensor library. The package itself imports nothing: the command line is read before anything heavy is loaded.
"""
