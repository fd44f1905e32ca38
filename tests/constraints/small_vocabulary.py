"""A tokenizer of a few tokens, whose texts can be enumerated, and what constraints allow in it."""

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged_jax.constraints.build import Constraints
from paged_jax.constraints.interface import TokenConstraint
from paged_jax.loading.tokenizer import wrap
from paged_jax.sampling_params import SamplingParams

TEXTS = ("a", "b", "c", "ab", "bc", "abc")
END, PAD = 6, 7
TOKENIZER_SIZE, VOCAB_SIZE = 8, 40  # the model's vocabulary is padded


def small_tokenizer():
    vocab = {text: token for token, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>"), AddedToken("<pad>")])
    return wrap(tokenizer, eos_token="<end>", pad_token="<pad>")


TOKENIZER = small_tokenizer()
CONSTRAINTS = Constraints(TOKENIZER, VOCAB_SIZE, [END])


def constraint(**params) -> TokenConstraint:
    return CONSTRAINTS.of(SamplingParams(**params))


def allowed(
    constraint: TokenConstraint, output_token_ids: Sequence[int], vocab_size: int = VOCAB_SIZE
) -> set[int]:
    """The tokens that may follow; a constraint only ever clears bits."""
    mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    mask[-1] >>= -vocab_size % 32
    constraint.restrict(output_token_ids, mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
