"""How far rounding alone may take two float32 computations of one number apart, on any processor.

A float32 operation rounds its result by at most u = 2^-24 of it. A number that is reached through n operations, for
example n additions of a sum, is off by at most n u / (1 - n u) of what is added up, in whatever order that is done
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, chapters 3 and 4). That is the worst case, in
which all errors have one sign. Roundings go up as often as down: with n independent errors of mean zero, sqrt(n) u
takes the place of n u (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput.
41, 2019).
Neither n nor u depends on a processor's instructions, on a library or on the number of threads: those only choose the
order of the additions. So a limit here is

    4 * scale * sqrt(n) * u    of the largest right value,

where n counts the operations on the longest path from the inputs to the number: the lengths of the sums that follow
each other. `scale` is the size of what is added up relative to the sum: 1 where nothing cancels. 4 leaves room for the
largest of many numbers, and for the error that the other one of the two computations has as well.

No limit is above 9e-6: a relative error of 1e-5 in a result has to be found (test_tolerances.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trainer.config.schema.model import ModelConfig

U = 2.0**-24
SPARE = 4
LARGEST = 9e-6
U_BFLOAT16 = 2.0**-8
GRADIENTS_BFLOAT16 = 8 * U_BFLOAT16
"""Of gradients whose products take numbers in bfloat16 from those in float32. Such a gradient passes some thirty
roundings of at most u each, of weights, activations and gradients. With random signs they add up to at most
sqrt(30) = 5.5 u; the largest distance seen in twelve models is 3.5 u, of matrices and norms. Where terms cancel, as
they do in the biases of queries and keys and where these are normed, it is up to four times as much."""
SAME_ROUNDINGS = U_BFLOAT16 / 16
"""Root mean square of the distance between two computations that round the same numbers to bfloat16 and add in another
order, relative to that of the numbers. Their sums differ by some 2^-22 of them; one in a few thousand then lies on the
other side of the middle between two numbers in bfloat16, and moves by u. Where one of them rounds once more, all
numbers move by up to u, and this distance is about u / 3."""


def rounding_limit(*terms: int, scale: float = 1.0) -> float:
    """Returns largest relative difference by rounding.

    Args:
        terms: Lengths of the sums, and numbers of single operations, that follow each other on the longest path.
        scale: Size of what is added up relative to the result.
    """
    return min(SPARE * scale * math.sqrt(sum(terms)) * U, LARGEST)


class DecoderLimits(NamedTuple):
    """Of logits and losses, and of gradients, which the backward pass makes from all that the forward pass made."""

    loss: float
    gradients: float


def decoder_limits(settings: ModelConfig, rows: int = 1) -> DecoderLimits:
    """Limits for a decoder on `rows` sequences of full length."""
    hidden, tokens, head = settings.hidden_size, settings.seq_length, settings.head_size
    norm = hidden + 4  # the sum of squares; epsilon, root, product, weight
    attention = norm + hidden + 3 + head + tokens + 4 + tokens + settings.num_heads * head + 1
    #           the projections; rotation; scores; softmax; values; the output's projection; the residual
    layers = 0
    for layer in range(settings.num_layers + (settings.mtp_depth or 0)):
        width = settings.ffn_size
        if settings.is_moe_layer(layer):
            width = settings.expert_size + 2 * settings.experts.expert_num  # the router's softmax, the sum over experts
        layers += attention + norm + hidden + 4 + width + 1  # gate and up; SiLU; down; the residual
    if settings.mtp_depth:
        layers += settings.mtp_depth * (2 * norm + 2 * hidden)  # the projection of two normed states
    loss = layers + norm + hidden + settings.vocab_size + 4 + rows * tokens  # logits; log-sum-exp; the sum of losses
    return DecoderLimits(rounding_limit(loss), rounding_limit(2 * loss))
