"""Every objective and correction against a second implementation, written from the papers in plain Python.

Samples are lists of tokens, sums are loops, and nothing of the package's mathematics is used. Values agree to 1e-9 in
float64; gradients with finite differences of the plain code, in which what a paper puts under a stop-gradient is held
at the base point (`held`).
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from forge_async.config.presets import CORRECTION_PRESETS, OBJECTIVE_PRESETS
from forge_async.learner.loss import objective_loss
from forge_async.learner.settings import OBJECTIVES, CorrectionSettings, ObjectiveSettings
from forge_async.replay.settings import CORRECTIONS
from tests.unit.learner.micro import counts_of, random_inputs

LENGTH = 9


@dataclass
class Token:
    """One sampled token: log-probabilities, advantage, age, and the turn it belongs to."""

    pi: float
    held: float
    mu: float
    advantage: float
    age: int
    turn: int
    value: float
    old_value: float
    earned: float


def samples_of(inputs, logprobs):
    """The micro-batch as lists of Tokens, masked ones left out."""
    samples = {}
    for b, row in enumerate(inputs.segments.tolist()):
        turn, last = 0, None
        for place, sample in enumerate(row):
            turn = 0 if sample != last else turn
            last = sample
            if inputs.mask[b, place] == 0:
                turn += 1
                continue
            token = Token(
                pi=float(logprobs[b, place]),
                held=float(inputs.logprobs[b, place].detach()),
                mu=float(inputs.behaviour_logprobs[b, place]),
                advantage=float(inputs.advantages[b, place]),
                age=int(inputs.ages[b, place]),
                turn=turn,
                value=float(inputs.values[b, place].detach()),
                old_value=float(inputs.old_values[b, place]),
                earned=float(inputs.returns[b, place]),
            )
            samples.setdefault(sample, []).append(token)
    return list(samples.values())


# Corrections: (log of the anchor, weight) of each token of a sample.


def rhos(sample):
    return [math.exp(t.held - t.mu) for t in sample]


def per_sample(weight):
    return lambda sample, low, high, threshold: [(t.held, weight(rhos(sample), low, high)) for t in sample]


def per_token(weight):
    return lambda sample, low, high, threshold: [
        (t.held, weight(rho, low, high)) for t, rho in zip(sample, rhos(sample), strict=True)
    ]


def geometric(sample, low, high, threshold):
    mean = math.prod(rhos(sample)) ** (1 / len(sample))
    return [(t.mu, 1.0 if low <= mean <= high else 0.0) for t in sample]


def opsm(sample, low, high, threshold):
    divergence = sum(t.mu - t.held for t in sample) / len(sample)
    advantage = sum(t.advantage for t in sample)
    return [(t.mu, 0.0 if advantage < 0 and divergence > threshold else 1.0) for t in sample]


def approximated(sample, low, high, threshold):
    found = []
    for t in sample:
        # v_behave = 0, v_current = age, v_made = age + 1: the proximal version is one before what the step makes.
        share = t.age / (t.age + 1)
        proximal = math.log(math.exp(t.mu) ** (1 - share) * math.exp(t.held) ** share)
        found.append((proximal, min(math.exp(proximal) / math.exp(t.mu), high)))
    return found


def impala(sample, low, high, threshold):
    turns = sorted({t.turn for t in sample})
    ratios = [math.prod(math.exp(t.held - t.mu) for t in sample if t.turn == turn) for turn in turns]
    weights, after = {}, 1.0  # after: v of the next turn, for a reward of 1 at the end
    for turn, ratio in reversed(list(zip(turns, ratios, strict=True))):
        weights[turn] = min(ratio, high) * after
        after = min(ratio, high) if turn == turns[-1] else min(ratio, 1.0) * after
    return [(t.held, weights[t.turn]) for t in sample]


PLAIN_CORRECTIONS = {
    "token_is": lambda sample, *_: [(t.mu, 1.0) for t in sample],
    "none": lambda sample, *_: [(t.held, 1.0) for t in sample],
    "token_truncated": per_token(lambda rho, low, high: min(rho, high)),
    "aipo": per_token(lambda rho, low, high: min(rho, high)),
    "decoupled": per_token(lambda rho, low, high: min(rho, high)),
    "token_masked": per_token(lambda rho, low, high: rho if rho <= high else 0.0),
    "icepop": per_token(lambda rho, low, high: rho if low <= rho <= high else 0.0),
    "sequence_truncated": per_sample(lambda all, low, high: min(math.prod(all), high)),
    "sequence_masked": per_sample(lambda all, low, high: math.prod(all) if math.prod(all) <= high else 0.0),
    "geometric_mask": geometric,
    "off_policy_mask": opsm,
    "decoupled_approx": approximated,
    "vtrace": impala,
}


# Objectives: what is maximised, for each token of a sample.


def ppo(ratio, advantage, low, high):
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def clipped(sample, anchors, low, high):
    return [ppo(math.exp(t.pi - a), t.advantage, low, high) for t, a in zip(sample, anchors, strict=True)]


def gspo(sample, anchors, low, high):
    mean = sum(t.pi - a for t, a in zip(sample, anchors, strict=True)) / len(sample)
    return [ppo(math.exp(mean), t.advantage, low, high) for t in sample]


def cispo(sample, anchors, low, high):
    found = []
    for t, a in zip(sample, anchors, strict=True):
        held_ratio = math.exp(t.held - a)
        found.append(max(1 - low, min(held_ratio, 1 + high)) * t.advantage * t.pi)
    return found


def rloo(sample, anchors, low, high):
    return [math.exp(t.pi - a) * t.advantage for t, a in zip(sample, anchors, strict=True)]


PLAIN_OBJECTIVES = {"gspo": gspo, "cispo": cispo, "rloo": rloo} | dict.fromkeys(
    ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo"), clipped
)


def plain_loss(inputs, logprobs, settings, correction, numbers):
    """The loss of a batch that is this micro-batch."""
    samples = samples_of(inputs, logprobs)
    if settings.normalise_advantages and settings.name != "ppo":
        normalise([t for sample in samples for t in sample])
    values = []
    for sample in samples:
        found = PLAIN_CORRECTIONS[correction](sample, numbers.low, numbers.high, numbers.threshold)
        scores = PLAIN_OBJECTIVES[settings.name](sample, [a for a, _ in found], settings.clip_low, settings.clip_high)
        values.append([score * weight for score, (_, weight) in zip(scores, found, strict=True)])
    sums, lengths = [sum(each) for each in values], [len(each) for each in values]
    tokens = [t for sample in samples for t in sample]
    critic = sum(value_error(t, settings.value_clip) for t in tokens) / len(tokens) if settings.name == "ppo" else 0.0
    return (
        settings.value_weight * critic
        - {
            "tokens": sum(sums) / sum(lengths),
            "sequence_means": sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums),
            "sequences": sum(sums) / len(sums),
            "constant": sum(sums) / (len(sums) * LENGTH),
        }[settings.denominator]
    )


def value_error(t, clip):
    near = t.old_value + min(max(t.value - t.old_value, -clip), clip)
    return max((t.value - t.earned) ** 2, (near - t.earned) ** 2) / 2


def normalise(tokens):
    mean = sum(t.advantage for t in tokens) / len(tokens)
    deviation = math.sqrt(sum((t.advantage - mean) ** 2 for t in tokens) / len(tokens))
    for t in tokens:
        t.advantage = (t.advantage - mean) / (deviation + 1e-8)


def slope(inputs, settings, correction, numbers, eps=1e-6):
    """[B, L] finite differences of the plain loss."""
    found = torch.zeros_like(inputs.mask)
    for place in inputs.mask.nonzero().tolist():
        step = torch.zeros_like(inputs.mask)
        step[tuple(place)] = eps
        ahead, behind = (
            plain_loss(inputs, inputs.logprobs.detach() + sign * step, settings, correction, numbers)
            for sign in (1, -1)
        )
        found[tuple(place)] = (ahead - behind) / (2 * eps)
    return found


def agree(settings, correction, numbers, seed):
    inputs = random_inputs(seed)
    terms = objective_loss(settings, correction, numbers)(inputs, counts_of(inputs))
    terms.loss.backward()
    plain = plain_loss(inputs, inputs.logprobs.detach(), settings, correction, numbers)
    assert float(terms.loss.detach()) == pytest.approx(plain, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(inputs.logprobs.grad, slope(inputs, settings, correction, numbers), rtol=1e-6, atol=1e-8)


def preset(name):
    """The objective's settings as its name sets them."""
    keys = {
        key.partition(".")[2]: value
        for key, value in OBJECTIVE_PRESETS.get(name, {}).items()
        if key.startswith("objective.")
    }
    return ObjectiveSettings(name=name, constant_tokens=LENGTH, **keys)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_as_its_paper_has_it(name, seed):
    agree(preset(name), "token_is", CorrectionSettings(), seed)


@pytest.mark.parametrize("name", ["grpo", "cispo"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_as_its_source_has_it(name, correction):
    keys = {key.partition(".")[2]: value for key, value in CORRECTION_PRESETS.get(correction, {}).items()}
    agree(ObjectiveSettings(name=name), correction, CorrectionSettings(**keys), 0)
    tight = CorrectionSettings(low=0.9, high=1.2, threshold=0.05)
    agree(ObjectiveSettings(name=name), correction, tight, 1)


def test_the_plain_code_notices_a_wrong_formula():
    """The comparison can fail: with another clip the two disagree."""
    inputs = random_inputs()
    settings, numbers = ObjectiveSettings(), CorrectionSettings()
    value = float(objective_loss(replace(settings, clip_high=0.3), "token_is")(inputs, counts_of(inputs)).loss.detach())
    assert abs(value - plain_loss(inputs, inputs.logprobs.detach(), settings, "token_is", numbers)) > 1e-4
