"""What a process sets before it imports vLLM, for an engine or for one rank of it."""

from __future__ import annotations

import os

from forge_async.core.packages import require_compiler

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # vLLM compiles one function of its sampler even in eager mode, which costs half a minute on a cold machine.
    "TORCHDYNAMO_DISABLE": "1",
}


def prepare(compiles: bool, *, threads: int, keeps_routing: bool = False) -> bool:
    """Set the environment, import vLLM and leave its linear layers unpacked; returns whether this is a CPU.

    Call it on the thread that will compute: on a CPU it does so with `threads` threads, of torch and of vLLM's kernels.
    """
    import torch

    from forge_async.backends.cpu_threads import compute_with

    on_cpu = not torch.cuda.is_available()
    os.environ.update(ENVIRONMENT)
    if keeps_routing:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second has no place for a recorder
    if on_cpu and compiles:
        require_compiler(feature="policy.compile=true")
    if on_cpu:
        compute_with(threads)
        os.environ.update({k: v for k, v in CPU_ENVIRONMENT.items() if not (compiles and "DYNAMO" in k)})
        import vllm._custom_ops as custom_ops

        custom_ops._supports_onednn = False
    return on_cpu
