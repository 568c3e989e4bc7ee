"""`python -m forge_async.apps.bench NAME`: the measurements that docs/benchmarks.md explains."""
