"""Tiny random models in Hugging Face folders, made offline, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Manifest, build_manifest
from forge_async.weights.packing import LocalShard, pack

KINDS = ("qwen3", "qwen3_untied", "llama", "llama_untied", "qwen3_odd", "qwen3_wide", "llama_wide_untied")
"""`qwen3` is the tied one that most tests use; `qwen3_odd` has a vocabulary that two ranks cannot share evenly, and the
wide ones have heads for two tensor-parallel ranks beside that."""

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen3_moe_wide": EXPERTS | {"moe_intermediate_size": 64},
    "qwen3_moe_mixed": EXPERTS
    | {"num_experts": 3, "moe_intermediate_size": 40, "norm_topk_prob": False, "mlp_only_layers": [0]},
}
"""Mixtures of experts. Half an expert of the wide one is as wide as the engine's kernel wants it. The mixed one has a
dense layer, weights that are not normalised, and experts that two ranks share unevenly and the engine pads."""


def make_model(
    folder: Path,
    kind: str = "qwen3",
    seed: int = 0,
    *,
    vocabulary: int = 98,
    max_positions: int = 256,
    deviation: float = 0.15,
) -> Path:
    """Write a model of `kind` with random weights: normal, by default so wide that predictions are far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    from forge_async.backends.hf_renderer import write_char_tokenizer

    config_class = LlamaConfig if kind.startswith("llama") else Qwen3MoeConfig if kind in MOE else Qwen3Config
    wide = "_wide" in kind
    config = config_class(
        **MOE.get(kind, {}),
        vocab_size=99 if wide or kind == "qwen3_odd" else vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4 if wide else 2,
        num_key_value_heads=2 if wide else 1,
        head_dim=16 if wide and kind.startswith("llama") else 32,
        intermediate_size=192,
        max_position_embeddings=max_positions,
        rope_theta=1e4,
        tie_word_embeddings=not kind.endswith("untied"),
        initializer_range=deviation,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_char_tokenizer(folder)
    return folder


def make_near_ties(folder: Path) -> Path:
    """A mixture whose experts tie but for rounding: which two of eight a token takes hangs on the last bits."""
    import torch
    from safetensors.torch import save_file

    weights = read_weights(make_model(folder, "qwen3_moe"))
    generator = torch.Generator().manual_seed(0)
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name] = weights[name][:1] + 2e-8 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_end(folder: Path) -> Path:
    """Take the end token out of a model's configuration, so that completions run to their token limit."""
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = None
        (folder / name).write_text(json.dumps(settings))
    return folder


def read_weights(folder: Path) -> dict[str, Any]:
    """Hugging Face name to tensor."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def manifest_of(weights: Mapping[str, Any], version: PolicyVersion) -> Manifest:
    """The manifest of whole weights that one rank publishes."""
    boxes = [
        LocalShard(name=name, tensor=each, global_shape=tuple(each.shape), offsets=(0,) * each.dim())
        for name, each in weights.items()
    ]
    return build_manifest(version, [pack(boxes, 0)[0]])


def random_adapter(folder: Path, base: Path, seed: int, *, targets: Sequence[str]) -> Path:
    """Write an adapter of rank 4 with large random matrices for the model in `base`, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    draws, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in read_weights(base).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            for half, shape in {"A": (4, weight.shape[1]), "B": (weight.shape[0], 4)}.items():
                tensors[f"base_model.model.{layer}.lora_{half}.weight"] = torch.randn(shape, generator=draws) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"r": 4, "lora_alpha": 6.0, "base_model_name_or_path": str(base), "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge_by_hand(folder: Path, to: Path) -> Path:
    """Write the model of a PEFT folder with its adapter added in, from nothing but what the files say."""
    import shutil

    from safetensors.torch import load_file, save_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    base, adapter = Path(settings["base_model_name_or_path"]), load_file(folder / "adapter_model.safetensors")
    weights = read_weights(base)
    for name in [name for name in adapter if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        product = adapter[f"{layer}.lora_B.weight"].double() @ adapter[name].double()
        below = f"{layer.removeprefix('base_model.model.')}.weight"
        weights[below] = (weights[below].double() + settings["lora_alpha"] / settings["r"] * product).float()
    shutil.copytree(base, to)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


class Reference:
    """transformers in float32 on one core."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V]."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(map(int, token_ids))])).logits[0].numpy()

    def experts(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What the routers of a mixture choose, ascending: int64 [T, layers with experts, experts a token]; and by how
        much the last one chosen beats the first that is not, in logits: float32 [T, layers with experts]."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([list(map(int, token_ids))]), output_router_logits=True).router_logits
        num_chosen = self.model.config.num_experts_per_tok
        best = torch.stack([each.view(len(token_ids), -1) for each in logits], 1).topk(num_chosen + 1)
        margins = best.values[..., -2] - best.values[..., -1]
        return best.indices[..., :num_chosen].sort(-1).values.numpy(), margins.numpy()

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float64 [T - 1], log-probability of each token after the first."""
        import torch

        return _taken(torch.from_numpy(self.logits(token_ids)), token_ids, temperature)

    def entropies(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float64 [T - 1], entropy of the distribution of each token after the first."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([list(map(int, token_ids))])).logits[0, :-1]
        logprobs = torch.log_softmax(logits.double() / temperature, -1)
        return -(logprobs.exp() * logprobs).sum(-1).numpy()


def mixed_logprobs(reads: Sequence[tuple[Reference, int]], token_ids: Sequence[int]) -> np.ndarray:
    """float64 [T - 1]: models read the tokens in turn, so many each, on the KV that those before them left."""
    import torch
    from transformers import DynamicCache

    ids, cache, logits, at = list(map(int, token_ids)), DynamicCache(), [], 0
    with torch.no_grad():
        for reference, count in reads:
            part = torch.tensor([ids[at : at + count]])
            if part.numel():
                logits.append(reference.model(part, past_key_values=cache, use_cache=True).logits[0])
            at += count
    return _taken(torch.cat(logits), token_ids, 1.0)


def _taken(logits: Any, token_ids: Sequence[int], temperature: float) -> np.ndarray:
    import torch

    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return np.array([float(logprobs[at, int(token)]) for at, token in enumerate(token_ids[1:])])
