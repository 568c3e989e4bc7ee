import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_async.learner.token_scores import Wanted, token_scores

DIM, VOCABULARY = 4, 50


class Largest(TorchDispatchMode):
    """Remembers the most entries that any operation gave, forward and backward."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, (tuple, list)) else [result]
        self.entries = max([self.entries, *(each.numel() for each in given if isinstance(each, torch.Tensor))])
        return result


def asked(chunk_tokens, entropy="gradient", shape=(2, 33), kept=0):
    """Scores, gradients of hidden states and weight, and the largest array on the way."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, DIM, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    others = torch.randint(VOCABULARY, (*shape, kept), generator=generator)
    kept_set = torch.cat([targets[..., None], others], -1) if kept else None
    wanted = Wanted(temperature=0.7, entropy=entropy, chunk_tokens=chunk_tokens)
    with Largest() as largest:
        logprobs, entropies = token_scores(lambda states: states @ weight.T, hidden, targets, wanted, kept_set)
        loss = (logprobs * torch.linspace(-1, 1, logprobs.numel()).view(shape)).sum()
        if entropy == "gradient":
            loss = loss + entropies.square().sum()
        loss.backward()
    return (logprobs, entropies), (hidden.grad, weight.grad), largest.entries


def relative(one, other):
    return float(((one - other).norm() / other.norm()).detach())


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 33, 65])
def test_chunks_give_what_the_whole_gives(chunk_tokens, kept):
    whole, chunked = asked(66, kept=kept), asked(chunk_tokens, kept=kept)
    for one, other in zip(chunked[0] + chunked[1], whole[0] + whole[1], strict=True):
        assert one.shape == other.shape
        assert relative(one, other) < 1e-6


def test_the_logits_of_all_tokens_are_never_held():
    assert asked(66)[2] == 66 * VOCABULARY
    assert asked(8)[2] <= max(8 * VOCABULARY, 66 * DIM)


def test_log_probabilities_and_entropies_are_those_of_the_softmax_at_the_temperature():
    logits = torch.tensor([[[0.0, 1.0, 2.0]]])
    targets = torch.tensor([[1]])
    logprobs, entropy = token_scores(lambda states: states, logits, targets, Wanted(
        temperature=0.5, entropy="figure", chunk_tokens=8))  # fmt: skip
    chosen = torch.distributions.Categorical(logits=logits / 0.5)
    assert logprobs.item() == pytest.approx(chosen.log_prob(targets).item(), rel=1e-6)
    assert entropy.item() == pytest.approx(chosen.entropy().item(), rel=1e-6)


def test_an_entropy_that_is_only_a_figure_has_no_gradient_and_one_not_wanted_is_not_there():
    assert not asked(8, entropy="figure")[0][1].requires_grad
    assert asked(8, entropy="none")[0][1] is None


def test_without_gradient_chunks_score_too():
    with torch.no_grad():
        hidden, targets = torch.randn(1, 9, DIM), torch.arange(9)[None]
        head = torch.randn(VOCABULARY, DIM)
        scored = [
            token_scores(lambda states: states @ head.T, hidden, targets, Wanted(chunk_tokens=size))[0]
            for size in (9, 4)
        ]
    assert relative(*scored) < 1e-6
