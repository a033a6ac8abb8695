"""All tolerances of the tests, and why: mostly how far rounding alone may take two computations of a number apart.

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

`rounding_limit` is never above 9e-6: a relative error of 1e-5 in a result has to be found (test_tolerances.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trainer.config.schema.model import ModelConfig

# Unit roundoffs: half the distance from 1 to the next number.
U = 2.0**-24
U_FLOAT16 = 2.0**-11
U_BFLOAT16 = 2.0**-8

SPARE = 4
LARGEST = 9e-6

# ---- float32, computed twice: limits where the length of the sums is not worth a formula -----------------------------
#      Each is 4 sqrt(n) u, rounded to one digit.
FEW_OPERATIONS = 1e-6
"""n = 17: a handful of operations, or sums in the same order but for a few."""
SHORT_SUMS = 2e-6
"""n = 70: sums over ranks and micro-batches of gradients that are sums themselves."""
OPERATOR = 3e-6
"""n = 160: one operator, whose sums have some hundred terms."""
SEVERAL_OPERATORS = 1e-5
"""n = 1750: some layers forward and back."""
NEAR_ZERO = 1e-7
"""Absolute: numbers up to 1, or sums whose terms of this size cancel; 1.7 u."""
ADAMW_NEAR_ZERO = 2e-7
"""Absolute: moments and weights of size 1 that cancel."""
SUBNORMAL = 1e-35
"""Absolute: what an exponential may give instead of 0 below the normal numbers, which end at 1.2e-38."""

# ---- whole runs in float32, which differ in the order of sums --------------------------------------------------------
#      AdamW divides a gradient by its own size. An element near zero moves by a share of the learning rate that
#      rounding decides, and each step computes with what the one before left.
RUN_LOSSES = 1e-5
"""Of some twenty steps: a loss is a mean over all weights, in which the differences of elements cancel."""
RUN_NORMS = 1e-4
"""Of gradients, and of all elements of weights and state relative to the largest: nothing is averaged."""
RUN_LOCAL_NORMS = 1e-3
"""Of single parameters' gradients, and of single elements of weights: some are small beside what they are sums of."""
RUN_NEAR_ZERO = 1e-6
"""Absolute, beside a relative limit of a run, for elements and norms that are zero but for rounding."""
RUN_WEIGHTS = 2e-5
"""Absolute, of weights after twenty steps with a learning rate of some 1e-3: 2 % of the length of one step."""
RUN_STAGE_WEIGHTS = 1e-5
"""Absolute, beside RUN_NORMS, of the weights of pipeline stages."""
RUN_TENSOR_WEIGHTS = 2e-4
"""Absolute, of weights and state with tensor parallelism, where the forward pass, too, adds in another order."""
RUN_ROUTING = 1e-4
"""Absolute, of two logits: nearer ones may change their order."""
RUN_MOVES = 1e-4
"""Absolute, of a sum of some moves of 0.01."""
LONG_RUN_LOSSES = 1e-4
"""Of a hundred steps and more."""

# ---- half precision --------------------------------------------------------------------------------------------------
GRADIENTS_BFLOAT16 = 8 * U_BFLOAT16
"""Of gradients whose products take numbers in bfloat16 from those in float32. Such a gradient passes some thirty
roundings of at most u each, of weights, activations and gradients. With random signs they add up to at most
sqrt(30) = 5.5 u; the largest distance seen in twelve models is 3.5 u, of matrices and norms. Where terms cancel, as
they do in the biases of queries and keys and where these are normed, it is up to four times as much."""
GRADIENTS_FLOAT16 = 16 * U_FLOAT16
"""The same in float16, also of norms, softmax and rotary embedding. Rounding the weights of the tiny model once moves
its gradients by up to 2.2 u of the largest; the largest distance seen is 7 u."""
SAME_ROUNDINGS = U_BFLOAT16 / 16
"""Root mean square of the distance between two computations that round the same numbers to bfloat16 and add in another
order, relative to that of the numbers. Their sums differ by some 2^-22 of them; one in a few thousand then lies on the
other side of the middle between two numbers in bfloat16, and moves by u. Where one of them rounds once more, all
numbers move by up to u, and this distance is about u / 3."""
ATTENTION_BFLOAT16 = 1e-2
"""2.6 u: queries, keys, values and the output are rounded."""
FLOAT16_TWICE = 1e-3
"""2 u: an input and the result are rounded."""
FLOAT16_SUMS = 2e-3
"""4 u: the terms of a short sum are rounded, or the logits of a loss."""
EXPERTS_FLOAT16 = 0.05
"""Of gradients through a router and experts: their roundings move the gates that multiply whole rows."""
RUN_LOSSES_BFLOAT16 = U_BFLOAT16 / 2
"""A loss is a mean: the roundings of its terms cancel for the most part."""
RUN_NORMS_BFLOAT16 = 2 * U_BFLOAT16
"""Four times that of the loss, as GRADIENTS_BFLOAT16 explains."""

LOSS_IN_NF4 = 0.1
"""Of a loss after a training on a base in NF4, from that with the base in float32: codes move a matrix by some 10 %."""
DIVERGENCE_IN_FEW_BYTES = 0.1
"""Of the divergence from a teacher in NF4, whose codes move a matrix by some 10 %: the logits of a token move to both
sides, and of their changes the divergence sees the mean over the vocabulary."""
DIVERGENCE_BFLOAT16 = 4 * U_BFLOAT16
"""Of the divergence where products or the teacher's matrices are in bfloat16: logits of size 1 move by some u, and the
divergence by their mean, relative to differences of logits of size 1."""

# ---- gradients by finite differences of float32 losses: relative and absolute ----------------------------------------
#      With a step of 3e-3, the two values of a loss near 1 differ by rounding of some u, 1e-4 when divided by the step.
SLOPE = 0.01, 1e-4
ROUTER_SLOPE = 0.02, 2e-3
"""A token may choose other experts within the step, and the difference sees that."""

# ---- float64 and printed numbers -------------------------------------------------------------------------------------
FLOAT64 = 1e-15
"""Some four operations, of 2^-53 each."""
FLOAT64_SUMS = 1e-12
"""4 sqrt(n) 2^-53 with n = 5 million: sums of up to so many terms that do not cancel."""
SCHEDULE = 1e-12
"""Powers, cosines and their differences in float64, beside SCHEDULE_NEAR_ZERO."""
SCHEDULE_NEAR_ZERO = 1e-18
"""Absolute: learning rates that end at zero, of rates of some 1e-3."""
RATE_NEAR_ZERO = 1e-12
"""Absolute: learning rates that end at zero, rounded to float32."""
WHOLE_NUMBER = 1e-9
"""Absolute: a count, or a probability, that was divided and multiplied again in float64."""
PRINTED = 5e-7
"""Half a unit of the seventh digit: documentation prints eight digits of float32 numbers."""
DIFFERENCE_FROM_ONE = 1e-4
"""1.001 in float32 is off by u / 1e-3 = 6e-5 of its difference from 1."""
BETWEEN_STEPS = 1e-3
"""A peak of a cosine between two steps, from the nearer one."""
VISIBLE = 1e-3
"""A relative difference that no rounding makes in a result of one operator."""
FOUR_DECIMALS = 1e-4
"""Absolute: a page prints four decimals."""

# ---- estimates against measurements ----------------------------------------------------------------------------------
#      What the plan may be wrong by: it leaves out allocators, small arrays and code.
PLANNED_MEMORY = 0.1
DRY_RUN_MEMORY = 0.06
DRY_RUN_EXPERTS_MEMORY = 0.08
DRY_RUN_SMALL_MEMORY = 0.15
ATTENTION_MEMORY = 0.05
SMALL_ARRAYS = 0.01
"""Biases and norms, which a formula for matrices leaves out, beside sharded matrices."""
SMALLER_ARRAYS = 1e-3
"""The same beside matrices of a thousand rows."""
SMALL_NUMBERS_BYTES = 100
"""Sums over ranks of a step without a decoder beside the gradients: counts and losses."""
SUMS_BYTES = 1000
"""The same of a decoder, whose routers and norms are summed too."""
SIZES_OF_TWO_ROUNDINGS = 0.05
"""Of a ratio of sizes that are both rounded to multiples."""
SMALL_SIZE = 0.1
"""Of a size near a hundred that is rounded to a multiple."""
RECORD_BYTES = 0.02
"""Separators between records, which belong to none."""
EPOCH_PASSES = 0.03
"""The tokens at the end of a document that fill no sequence."""
BUBBLE = 0.13
"""The closed form of an interleaved pipeline counts all of the bubble, (p - 1) / (v m + p - 1) and more for a remainder
of micro-batches, of which a slow stage hides a part behind its other chunks."""
SECONDS_LEFT = 0.01
"""What moments of different weights add to a mean."""

# ---- statistics of random numbers, whose seed is fixed ---------------------------------------------------------------
#      Some standard deviations of what is measured: sqrt(p (1 - p) / n) of a frequency, sigma / sqrt(n) of a mean,
#      1 / sqrt(2 n) of a deviation, relative.
HALF_OF_4096 = 0.05
HALF_OF_200_000 = 0.01
FREQUENCY_OF_4000 = 0.03
DEVIATION = 0.05
MEAN = 0.001
"""A tenth of the deviation of a weight matrix."""
ADAPTER_DEVIATION = 0.1
ADAPTER_MEAN = 0.01
FRESH_LOSS = 0.1
"""Absolute, of the first loss of a small model, whose logits are near zero, from log(outcomes)."""
FRESH_LOSSES = 0.5
"""The same of all files in configs/, some of which start with larger weights or a few rows."""
ROUTED_ROWS = 0.2
"""Rows that choose an expert on each rank, against even shares."""
BALANCE_OF_MEANS = 0.1
"""A product of means over all layers against the mean of each layer's product."""
ACCURACY = 0.01
"""Of some hundred images after equal trainings: one or two may lie on the boundary of two classes."""


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
