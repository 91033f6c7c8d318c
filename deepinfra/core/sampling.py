"""How a token is drawn: the parameters, and the random numbers as a pure function.

A random number depends on (seed, choice, position, purpose) and, in a draw among tokens, on the token's id, and on
nothing else: not on the batch, the step, the drafts or how often the sequence was preempted. `stream_key` mixes the
four, `uniform` is that key as a number, and `token_uniform` is the key's own SplitMix64 stream, one number a token.

Source: the idea of stateless per-position streams is DeepInfer's (facts: sampling rules); mixing constants are those
of SplitMix64 (Steele, Lea, Flood, 2014). The four-way mix is our own. That the draw is a race, with a number for each
token, is the Gumbel-max trick (Maddison, Tarlow, Minka, "A* Sampling", 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ("Purpose", "SamplingParams", "stream_key", "token_uniform", "uniform")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a random number is for; separate streams, so that verification never shifts sampling."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen from logits. Order: logit_bias, penalties, temperature, top_k, top_p, min_p, draw.

    The draw is a race: of the tokens left, the one with the smallest `-log(token_uniform(key, token)) / p(token)` is
    taken, equals by lowest id. It falls on each token with its probability, whatever `p` is scaled by. A token's number
    does not depend on the other tokens, so a filter that keeps the token drawn changes nothing, and rounding that
    moves the probabilities by 1e-6 in sum moves the token about as often.

    Attributes:
        temperature: 0 means greedy (ties go to the lowest id).
        top_k: Keep the k likeliest; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches it, in (0, 1].
        min_p: Drop tokens below this share of the likeliest one's probability.
        repetition_penalty: Divides positive and multiplies negative logits of every token of prompt and output.
        presence_penalty: Subtracted once from logits of tokens already in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        logit_bias: Pairs (token, added to its logit).
        logprobs: `None` for none; else how many top alternatives besides the chosen token (0 to 20). They are
            log-softmax of the logits after logit_bias and penalties, before temperature and filters.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """The 64 bits that stand for one draw.

    Args:
        seed: Any integer; reduced modulo 2**64.
        choice: Which of a request's `n` answers.
        position: Index that the drawn token will have in the sequence (prompt included).
        purpose: What it is drawn for.
    """
    z = _mix(seed & _MASK)
    z = _mix(z ^ (choice & _MASK))
    return _mix(z ^ (((position << 2) | int(purpose)) & _MASK))


def uniform(seed: int, choice: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) for one draw; arguments as in `stream_key`."""
    return (stream_key(seed, choice, position, purpose) >> 11) * 2.0**-53


def token_uniform(key: int, token: int) -> float:
    """A token's number in a draw, strictly between 0 and 1.

    It is number `token` of the SplitMix64 generator that starts at `key`: its upper 52 bits and one half, over 2**52.
    With 53 bits the half would round the largest one up to 1, which would win every race.

    Args:
        key: From `stream_key`.
        token: Its id.
    """
    return ((_mix((key + token * _GOLDEN) & _MASK) >> 12) + 0.5) * 2.0**-52
